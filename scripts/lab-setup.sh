#!/usr/bin/env bash
# Requirements of the lab on this machine: Debian packages, a kernel with headers and source of the
# same version, virtme-ng, and the modules Debian leaves out (rtrs, rnbd, siw, ublk). Sourced by
# scripts/lab.sh; `lab_setup` installs what is missing, `lab_ready` only checks. Build results
# are in folders of LAB_CACHE named after versions, so a newer kernel gets its own build and an
# older one still works. Further kernels, which scenarios name by series, are only unpacked there.
# Every step has a time limit and a log.

# Pinned: other versions may boot differently.
LAB_VNG_VERSION=1.42
LAB_CACHE=${RTRS_LAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rtrs-lab}
LAB_VENV=$LAB_CACHE/virtme-ng-$LAB_VNG_VERSION
LAB_MODULES_BUILT=(rtrs-core rtrs-client rtrs-server rnbd-client rnbd-server siw ublk_drv)

# Packages other than the kernel's, which lab_kernel_packages prints.
LAB_PACKAGES=(
    binutils busybox-static clang e2fsprogs ethtool fio gcc gnutls-bin ibverbs-providers
    ibverbs-utils iproute2 iputils-ping jq kmod libclang-dev libibverbs-dev libnbd-bin librdmacm-dev
    make nbd-client nbd-server nbdkit nftables nvme-cli parted perftest pkg-config procps python3
    qemu-system-x86 qemu-utils qperf rdma-core rdmacm-utils udev util-linux xfsprogs xz-utils
)

lab_say() { printf 'lab: %s\n' "$*"; }

# Prints the installed version of a package, or nothing if it is not installed.
lab_version() { # package
    # shellcheck disable=SC2016
    dpkg-query -W -f '${db:Status-Status} ${Version}\n' "$1" 2>/dev/null |
        awk '$1 == "installed" { print $2; exit }'
}

# Prints the series of a version: 6.1 for 6.1.192-2.
lab_series() { # version
    printf '%s\n' "$1" | cut -d. -f1,2
}

# Prints the newest installed kernel with image, headers and source of the same version, as
# "release version".
lab_kernel() {
    local image release version
    for image in $(printf '%s\n' /boot/vmlinuz-*-amd64 | sort -Vr); do
        release=${image#/boot/vmlinuz-}
        if [ ! -r "$image" ] || [ ! -d "/lib/modules/$release/build/" ]; then continue; fi
        version=$(lab_version "linux-image-$release")
        [ -n "$version" ] || continue
        [ "$(lab_version "linux-headers-$release")" = "$version" ] || continue
        [ "$(lab_version "linux-source-$(lab_series "$version")")" = "$version" ] || continue
        printf '%s %s\n' "$release" "$version"
        return 0
    done
    return 1
}

# Prints the folder of the built modules, named after kernel release and source version.
lab_modules_dir() { # release version
    printf '%s/modules-%s-%s\n' "$LAB_CACHE" "$1" "$2"
}

# Prints the folder of the newest unpacked kernel of a series.
lab_unpacked() { # series
    local dir
    while read -r dir; do
        [ -r "$dir/boot/vmlinuz-${dir##*/kernel-}" ] && printf '%s\n' "$dir" && return 0
    done < <(printf '%s\n' "$LAB_CACHE/kernel-$1".*-amd64 | sort -Vr)
    return 1
}

# Selects the kernel of guests: the installed one, or the unpacked one of a series such as 6.12.
# Sets LAB_RELEASE, LAB_IMAGE and LAB_MODULES. No modules are built for an unpacked kernel.
lab_use_kernel() { # series, or an empty word
    local kernel dir
    kernel=$(lab_kernel) || return 1
    if [ -z "$1" ] || [ "$1" = "$(lab_series "${kernel#* }")" ]; then
        LAB_RELEASE=${kernel% *} LAB_IMAGE=/boot/vmlinuz-${kernel% *}
        LAB_MODULES=$(lab_modules_dir "$LAB_RELEASE" "${kernel#* }")
        return 0
    fi
    dir=$(lab_unpacked "$1") || return 1
    LAB_RELEASE=${dir##*/kernel-}
    LAB_IMAGE=$dir/boot/vmlinuz-$LAB_RELEASE LAB_MODULES=$dir/modules-built
}

lab_packages_missing() {
    local package
    for package in "${LAB_PACKAGES[@]}"; do
        [ -n "$(lab_version "$package")" ] || printf '%s\n' "$package"
    done
    # Debian's python3 does not include it.
    python3 -c 'import ensurepip' 2>/dev/null || printf 'python3-venv\n'
}

lab_modules_missing() { # dir release
    local module
    for module in "${LAB_MODULES_BUILT[@]}"; do
        [ "$(modinfo -F vermagic "$1/$module.ko" 2>/dev/null | cut -d' ' -f1)" = "$2" ] ||
            printf '%s\n' "$module"
    done
}

# Prints what is missing, one item per line; status 0 if nothing is. Selects the installed kernel.
lab_ready() {
    local missing
    PATH=$PATH:/usr/sbin:/sbin
    if [ "$(uname -m)" != x86_64 ]; then
        echo "an x86_64 machine; this is $(uname -m)"
        return 1
    fi
    if ! command -v dpkg-query >/dev/null 2>&1; then
        echo "a Debian system: dpkg-query is missing"
        return 1
    fi
    missing=$(lab_packages_missing | tr '\n' ' ')
    [ -z "$missing" ] || echo "packages: $missing"
    if lab_use_kernel ''; then
        missing="$missing$(lab_modules_missing "$LAB_MODULES" "$LAB_RELEASE" | tr '\n' ' ')"
        [ -z "$missing" ] || echo "packages or modules: $missing"
    else
        missing=kernel
        echo "a kernel with headers and source of one version"
    fi
    if ! "$LAB_VENV/bin/vng" --version >/dev/null 2>&1; then
        missing=vng
        echo "virtme-ng $LAB_VNG_VERSION in $LAB_VENV"
    fi
    [ -z "$missing" ]
}

# Runs a step with a time limit and a log of its output; prints its progress and its error.
lab_step() { # title seconds_max command...
    local title=$1 seconds_max=$2 start=$SECONDS status pid
    local log=$LAB_CACHE/logs/setup.log
    shift 2
    mkdir -p "${log%/*}"
    printf '== %s: %s\n' "$title" "$*" >>"$log"
    lab_say "$title"
    timeout --kill-after=10 "$seconds_max" "$@" >>"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if [ $(((SECONDS - start) % 15)) -eq 14 ]; then
            lab_say "$title: $((SECONDS - start)) s of at most $seconds_max: $(tail -n 1 "$log" |
                cut -c1-90)"
            sleep 1
        fi
    done
    wait "$pid"
    status=$?
    [ $status -eq 0 ] && return 0
    tail -n 15 "$log" >&2
    if [ $status -eq 124 ] || [ $status -eq 137 ]; then
        lab_say "FAILED: $title did not end within $seconds_max s; log: $log"
    else
        lab_say "FAILED: $title (status $status); log: $log"
    fi
    return 1
}

# Installs packages. Those of the kernel and of QEMU are given with their versions, because apt
# would select the newest of each, and these may not match.
lab_install() { # package[=version]...
    local root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo)
    lab_step "installing packages ($#)" 1500 "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends \
        --allow-downgrades "$@"
}

lab_update() {
    lab_step "apt-get update" 300 "$([ "$(id -u)" -eq 0 ] && echo env || echo sudo)" \
        apt-get -o DPkg::Lock::Timeout=120 update
}

# Prints the versions of a package that apt offers.
lab_candidates() { # package
    apt-cache madison "$1" 2>/dev/null | awk -F'|' '{ gsub(/ /, "", $2); print $2 }' | sort -Vru
}

# Finds the newest version for which image, headers and source are all available, and prints the
# packages with that version.
lab_kernel_packages() {
    local version series
    for version in $(lab_candidates linux-image-amd64); do
        series=$(lab_series "$version")
        if lab_candidates linux-headers-amd64 | grep -qxF "$version" &&
            lab_candidates "linux-source-$series" | grep -qxF "$version"; then
            printf '%s\n' "linux-image-amd64=$version" "linux-headers-amd64=$version" \
                "linux-source-$series=$version"
            return 0
        fi
    done
    return 1
}

lab_setup_packages() {
    local wanted=() missing version kernel
    mapfile -t missing < <(lab_packages_missing)
    if [ ${#missing[@]} -eq 0 ] && lab_kernel >/dev/null; then
        return 0
    fi
    if ! command -v apt-get >/dev/null 2>&1; then
        lab_say "missing: ${missing[*]} and a kernel; they cannot be installed without apt-get"
        return 3
    fi
    if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null 2>&1; then
        lab_say "missing: ${missing[*]} and a kernel; become root, or install sudo"
        return 3
    fi
    lab_update || return 1
    for version in "${missing[@]}"; do
        case $version in
            # Added below, with a version.
            qemu-*) ;;
            *) wanted+=("$version") ;;
        esac
    done
    if [ "${#wanted[@]}" -ne "${#missing[@]}" ]; then
        # The same version of both: otherwise apt would remove a newer qemu-utils.
        version=$(apt-cache policy qemu-system-x86 | sed -n 's/^ *Candidate: //p')
        wanted+=("qemu-system-x86=$version" "qemu-utils=$version")
    fi
    if ! lab_kernel >/dev/null; then
        if ! kernel=$(lab_kernel_packages); then
            lab_say "FAILED: apt offers no linux-image-amd64, linux-headers-amd64 and" \
                "linux-source of one version; compare:" \
                "apt-cache madison linux-image-amd64 linux-headers-amd64"
            return 1
        fi
        # shellcheck disable=SC2206
        wanted+=($kernel)
    fi
    lab_install "${wanted[@]}" || return 1
    mapfile -t missing < <(lab_packages_missing)
    if [ ${#missing[@]} -gt 0 ]; then
        lab_say "FAILED: still missing after apt-get: ${missing[*]}"
        return 1
    fi
    if ! lab_kernel >/dev/null; then
        lab_say "FAILED: no kernel below /boot has headers and source of its version;" \
            "installed: $(dpkg-query -W 'linux-image-*-amd64' 'linux-source-*' 2>/dev/null |
                tr '\t\n' '= ')"
        return 1
    fi
}

lab_setup_vng() {
    "$LAB_VENV/bin/vng" --version >/dev/null 2>&1 && return 0
    rm -rf "$LAB_VENV"
    lab_step "python environment for virtme-ng" 120 python3 -m venv "$LAB_VENV" || return 1
    lab_step "virtme-ng $LAB_VNG_VERSION from PyPI" 300 "$LAB_VENV/bin/pip" install \
        --disable-pip-version-check "virtme-ng==$LAB_VNG_VERSION" || return 1
    if ! "$LAB_VENV/bin/vng" --version >/dev/null 2>&1; then
        lab_say "FAILED: $LAB_VENV/bin/vng does not start: $("$LAB_VENV/bin/vng" --version 2>&1 |
            tail -n 1)"
        return 1
    fi
}

# Unpacks the sources of the modules in DIR. Folder names are those of the kernel tree.
lab_unpack() { # dir series
    mkdir -p "$1" && tar -xJf "/usr/src/linux-source-$2.tar.xz" -C "$1" --strip-components=1 \
        "linux-source-$2/drivers/infiniband/ulp/rtrs" "linux-source-$2/drivers/block/rnbd" \
        "linux-source-$2/drivers/infiniband/sw/siw" "linux-source-$2/drivers/block/ublk_drv.c"
}

lab_make() { # release folder setting...
    local release=$1 folder=$2
    shift 2
    make -j "$(nproc)" -C "/lib/modules/$release/build" "M=$folder" "$@" modules
}

lab_setup_modules() {
    local kernel release version dir work rtrs
    kernel=$(lab_kernel) || return 1
    release=${kernel% *} version=${kernel#* }
    dir=$(lab_modules_dir "$release" "$version")
    [ -n "$(lab_modules_missing "$dir" "$release")" ] || return 0
    work=$dir.part
    rm -rf "$work" "$dir"
    export -f lab_unpack lab_make
    lab_step "unpacking rtrs, rnbd, siw, ublk of Linux $version" 300 \
        bash -c 'lab_unpack "$@"' - "$work" "$(lab_series "$version")" || return 1
    rtrs=$work/drivers/infiniband/ulp/rtrs
    lab_step "building rtrs for $release" 600 bash -c 'lab_make "$@"' - "$release" "$rtrs" \
        CONFIG_INFINIBAND_RTRS=m CONFIG_INFINIBAND_RTRS_CLIENT=m \
        CONFIG_INFINIBAND_RTRS_SERVER=m || return 1
    lab_step "building rnbd" 600 bash -c 'lab_make "$@"' - "$release" "$work/drivers/block/rnbd" \
        "ccflags-y=-I$rtrs" "KBUILD_EXTRA_SYMBOLS=$rtrs/Module.symvers" \
        CONFIG_BLK_DEV_RNBD_CLIENT=m CONFIG_BLK_DEV_RNBD_SERVER=m || return 1
    lab_step "building siw" 600 bash -c 'lab_make "$@"' - "$release" \
        "$work/drivers/infiniband/sw/siw" CONFIG_RDMA_SIW=m || return 1
    mkdir -p "$work/ublk" && mv "$work/drivers/block/ublk_drv.c" "$work/ublk/" &&
        echo 'obj-m += ublk_drv.o' >"$work/ublk/Makefile"
    lab_step "building ublk" 600 bash -c 'lab_make "$@"' - "$release" "$work/ublk" || return 1
    mkdir -p "$dir.new" && find "$work" -name '*.ko' -exec cp {} "$dir.new/" \; &&
        mv "$dir.new" "$dir" && rm -rf "$work"
    if [ -n "$(lab_modules_missing "$dir" "$release")" ]; then
        lab_say "FAILED: not built for $release: $(lab_modules_missing "$dir" "$release" |
            tr '\n' ' '); log: $LAB_CACHE/logs/setup.log"
        return 1
    fi
}

# Prints the release of the newest kernel of a series that apt offers: 6.12.117+deb12-amd64.
lab_offered() { # series
    apt-cache depends "linux-image-$1-amd64" 2>/dev/null |
        sed -n 's/^ *Depends: linux-image-\([^ ]*-amd64\)$/\1/p' | grep -m 1 .
}

# Unpacks the package in DIR/deb to DIR/root, without drivers for hardware that no guest has.
# Modules are decompressed here, because an emulated guest would take too long.
lab_unpack_kernel() { # dir release
    mkdir "$1/root" && dpkg-deb --fsys-tarfile "$1/deb/"*.deb | tar -x -C "$1/root" \
        --exclude=./usr --exclude='*/kernel/sound' --exclude='*/drivers/gpu' \
        --exclude='*/drivers/media' --exclude='*/drivers/iio' --exclude='*/drivers/usb' \
        --exclude='*/drivers/net/wireless' &&
        find "$1/root/lib/modules/$2" -name '*.ko.xz' -exec xz -d {} + &&
        depmod -b "$1/root" "$2" && [ -s "$1/root/lib/modules/$2/modules.dep.bin" ]
}

# Downloads and unpacks a kernel of a series; apt verifies the package. Nothing is installed, and no
# other kernel of the machine changes.
lab_setup_kernel() { # series
    local release work=$LAB_CACHE/kernel-$1.part
    lab_use_kernel "$1" && return 0
    if ! command -v apt-get >/dev/null 2>&1; then
        lab_say "FAILED: no kernel $1, and no apt-get to download it"
        return 1
    fi
    if ! release=$(lab_offered "$1") && ! { lab_update && release=$(lab_offered "$1"); }; then
        lab_say "FAILED: apt offers no linux-image-$1-amd64"
        return 1
    fi
    rm -rf "$work"
    mkdir -p "$work/deb"
    if ! lab_step "downloading Linux $release" 600 env -C "$work/deb" \
        apt-get download "linux-image-$release"; then
        # The package lists may be older than the archive.
        lab_update && release=$(lab_offered "$1") && lab_step "downloading Linux $release" 600 \
            env -C "$work/deb" apt-get download "linux-image-$release" || return 1
    fi
    export -f lab_unpack_kernel
    lab_step "unpacking Linux $release" 300 bash -o pipefail -c 'lab_unpack_kernel "$@"' - \
        "$work" "$release" || return 1
    rm -rf "$LAB_CACHE/kernel-$release" &&
        mv "$work/root" "$LAB_CACHE/kernel-$release" && rm -rf "$work"
    if ! lab_use_kernel "$1"; then
        lab_say "FAILED: no image of Linux $release in $LAB_CACHE/kernel-$release"
        return 1
    fi
    lab_say "Linux $release is in $LAB_CACHE/kernel-$release"
}

# Prepares the installed kernel and the kernels of the named scenarios. Status: 0 everything is
# present, 1 a step failed, 2 no such scenario, 3 this machine cannot have a lab.
lab_setup() { # word...
    local start=$SECONDS status names='' series
    if [ $# -gt 0 ]; then names=$(lab_select "$@") || return 2; fi
    PATH=$PATH:/usr/sbin:/sbin
    if [ "$(uname -m)" != x86_64 ] || ! command -v dpkg-query >/dev/null 2>&1; then
        lab_say "the lab needs Debian on x86_64; this is $(uname -sm)"
        return 3
    fi
    mkdir -p "$LAB_CACHE/logs" || return 1
    exec 8>"$LAB_CACHE/setup.lock"
    if ! flock -w 900 8; then
        lab_say "FAILED: another setup has held $LAB_CACHE/setup.lock for 900 s"
        return 1
    fi
    : >"$LAB_CACHE/logs/setup.log"
    lab_setup_packages && lab_setup_vng && lab_setup_modules
    status=$?
    if [ $status -eq 0 ]; then
        # shellcheck disable=SC2086
        for series in $(lab_kernels_of $names); do
            lab_setup_kernel "$series" || status=1
        done
    fi
    exec 8>&-
    [ $status -eq 0 ] || return $status
    lab_ready >&2 || return 1
    lab_say "ready in $((SECONDS - start)) s: Linux $LAB_RELEASE, virtme-ng $LAB_VNG_VERSION," \
        "modules in $LAB_MODULES"
}
