#!/usr/bin/env bash
# lab: the conformance suite of the fabric over verbs on soft RDMA, then the tests of link failures
# topology: one
# paths: 1
# limit: 300
# network: spoiled
# groups: ours
# test-binaries: rtrs-core/conformance_verbs

scenario() {
    local out=$LAB_WORK/conformance.log passed failed skipped
    local cut=a_link_that_goes_down_ends_its_connections
    export RTRS_VERBS_ADDRESS=10.0.0.2 RTRS_VERBS_SOURCE=10.0.0.1 RTRS_VERBS_SILENT=10.0.0.9
    export RTRS_SKIP_FILE=$LAB_WORK/skips TMPDIR=$LAB_WORK
    : >"$RTRS_SKIP_FILE"
    timeout 260 "${LAB_TESTS[conformance_verbs]}" --test-threads=1 --skip "$cut" >"$out" 2>&1
    passed=$(sed -n 's/^test result: .* \([0-9]*\) passed;.*/\1/p' "$out")
    failed=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$out" | xargs)
    skipped=$(sort -u "$RTRS_SKIP_FILE" | sed 's/^SKIP //' | cut -d: -f1 | xargs)
    assert_eq "no test failed" "$failed" ""
    assert_num "tests passed" "$((${passed:-0} - $(sort -u "$RTRS_SKIP_FILE" | wc -l)))" -gt 10
    assert_match "the run completed" "$(grep '^test result' "$out")" 'ok\.'
    note "$(sort -u "$RTRS_SKIP_FILE")"
    assert_eq "only unsupported features of soft RoCE are skipped" "$skipped" \
        "send_with_invalidate_revokes_the_key window_has_bounds"
    # This test runs last because the link takes a while to recover.
    RTRS_VERBS_LINK=vb0 timeout 60 "${LAB_TESTS[conformance_verbs]}" --exact "$cut" --nocapture \
        >"$out" 2>&1
    assert_match "a link that goes down ends its connections" "$(grep '^test result' "$out")" \
        'ok\. 1 passed'
    note "$(grep 'went down' "$out")"
}
