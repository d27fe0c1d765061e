#!/usr/bin/env bash
# lab: our block device over TCP and nbdkit's, over links with a delay and losses; failover
# topology: one
# paths: 2
# limit: 2400
# network: spoiled
# groups: bench
# in-all: no
#
# All servers stay up, each with its own disk of the same kind: ours with CRC32C, ours without, and
# nbdkit. Each pass runs all links; for each link, all rows; and for each row, all peers.
# scripts/lab.sh reads RTRS_LAB_WAN_RTT and RTRS_LAB_WAN_LOSS, words such as 2ms and 0.01%,
# RTRS_LAB_BENCH_PASSES [3] and RTRS_LAB_BENCH_SECONDS [4, for each measurement]. The scenario never
# fails for being slow.

. tests/lab/faults.sh

RTTS=${LAB_WAN_RTT:-0.2ms 2ms 20ms}
LOSSES=${LAB_WAN_LOSS:-0 0.01%}
PASSES=${LAB_BENCH_PASSES:-3}
SECONDS_EACH=${LAB_BENCH_SECONDS:-4}
FAILOVERS=5
DISK_MIB=64
declare -A DEVICE=()

# Adds half of the delay at each end. Packets are lost individually, because the network cards do
# not merge any.
shape() { # rtt loss
    local device half
    half=$(awk -v rtt="${1%ms}" 'BEGIN { printf "%.3f", rtt / 2 }')
    for device in va0 vb0 va1 vb1; do
        tc qdisc replace dev $device root netem limit 200000 delay "${half}ms" loss "${2%\%}%" ||
            return 1
    done
}

# Attaches with the default heartbeats.
attach_default() { # name port argument...
    timeout 90 rtrs-client attach "$1" --path "tcp://10.0.0.1@10.0.0.2:$2" \
        --path "tcp://10.0.1.1@10.0.1.2:$2" "${@:3}" >"$LAB_WORK/attach.out" 2>&1 </dev/null ||
        { tail -n 5 "$LAB_WORK/attach.out" && return 1; }
}

# Runs one measurement and appends a line `pass rtt loss row peer iops p99`, separated by tabs.
measure() { # pass rtt loss row peer
    local way=--rw=randread size=--bs=4k depth=--iodepth=32 limit=$((SECONDS_EACH + 60))
    [ "$4" = 4k ] || way=--rw=read size=--bs=128k depth=--iodepth=16
    if ! fio_run wan $limit --filename="${DEVICE[$5]}" --direct=1 --ioengine=libaio $way $size \
        $depth --size=${DISK_MIB}M --time_based --runtime="$SECONDS_EACH" --ramp_time=2 \
        --norandommap --randseed=7; then
        note "skipped: $5, $4 at $2, $3: $(tail -n 1 "$LAB_WORK/fio-wan.log")"
        return
    fi
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$5" \
        "$(fio_value wan '.jobs[0].read.iops')" \
        "$(fio_value wan '.jobs[0].read.clat_ns.percentile["99.000000"] / 1000')" \
        >>"$LAB_WORK/results.tsv"
}

# Takes down one of two links under load several times; sets FAULTS_P50.
failover() { # rtt
    local round name=failover-$1
    faults_begin "$name" "${DEVICE[ours]}" 300
    for ((round = 1; round <= FAILOVERS; round++)); do
        faults_round "$name" "$round" 'topology_down_link a 0' 'topology_up_link a 0'
    done
    faults_end "$name" "failover at $1"
    faults_stalls "$name" "one of two links with a round trip of $1 goes down"
    printf '%s\t%s\n' "$1" "$FAULTS_P50" >>"$LAB_WORK/failovers.tsv"
}

scenario() {
    local pass rtt loss row peer device servers start=$SECONDS
    : >"$LAB_WORK/results.tsv"
    : >"$LAB_WORK/failovers.tsv"
    modprobe brd rd_nr=3 rd_size=$((DISK_MIB * 1024)) max_part=0
    modprobe nbd nbds_max=4
    modprobe sch_netem
    for device in va0 vb0 va1 vb1; do
        assert_true "$device does not merge packets" ethtool -K $device tso off gso off gro off
    done
    for peer in 0 1 2; do
        assert_true "disk $peer" dd if=/dev/urandom of="/dev/ram$peer" bs=1M count=$DISK_MIB \
            oflag=direct
    done
    start_server --export vol=/dev/ram0 --listen tcp://10.0.0.2:1234 --listen tcp://10.0.1.2:1234
    servers=$LAB_SERVER
    start_server --export plain=/dev/ram2 --listen tcp://10.0.0.2:1235 \
        --listen tcp://10.0.1.2:1235 --crc off
    assert_true "our device attaches over two paths" attach_default vol 1234 --device /dev/nbd0
    assert_true "our device attaches without CRC32C" attach_default plain 1235 \
        --device /dev/nbd2 --crc off
    nbdkit -f -i 10.0.0.2 -p 10810 file /dev/ram1 >"$LAB_WORK/nbdkit.log" 2>&1 </dev/null &
    assert_within 20 "nbdkit listens" sh -c "ss -Htln 'sport = :10810' | grep -q ."
    assert_true "nbdkit's disk attaches" timeout 30 nbd-client 10.0.0.2 10810 /dev/nbd1
    DEVICE=([ours]=/dev/nbd0 [plain]=/dev/nbd2 [nbdkit]=/dev/nbd1)
    for ((pass = 1; pass <= PASSES; pass++)); do
        for rtt in $RTTS; do
            for loss in $LOSSES; do
                assert_true "a round trip of $rtt with a loss of $loss" shape "$rtt" "$loss"
                for row in 4k 128k; do
                    for peer in ours plain nbdkit; do
                        measure "$pass" "$rtt" "$loss" "$row" "$peer"
                    done
                done
            done
        done
        note "pass $pass of $PASSES is done after $((SECONDS - start)) s"
    done
    for rtt in $RTTS; do
        assert_true "a round trip of $rtt" shape "$rtt" 0
        failover "$rtt"
    done
    expect_eq "no request failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
    assert_true "nbdkit's disk is disconnected" timeout 30 nbd-client -d /dev/nbd1
    for peer in vol plain; do assert_true "$peer detaches" detach $peer; done
    assert_true "our server exits cleanly" stop_server
    LAB_SERVER=$servers
    assert_true "our other server exits cleanly" stop_server
    assert_true "the table is printed" python3 scripts/bench/lab.py wan \
        "$LAB_WORK/results.tsv" "$LAB_WORK/failovers.tsv" "$LAB_SHARE/bench.json"
    cat "$LAB_HOME/out"
    note "our daemons: $LAB_BUILD build"
}
