#!/usr/bin/env bash
# lab: the kernel's client on our server: a cable falls silent under load; goes down (not quick)
# topology: one
# paths: 2
# limit: 330
# groups: interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh
# shellcheck source=tests/lab/topology.sh
. tests/lab/topology.sh

# Runs `ip link set down` at our end, which in that state sends no connection manager message. A
# kernel peer's end would, and with rdma_rxe of Linux 6.1 it could then never reconnect over that
# device.
link_down() {
    local fio writes
    ks_verify down 120 "$KS_DEV" --numjobs=2 --size=32M --offset_increment=32M --time_based \
        --runtime=50 &
    fio=$!
    sleep 3
    assert_true "the link under path 0 goes down" topology_down_link b 0
    assert_within 20 "our server notices" ks_log_says 'port 1 of rxb0 went down'
    assert_within 60 "the kernel's client notices" ks_states_are cut "1 connected 1 disconnected"
    assert_true "the link comes up" topology_up_link b 0
    assert_within 90 "path 0 reconnects" ks_states_are cut "2 connected"
    wait $fio
    expect_eq "fio got no error meanwhile" $? 0
    writes=$(ks_stat cut 0 3)
    assert_true "fio reads back what it wrote over both again" ks_verify after 60 "$KS_DEV" \
        --numjobs=2 --size=4M --offset_increment=32M
    expect_num "path 0 carried some of these writes" $(($(ks_stat cut 0 3) - writes)) -gt 20
    cell kernel-client "one of two links down under load (at our end), and up: no IO error"
}

scenario() {
    local fio since writes
    start_server --export vol=mem:64M --listen rdma://10.0.0.2 --listen rdma://10.0.1.2 \
        --heartbeat 1s
    assert_true "the client maps" ks_map cut vol 2
    ks_verify load 150 "$KS_DEV" --numjobs=2 --size=32M --offset_increment=32M --time_based \
        --runtime=60 &
    fio=$!
    assert_within 20 "both paths carry writes" eval \
        '[ "$(ks_stat cut 0 3)" -gt 50 ] && [ "$(ks_stat cut 1 3)" -gt 50 ]'
    assert_true "the cable of path 0 falls silent at both ends" eval \
        'topology_cut va0 && topology_cut vb0'
    since=$SECONDS
    # Our server notices unacknowledged data, or five missed heartbeats of 1 s.
    assert_within 30 "our server notices" ks_log_says 'path closing .*peer=10\.0\.0\.1:'
    note "our server noticed after about $((SECONDS - since)) s (it promises at most 7)"
    assert_within 60 "the kernel's client notices" ks_states_are cut "1 connected 1 disconnected"
    note "the kernel's client noticed after about $((SECONDS - since)) s (it promises 30 to 35)"
    cell kernel-client "a silenced peer is noticed by both ends"
    assert_within 20 "requests went to the other path" eval '[ "$(ks_stat cut 1 6)" -gt 0 ]'
    writes=$(ks_stat cut 1 3)
    assert_within 20 "path 1 continues" eval "[ \$(ks_stat cut 1 3) -gt $((writes + 50)) ]"
    assert_true "the cable is repaired" eval 'topology_mend va0 && topology_mend vb0'
    assert_within 90 "path 0 reconnects" ks_states_are cut "2 connected"
    note "path 0 was back after about $((SECONDS - since)) s"
    wait $fio
    expect_eq "fio got no error and verified its data" $? 0
    writes=$(ks_stat cut 0 3)
    assert_true "path 0 serves: fio verifies its data" ks_verify again 60 "$KS_DEV" \
        --numjobs=2 --size=4M --offset_increment=32M
    expect_num "path 0 carried some of these writes" $(($(ks_stat cut 0 3) - writes)) -gt 20
    [ -n "$LAB_QUICK" ] || link_down
    expect_eq "path 1 stayed connected" "$(cat "$KS_CLIENT"/cut/paths/*10.0.1*/stats/reconnects)" \
        "0 0"
    assert_true "the client unmaps" kernel_unmap "$KS_DEV"
    assert_true "the server exits cleanly" stop_server
    expect_eq "no request failed" "$(ks_reported errors)" 0
    expect_quiet_server
    cell kernel-client "one of two paths lost and back under load: no IO error, path returns"
}
