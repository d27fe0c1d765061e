#!/usr/bin/env bash
# Checks that the lab selects the kernel that a scenario names, downloads it once, and counts a
# scenario whose kernel is missing as skipped. Uses stand-ins for apt and no guest. Called by
# scripts/test.sh. Exit 0 if all checks passed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
export RTRS_LAB_CACHE=$scratch/cache
# shellcheck source=scripts/lab-setup.sh
. scripts/lab-setup.sh
# shellcheck source=scripts/lab-run.sh
. scripts/lab-run.sh

wrong=0
check() { # text found wanted
    [ "$2" = "$3" ] && return
    echo "lab-kernel: $1: found '$2', wanted '$3'"
    wrong=1
}

# A package archive with one kernel, and an installed kernel of a different series.
RELEASE=6.12.9+deb12-amd64
archive() {
    local root=$scratch/package modules=$scratch/package/lib/modules/$RELEASE/kernel
    mkdir -p "$root/DEBIAN" "$root/boot" "$modules/net" "$modules/sound" "$scratch/stand-ins"
    printf 'Package: linux-image-%s\nVersion: 1\nArchitecture: amd64\n%s\n' "$RELEASE" \
        'Maintainer: none <none@localhost>
Description: stand-in' >"$root/DEBIAN/control"
    echo image >"$root/boot/vmlinuz-$RELEASE"
    echo module | xz >"$modules/net/rds.ko.xz"
    echo module | xz >"$modules/sound/snd.ko.xz"
    dpkg-deb --root-owner-group --build "$root" "$scratch/image.deb" >/dev/null || exit 1
    stand_in apt-cache "echo '  Depends: linux-image-$RELEASE'"
    stand_in apt-get "echo \"\$*\" >>'$scratch/apt-get.log'; [ ! -e '$scratch/offline' ] || exit 100
        case \$1 in download) cp '$scratch/image.deb' \"\$2.deb\" ;; esac"
    stand_in depmod 'echo deps >"$2/lib/modules/$3/modules.dep.bin"'
    stand_in sudo 'exec "$@"'
    PATH=$scratch/stand-ins:$PATH
}

stand_in() { # name script
    printf '#!/bin/sh\n%s\n' "$2" >"$scratch/stand-ins/$1"
    chmod +x "$scratch/stand-ins/$1"
}

lab_kernel() { echo "6.1.0-9-amd64 6.1.9-1"; }

selected() { # series
    lab_use_kernel "$1" && echo "$LAB_RELEASE ${LAB_IMAGE#"$RTRS_LAB_CACHE"/}"
}

setup_kernel() { # series
    lab_setup_kernel "$1" >"$scratch/out" 2>&1
    echo $?
}

# Runs the scenarios, but only lists the boots.
run() { # name...
    (
        lab_ready() { lab_use_kernel ''; }
        lab_prepare() { :; }
        lab_build() { LAB_BIN=$scratch LAB_BUILD=test LAB_TESTS=(); }
        lab_write_settings() { :; }
        lab_take_lock() { :; }
        lab_boot_once() {
            echo "boot $LAB_RELEASE: ${LAB_LEFT[*]}"
            LAB_LEFT=()
        }
        lab_run "$@" | grep -E '^boot|^SKIP|skipped in' | sed 's/ in [0-9]* s$//'
    )
}

archive
check 'kernels of scenarios' "$(lab_kernels_of rds-kernel rds-faults-612 rds-kernel-612)" 6.12
check 'the default kernel' "$(selected '')" '6.1.0-9-amd64 /boot/vmlinuz-6.1.0-9-amd64'
check 'the installed series' "$(selected 6.1)" '6.1.0-9-amd64 /boot/vmlinuz-6.1.0-9-amd64'
check 'a missing kernel' "$(selected 6.12)" ''
check 'a run without it' "$(run rds-kernel rds-kernel-612)" "boot 6.1.0-9-amd64: rds-kernel
SKIP rds-kernel-612: no kernel 6.12; scripts/lab.sh setup rds-kernel-612
lab: 0 passed, 0 failed, 1 skipped"

mkdir -p "$RTRS_LAB_CACHE/kernel-$RELEASE/boot"
check 'a folder without an image' "$(selected 6.12)" ''
touch "$scratch/offline"
check 'a download that fails' "$(setup_kernel 6.12) $(selected 6.12)" '1 '
rm "$scratch/offline" "$scratch/apt-get.log"
check 'the download' "$(setup_kernel 6.12)" 0
check 'the unpacked kernel' "$(selected 6.12)" \
    "$RELEASE kernel-$RELEASE/boot/vmlinuz-$RELEASE"
check 'its modules' "$(cd "$RTRS_LAB_CACHE/kernel-$RELEASE/lib/modules/$RELEASE" &&
    find . -type f | LC_ALL=C sort | xargs)" './kernel/net/rds.ko ./modules.dep.bin'
check 'a second setup' "$(setup_kernel 6.12) $(cat "$scratch/apt-get.log")" \
    "0 download linux-image-$RELEASE"
check 'a run with it' "$(run rds-kernel rds-kernel-612)" "boot 6.1.0-9-amd64: rds-kernel
boot $RELEASE: rds-kernel-612
lab: 0 passed, 0 failed, 0 skipped"

[ $wrong -eq 0 ] && echo "lab-kernel: all checks passed"
exit $wrong
