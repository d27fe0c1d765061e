#!/usr/bin/env bash
# lab: the process behind /dev/nbd0 is killed under load, another takes the device over
# topology: one
# paths: 1
# limit: 170
# groups: device failover

PORTAL=tcp://127.0.0.1:1234

# Short times, so that the kernel soon sends again what the dead process had taken.
attach() { # argument...
    timeout 60 rtrs-client attach a --device /dev/nbd0 --path "$PORTAL" --takeover \
        --no-path fail --io-timeout-ms 1500 --device-timeout-s 4 "$@"
}

# The process that has the control socket; the kernel goes on to show the first one.
holder() {
    rtrs-client list -o json | jq -r '.[0].pid'
}

round() { # number
    local pid
    pid=$(holder)
    kill -9 "$pid"
    assert_within 10 "round $1: the process is gone" eval "! test -e /proc/$pid"
    expect_true "round $1: the device is still there" test -e /sys/block/nbd0/pid
    assert_true "round $1: another takes it over" attach
    expect_false "round $1: it is another" test "$(holder)" = "$pid"
    expect_match "round $1: its log says so" "$(cat /run/rtrs/a.log)" 'nbd0 is taken over'
    kill -0 "$FIO" 2>/dev/null || fail "round $1: fio has ended"
}

under_fio() {
    local number
    assert_true "it attaches" attach
    timeout 100 fio --name=takeover --filename=/dev/nbd0 --rw=randrw --bs=4k --iodepth=16 \
        --ioengine=libaio --direct=1 --size=32m --time_based --runtime=60 --verify=crc32c \
        --verify_backlog=256 --verify_fatal=1 --output=fio.json --output-format=json &
    FIO=$!
    sleep 3
    for number in 1 2 3 4 5; do
        round $number
        sleep 5
    done
    wait $FIO
    expect_eq "fio met no error and reads what it wrote" "$?" 0
    expect_eq "fio counts no error" "$(jq '.jobs[0].error' fio.json)" 0
    note "longest IO of fio: $(jq '[.jobs[0].read, .jobs[0].write | .clat_ns.max] | max / 1e6 |
        round' fio.json) ms, with device-timeout-s 4"
}

under_ext4() {
    mkfs.ext4 -q -F /dev/nbd0
    mkdir -p mnt
    assert_true "ext4 is mounted" mount /dev/nbd0 mnt
    head -c 8M /dev/urandom >data
    cp data mnt/before
    (cp data mnt/during && sync -f mnt) &
    FIO=$!
    kill -9 "$(holder)"
    assert_true "mounted, it is taken over" attach
    wait $FIO
    expect_eq "what was being copied is copied" "$?" 0
    expect_true "what was copied before is there" cmp data mnt/before
    assert_true "ext4 is unmounted" timeout 60 umount mnt
    expect_true "its check finds nothing" e2fsck -fn /dev/nbd0
}

refusals() {
    local pid
    pid=$(holder)
    kill -9 "$pid"
    expect_match "other numbers of sockets are refused" \
        "$(attach --shards 1 2>&1)" 'it has 2 sockets; use --shards 2'
    expect_true "and the device is still there" test -e /sys/block/nbd0/pid
    assert_true "it can still be taken over" attach
    expect_true "and works" dd if=/dev/nbd0 of=/dev/null bs=4k count=16 iflag=direct
    expect_true "it detaches" timeout 60 rtrs-client detach a
    assert_within 5 "the device is free" eval '! test -e /sys/block/nbd0/pid'
    assert_true "with nothing to take over it attaches as usual" attach
    expect_true "it detaches" timeout 60 rtrs-client detach a
}

scenario() {
    cd "$LAB_WORK" || exit 1
    modprobe nbd nbds_max=2
    rtrs-server --export a=mem:64M --listen "$PORTAL" >server.out 2>server.log &
    SERVER=$!
    assert_within 10 "the server listens" grep -q listening server.out
    under_fio
    under_ext4
    refusals
    kill $SERVER
    wait $SERVER
    expect_eq "the server ends well" "$?" 0
}
