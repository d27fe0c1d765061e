#!/usr/bin/env bash
# lab: the kernel's client on our server: a file that grows, sysfs resize, a reconnect
# topology: one
# paths: 1
# limit: 150
# groups: interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

has_size() { # bytes
    [ "$(blockdev --getsize64 "/dev/$DEV")" = "$1" ]
}

scenario() {
    truncate -s 16M "$LAB_WORK/vol.img"
    start_server --export "vol=$LAB_WORK/vol.img" --listen rdma://10.0.0.2
    assert_true "the client maps" ks_map grow vol '' "path=ip:10.0.0.1@ip:10.0.0.2"
    DEV=$KS_DEV
    truncate -s 32M "$LAB_WORK/vol.img"
    assert_within 10 "the server notices" grep -q 'export resized' "$LAB_WORK/server.log"
    expect_true "the kernel is sent nothing" has_size $((16 << 20))
    expect_true "the device continues" dd if=/dev/zero "of=/dev/$DEV" bs=4k count=1 oflag=direct
    assert_true "its sysfs file accepts the size" \
        eval "echo $((32 << 20 >> 9)) >/sys/block/$DEV/rnbd/resize"
    assert_true "the device has the new size" has_size $((32 << 20))
    expect_true "the new space can be written" dd if=/dev/zero "of=/dev/$DEV" bs=1M seek=31 \
        count=1 \
        oflag=direct
    assert_true "the file grows by command" rtrs-server export resize vol --size 64M
    assert_true "its path is disconnected" rtrs-server session disconnect grow
    assert_within 60 "after the reconnect the device has the new size" has_size $((64 << 20))
    expect_true "the new space can be written" dd if=/dev/zero "of=/dev/$DEV" bs=1M seek=63 \
        count=1 \
        oflag=direct
    cell kernel-client "an export that grows: by sysfs resize, and by a reconnect"
    assert_true "the client unmaps" kernel_unmap "$DEV"
    assert_true "the server exits cleanly" stop_server
}
