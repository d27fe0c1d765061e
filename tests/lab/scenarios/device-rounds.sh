#!/usr/bin/env bash
# lab: /dev/nbdX: 20 (quick: 6) rounds of attach, IO, detach
# topology: one
# paths: 1
# limit: 170
# groups: device

PORTAL=tcp://127.0.0.1:1234

round() { # number
    local dir=$LAB_WORK
    echo "attach"
    timeout 60 rtrs-client attach a --device /dev/nbd0 --path "$PORTAL" || return 1
    echo "write"
    dd if="$dir/data" of=/dev/nbd0 bs=128k count=8 seek="$1" oflag=direct || return 1
    echo "read"
    dd if=/dev/nbd0 bs=128k count=8 skip="$1" iflag=direct | cmp - "$dir/data" || return 1
    # Immediately, while udev probes the written data.
    echo "detach"
    timeout 60 rtrs-client detach a || return 1
    echo "free"
    ! test -e /sys/block/nbd0/pid
}

scenario() {
    local number rounds=20
    [ -z "$LAB_QUICK" ] || rounds=6
    cd "$LAB_WORK" || exit 1
    modprobe nbd nbds_max=2
    head -c 1M /dev/urandom >data
    rtrs-server --export a=mem:64M --listen "$PORTAL" >server.out 2>server.log &
    assert_within 10 "the server listens" grep -q listening server.out
    for ((number = 1; number <= rounds; number++)); do
        assert_true "round $number" round "$number"
    done
    expect_eq "no process is stuck" \
        "$(ps -e -o pid=,stat=,comm= | awk '$2 ~ /^D/ && $3 !~ /^kworker/')" "" hang
    kill %1
}
