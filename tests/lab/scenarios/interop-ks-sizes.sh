#!/usr/bin/env bash
# lab: the kernel's client on our server: queue depths, chunks of 8 KiB to 1 MiB, poll queues
# topology: one
# paths: 1
# limit: 150
# groups: interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

scenario() {
    local depth chunk kib round=0
    for chunk in 8k 64k 1m; do
        case $chunk in
            8k) depth=500 kib=4 ;;
            64k) depth=2 kib=60 ;;
            1m) depth=64 kib=512 ;;
        esac
        round=$((round + 1))
        start_server --export vol=mem:16M --listen rdma://10.0.0.2 --queue-depth "$depth" \
            --chunk-size "$chunk"
        assert_true "depth $depth, chunks of $chunk: the client maps" ks_map "sizes$round" vol 1
        # The kernel's own limit is 128 segments.
        expect_eq "the maximum request size is as expected" \
            "$(sysfs_queue "$KS_DEV" max_hw_sectors_kb)" "$kib"
        assert_true "fio reads back what it wrote" ks_verify "sizes$round" 60 "$KS_DEV" \
            --numjobs=2 --size=4M --offset_increment=8M
        assert_true "the client unmaps" kernel_unmap "$KS_DEV"
        cell kernel-client "queue depth $depth, chunks of $chunk"
        assert_true "the server exits cleanly" stop_server
    done
    start_server --export vol=mem:16M --listen rdma://10.0.0.2:4321
    assert_true "the client maps with two poll queues, over another port" ks_map polls vol 1 \
        dest_port=4321 nr_poll_queues=2
    expect_eq "the path has a connection for each poll queue" "$(rxe_sent rxa0 | wc -l)" \
        $((1 + $(nproc) + 2))
    assert_true "fio reads back what it wrote" ks_verify polls 60 "$KS_DEV" --size=4M
    assert_true "fio reads and writes polling" fio_run hipri 60 --filename="/dev/$KS_DEV" \
        --direct=1 --rw=randrw --bs=4k --ioengine=pvsync2 --hipri --size=1M --verify=crc32c
    assert_true "the client unmaps" kernel_unmap "$KS_DEV"
    assert_true "the server exits cleanly" stop_server
    cell kernel-client "poll queues; a port of its own (dest_port=)"
    expect_quiet_server
}
