#!/usr/bin/env bash
# lab: kernel rnbd client and server in two guests over two links: proves the pair of guests
# topology: two
# paths: 2
# limit: 150
# groups: kernel

server() {
    brd_disk 64 >/dev/null || exit 1
    assert_true "the server's modules load" kernel_server 1234
    tell serving
    hear unmapped 140
}

client() {
    local device path
    hear serving 60
    device=$(kernel_map sessname=kp path=ip:10.0.0.1@ip:10.0.0.2 path=ip:10.0.1.1@ip:10.0.1.2 \
        "device_path=/dev/ram0")
    assert_match "the client maps" "$device" '^rnbd[0-9]+$'
    assert_true "fio reads back what it wrote" fio_run verify 90 --filename="/dev/$device" \
        --direct=1 --rw=randwrite --bs=4k --iodepth=16 --ioengine=libaio --size=64M --io_size=4M \
        --verify=crc32c
    for path in 0 1; do
        assert_num "path $path carried data" "$(rxe_counter "rxa$path" sent_pkts)" -gt 500
    done
    assert_true "the client unmaps" kernel_unmap "$device"
    tell unmapped
}
