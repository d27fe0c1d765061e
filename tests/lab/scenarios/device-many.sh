#!/usr/bin/env bash
# lab: twelve /dev/nbdX at the same time on busy cores: each answers every CPU
# topology: one
# paths: 1
# limit: 170
# groups: device

PORTAL=tcp://127.0.0.1:1234
DEVICES=12

scenario() {
    local number cpu burners=() attaching=() exports=()
    cd "$LAB_WORK" || exit 1
    modprobe nbd nbds_max=$DEVICES
    for ((number = 0; number < DEVICES; number++)); do
        exports+=(--export "d$number=mem:16M")
    done
    rtrs-server "${exports[@]}" --listen "$PORTAL" --handshake-timeout $((5 * LAB_SLOW))s \
        >server.out 2>server.log &
    SERVER=$!
    assert_within 20 "the server listens" grep -q listening server.out
    # The kernel is slow to create the threads that read the devices' sockets.
    for number in 1 2 3 4; do
        (while :; do :; done) &
        burners+=($!)
    done
    for ((number = 0; number < DEVICES; number++)); do
        timeout 120 rtrs-client attach "d$number" --device "/dev/nbd$number" --path "$PORTAL" \
            --connect-timeout $((5 * LAB_SLOW))s >"attach$number.log" 2>&1 &
        attaching+=($!)
    done
    for ((number = 0; number < DEVICES; number++)); do
        if wait "${attaching[number]}"; then pass "d$number attaches"; else
            fail "d$number attaches" "$(tail -n 5 "attach$number.log")"
        fi
    done
    kill "${burners[@]}"
    for ((number = 0; number < DEVICES; number++)); do
        for ((cpu = 0; cpu < $(nproc); cpu++)); do
            expect_true "nbd$number answers CPU $cpu" timeout 20 taskset -c "$cpu" \
                dd "if=/dev/nbd$number" of=/dev/null bs=4k count=8 iflag=direct
        done
    done
    note "devices reconnected: $(grep -l 'reconnecting the device' /run/rtrs/*.log | wc -l)"
    for ((number = 0; number < DEVICES; number++)); do
        expect_true "d$number detaches" timeout 60 rtrs-client detach "d$number"
    done
    kill $SERVER
    wait $SERVER
    expect_eq "the server exits cleanly" "$?" 0
}
