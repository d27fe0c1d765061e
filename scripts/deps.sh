#!/usr/bin/env bash
# Checks for the programs the scripts need and installs what is missing: Debian packages through
# apt-get (with sudo when not root) and Rust through rustup. Sourced by the other scripts or run by
# hand; takes well under a second if everything is present.
#
# Exit or return: 0 everything is present, 1 something is missing and could not be installed; prints
# what.

# command:package, one for each program a script, test or build calls; for a package without a
# program, one of its files (an absolute path, patterns allowed) replaces the command.
RTRS_DEPS=(
    cc:gcc
    clang:clang
    curl:curl
    e2fsck:e2fsprogs
    mkfs.ext4:e2fsprogs
    fio:fio
    fish:fish
    '/usr/include/infiniband/verbs.h:libibverbs-dev'
    '/usr/include/rdma/rdma_cma.h:librdmacm-dev'
    '/usr/lib/llvm-*/lib/libclang.so:libclang-dev'
    man:man-db
    nbdcopy:libnbd-bin
    nbdinfo:libnbd-bin
    nbd-server:nbd-server
    nbdkit:nbdkit
    '/usr/share/perl/*/JSON/PP.pm:perl'
    pkg-config:pkg-config
    python3:python3
    '/usr/lib/python3/dist-packages/cffi/__init__.py:python3-cffi'
    '/usr/lib/python3/dist-packages/pytest/__init__.py:python3-pytest'
    qperf:qperf
    qemu-img:qemu-utils
    qemu-io:qemu-utils
    qemu-nbd:qemu-utils
    systemd-analyze:systemd
    tshark:tshark
    valgrind:valgrind
    zsh:zsh
)

deps_say() { printf 'deps: %s\n' "$*" >&2; }

deps_has() { # command or file pattern
    case "$1" in
        /*) compgen -G "$1" >/dev/null ;;
        *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}

deps_missing_packages() {
    local pair
    for pair in "${RTRS_DEPS[@]}"; do
        deps_has "${pair%%:*}" || printf '%s\n' "${pair#*:}"
    done | sort -u
}

deps_install_packages() {
    local missing as_root=() log status
    missing=$(deps_missing_packages | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null 2>&1; then
        deps_say "missing: $missing- apt-get is missing; install them with your package manager"
        return 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null 2>&1; then
            deps_say "missing: $missing- neither root nor sudo; run: apt-get install $missing"
            return 1
        fi
        as_root=(sudo)
    fi
    log=$(mktemp) || return 1
    deps_say "installing $missing(apt-get)"
    # With a time limit on the lock, a second apt-get is an error, not an endless wait.
    # shellcheck disable=SC2086
    "${as_root[@]}" apt-get -o DPkg::Lock::Timeout=120 update >"$log" 2>&1 &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get \
            -o DPkg::Lock::Timeout=120 install -y --no-install-recommends $missing >>"$log" 2>&1
    status=$?
    hash -r
    missing=$(deps_missing_packages | tr '\n' ' ')
    if [ $status -ne 0 ] || [ -n "$missing" ]; then
        tail -n 15 "$log" >&2
        deps_say "apt-get failed (status $status); still missing: ${missing:-nothing}"
        rm -f "$log"
        [ -z "$missing" ]
        return
    fi
    rm -f "$log"
}

# Prints the rust-version of the workspace, e.g. 1.95.
deps_rust_wanted() {
    sed -n 's/^rust-version *= *"\([0-9.]*\)".*/\1/p' "$DEPS_ROOT/Cargo.toml" | head -n 1
}

# Prints the version of the cargo on the PATH, or nothing if it is missing or does not start.
deps_rust_found() {
    (cd "$DEPS_ROOT" && cargo --version 2>/dev/null) | awk '{ print $2 }'
}

deps_version_reaches() { # found wanted
    [ -n "$1" ] && [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

deps_install_rust() {
    local wanted found installer
    wanted=$(deps_rust_wanted)
    if [ -z "$wanted" ]; then
        deps_say "no rust-version in $DEPS_ROOT/Cargo.toml"
        return 1
    fi
    case ":$PATH:" in
        *":${CARGO_HOME:-$HOME/.cargo}/bin:"*) ;;
        *) PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH" ;;
    esac
    export PATH
    found=$(deps_rust_found)
    if ! deps_version_reaches "$found" "$wanted"; then
        if command -v rustup >/dev/null 2>&1; then
            deps_say "cargo ${found:-missing}, needed $wanted: rustup update stable"
            rustup toolchain install stable --profile minimal -c rustfmt -c clippy >&2
        else
            deps_say "cargo ${found:-missing}, needed $wanted: installing rustup"
            installer=$(mktemp) || return 1
            if ! curl --proto '=https' --tlsv1.2 -sSf --max-time 120 -o "$installer" \
                https://sh.rustup.rs; then
                rm -f "$installer"
                deps_say "cannot reach https://sh.rustup.rs: install Rust $wanted or newer yourself"
                return 1
            fi
            if ! sh "$installer" -y --profile minimal -c rustfmt -c clippy \
                --default-toolchain stable >&2; then
                rm -f "$installer"
                deps_say "the rustup installer failed; its output is above"
                return 1
            fi
            rm -f "$installer"
        fi
        hash -r
        found=$(deps_rust_found)
        if ! deps_version_reaches "$found" "$wanted"; then
            deps_say "cargo is still ${found:-missing}; $wanted is needed"
            return 1
        fi
    fi
    if ! command -v rustfmt >/dev/null 2>&1 || ! command -v cargo-clippy >/dev/null 2>&1; then
        if ! rustup component add rustfmt clippy >&2; then
            deps_say "rustfmt or clippy is missing and rustup could not add them"
            return 1
        fi
    fi
    DEPS_RUST_FOUND=$found
}

deps_all() {
    DEPS_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    # mkfs.ext4 and e2fsck are in directories outside a user's PATH.
    case ":$PATH:" in
        *:/usr/sbin:*) ;;
        *) PATH="$PATH:/usr/sbin:/sbin" ;;
    esac
    export PATH
    deps_install_packages || return 1
    deps_install_rust || return 1
    deps_say "everything is present (cargo $DEPS_RUST_FOUND)"
}

deps_all
