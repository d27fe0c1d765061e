#!/usr/bin/env bash
# What judges the code without a daemon: clippy with and without RDMA, documentation, the models of
# loom, the fuzz targets. Called by scripts/test.sh, which runs it beside the lab; prints for each
# gate a line `lint: NAME passed|failed N s`. Exit 0 if all passed.
#
#   scripts/lints.sh [--no-fuzz]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

failed=0
gate() { # name command...
    local name=$1 start=$SECONDS word=passed
    shift
    # Beside the lab, niced, on a machine with other work clippy has taken over half an hour.
    if ! timeout --kill-after=20 5400 "$@"; then
        failed=1 word=failed
    fi
    echo "lint: $name $word $((SECONDS - start)) s"
}

gate clippy cargo clippy -q --workspace --all-targets --locked -- -D warnings
# Without RDMA: what builds on a machine that lacks libibverbs, and the tests of what it then says.
# Each crate alone, since in one build the features of all would add up.
for crate in rtrs-core rtrs-client rtrs-server; do
    gate "plain-$crate" cargo clippy -q -p "$crate" --all-targets --no-default-features --locked \
        -- -D warnings
done
gate docs env RUSTDOCFLAGS="-D warnings" cargo doc -q --workspace --no-deps --locked
# cargo test passes, too, when its filter finds no model.
loom() {
    local out
    out=$(bash scripts/loom.sh 2>&1) && grep -q '^test result: ok\. [1-9]' <<<"$out" && return
    printf '%s\n' "$out"
    return 1
}
export -f loom
gate loom bash -c loom
# Only that they build; scripts/fuzz.sh runs them.
[ "${1:-}" = --no-fuzz ] || gate fuzz cargo check -q --locked --manifest-path fuzz/Cargo.toml
exit $failed
