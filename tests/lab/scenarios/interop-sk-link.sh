#!/usr/bin/env bash
# lab: one of two links to the kernel's server falls silent under load; goes down (not quick)
# topology: one
# paths: 2
# limit: 240
# groups: interop issue ours

. tests/lab/interop_sk.sh
. tests/lab/topology.sh

# Runs `ip link set down` at our end, which then sends no connection manager message. A kernel
# peer's end would send one, and with rdma_rxe of Linux 6.1 it could then never reconnect over that
# device.
link_down() { # disk
    local fio reconnects
    reconnects=$(path_stat "$1" 0 reconnects)
    sk_verify down /dev/nbd0 40 --bsrange=4k-64k &
    fio=$!
    sleep 3
    assert_true "the link under path 0 goes down" topology_down_link a 0
    assert_within 20 "the client notices" are_connected "$1" 1
    sleep 3
    assert_true "the link comes up" topology_up_link a 0
    assert_within 60 "path 0 reconnects" are_connected "$1" 2
    wait $fio
    assert_eq "fio verified its data meanwhile" $? 0
    assert_num "path 0 was reconnected" "$(path_stat "$1" 0 reconnects)" -gt "$reconnects"
    assert_eq "path 1 stayed connected" "$(path_stat "$1" 1 reconnects)" 0
    assert_eq "no request failed meanwhile" "$(sk_errors "$1")" 0
    cell kernel-server "one of two links down under load (at our end), and up"
}

scenario() {
    local disk fio
    disk=$(brd_disk 64) || exit 1
    modprobe nbd nbds_max=2
    assert_true "the server's modules load" kernel_server 1234 always_invalidate=N
    assert_true "the volume attaches over two paths" sk_attach "$disk" 2 --device /dev/nbd0
    sk_verify load /dev/nbd0 45 --bsrange=4k-64k &
    fio=$!
    sleep 5
    assert_num "path 0 carries IO" "$(path_stat "$disk" 0 answers)" -gt 20
    topology_cut va0 && topology_cut vb0
    assert_within 40 "the silence is noticed" are_connected "$disk" 1
    sleep 5
    assert_eq "path 1 stayed connected" "$(path_stat "$disk" 1 reconnects)" 0
    topology_mend va0 && topology_mend vb0
    # The kernel's server holds the old path for up to 35 s, and refuses it until then.
    assert_within 60 "path 0 reconnects" are_connected "$disk" 2
    wait $fio
    assert_eq "fio read back what it wrote, without an error" $? 0
    assert_eq "no request failed" "$(sk_errors "$disk")" 0
    assert_num "what was in flight was resent" "$(path_stat "$disk" 0 failovers)" -gt 0
    assert_true "fio reads back what it wrote over both again" sk_verify again /dev/nbd0 5 \
        --bsrange=4k-64k
    cell kernel-server "one of two links silent under load, and back"
    [ -n "$LAB_QUICK" ] || link_down "$disk"
    assert_true "the volume detaches" detach "$disk"
    assert_true "the server's modules unload" kernel_server_gone
}
