#!/usr/bin/env bash
# lab: three /dev/nbdX of one session, two with local names, taken over after a kill under load
# topology: one
# paths: 1
# limit: 240
# groups: device failover

PORTAL=tcp://127.0.0.1:1234

# A request that takes longer than io-timeout fails, even in a slow guest.
SESSION=(--device auto --path "$PORTAL" --takeover --no-path fail
    --io-timeout $((1500 * LAB_SLOW))ms --device-timeout $((4 * LAB_SLOW))s)

attach_session() { # names
    timeout 60 rtrs-client attach "$@" "${SESSION[@]}"
}

# Prints the device of a volume.
device_of() { # name
    rtrs-client status "$1" -o json | jq -r .device
}

# Writes data that is unique to the volume and stores it in the file NAME.data.
write_own() { # name
    head -c 4M /dev/urandom >"$1.data"
    timeout 60 dd "if=$1.data" "of=$(device_of "$1")" bs=64k oflag=direct conv=fsync status=none
}

holds_own() { # name
    timeout 60 dd "if=$(device_of "$1")" bs=64k count=64 iflag=direct status=none | cmp - "$1.data"
}

# Reads a device repeatedly until the file `enough` exists.
read_on() { # device
    until [ -e enough ]; do
        timeout 100 dd "if=$1" of=/dev/null bs=64k iflag=direct status=none || return 1
    done
}

scenario() {
    local name pid device loads=()
    cd "$LAB_WORK" || exit 1
    modprobe nbd nbds_max=8
    rtrs-server --export a=mem:16M --export two=mem:32M --export big=mem:64M --listen "$PORTAL" \
        >server.out 2>server.log &
    SERVER=$!
    assert_within 20 "the server listens" grep -q listening server.out
    assert_true "two volumes attach" attach_session a two --as a --as b
    assert_true "a third volume joins" \
        timeout 60 rtrs-client attach big --as c --session a --device auto
    expect_eq "the volumes share one process" \
        "$(rtrs-client list -o json | jq '[.[].pid] | unique | length')" 1
    expect_eq "each volume has a device" \
        "$(for name in a b c; do device_of "$name"; done | sort -u | wc -l)" 3
    for name in a b c; do
        expect_eq "$name has its size" "$(lsblk -bdno SIZE "$(device_of "$name")")" \
            "$(rtrs-client status "$name" -o json | jq .size)"
        assert_true "$name is written" write_own "$name"
    done
    for name in a b c; do expect_true "$name has its own data" holds_own "$name"; done

    pid=$(rtrs-client list -o json | jq -r '.[0].pid')
    for name in a b c; do
        device=$(device_of "$name")
        read_on "$device" &
        loads+=($!)
    done
    sleep 1
    kill -9 "$pid"
    while [ -e "/proc/$pid" ]; do sleep 0.05; done
    assert_true "all volumes are taken over by the name of one" attach_session two --as b
    touch enough
    for name in "${loads[@]}"; do
        wait "$name"
        expect_eq "the reader got no error" "$?" 0
    done
    expect_eq "the other volumes are open" \
        "$(rtrs-client list -o json |
            jq -r '[.[] | select(.state == "open").name] | sort | join(" ")')" \
        "a b c"
    expect_eq "the other volumes have their exports" \
        "$(rtrs-client list -o json | jq -r 'sort_by(.name) | map(.export) | join(" ")')" \
        "a two big"
    for name in a b c; do expect_true "$name has its own data" holds_own "$name"; done

    expect_true "b detaches" timeout 60 rtrs-client detach b
    for name in a c; do expect_true "$name continues" holds_own "$name"; done
    expect_true "a detaches" timeout 60 rtrs-client detach a
    expect_true "c continues" holds_own c
    expect_true "c detaches" timeout 60 rtrs-client detach c
    assert_within 5 "no device is left" eval '! ls /sys/block/nbd*/pid 2>/dev/null'
    expect_false "nothing is kept for a takeover" test -e /run/rtrs/c.volume
    kill $SERVER
    wait $SERVER
    expect_eq "the server exits cleanly" "$?" 0
}
