#!/usr/bin/env bash
# Builds the Debian packages rtrs-server, rtrs-client and rds for this machine's release of Debian,
# in target/debian, and prints their paths.
#
#   scripts/package.sh [--revision N]    N: the Debian revision, 0.1.0-N [default: 1]
#
# Needs dpkg-dev. Installs cargo-deb, which makes the packages from the crates' Cargo.toml, in the
# target directory if this machine does not have that version. Environment: CARGO_TARGET_DIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Pinned: other versions may write different maintainer scripts.
CARGO_DEB_VERSION=3.8.0
target=${CARGO_TARGET_DIR:-$PWD/target}
revision=1

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

# shellcheck source=scripts/deps.sh
. scripts/deps.sh

cargo_deb=cargo-deb
if [ "$(cargo-deb --version 2>/dev/null)" != "$CARGO_DEB_VERSION" ]; then
    tools=$target/cargo-deb-$CARGO_DEB_VERSION
    cargo_deb=$tools/bin/cargo-deb
    [ -x "$cargo_deb" ] ||
        CARGO_TARGET_DIR=$tools/build cargo install --quiet --locked --root "$tools" \
            --version "$CARGO_DEB_VERSION" cargo-deb >&2
fi

cargo build --release --locked -p rtrs-server -p rtrs-client -p rds -p rds-preload >&2
documents=$target/release/documents
rm -rf "$documents"
mkdir -p "$documents"
gzip -9nc CHANGELOG.md >"$documents/changelog.gz"
for name in rtrs-server rtrs-client rds; do
    "$target/release/$name" documents "$documents/$name"
    gzip -9n "$documents/$name"/*.[1-8]
    "$cargo_deb" --no-build --strip --quiet -p "$name" --deb-revision "$revision"
done
