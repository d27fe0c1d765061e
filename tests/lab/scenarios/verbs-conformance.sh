#!/usr/bin/env bash
# lab: the suite of the fabric's contract over verbs on soft RDMA, then the tests of its ends
# topology: one
# paths: 1
# limit: 300
# groups: smoke ours
# test-binaries: rtrs-core/conformance_verbs

scenario() {
    local out=$LAB_WORK/conformance.log passed failed
    export RTRS_VERBS_ADDRESS=10.0.0.2 RTRS_VERBS_SOURCE=10.0.0.1 RTRS_VERBS_SILENT=10.0.0.9
    export RTRS_SKIP_FILE=$LAB_WORK/skips TMPDIR=$LAB_WORK
    : >"$RTRS_SKIP_FILE"
    timeout 280 "${LAB_TESTS[conformance_verbs]}" --test-threads=1 >"$out" 2>&1
    passed=$(sed -n 's/^test result: .* \([0-9]*\) passed;.*/\1/p' "$out")
    failed=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$out" | xargs)
    note "skipped: $(sort -u "$RTRS_SKIP_FILE" | sed 's/^SKIP //' | cut -d: -f1 | xargs)"
    assert_eq "no test failed" "$failed" ""
    assert_num "tests passed" "$((${passed:-0} - $(sort -u "$RTRS_SKIP_FILE" | wc -l)))" -gt 10
    assert_match "the run came to its end" "$(grep '^test result' "$out")" 'ok\.'
}
