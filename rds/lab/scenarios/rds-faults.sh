#!/usr/bin/env bash
# lab: our RDS node and the kernel's: 100 broken connections, restarts of both, under checked load
# topology: one
# paths: 1
# limit: 600
# groups: rds ours

# Closes one end of the connection between one of our addresses and the kernel's, whichever end
# opened it; closed sockets are listed in broken.NAMESPACE.OWN. The parentheses are essential:
# without them, the last term of the filter would match sockets of any address.
cut_at() { # namespace own port
    local from=$2 to=10.9.0.5
    [ "$1" = ru ] || from=10.9.0.5 to=$2
    rds_in "$1" ss -HKtn src "$from" dst "$to" "( sport = $3 or dport = 16385 )" \
        >>"$LAB_WORK/broken.$1.$2"
}

# Breaks a load's connection repeatedly: in turn at the kernel's end, by a command to our node, and
# at our end.
break_often() { # times own
    local number
    for ((number = 0; number < $1; number++)); do
        case $((number % 3)) in
            0) cut_at rk "$2" 16385 ;;
            1) rds_by ru rds node reset "$2" 10.9.0.5 --socket-dir "$LAB_WORK/ru" ;;
            2) cut_at ru "$2" $RDS_PORT ;;
        esac >/dev/null 2>&1
        sleep 0.1
    done
}

# Runs checked load until the connection has been broken 100 times.
broken_load() { # own namespace argument...
    local breaker own=$1
    shift
    break_often 100 "$own" &
    breaker=$!
    while kill -0 $breaker 2>/dev/null; do
        if ! rds_load "$@" -s 4 -d 8 -q 20000 -a 3000 -t 5s; then
            cat "$LAB_WORK/stress.json"
            kill $breaker && wait $breaker
            return 1
        fi
    done
}

# Prints the number of lost connections.
resets() { # own
    rds_by ru rds node stats "$1" --socket-dir "$LAB_WORK/ru" -o json |
        jq '.[0].nodes[0].counters.conn_reset'
}

# Prints how often a connection was closed at one end.
cuts() { # namespace own
    grep -c . "$LAB_WORK/broken.$1.$2"
}

scenario() {
    # shellcheck source=rds/lab/rds.sh
    . rds/lab/rds.sh
    local own round server
    assert_true "two namespaces are connected, and the kernel has RDS" rds_up
    assert_true "our nodes start" rds_node ru 10.9.0.1 10.9.0.9
    assert_true "a server over the kernel's node" rds_serve rk -I 10.9.0.5 --kernel
    for own in 10.9.0.1 10.9.0.9; do
        expect_true "nothing is lost, repeated or reordered from $own" broken_load $own ru \
            10.9.0.5 -I $own
        expect_num "its connection broke often" "$(resets $own)" -ge 50
        expect_num "the kernel's end was closed often" "$(cuts rk $own)" -ge 10
        expect_num "our end was closed often" "$(cuts ru $own)" -ge 10
    done
    for own in 10.9.0.1 10.9.0.9; do
        server=$RDS_SERVER
        assert_true "a server over $own" rds_serve ru -I $own
        expect_true "nothing is lost, repeated or reordered from the kernel to $own" broken_load \
            $own rk $own -I 10.9.0.5 --kernel
        kill "$RDS_SERVER" && wait "$RDS_SERVER" 2>/dev/null
        RDS_SERVER=$server
    done
    for round in 1 2 3; do
        kill -KILL "$RDS_NODE" && wait "$RDS_NODE" 2>/dev/null
        assert_true "our nodes start again after a kill ($round)" rds_node ru 10.9.0.1 10.9.0.9
        for own in 10.9.0.1 10.9.0.9; do
            expect_true "$own carries load" rds_load ru 10.9.0.5 -I $own -d 4 -t 1s
        done
    done
    kill "$RDS_SERVER" && wait "$RDS_SERVER" 2>/dev/null
    # The kernel node restarts without its state.
    for round in 1 2; do
        assert_within 30 "rds_tcp is unloaded" rmmod rds_tcp
        assert_true "and loaded" modprobe rds_tcp
        assert_true "a server over the kernel's node" rds_serve rk -I 10.9.0.5 --kernel
        for own in 10.9.0.1 10.9.0.9; do
            expect_true "$own carries load to the kernel's new node" rds_load ru 10.9.0.5 -I $own \
                -d 4 -t 1s
        done
        # The server exits with the signal, which is not a failure.
        kill "$RDS_SERVER" && wait "$RDS_SERVER" 2>/dev/null || true
    done
}
