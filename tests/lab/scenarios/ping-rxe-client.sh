#!/usr/bin/env bash
# lab: rtrs-client ping --rping against rping -s, over soft RoCE
# topology: one
# paths: 1
# limit: 180
# groups: issue ping

scenario() {
    # shellcheck source=tests/lab/rping.sh
    . tests/lab/rping.sh
    local path=rdma://10.0.0.1@10.0.0.2
    assert_true "rping listens" rping_server 10.0.0.2 65535
    our_client_rounds "$path"
    # The exit status of rping varies; the pattern that it read is in its log.
    expect_num "rping showed our pattern" "$(rping_rounds "$LAB_WORK/rping.log")" -ge 100
    timeout 20 rtrs-client ping "$path:7174" -c 1 >"$LAB_WORK/ours.out" 2>&1
    expect_eq "without --rping the ping fails" $? 1
    expect_match "the error names --rping" "$(cat "$LAB_WORK/ours.out")" \
        'an RTRS server; use --rping'
    rping_stop
    timeout 20 rtrs-client ping "$path" --rping -c 1 >"$LAB_WORK/gone.out" 2>&1
    expect_eq "without a server the ping fails" $? 1
    expect_eq "no RDMA object is left" "$(rdma_objects)" "0 0 0 0 0"
}
