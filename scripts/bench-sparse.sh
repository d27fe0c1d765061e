#!/usr/bin/env bash
# Copies a sparse export of 1 TiB with 1 GiB of data in 1024 places, from rtrs-server over
# rtrs-client and from nbdkit with its file plugin: nbdcopy to nowhere and to a sparse file, and
# nbdinfo --map. Prints the times (medians of interleaved rounds) and the bytes that crossed the
# loopback interface, over which both servers are reached. Runs in a network namespace of its own,
# so it needs root. Usage: scripts/bench-sparse.sh [ROUNDS]; default 5. RTRS_BIN_DIR names the
# programs, by default target/release. Needs libnbd-bin and nbdkit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1-} in
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
for program in nbdcopy nbdinfo nbdkit unshare; do
    command -v "$program" >/dev/null && continue
    echo "bench-sparse: $program is missing; run: apt-get install libnbd-bin nbdkit" >&2
    exit 1
done
if [ -z "${BENCH_SPARSE_INSIDE-}" ]; then
    BENCH_SPARSE_INSIDE=1 exec unshare --net "${BASH_SOURCE[0]}" "$@"
fi
ip link set lo up

rounds=${1:-5}
bin=${RTRS_BIN_DIR:-target/release}
work=$(mktemp -d -p /dev/shm)
server='' nbdkit=''
cleanup() {
    "$bin/rtrs-client" detach vol --run-dir "$work/run" --force >/dev/null 2>&1 || true
    kill $server $nbdkit 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

truncate -s 1T "$work/vol.img"
for place in {0..1023}; do
    head -c 1M /dev/urandom |
        dd of="$work/vol.img" bs=1M seek=$((place * 1024)) conv=notrunc status=none
done

"$bin/rtrs-server" --export "vol=$work/vol.img" --insecure-open --listen tcp://127.0.0.1:1234 \
    --run-dir "$work/server" --state-dir "$work/state" --log error >"$work/server.out" 2>&1 &
server=$!
nbdkit --foreground --ipaddr 127.0.0.1 --port 10809 file "$work/vol.img" 2>"$work/nbdkit.out" &
nbdkit=$!
"$bin/rtrs-client" attach vol --path tcp://127.0.0.1:1234 --socket "$work/vol.sock" \
    --run-dir "$work/run" --retry-for 1m >/dev/null
declare -A uri=([rtrs]="nbd+unix:///vol?socket=$work/vol.sock" [nbdkit]=nbd://127.0.0.1:10809)
for _ in {1..200}; do
    nbdinfo --size "${uri[nbdkit]}" >/dev/null 2>&1 && break
    sleep 0.05
done

copy_to_nowhere() { nbdcopy "$1" null:; }
copy_to_file() {
    rm -f "$work/copy.img"
    truncate -s 1T "$work/copy.img"
    nbdcopy --destination-is-zero "$1" "$work/copy.img"
}
map() { nbdinfo --map "$1"; }

# Prints the bytes of both directions, with headers.
bytes_moved() { awk '$1 == "lo:" { print $10 }' /proc/net/dev; }

# Appends the seconds and bytes of a run to its file.
measure() { # server job
    local begin before
    before=$(bytes_moved) begin=$EPOCHREALTIME
    "$2" "${uri[$1]}" >"$work/$1.out"
    echo "$begin $EPOCHREALTIME $before $(bytes_moved)" |
        awk '{ printf "%.3f %d\n", $2 - $1, $4 - $3 }' >>"$work/$1.$2"
}

median() { # server job column
    cut -d' ' -f"$3" "$work/$1.$2" | sort -g | sed -n "$(((rounds + 1) / 2))p"
}

echo "| job | nbdkit, s | rtrs, s | ratio | nbdkit, MB moved | rtrs, MB moved |"
echo "|---|---|---|---|---|---|"
for job in copy_to_nowhere copy_to_file map; do
    for ((round = 0; round < rounds; round++)); do
        for name in nbdkit rtrs; do measure $name $job; done
    done
    if [ $job = copy_to_file ]; then
        # Compares the data and the holes without reading the holes.
        places=$(seq 0 1073741824 1098437885952)
        for place in $places; do
            cmp -n 2M -i "$place" "$work/vol.img" "$work/copy.img"
        done
    fi
    echo "$(median nbdkit $job 1) $(median rtrs $job 1) $(median nbdkit $job 2)" \
        "$(median rtrs $job 2)" |
        awk -v job="${job//_/ }" '{ printf "| %s | %.2f | %.2f | %.2f | %.1f | %.1f |\n", job,
            $1, $2, $2 / $1, $3 / 1e6, $4 / 1e6 }'
done
cmp "$work/nbdkit.out" "$work/rtrs.out" &&
    echo "Both maps are the same: $(wc -l <"$work/rtrs.out") extents."
