#!/usr/bin/env bash
# lab: one of two links goes down once under load, and reconnects; faults-links has the other faults
# topology: one
# paths: 2
# limit: 180
# network: spoiled
# groups: smoke failover ours

. tests/lab/faults.sh

scenario() {
    local n
    modprobe nbd nbds_max=4
    start_server --export vol=mem:64M --listen rdma://10.0.0.2 --listen rdma://10.0.1.2
    assert_true "the volume attaches over two paths" faults_attach vol /dev/nbd0
    assert_within 30 "both paths are connected" are_connected vol 2
    # On a slow guest, path 0 may have nothing in flight when its link goes down.
    faults_begin down /dev/nbd0 120
    for n in 1 2 3; do
        faults_round down "down-$n" 'topology_down_link a 0' 'topology_up_link a 0'
        [ "$(path_stat vol 0 failovers)" -eq 0 ] || break
    done
    faults_end down "ip link set down"
    faults_stalls down "ip link set down on one of two paths"
    note "path 0 was back ${BACK}ms after the link"
    expect_num "requests in flight failed over" "$(path_stat vol 0 failovers)" -gt 0
    expect_eq "no request failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
    assert_true "the volume detaches" detach vol
    assert_true "the server exits cleanly" stop_server
}
