#!/usr/bin/env bash
# lab: our block devices compared with the kernel's and others', in one boot; ratios only
# topology: one
# paths: 1
# limit: 2400
# groups: bench
# in-all: no
#
# Every peer has its own disk, all of the same kind, and stays up throughout. Each pass goes through
# the rows and, for each row, through the peers, so that measurements that are compared run within
# the same minute. scripts/lab.sh reads RTRS_LAB_BENCH_PASSES [3], RTRS_LAB_BENCH_SECONDS [4, for
# each measurement], and RTRS_LAB_BENCH_PEERS and RTRS_LAB_BENCH_ROWS, which select peers and rows.
# A measurement that hangs and a peer that cannot be started are reported and left out. The scenario
# never fails for being slow.

# Ours over RDMA, ours without always-invalidate, and two kernel peers over RDMA; then, over TCP,
# ours with CRC32C and ours without.
PEERS=${LAB_BENCH_PEERS:-ours-rdma ours-off rnbd nvme-rdma ours-tcp ours-plain nvme-tcp nbd-server \
nbdkit}
ROWS=${LAB_BENCH_ROWS:-r4q1 r4q32 w4q32 r64s w64s}
PASSES=${LAB_BENCH_PASSES:-3}
SECONDS_EACH=${LAB_BENCH_SECONDS:-4}
DISK_MIB=64
HOST_NQN=nqn.2014-08.org.nvmexpress:uuid:7b1ca0a0-0000-4000-8000-000000000001
declare -A DEVICE=()

row_arguments() { # row
    case $1 in
        r4q1) echo --rw=randread --bs=4k --iodepth=1 ;;
        r4q32) echo --rw=randread --bs=4k --iodepth=32 ;;
        w4q32) echo --rw=randwrite --bs=4k --iodepth=32 ;;
        r64s) echo --rw=read --bs=64k --iodepth=16 ;;
        w64s) echo --rw=write --bs=64k --iodepth=16 ;;
    esac
}

disk_of() { # peer
    local at=0 peer
    for peer in $PEERS; do
        [ "$peer" = "$1" ] && echo "/dev/ram$at" && return
        at=$((at + 1))
    done
}

leave_out() { # peer why
    unset "DEVICE[$1]"
    note "skipped: $1: $2"
    printf '%s\t%s\n' "$1" "$2" >>"$LAB_WORK/skipped.tsv"
}

# --- starting each peer; DEVICE[peer] is then its block device ---

start_ours() {
    local rdma tcp off plain
    rdma=$(disk_of ours-rdma) tcp=$(disk_of ours-tcp) off=$(disk_of ours-off)
    plain=$(disk_of ours-plain)
    if [ -n "$rdma$tcp" ]; then
        start_server ${rdma:+--export "rdma=$rdma"} ${tcp:+--export "tcp=$tcp"} \
            --listen rdma://10.0.0.2:1234 --listen tcp://10.0.0.2:1234
    fi
    if [ -n "$off" ]; then
        start_server --export "off=$off" --listen rdma://10.0.0.2:1235 --always-invalidate off
    fi
    if [ -n "$plain" ]; then
        start_server --export "plain=$plain" --listen tcp://10.0.0.2:1237 --crc off
    fi
    [ -z "$rdma" ] || start_one ours-rdma rdma --path rdma://10.0.0.1@10.0.0.2:1234
    [ -z "$off" ] || start_one ours-off off --path rdma://10.0.0.1@10.0.0.2:1235
    [ -z "$tcp" ] || start_one ours-tcp tcp --path tcp://10.0.0.1@10.0.0.2:1234
    [ -z "$plain" ] ||
        start_one ours-plain plain --path tcp://10.0.0.1@10.0.0.2:1237 --crc off
}

start_one() { # peer name argument...
    local peer=$1 name=$2
    shift
    if attach "$@" --device auto >"$LAB_WORK/why" 2>&1; then
        DEVICE[$peer]=$(client_json status "$name" .device)
    else
        leave_out "$peer" "$(tail -n 1 "$LAB_WORK/why")"
    fi
}

start_rnbd() { # disk
    local device
    kernel_server 1236 || return 1
    # The port must precede its path; otherwise the port is 1234, on which our server listens.
    device=$(kernel_map sessname=bench dest_port=1236 path=ip:10.0.0.1@ip:10.0.0.2 \
        "device_path=$1") || return 1
    [ -b "/dev/$device" ] && DEVICE[rnbd]=/dev/$device
}

start_nvme() { # rdma|tcp port disk
    local name=lab-$1 system
    nvmet_up "$1" 10.0.0.2 "$2" "$name" "$3" && modprobe "nvme-$1" || return 1
    timeout 60 nvme connect -t "$1" -a 10.0.0.2 -w 10.0.0.1 -s "$2" -n "$name" -q "$HOST_NQN" \
        --nr-io-queues="$(nproc)" --keep-alive-tmo=60 || return 1
    system=$(grep -lx "$name" /sys/class/nvme-subsystem/*/subsysnqn) || return 1
    system=$(basename "${system%/subsysnqn}")
    system=/dev/nvme${system#nvme-subsys}n1
    wait_until 10 "$system" test -b "$system" && DEVICE[nvme-$1]=$system
}

# Waits for a server on a port, then connects the kernel's client with a connection for each CPU, as
# for ours.
start_nbd() { # peer port export
    local device at
    for at in {0..15}; do
        device=/dev/nbd$at
        [ -e "/sys/block/nbd$at/pid" ] || break
    done
    wait_until 20 "$1 to listen" sh -c "ss -Htln 'sport = :$2' | grep -q ." || return 1
    timeout 30 nbd-client 10.0.0.2 "$2" -N "$3" "$device" -connections "$(nproc)" || return 1
    [ "$(blockdev --getsize64 "$device")" = $((DISK_MIB << 20)) ] && DEVICE[$1]=$device
}

start_nbd-server() { # disk
    printf '[generic]\nlistenaddr = 10.0.0.2\nport = 10809\n[vol]\nexportname = %s\n' "$1" \
        >"$LAB_WORK/nbd-server.conf"
    # With -d, nbd-server serves one connection and exits, so it runs as a daemon.
    nbd-server -C "$LAB_WORK/nbd-server.conf" -p "$LAB_WORK/nbd-server.pid" || return 1
    start_nbd nbd-server 10809 vol
}

start_nbdkit() { # disk
    nbdkit -f -i 10.0.0.2 -p 10810 file "$1" >"$LAB_WORK/nbdkit.log" 2>&1 </dev/null &
    start_nbd nbdkit 10810 ''
}

start_peer() { # peer
    local disk
    disk=$(disk_of "$1")
    case $1 in
        ours-*) return 0 ;;
        nvme-rdma) start_nvme rdma 4420 "$disk" ;;
        nvme-tcp) start_nvme tcp 4421 "$disk" ;;
        *) "start_$1" "$disk" ;;
    esac >"$LAB_WORK/why" 2>&1
    [ -n "${DEVICE[$1]:-}" ] || leave_out "$1" "$(tail -n 1 "$LAB_WORK/why")"
}

# --- measuring ---

cable_bytes() {
    local from=/sys/class/net/va0/statistics
    echo $(($(cat $from/rx_bytes) + $(cat $from/tx_bytes)))
}

# Runs one measurement. A measurement that hangs is abandoned, because its process cannot be waited
# for.
measure() { # pass row peer
    local fio bytes moved iops limit=$((SECONDS_EACH + 40))
    bytes=$(cable_bytes)
    # shellcheck disable=SC2046
    fio_run bench $limit --filename="${DEVICE[$3]}" --direct=1 --ioengine=libaio \
        --size=${DISK_MIB}M --time_based --runtime="$SECONDS_EACH" --ramp_time=1 --norandommap \
        --randseed=7 $(row_arguments "$2") &
    fio=$!
    if ! wait_until $((limit + 10)) "fio on $3" eval "! kill -0 $fio"; then
        leave_out "$3" "IO hung for $((limit + 10)) s in pass $1, row $2"
        return
    fi
    if ! wait $fio; then
        leave_out "$3" "fio failed in pass $1, row $2: $(tail -n 1 "$LAB_WORK/fio-bench.log")"
        return
    fi
    bytes=$(($(cable_bytes) - bytes))
    iops=$(fio_value bench '.jobs[0] | .read.iops + .write.iops')
    moved=$(fio_value bench '.jobs[0] | .read.io_bytes + .write.io_bytes')
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$iops" >>"$LAB_WORK/results.tsv"
    [ "$bytes" -ge "$moved" ] || SHORT_CUTS="$SHORT_CUTS $3/$2"
}

stop_all() {
    local name device
    for name in $(rtrs-client list -o json | jq -r '.[].name'); do
        expect_true "$name detaches" detach "$name"
    done
    for device in "${DEVICE[@]}"; do
        case $device in
            /dev/rnbd*) expect_true "rnbd unmaps" kernel_unmap "${device#/dev/}" ;;
            /dev/nbd*)
                [ ! -e "/sys/block/${device#/dev/}/pid" ] ||
                    expect_true "$device disconnects" timeout 30 nbd-client -d "$device"
                ;;
        esac
    done
    timeout 60 nvme disconnect-all >/dev/null 2>&1
    # shellcheck disable=SC2046
    kill $(jobs -p) $(cat "$LAB_WORK/nbd-server.pid") 2>/dev/null
    wait_until 30 "the servers to end" eval '[ -z "$(jobs -pr)" ]'
}

scenario() {
    local peer row pass start=$SECONDS SHORT_CUTS='' up
    : >"$LAB_WORK/results.tsv"
    : >"$LAB_WORK/skipped.tsv"
    modprobe brd rd_nr="$(wc -w <<<"$PEERS")" rd_size=$((DISK_MIB * 1024)) max_part=0
    modprobe nbd nbds_max=8
    for peer in $PEERS; do
        # The disk's pages are allocated before the first measurement.
        assert_true "a disk for $peer" dd if=/dev/urandom of="$(disk_of "$peer")" bs=1M \
            count=$DISK_MIB oflag=direct
    done
    start_ours
    for peer in $PEERS; do start_peer "$peer"; done
    up=${#DEVICE[@]}
    note "$up of $(wc -w <<<"$PEERS") peers are up after $((SECONDS - start)) s;" \
        "$PASSES passes of $SECONDS_EACH s each"
    assert_num "at least two peers run" "$up" -ge 2
    for ((pass = 1; pass <= PASSES; pass++)); do
        for row in $ROWS; do
            for peer in $PEERS; do
                [ -n "${DEVICE[$peer]:-}" ] && measure "$pass" "$row" "$peer"
            done
        done
        note "pass $pass of $PASSES is done after $((SECONDS - start)) s"
    done
    stop_all
    expect_eq "everything crossed the cable" "$SHORT_CUTS" ""
    assert_true "the table is printed" python3 scripts/bench/lab.py bench \
        "$LAB_WORK/results.tsv" "$LAB_WORK/skipped.tsv" "$LAB_SHARE/bench.json"
    cat "$LAB_HOME/out"
    note "our daemons: $LAB_BUILD build"
}
