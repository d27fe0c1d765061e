#!/usr/bin/env bash
# lab: RDMA devices are deleted and added under server and client, in use and idle
# topology: one
# paths: 2
# limit: 240
# network: spoiled
# groups: failover ours

. tests/lab/faults.sh

# Deletes a soft RDMA device. The deletion must succeed within 5 s, even while processes use it.
delete_link() { # text device
    local pid
    rdma link delete "$2" &
    pid=$!
    # Checked first, because a process that waits in the kernel cannot be killed.
    assert_within 5 "$1: rdma link delete $2 returns" eval "! kill -0 $pid 2>/dev/null"
    wait $pid
    expect_eq "$1: rdma link delete $2 succeeds" $? 0
    expect_false "$1: $2 is gone" test -e "/sys/class/infiniband/$2"
}

add_link() { # device
    rdma link add "$1" type rxe netdev "v${1#rx}"
}

scenario() {
    local device
    modprobe nbd nbds_max=4
    start_server --export vol=mem:64M --listen rdma://10.0.0.2 --listen rdma://10.0.1.2
    delete_link "a server without sessions" rxb0
    assert_within 20 "session list shows the lost portal" eval \
        "rtrs-server session list 2>&1 | grep -q 'not listening on rdma://10.0.0.2:1234: '"
    assert_true "rxb0 is added" add_link rxb0
    assert_within 20 "the server listens there again" grep -q \
        'listening on rdma://10.0.0.2:1234 again' "$LAB_WORK/server.log"
    assert_true "the volume attaches over two paths" faults_attach vol /dev/nbd0
    assert_within 30 "both paths are connected" are_connected vol 2

    # Memory kept for the next connect of a dead path must not hold the device either.
    assert_true "the cable of path 0 is cut" topology_cut vb0
    assert_within 30 "path 0 is reported as dead" are_connected vol 1
    for device in rxb0 rxa0; do
        delete_link "under a dead path" "$device"
        assert_true "$device is added" add_link "$device"
    done
    assert_true "the cable is repaired" topology_mend vb0
    assert_within 30 "path 0 reconnects" are_connected vol 2

    # The server's device, then the client's, each under load.
    faults_begin delete /dev/nbd0 120
    for device in rxb0 rxa0; do
        faults_mark delete "$device"
        delete_link "under load" "$device"
        assert_within 20 "without $device one path is left" are_connected vol 1
        sleep 2
        assert_true "$device is added" add_link "$device"
        assert_within 30 "with $device path 0 reconnects" are_connected vol 2
        sleep 1
    done
    faults_end delete "rdma link delete under two paths"
    faults_stalls delete "rdma link delete under one of two paths"
    expect_eq "no request failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
    expect_eq "path 1 stayed connected" "$(path_stat vol 1 reconnects)" 0

    # Nothing is left open after the session.
    assert_true "the volume detaches" detach vol
    for device in rxb0 rxb1 rxa1; do
        delete_link "after a session" "$device"
        assert_true "$device is added" add_link "$device"
    done
    assert_within 20 "the server listens on both again" eval \
        "[ \"\$(grep -c 'listening on rdma.* again' '$LAB_WORK/server.log')\" -ge 4 ]"
    assert_true "the volume attaches again" faults_attach vol /dev/nbd0
    assert_within 30 "both paths are connected again" are_connected vol 2
    assert_true "the volume detaches again" detach vol
    assert_true "the server exits cleanly" stop_server
}
