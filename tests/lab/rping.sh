#!/usr/bin/env bash
# Functions for the ping scenarios: rdma-core's rping at either end, over soft RoCE or soft iWARP
# (siw). Sourced in the guest.

# Adds a soft iWARP device on each end of a path, in place of the soft RoCE ones, which would use
# the same addresses. Our endpoint needs no device; rping does.
siw_up() { # path
    local path=$1 side
    loaded siw || load siw || return 1
    for side in a b; do
        timeout 60 rdma link delete "rx$side$path" || return 1
        rdma link add "siw$side$path" type siw netdev "v$side$path" || return 1
        wait_until 30 "siw$side$path to be active" \
            grep -q ACTIVE "/sys/class/infiniband/siw$side$path/ports/1/state" || return 1
    done
}

# Removes the soft iWARP devices and restores what topology_down expects.
siw_down() { # path
    timeout 60 rdma link delete "siwa$1"
    timeout 60 rdma link delete "siwb$1"
    timeout 60 rmmod siw
}

# Starts rping as a server that accepts clients one after another and concurrently. It runs until it
# is killed; its output goes to rping.log.
rping_server() { # address size
    stdbuf -oL rping -s -P -a "$1" -S "$2" -v -V >"$LAB_WORK/rping.log" 2>&1 </dev/null &
    LAB_RPING=$!
    # rping does not report that it is listening, but the connection manager shows its identifier.
    wait_until 20 "rping to listen" rping_listens
}

rping_listens() {
    rdma resource show cm_id | grep -q 'state LISTEN.*comm rping'
}

rping_stop() {
    kill "$LAB_RPING" 2>/dev/null
    wait "$LAB_RPING" 2>/dev/null
    return 0
}

# Runs rping as a client; its output goes to NAME.log. It shows the data of each round, which must
# match the pattern.
rping_client() { # name to from size
    timeout 60 rping -c -a "$2" -I "$3" -C 100 -S "$4" -v -V >"$LAB_WORK/$1.log" 2>&1 </dev/null
}

# Prints the number of rounds in an rping log.
rping_rounds() { # file
    grep -c 'ping data: rdma-ping-' "$1"
}

# Runs our client against rping for a hundred verified rounds.
our_rping() { # name path size argument...
    local name=$1 path=$2 size=$3
    shift 3
    timeout 60 rtrs-client ping "$path" --rping -c 100 -i "${RPING_INTERVAL:-0}" -s "$size" \
        -o json "$@" \
        >"$LAB_WORK/$name.json" 2>"$LAB_WORK/$name.err" </dev/null || {
        cat "$LAB_WORK/$name.err"
        return 1
    }
}

# Runs our client for a hundred rounds at each size, then two clients concurrently.
our_client_rounds() { # path
    local size first second
    for size in 23 64 1024 4096 65535; do
        : >"$LAB_WORK/rping.log"
        expect_true "100 rounds of $size bytes" our_rping "client$size" "$1" "$size"
        expect_eq "all $size-byte rounds were answered" \
            "$(jq -c '[.sent, .answered, .errors | length]' "$LAB_WORK/client$size.json")" \
            "[100,100,0]"
    done
    note "$(jq -c '.latency_us.round' "$LAB_WORK/client64.json") us per round of 64 bytes"
    # One after the other: rping keeps one request at a time, and mistakes the second of two
    # concurrent ones for both. (The siw of Linux 6.1 then loses count, and rping never ends.)
    : >"$LAB_WORK/rping.log"
    RPING_INTERVAL=100ms our_rping first "$1" 64 &
    first=$!
    expect_true "the first client runs" wait_until 20 "its rounds" first_rounds
    our_rping second "$1" 4096 &
    second=$!
    expect_true "two concurrent clients: the second" wait $second
    expect_true "the first client still runs" kill -0 $first
    expect_true "two concurrent clients: the first" wait $first
    expect_eq "a hundred rounds each" "$(jq -s 'map(.answered) | add' \
        "$LAB_WORK/first.json" "$LAB_WORK/second.json")" 200
}

first_rounds() {
    [ "$(rping_rounds "$LAB_WORK/rping.log")" -ge 3 ]
}

# Runs a hundred rounds of rping at each size, then two clients concurrently.
rping_client_rounds() { # to from
    local size first second
    for size in 23 64 1024 4096 65535; do
        expect_true "rping -C 100 -S $size" rping_client "client$size" "$1" "$2" "$size"
        expect_eq "it received its $size bytes a hundred times" \
            "$(rping_rounds "$LAB_WORK/client$size.log")" 100
    done
    rping_client first "$1" "$2" 64 &
    first=$!
    rping_client second "$1" "$2" 4096 &
    second=$!
    expect_true "two concurrent rpings: the first" wait $first
    expect_true "two concurrent rpings: the second" wait $second
    expect_eq "a hundred rounds each" "$(($(rping_rounds "$LAB_WORK/first.log") + \
        $(rping_rounds "$LAB_WORK/second.log")))" 200
}
