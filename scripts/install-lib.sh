#!/usr/bin/env bash
# Builds librtrs, the C library, and installs it with its header and its file for pkg-config:
# LIBDIR/librtrs.so.0, librtrs.so, librtrs.a, pkgconfig/rtrs.pc and PREFIX/include/rtrs.h.
#
#   scripts/install-lib.sh [--prefix DIR] [--libdir DIR] [--destdir DIR] [--from DIR]
#
#   --prefix DIR   [default: /usr/local]
#   --libdir DIR   [default: PREFIX/lib]
#   --destdir DIR  prefix of each path, to build a package
#   --from DIR     install the library that cargo has built in this directory
#
# Run ldconfig afterwards if LIBDIR is one of its directories. Environment: CARGO_TARGET_DIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prefix=/usr/local libdir='' destdir='' from=''

usage() {
    echo "install-lib: $*; see scripts/install-lib.sh --help" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --prefix | --libdir | --destdir | --from)
            [ -n "${2:-}" ] || usage "$1 needs a directory"
            declare "${1#--}=$2"
            shift 2
            ;;
        -h | --help)
            sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) usage "unknown argument '$1'" ;;
    esac
done
libdir=${libdir:-$prefix/lib}

if [ -z "$from" ]; then
    # A panic must not abort the program, so the daemons' profile is unsuitable.
    cargo rustc --profile release-lib --locked -p rtrs-capi --crate-type cdylib,staticlib
    from=${CARGO_TARGET_DIR:-$PWD/target}/release-lib
fi
crate=rtrs-client/capi
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)

install -d "$destdir$libdir/pkgconfig" "$destdir$prefix/include"
install -m 644 "$from/librtrs_capi.so" "$destdir$libdir/librtrs.so.0"
ln -sf librtrs.so.0 "$destdir$libdir/librtrs.so"
[ ! -f "$from/librtrs_capi.a" ] ||
    install -m 644 "$from/librtrs_capi.a" "$destdir$libdir/librtrs.a"
install -m 644 "$crate/include/rtrs.h" "$destdir$prefix/include/rtrs.h"
sed -e "s|@prefix@|$prefix|" -e "s|@libdir@|$libdir|" -e "s|@version@|$version|" \
    "$crate/rtrs.pc.in" >"$destdir$libdir/pkgconfig/rtrs.pc"
