#!/usr/bin/env bash
# lab: RDMA over a link that loses packets, windows bound at both ends: nothing fails, no path ends
# topology: one
# paths: 1
# limit: 200
# groups: ours
#
# On rdma_rxe of Linux 6.1, a bind that follows a repeated packet runs twice and fails unless binds
# use a separate queue pair (docs/explanation/fabric.md, "Binds on soft RoCE").

scenario() {
    local disk seconds=40 lost side
    [ -z "$LAB_QUICK" ] || seconds=20
    disk=$(brd_disk 64) || exit 1
    modprobe nbd nbds_max=2
    start_server --export "vol=$disk" --listen rdma://10.0.0.2 --always-invalidate=on
    assert_true "the volume attaches, with a window for each read" attach vol \
        --path rdma://10.0.0.1@10.0.0.2 --invalidate-reads on --device auto
    for side in a b; do
        assert_true "v${side}0 loses 3 packets in 1000" \
            tc qdisc add dev "v${side}0" root netem loss 0.3% limit 10000
    done
    assert_true "fio reads back what it wrote for $seconds s" fio_run verify $((seconds + 90)) \
        --filename=/dev/nbd0 --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=8 --numjobs=2 \
        --ioengine=libaio --size=32M --offset_increment=32M --time_based --runtime="$seconds" \
        --verify=crc32c --verify_backlog=64 --verify_fatal=1
    note "$(fio_value verify '.jobs[0] | "\(.read.total_ios) reads, \(.write.total_ios) writes"')"
    lost=$(($(rxe_counter rxa0 rcvd_seq_err) + $(rxe_counter rxb0 rcvd_seq_err)))
    assert_num "packets were repeated" "$lost" -gt 0
    assert_num "requests were carried" "$(path_stat vol 0 requests)" -gt 300
    assert_eq "no request failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
    assert_eq "the path stayed connected" "$(path_stat vol 0 reconnects)" 0
    for side in a b; do tc qdisc del dev "v${side}0" root; done
    assert_true "the volume detaches" detach vol
    assert_true "the server exits cleanly" stop_server
}
