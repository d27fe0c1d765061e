#!/usr/bin/env bash
# lab: rounds of random faults under one load: links, daemons, the operator; nothing is lost
# topology: one
# paths: 2
# limit: 9000
# network: spoiled
# groups: failover
# in-all: no
#
# Run by scripts/soak.sh --lab. It takes RTRS_LAB_SOAK_ROUNDS [200] rounds of about 10 s;
# RTRS_LAB_SOAK_SEED [1] determines which fault strikes which path, and for how long.

. tests/lab/faults.sh

SOAK_FAULTS=(down silent to-server to-client both-down server-killed server-stopped server-asleep
    client-killed operator)

serve() {
    start_server --export "vol=$LAB_WORK/vol.img" --listen rdma://10.0.0.2 --listen rdma://10.0.1.2
}

# A process that was killed leaves requests that the kernel resends after device-timeout.
connect() {
    timeout 90 rtrs-client attach vol --device /dev/nbd0 --takeover \
        --path rdma://10.0.0.1@10.0.0.2 --path rdma://10.0.1.1@10.0.1.2 \
        --no-path queue-for=20s --io-timeout 4s --device-timeout 30s \
        >"$LAB_WORK/attach.out" 2>&1 </dev/null
}

holder() {
    rtrs-client list -o json | jq -r '.[0].pid'
}

server_gone() { # signal
    kill "-$1" "$LAB_SERVER"
    wait_until 30 "the server to end" eval "! kill -0 $LAB_SERVER"
    wait "$LAB_SERVER"
}

# Causes one fault, and ends it.
strike() { # fault path seconds
    local pid
    case $1 in
        down) topology_down_link a "$2" && sleep "$3" && topology_up_link a "$2" ;;
        silent)
            topology_cut "va$2" && topology_cut "vb$2" && sleep "$3" &&
                topology_mend "va$2" && topology_mend "vb$2"
            ;;
        to-server) topology_cut "va$2" && sleep "$3" && topology_mend "va$2" ;;
        to-client) topology_cut "vb$2" && sleep "$3" && topology_mend "vb$2" ;;
        both-down)
            topology_down_link a 0 && topology_down_link a 1 && sleep "$3" &&
                topology_up_link a 0 && topology_up_link a 1
            ;;
        server-killed) server_gone KILL; sleep "$3" && serve ;;
        server-stopped) server_gone TERM && serve ;;
        server-asleep) kill -STOP "$LAB_SERVER" && sleep "$3" && kill -CONT "$LAB_SERVER" ;;
        client-killed)
            pid=$(holder) && kill -9 "$pid" &&
                wait_until 10 "its end" eval "! test -e /proc/$pid" && connect
            ;;
        operator)
            rtrs-client path disconnect vol "rdma://10.0.$2.1@10.0.$2.2:1234" && sleep "$3" &&
                rtrs-client path reconnect vol "rdma://10.0.$2.1@10.0.$2.2:1234"
            ;;
    esac
}

scenario() {
    local round rounds=${LAB_SOAK_ROUNDS:-200} fault path seconds
    declare -A struck
    modprobe nbd nbds_max=2
    truncate -s 64M "$LAB_WORK/vol.img"
    serve
    assert_true "the volume attaches" connect
    assert_within 30 "both paths are connected" are_connected vol 2
    faults_begin soak /dev/nbd0 8400
    RANDOM=${LAB_SOAK_SEED:-1}
    note "$rounds rounds of seed ${LAB_SOAK_SEED:-1}"
    for ((round = 1; round <= rounds; round++)); do
        fault=${SOAK_FAULTS[RANDOM % ${#SOAK_FAULTS[@]}]}
        path=$((RANDOM % 2)) seconds=$((1 + RANDOM % 5))
        struck[$fault]=$((${struck[$fault]:-0} + 1))
        faults_mark soak "$round-$fault"
        assert_true "round $round: $fault, path $path, $seconds s" \
            strike "$fault" "$path" "$seconds"
        assert_within 60 "round $round: both paths are connected again" are_connected vol 2
        kill -0 "$FAULTS_FIO" 2>/dev/null || {
            fail "round $round: fio continues" "$(tail -n 5 "$LAB_WORK/fio-soak.log")"
            exit 1
        }
        sleep 1
    done
    faults_end soak "$rounds rounds"
    for fault in "${!struck[@]}"; do note "$fault: ${struck[$fault]} times"; done
    # A round may be over before any IO has completed.
    faults_longest soak >"$LAB_WORK/longest" || true
    for fault in "${!struck[@]}"; do
        note "longest IO at $fault: $(sed -n "s/^[0-9]*-$fault //p" "$LAB_WORK/longest" |
            sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] " ms at the " \
                "median, " all[NR] " ms at most, of " NR }')"
    done
    assert_true "the volume detaches" detach vol
    assert_true "the server exits cleanly" stop_server
}
