#!/usr/bin/env bash
# lab: the kernel's server is unloaded and loaded again under our client: the device goes on
# topology: one
# paths: 2
# limit: 150
# groups: interop issue ours

. tests/lab/interop_sk.sh

# Some reads and writes over the device, compared.
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
    assert_true "it attaches" sk_attach "$disk" 2 --device /dev/nbd0
    assert_true "IO works" works 0
    for round in 1 2; do
        assert_true "$round: its modules go" kernel_server_gone
        assert_within 30 "$round: both paths are known to be down" are_connected "$disk" 0
        # Nothing is in flight: this waits for a path, as long as --io-timeout says.
        works "$round" >"$LAB_WORK/waiting.log" 2>&1 &
        waiting=$!
        sleep 2
        assert_true "$round: IO waits without a path" kill -0 $waiting
        assert_true "$round: they load again" kernel_server 1234 always_invalidate=N
        assert_within 40 "$round: both paths come back by our own short delay" \
            are_connected "$disk" 2
        wait $waiting
        expect_eq "$round: what waited was done, without an error" $? 0
        assert_true "$round: IO works" works $((round + 4))
        expect_eq "$round: errors" "$(sk_errors "$disk")" 0
    done
    expect_eq "it is the device it was" "$(blockdev --getsize64 /dev/nbd0)" $((64 << 20))
    cell kernel-server "the server is unloaded and loaded again: reconnect, re-open, IO waits"
    assert_true "it detaches" detach "$disk"
    sk_expect_kernel_quiet
    assert_true "its modules go at last" kernel_server_gone
}
