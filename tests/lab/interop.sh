#!/usr/bin/env bash
# Functions for the scenarios in which the kernel's rnbd-client uses our server (interop-ks-*).
# Sourced after lib.sh.

KS_CLIENT=/sys/devices/virtual/rtrs-client
# Last mapped device, for example rnbd0.
KS_DEV=

# Prints the path= arguments of map_device for this many paths; none for an existing session.
ks_paths() { # [number]
    local path
    for ((path = 0; path < ${1:-0}; path++)); do
        printf 'path=ip:10.0.%d.1@ip:10.0.%d.2 ' "$path" "$path"
    done
}

# Maps an export on the kernel's client; sets KS_DEV, the name of the block device. A port must
# precede the paths.
ks_map() { # session export paths argument...
    local session=$1 name=$2 paths=$3
    shift 3
    # shellcheck disable=SC2046
    KS_DEV=$(kernel_map "$@" "sessname=$session" $(ks_paths "$paths") "device_path=$name") &&
        wait_until 10 "/dev/$KS_DEV" test -b "/dev/$KS_DEV"
}

# Prints the result of map_device: "mapped", or the name of its errno.
ks_answer() { # argument...
    timeout 60 python3 - "$*" <<'END'
import errno, os, sys
ctl = os.open("/sys/devices/virtual/rnbd-client/ctl/map_device", os.O_WRONLY)
try:
    os.write(ctl, sys.argv[1].encode())
    print("mapped")
except OSError as error:
    print(errno.errorcode[error.errno])
END
}

# Prints the states of a session's paths, e.g. "2 connected".
ks_states() { # session
    cat "$KS_CLIENT/$1"/paths/*/state | sort | uniq -c | xargs
}

ks_states_are() { # session text
    [ "$(ks_states "$1")" = "$2" ]
}

# Prints a counter of the client: reads, bytes read, writes, bytes written, inflight, or requests
# taken over from a different path.
ks_stat() { # session path place
    cut -d' ' -f"$3" "$KS_CLIENT/$1/paths/ip:10.0.$2.1@ip:10.0.$2.2/stats/rdma"
}

ks_dev_state_is() { # device state
    [ "$(cat "/sys/block/$1/rnbd/state")" = "$2" ]
}

# Prints the sum of a counter over the closed paths in our server's log.
ks_reported() { # counter
    grep 'path closed' "$LAB_WORK/server.log" | grep -o " $1=[0-9]*" | cut -d= -f2 |
        awk '{ sum += $1 } END { print sum + 0 }'
}

ks_log_says() { # regex
    grep -qE "$1" "$LAB_WORK/server.log"
}

# Checks that our server logged nothing worse than info, except that a brd has no stable identity
# and that a second client writes (access: migration), which is always a warning.
expect_quiet_server() {
    expect_eq "our server's log has no warning and no error" \
        "$(grep -E ' (WARN|ERROR) |panicked' "$LAB_WORK/server.log" |
            grep -vE ': "?no persistent ID for this export: |: opened .*access="?migration' |
            head -n 3)" ""
}

# Runs verified random IO of mixed sizes.
ks_verify() { # name seconds_max device argument...
    local name=$1 seconds_max=$2 device=$3
    shift 3
    fio_run "$name" "$seconds_max" --filename="/dev/$device" --direct=1 --rw=randrw \
        --bssplit=512/30:4k/40:32k/20:512k/10 --iodepth=8 --ioengine=libaio \
        --verify=crc32c --verify_backlog=64 --verify_fatal=1 "$@"
}

# Runs every kind of IO over this many paths and counts the packets of each connection.
ks_every_kind() { # invalidate paths
    local session=io$2$1 path before=() idle device conns=$(($(nproc) + 1))
    ks_map "$session" vol "$2" || {
        fail "the client maps over $2 paths"
        exit 1
    }
    device=/dev/$KS_DEV
    expect_eq "all of its $2 paths are connected" "$(ks_states "$session")" "$2 connected"
    for ((path = 0; path < $2; path++)); do
        rxe_sent "rxa$path" >"$LAB_WORK/before$path"
        expect_eq "path $path has a connection for each CPU and a service connection" \
            "$(wc -l <"$LAB_WORK/before$path")" "$conns"
    done
    assert_true "fio reads back what it wrote, 512 B to 512 KiB" ks_verify mixed 60 "$KS_DEV" \
        --numjobs=2 --size=12M --offset_increment=16M
    assert_true "fio verifies its data with O_SYNC" fio_run sync 60 \
        --filename="$device" --direct=1 --sync=1 --rw=randwrite --bs=4k --iodepth=4 \
        --ioengine=libaio --size=1M --offset=32M --verify=crc32c --verify_fatal=1
    assert_true "fio verifies its data with fsync after every 4 writes" fio_run fsync 60 \
        --filename="$device" --direct=1 --fsync=4 --rw=randwrite --bs=4k --ioengine=psync \
        --size=256k --offset=34M --verify=crc32c --verify_fatal=1
    assert_true "a discard" blkdiscard -o 32M -l 3M "$device"
    expect_true "discarded blocks read as zeroes" cmp -n 3M /dev/zero \
        <(dd if="$device" bs=64k skip=512 count=48 iflag=direct status=none)
    for ((path = 0; path < $2; path++)); do
        rxe_sent "rxa$path" >"$LAB_WORK/after$path"
        idle=$(join "$LAB_WORK/before$path" "$LAB_WORK/after$path" |
            awk '{ sent = ($3 - $2 + 16777216) % 16777216 } sent < 50' | wc -l)
        expect_num "every connection of path $path for IO sent packets" "$idle" -le 1
        expect_eq "no connection of path $path was replaced" \
            "$(join "$LAB_WORK/before$path" "$LAB_WORK/after$path" | wc -l)" "$conns"
        expect_num "path $path carried writes" "$(ks_stat "$session" "$path" 3)" -gt 100
    done
    assert_true "the client unmaps" kernel_unmap "$KS_DEV"
}

# Runs one column of the matrix on a file, which has a write cache, so that flushes and FUA arrive.
ks_matrix() { # invalidate
    local paths
    truncate -s 48M "$LAB_WORK/vol.img"
    start_server --export "vol=$LAB_WORK/vol.img" --listen rdma://10.0.0.2 \
        --listen rdma://10.0.1.2 "--always-invalidate=$1"
    for paths in 1 2; do
        ks_every_kind "$1" "$paths"
        [ "$paths" -eq 1 ] || continue
        cell kernel-client "read, write, sync, FUA, flush, discard; 1 path, always-invalidate $1"
    done
    assert_true "the server exits cleanly" stop_server
    expect_num "writes with FUA arrived" "$(ks_reported fua_writes)" -ge 512
    # No flush after the last four.
    expect_num "flushes arrived" "$(ks_reported flushes)" -ge 30
    expect_num "discards arrived" "$(ks_reported discards)" -ge 2
    expect_eq "no request failed" "$(ks_reported errors)" 0
    expect_quiet_server
    cell kernel-client "read, write, sync, FUA, flush, discard; 2 paths, always-invalidate $1"
}

# Runs tests of tests/protocol/peers.rs over RDMA. Arguments are name prefixes after `peers::`.
ks_hostile() { # part...
    local number name
    # shellcheck source=tests/lab/topology.sh
    . tests/lab/topology.sh
    for number in 1 2 7 9; do topology_address 0 a $((100 + number)) || exit 1; done
    export RTRS_BIN_DIR=$LAB_BIN RTRS_TEST_RDMA=10.0.0.2 TMPDIR=$LAB_WORK
    # Skips tests for TCP only: of how many connections fit its buffers, and of proofs over TCP.
    timeout 190 "${LAB_TESTS[protocol]}" --test-threads=1 \
        --skip more_connections_than_its_memory --skip over_tcp "${@/#/peers::}" \
        >"$LAB_WORK/hostile.log" 2>&1
    while read -r _ name _ result; do
        name=${name#peers::}
        expect_eq "${name//_/ }" "$result" ok
    done < <(grep -E '^test .* \.\.\. ' "$LAB_WORK/hostile.log")
    expect_match "all tests ran" "$(grep '^test result' "$LAB_WORK/hostile.log")" \
        '^test result: ok\. [1-9][0-9]* passed; 0 failed; 0 ignored' ||
        grep -A8 panicked "$LAB_WORK/hostile.log" | grep -v '^ *[0-9]*:\|^ *at ' | head -n 40
}
