#!/usr/bin/env bash
# Installs the Debian packages on a bare Debian 12 and uses them: in a chroot without an init, and
# in a virtual machine with systemd, where they are upgraded under load, mount a file system at boot
# and unmount it at shutdown, and are purged. docs/explanation/testing.md lists the checks. Builds
# the packages first. Needs root, Debian on x86_64, what scripts/lab.sh setup installs, and
# debootstrap.
#
#   scripts/package-test.sh [--chroot]    --chroot: without the virtual machine
#
# Environment: RTRS_LAB_CACHE as for scripts/lab.sh, CARGO_TARGET_DIR.
# Exit codes: 0 nothing failed, 1 a check failed, 2 wrong usage, 3 this machine lacks something.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
PATH=$PATH:/usr/sbin:/sbin

# shellcheck source=scripts/lab-setup.sh
. scripts/lab-setup.sh

SUITE=bookworm
# Packages of the bare system: the dependencies of our packages, the init, and test tools.
INCLUDE=bash-completion,e2fsprogs,fdisk,fio,gcc,gnutls-bin,iproute2,kmod,libc6-dev,libibverbs-dev
INCLUDE+=,librdmacm-dev,man-db,pkg-config,procps,systemd-sysv,udev
# Time limit for the virtual machine, from power on to power off. The machine is emulated, and other
# machines may be running at the same time.
GUEST_SECONDS_MAX=7200
MODULES=(nbd virtio_net ext4)
TRIPLET=x86_64-linux-gnu

# A program written without the node in mind sends itself a message. shellcheck disable=SC2016
RDS_USE='export RDS_DIR=/run/rds-test
rds node --address 127.0.0.1 --listen-port 26386 & node=$!
for _ in $(seq 100); do [ -S $RDS_DIR/127.0.0.1.sock ] && break; sleep 0.1; done
LD_PRELOAD=/usr/lib/rds/librds_preload.so timeout 20 perl -MSocket -e "
    my \$me = pack_sockaddr_in(4000, inet_aton(q(127.0.0.1)));
    socket(my \$s, 21, SOCK_SEQPACKET, 0) or die;
    bind(\$s, \$me) or die;
    send(\$s, q(hello), 0, \$me) && defined(recv(\$s, my \$got, 100, 0)) or die;
    \$got eq q(hello) or die"
result=$?
kill $node && wait $node && rmdir $RDS_DIR && exit $result'

# The program of docs/how-to/embed.md, compiled with the commands there, writes to a volume.
# shellcheck disable=SC2016
LIBRARY_USE='cd /srv/library || exit
rtrs-server --insecure-open --export vol0=mem:16M --listen tcp://127.0.0.1:0 --run-dir run \
    --state-dir state >out & server=$!
for _ in $(seq 100); do
    portal=$(sed -n "s/^listening on //p" out); [ -n "$portal" ] && break; sleep 0.1
done
sed -i "s|tcp://10.0.0.2/vol0?path=tcp://10.1.0.2|$portal/vol0?retry-for=30s|" hello.c
result=0
for how in shared static; do
    rm -f hello
    { sh -e ./$how && ./hello; } >said 2>&1
    cat said
    grep -qx "the write of hello: Success" said || result=1
    ldd ./hello | grep -q librtrs && linked=shared || linked=static
    [ $linked = $how ] || { echo "linked $linked, not $how"; result=1; }
done
kill $server && wait $server && exit $result'

guest=1
case $* in
    '') ;;
    --chroot) guest=0 ;;
    -h | --help)
        sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *)
        echo "package-test: unknown arguments '$*'; see scripts/package-test.sh --help" >&2
        exit 2
        ;;
esac

say() { printf 'package-test: %s\n' "$*"; }

lacks() { # what
    say "missing: $*" >&2
    exit 3
}

passed=0 failed=0
server='' qemu=''
work=$(mktemp -d "${TMPDIR:-/tmp}/rtrs-package.XXXXXX") || exit 1
cleanup() {
    local pid
    for pid in $server $qemu; do kill "$pid" 2>/dev/null; done
    mountpoint -q "$work/root/proc" && umount "$work/root/proc"
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

check() { # text command...
    local text=$1
    shift
    if "$@" >"$work/out" 2>&1 </dev/null; then
        say "PASS $text"
        passed=$((passed + 1))
    else
        say "FAIL $text: $*"
        tail -n 20 "$work/out" | sed 's/^/   /'
        failed=$((failed + 1))
    fi
}

# Creates a bare system in $1 from the cache.
bare() { # directory
    local base
    base=$LAB_CACHE/package-test/$SUITE-$(cksum <<<"$INCLUDE" | cut -d' ' -f1)
    if [ ! -e "$base.ready" ]; then
        rm -rf "$base"
        mkdir -p "${base%/*}"
        say "debootstrap $SUITE"
        debootstrap --variant=minbase --include="$INCLUDE" "$SUITE" "$base" \
            >"$base.log" 2>&1 || {
            tail -n 15 "$base.log" >&2
            lacks "a bare system; log: $base.log"
        }
        : >"$base.ready"
    fi
    cp -a --reflink=auto "$base" "$1"
}

in_root() { chroot "$work/root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }

# Lists all files except the files of dpkg and the journal.
files() {
    find "$work/root" -xdev \( -path "$work/root/proc" -o -path "$work/root/var/lib/dpkg" \
        -o -path "$work/root/var/log" -o -path "$work/root/var/cache" \) -prune \
        -o -printf '%P\n' | sort
}

contains() { # package file...
    local file files
    # Not piped into grep: dpkg-deb would fail if grep exited first.
    files=$(dpkg-deb -c "$work/debs/1/$1"_*.deb | awk '{ print $6 }')
    for file in "${@:2}"; do
        grep -qxF "./$file" <<<"$files" || {
            echo "no $file in $1"
            return 1
        }
    done
}

# Prints a control file of a package.
control() { # package file
    dpkg-deb --info "$work/debs/1/$1"_*.deb "$2"
}

says() { # word command...
    local said
    said=$("${@:2}") && echo "$said" && grep -qF -- "$1" <<<"$said"
}

# Writes the program in the document and the commands that compile the program.
prepare_library_use() { # directory
    local page=docs/how-to/embed.md
    mkdir -p "$1"
    awk '/^```$/ { inside = 0 } inside; /^#include <rtrs.h>$/ && !inside { inside = 1; print }' \
        "$page" >"$1/hello.c"
    grep -o 'cc -o hello hello\.c \$(pkg-config --cflags --libs rtrs)' "$page" >"$1/shared"
    sed -n '/^cc -o hello hello.c .*librtrs\.a/,/^```$/{/^```$/!p}' "$page" >"$1/static"
    [ -s "$1/hello.c" ] && [ -s "$1/shared" ] && [ -s "$1/static" ]
}

# Compares the files before and after, except files that contain the user rtrs, which is not
# removed.
same_files_but_user() {
    local user='etc/(passwd|group|g?shadow|subuid|subgid)-?|etc/\.pwd\.lock'
    diff <(grep -vxE "$user" "$work/before") <(grep -vxE "$user" "$work/after")
}

in_chroot() {
    local shell
    bare "$work/root"
    mount -t proc proc "$work/root/proc" || return 1
    cp -r "$work/debs" "$work/root/srv/"
    files >"$work/before"
    check "chroot: the packages install" in_root sh -c 'dpkg -i /srv/debs/1/*.deb'
    for shell in usr/share/bash-completion/completions/ usr/share/zsh/vendor-completions/_ \
        usr/share/fish/vendor_completions.d/; do
        for name in rtrs-server rtrs-client rds; do
            [[ $shell != *fish* ]] || name=$name.fish
            check "chroot: completion $shell$name" test -s "$work/root/$shell$name"
        done
    done
    check "chroot: rtrs-server runs" in_root rtrs-server --check --export v=mem:1M \
        --listen tcp://127.0.0.1:0 --run-dir /run/x --state-dir /run/y
    check "chroot: rtrs-client runs" in_root rtrs-client list
    check "chroot: rds runs" in_root rds node --print-config --config /etc/rds/node.yaml
    check "chroot: a message passes over the library of rds" in_root sh -c "$RDS_USE"
    check "chroot: the linker finds the library" in_root sh -c 'ldconfig -p | grep -F librtrs.so.0'
    check "chroot: the document has the program" prepare_library_use "$work/root/srv/library"
    check "chroot: the program of the document works" in_root bash -c "$LIBRARY_USE"
    check "chroot: the version names the revision" in_root sh -c \
        "rtrs-client --version | grep -F '(revision $(git rev-parse --short=12 HEAD 2>/dev/null)'"
    check "chroot: man finds the pages" in_root sh -c \
        'man -w rtrs-server && man -w rtrs-client-attach && man -w rds-node'
    check "chroot: the user rtrs exists" in_root getent passwd rtrs
    check "chroot: the daemons are not enabled" in_root sh -c \
        '! systemctl is-enabled --quiet rtrs-server && ! systemctl is-enabled --quiet rds-node'
    check "chroot: a changed configuration is kept by an upgrade" in_root sh -c \
        'echo "# mine" >>/etc/rtrs/server.yaml && dpkg -i /srv/debs/2/*.deb </dev/null &&
            grep -x "# mine" /etc/rtrs/server.yaml'
    check "chroot: all packages are purged" in_root dpkg --purge rtrs-client rtrs-server rds \
        librtrs-dev librtrs0
    rm -rf "$work/root/srv/library"
    umount "$work/root/proc"
    files >"$work/after"
    check "chroot: only the user is left" same_files_but_user
}

# Copies the modules that the guest needs, with their dependencies.
copy_modules() { # release root
    local module file
    mkdir -p "$2/lib/modules/$1"
    for module in "${MODULES[@]}"; do
        modprobe -S "$1" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
    done | sort -u | while read -r file; do
        mkdir -p "$2${file%/*}" && cp "$file" "$2$file"
    done
    cp "/lib/modules/$1"/modules.{order,builtin,builtin.modinfo} "$2/lib/modules/$1/"
    depmod -b "$2" "$1"
}

# Configures the guest: network by DHCP, tests/package/guest.sh at each boot.
prepare_guest() { # root port
    printf '[Match]\nName=e*\n[Network]\nDHCP=ipv4\n' >"$1/etc/systemd/network/all.network"
    chroot "$1" systemctl enable systemd-networkd systemd-networkd-wait-online >/dev/null 2>&1
    mkdir -p "$1/var/log/journal" "$1/var/lib/package-test" "$1/etc/systemd/system.conf.d"
    # Time limits for units that set none.
    printf 'Default%sSec=15min\n' TimeoutStart TimeoutStop DeviceTimeout |
        sed '1i [Manager]' >"$1/etc/systemd/system.conf.d/slow.conf"
    echo package-test >"$1/etc/hostname"
    echo "/dev/vda / ext4 defaults 0 1" >"$1/etc/fstab"
    cp tests/package/guest.sh README.md docs/how-to/{keys,tls}.md "$1/var/lib/package-test/"
    echo "PORT=$2" >"$1/var/lib/package-test/settings"
    cp -r "$work/debs" "$1/var/lib/package-test/"
    cat >"$1/etc/systemd/system/package-test.service" <<'UNIT'
[Unit]
After=multi-user.target
# QEMU exits when the guest requests a reboot.
[Service]
Type=simple
ExecStart=/bin/bash /var/lib/package-test/guest.sh
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=graphical.target
UNIT
    chroot "$1" systemctl enable package-test >/dev/null 2>&1
    chroot "$1" systemctl mask serial-getty@ttyS0.service >/dev/null 2>&1
}

start_server() {
    mkdir -p "$work/volumes"
    truncate -s 128M "$work/volumes/boot-vol.img" "$work/volumes/applied.img"
    dpkg-deb -x "$work"/debs/1/rtrs-server_*.deb "$work/host"
    "$work/host/usr/bin/rtrs-server" --insecure-open --listen tcp://127.0.0.1:0 \
        --server-id package-test --export "boot-vol=$work/volumes/boot-vol.img,id=boot-vol" \
        --export "applied=$work/volumes/applied.img,id=applied" \
        --run-dir "$work/run" --state-dir "$work/state" >"$work/server.out" 2>"$work/server.log" &
    server=$!
    for _ in {1..100}; do
        port=$(sed -n 's/^listening on tcp:.*://p' "$work/server.out")
        [ -z "$port" ] || return 0
        sleep 0.1
    done
    tail -n 5 "$work/server.log"
    return 1
}

in_guest() {
    local kernel release port line status=1 append
    # Unit names in log messages, in place of descriptions.
    append='root=/dev/vda rw console=ttyS0 quiet systemd.show_status=0 tsc=reliable'
    append+=' systemd.status_unit_format=name'
    kernel=$(lab_kernel) || lacks "a kernel; scripts/lab.sh setup"
    release=${kernel% *}
    start_server || {
        failed=$((failed + 1))
        say "FAIL the server of the host listens"
        return
    }
    rm -rf "$work/root"
    bare "$work/root"
    copy_modules "$release" "$work/root"
    prepare_guest "$work/root" "$port"
    truncate -s 3G "$work/disk.img"
    truncate -s 64M "$work/free.img"
    mke2fs -q -t ext4 -d "$work/root" "$work/disk.img" || return 1
    rm -rf "$work/root"
    say "booting the guest (at most $GUEST_SECONDS_MAX s)"
    timeout -k 10 "$GUEST_SECONDS_MAX" qemu-system-x86_64 -machine accel=tcg -cpu max -smp 2 -m 2G \
        -display none -monitor none -serial "file:$work/serial" \
        -kernel "/boot/vmlinuz-$release" -initrd "/boot/initrd.img-$release" \
        -append "$append" \
        -drive "file=$work/disk.img,format=raw,if=virtio,cache=unsafe" \
        -drive "file=$work/free.img,format=raw,if=virtio,cache=unsafe" \
        -netdev user,id=n -device virtio-net-pci,netdev=n </dev/null >"$work/qemu.log" 2>&1 &
    qemu=$!
    : >>"$work/serial"
    while IFS= read -r line; do
        line=${line%$'\r'}
        case $line in
            PASS\ *) passed=$((passed + 1)) ;;
            FAIL\ *) failed=$((failed + 1)) ;;
            '@@ done') status=0 ;;
            '   '*) ;;
            *) continue ;;
        esac
        [ "$line" = '@@ done' ] || printf 'package-test: %s [%s s]\n' "$line" "$SECONDS"
    done < <(tail -n +1 -f --pid=$qemu "$work/serial")
    wait $qemu
    qemu=
    if [ $status -ne 0 ]; then
        say "FAIL the guest completed; the last lines of its console:"
        tail -n 40 "$work/serial" "$work/qemu.log" | sed 's/^/   /'
        failed=$((failed + 1))
    fi
}

[ "$(id -u)" -eq 0 ] || lacks "root"
command -v debootstrap >/dev/null || lacks "debootstrap; apt-get install debootstrap"
[ $guest -eq 0 ] || command -v qemu-system-x86_64 >/dev/null || lacks "QEMU; scripts/lab.sh setup"

for revision in 1 2; do
    mkdir -p "$work/debs/$revision"
    scripts/package.sh --revision $revision >"$work/built" || exit 1
    while read -r line; do cp "$line" "$work/debs/$revision/"; done <"$work/built"
done
check "rtrs-server has its files" contains rtrs-server usr/bin/rtrs-server etc/rtrs/server.yaml \
    usr/lib/systemd/system/rtrs-server.service usr/lib/systemd/system/rtrs-server.socket \
    usr/lib/sysusers.d/rtrs-server.conf \
    usr/share/man/man8/rtrs-server.8.gz usr/share/man/man8/rtrs-server-session-list.8.gz \
    usr/share/man/man5/rtrs-server.yaml.5.gz usr/share/man/man5/exports.d.5.gz
check "rtrs-client has its files" contains rtrs-client usr/bin/rtrs-client etc/rtrs/volumes.yaml \
    usr/lib/systemd/system/rtrs-client@.service usr/lib/systemd/system/rtrs-client@.socket \
    usr/lib/systemd/system/rtrs-apply.service \
    usr/lib/systemd/system/rtrs-apply-check.service \
    usr/lib/systemd/system/rtrs-client-exporter.service \
    usr/lib/systemd/system/rtrs-client-exporter.socket \
    usr/share/man/man8/rtrs-client-exporter.8.gz \
    usr/lib/udev/rules.d/60-rtrs.rules usr/share/man/man8/rtrs-client-attach.8.gz \
    usr/share/man/man5/rtrs-client.yaml.5.gz usr/share/man/man5/volumes.yaml.5.gz
check "rds has its files" contains rds usr/bin/rds usr/lib/rds/librds_preload.so \
    etc/rds/node.yaml usr/lib/systemd/system/rds-node.service \
    usr/share/man/man1/rds-ping.1.gz usr/share/man/man5/rds.yaml.5.gz \
    usr/share/man/man8/rds-node.8.gz
check "librtrs0 has its files" contains librtrs0 "usr/lib/$TRIPLET/librtrs.so.0" \
    usr/share/doc/librtrs0/copyright usr/share/doc/librtrs0/changelog.Debian.gz
check "librtrs-dev has its files" contains librtrs-dev usr/include/rtrs.h \
    "usr/lib/$TRIPLET/librtrs.so" "usr/lib/$TRIPLET/librtrs.a" \
    "usr/lib/$TRIPLET/pkgconfig/rtrs.pc" \
    usr/share/doc/librtrs-dev/copyright usr/share/doc/librtrs-dev/examples/copy.c
check "librtrs0 names its soname" says 'librtrs 0 librtrs0 (>= 0.1.0)' control librtrs0 shlibs
check "librtrs0 depends on the libraries in use" says 'librdmacm1 (>= ' control librtrs0 control
check "librtrs-dev needs the same librtrs0" says 'librtrs0 (= 0.1.0-1)' control librtrs-dev control
in_chroot
[ $guest -eq 0 ] || in_guest
say "$passed passed, $failed failed"
[ $failed -eq 0 ]
