#!/usr/bin/env bash
# lab: writes are lost behind our server, and a reader flushes first: the writer still gets EIO
# topology: one
# paths: 1
# limit: 300
# groups: durable ours
# kernel-may-say: Buffer I/O error|I/O error, dev|lost async page write
#
# The kernel reports a write-back error once, to the first flush; the server keeps it for every
# session that has written.

# shellcheck source=tests/lab/write_errors.sh
. tests/lab/write_errors.sh

scenario() {
    local reader=/dev/nbd1
    modprobe nbd nbds_max=2
    begin cached off tcp
    expect_eq "other blocks are flushed" "$(put 100 1) $(flush /dev/nbd0)" "0 0"
    # The session is named after the export, so it needs a different run directory.
    assert_true "a reader attaches" attach vol --access ro --session-name reader \
        --run-dir "$LAB_WORK/reader" --path tcp://10.0.0.1@10.0.0.2 --device $reader
    assert_true "the disk fails writes" errors on
    expect_eq "every write is acknowledged" "$(put 0 2)" 0
    note "the reader's flush returns $(flush $reader)"
    expect_eq "the writer's flush fails" "$(flush /dev/nbd0)" $EIO data
    assert_true "the reader detaches" timeout 60 rtrs-client detach vol \
        --run-dir "$LAB_WORK/reader"
    goes_on cached
    end cached
}
