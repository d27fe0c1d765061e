#!/usr/bin/env bash
# Prints the table of scale: the cost of many sessions for the server and each client, and its
# growth. Builds the release binaries, then calls scale.py, which takes all the options:
# scripts/scale.sh --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Help and list need no build.
for arg in "$@"; do
    case $arg in
        -h | --help | --list) exec python3 scripts/scale.py "$@" ;;
    esac
done

target=${CARGO_TARGET_DIR:-target}
case " $* " in
    *" --bin-dir"*) ;;
    *)
        echo "scale: building the release binaries" >&2
        cargo build --release --locked --bin rtrs-server --bin rtrs-client --bin rtrs-crowd >&2
        ;;
esac
exec python3 scripts/scale.py --bin-dir "$target/release" "$@"
