#!/usr/bin/env bash
# lab: a disk behind our server fails writes for a while: the writer gets EIO, flushed data stays
# topology: one
# paths: 1
# limit: 300
# groups: durable ours
# kernel-may-say: Buffer I/O error|I/O error, dev|lost async page write

# shellcheck source=tests/lab/write_errors.sh
. tests/lab/write_errors.sh

# A disk without the page cache: each write receives its own error.
direct() {
    begin direct on rdma
    expect_eq "direct: other blocks are flushed" "$(put 100 1) $(flush /dev/nbd0)" "0 0"
    assert_true "direct: the disk fails writes" errors on
    expect_eq "direct: every write fails" "$(put 0 2)" $BLOCKS
    # Nothing was acknowledged, so nothing must survive; brd has no cache, and the kernel skips
    # flushes of such a disk.
    note "a flush returns $(flush /dev/nbd0)"
    goes_on direct
    end direct
}

# A disk behind the page cache: writes are acknowledged, then lost.
cached() {
    begin cached off tcp
    expect_eq "cached: other blocks are flushed" "$(put 100 1) $(flush /dev/nbd0)" "0 0"
    assert_true "cached: the disk fails writes" errors on
    expect_eq "cached: every write is acknowledged" "$(put 0 2)" 0
    expect_eq "cached: the flush fails" "$(flush /dev/nbd0)" $EIO data
    goes_on cached
    end cached
}

scenario() {
    modprobe nbd nbds_max=2
    direct
    cached
}
