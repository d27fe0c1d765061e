#!/usr/bin/env bash
# lab: the kernel's client on our server: stopped, killed and started again, remap_device
# topology: one
# paths: 2
# limit: 150
# groups: interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

# Two servers, so that one wait of the kernel's (31 s to a reconnect) serves both.
scenario() {
    local stopped killed first second
    truncate -s 16M "$LAB_WORK/stopped.img" "$LAB_WORK/killed.img"
    start_server --export "vol=$LAB_WORK/stopped.img" --listen rdma://10.0.0.2
    first=$LAB_SERVER
    assert_true "a device of the one server" ks_map stopped vol 1
    stopped=$KS_DEV
    start_server --export "vol=$LAB_WORK/killed.img" --listen rdma://10.0.1.2
    second=$LAB_SERVER
    KS_DEV=$(kernel_map sessname=killed path=ip:10.0.1.1@ip:10.0.1.2 device_path=vol)
    killed=$KS_DEV
    assert_match "a device of the other" "$killed" '^rnbd[0-9]+$'
    for dev in "$stopped" "$killed"; do
        assert_true "$dev: fio writes" fio_run "before-$dev" 60 --filename="/dev/$dev" --direct=1 \
            --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio --size=4M --verify=crc32c \
            --do_verify=0
    done
    LAB_SERVER=$first
    assert_true "the one stops" stop_server
    kill -9 "$second"
    wait "$second" 2>/dev/null
    for dev in "$stopped" "$killed"; do
        assert_within 20 "$dev: the client notices at once" ks_dev_state_is "$dev" closed
        # The kernel's client does not let IO wait for a path.
        expect_false "$dev: meanwhile IO fails" dd if="/dev/$dev" of=/dev/null bs=4k count=1 \
            iflag=direct
    done
    start_server --export "vol=$LAB_WORK/stopped.img" --listen rdma://10.0.0.2
    first=$LAB_SERVER
    start_server --export "vol=$LAB_WORK/killed.img" --listen rdma://10.0.1.2
    for dev in "$stopped" "$killed"; do
        assert_within 60 "$dev: it is open again" ks_dev_state_is "$dev" open
        assert_true "$dev: fio finds what it wrote" fio_run "after-$dev" 60 --filename="/dev/$dev" \
            --direct=1 --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio --size=4M \
            --verify=crc32c --verify_only
        assert_true "$dev: it goes on" ks_verify "on-$dev" 60 "$dev" --size=4M --offset=8M
        expect_match "$dev: one reconnect" \
            "$(cat "$KS_CLIENT/$(<"/sys/block/$dev/rnbd/session")"/paths/*/stats/reconnects)" '^1 '
        assert_true "$dev: it unmaps" kernel_unmap "$dev"
    done
    assert_true "a server ends well" stop_server
    LAB_SERVER=$first
    assert_true "the other server ends well" stop_server
    expect_quiet_server
    cell kernel-client "server stopped or killed and started again: reconnects, device goes on"
}
