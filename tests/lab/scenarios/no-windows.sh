#!/usr/bin/env bash
# lab: a device that reports memory windows that its provider library cannot create or bind
# topology: one
# paths: 1
# limit: 200
# groups: issue ours

# Tests a server whose provider lacks the calls, and a client of that server. The case is alloc
# (both calls are missing) or bind.
session() { # case words_of_the_log
    local before
    before=$(wc -l <"$LAB_WORK/server.log")
    NO_WINDOWS=$1 LD_PRELOAD=$LIBRARY start_server --export "vol=$disk" --listen rdma://10.0.0.2 \
        --listen tcp://10.0.0.2:1234 --queue-depth 64
    assert_match "$1: the server reports it" "$(tail -n +$((before + 1)) "$LAB_WORK/server.log")" \
        "requests on this device use no fresh keys .*$2"
    assert_true "$1: a session attaches over it" attach vol --path rdma://10.0.0.1@10.0.0.2 \
        --device /dev/nbd0
    assert_eq "$1: without fresh keys" "$(fresh_keys)" false
    assert_true "$1: fio reads back what it wrote" fio_run "$1" 60 --filename=/dev/nbd0 \
        --direct=1 --rw=randwrite --bs=4k --size=8M --iodepth=16 --ioengine=libaio --verify=crc32c
    assert_true "$1: the volume detaches" detach vol
    # TCP has windows of its own.
    assert_true "$1: a session attaches over TCP" attach vol --path tcp://10.0.0.1@10.0.0.2 \
        --device /dev/nbd0
    assert_eq "$1: with fresh keys" "$(fresh_keys)" true
    assert_true "$1: the volume detaches again" detach vol
    assert_true "$1: the server exits cleanly" stop_server
}

# Whether the requests of the only session have fresh keys.
fresh_keys() {
    timeout 20 rtrs-server session list -o json |
        jq -r '[.sessions[].paths[].fresh_keys] | unique[]'
}

scenario() {
    local disk out
    disk=$(brd_disk 16) || exit 1
    modprobe nbd nbds_max=2
    LIBRARY=$LAB_WORK/no_windows.so
    assert_true "the library compiles" timeout 120 gcc -shared -fPIC -o "$LIBRARY" \
        tests/lab/no_windows.c
    : >"$LAB_WORK/server.log"
    session alloc "the provider cannot create a window"
    session bind "a bind|the provider cannot bind a window"

    # With fresh keys required, the server refuses to start without them.
    out=$(LD_PRELOAD=$LIBRARY timeout 60 rtrs-server --export "vol=$disk" \
        --listen rdma://10.0.0.2 --always-invalidate on 2>&1)
    assert_eq "with always-invalidate: on the server does not start" "$?" 1
    assert_match "the server gives the reason" "$out" \
        'rxb0 has no memory windows .*always-invalidate: auto'

    # With the unmodified provider.
    start_server --export "vol=$disk" --listen rdma://10.0.0.2 --always-invalidate on \
        --queue-depth 64
    assert_true "with windows a session attaches" attach vol --path rdma://10.0.0.1@10.0.0.2 \
        --device /dev/nbd0
    assert_eq "with fresh keys, because they are required" "$(fresh_keys)" true
    assert_true "the volume detaches" detach vol
    assert_true "the server exits cleanly" stop_server
}
