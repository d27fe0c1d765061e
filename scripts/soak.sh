#!/usr/bin/env bash
# Runs fio against a session for a long time and checks the memory of both daemons against their
# limits: the server's stays under paths x queue depth x chunk size + 32 MiB (160 MiB here), and
# neither grows after the first tenth of the time.
#
#   scripts/soak.sh [--minutes N]        default 60; prints a line per minute
#   scripts/soak.sh --sim [--minutes N]  seeds of the simulator instead, one process per core
#   scripts/soak.sh --lab [--rounds N] [--seed N]
#                                        rounds [200] of random faults in the lab instead: links
#                                        down or silent, daemons killed, stopped, taken over
#
# Exit codes: 0 memory did not grow and no IO failed, or no seed failed; 1 otherwise; 2 wrong usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

minutes=60 sim=0 lab=0
while [ $# -gt 0 ]; do
    case $1 in
        --minutes) minutes=${2:?--minutes takes a number} && shift 2 ;;
        --sim) sim=1 && shift ;;
        --lab) lab=1 && shift ;;
        --rounds) export RTRS_LAB_SOAK_ROUNDS=${2:?--rounds takes a number} && shift 2 ;;
        --seed) export RTRS_LAB_SOAK_SEED=${2:?--seed takes a number} && shift 2 ;;
        -h | --help)
            sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" | sed '$d'
            exit 0
            ;;
        *)
            echo "soak: unknown argument '$1'; see scripts/soak.sh --help" >&2
            exit 2
            ;;
    esac
done
case $minutes in '' | *[!0-9]* | 0)
    echo "soak: --minutes $minutes is not a number above 0" >&2
    exit 2
    ;;
esac

for number in "${RTRS_LAB_SOAK_ROUNDS:-1}" "${RTRS_LAB_SOAK_SEED:-1}"; do
    case $number in '' | *[!0-9]* | 0)
        echo "soak: '$number' is not a number above 0" >&2
        exit 2
        ;;
    esac
done
if [ $lab -eq 1 ]; then exec scripts/lab.sh run soak; fi

# shellcheck source=scripts/deps.sh
. scripts/deps.sh
bin=${CARGO_TARGET_DIR:-$PWD/target}/release
if [ $sim -eq 1 ]; then
    cargo build --release --locked -p rtrs-tests --bin rtrs-sim
    pids=() status=0
    trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
    for _ in $(seq "$(nproc)"); do
        "$bin/rtrs-sim" --minutes "$minutes" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    trap - EXIT
    if [ $status -eq 0 ]; then echo PASS; else echo "FAIL: a seed failed; its command is above"; fi
    exit $status
fi
cargo build --release --locked
dir=$(mktemp -d)
server= fio=
cleanup() {
    "$bin/rtrs-client" --run-dir "$dir/run" detach --force soak >/dev/null 2>&1 || true
    if [ -n "$fio" ]; then kill "$fio" 2>/dev/null || true; fi
    if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; fi
    rm -rf "$dir"
}
trap cleanup EXIT

truncate -s 1G "$dir/soak.img"
"$bin/rtrs-server" --export "soak=$dir/soak.img" --listen tcp://127.0.0.1:0 \
    >"$dir/out" 2>"$dir/err" &
server=$!
for _ in $(seq 100); do
    grep -q '^listening on ' "$dir/out" && break
    sleep 0.1
done
portal=$(sed -n 's/^listening on //p' "$dir/out")
"$bin/rtrs-client" --run-dir "$dir/run" attach soak --path "$portal" --socket "$dir/nbd.sock"
client=$("$bin/rtrs-client" --run-dir "$dir/run" status soak -o json |
    sed -n 's/.*"pid": \([0-9]*\).*/\1/p')

fio --name=soak --ioengine=nbd --uri="nbd+unix:///soak?socket=$dir/nbd.sock" --rw=randrw \
    --bsrange=4k-256k --iodepth=32 --size=1G --time_based --runtime=$((minutes * 60)) \
    --output="$dir/fio" &
fio=$!

rss() { awk '/^VmRSS/ {print $2}' "/proc/$1/status"; }
settle=$((minutes * 6)) start=$SECONDS base_server=0 base_client=0 last=0
while kill -0 "$fio" 2>/dev/null; do
    sleep 2
    now=$((SECONDS - start)) s=$(rss $server || echo 0) c=$(rss "$client" || echo 0)
    if [ "$base_server" -eq 0 ] && [ $now -ge $settle ]; then
        base_server=$s base_client=$c
    fi
    if [ $((now / 60)) -gt $last ] || [ $last -eq 0 ]; then
        last=$((now / 60 > 0 ? now / 60 : 1))
        echo "soak: ${now} s, server ${s} KiB, client ${c} KiB"
    fi
    [ "$s" -gt 0 ] && end_server=$s
    [ "$c" -gt 0 ] && end_client=$c
done
wait "$fio" || { cat "$dir/fio"; echo "FAIL: fio ended with an error"; exit 1; }
fio=
# One path with the default queue depth and chunk size, in KiB.
bound=$((512 * 256 + 32 * 1024))
slack=4096
echo "soak: server $base_server -> $end_server KiB (bound $bound)," \
    "client $base_client -> $end_client KiB"
if [ "$end_server" -gt $bound ]; then echo "FAIL: the server is over its bound"; exit 1; fi
if [ "$end_server" -gt $((base_server + slack)) ] ||
    [ "$end_client" -gt $((base_client + slack)) ]; then
    echo "FAIL: memory grew by more than $slack KiB"
    exit 1
fi
echo "PASS"
