#!/usr/bin/env bash
# lab: /dev/nbdX taken away: stuck IO, killed processes, signals, force
# topology: one
# paths: 1
# limit: 170
# groups: device

PORTAL=tcp://127.0.0.1:1234

attach() { # argument...
    timeout 60 rtrs-client attach "$@" --path "$PORTAL"
}

owner() {
    cat /sys/block/nbd0/pid
}

is_free() {
    ! test -e /sys/block/nbd0/pid
}

# Lists processes in uninterruptible sleep, except kernel threads.
stuck() {
    ps -e -o pid=,stat=,comm= | awk '$2 ~ /^D/ && $3 !~ /^kworker/'
}

# Waits for a process, within a time limit. Returns the process's status, or 124 if it has not
# ended.
in_time() { # seconds command...
    local seconds=$1 start=$EPOCHREALTIME
    shift
    timeout 60 "$@"
    local status=$?
    took=$(((${EPOCHREALTIME/./} - ${start/./}) / 1000))
    [ $took -le $((seconds * 1000)) ] || status=124
    return $status
}

stuck_io() {
    local took=0 reader writer
    kill -STOP "$SERVER"
    dd if=/dev/nbd0 of=/dev/null bs=64k count=100 iflag=direct 2>reader.log &
    reader=$!
    dd if=/dev/zero of=/dev/nbd0 bs=128k count=400 2>writer.log conv=fsync &
    writer=$!
    assert_within 10 "IO is in flight" eval '! grep -q "^ *0 *0$" /sys/block/nbd0/inflight'
    sleep 1
    expect_match "an open device is not detached" "$(timeout 30 rtrs-client detach a 2>&1)" \
        'open in process [0-9]+ \(dd\)'
    in_time 12 rtrs-client detach a --force --within 2s
    # The detach had to abandon IO, which its exit code reports.
    expect_eq "a forced detach ends in time" "$?" 1
    note "a forced detach with stuck IO took $took ms"
    wait $reader
    expect_eq "the reader ends with an error" "$?" 1
    wait $writer
    expect_eq "the writer ends with an error" "$?" 1
    expect_match "the reader's error is an IO error" "$(cat reader.log)" 'Input/output error'
    expect_eq "no process is stuck" "$(stuck)" "" hang
    assert_within 5 "the device is free" is_free
    kill -CONT "$SERVER"
    assert_within 30 "the volume attaches again" attach a --device /dev/nbd0
}

killed() {
    local pid took=0 writer
    for round in 1 2 3 4 5; do
        pid=$(owner)
        dd if=/dev/zero of=/dev/nbd0 bs=64k count=200 oflag=direct 2>/dev/null &
        writer=$!
        sleep 0.3
        kill -9 "$pid"
        assert_within 10 "round $round: the process is gone" eval "! test -e /proc/$pid"
        expect_eq "round $round: the device is unchanged" "$(owner)" "$pid"
        # The server may take a while to notice that the session is gone. Every other device keeps
        # its requests for the next process that connects it.
        assert_within 30 "round $round: the volume attaches again" attach a --device /dev/nbd0 \
            --device-dead-timeout "$((round % 2 * 600))s"
        wait $writer
        expect_false "round $round: the dead process is not the owner" test "$(owner)" = "$pid"
        expect_true "round $round: the device works" dd if=/dev/nbd0 of=/dev/null bs=64k \
            count=16 iflag=direct
    done
    pid=$(owner)
    kill -9 "$pid"
    assert_within 10 "the process is gone" eval "! test -e /proc/$pid"
    assert_within 30 "auto frees the device and takes it" eval \
        'timeout 60 rtrs-client attach a --device auto --path $PORTAL | grep -q /dev/nbd0$'
    kill -9 "$(owner)"
    sleep 0.5
    expect_match "detach frees the device" "$(timeout 30 rtrs-client detach a)" \
        'freed the devices that it had left behind: \["/dev/nbd0"\]'
    expect_true "the device is free" is_free
    expect_match "a second detach finds nothing" "$(timeout 30 rtrs-client detach a 2>&1)" \
        'is not attached'
}

others() {
    local pid took=0
    assert_within 30 "the volume attaches" attach a --device /dev/nbd0
    pid=$(owner)
    kill "$pid"
    assert_within 15 "SIGTERM frees the device" is_free
    assert_within 15 "SIGTERM ends the process" eval "! test -e /proc/$pid"
    assert_true "the volume attaches" attach a --device /dev/nbd0
    pid=$(owner)
    expect_true "nbd-client -d" timeout 20 nbd-client -d /dev/nbd0
    assert_within 15 "its process ends" eval "! test -e /proc/$pid"
    assert_true "the volume attaches" attach a --device /dev/nbd0 --io-timeout 500ms \
        --device-timeout 2s --no-path fail
    pid=$(owner)
    kill -STOP "$pid"
    in_time 20 dd if=/dev/nbd0 of=/dev/null bs=4k count=1 iflag=direct
    expect_eq "a hanging process: the kernel gives up in time" "$?" 1
    note "the kernel gave up after $took ms"
    kill -CONT "$pid"
    assert_within 15 "the session ends when it can" eval "! test -e /proc/$pid"
    assert_within 5 "the device is freed" is_free
    expect_match "the log gives the reason" "$(cat /run/rtrs/a.log)" 'has closed all connections'
    assert_true "the volume attaches" attach a --device /dev/nbd0
    # The client logs at a verbose level, and its output is no longer read.
    (timeout 60 rtrs-client attach b --device auto --path "$PORTAL" --foreground --log debug 2>&1 |
        head -n 1) >first.log &
    assert_within 20 "another device is connected" test -e /sys/block/nbd1/pid
    sleep 1
    # An attach that finds sockets from which the kernel does not read reconnects the device.
    assert_within 30 "the device works without its terminal" timeout 20 dd if=/dev/nbd1 \
        of=/dev/null bs=4k count=64 iflag=direct
    assert_true "the device is detached" timeout 30 rtrs-client detach b
    # A device that is taken away while its file system is mounted: errors, but no hang.
    mkfs.ext4 -q -F /dev/nbd0
    mkdir -p mnt
    mount /dev/nbd0 mnt
    in_time 12 rtrs-client detach a --force --within 1s
    # The exit code is 1 if the journal was being written at that time.
    expect_match "a forced detach of a mounted device ends in time" "$?" '^[01]$'
    timeout 20 umount mnt
    assert_within 10 "the unmounted device is free" is_free
}

scenario() {
    cd "$LAB_WORK" || exit 1
    modprobe nbd nbds_max=4
    rtrs-server --export a=mem:64M --export b=mem:64M --listen "$PORTAL" >server.out \
        2>server.log &
    SERVER=$!
    assert_within 10 "the server listens" grep -q listening server.out
    assert_true "the volume attaches" attach a --device /dev/nbd0
    stuck_io
    killed
    others
    kill $SERVER
    wait $SERVER
    expect_eq "the server exits cleanly" "$?" 0
}
