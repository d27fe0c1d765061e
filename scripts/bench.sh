#!/usr/bin/env bash
# Prints the bench table: this project beside nbdkit, qemu-nbd and nbd-server on the same file with
# the same fio jobs. Installs what is missing, builds the release binaries, then calls bench.py,
# which takes all the options: scripts/bench.sh --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Questions about the tool itself need neither packages nor a build.
for arg in "$@"; do
    case $arg in
        -h | --help | --list) exec python3 scripts/bench.py "$@" ;;
    esac
done

# shellcheck source=scripts/deps.sh
. scripts/deps.sh
target=${CARGO_TARGET_DIR:-target}
case " $* " in
    *" --peers-only "* | *" --bin-dir"*) ;;
    *)
        echo "bench: building the release binaries" >&2
        cargo build --release --locked --bin rtrs-server --bin rtrs-client >&2
        ;;
esac
exec python3 scripts/bench.py --bin-dir "$target/release" "$@"
