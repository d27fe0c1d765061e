#!/usr/bin/env bash
# Runs a Ceph cluster of one monitor and one OSD in a directory, on 127.0.0.1, for tests and for
# trying the backend `rbd:`: no authentication, one copy of everything, all data in memory.
#
#   scripts/ceph.sh start DIR [PORT]   create DIR, start the cluster; configuration: DIR/ceph.conf
#   scripts/ceph.sh stop DIR           stop the cluster; the logs remain
#   scripts/ceph.sh hold DIR [PORT]    start the cluster, print `ready`, and at the end of input
#                                      stop the cluster and remove DIR
#   scripts/ceph.sh install            install the Debian packages
#
# The monitor listens on PORT and PORT + 1 (default: 33300). Pool `rbd` exists, without an image;
# `CEPH_CONF=DIR/ceph.conf rbd create --size 1G rbd/vol0` adds one. Exit codes: 0 done, 1 failed, 2
# wrong usage, 3 the packages are missing (with install: cannot be installed).
set -euo pipefail

PACKAGES=(ceph-mon ceph-osd ceph-common qemu-block-extra)
# Waits are bounded: a slow machine takes several seconds for each command.
UP_SECONDS_MAX=120 STOP_SECONDS_MAX=20

say() { echo "ceph: $*" >&2; }
usage() {
    sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

has_packages() { command -v ceph-mon ceph-osd ceph rbd >/dev/null 2>&1; }

install_packages() {
    has_packages && return
    export DEBIAN_FRONTEND=noninteractive
    local log apt=(apt-get -o DPkg::Lock::Timeout=120)
    log=$(mktemp)
    say "installing ${PACKAGES[*]} (apt-get)"
    # qemu-block-extra removes a qemu-utils from another release, such as backports; the second
    # install then gets the matching version.
    if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${PACKAGES[@]}" &&
        "${apt[@]}" install -y --no-install-recommends qemu-utils; } >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        say "cannot install ${PACKAGES[*]}"
        return 3
    fi
    rm -f "$log"
}

configure() { # port
    local fsid
    fsid=$(cat /proc/sys/kernel/random/uuid)
    cat >"$dir/ceph.conf" <<CONF
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$1,v1:127.0.0.1:$(($1 + 1))]
auth cluster required = none
auth service required = none
auth client required = none
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
osd objectstore = memstore
memstore device bytes = 2147483648
run dir = $dir/run
setuser match path = $dir
mon data = $dir/mon
osd data = $dir/osd
[mon]
log file = $dir/log/\$name.log
pid file = $dir/run/\$name.pid
admin socket = $dir/run/\$name.asok
[osd]
log file = $dir/log/\$name.log
pid file = $dir/run/\$name.pid
admin socket = $dir/run/\$name.asok
CONF
    monmaptool --create --clobber --fsid "$fsid" \
        --addv a "[v2:127.0.0.1:$1,v1:127.0.0.1:$(($1 + 1))]" "$dir/monmap" >/dev/null
}

ceph_in_time() { timeout --kill-after=5 "$UP_SECONDS_MAX" ceph --connect-timeout 30 "$@"; }

start() { # [port]
    local id end=$((SECONDS + UP_SECONDS_MAX))
    if ! has_packages; then
        say "needs ${PACKAGES[*]}; run: scripts/ceph.sh install"
        exit 3
    fi
    if [ -e "$dir" ]; then
        say "$dir already exists; choose another directory"
        exit 1
    fi
    mkdir -p "$dir/mon" "$dir/osd" "$dir/log" "$dir/run"
    configure "${1:-33300}"
    export CEPH_CONF=$dir/ceph.conf
    ceph-mon --mkfs -i a --monmap "$dir/monmap" 2>/dev/null
    # The daemons must not hold descriptors of the caller open.
    ceph-mon -i a </dev/null >/dev/null 2>&1
    id=$(ceph_in_time osd create)
    ceph-osd --mkfs -i "$id" >/dev/null 2>&1
    ceph-osd -i "$id" </dev/null >/dev/null 2>&1
    ceph_in_time osd pool create rbd 8 >/dev/null 2>&1
    until ceph_in_time osd stat | grep -q '1 up'; do
        if [ $SECONDS -ge $end ]; then
            say "the OSD is not up after $UP_SECONDS_MAX s; see $dir/log"
            exit 1
        fi
        sleep 0.3
    done
    timeout "$UP_SECONDS_MAX" rbd pool init rbd
}

stop() {
    local file pid end=$((SECONDS + STOP_SECONDS_MAX))
    for file in "$dir"/run/*.pid; do
        [ -e "$file" ] || continue
        pid=$(cat "$file")
        # Only daemons of this directory.
        grep -qs '^ceph-' "/proc/$pid/comm" || continue
        kill "$pid" 2>/dev/null || continue
        while [ -e "/proc/$pid" ] && [ $SECONDS -lt $end ]; do sleep 0.1; done
        [ ! -e "/proc/$pid" ] || kill -KILL "$pid" 2>/dev/null || true
    done
}

cmd=${1:-} dir=${2:-}
case $cmd in
    install) install_packages ;;
    start | stop | hold)
        [ -n "$dir" ] || usage
        dir=$(realpath -m "$dir")
        case $cmd in
            stop) stop ;;
            start) start "${@:3}" ;;
            hold)
                [ ! -e "$dir" ] || start
                trap 'stop; rm -rf "$dir"' EXIT
                trap 'exit 143' TERM INT HUP
                start "${@:3}"
                echo ready
                cat >/dev/null
                ;;
        esac
        ;;
    *) usage ;;
esac
