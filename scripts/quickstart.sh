#!/usr/bin/env bash
# Quick start in about two minutes: installs what is missing, builds, exports a sparse file with
# rtrs-server, attaches it with rtrs-client over two TCP paths, copies a real ext4 file system in
# and out through NBD, checks it with e2fsck and a checksum, runs a short fio with verification,
# prints the session's statistics and cleans up. All traffic stays on the loopback addresses
# 127.0.0.1 and 127.0.0.2; nothing needs root except installing packages. Ends with PASS or FAIL,
# exit 0 or 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { printf '\n==> %s\n' "$*"; }
die() {
    printf 'quickstart: %s\n' "$*" >&2
    exit 1
}

if [ $# -gt 0 ]; then
    case $1 in
        -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "quickstart: takes no arguments" >&2; exit 2 ;;
    esac
fi

work=
server=

# The background process of our session names our run directory on its command line.
session_pids() {
    local dir
    for dir in /proc/[0-9]*; do
        if [ "${dir#/proc/}" != $$ ] && { tr '\0' ' ' <"$dir/cmdline"; } 2>/dev/null |
            grep -q "rtrs-client.*$work"; then
            echo "${dir#/proc/}"
        fi
    done
}

wait_gone() { # pid, in at most 10 s
    local tries
    for tries in {1..100}; do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    return 1
}

cleanup() {
    local status=$? pid
    trap - EXIT INT TERM HUP
    set +e
    if [ -n "$work" ]; then
        for pid in $(session_pids); do
            kill -TERM "$pid" 2>/dev/null
            wait_gone "$pid" || kill -KILL "$pid" 2>/dev/null
        done
        if [ -n "$server" ] && kill -0 "$server" 2>/dev/null; then
            kill -TERM "$server"
            wait_gone "$server" || kill -KILL "$server"
            wait "$server" 2>/dev/null
        fi
        if [ $status -ne 0 ] && [ -s "$work/server.log" ]; then
            echo "--- last lines of the server's log" >&2
            tail -n 20 "$work/server.log" >&2
        fi
        rm -rf "$work"
    fi
    if [ $status -eq 0 ]; then
        printf '\nPASS: quickstart done in %d s\n' $SECONDS
    else
        printf '\nFAIL: quickstart ended with %d after %d s\n' $status $SECONDS >&2
        exit 1
    fi
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

step "1/8 programs"
# shellcheck source=scripts/deps.sh
. scripts/deps.sh || die "a requirement is missing, see above"

step "2/8 build (release; the first time takes some minutes)"
cargo build --release --locked --bin rtrs-server --bin rtrs-client
bin=${CARGO_TARGET_DIR:-target}/release
# The socket's path must be short, so the work directory is in /tmp regardless of TMPDIR.
work=$(mktemp -d /tmp/rtrs-quickstart.XXXXXX)
client() { timeout 60 "$bin/rtrs-client" "$@" --run-dir "$work"; }

step "3/8 an ext4 file system from a part of /usr/share"
# The largest of these directories with at most 400 MiB: realistic, and bounded.
source_dir= source_mib=0
for dir in /usr/share/doc /usr/share/locale /usr/share/man /usr/share/perl; do
    [ -d "$dir" ] || continue
    mib=$(du -sm --apparent-size "$dir" 2>/dev/null | cut -f1)
    if [ "${mib:-0}" -gt $source_mib ] && [ "$mib" -le 400 ]; then
        source_dir=$dir source_mib=$mib
    fi
done
[ -n "$source_dir" ] || die "no directory of at most 400 MiB under /usr/share"
image_mib=$((source_mib * 2 + 64))
# Small files take a whole block and an inode each, which the sum of file sizes does not show.
truncate -s "${image_mib}M" "$work/ext4.img"
mkfs.ext4 -q -F -b 4096 -i 4096 -d "$source_dir" "$work/ext4.img"
before=$(sha256sum <"$work/ext4.img")
echo "$source_dir ($source_mib MiB) in an image of $image_mib MiB, sha256 ${before:0:16}..."

step "4/8 rtrs-server exports a sparse file on 127.0.0.1 and 127.0.0.2"
truncate -s "${image_mib}M" "$work/vol0.img"
"$bin/rtrs-server" --export "vol0=$work/vol0.img" --listen tcp://127.0.0.1:0 \
    --listen tcp://127.0.0.2:0 >"$work/server.log" 2>&1 &
server=$!
portal() { grep -o "listening on tcp://$1:[0-9]*" "$work/server.log" | head -n 1 | cut -d' ' -f3; }
for _ in {1..100}; do
    if [ -n "$(portal 127.0.0.1)" ] && [ -n "$(portal 127.0.0.2)" ]; then break; fi
    kill -0 $server 2>/dev/null || die "the server ended"
    sleep 0.1
done
one=$(portal 127.0.0.1) two=$(portal 127.0.0.2)
if [ -z "$one" ] || [ -z "$two" ]; then die "the server is not listening after 10 s"; fi
echo "$one $two"

step "5/8 rtrs-client attaches the export over both paths"
client attach vol0 --path "$one" --path "$two" --socket "$work/vol0.sock"
uri="nbd+unix:///vol0?socket=$work/vol0.sock"
client list
timeout 30 nbdinfo "$uri"

step "6/8 copy the file system in and out, and check it"
timeout 300 nbdcopy --flush "$work/ext4.img" "$uri"
timeout 300 nbdcopy "$uri" "$work/copy.img"
after=$(sha256sum <"$work/copy.img")
[ "$before" = "$after" ] || die "checksums differ: $before in, $after out"
e2fsck -fn "$work/copy.img" || die "e2fsck found errors in the copy"
cmp "$work/ext4.img" "$work/vol0.img" || die "the exported file differs from the image"
echo "checksum, file system and exported file are correct"

step "7/8 fio: random reads and writes for 5 s, every block verified"
timeout 120 fio --name=verify --ioengine=nbd --uri="$uri" --rw=randrw --bsrange=4k-128k \
    --iodepth=16 --size=64m --time_based=1 --runtime=5 --verify=crc32c --verify_fatal=1 \
    --verify_state_save=0 --thread=1 |
    grep -E 'err=|IOPS=|error'

step "8/8 the session's statistics, then detach"
client stats vol0
client detach vol0
kill -TERM $server
wait_gone $server || die "the server did not end within 10 s of SIGTERM"
wait $server || die "the server ended with status $?"
server=
[ -z "$(session_pids)" ] || die "the session's process still exists after detach"
