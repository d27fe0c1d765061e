#!/usr/bin/env bash
# lab: a disk that loses power behind our server: flushed data is present at every flush of a log
# topology: one
# paths: 1
# limit: 600
# groups: durable ours
#
# dm-log-writes records which data became durable and when (tests/lab/power_loss.py). The disk is
# reconstructed at many of its flushes and writes with FUA, and compared with the replies that the
# users of /dev/nbd0 had received by then.

# shellcheck source=tests/lab/dm.sh
. tests/lab/dm.sh

MIB=64
TOOL=tests/lab/power_loss.py

# Creates a separate disk with its log, exported and attached as /dev/nbd0.
begin() { # name path
    local disk sectors=$((MIB * 2048))
    assert_true "$1: two disks in memory" modprobe brd rd_nr=2 rd_size=$((256 << 10)) max_part=0
    wait_until 10 /dev/ram1 test -b /dev/ram1
    modprobe dm-log-writes || skip "this kernel has no dm-log-writes"
    dm_create disk "0 $sectors linear /dev/ram0 0" >/dev/null || exit 1
    disk=$(dm_create log "0 $sectors log-writes /dev/mapper/lab-disk /dev/ram1") || exit 1
    DISK=${disk#/dev/}
    start_server --export "vol=$disk" --listen rdma://10.0.0.2 --listen tcp://10.0.0.2:1234
    assert_true "$1: the volume attaches over $2" attach vol --path "$2://10.0.0.1@10.0.0.2" \
        --device /dev/nbd0
    assert_eq "$1: /dev/nbd0 has a write cache" "$(sysfs_queue nbd0 write_cache)" "write back"
}

# Releases the device, so that the log ends.
end() { # name
    assert_true "$1: the volume detaches" detach vol
    assert_true "$1: the server exits cleanly" stop_server
    assert_true "$1: the log is closed" dm_remove log
    assert_true "$1: its disk is removed" dm_remove disk
}

# Runs a command that checks the disk at points of the log.
check() { # text command argument...
    local text=$1
    shift
    if timeout 150 python3 "$TOOL" "$@" >"$LAB_WORK/verdict" 2>&1; then pass "$text"; else
        fail "$text" "$(tail -n 30 "$LAB_WORK/verdict")" data
    fi
    note "$(tail -n 2 "$LAB_WORK/verdict" | xargs)"
}

raw() { # rounds points mebibytes
    begin raw tcp
    assert_true "raw: a load of $1 rounds" timeout 100 python3 "$TOOL" load-raw /dev/nbd0 \
        lab-log "$1"
    # fio uses a different queue depth than the load does, and blocks beyond the load's.
    assert_true "raw: fio writes" fio_run write 60 --filename=/dev/nbd0 --direct=1 --rw=randwrite \
        --bs=4k --iodepth=16 --ioengine=libaio --offset=16M --size="$3M" --verify=crc32c \
        --do_verify=0 --fsync=256 --end_fsync=1
    assert_true "raw: a mark when fio has flushed" dmsetup message lab-log 0 mark fio
    # This data is never flushed, so none of it has to survive.
    assert_true "raw: more is written" dd if=/dev/urandom of=/dev/nbd0 bs=64k seek=256 count=16 \
        oflag=direct
    end raw
    check "raw: flushed data survives a power loss" check-raw /dev/ram1 \
        $((MIB << 20)) "$2" "$LAB_WORK/image"
    assert_true "raw: the disk as it was when fio had flushed" python3 "$TOOL" replay /dev/ram1 \
        $((MIB << 20)) fio "$LAB_WORK/image"
    assert_true "raw: fio reads back what it wrote" fio_run verify 60 \
        --filename="$LAB_WORK/image" --rw=randwrite --bs=4k --ioengine=psync --offset=16M \
        --size="$3M" --verify=crc32c --verify_only
    assert_true "the disks are released" rmmod brd
}

files() { # rounds points
    local mount=$LAB_WORK/mnt
    mkdir -p "$mount"
    begin ext4 rdma
    assert_true "ext4: mkfs" timeout 60 mkfs.ext4 -q -F /dev/nbd0
    assert_true "ext4: the file system mounts" mount /dev/nbd0 "$mount"
    assert_true "ext4: a load of $1 rounds" timeout 100 python3 "$TOOL" load-files "$mount" \
        lab-log "$1"
    assert_true "ext4: the file system unmounts" timeout 60 umount "$mount"
    end ext4
    modprobe loop
    check "ext4: after a power loss it mounts, is clean and has all synced data" check-files \
        /dev/ram1 $((MIB << 20)) "$2" "$LAB_WORK/image" "$mount"
}

# Tests that the check detects a disk that never receives flushes, because the kernel drops them.
deaf() {
    begin deaf tcp
    echo "write through" >"/sys/block/$DISK/queue/write_cache"
    assert_true "deaf: a load" timeout 60 python3 "$TOOL" load-raw /dev/nbd0 lab-log 4
    end deaf
    expect_false "deaf: flushed data is missing" timeout 60 python3 "$TOOL" check-raw \
        /dev/ram1 $((MIB << 20)) 8 "$LAB_WORK/image"
    expect_match "deaf: the check reports it" "$(cat "$LAB_HOME/out")" \
        'block [0-9]+ has generation 0'
    assert_true "the disks are released" rmmod brd
}

scenario() {
    modprobe nbd nbds_max=2
    if [ -n "$LAB_QUICK" ]; then
        raw 8 8 2
        files 4 6
    else
        deaf
        raw 60 40 8
        files 25 24
    fi
}
