#!/usr/bin/env bash
# lab: fio with verification, 4 jobs, 60 s (quick: 15), two RDMA paths: every connection carries IO
# topology: one
# paths: 2
# limit: 200
# groups: issue ours

scenario() {
    local disk path after idle core seconds=60 before=()
    [ -z "$LAB_QUICK" ] || seconds=15
    disk=$(brd_disk 128) || exit 1
    modprobe nbd nbds_max=2
    start_server --export "vol=$disk" --listen rdma://10.0.0.2 --listen rdma://10.0.1.2
    assert_true "the volume attaches over two paths" attach vol --path rdma://10.0.0.1@10.0.0.2 \
        --path rdma://10.0.1.1@10.0.1.2 --device auto
    assert_within 20 "both paths are connected" are_connected vol 2
    for path in 0 1; do
        rxe_sent "rxa$path" >"$LAB_WORK/before$path"
        # The service connection and one per shard, at each end.
        assert_eq "path $path has a connection for each shard and a service connection" \
            "$(wc -l <"$LAB_WORK/before$path")" "$(($(nproc) + 1))"
        before[path]=$(rxe_counter "rxa$path" sent_pkts)
    done
    assert_true "fio reads back what it wrote for $seconds s" fio_run verify $((seconds + 60)) \
        --filename=/dev/nbd0 --direct=1 --rw=randrw --bsrange=4k-64k \
        --iodepth=8 --numjobs=4 --ioengine=libaio --size=32M --offset_increment=32M \
        --time_based --runtime="$seconds" --verify=crc32c --verify_backlog=128 --verify_fatal=1
    note "$(fio_value verify '.jobs[0] | "\(.read.total_ios) reads, \(.write.total_ios) writes"')"
    for path in 0 1; do
        assert_num "path $path carried requests" "$(path_stat vol "$path" requests)" -gt 500
        assert_eq "path $path reported no errors" "$(path_stat vol "$path" errors)" 0
        assert_eq "path $path stayed connected" "$(path_stat vol "$path" reconnects)" 0
        after=$(rxe_counter "rxa$path" sent_pkts)
        assert_num "rxa$path sent packets" $((after - before[path])) -gt 1000
        rxe_sent "rxa$path" >"$LAB_WORK/after$path"
        # Counted by the kernel's packet numbers; the service connection carries only heartbeats.
        idle=$(join "$LAB_WORK/before$path" "$LAB_WORK/after$path" |
            awk '{ sent = ($3 - $2 + 16777216) % 16777216 } sent < 200' | wc -l)
        assert_num "every connection of path $path for IO sent packets" "$idle" -le 1
        assert_eq "no connection of path $path was replaced" \
            "$(join "$LAB_WORK/before$path" "$LAB_WORK/after$path" | wc -l)" "$(($(nproc) + 1))"
    done
    for ((core = 0; core < $(nproc); core++)); do
        assert_num "shard $core carried IO" "$(client_json stats vol ".cores[$core].ios")" -gt 500
    done
    assert_eq "no request failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
    assert_true "the volume detaches" detach vol
    assert_true "the server exits cleanly" stop_server
}
