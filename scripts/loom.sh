#!/usr/bin/env bash
# Runs the models of the lock-free protocols in every interleaving of their threads ("Loom" in
# docs/explanation/testing.md). They are built with `--cfg loom` in a separate build folder,
# target/loom.
#
#   scripts/loom.sh [FILTER]
#
# FILTER selects models by their names [default: loom_model, all of them]. LOOM_MAX_PREEMPTIONS=N
# allows N preemptions instead of 3. Exit code: that of cargo test.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

case ${1:-} in
    -*)
        sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        [ "$1" = -h ] || [ "$1" = --help ] || exit 2
        exit 0
        ;;
esac
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/loom
export RUSTFLAGS="${RUSTFLAGS:-} --cfg loom"
# Optimized as little as the tests, because the build takes longer than the models.
export CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=off
export CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
export CARGO_PROFILE_RELEASE_DEBUG=0
# Without a filter, the unit tests would run too, and use loom's atomics outside a model.
exec cargo test --release --locked --no-default-features \
    -p rtrs-base -p rtrs-core -p rtrs-server --lib -- "${1:-loom_model}"
