#!/usr/bin/env bash
# Compares tls:// with tcp:// (with CRC32C) on this machine: rtrs-client bench against an export in
# memory, 4k randread QD32 and 128k read QD16, and the longest IO when the server is killed and
# restarted. Then fio over rtrs-client and tls:// with fio over TLS to nbdkit. Interleaved, medians.
# Usage: scripts/bench-tls.sh [SECONDS [ROUNDS]]; default 3 and 5. RTRS_BIN_DIR names the programs,
# by default target/release. Needs certtool, fio and nbdkit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1-} in
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
seconds=${1:-3} rounds=${2:-5}
bin=${RTRS_BIN_DIR:-target/release}
work=$(mktemp -d)
server=
nbdkit=
cleanup() {
    "$bin/rtrs-client" detach vol --run-dir "$work" --force >/dev/null 2>&1 || true
    kill -9 $server $nbdkit 2>/dev/null
    rm -rf "$work"
}
trap cleanup EXIT
for program in certtool fio nbdkit; do
    command -v "$program" >/dev/null && continue
    echo "bench-tls: $program is missing; run: apt-get install gnutls-bin fio nbdkit" >&2
    exit 1
done

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

# fio cannot present a certificate, so nbdkit asks for none. That changes the handshake only.
start_nbdkit() {
    local pki=$work/pki name
    mkdir "$pki"
    printf 'cn = ca\nexpiration_days = 1\nca\ncert_signing_key\n' >"$pki/ca.info"
    printf 'cn = server\nip_address = 127.0.0.1\nexpiration_days = 1\ntls_www_server\n' \
        >"$pki/server.info"
    for name in ca server; do
        certtool --generate-privkey --key-type ed25519 --outfile "$pki/$name-key.pem"
    done
    certtool --generate-self-signed --template "$pki/ca.info" --load-privkey "$pki/ca-key.pem" \
        --outfile "$pki/ca-cert.pem"
    certtool --generate-certificate --template "$pki/server.info" \
        --load-privkey "$pki/server-key.pem" --load-ca-certificate "$pki/ca-cert.pem" \
        --load-ca-privkey "$pki/ca-key.pem" --outfile "$pki/server-cert.pem"
    nbdkit_port=$(free_port)
    nbdkit --foreground --ipaddr 127.0.0.1 --port "$nbdkit_port" --tls require \
        --tls-certificates "$pki" memory 256M &
    nbdkit=$!
}

fio_iops() { # URI, further arguments
    local uri=$1
    shift
    fio --name=bench --ioengine=nbd --uri="$uri" --size=256M --time_based \
        --runtime="$seconds" --output-format=json "$@" >"$work/fio.out"
    python3 -c 'import json, sys
text = sys.stdin.read()
job = json.loads(text[text.index("{"):])["jobs"][0]
assert job["error"] == 0, job["error"]
print(job["read"]["iops"])' <"$work/fio.out"
}

bridge_row() { # name, fio arguments
    local name=$1 round
    shift
    for ((round = 0; round < rounds; round++)); do
        fio_iops "nbds://127.0.0.1:$nbdkit_port/" "$@" >>"$work/$name.tcp"
        fio_iops "nbd+unix:///vol?socket=$work/vol.sock" "$@" >>"$work/$name.tls"
    done
}

bridge() {
    start_nbdkit >"$work/nbdkit.out" 2>&1
    # shellcheck disable=SC2086 # several words
    "$bin/rtrs-client" attach vol --path "tls://127.0.0.1:$tls_port" $keys --access ro \
        --run-dir "$work" --log error --socket "$work/vol.sock" >/dev/null
    bridge_row bridge4k --rw=randread --bs=4k --iodepth=32
    bridge_row bridge128k --rw=read --bs=128k --iodepth=16
    "$bin/rtrs-client" detach vol --run-dir "$work" >/dev/null
}

start_server
row randread iops --rw randread --bs 4k --iodepth 32
row read iops --rw read --bs 128k --iodepth 16
failover
bridge
python3 - "$work" <<'END'
import statistics
import sys

ROWS = [("randread", "4k randread QD32, IOPS", ">= 0.80"),
        ("read", "128k read QD16, IOPS", ">= 0.65"),
        ("restart", "longest IO, server killed and restarted, us", "<= 1.2"),
        ("bridge4k", "fio 4k randread QD32, IOPS: nbdkit with TLS, bridge over tls://", ">= 1.3"),
        ("bridge128k", "fio 128k read QD16, IOPS: the same", ">= 1.0")]
print("| tls:// / tcp:// with CRC | tcp | tls | ratio | asked |\n|---|---|---|---|---|")
for name, title, asked in ROWS:
    numbers = [[float(line) for line in open(f"{sys.argv[1]}/{name}.{scheme}")]
               for scheme in ("tcp", "tls")]
    tcp, tls = map(statistics.median, numbers)
    print(f"| {title} | {tcp:.0f} | {tls:.0f} | {tls / tcp:.2f} | {asked} |")
END
