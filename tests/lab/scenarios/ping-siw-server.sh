#!/usr/bin/env bash
# lab: rping -c on a kernel iWARP device (siw) against rtrs-server --rping over TCP
# topology: one
# paths: 1
# limit: 180
# groups: issue ping

scenario() {
    # shellcheck source=tests/lab/rping.sh
    . tests/lab/rping.sh
    assert_true "soft iWARP devices exist" siw_up 0
    start_server --ping-only --rping --listen tcp://10.0.0.2:7174
    rping_client_rounds 10.0.0.2 10.0.0.1
    assert_true "the server exits cleanly" stop_server
    start_server --ping-only --rping --crc off --listen tcp://10.0.0.2:7174
    expect_true "without CRC32C too" rping_client plain 10.0.0.2 10.0.0.1 4096
    assert_true "the server exits cleanly again" stop_server
    siw_down 0
}
