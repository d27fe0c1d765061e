#!/usr/bin/env bash
# Compares RDS over the loopback with plain TCP, interleaved, medians: the round trip of 64 bytes at
# depth 1 with a blocking TCP ping-pong, messages of 8 KiB at depth 64 with a TCP stream, and
# qperf's rds_lat over librds_preload.so and `rds node` with its tcp_lat. Usage:
# scripts/bench-rds.sh [SECONDS [ROUNDS]]; default 3 and 5. RTRS_BIN_DIR names the programs, by
# default target/release. Needs jq and qperf.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1-} in
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
for program in jq qperf; do
    command -v "$program" >/dev/null && continue
    echo "bench-rds: $program is missing; run: apt-get install jq qperf" >&2
    exit 1
done

seconds=${1:-3} rounds=${2:-5}
bin=$(realpath "${RTRS_BIN_DIR:-target/release}")
work=$(mktemp -d)
# Ports of peers, of the stress server and of qperf.
port=27385 stress=18000 qperf=28765
pids=()
cleanup() {
    kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$work"
}
trap cleanup EXIT
export RDS_DIR=$work

appears() { # file text
    for _ in {1..200}; do
        grep -q "$2" "$1" 2>/dev/null && return
        sleep 0.05
    done
    echo "bench-rds: no '$2' in $1 within 10 s" >&2
    return 1
}

note() { # figure jq_expression
    jq "$2" "$work/out" >>"$work/$1"
}

load() { # argument...
    "$bin/rds" stress 127.0.0.2 -p $stress -t "${seconds}s" -o json "$@" >"$work/out"
}

# The server of qperf does not listen for a moment after each test.
latency() { # figure test
    for _ in {1..50}; do
        LD_PRELOAD=$bin/librds_preload.so qperf -lp $qperf -t "$seconds" -uu 127.0.0.2 "$2" \
            >"$work/out" 2>"$work/error" && break
        sleep 0.1
    done
    awk 'BEGIN { in_us["ns"] = 0.001; in_us["us"] = 1; in_us["ms"] = 1000 }
        $1 == "latency" { print $3 * in_us[$4]; found = 1 }
        END { exit !found }' "$work/out" >>"$work/$1" || cat "$work/error" >&2
}

median() { # figure
    sort -g "$work/$1" | awk '{ v[NR] = $1 } END {
        half = int(NR / 2)
        print NR % 2 ? v[half + 1] : (v[half] + v[half + 1]) / 2
    }'
}

row() { # text figure against format asked
    awk -v a="$(median "$2")" -v b="$(median "$3")" -v text="$1" -v form="$4" -v asked="$5" 'BEGIN {
        printf "| %s | " form " | " form " | %.2f | %s |\n", text, a, b, a / b, asked
    }'
}

own=(-I 127.0.0.1 --listen-port "$port" --peer-port "$port")
"$bin/rds" stress --listen -I 127.0.0.2 -p $stress "${own[@]:2}" >"$work/listen" &
pids+=($!)
appears "$work/listen" listening
for ((round = 0; round < rounds; round++)); do
    load --tcp -q 64 && note tcp-trip .round_trip_us.mean && note tcp-p50 .round_trip_us.p50
    load "${own[@]}" -q 64 -a 64
    note rds-trip .round_trip_us.mean && note rds-p50 .round_trip_us.p50
    load --tcp -q 8192 -d 64 && note tcp-stream .requests_per_second
    load "${own[@]}" -q 8192 -d 64 && note rds-stream .requests_per_second
    load "${own[@]}" -q 8192 -d 64 --verify off && note rds-unchecked .requests_per_second
done
kill "${pids[0]}"
wait "${pids[0]}" || true

"$bin/rds" node --address 127.0.0.1 --address 127.0.0.2 --socket-dir "$work" "${own[@]:2}" \
    >"$work/node" 2>/dev/null &
pids+=($!)
appears "$work/node" 'node 127.0.0.2 is ready'
LD_PRELOAD=$bin/librds_preload.so qperf -lp $qperf >/dev/null &
pids+=($!)
sleep 0.5
for ((round = 0; round < rounds; round++)); do
    latency qperf-tcp tcp_lat
    latency qperf-rds rds_lat
done

echo "| row | RDS | TCP | ratio | asked |"
echo "|---|---|---|---|---|"
row "round trip of 64 B, depth 1, mean" rds-trip tcp-trip '%.1f us' '<= 2.0'
row "the same, p50" rds-p50 tcp-p50 '%.1f us' '<= 2.0'
row "8 KiB, depth 64, messages a second" rds-stream tcp-stream '%.0f' '>= 0.7'
row "the same, bytes not checked" rds-unchecked tcp-stream '%.0f' '>= 0.7'
row "qperf rds_lat over the library, tcp_lat" qperf-rds qperf-tcp '%.1f us' -
