#!/usr/bin/env bash
# Compares tls:// with tcp:// (with CRC32C) on this machine: rtrs-client bench against an export in
# memory, 4k randread QD32 and 128k read QD16, and the longest IO when the server is killed and
# restarted. Interleaved, medians. Usage: scripts/bench-tls.sh [SECONDS [ROUNDS]]; default 3 and 5.
# RTRS_BIN_DIR names the programs, by default target/release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1-} in
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
seconds=${1:-3} rounds=${2:-5}
bin=${RTRS_BIN_DIR:-target/release}
work=$(mktemp -d)
server=
trap 'kill -9 $server 2>/dev/null; rm -rf "$work"' EXIT

server_key=$("$bin/rtrs-server" key generate "$work/server.key")
echo "bench $("$bin/rtrs-client" key generate "$work/client.key")" >"$work/clients"
keys="--key-file $work/client.key --server-key $server_key"

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])'
}
tcp_port=$(free_port) tls_port=$(free_port)

start_server() {
    "$bin/rtrs-server" --export vol=mem:256M,id=bench --shards 1 --run-dir "$work" \
        --state-dir "$work/state" --listen "tcp://127.0.0.1:$tcp_port" \
        --listen "tls://127.0.0.1:$tls_port" --key-file "$work/server.key" \
        --clients-file "$work/clients" --access anyone:rw --log error >"$work/server.out" 2>&1 &
    server=$!
    for _ in {1..200}; do
        [ "$(grep -c 'listening on' "$work/server.out")" = 2 ] && return
        sleep 0.05
    done
    cat "$work/server.out" >&2
    exit 1
}

bench() { # scheme, further arguments
    local scheme=$1 port=$tcp_port flags=
    [ "$scheme" = tls ] && port=$tls_port flags=$keys
    shift
    # shellcheck disable=SC2086 # several words
    "$bin/rtrs-client" bench vol --path "$scheme://127.0.0.1:$port" $flags --access ro \
        --run-dir "$work" --log error -o json "$@"
}

value() { # iops or max
    python3 -c 'import json, sys; d = json.load(sys.stdin)
print(d["lat_us"]["max"] if sys.argv[1] == "max" else d[sys.argv[1]])' "$1"
}

row() { # name, what is compared, arguments
    local name=$1 what=$2 round scheme
    shift 2
    for ((round = 0; round < rounds; round++)); do
        for scheme in tcp tls; do
            bench "$scheme" --runtime "${seconds}s" "$@" | value "$what" >>"$work/$name.$scheme"
        done
    done
}

failover() {
    local round scheme
    for ((round = 0; round < rounds; round++)); do
        for scheme in tcp tls; do
            bench "$scheme" --runtime 4s --rw randread --bs 4k --iodepth 8 >"$work/json" &
            local running=$!
            sleep 1.5
            kill -9 "$server"
            wait "$server" 2>/dev/null || true
            start_server
            wait "$running"
            value max <"$work/json" >>"$work/restart.$scheme"
        done
    done
}

start_server
row randread iops --rw randread --bs 4k --iodepth 32
row read iops --rw read --bs 128k --iodepth 16
failover
python3 - "$work" <<'END'
import statistics
import sys

ROWS = [("randread", "4k randread QD32, IOPS", ">= 0.80"),
        ("read", "128k read QD16, IOPS", ">= 0.65"),
        ("restart", "longest IO, server killed and restarted, us", "<= 1.2")]
print("| tls:// / tcp:// with CRC | tcp | tls | ratio | asked |\n|---|---|---|---|---|")
for name, title, asked in ROWS:
    numbers = [[float(line) for line in open(f"{sys.argv[1]}/{name}.{scheme}")]
               for scheme in ("tcp", "tls")]
    tcp, tls = map(statistics.median, numbers)
    print(f"| {title} | {tcp:.0f} | {tls:.0f} | {tls / tcp:.2f} | {asked} |")
END
