#!/usr/bin/env bash
# lab: 20 (quick: 6) rounds of attach, IO, detach; 5 (2) of kill -9 for each daemon: nothing is left
# topology: one
# paths: 2
# limit: 600
# groups: issue ours

serve() {
    # The queue depth is small because registering the chunks takes most of a round.
    start_server --export "vol=$DISK" --listen rdma://10.0.0.2 --listen rdma://10.0.1.2 \
        --queue-depth 64
}

connect() {
    attach vol --path rdma://10.0.0.1@10.0.0.2 --path rdma://10.0.1.1@10.0.1.2 --device /dev/nbd0
}

# Writes the data of the round and reads it back past all caches.
io() { # round
    head -c 256k /dev/urandom >"$LAB_WORK/data" &&
        dd if="$LAB_WORK/data" of=/dev/nbd0 bs=64k seek="$1" oflag=direct &&
        dd if=/dev/nbd0 bs=64k skip="$1" count=4 iflag=direct status=none |
        cmp - "$LAB_WORK/data"
}

round() { # number
    connect && io "$1" && detach vol && ! test -e /sys/block/nbd0/pid
}

# Runs in the background until killed or until its device fails.
load() {
    exec fio --name=load --filename=/dev/nbd0 --direct=1 --rw=randrw --bs=16k --iodepth=16 \
        --ioengine=libaio --size=32M --time_based --runtime=60 --output="$LAB_WORK/load.log"
}

IO_PATTERN='^ *[0-9]* *[0-9]*[1-9]'

in_flight() {
    grep -qE "$IO_PATTERN" /sys/block/nbd0/inflight
}

# No process is stuck in the kernel.
calm() {
    [ -z "$(ps -e -o stat=,comm= | awk '$1 ~ /^D/ && $2 !~ /^kworker/')" ]
}

kill_client() { # round
    local pid fio
    assert_true "client $1: the volume attaches" connect
    pid=$(client_pid vol)
    load &
    fio=$!
    wait_until 10 "IO in flight" in_flight
    kill -9 "$pid"
    # The kernel keeps requests in flight for the next process that connects the device; a new
    # attach ends them.
    assert_within 60 "client $1: the volume attaches again, with its device" connect
    assert_within 20 "client $1: fio ends" eval "! kill -0 $fio"
    wait "$fio"
    expect_num "client $1: fio ended with an error" $? -ne 0
    assert_true "client $1: IO works" io "$1"
    assert_true "client $1: the volume detaches" detach vol
}

kill_server() { # round
    local fio
    assert_true "server $1: the volume attaches" connect
    load &
    fio=$!
    wait_until 10 "IO in flight" in_flight
    kill -9 "$LAB_SERVER"
    wait "$LAB_SERVER"
    serve
    # The requests in flight fail or wait for the path; the time is bounded either way.
    assert_within 60 "server $1: the session connects to the new server" are_connected vol 2
    kill "$fio"
    assert_within 40 "server $1: fio ends" eval "! kill -0 $fio"
    assert_within 30 "server $1: IO works" io "$1"
    assert_true "server $1: the volume detaches" detach vol
}

scenario() {
    local round objects rounds=20 kills=5
    [ -z "$LAB_QUICK" ] || rounds=6 kills=2
    DISK=$(brd_disk 64) || exit 1
    modprobe nbd nbds_max=2
    serve
    # The first round may leave objects that are kept on purpose, such as the server's protection
    # domains.
    assert_true "round 1" round 1
    objects=$(rdma_objects)
    for ((round = 2; round <= rounds; round++)); do assert_true "round $round" round "$round"; done
    assert_within 20 "there are as many RDMA objects as after the first round" eval \
        "[ \"\$(rdma_objects)\" = '$objects' ]"
    for ((round = 1; round <= kills; round++)); do kill_client "$round"; done
    assert_within 20 "the server has released the objects of dead clients" eval \
        "[ \"\$(rdma_objects)\" = '$objects' ]"
    for ((round = 1; round <= kills; round++)); do kill_server "$round"; done
    assert_within 10 "no process is stuck" calm
    assert_true "the server exits cleanly" stop_server
    assert_eq "no RDMA object is left" "$(rdma_objects)" "0 0 0 0 0"
}
