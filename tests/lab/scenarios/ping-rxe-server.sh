#!/usr/bin/env bash
# lab: rping -c against rtrs-server --rping, over soft RoCE
# topology: one
# paths: 1
# limit: 180
# groups: issue ping

scenario() {
    # shellcheck source=tests/lab/rping.sh
    . tests/lab/rping.sh
    start_server --ping-only --rping --listen rdma://10.0.0.2:7174
    rping_client_rounds 10.0.0.2 10.0.0.1
    assert_true "the server exits cleanly" stop_server
    start_server --ping-only --listen rdma://10.0.0.2:7174
    expect_false "without --rping the client is refused" rping_client refused 10.0.0.2 10.0.0.1 64
    assert_true "the server exits cleanly again" stop_server
    expect_eq "no RDMA object is left" "$(rdma_objects)" "0 0 0 0 0"
}
