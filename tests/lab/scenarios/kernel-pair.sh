#!/usr/bin/env bash
# lab: kernel rnbd client and server over two soft RDMA paths: proves the lab itself
# topology: one
# paths: 2
# limit: 120
# groups: kernel

scenario() {
    local disk device session=/sys/devices/virtual/rtrs-client/kp
    disk=$(brd_disk 64) || exit 1
    assert_true "the server's modules load" kernel_server 1234
    device=$(kernel_map sessname=kp path=ip:10.0.0.1@ip:10.0.0.2 path=ip:10.0.1.1@ip:10.0.1.2 \
        "device_path=$disk")
    assert_match "the client maps" "$device" '^rnbd[0-9]+$'
    assert_eq "it has the disk's size" "$(cat "/sys/block/$device/size")" \
        "$(cat /sys/block/ram0/size)"
    assert_eq "both paths are connected" \
        "$(cat "$session"/paths/*/state | sort | uniq -c | xargs)" "2 connected"
    assert_true "fio reads back what it wrote" fio_run verify 60 --filename="/dev/$device" \
        --direct=1 --rw=randwrite --bs=4k --iodepth=16 --ioengine=libaio --size=64M --io_size=8M \
        --verify=crc32c
    for path in 0 1; do
        assert_num "path $path carried data" "$(rxe_counter "rxa$path" sent_pkts)" -gt 500
    done
    assert_true "the client unmaps" kernel_unmap "$device"
    assert_false "its device is gone" test -e "/sys/block/$device"
}
