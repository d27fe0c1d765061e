#!/usr/bin/env bash
# The gates of the project: format, build, unit tests, system tests with real programs, seeds of the
# simulator, and scenarios of the lab in virtual machines. Prints the time of each stage and ends
# with one line, `N passed, N failed, N skipped`: the sum over all test binaries, all checks of the
# lab and all other gates, each of which counts as one. Exit codes: 0 all good, 1 a gate or a test
# failed, 2 wrong usage.
#
#   scripts/test.sh [--quick | --ci | --full]
#
# The default uses small images and short times (RTRS_QUICK=1), 300 seeds of the simulator and the
# most important mutants. It runs the group `smoke` of the lab in one boot: a kernel client, a
# kernel server, a device whose link goes down. --quick leaves the lab out.
# --ci, as used by .ci/run, runs the tests at full size, 1,000 seeds and 3,000 others, all mutants,
# the lints (clippy, documentation, models of loom, the build of the fuzz targets: scripts/lints.sh)
# during the tests, and a twentieth of the other scenarios; the other seeds and the twentieth change
# with each commit. --full is like --ci with all scenarios.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# quick: whether tests use small images and short times; scenarios: those of the lab, if any; seeds
# and shares: how many runs of the simulator; block: first of 3,000 further seeds, if any; lints:
# whether scripts/lints.sh runs.
quick=1 scenarios=smoke seeds=300 block= shares=60 mutants=quick lints=0
# Number of commits, or the day of the year (in decimal despite its leading zeros).
turn=$((10#$(git rev-list --count HEAD 2>/dev/null || date +%j)))
long() {
    quick=0 seeds=1000 block=$((3000 + turn % 9 * 3000))
    shares=400 mutants=all lints=1
    # Incremental builds pay off only where the tree is edited and built again.
    export CARGO_INCREMENTAL=0
}
for arg in "$@"; do
    case $arg in
        --quick) scenarios= ;;
        --ci)
            long
            scenarios="smoke $((turn % 20 + 1))/20"
            ;;
        --full) long && scenarios=all ;;
        -h | --help)
            sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *)
            echo "test: unknown argument '$arg'; known: --quick, --ci, --full" >&2
            exit 2
            ;;
    esac
done

# Time limit in seconds of all scenarios together. Each also has its own limit, which is longer on a
# slow machine.
LAB_SECONDS_MAX=14400
passed=0 failed=0 skipped=0 failures=() times=() notes=()
scratch=$(mktemp -d) || exit 1
child= beside=
cleanup() {
    local group
    for group in $child $beside; do kill -TERM -- "-$group" 2>/dev/null; done
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Runs a stage in a process group of its own, bounded in time, its output shown and kept in
# $scratch/NAME.log. Ends after SECONDS_MAX even if a test hangs.
run_stage() { # name seconds_max command...
    local name=$1 seconds_max=$2 start=$SECONDS status
    shift 2
    echo "== $name"
    setsid timeout --kill-after=20 "$seconds_max" "$@" > >(tee "$scratch/$name.log") 2>&1 &
    child=$!
    wait "$child"
    status=$?
    child=
    if [ $status -eq 124 ] || [ $status -eq 137 ]; then
        echo "test: $name did not end within $seconds_max s" | tee -a "$scratch/$name.log"
    fi
    times+=("$(printf '%-18s %5d s' "$name" $((SECONDS - start)))")
    return $status
}

# Runs a stage that counts as one passed or one failed check.
gate() { # name seconds_max command...
    if run_stage "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        failures+=("$1")
        return 1
    fi
}

# Runs cargo test and adds up the results of all test binaries. A run that fails without a failed
# test (a build error, a crash, a timeout) counts as one failed.
tests() { # name seconds_max command...
    local name=$1 status sums
    run_stage "$@"
    status=$?
    # tee writes the last lines a moment after the command has ended.
    sleep 0.2
    sums=$(sed -n 's/^test result: [a-zA-Z]*\. //p' "$scratch/$name.log" |
        awk '{ p += $1; f += $3; i += $5 } END { print p + 0, f + 0, i + 0 }')
    # shellcheck disable=SC2086
    set -- $sums
    passed=$((passed + $1))
    failed=$((failed + $2))
    skipped=$((skipped + $3))
    if [ "$2" -gt 0 ]; then
        failures+=("$name: $2 tests")
        notes+=("$(panics "$scratch/$name.log")")
    elif [ $status -ne 0 ]; then
        failed=$((failed + 1))
        failures+=("$name: status $status")
    elif [ $(($1 + $3)) -eq 0 ]; then
        failed=$((failed + 1))
        failures+=("$name: no test ran")
    fi
}

# Prints the first panics in a log, one per line.
panics() { # log
    awk '/^thread .* panicked at / && n++ < 8 { line = $0; getline; print line " " $0 }' "$1" |
        cut -c 1-400
}

# Runs scenarios of the lab after `scripts/lab.sh setup`, some with fewer rounds. Their checks count
# as tests do. A scenario that cannot run counts as one skipped test, and one that dies without a
# failed check as one failed test. A failed scenario is repeated once, only if the log of the guest
# names a known kernel bug (scripts/lab-verdict.sh); the closing lines report that.
lab() {
    local log=$scratch/lab.log status sums names again
    run_stage lab-setup 2400 bash scripts/lab.sh setup
    status=$?
    if [ $status -eq 0 ]; then
        passed=$((passed + 1))
    elif [ $status -ne 3 ]; then
        failed=$((failed + 1))
        failures+=("lab-setup: status $status")
        return
    fi
    # Few scenarios need other kernels; they are skipped without them.
    # shellcheck disable=SC2086
    [ $status -ne 0 ] || run_stage lab-kernels 1800 bash scripts/lab.sh setup $scenarios ||
        notes+=("LAB: not all kernels are here; see the skipped scenarios")
    # Status 3: the setup has printed what is missing, and every scenario is skipped.
    # shellcheck disable=SC2086
    RTRS_QUICK=1 run_stage lab "$LAB_SECONDS_MAX" bash scripts/lab.sh run $scenarios
    status=$?
    sleep 0.2
    sums=$(sed -n 's/^lab: checks: \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" |
        tail -n 1)
    sums="$sums $(sed -n 's/^lab: .* \([0-9]*\) skipped in .*/\1/p' "$log" | tail -n 1)"
    if ! [[ $sums =~ ^[0-9]+\ [0-9]+\ [0-9]+$ ]]; then
        failed=$((failed + 1))
        failures+=("lab: no closing line, status $status")
        return
    fi
    # shellcheck disable=SC2086
    set -- $sums
    passed=$((passed + $1))
    skipped=$((skipped + $3))
    names=$(lab_failed "$log" | xargs)
    again=$(lab_second_try "$log" 2>"$scratch/why")
    [ ! -s "$scratch/why" ] || notes+=("$(cat "$scratch/why")")
    if [ -n "$again" ]; then
        # shellcheck disable=SC2086
        if RTRS_QUICK=1 run_stage lab-again 1200 bash scripts/lab.sh run $again; then
            notes+=("SECOND TRY: $again passed; in the first try, $2 checks failed")
            return
        fi
    fi
    failed=$((failed + $2))
    if [ $status -ne 0 ] || [ "$2" -gt 0 ]; then
        failures+=("lab: $2 checks in $names")
        [ "$2" -gt 0 ] || failed=$((failed + 1))
    elif [ $(($1 + $3)) -eq 0 ]; then
        failed=$((failed + 1))
        failures+=("lab: nothing ran")
    fi
}

# Adds up the results of scripts/lints.sh. A run without output counts as one failed check.
count_lints() { # status
    local _ name word seconds log=$scratch/lints.log
    if [ "$1" -ne 0 ] && ! grep -q '^lint: .* failed ' "$log"; then
        failed=$((failed + 1))
        failures+=("lints: status $1")
    fi
    while read -r _ name word seconds _; do
        times+=("$(printf '%-18s %5d s during the tests' "$name" "$seconds")")
        if [ "$word" = passed ]; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            failures+=("$name")
        fi
    done < <(grep '^lint: ' "$log")
}

# Starts the lints in the background, with the processor time that the tests leave over: the tests
# mostly wait. With autogroup, the kernel divides time among sessions first, so the niceness is set
# there too.
lints_begin() {
    CARGO_TARGET_DIR=$target/lints setsid nice -n 19 bash -c \
        "echo 19 2>/dev/null >/proc/self/autogroup; exec bash scripts/lints.sh" \
        >"$scratch/lints.log" 2>&1 &
    beside=$!
}

lints_end() {
    local status
    echo "== lints"
    wait "$beside"
    status=$?
    beside=
    cat "$scratch/lints.log"
    count_lints $status
}

# Repeats the failures of each failed stage, because much may have been printed after them.
show_failures() {
    local name log shown=
    for name in "${failures[@]}"; do
        name=${name%%:*} log=$scratch/${name%%:*}.log
        [ -f "$log" ] || log=$scratch/lints.log
        [ -f "$log" ] && [[ " $shown " != *" $log "* ]] || continue
        shown="$shown $log"
        echo "== $name failed; its errors and its last lines"
        grep -E -A 4 'panicked at|^error|FAIL' "$log" | head -n 60
        echo "-- last lines:"
        tail -n 20 "$log"
    done
}

# Prints lines `SKIP NAME: REASON`; more than three with the same reason become one line with their
# count.
group_skips() {
    awk '{
        reason = substr($0, index($0, ": ") + 2)
        if (!n[reason]++) order[++reasons] = reason
        if (n[reason] <= 3) lines[reason, n[reason]] = $0
    }
    END {
        for (i = 1; i <= reasons; i++) {
            reason = order[i]
            if (n[reason] > 3) print "SKIP " n[reason] " tests: " reason
            else for (j = 1; j <= n[reason]; j++) print lines[reason, j]
        }
    }'
}

finish() {
    local count=0 stage
    # A test that lacks a tool is listed in this file; cargo counts it as passed.
    if [ -s "$scratch/skipped" ]; then
        echo "== skipped because something is missing"
        sort -u "$scratch/skipped" | group_skips
        count=$(sort -u "$scratch/skipped" | wc -l)
    fi
    passed=$((passed - count))
    skipped=$((skipped + count))
    show_failures
    echo "== times"
    for stage in "${times[@]}"; do echo "$stage"; done
    printf '%-18s %5d s\n' all $SECONDS
    for stage in "${notes[@]}"; do echo "$stage"; done
    for stage in "${failures[@]}"; do echo "FAILED: $stage"; done
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed -eq 0 ]
    exit
}

# shellcheck source=scripts/lab-verdict.sh
. scripts/lab-verdict.sh
echo "== deps"
# shellcheck source=scripts/deps.sh
if . scripts/deps.sh; then
    passed=$((passed + 1))
else
    failed=$((failed + 1))
    failures+=(deps)
    finish
fi
# If Ceph cannot be installed, the tests that need it are reported as skipped.
[ -z "$scenarios" ] || bash scripts/ceph.sh install || \
    notes+=("CEPH: not installed, see the skipped tests")
times+=("$(printf '%-18s %5d s' deps $SECONDS)")

export CARGO_TERM_COLOR=never RTRS_SKIP_FILE="$scratch/skipped"
# Random programs of a run can be repeated: the seed is one of nine, like the block of seeds.
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-$((turn % 9))}
if [ $quick -eq 1 ]; then
    export RTRS_QUICK=1 PROPTEST_CASES=${PROPTEST_CASES:-64}
fi
target=${CARGO_TARGET_DIR:-$PWD/target}
export RTRS_BIN_DIR=${RTRS_BIN_DIR:-$target/debug}

gate fmt 120 cargo fmt --all --check
gate lab-verdict 60 bash scripts/lab-verdict-test.sh
gate lab-kernel 60 bash scripts/lab-kernel-test.sh
# All targets in one go, so that the daemons the system tests start and the test binaries come from
# the same build (a plain `cargo build` would build the core again with different features).
if gate build 1800 cargo build --workspace --all-targets --locked; then
    [ $lints -eq 0 ] || lints_begin
    tests unit 1200 cargo test --workspace --locked --no-fail-fast --lib --bins
    tests doc 600 cargo test --workspace --locked --no-fail-fast --doc
    # These tests mostly wait for daemons and clocks.
    tests system 2400 cargo test --workspace --locked --no-fail-fast --test '*' -- \
        --test-threads=4
    # The dev profile is optimized enough, and its assertions are on.
    gate sim 1800 "$target/debug/rtrs-sim" --seeds "0..$seeds"
    if [ -n "$block" ]; then
        echo "sim-block: seeds from $block on"
        gate sim-block 1800 "$target/debug/rtrs-sim" --seeds "$block..$((block + 3000))"
    fi
    gate sim-shares 1800 "$target/debug/rtrs-sim" --shares --seeds "0..$shares"
    gate sim-idle 1800 "$target/debug/rtrs-sim" --idle --seeds "0..$seeds"
    gate sim-machine 1800 "$target/debug/rtrs-sim" --machine --seeds "0..$seeds"
    gate mutants 1800 "$target/debug/rtrs-sim" --quiet --mutants $mutants
    [ $lints -eq 0 ] || lints_end
    [ -z "$scenarios" ] || lab
fi
if [ -z "$scenarios" ]; then
    echo "== lab: left out by --quick; to run it: scripts/lab.sh setup && scripts/lab.sh run all"
elif [ "$scenarios" != all ]; then
    notes+=("LAB: only the scenarios '$scenarios' ran; for all: scripts/test.sh --full")
fi
[ $lints -eq 1 ] || notes+=("LINTS: left out; to run them: scripts/lints.sh")
finish
