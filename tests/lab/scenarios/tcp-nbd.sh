#!/usr/bin/env bash
# lab: our server and client over two TCP paths, the kernel's nbd-client on its socket
# topology: one
# paths: 2
# limit: 120
# groups: ours

scenario() {
    local disk path counts socket=$LAB_WORK/nbd.sock
    disk=$(brd_disk 64) || exit 1
    modprobe nbd nbds_max=2 max_part=8
    start_server --export "vol0=$disk" --listen tcp://10.0.0.2:1234 --listen tcp://10.0.1.2:1234
    assert_true "the volume attaches over two paths" attach vol0 --path tcp://10.0.0.1@10.0.0.2 \
        --path tcp://10.0.1.1@10.0.1.2 --socket "$socket"
    assert_eq "both paths are connected" "$(client_json status vol0 \
        '[.paths[] | select(.state == "connected")] | length')" 2
    assert_true "nbd-client connects the kernel to it" timeout 30 nbd-client -unix "$socket" \
        -N vol0 /dev/nbd0
    assert_eq "/dev/nbd0 has the disk's size" "$(blockdev --getsize64 /dev/nbd0)" \
        "$(blockdev --getsize64 "$disk")"
    assert_true "fio reads back what it wrote" fio_run verify 60 --filename=/dev/nbd0 \
        --direct=1 --rw=randwrite --bs=4k --iodepth=16 --ioengine=libaio --size=64M --io_size=8M \
        --verify=crc32c
    for path in 0 1; do
        assert_num "the cable of path $path carried data" \
            "$(cat "/sys/class/net/va$path/statistics/tx_bytes")" -gt 1000000
    done
    # Neither of the equal paths may be starved because of the order in which they connected.
    counts=$(client_json stats vol0 '[.paths[].requests] | (min * 100 / max | floor)')
    assert_num "the path with fewer requests carried this percentage of the other's" \
        "$counts" -ge 50
    assert_eq "no path is slow" "$(client_json status vol0 '[.paths[] | select(.slow)] | length')" 0
    assert_true "nbd-client disconnects" timeout 30 nbd-client -d /dev/nbd0
    assert_true "the volume detaches" detach vol0
    assert_true "the server exits cleanly" stop_server
}
