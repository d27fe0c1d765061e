#!/usr/bin/env bash
# Functions for the scenarios that break links under load and measure how long IO stalls. Sourced
# after lib.sh.

# shellcheck source=tests/lab/topology.sh
. tests/lab/topology.sh

# Starts a verifying fio in the background that logs each latency. It runs until `faults_end`, or
# for at most SECONDS_MAX.
faults_begin() { # name device seconds_max
    : >"$LAB_WORK/$1.marks"
    fio_run "$1" $(($3 + 60)) --filename="$2" --direct=1 --rw=randrw --bs=4k --iodepth=8 \
        --ioengine=libaio --size=32M --time_based --runtime="$3" --verify=crc32c \
        --verify_backlog=128 --verify_fatal=1 --write_lat_log="$LAB_WORK/$1" \
        --log_unix_epoch=1 &
    FAULTS_FIO=$!
    sleep 3
}

# Marks the beginning of a round.
faults_mark() { # name round
    echo "$(date +%s%3N) $2" >>"$LAB_WORK/$1.marks"
}

# Ends fio and checks that it had no error in any round.
faults_end() { # name text
    local status
    kill -0 "$FAULTS_FIO" 2>/dev/null || fail "$2: fio lasted until the end"
    # Signals only fio's first process, which ends the others: fio's signal handler can deadlock a
    # process that is doing IO.
    pkill -INT -o -f "^fio --name=$1 "
    wait "$FAULTS_FIO"
    status=$?
    # 128 is fio's status after a signal.
    [ $status -ne 128 ] || status=0
    expect_eq "$2: fio got no error and verified its data" "$status" 0
    expect_eq "$2: fio counts no error" "$(fio_value "$1" '.jobs[0].error')" 0
}

# Prints the longest IO of each round, by the round in which it ended, as `NAME MILLISECONDS` lines,
# then their median and maximum, `p50` and `max`. Fails if no IO ended in a round, because the
# stalls of that round are unknown. fio's lines: time of completion in ms since 1970, latency in ns,
# and more.
faults_longest() { # name
    awk -F '[, ]+' -v marks="$LAB_WORK/$1.marks" '
        BEGIN {
            while ((getline line <marks) > 0) {
                split(line, part, " ")
                begin[++rounds] = part[1]
                name[rounds] = part[2]
                longest[rounds] = -1
            }
        }
        # The lines of a file are in order.
        FNR == 1 { at = 0 }
        {
            while (at < rounds && begin[at + 1] <= $1) at++
            if (at && $2 > longest[at]) longest[at] = $2
        }
        END {
            for (at = 1; at <= rounds; at++) {
                if (longest[at] < 0) {
                    silent = 1
                    continue
                }
                counted++
                printf "%s %d\n", name[at], longest[at] / 1e6
                # Insertion sort.
                for (to = counted; to > 1 && sorted[to - 1] > longest[at]; to--)
                    sorted[to] = sorted[to - 1]
                sorted[to] = longest[at]
            }
            printf "p50 %d\nmax %d\n", sorted[int((counted + 1) / 2)] / 1e6, sorted[counted] / 1e6
            exit silent
        }' "$LAB_WORK/$1"_lat.*.log
}

# Prints each round's longest IO, and their median and maximum; sets FAULTS_P50 and FAULTS_MAX, in
# milliseconds. With LAB_FIGURES=1, on an otherwise idle machine, the targets are checked.
faults_stalls() { # name text [p50_max max_max]
    local out=$LAB_WORK/$1.stalls
    if ! faults_longest "$1" >"$out"; then
        fail "$2: stalls are known"
        return
    fi
    FAULTS_P50=$(sed -n 's/^p50 //p' "$out") FAULTS_MAX=$(sed -n 's/^max //p' "$out")
    echo "STALL $2 | $(grep -v '^p50\|^max' "$out" | cut -d' ' -f2 | xargs) |" \
        "p50 $FAULTS_P50 ms, max $FAULTS_MAX ms"
    if [ -n "$LAB_FIGURES" ] && [ -n "${4:-}" ]; then
        expect_num "$2: the median is not over $3 ms" "$FAULTS_P50" -le "$3"
        expect_num "$2: no IO takes longer than $4 ms" "$FAULTS_MAX" -le "$4"
    fi
}

# Attaches with the default settings.
faults_attach() { # name device argument...
    local name=$1 device=$2
    shift 2
    timeout 90 rtrs-client attach "$name" --device "$device" \
        --path rdma://10.0.0.1@10.0.0.2 --path rdma://10.0.1.1@10.0.1.2 "$@" \
        >"$LAB_WORK/attach.out" 2>&1 || { tail -n 5 "$LAB_WORK/attach.out" && return 1; }
}

# Runs a round: path 0 is broken for a few seconds and repaired; the client must notice and
# reconnect.
faults_round() { # run name break mend
    local since reconnects
    reconnects=$(path_stat vol 0 reconnects)
    faults_mark "$1" "$2"
    assert_true "$2: the link is broken" eval "$3"
    assert_within 20 "$2: path 0 is reported as lost" are_connected vol 1
    sleep 3
    assert_true "$2: the link is repaired" eval "$4"
    since=$(date +%s%3N)
    assert_within 30 "$2: path 0 reconnects" are_connected vol 2
    BACK="${BACK:-}$(($(date +%s%3N) - since)) "
    expect_num "$2: the path was reconnected" "$(path_stat vol 0 reconnects)" -gt "$reconnects"
    expect_eq "$2: path 1 stayed connected" "$(path_stat vol 1 reconnects)" 0
    sleep 1
}
