#!/usr/bin/env bash
# lab: one session with an RDMA path and a TCP path
# topology: one
# paths: 2
# limit: 150
# groups: issue ours

cable_bytes() {
    cat /sys/class/net/va1/statistics/tx_bytes
}

scenario() {
    local disk path packets bytes
    disk=$(brd_disk 128) || exit 1
    modprobe nbd nbds_max=2
    start_server --export "vol=$disk" --listen rdma://10.0.0.2 --listen tcp://10.0.1.2
    assert_true "the volume attaches over both" attach vol --path rdma://10.0.0.1@10.0.0.2 \
        --path tcp://10.0.1.1@10.0.1.2 --policy round-robin --device /dev/nbd0
    assert_within 20 "both paths are connected" are_connected vol 2
    assert_eq "their transports are shown" \
        "$(client_json status vol '[.paths[].transport] | join(" ")')" "rdma tcp"
    packets=$(rxe_counter rxa0 sent_pkts) bytes=$(cable_bytes)
    assert_true "fio reads back what it wrote" fio_run verify 100 --filename=/dev/nbd0 \
        --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=8 --numjobs=2 --ioengine=libaio \
        --size=32M --offset_increment=32M --time_based --runtime=20 --verify=crc32c \
        --verify_backlog=128 --verify_fatal=1
    for path in 0 1; do
        assert_num "path $path carried requests" "$(path_stat vol "$path" requests)" -gt 300
        assert_eq "path $path reported no errors" "$(path_stat vol "$path" errors)" 0
        assert_eq "path $path stayed connected" "$(path_stat vol "$path" reconnects)" 0
    done
    assert_num "the RDMA device sent packets" $(($(rxe_counter rxa0 sent_pkts) - packets)) -gt 1000
    assert_num "the other cable carried TCP" $(($(cable_bytes) - bytes)) -gt 4000000
    assert_eq "the other cable carried no RDMA" "$(rxe_counter rxa1 sent_pkts)" 0
    assert_eq "no request failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
    assert_true "the volume detaches" detach vol
    assert_true "the server exits cleanly" stop_server
}
