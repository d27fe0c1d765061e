#!/usr/bin/env bash
# lab: ping and doctor against rtrs-server over RDMA and TCP, doctor against the kernel's server
# topology: one
# paths: 2
# limit: 240
# groups: issue ping

ping_json() { # name path argument...
    local name=$1
    shift
    timeout 60 rtrs-client ping "$@" -o json >"$LAB_WORK/$name.json" 2>"$LAB_WORK/$name.err" \
        </dev/null || {
        cat "$LAB_WORK/$name.err"
        return 1
    }
}

doctor() { # name path
    timeout 60 rtrs-client doctor "$2" >"$LAB_WORK/$1.out" 2>&1 </dev/null
    local status=$?
    cat "$LAB_WORK/$1.out"
    return $status
}

scenario() {
    local path mode
    modprobe brd rd_nr=1 rd_size=65536
    : >"$LAB_WORK/server.log"
    start_server --export vol=/dev/ram0 --listen rdma://10.0.0.2 --listen tcp://10.0.1.2
    for path in rdma://10.0.0.1@10.0.0.2 tcp://10.0.1.1@10.0.1.2; do
        expect_true "$path: 50 rounds of two queue pairs" ping_json pong "$path" -c 50 -i 0 -n 2 \
            -s 64k
        expect_eq "$path: all rounds were answered" "$(jq .answered "$LAB_WORK/pong.json")" 100
        for mode in read-lat write-lat; do
            expect_true "$path: $mode" ping_json "$mode" "$path" -m $mode -c 200
            note "$(jq -c '.latency_us[] | select(. != null)' "$LAB_WORK/$mode.json" | head -n 1)"
        done
        for mode in read-bw write-bw; do
            expect_true "$path: $mode" ping_json "$mode" "$path" -m $mode -c 200 -d 8
            expect_true "$path: $mode both ways" ping_json "$mode" "$path" -m $mode -c 100 \
                --duplex
            expect_num "$path: the server transferred data too" \
                "$(jq .bandwidth.there.operations "$LAB_WORK/$mode.json")" -gt 0
        done
        expect_true "$path: with a key for each read" ping_json inv "$path" -c 20 -i 0 \
            --read-invalidate
        expect_true "$path: doctor reports no failure" doctor "${path%%:*}" "$path"
        cat "$LAB_WORK/${path%%:*}.out"
    done
    expect_true "invalidating sends over TCP" ping_json sinv tcp://10.0.1.1@10.0.1.2 -c 20 -i 0 \
        --server-invalidate
    expect_false "invalidating sends over RDMA are refused" ping_json sinv \
        rdma://10.0.0.1@10.0.0.2 -c 1 --server-invalidate
    expect_match "the refusal gives the reason" "$(cat "$LAB_WORK/sinv.err")" \
        'has no keys that a peer may invalidate'
    expect_eq "no session was opened" \
        "$(grep -c -e 'path connected' -e opened "$LAB_WORK/server.log")" 0
    assert_true "the server exits cleanly" stop_server
    expect_eq "no RDMA object is left" "$(rdma_objects)" "0 0 0 0 0"
    assert_true "the kernel's server runs" kernel_server 1235
    expect_true "doctor accepts the kernel's server" doctor kernel \
        rdma://10.0.0.1@10.0.0.2:1235
    cat "$LAB_WORK/kernel.out"
    expect_match "the kernel's server answers no pings" "$(cat "$LAB_WORK/kernel.out")" 'warn +ping'
    expect_match "the kernel's server accepts a handshake" "$(cat "$LAB_WORK/kernel.out")" \
        'ok +handshake'
}
