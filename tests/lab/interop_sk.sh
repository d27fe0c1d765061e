#!/usr/bin/env bash
# Functions for the interop-sk-* scenarios: our client against the kernel's rnbd-server. That
# server's exports are paths of block devices; a session is named after its device.

# Attaches a block device over the first paths of the topology. Further arguments are
# passed to attach.
sk_attach() { # device paths argument...
    local device=$1 paths=$2 path arguments=()
    shift 2
    for ((path = 0; path < paths; path++)); do
        arguments+=(--path "ip:10.0.$path.1@ip:10.0.$path.2")
    done
    # An earlier session with the same name may have left its log.
    SK_LOG_FROM[$device]=$(stat -c %s "$(sk_log_file "$device")" 2>/dev/null || echo 0)
    timeout 90 rtrs-client attach "$device" "${arguments[@]}" --session-name "sk-${device##*/}" \
        --heartbeat "${LAB_HEARTBEAT_MS:-2000}ms" --buffer-size 58M "$@" </dev/null || return 1
    wait_until 20 "all paths of $device" are_connected "$device" "$paths"
}

# Length of each device's log when its current session was attached.
declare -gA SK_LOG_FROM

sk_log_file() { # device
    echo "/run/rtrs/${1//\//%2F}.log"
}

# Prints what the process of the device's current session has logged.
sk_log() { # device
    tail -c "+$((${SK_LOG_FROM[$1]:-0} + 1))" "$(sk_log_file "$1")"
}

# Checks that our side reports no error.
sk_expect_quiet() { # device text
    local found
    found=$(sk_log "$1" | grep -E ' (WARN|ERROR) ')
    expect_eq "$2" "$found" ""
}

# Prints the messages of the kernel's modules since the scenario began, except the usual ones. The
# argument is a pattern for further allowed lines.
sk_kernel_words() { # [pattern]
    dmesg | awk -v mark="lab: $LAB_NAME begins" 'seen; index($0, mark) { seen = 1 }' |
        grep -E ' (rtrs|rnbd)_[a-z]+ L[0-9]+:' |
        grep -vE 'Opened device|Device closed|RTRS Session .* disconnected|Loading module' |
        grep -vE "${1:-^$}"
}

sk_expect_kernel_quiet() { # [pattern]
    expect_eq "the kernel's modules report no error" "$(sk_kernel_words "$@")" ""
}

# Prints the kernel server's counters of a path: reads, bytes, writes, bytes.
sk_server_stats() { # device path
    cat /sys/devices/virtual/rtrs-server/"sk-${1##*/}"/paths/*10.0."$2"*/stats/rdma
}

# Prints the number of failed requests over all operations.
sk_errors() { # device
    client_json stats "$1" '[.ops[].errors] | add'
}

# Creates a SCSI disk in memory with sectors of 4096 bytes, a write cache with FUA, and discard;
# prints it.
sk_scsi_disk() { # mebibytes
    modprobe scsi_debug sector_size=4096 "dev_size_mb=$1" lbpu=1 lbpws=1 delay=0 || return 1
    wait_until 20 "the scsi_debug disk" \
        eval 'ls /sys/bus/pseudo/drivers/scsi_debug/*/*/*/*/block' || return 1
    local disk
    disk=/dev/$(basename /sys/bus/pseudo/drivers/scsi_debug/*/*/*/*/block/*)
    wait_until 20 "$disk" test -b "$disk" && echo "$disk"
}

# Creates a disk on a file in memory, with sectors of 512 bytes, a write cache without FUA, and
# discard; prints it.
sk_loop_disk() { # mebibytes
    modprobe loop && truncate -s "$1M" "$LAB_WORK/loop.img" &&
        losetup --find --show "$LAB_WORK/loop.img"
}

# Compares the attributes of /dev/nbdX with those of the kernel's device. Without discard, the
# discard attributes are 0.
sk_compare() { # device nbd
    local device=$1 nbd=$2 attribute cache
    expect_eq "$device: size" "$(blockdev --getsize64 "$nbd")" "$(blockdev --getsize64 "$device")"
    # The kernel's nbd does not have a separate physical block size.
    for attribute in logical_block_size write_cache; do
        expect_eq "$device: $attribute" "$(sysfs_queue "$nbd" $attribute)" \
            "$(sysfs_queue "$device" $attribute)"
    done
    cache=$(sysfs_queue "$device" write_cache)
    expect_eq "$device: FUA" "$(sysfs_queue "$nbd" fua)" \
        "$([ "$cache" = "write back" ] && sysfs_queue "$device" fua || echo 0)"
    expect_eq "$device: discard" "$([ "$(sysfs_queue "$nbd" discard_max_bytes)" -gt 0 ]; echo $?)" \
        "$([ "$(sysfs_queue "$device" discard_max_bytes)" -gt 0 ]; echo $?)"
    expect_eq "$device: the last block can be read" \
        "$(dd if="$nbd" bs=4096 skip=$(($(blockdev --getsize64 "$nbd") / 4096 - 1)) count=2 \
            iflag=direct status=none | wc -c)" 4096
}

# Runs a verifying fio; further arguments are passed to fio.
sk_verify() { # name nbd seconds argument...
    local name=$1 nbd=$2 seconds=$3
    shift 3
    fio_run "$name" $((seconds + 60)) --filename="$nbd" --direct=1 --rw=randrw --iodepth=8 \
        --ioengine=libaio --size=48M --time_based --runtime="$seconds" --verify=crc32c \
        --verify_backlog=64 --verify_fatal=1 "$@"
}
