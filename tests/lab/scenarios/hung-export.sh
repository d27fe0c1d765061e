#!/usr/bin/env bash
# lab: a disk that hangs under more requests than it has tags; another export of the shard continues
# topology: one
# paths: 1
# limit: 300
# groups: issue ours durable

# shellcheck source=tests/lab/dm.sh
. tests/lab/dm.sh

# Tags of the hanging disk. Further requests wait in the kernel, where they block a thread.
TAGS=32
# Minimum number of requests in flight in the hanging disk's session.
FLIGHT=128
# Time limit in seconds for each action on B while A hangs; without a hang, each takes less than one
# second.
WHILE=10

# Creates a disk in memory with discards and a cache, so that flushes have an effect.
null_disk() { # name
    local dir=/sys/kernel/config/nullb/$1
    mkdir "$dir" && echo 64 >"$dir/size" && echo 4096 >"$dir/blocksize" &&
        echo 1 >"$dir/memory_backed" && echo 1 >"$dir/discard" && echo 4 >"$dir/cache_size" &&
        echo 1 >"$dir/power" && wait_until 10 "/dev/$1" test -b "/dev/$1" && echo "/dev/$1"
}

null_gone() {
    local dir
    for dir in /sys/kernel/config/nullb/*/; do
        echo 0 >"$dir/power" && rmdir "$dir"
    done
    rmmod null_blk
}

is_suspended() {
    [ "$(dmsetup info -c --noheadings -o suspended lab-hung)" = Suspended ]
}

# Prints the number of requests that the server has in flight for the session that has an export
# open.
in_flight() { # export
    timeout 20 rtrs-server session list -o json |
        jq "[.sessions[] | select(.opens[].export == \"$1\") | .io.inflight] | add // 0"
}

has_in_flight() { # export count
    [ "$(in_flight "$1")" -ge "$2" ]
}

# Runs IO on B with psync: each request is answered before the next is sent.
b() { # name argument...
    fio_run "$1" $WHILE --filename="$B" --direct=1 --ioengine=psync --size=32M --bs=4k "${@:2}"
}

# Starts writes and reads on A, which stay in flight as long as the disk hangs.
load_a() {
    fio_run a 150 --filename="$A" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k \
        --numjobs=2 --iodepth=96 --size=12M --offset_increment=12M --cpus_allowed=0-1 \
        --cpus_allowed_policy=split --verify=crc32c --end_fsync=1 &
    PENDING+=($!)
    fio_run a-read 150 --filename="$A" --direct=1 --ioengine=libaio --rw=randread --bs=4k \
        --iodepth=32 --offset=32M --size=8M &
    PENDING+=($!)
}

# Starts flushes and discards on A. Discards come last: in this kernel, a discard holds a lock on
# the device that other requests need.
sync_a() {
    local try
    for try in 1 2; do
        timeout 120 python3 tests/lab/power_loss.py flush "$A" &
        PENDING+=($!)
    done
    timeout 120 blkdiscard -f -o $((48 << 20)) -l $((4 << 20)) "$A" &
    PENDING+=($!)
}

hang() {
    local pid at lock
    PENDING=()
    start_server --export "hung=$DISK_A,direct=on" --export "other=$DISK_B,direct=on" \
        --listen tcp://10.0.0.2:1234 --shards 1
    for at in hung other; do
        assert_true "$at attaches" attach $at --path tcp://10.0.0.1@10.0.0.2:1234 \
            --device auto --io-timeout 10m
    done
    A=$(client_json status hung .device) B=$(client_json status other .device)
    assert_true "B works" b before --rw=write --number_ios=100 --fsync=10
    # While a disk hangs, udev would reread its partition table and block others that open the disk.
    # udev leaves locked devices alone (systemd's "Locking Block Device Access").
    exec {lock}<>"$A"
    assert_true "A is locked for udev" flock -x -n "$lock"
    assert_true "A hangs" dmsetup suspend --nolockfs --noflush lab-hung
    load_a
    assert_within 20 "A has $FLIGHT requests in flight" has_in_flight hung $FLIGHT
    sync_a
    note "$(in_flight hung) in flight"
    expect_true "B reads" b read --rw=randread --number_ios=200
    expect_true "B writes" b write --rw=randwrite --number_ios=200
    expect_true "B flushes" b flush --rw=write --number_ios=50 --fsync=1
    expect_true "B discards" b discard --rw=trim --bs=64k --number_ios=50
    expect_num "B flushed" "$(fio_value flush '.jobs[0].sync.total_ios')" -ge 49
    expect_num "B discarded" "$(fio_value discard '.jobs[0].trim.total_ios')" -eq 50
    assert_true "A still hangs" is_suspended
    assert_num "all its requests are in flight" "$(in_flight hung)" -ge $FLIGHT
    assert_true "A resumes" dmsetup resume lab-hung
    exec {lock}>&-
    for pid in "${PENDING[@]}"; do
        expect_true "requests that waited for A succeed" wait "$pid"
    done
    expect_eq "no request of A failed" "$(client_json stats hung '[.ops[].errors] | add')" 0
    expect_eq "no request of B failed" "$(client_json stats other '[.ops[].errors] | add')" 0
    expect_eq "no path was lost" \
        "$(path_stat hung 0 reconnects) $(path_stat other 0 reconnects)" "0 0"
    for at in hung other; do
        assert_true "$at detaches" detach $at
    done
    assert_true "the server exits cleanly" stop_server
}

scenario() {
    local sectors
    modprobe nbd nbds_max=4
    modprobe null_blk nr_devices=0 || skip "this kernel has no null_blk"
    modprobe dm-multipath && modprobe dm-round-robin || skip "this kernel has no dm-multipath"
    echo $TAGS >/sys/module/dm_mod/parameters/dm_mq_queue_depth
    DISK_B=$(null_disk null-b) && DISK_A=$(null_disk null-a) || exit 1
    sectors=$(dm_sectors "$DISK_A")
    # A request-based disk, which has tags, unlike dm-linear.
    DISK_A=$(dm_create hung "0 $sectors multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 1 \
$DISK_A 1") || exit 1
    # With a scheduler, there would be twice as many tags.
    echo none >"/sys/block/${DISK_A#/dev/}/queue/scheduler"
    assert_num "the disk has few tags" "$(sysfs_queue "$DISK_A" nr_requests)" -le $((2 * TAGS))
    hang
    assert_true "the disk is removed" dm_remove hung
    assert_true "its memory is freed" null_gone
}
