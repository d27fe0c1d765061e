#!/usr/bin/env bash
# Checks that need no daemon: clippy with and without RDMA, documentation, the loom models, and the
# fuzz targets. scripts/test.sh --ci runs this script alongside the tests. It prints a line `lint:
# NAME passed|failed N s` for each check, and exits 0 if all passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

failed=0
gate() { # name command...
    local name=$1 start=$SECONDS word=passed
    shift
    # At low priority, next to other work on a busy machine, clippy has taken more than half an
    # hour.
    if ! timeout --kill-after=20 5400 "$@"; then
        failed=1 word=failed
    fi
    echo "lint: $name $word $((SECONDS - start)) s"
}

gate clippy cargo clippy -q --workspace --all-targets --locked -- -D warnings
# Without RDMA: the build on a machine without libibverbs, and the tests of the resulting messages.
# Each crate is built separately, because a joint build would unify the features of all crates.
for crate in rtrs-core rtrs-client rtrs-server; do
    gate "plain-$crate" cargo clippy -q -p "$crate" --all-targets --no-default-features --locked \
        -- -D warnings
done
gate docs env RUSTDOCFLAGS="-D warnings" cargo doc -q --workspace --no-deps --locked
# cargo test also passes if its filter matches no model.
loom() {
    local out
    out=$(bash scripts/loom.sh 2>&1) && grep -q '^test result: ok\. [1-9]' <<<"$out" && return
    printf '%s\n' "$out"
    return 1
}
export -f loom
gate loom bash -c loom
# The fuzz targets are only built; scripts/fuzz.sh runs them.
gate fuzz cargo check -q --locked --manifest-path fuzz/Cargo.toml
exit $failed
