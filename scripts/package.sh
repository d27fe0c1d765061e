#!/usr/bin/env bash
# Builds the Debian packages rtrs-server, rtrs-client, rds, librtrs0 and librtrs-dev for this
# machine's release of Debian, in target/debian, and prints their paths.
#
#   scripts/package.sh [--revision N] [--library-from DIR]
#
#   --revision N        the Debian revision, 0.1.0-N [default: 1]
#   --library-from DIR  only librtrs0 and librtrs-dev, with the library that cargo has built in this
#                       directory: scripts/install-lib.sh builds it
#
# Needs dpkg-dev. Installs cargo-deb, which builds the packages of the programs from the crates'
# Cargo.toml, into the target directory if this machine does not have the pinned version. The
# library's packages need a shlibs file, which cargo-deb does not write. Environment:
# CARGO_TARGET_DIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Pinned: other versions may write different maintainer scripts.
CARGO_DEB_VERSION=3.8.0
target=${CARGO_TARGET_DIR:-$PWD/target}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
revision=1 from=''

usage() {
    echo "package: $*; see scripts/package.sh --help" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --revision)
            [[ ${2:-} =~ ^[0-9A-Za-z.+~]+$ ]] || usage "--revision needs a number, not '${2:-}'"
            revision=$2
            shift 2
            ;;
        --library-from)
            [ -d "${2:-}" ] || usage "--library-from needs a directory, not '${2:-}'"
            [ -f "$2/librtrs_capi.a" ] || usage "--library-from '$2' has no librtrs_capi.a"
            from=$2
            shift 2
            ;;
        -h | --help)
            sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) usage "unknown argument '$1'" ;;
    esac
done

if ! command -v dpkg-shlibdeps >/dev/null; then
    echo "package: dpkg-shlibdeps is missing; run: apt-get install dpkg-dev" >&2
    exit 1
fi

arch=$(dpkg --print-architecture)

# shellcheck source=scripts/deps.sh
. scripts/deps.sh

# Prints the maintainer, who is the same for all crates.
maintainer() { sed -n 's/^maintainer = "\(.*\)"$/\1/p' rtrs-client/Cargo.toml; }

# Builds one of the library's packages from a directory with the package's files.
library_package() { # directory name section depends description
    local dir=$1 name=$2 doc=$1/usr/share/doc/$2 file
    file=$target/debian/${name}_$version-${revision}_$arch.deb
    install -d "$doc" "$dir/DEBIAN"
    install -m 644 configs/debian/copyright "$doc/copyright"
    install -m 644 "$documents/changelog.gz" "$doc/changelog.gz"
    gzip -9nc configs/debian/changelog >"$doc/changelog.Debian.gz"
    (cd "$dir" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$dir/DEBIAN/md5sums"
    cat >"$dir/DEBIAN/control" <<CONTROL
Package: $name
Source: rtrs
Version: $version-$revision
Architecture: $arch
Maintainer: $(maintainer)
Installed-Size: $(du -sk --apparent-size --exclude=DEBIAN "$dir" | cut -f 1)
Depends: $4
Section: $3
Priority: optional
Multi-Arch: same
Description: $5
CONTROL
    find "$dir" -type d -exec chmod 755 {} +
    dpkg-deb --root-owner-group -Zxz --build "$dir" "$file" >/dev/null
    echo "$file"
}

# Builds librtrs0, with the shared library, and librtrs-dev, with what a compiler needs.
library_packages() {
    local work=$target/librtrs-packages triplet libdir depends
    triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH)
    libdir=usr/lib/$triplet
    rm -rf "$work"
    mkdir -p "$work/librtrs0/$libdir" "$work/librtrs0/DEBIAN" "$work/debian" "$target/debian"
    scripts/install-lib.sh --prefix /usr --libdir "/$libdir" --destdir "$work/librtrs-dev" \
        ${from:+--from "$from"} >&2
    strip --strip-unneeded -R .comment "$work/librtrs-dev/$libdir/librtrs.so.0"
    strip --strip-debug --enable-deterministic-archives "$work/librtrs-dev/$libdir/librtrs.a"
    mv "$work/librtrs-dev/$libdir/librtrs.so.0" "$work/librtrs0/$libdir/"
    install -D -m 644 rtrs-client/capi/examples/copy.c \
        "$work/librtrs-dev/usr/share/doc/librtrs-dev/examples/copy.c"

    # dpkg-shlibdeps reads the list of packages from debian/control.
    printf 'Source: rtrs\n\nPackage: librtrs0\nArchitecture: any\n' >"$work/debian/control"
    depends=$(cd "$work" && dpkg-shlibdeps -O "librtrs0/$libdir/librtrs.so.0" |
        sed -n 's/^shlibs:Depends=//p')
    echo "librtrs 0 librtrs0 (>= $version)" >"$work/librtrs0/DEBIAN/shlibs"
    echo 'activate-noawait ldconfig' >"$work/librtrs0/DEBIAN/triggers"
    library_package "$work/librtrs0" librtrs0 libs "$depends" \
        'network block devices over RTRS within a program
 A library that opens a volume of rtrs-server, or of the rnbd-server module of
 Linux, in the process that uses it: over one or more paths by TCP, TCP with
 TLS 1.3 or RDMA, without a daemon, a kernel module or root.'
    # The last two are for programs that link librtrs.a.
    library_package "$work/librtrs-dev" librtrs-dev libdevel \
        "librtrs0 (= $version-$revision), libibverbs-dev, librdmacm-dev" \
        'network block devices over RTRS within a program (development)
 The header, the static library and the pkg-config file of librtrs, and an
 example.'
}

documents=$target/release/documents
write_changelog() {
    rm -rf "$documents"
    mkdir -p "$documents"
    gzip -9nc CHANGELOG.md >"$documents/changelog.gz"
}

if [ -n "$from" ]; then
    write_changelog
    library_packages
    exit
fi

cargo_deb=cargo-deb
if [ "$(cargo-deb --version 2>/dev/null)" != "$CARGO_DEB_VERSION" ]; then
    tools=$target/cargo-deb-$CARGO_DEB_VERSION
    cargo_deb=$tools/bin/cargo-deb
    [ -x "$cargo_deb" ] ||
        CARGO_TARGET_DIR=$tools/build cargo install --quiet --locked --root "$tools" \
            --version "$CARGO_DEB_VERSION" cargo-deb >&2
fi

cargo build --release --locked -p rtrs-server -p rtrs-client -p rds -p rds-preload >&2
write_changelog
for name in rtrs-server rtrs-client rds; do
    "$target/release/$name" documents "$documents/$name"
    gzip -9n "$documents/$name"/*.[1-8]
    "$cargo_deb" --no-build --strip --quiet -p "$name" --deb-revision "$revision"
done
library_packages
