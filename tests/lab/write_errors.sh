#!/usr/bin/env bash
# A disk behind our server that fails writes for a while, and its users. Sourced by scenarios.
#
# dm-flakey fails every write and flush while it is configured to. Writes may be lost, but not
# silently: a successful flush covers every write that was acknowledged before it, unless an earlier
# flush by the same user has failed because of that write.

# shellcheck source=tests/lab/dm.sh
. tests/lab/dm.sh

TOOL=tests/lab/power_loss.py
BLOCKS=32
EIO=5

tool() { # command argument...
    timeout 60 python3 "$TOOL" "$@"
}

# Makes the disk fail writes, or stop failing them.
errors() { # on|off
    case $1 in
        on) dm_change flakey "0 $SECTORS flakey /dev/ram0 0 0 60 1 error_writes" ;;
        off) dm_change flakey "0 $SECTORS linear /dev/ram0 0" ;;
    esac
}

# Writes the blocks of a generation; prints how many writes failed.
put() { # first generation
    tool write-gen /dev/nbd0 "$1" "$BLOCKS" "$2"
}

# Flushes a device; prints the error number, or 0.
flush() { # device
    tool flush "$1"
    echo $?
}

# Prints the content of the disk itself, without any cache.
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
    assert_true "$1: the volume attaches over $3" attach vol --path "$3://10.0.0.1@10.0.0.2" \
        --device /dev/nbd0
    expect_eq "$1: every write succeeds" "$(put 0 1)" 0
    expect_eq "$1: the flush succeeds" "$(flush /dev/nbd0)" 0
    expect_eq "$1: the data is on the disk" "$(on_disk 0)" "$(all_of 1)" data
}

end() { # name
    assert_true "$1: the volume detaches" detach vol
    assert_true "$1: the server exits cleanly" stop_server
    assert_true "$1: its disk is removed" dm_remove flakey
    assert_true "$1: its memory is freed" rmmod brd
}

# After the errors: IO continues, and a successful flush is reliable.
goes_on() { # name
    local tries
    assert_true "$1: the disk works again" errors off
    # An earlier failure may be reported once more, but not again after that.
    for tries in 1 2 3; do
        expect_eq "$1: every write succeeds again, $tries" "$(put 0 3)" 0
        [ "$(flush /dev/nbd0)" != 0 ] || break
    done
    expect_num "$1: number of flushes until one succeeds" "$tries" -le 2
    expect_eq "$1: flushed data is on the disk" "$(on_disk 0)" "$(all_of 3)" data
    expect_eq "$1: data flushed before the errors is on the disk" \
        "$(on_disk 100)" "$(all_of 1)" data
}
