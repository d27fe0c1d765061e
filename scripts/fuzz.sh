#!/usr/bin/env bash
# Runs the fuzz targets, each for an equal share of the time, one process at a time, up to a total
# number of executions; prints the executions and the rate of each. Needs no nightly compiler and no
# cargo-fuzz: the stable compiler instruments for coverage, with assertions and overflow checks.
#
#   scripts/fuzz.sh [--executions N] [--seconds N] [--slice N] [TARGET...]
#
# --executions N   end after N executions of all targets together [default: 100000000]
# --seconds N      end after that time at the latest [default: no limit]
# --slice N        seconds for which a target runs before the next one [default: 60]
#
# New inputs are kept for the next run in the build folder (fuzz-corpus/TARGET). Failing inputs are
# kept there too (fuzz-artifacts/TARGET); to repeat one:
# BUILD_FOLDER/x86_64-unknown-linux-gnu/release/TARGET FILE.
#
# Exit codes: 0 no input failed, 1 an input failed or a target does not build, 2 wrong usage.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() {
    echo "fuzz: $*; see scripts/fuzz.sh --help" >&2
    exit 2
}

executions=100000000 seconds=0 slice=60 targets=()
while [ $# -gt 0 ]; do
    case $1 in
        --executions | --seconds | --slice)
            case ${2:-} in '' | *[!0-9]* | 0*) usage "$1 takes a number above 0" ;; esac
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        -h | --help)
            sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *)
            [ -e "fuzz/targets/$1.rs" ] || usage "no target or option is named '$1'"
            targets+=("$1")
            shift
            ;;
    esac
done
if [ ${#targets[@]} -eq 0 ]; then
    for target in fuzz/targets/*.rs; do
        target=${target##*/}
        targets+=("${target%.rs}")
    done
fi

build=${CARGO_TARGET_DIR:-$PWD/target}/fuzz
triple=$(rustc -vV | sed -n 's/^host: //p')
flags=(--cfg fuzzing -Cpasses=sancov-module -Cdebug-assertions -Coverflow-checks)
for option in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=("-Cllvm-args=-sanitizer-coverage-$option")
done
# Only the targets are instrumented: build scripts have no fuzzer to report to.
CARGO_TARGET_DIR=$build RUSTFLAGS=${flags[*]} cargo build --release --locked \
    --manifest-path fuzz/Cargo.toml --target "$triple" || exit 1

declare -A runs=() spent=()
begun=$SECONDS
total=0 failed=() log=$(mktemp) || exit 1
child=
trap '[ -z "$child" ] || kill "$child" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Runs one slice of one target. Normally libFuzzer ends it; the bound is for a target that hangs
# beyond libFuzzer's time limit per input.
run_slice() { # target
    local corpus=$build/fuzz-corpus/$1 artifacts=$build/fuzz-artifacts/$1 done status start=$SECONDS
    mkdir -p "$corpus" "$artifacts"
    timeout -k 10 $((slice + 120)) "$build/$triple/release/$1" "-max_total_time=$slice" \
        "-artifact_prefix=$artifacts/" -timeout=20 -rss_limit_mb=2048 -max_len=4096 \
        -print_final_stats=1 "$corpus" "fuzz/corpus/$1" >"$log" 2>&1 &
    child=$!
    wait "$child"
    status=$?
    child=
    done=$(sed -n 's/^stat::number_of_executed_units: //p' "$log" | tail -n 1)
    runs[$1]=$((${runs[$1]:-0} + ${done:-0}))
    spent[$1]=$((${spent[$1]:-0} + SECONDS - start))
    total=$((total + ${done:-0}))
    echo "fuzz: $1: ${done:-0} executions, $total in total"
    [ $status -eq 0 ] && return 0
    tail -n 40 "$log"
    failed+=("$1")
}

while [ ${#failed[@]} -eq 0 ] && [ "$total" -lt "$executions" ]; do
    for target in "${targets[@]}"; do
        [ "$total" -lt "$executions" ] || break
        [ "$seconds" -eq 0 ] || [ $((SECONDS - begun)) -lt "$seconds" ] || break 2
        run_slice "$target"
    done
done

printf '%-18s %12s %8s %10s\n' TARGET EXECUTIONS SECONDS "PER SECOND"
for target in "${targets[@]}"; do
    time=${spent[$target]:-0}
    printf '%-18s %12d %8d %10d\n' "$target" "${runs[$target]:-0}" "$time" \
        $((${runs[$target]:-0} / (time > 0 ? time : 1)))
done
for target in "${failed[@]}"; do echo "FAILED: $target; inputs: $build/fuzz-artifacts/$target"; done
echo "fuzz: $total executions in $((SECONDS - begun)) s, ${#failed[@]} failed"
[ ${#failed[@]} -eq 0 ]
