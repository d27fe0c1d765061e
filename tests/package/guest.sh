#!/usr/bin/env bash
# Run as root by scripts/package-test.sh in its virtual machine at each boot. That script counts the
# PASS and FAIL lines; `@@ done` is the last line. There are three boots: `install` follows the
# documents, uses and upgrades the packages, and prepares the next boot; `booted` checks the mounts;
# `again` checks the shutdown and purges the packages.
set -u
export LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /var/lib/package-test || exit 1
# shellcheck disable=SC1091
. ./settings
stage=$(cat stage 2>/dev/null || echo install)

check() { # text command...
    local text=$1
    shift
    if "$@" >out 2>&1 </dev/null; then echo "PASS $stage: $text"; else
        echo "FAIL $stage: $text: $*"
        tail -n 20 out | cut -c1-200 | sed 's/^/   /'
    fi
}

fails() { ! "$@"; }

within() { # seconds command...
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep 0.5
    done
}

is() { # found wanted
    [ "$1" = "$2" ] || {
        echo "found '$1', wanted '$2'"
        return 1
    }
}

property() { systemctl show -P "$2" "$1"; }

unit() { systemd-escape --template=rtrs-client@.service "$1"; }

next() { # stage
    echo "$1" >stage
    sync
    systemctl reboot
    exit 0
}

# Checks that no client session and no udev link is left.
nothing_left() {
    is "$(rtrs-client list | wc -l)" 1 || is "$(rtrs-client list)" '' || return 1
    within 300 fails sh -c 'ls /dev/rtrs/* /dev/disk/by-id/rtrs-*'
}

# Lists all files except backups of the user database, because the user rtrs remains.
all_files() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp \
        -o -path /var/lib/dpkg -o -path /var/log -o -path /var/cache -o -path /var/tmp \
        -o -path /var/lib/package-test -o -path /var/lib/systemd -o -path /mnt \) -prune \
        -o -print | grep -vE '^/etc/([a-z]+-|\.pwd\.lock)$' | sort
}

# Prints the commands of a code block in a section of a document.
block() { # file section number
    awk -v heading="## $2" -v wanted="$3" '
        !code && /^#/ { here = $0 == heading }
        here && /^```/ { code = !code; count += code; next }
        code && count == wanted' "$1"
}

# Runs a code block, modified by the sed commands.
follow() { # file section number [sed...]
    block "${@:1:3}" | sed "${@:4}" -e '' >commands
    [ -s commands ] && (cd debs/1 && bash -ex ../../commands)
}

# Common changes to the quick starts: the server runs in the background, and /dev/vdb is used.
QUICK=(-e 's|^rtrs-server |systemd-run -q --unit=quick --service-type=notify &|'
    -e 's|/dev/sdb|/dev/vdb|')

uses_quick() { # identity
    within 300 test -b /dev/rtrs/vol0 && rtrs-server session list | grep -F "$1" \
        && mkfs.ext4 -qF /dev/rtrs/vol0 && e2fsck -fn /dev/rtrs/vol0 \
        && rtrs-client detach vol0 && systemctl stop quick
}

follow_documents() {
    local section='Install on Debian 12' server client
    ip address add 10.0.0.2/32 dev lo
    check "README: the commands on the server" follow README.md "$section" 2
    check "README: the commands on the client" follow README.md "$section" 3
    check "README: the file system is mounted" mountpoint /mnt
    check "README: the file system stores data" \
        sh -c 'cp README.md /mnt && cmp README.md /mnt/README.md'
    check "README: the manual page is installed" man -w rtrs-client-attach
    check "systemctl status names the session" grep -q 'RTRS network block device vol0' \
        <(systemctl status --no-pager rtrs-client@vol0)
    umount /mnt
    sed -i '/_netdev/d' /etc/fstab
    systemctl disable --now rtrs-client@vol0 rtrs-server

    section='Quick start'
    server=$(bash -c "$(block keys.md "$section" 1 | sed -n 1p)")
    client=$(bash -c "$(block keys.md "$section" 1 | sed -n 2p)")
    check "keys: the quick start" follow keys.md "$section" 1 "${QUICK[@]}" \
        -e "1,2d; s|ed25519:AAAA...|$server|; s|ed25519:BBBB...|$client|"
    check "keys: a device is used" uses_quick key:db1

    check "certificates: templates" follow tls.md "$section" 1
    check "certificates: keys and certificates" follow tls.md "$section" 2
    mkdir -m 700 /etc/rtrs/tls
    mv debs/1/*.pem /etc/rtrs/tls
    rm debs/1/*.cfg
    echo '10.0.0.2 store1.example.org' >>/etc/hosts
    check "certificates: the quick start" follow tls.md "$section" 3 "${QUICK[@]}"
    check "certificates: a device is used" uses_quick certificate:db1

    check "apt purges both packages" apt-get -y purge rtrs-client rtrs-server
    rm -rf /etc/rtrs /srv/vols
}

install_and_use() {
    local pool dash pids fio
    all_files >files.before
    check "all packages install" sh -c 'dpkg -i debs/1/*.deb'
    check "the server does not run before it is configured" fails systemctl is-active rtrs-server
    check "the units are valid" systemd-analyze verify --man=no rtrs-server.service \
        rtrs-client@x.service rtrs-apply.service
    mkdir -p /srv/vols /etc/rtrs/pool
    truncate -s 64M /srv/vols/dash.img /srv/vols/pool.img
    chown -R rtrs /srv/vols
    cat >/etc/rtrs/server.yaml <<'YAML'
export:
  - name: vol-0
    target: /srv/vols/dash.img
  - name: pool/vol-1
    target: /srv/vols/pool.img
listen: tcp://127.0.0.1:1234
insecure-open: true
YAML
    check "the server starts" systemctl enable --now rtrs-server
    check "the server reported that it is ready" grep -q 'listening on tcp://127.0.0.1:1234' \
        <(systemctl status --no-pager rtrs-server)
    check "the server runs as rtrs" is "$(ps_user rtrs-server)" rtrs
    echo 'discovery: on' >>/etc/rtrs/server.yaml
    check "it reloads" systemctl reload rtrs-server
    cp /etc/rtrs/server.yaml good.yaml
    echo 'no-such-key: 1' >>/etc/rtrs/server.yaml
    check "a reload with an invalid file fails" fails systemctl reload rtrs-server
    check "the server continues" systemctl is-active rtrs-server
    cp good.yaml /etc/rtrs/server.yaml

    printf 'path: tcp://127.0.0.1\ndevice: auto\nquick-takeover: true\nno-path: queue\n' \
        | tee /etc/rtrs/vol-0.yaml >/etc/rtrs/pool/vol-1.yaml
    dash=$(unit vol-0) pool=$(unit pool/vol-1)
    check "a name with a dash starts as $dash" systemctl enable --now "$dash"
    check "a name with a slash and a dash starts as $pool" systemctl enable --now "$pool"
    check "an unescaped instance name fails" fails systemctl start rtrs-client@vol-0.service
    check "both sessions are open" is "$(rtrs-client list | grep -c ' open ')" 2
    check "/dev/rtrs/vol-0 is a device" test -b /dev/rtrs/vol-0
    check "/dev/rtrs/pool/vol-1 is a device" test -b /dev/rtrs/pool/vol-1
    check "each device has a link by its identity" is \
        "$(find /dev/disk/by-id -name 'rtrs-*' | wc -l)" 2
    check "the links survive other events" sh -c \
        'udevadm trigger --settle /dev/rtrs/vol-0 && test -b /dev/rtrs/vol-0'
    check "a partition has links" partition_has_links

    check "a file system is made and mounted" sh -c \
        'mkfs.ext4 -q /dev/rtrs/pool/vol-1 && mkdir -p /mnt/pool &&
            mount /dev/rtrs/pool/vol-1 /mnt/pool'
    rm -f rounds enough
    load &
    fio=$!
    check "a load runs" within 600 test -s rounds
    pids="$(property rtrs-server MainPID) $(property "$pool" MainPID)"
    check "both packages are upgraded under load" sh -c 'dpkg -i debs/2/*.deb'
    check "the server is another process" fails is "${pids% *}" "$(property rtrs-server MainPID)"
    check "the session is the same process" is "${pids#* }" "$(property "$pool" MainPID)"
    kill -STOP "$(property rtrs-server MainPID)"
    check "a hanging server is restarted" within 900 restarted rtrs-server
    mkdir "/etc/systemd/system/$pool.d"
    printf '[Service]\nWatchdogSec=30s\n' >"/etc/systemd/system/$pool.d/watchdog.conf"
    systemctl daemon-reload
    kill -KILL "$(property "$pool" MainPID)"
    check "a killed session is restarted" within 600 restarted "$pool"
    kill -STOP "$(property "$pool" MainPID)"
    check "a hanging session is restarted" within 900 restarted "$pool" 2
    rm -r "/etc/systemd/system/$pool.d"
    systemctl daemon-reload
    check "the load continues" within 600 more_rounds "$(wc -l <rounds)"
    touch enough
    check "the load got no error" wait "$fio"
    check "the package of a mounted device is not removed" fails dpkg --remove rtrs-client
    check "the session continues" sh -c 'echo x >/mnt/pool/x && sync -f /mnt/pool/x'
    check "the file system is unmounted" umount /mnt/pool
    check "the file system is clean" e2fsck -fn /dev/rtrs/pool/vol-1
    check "a session is detached by command" rtrs-client detach pool/vol-1
    check "its service ends cleanly" within 300 is_inactive "$pool"
    check "sessions stop" systemctl disable --now "$dash" "$pool"
    check "no session is left" nothing_left
    check "the server stops" systemctl disable --now rtrs-server
    check "the server exited cleanly" is "$(property rtrs-server Result)" success
}

# Writes and verifies data until `enough` exists, counting the rounds in `rounds`.
load() {
    until [ -e enough ]; do
        fio --name=load --directory=/mnt/pool --size=4M --rw=randwrite --bs=4k --verify=crc32c \
            --verify_backlog=64 --ioengine=psync --fsync=16 >fio.log 2>&1 </dev/null || return 1
        echo round >>rounds
    done
}

more_rounds() { # than
    [ "$(wc -l <rounds)" -gt "$1" ]
}

ps_user() { # unit
    stat -c %U "/proc/$(property "$1" MainPID)"
}

restarted() { # unit [times]
    [ "$(property "$1" NRestarts)" -ge "${2:-1}" ] && systemctl is-active --quiet "$1"
}

is_inactive() { # unit
    [ "$(property "$1" ActiveState)" = inactive ]
}

partition_has_links() {
    echo ',,L' | sfdisk -q /dev/rtrs/vol-0 || return 1
    within 300 test -b /dev/rtrs/vol-0-part1 || return 1
    within 300 sh -c 'ls /dev/disk/by-id/rtrs-*-part1' || return 1
    wipefs -qaf /dev/rtrs/vol-0 && blockdev --rereadpt /dev/rtrs/vol-0
}

# Sets up one volume with its own service and a second one with rtrs-apply, both in fstab.
prepare_boot() {
    local name
    printf 'path: tcp://10.0.2.2:%s\ndevice: /dev/nbd3\n' "$PORT" >/etc/rtrs/boot-vol.yaml
    cat >/etc/rtrs/volumes.yaml <<YAML
sessions:
- path: tcp://10.0.2.2:$PORT
  volumes:
  - export: applied
    device: /dev/nbd4
YAML
    check "a volume of the host starts" systemctl enable --now "$(unit boot-vol)"
    check "another volume starts with rtrs-apply" systemctl enable --now rtrs-apply
    check "rtrs-apply reloads" systemctl reload rtrs-apply
    for name in boot-vol applied; do
        check "$name is formatted" mkfs.ext4 -q "/dev/rtrs/$name"
        mkdir -p "/mnt/$name"
    done
    {
        echo "/dev/rtrs/boot-vol /mnt/boot-vol ext4 _netdev 0 2"
        echo "$(find /dev/disk/by-id -lname '*nbd4') /mnt/applied ext4 _netdev 0 2"
    } >>/etc/fstab
    systemctl daemon-reload
}

# Prints the time at which a unit became active, in microseconds since the boot.
active_at() { property "$1" ActiveEnterTimestampMonotonic; }

not_later() { # unit unit
    [ "$(active_at "$1")" -gt 0 ] && [ "$(active_at "$1")" -le "$(active_at "$2")" ]
}

look_at_boot() {
    local name mount session
    check "the boot has ended" within 900 fails sh -c 'systemctl is-system-running | grep starting'
    check "no unit failed" is "$(systemctl --failed --no-legend --plain)" ''
    check "no unit was dropped because of a cycle" fails grep -q 'ordering cycle' <(journalctl -b)
    for name in boot-vol applied; do
        check "$name is mounted" mountpoint "/mnt/$name"
        mount=$(systemd-escape -p --suffix=mount "/mnt/$name")
        session=$(unit "$name")
        [ $name != applied ] || session=rtrs-apply.service
        check "$name: $session before $mount" not_later "$session" "$mount"
        check "$name: the network before $session" not_later network-online.target "$session"
        # Data for the shutdown to write.
        head -c 8M /dev/urandom >data
        cp data "/mnt/$name/data"
        sha256sum <data >"sum-$name"
    done
}

# Prints the number of the first line with the given text in the previous boot's journal.
line_of() { grep -nF -m1 -- "$1" journal | cut -d: -f1; }

in_order() { # text text
    local first second
    first=$(line_of "$1") second=$(line_of "$2")
    [ -n "$first" ] && [ -n "$second" ] && [ "$first" -lt "$second" ] && return 0
    echo "'$1' in line '$first', '$2' in line '$second' of"
    grep -F -e mnt- -e rtrs -e networkd journal
    return 1
}

look_at_end() {
    local name mount
    # The end of the previous boot's journal.
    journalctl -b -1 -o cat | sed -n '/Stopped target multi-user.target/,$p' >journal
    for name in boot-vol applied; do
        mount=$(systemd-escape -p --suffix=mount "/mnt/$name")
        session=$(unit "$name")
        [ $name != applied ] || session=rtrs-apply.service
        check "$name was unmounted before its session stopped" \
            in_order "Unmounted $mount" "Stopping $session"
        check "$name: the session ended before the network" \
            in_order "Stopped $session" "Stopping systemd-networkd.service"
        check "$name is mounted again" mountpoint "/mnt/$name"
        check "$name has the last written data" is "$(sha256sum <"/mnt/$name/data")" \
            "$(cat "sum-$name")"
    done
    check "no file system error" fails grep -E 'EXT4-fs (error|warning)|JBD2: .*error' \
        <(journalctl -b -1 -k)
    # Earlier in the journal, the kernel may fail to read the partitions of a reconnected device.
    check "no IO error at the end" fails grep 'I/O error' journal
    check "no session was killed" fails grep -E 'did not end in time|still in use' journal
}

purge() {
    check "file systems are unmounted" umount /mnt/boot-vol /mnt/applied
    sed -i '/_netdev/d' /etc/fstab
    systemctl daemon-reload
    check "all packages are purged" dpkg --purge rtrs-client rtrs-server rds librtrs-dev librtrs0
    check "no process is left" fails pgrep -x 'rtrs-(client|server)'
    check "no unit is left" is "$(systemctl list-units --all --no-legend --plain 'rtrs-*')" ''
    check "no udev link is left" fails sh -c 'ls /dev/rtrs/* /dev/disk/by-id/rtrs-*'
    check "nothing is left in /run" fails sh -c 'ls -d /run/rtrs /run/rtrs-server'
    check "no log and no state is left" fails sh -c 'ls -d /var/log/rtrs /var/lib/rtrs'
    # Files that this test has created.
    rm -rf /srv/vols /etc/rtrs/pool /etc/rtrs/*.yaml
    rmdir /etc/rtrs 2>/dev/null
    all_files >files.after
    check "no file is left" diff files.before files.after
}

echo "   boot of stage $stage: $(cut -d. -f1 /proc/uptime) s after power on"
case $stage in
    install)
        follow_documents
        install_and_use
        prepare_boot
        next booted
        ;;
    booted)
        look_at_boot
        next again
        ;;
    again)
        look_at_end
        purge
        echo '@@ done'
        systemctl poweroff
        ;;
esac
