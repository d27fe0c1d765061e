#!/usr/bin/env bash
# lab: our client and the kernel's server idle for 45 s (LAB_LONG=1: 10 min), and one is silenced
# topology: one
# paths: 2
# limit: 150
# groups: interop issue ours

. tests/lab/interop_sk.sh
. tests/lab/topology.sh

server_paths() {
    find /sys/devices/virtual/rtrs-server/*/paths -mindepth 1 -maxdepth 1 -type d 2>/dev/null |
        wc -l
}

has_paths() { # number
    [ "$(server_paths)" = "$1" ]
}

scenario() {
    local disk seconds=45 before answered
    disk=$(brd_disk 16) || exit 1
    assert_true "the server's modules load" kernel_server 1234 always_invalidate=N
    assert_true "the volume attaches" sk_attach "$disk" 2 --socket "$LAB_WORK/s" --shards 1
    assert_true "the server has both paths" has_paths 2
    # Path 1 goes silent in both directions; path 0 has nothing to do.
    topology_cut va1 && topology_cut vb1
    before=$(rxe_counter rxa0 sent_pkts)
    SECONDS_BEFORE=$SECONDS
    # There are 2 s of silence, then a heartbeat goes unanswered for 5 more periods.
    assert_within 40 "the silence is noticed" are_connected "$disk" 1
    note "after $((SECONDS - SECONDS_BEFORE)) s; the limit is 12"
    expect_match "the client gives the reason" \
        "$(client_json status "$disk" '.paths[1].last_error')" \
        '(silent|timed out|no answer)'
    # The kernel promises 30 to 35 s.
    assert_within 90 "the kernel's server notices too" has_paths 1
    while [ $((SECONDS - SECONDS_BEFORE)) -lt "$seconds" ]; do sleep 1; done
    assert_eq "path 0 is still connected" "$(connected "$disk")" 1
    assert_eq "path 0 stayed connected" "$(path_stat "$disk" 0 reconnects)" 0
    answered=$(client_json status "$disk" '.paths[0].heartbeat_us')
    assert_num "its heartbeats are answered, the last in us" "$answered" -gt 0
    assert_num "packets of path 0 meanwhile" $(($(rxe_counter rxa0 sent_pkts) - before)) -gt 12
    topology_mend va1 && topology_mend vb1
    assert_within 40 "path 1 reconnects" are_connected "$disk" 2
    cell kernel-server "heartbeats: idle for $seconds s, a silenced end noticed by both"
    if [ -n "${LAB_LONG:-}" ]; then
        sleep 600
        assert_eq "after 10 minutes both are connected" "$(connected "$disk")" 2
        assert_eq "after 10 minutes path 0 was never lost" "$(path_stat "$disk" 0 reconnects)" 0
    fi
    assert_true "the volume detaches" detach "$disk"
    # Messages about the path that went silent.
    sk_expect_kernel_quiet 'HB|hb|heartbeat|unreachable|timed? ?out|transport retry'
    assert_true "the server's modules unload" kernel_server_gone
}
