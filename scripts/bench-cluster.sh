#!/usr/bin/env bash
# Compares exports of other servers' storage with the usual programs: fio over rtrs-client and an
# export rbd: with fio over qemu-nbd on the same Ceph image; `rtrs-client bench` on that export with
# fio's own engine rbd; fio over rtrs-client and an export nbd: of nbdkit with fio over nbdkit.
# Starts a Ceph cluster (scripts/ceph.sh) in a scratch directory. Interleaved, medians.
# Usage: scripts/bench-cluster.sh [OPTION...]; bench_cluster.py takes the options: see --help. Needs
# fio with the engines nbd and rbd, nbdkit, qemu-utils, and what scripts/ceph.sh install installs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bench() { python3 scripts/bench_cluster.py "$@"; }
case " $* " in
    *" -h "* | *" --help "* | *" --list "*)
        bench "$@"
        exit
        ;;
esac
work=$(mktemp -d)
cleanup() {
    scripts/ceph.sh stop "$work/ceph" || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 143' TERM INT HUP
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])')
scripts/ceph.sh start "$work/ceph" "$port"
# For all sides. Our server never has a cache.
printf '[client]\nrbd cache = false\n' >>"$work/ceph/ceph.conf"
export CEPH_CONF=$work/ceph/ceph.conf
bench --cluster "$work/ceph" "$@"
