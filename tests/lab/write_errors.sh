#!/usr/bin/env bash
# A disk behind our server that fails writes for a while, and its users. Sourced by scenarios.
#
# dm-flakey fails every write and flush while it is told to. The promise is not that nothing is
# lost but that nothing is lost in silence: a flush that succeeds covers every write that was
# acknowledged before it, or an earlier flush of the same user has failed for it.

# shellcheck source=tests/lab/dm.sh
. tests/lab/dm.sh

TOOL=tests/lab/power_loss.py
BLOCKS=32
EIO=5

tool() { # command argument...
    timeout 60 python3 "$TOOL" "$@"
}

# The disk fails writes from now on, or no more.
errors() { # on|off
    case $1 in
        on) dm_change flakey "0 $SECTORS flakey /dev/ram0 0 0 60 1 error_writes" ;;
        off) dm_change flakey "0 $SECTORS linear /dev/ram0 0" ;;
    esac
}

# Blocks of a generation; how many were refused.
put() { # first generation
    tool write-gen /dev/nbd0 "$1" "$BLOCKS" "$2"
}

# A flush of a user of the device: the number of its error, or 0.
flush() { # device
    tool flush "$1"
    echo $?
}

# What the disk itself has, past every cache.
on_disk() { # first
    tool read-gen /dev/ram0 "$1" "$BLOCKS"
}

all_of() { # generation
    printf "$1%.0s " $(seq $BLOCKS) | xargs
}

begin() { # name direct path
    local disk
    SECTORS=$((64 * 2048))
    assert_true "$1: a disk in memory" modprobe brd rd_nr=1 rd_size=65536 max_part=0
    wait_until 10 /dev/ram0 test -b /dev/ram0
    modprobe dm-flakey || skip "this kernel has no dm-flakey"
    disk=$(dm_create flakey "0 $SECTORS linear /dev/ram0 0") || exit 1
    start_server --export "vol=$disk,direct=$2" --listen rdma://10.0.0.2 \
        --listen tcp://10.0.0.2:1234
    assert_true "$1: it attaches over $3" attach vol --path "$3://10.0.0.1@10.0.0.2" \
        --device /dev/nbd0
    expect_eq "$1: every write is taken" "$(put 0 1)" 0
    expect_eq "$1: and flushed" "$(flush /dev/nbd0)" 0
    expect_eq "$1: it is on the disk" "$(on_disk 0)" "$(all_of 1)" data
}

end() { # name
    assert_true "$1: it detaches" detach vol
    assert_true "$1: the server ends well" stop_server
    assert_true "$1: its disk goes" dm_remove flakey
    assert_true "$1: and the memory" rmmod brd
}

# After errors that are over: IO goes on, and a good flush means what it says.
goes_on() { # name
    local tries
    assert_true "$1: the disk works again" errors off
    # What failed before may be told once more, and then no more.
    for tries in 1 2 3; do
        expect_eq "$1: every write is taken again, $tries" "$(put 0 3)" 0
        [ "$(flush /dev/nbd0)" != 0 ] || break
    done
    expect_num "$1: a flush succeeds again, at its try" "$tries" -le 2
    expect_eq "$1: what it covers is on the disk" "$(on_disk 0)" "$(all_of 3)" data
    expect_eq "$1: and what was flushed before the errors" "$(on_disk 100)" "$(all_of 1)" data
}
