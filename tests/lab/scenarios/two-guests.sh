#!/usr/bin/env bash
# lab: server and client in two guests, two RDMA links: fio, then one falls silent, and goes down
# topology: two
# paths: 2
# limit: 400
# groups: issue ours

. tests/lab/topology.sh

server() {
    local disk
    disk=$(brd_disk 128) || exit 1
    start_server --export "vol=$disk" --listen rdma://10.0.0.2 --listen rdma://10.0.1.2
    pass "the server listens"
    tell serving
    hear silence 200
    topology_cut vb0
    tell is-silence
    hear mend 200
    topology_mend vb0
    tell is-mended
    hear down 200
    ip link set vb0 down
    tell is-down
    hear detached 200
    assert_true "the server exits cleanly" stop_server
}

# Runs half as long if other scenarios run too.
verify() { # name seconds
    [ -z "$LAB_QUICK" ] || set -- "$1" $(($2 / 2))
    fio_run "$1" $(($2 + 60)) --filename=/dev/nbd0 --direct=1 --rw=randrw --bs=4k --iodepth=8 \
        --ioengine=libaio --size=64M --time_based --runtime="$2" --verify=crc32c \
        --verify_backlog=128 --verify_fatal=1
}

errors() {
    client_json stats vol '[.ops[].errors] | add'
}

# Prints the longest time between answers, from fio's log of latencies, whose first column is the
# time of each answer in milliseconds.
longest_pause() { # name
    awk -F, 'NR > 1 && $1 - last > most { most = $1 - last } { last = $1 } END { print most + 0 }' \
        "$LAB_WORK/$1"_lat.*.log
}

# Runs fio while an event affects the link under path 0: path 1 continues.
disturb() { # silence|down
    local fio last now slow=0 before answers half=10
    [ -z "$LAB_QUICK" ] || half=6
    # All of fio's requests may wait on path 0 until its heartbeats fail, which takes longer on a
    # slow guest.
    half=$((half * LAB_SLOW))
    before=$(errors) answers=$(path_stat vol 0 answers)
    fio_run "$1" 90 --filename=/dev/nbd0 --direct=1 --rw=randread --bs=4k --iodepth=8 \
        --ioengine=libaio --size=64M --time_based --runtime=$((2 * half + 15)) \
        --continue_on_error=all --write_lat_log="$LAB_WORK/$1" &
    fio=$!
    sleep 5
    assert_num "$1: path 0 carries its share" $(($(path_stat vol 0 answers) - answers)) -gt 20
    tell "$1"
    hear "is-$1" 30
    [ "$1" = down ] || topology_cut va0
    last=$(path_stat vol 1 answers)
    for _ in 1 2; do
        sleep $half
        now=$(path_stat vol 1 answers)
        [ "$now" -gt "$last" ] || slow=$((slow + 1))
        last=$now
    done
    assert_eq "$1: path 1 answered in each of the next two periods of $half s" "$slow" 0
    assert_within 30 "$1: path 0 is known to be down" are_connected vol 1
    assert_eq "$1: path 1 stayed connected" "$(path_stat vol 1 reconnects)" 0
    assert_eq "$1: path 1 reported no errors" "$(path_stat vol 1 errors)" 0
    assert_within 90 "$1: fio ends" eval "! kill -0 $fio"
    now=$(errors)
    note "$(path_stat vol 0 failovers) requests failed over so far," \
        "$(fio_value "$1" '.jobs[0].read.total_ios') reads were done"
    note "the longest time without an answer to fio was $(longest_pause "$1") ms"
    assert_eq "$1: no request failed" $((now - before)) 0
    assert_num "$1: requests in flight failed over" "$(path_stat vol 0 failovers)" -gt 0
    assert_true "$1: fio reads back what it wrote over the remaining path" verify "one-$1" 10
    assert_eq "$1: there were no further errors" "$(errors)" "$now"
}

client() {
    local path
    modprobe nbd nbds_max=2
    hear serving 60
    assert_true "the volume attaches over two paths" attach vol --path rdma://10.0.0.1@10.0.0.2 \
        --path rdma://10.0.1.1@10.0.1.2 --device /dev/nbd0
    assert_within 30 "both paths are connected" are_connected vol 2
    assert_true "fio reads back what it wrote" verify both 20
    for path in 0 1; do
        assert_num "path $path carried requests" "$(path_stat vol "$path" requests)" -gt 100
        assert_num "rxa$path sent packets" "$(rxe_counter "rxa$path" sent_pkts)" -gt 500
    done
    disturb silence
    topology_mend va0
    tell mend
    hear is-mended 30
    assert_within 60 "path 0 reconnects" are_connected vol 2
    assert_true "fio reads back what it wrote over both again" verify again 10
    disturb down
    assert_true "the volume detaches" detach vol
    tell detached
}
