#!/usr/bin/env bash
# lab: rtrs-client ping --rping over TCP against rping -s on a kernel iWARP device (siw)
# topology: one
# paths: 1
# limit: 240
# groups: issue ping

# Checks ten rounds with tshark, which must decode every frame from both ends, with valid checksums.
decoded() { # path
    local pcap=$LAB_WORK/siw.pcap capture text
    dumpcap -q -i va0 -f 'tcp port 7174' -P -w "$pcap" >/dev/null 2>&1 &
    capture=$!
    wait_until 20 "dumpcap to start" test -s "$pcap"
    sleep 2
    expect_true "ten rounds, captured by tshark" timeout 30 rtrs-client ping "$1" --rping \
        -c 10 -i 0 -s 4096 -q
    sleep 2
    kill -INT $capture
    wait $capture
    text=$(timeout 90 tshark -r "$pcap" --disable-protocol rpcordma -V -Y iwarp_mpa 2>/dev/null)
    expect_num "checksums are good" "$(grep -c 'Good CRC32' <<<"$text")" -ge 60
    expect_eq "no checksum is bad" "$(grep -c 'Bad CRC32' <<<"$text")" 0
    note "opcodes: $(grep -o 'OpCode: .*' <<<"$text" | sort | uniq -c | xargs)"
}

scenario() {
    # shellcheck source=tests/lab/rping.sh
    . tests/lab/rping.sh
    local path=tcp://10.0.0.1@10.0.0.2
    assert_true "soft iWARP devices exist" siw_up 0
    assert_true "rping listens" rping_server 10.0.0.2 65535
    if command -v tshark >/dev/null && command -v dumpcap >/dev/null; then
        decoded "$path"
    else
        note "not decoded: tshark is not installed"
    fi
    our_client_rounds "$path"
    expect_num "rping showed our pattern" "$(rping_rounds "$LAB_WORK/rping.log")" -ge 100
    expect_true "also without CRC32C" our_rping plain "$path" 64 --crc off
    rping_stop
    # rping's buffer is smaller than our announced size: siw refuses the read with a Terminate.
    assert_true "rping listens with less memory" rping_server 10.0.0.2 64
    timeout 20 rtrs-client ping "$path" --rping -c 1 -s 1000 >"$LAB_WORK/small.out" 2>&1
    expect_eq "a ping larger than the buffer fails" $? 1
    note "$(tail -n 1 "$LAB_WORK/small.out")"
    rping_stop
    siw_down 0
}
