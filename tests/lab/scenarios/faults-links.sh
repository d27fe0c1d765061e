#!/usr/bin/env bash
# lab: links go down, fall silent in one or both directions, and all go down together, under load
# topology: one
# paths: 2
# limit: 420
# network: spoiled
# groups: failover issue ours

. tests/lab/faults.sh

cut_both() { topology_cut va0 && topology_cut vb0; }
mend_both() { topology_mend va0 && topology_mend vb0; }

one_link() {
    local n rounds=$1
    assert_true "the volume attaches over two paths" faults_attach vol /dev/nbd0
    assert_within 30 "both paths are connected" are_connected vol 2
    faults_begin down /dev/nbd0 $((rounds * 40))
    for ((n = 1; n <= rounds; n++)); do
        faults_round down "down-$n" 'topology_down_link a 0' 'topology_up_link a 0'
    done
    faults_end down "ip link set down"
    faults_stalls down "ip link set down on one of two paths, $rounds rounds" 500 1000
    note "path 0 was back ${BACK}ms after the link"
    BACK=
    faults_begin silent /dev/nbd0 160
    faults_round silent both-ways cut_both mend_both
    faults_round silent to-the-server 'topology_cut va0' 'topology_mend va0'
    faults_round silent to-the-client 'topology_cut vb0' 'topology_mend vb0'
    faults_end silent "a silent cable"
    faults_stalls silent \
        "packets of one of two paths dropped: both ways, to the server, to the client" 1000 1000
    note "path 0 was back ${BACK}ms after the cable"
    expect_num "requests in flight failed over" "$(path_stat vol 0 failovers)" -gt 0
    expect_eq "no request failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
}

# While both links are down for 20 s, IO of one session waits; IO of the other fails after 5 s.
no_link() {
    local errors path since
    assert_true "another session waits 5 s at most" faults_attach short /dev/nbd1 \
        --no-path queue-for=5s
    faults_begin gone /dev/nbd0 100
    timeout 60 fio --name=short --filename=/dev/nbd1 --direct=1 --rw=randwrite --bs=4k \
        --iodepth=1 --ioengine=libaio --size=1M --time_based --runtime=50 \
        >"$LAB_WORK/short.log" 2>&1 &
    errors=$!
    sleep 2
    faults_mark gone both-links-gone-for-20s
    since=$(date +%s%3N)
    for path in 0 1; do
        assert_true "link $path goes down" topology_down_link a "$path"
    done
    assert_within 20 "no path is left" are_connected vol 0
    wait $errors
    expect_eq "under queue-for=5s IO ended with an error" "$?" 1
    expect_num "not before 5 s" $(($(date +%s%3N) - since)) -ge 5000
    expect_match "the log reports it" "$(cat /run/rtrs/short.log)" 'no path for 5[0-9]{3} ms'
    sleep 12
    expect_true "the other session still waits" are_connected vol 0
    for path in 0 1; do
        assert_true "link $path comes up" topology_up_link a "$path"
    done
    assert_within 30 "both paths reconnect" are_connected vol 2
    sleep 2
    faults_end gone "both links down for 20 s"
    faults_stalls gone "both links down for 20 s, under queue-for=60s"
    expect_num "IO waited that long" "$FAULTS_MAX" -ge 15000
    assert_within 30 "the other session has its paths again" are_connected short 2
    expect_true "the other session serves IO" \
        dd if=/dev/nbd1 of=/dev/null bs=4k count=8 iflag=direct
}

scenario() {
    modprobe nbd nbds_max=4
    start_server --export vol=mem:64M --export short=mem:16M --listen rdma://10.0.0.2 \
        --listen rdma://10.0.1.2
    one_link "$([ -n "$LAB_QUICK" ] && echo 2 || echo 10)"
    no_link
    assert_true "the volume detaches" detach vol
    assert_true "the other session detaches" detach short
    assert_true "the server exits cleanly" stop_server
}
