#!/usr/bin/env bash
# lab: always-invalidate on and off over RDMA: a peer that reuses a key is refused when it is on
# topology: one
# paths: 1
# limit: 120
# groups: issue ours
# test-binaries: rtrs-tests/protocol

scenario() {
    local test
    . tests/lab/topology.sh
    # Address of the hand-driven peer.
    topology_address 0 a 101 || exit 1
    export RTRS_BIN_DIR=$LAB_BIN RTRS_TEST_RDMA=10.0.0.2 TMPDIR=$LAB_WORK
    for test in a_used_key_is_refused_when_on keys_stay_when_off; do
        assert_true "$test" timeout 50 "${LAB_TESTS[protocol]}" --exact \
            "invalidate::$test" --nocapture
        assert_match "$test ran" "$(cat "$LAB_HOME/out")" '1 passed; 0 failed'
    done
    assert_num "the RDMA device carried data" "$(rxe_counter rxa0 sent_pkts)" -gt 30
}
