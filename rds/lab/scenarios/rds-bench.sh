#!/usr/bin/env bash
# lab: RDS, our nodes next to the kernel's: throughput and qperf, in turn; prints ratios
# topology: one
# paths: 1
# limit: 600
# groups: rds
# in-all: no

PASSES=${LAB_BENCH_PASSES:-5}
SECONDS_EACH=${LAB_BENCH_SECONDS:-3}

# Prints the ratio of two files with a figure for each pass: median and range, then both medians.
ratio() { # ours other
    python3 "$LAB_TABLES" ratio "$1" "$2"
}

# Requests per second of a load of 8 KiB messages, depth 64.
throughput() { # file namespace argument...
    local file=$1
    shift
    rds_load "$@" -q 8192 -a 64 -d 64 -t "${SECONDS_EACH}s" || return 1
    rds_value requests_per_second >>"$file"
}

# Microseconds of qperf's rds_lat or tcp_lat. Its server briefly accepts no clients after each test.
latency() { # file test runner namespace argument...
    local file=$1 test=$2 runner=$3 name=$4 try
    shift 4
    for try in 1 2 3 4 5; do
        "$runner" "$name" timeout 60 qperf "$@" -t "$SECONDS_EACH" -uu "$test" \
            >"$LAB_WORK/qperf.out" 2>>"$LAB_WORK/qperf.log" && break
        [ "$try" -lt 5 ] || return 1
        sleep 1
    done
    awk 'BEGIN { in_us["ns"] = 0.001; in_us["us"] = 1; in_us["ms"] = 1000 }
        $1 == "latency" { print $3 * in_us[$4] }' "$LAB_WORK/qperf.out" >>"$file"
}

scenario() {
    # shellcheck source=rds/lab/rds.sh
    . rds/lab/rds.sh
    local pass found name
    LAB_TABLES=$PWD/scripts/bench/lab.py
    cd "$LAB_WORK" || exit 1
    assert_true "namespaces are connected, and the kernel has RDS" rds_up
    assert_true "a server over the kernel's node" rds_serve rk -I 10.9.0.5 --kernel
    for ((pass = 0; pass < PASSES; pass++)); do
        assert_true "kernel to kernel" throughput kk rk2 10.9.0.5 -I 10.9.0.6 --kernel
        assert_true "ours to the kernel" throughput uk ru 10.9.0.5 -I 10.9.0.1 \
            --listen-port $RDS_PORT
    done
    found=$(ratio uk kk)
    note "throughput, ours to the kernel / kernel to kernel: $found"
    [ -z "${LAB_FIGURES:-}" ] || expect_true "throughput is at least 0.8 of the kernel's" \
        awk -v v="${found%% *}" 'BEGIN { exit !(v >= 0.8) }'
    kill "$RDS_SERVER" && wait "$RDS_SERVER" 2>/dev/null
    assert_true "our node of one end starts" rds_node ru 10.9.0.1
    assert_true "our node of the other end starts" rds_node ru2 10.9.0.2
    rds_in rk qperf >"$LAB_WORK/qperf-k.log" 2>&1 &
    rds_preloaded ru2 qperf >"$LAB_WORK/qperf-u.log" 2>&1 &
    for name in rk ru2; do
        assert_within 20 "qperf listens in $name" \
            eval "rds_in $name ss -Hltn | grep -q :19765"
    done
    for ((pass = 0; pass < PASSES; pass++)); do
        assert_true "qperf of the kernel" latency lat-k rds_lat rds_in rk2 10.9.0.5
        assert_true "qperf over the library" latency lat-u rds_lat rds_preloaded ru 10.9.0.2
        assert_true "qperf of TCP" latency lat-t tcp_lat rds_in rk2 10.9.0.5
    done
    found=$(ratio lat-u lat-k)
    note "qperf rds_lat in us, over the library / of the kernel: $found"
    note "qperf in us, rds_lat of the kernel / tcp_lat: $(ratio lat-k lat-t)"
    [ -z "${LAB_FIGURES:-}" ] || expect_true "latency is at most 2.5 times the kernel's" \
        awk -v v="${found%% *}" 'BEGIN { exit !(v <= 2.5) }'
    pass "all measurements completed"
}
