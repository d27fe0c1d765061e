#!/usr/bin/env bash
# lab: the kernel's server is unloaded and loaded again under our client: the device continues
# topology: one
# paths: 2
# limit: 150
# groups: interop issue ours

. tests/lab/interop_sk.sh

# Writes and reads on the device, and compares the data.
works() { # round
    head -c 256k /dev/urandom >"$LAB_WORK/data" &&
        timeout 60 dd if="$LAB_WORK/data" of=/dev/nbd0 bs=64k seek="$1" oflag=direct &&
        timeout 60 dd if=/dev/nbd0 bs=64k skip="$1" count=4 iflag=direct status=none |
        cmp - "$LAB_WORK/data"
}

scenario() {
    local disk round waiting
    disk=$(brd_disk 64) || exit 1
    modprobe nbd nbds_max=2
    assert_true "the server's modules load" kernel_server 1234 always_invalidate=N
    assert_true "the volume attaches" sk_attach "$disk" 2 --device /dev/nbd0
    assert_true "IO works" works 0
    for round in 1 2; do
        assert_true "$round: the server's modules unload" kernel_server_gone
        assert_within 30 "$round: both paths are known to be down" are_connected "$disk" 0
        # Nothing is in flight; this IO waits for a path for up to --io-timeout.
        works "$round" >"$LAB_WORK/waiting.log" 2>&1 &
        waiting=$!
        sleep 2
        assert_true "$round: IO waits without a path" kill -0 $waiting
        assert_true "$round: they load again" kernel_server 1234 always_invalidate=N
        assert_within 40 "$round: both paths reconnect with our own short delay" \
            are_connected "$disk" 2
        wait $waiting
        expect_eq "$round: the waiting IO completed without an error" $? 0
        assert_true "$round: IO works" works $((round + 4))
        expect_eq "$round: errors" "$(sk_errors "$disk")" 0
    done
    expect_eq "the device is unchanged" "$(blockdev --getsize64 /dev/nbd0)" $((64 << 20))
    cell kernel-server "the server is unloaded and loaded again: reconnect, re-open, IO waits"
    assert_true "the volume detaches" detach "$disk"
    sk_expect_kernel_quiet
    assert_true "the server's modules unload finally" kernel_server_gone
}
