#!/usr/bin/env bash
# Builds the fio engine rtrs.so for this machine's fio, and prints its path. Use it with
# ioengine=external:PATH; see docs/how-to/embed.md. The engine is licensed under GPL-2.0-only, like
# fio, whose headers it includes.
#
#   rtrs-client/fio/build.sh [--fio-source DIR] [--output FILE] [--cache DIR]
#
#   --fio-source DIR  source of the same version of fio; by default it is downloaded from the
#                     archive that the Debian package fio came from, about 16 MB
#   --output FILE     [default: fio/rtrs.so in the target directory of cargo]
#   --cache DIR       directory for the source and the result of its configure, reused
#                     [default: fio/cache in the target directory of cargo]
#
# Needs cc, pkg-config, fio and librtrs (scripts/install-lib.sh; for a nonstandard prefix, set
# PKG_CONFIG_PATH=PREFIX/lib/pkgconfig). Environment: CARGO_TARGET_DIR, CC.
#
# Exit codes: 0 built, 1 failed, 2 usage, 3 this machine lacks something that the build needs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Time limit for each step of the download, in seconds.
DOWNLOAD_MAX=120
target=${CARGO_TARGET_DIR:-$here/../../target}
output=$target/fio/rtrs.so cache=$target/fio/cache source=''

say() { printf 'fio engine: %s\n' "$*" >&2; }

usage() {
    say "$*; see rtrs-client/fio/build.sh --help"
    exit 2
}

missing() {
    say "$*"
    exit 3
}

while [ $# -gt 0 ]; do
    case $1 in
        --fio-source | --output | --cache)
            [ -n "${2:-}" ] || usage "$1 needs a path"
            name=${1#--}
            declare "${name#fio-}=$2"
            shift 2
            ;;
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) usage "unknown argument '$1'" ;;
    esac
done

# Prints the version of fio in a source directory.
version_of() { # directory
    sed -n 's/^DEF_VER=fio-//p' "$1/FIO-VERSION-GEN" 2>/dev/null || true
}

# Downloads the source of fio to a directory. Uses private package lists: the system's lists may
# have no deb-src line, and are not changed.
download() { # version directory
    local row package uri suite part temporary options
    command -v apt-get >/dev/null ||
        missing "no apt-get to download the source of fio $1; unpack it and use --fio-source DIR"
    # PACKAGE | VERSION | URI SUITE/COMPONENT ARCHITECTURE Packages
    package=$(dpkg-query -W -f '${Version}' fio 2>/dev/null) ||
        missing "fio is not from a Debian package; unpack its source and use --fio-source DIR"
    row=$(apt-cache madison fio 2>/dev/null |
        awk -F ' *[|] *' -v version="$package" '$2 == version && / Packages$/ { print $3; exit }')
    [ -n "$row" ] ||
        missing "no apt archive has fio $package; run apt-get update, or use --fio-source DIR"
    read -r uri suite _ <<<"$row"
    part=${suite#*/} suite=${suite%%/*}

    temporary=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$temporary'" EXIT
    mkdir -p "$temporary"/{lists/partial,cache/archives/partial,parts,files,source}
    echo "deb-src $uri $suite $part" >"$temporary/sources.list"
    options=(-qq -o Dir::Etc::SourceList="$temporary/sources.list"
        -o Dir::Etc::SourceParts="$temporary/parts" -o Dir::State::Lists="$temporary/lists"
        -o Dir::Cache="$temporary/cache" -o APT::Sandbox::User="$(id -un)"
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
    say "downloading the source of fio $package"
    {
        timeout "$DOWNLOAD_MAX" apt-get "${options[@]}" update &&
            (cd "$temporary/files" && timeout "$DOWNLOAD_MAX" \
                apt-get "${options[@]}" source --download-only "fio=$package")
    } >&2 || missing "cannot download the source of fio $package; use --fio-source DIR"
    rm -f "$temporary"/files/*.asc
    tar -xf "$temporary"/files/fio_*.orig.tar.* -C "$temporary/source" --strip-components=1
    mkdir -p "$(dirname "$2")"
    rm -rf "$2"
    mv "$temporary/source" "$2"
}

for tool in "${CC:-cc}" pkg-config fio; do
    command -v "$tool" >/dev/null || missing "$tool is missing"
done
pkg-config --exists rtrs ||
    missing "librtrs is missing; run scripts/install-lib.sh, and set PKG_CONFIG_PATH"
version=$(fio --version)
version=${version#fio-}

if [ -z "$source" ]; then
    source=$cache/fio-$version
    [ "$(version_of "$source")" = "$version" ] || download "$version" "$source"
fi
source=$(cd "$source" && pwd)
found=$(version_of "$source")
# The engine uses fio's structures, which differ between versions.
if [ "$found" != "$version" ]; then
    say "$source is fio ${found:-of unknown version}, but this machine has fio $version"
    exit 1
fi

# The result of fio's configure, unless configure has run in the source directory.
config=$source
if [ ! -f "$config/config-host.h" ]; then
    config=$cache/config-$version
    if [ ! -f "$config/done" ]; then
        rm -rf "$config"
        mkdir -p "$config"
        say "running fio's configure"
        if ! (cd "$config" && "$source/configure" --disable-native >log 2>&1); then
            say "fio's configure failed; see $config/log"
            exit 1
        fi
        touch "$config/done"
    fi
fi
mkdir -p "$(dirname "$output")"

# shellcheck disable=SC2046
"${CC:-cc}" -std=gnu11 -O2 -g -Wall -Wextra -Werror -D_GNU_SOURCE -D_LARGEFILE_SOURCE \
    -D_FILE_OFFSET_BITS=64 -DFIO_INTERNAL -include "$config/config-host.h" -isystem "$source" \
    $(pkg-config --cflags rtrs) -shared -fPIC -pthread -Wl,-Bsymbolic -Wl,-z,nodelete \
    -o "$output" "$here/rtrs.c" $(pkg-config --libs rtrs) \
    -Wl,-rpath,"$(pkg-config --variable=libdir rtrs)"
realpath "$output"
