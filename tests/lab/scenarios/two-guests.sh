#!/usr/bin/env bash
# lab: server and client in two guests, two RDMA links: fio, then one link goes down and up
# topology: two
# paths: 2
# limit: 280
# groups: issue ours

server() {
    local disk
    disk=$(brd_disk 128) || exit 1
    start_server --export "vol=$disk" --listen rdma://10.0.0.2 --listen rdma://10.0.1.2
    pass "the server listens"
    tell serving
    hear cut 200
    # The client sees only silence.
    ip link set vb0 down
    tell is-cut
    hear mend 100
    ip link set vb0 up
    ip addr show dev vb0 | grep -q 10.0.0.2 || ip addr add 10.0.0.2/24 dev vb0
    tell is-mended
    hear detached 120
    assert_true "the server ends well" stop_server
}

verify() { # name seconds
    fio_run "$1" $(($2 + 60)) --filename=/dev/nbd0 --direct=1 --rw=randrw --bs=4k --iodepth=8 \
        --ioengine=libaio --size=64M --time_based --runtime="$2" --verify=crc32c \
        --verify_backlog=128 --verify_fatal=1
}

client() {
    local path fio last now slow=0 errors
    modprobe nbd nbds_max=2
    hear serving 60
    assert_true "it attaches over two paths" attach vol --path rdma://10.0.0.1@10.0.0.2 \
        --path rdma://10.0.1.1@10.0.1.2 --device /dev/nbd0
    assert_within 30 "both paths are connected" are_connected vol 2
    assert_true "fio reads back what it wrote" verify both 20
    for path in 0 1; do
        assert_num "path $path carried requests" "$(path_stat vol "$path" requests)" -gt 100
        assert_num "rxa$path sent packets" "$(rxe_counter "rxa$path" sent_pkts)" -gt 500
    done
    # What is in flight on the dying path may fail; nothing else may.
    fio_run through 120 --filename=/dev/nbd0 --direct=1 --rw=randread --bs=4k --iodepth=8 \
        --ioengine=libaio --size=64M --time_based --runtime=60 --continue_on_error=all &
    fio=$!
    sleep 5
    tell cut
    hear is-cut 30
    last=$(path_stat vol 1 answers)
    for _ in {1..10}; do
        sleep 3
        now=$(path_stat vol 1 answers)
        [ "$now" -gt "$last" ] || slow=$((slow + 1))
        last=$now
    done
    assert_eq "path 1 answered in each 3 s of the 30 after the cut" "$slow" 0
    assert_within 30 "path 0 is known to be down" are_connected vol 1
    assert_eq "path 1 never was lost" "$(path_stat vol 1 reconnects)" 0
    assert_eq "path 1 told no errors" "$(path_stat vol 1 errors)" 0
    wait $fio
    errors=$(client_json stats vol '[.ops[].errors] | add')
    note "$errors requests failed, $(fio_value through '.jobs[0].read.total_ios') reads were done"
    assert_num "at most what was in flight failed" "$errors" -le 8
    assert_true "fio reads back what it wrote over the path that is left" verify one 15
    assert_eq "without further errors" "$(client_json stats vol '[.ops[].errors] | add')" "$errors"
    tell mend
    hear is-mended 30
    assert_within 60 "path 0 comes back" are_connected vol 2
    assert_true "it detaches" detach vol
    tell detached
}
