#!/usr/bin/env bash
# lab: captures short sessions, with the kernel and with authentication, for tests/golden/*.pcap
# topology: one
# paths: 1
# limit: 200
# groups: capture
# in-all: no
#
# Writes to the run's logs the files that tests/protocol/{capture_rtrs,dissector}.rs decode:
# our-client-kernel-server.pcap, kernel-client-our-server.pcap and, with CHALLENGE and AUTH,
# our-client-our-server.pcap. Requests are small and read data is cut off, so each file is a few
# tens of KiB in size. The machine that runs the lab needs tcpdump.

. tests/lab/interop_sk.sh

# Bytes kept of each packet: enough for a whole request with 512 bytes of data.
CAPTURE_BYTES=700

capture() { # name
    command timeout 100 tcpdump -q -Z root -i va0 -s $CAPTURE_BYTES -c 600 --immediate-mode -U \
        -w "$LAB_WORK/$1.pcap" udp port 4791 2>"$LAB_WORK/tcpdump.log" &
    CAPTURE=$!
    wait_until 20 "tcpdump to listen" grep -q 'listening on' "$LAB_WORK/tcpdump.log"
}

captured() { # name
    sleep 1
    kill -TERM $CAPTURE
    wait $CAPTURE
    assert_true "$1: read data is cut off" python3 "$LAB_SHARE/tree/tests/lab/cut_pcap.py" \
        "$LAB_WORK/$1.pcap" "$LAB_SHARE/$1.pcap"
    assert_num "$1: there are packets" "$(stat -c %s "$LAB_SHARE/$1.pcap")" -gt 5000
}

qemu() { # socket command...
    local socket=$1 commands=()
    shift
    for word in "$@"; do commands+=(-c "$word"); done
    timeout 30 qemu-io -f raw -t none "${commands[@]}" "nbd+unix:///?socket=$socket"
}

scenario() {
    local disk device
    assert_true "tcpdump is installed" command -v tcpdump
    disk=$(sk_scsi_disk 16) || exit 1
    assert_true "the server's modules load" kernel_server 1234 sess_queue_depth=16
    capture our-client-kernel-server
    assert_true "the volume attaches" timeout 60 rtrs-client attach "$disk" --session-name goldn \
        --path ip:10.0.0.1@ip:10.0.0.2 --shards 1 --socket "$LAB_WORK/s" --heartbeat 500ms \
        --buffer-size 58M
    assert_true "the session reads, writes, flushes, discards" qemu "$LAB_WORK/s" \
        "write -P 7 8192 4096" \
        "write -f -P 8 4096 4096" "read -P 7 8192 4096" "flush" "discard 16384 65536" \
        "write -z 8192 4096" "read -P 0 8192 4096"
    sleep 2
    assert_true "the volume detaches" detach "$disk"
    captured our-client-kernel-server
    assert_true "the server's modules unload" kernel_server_gone
    # Direct IO of 512 bytes needs blocks of 512.
    disk=$(sk_loop_disk 16) || exit 1
    start_server --export "vol=$disk" --listen rdma://10.0.0.2 --queue-depth 16 \
        --always-invalidate on --heartbeat 500ms
    capture kernel-client-our-server
    device=$(kernel_map sessname=goldn path=ip:10.0.0.1@ip:10.0.0.2 device_path=vol) || exit 1
    assert_match "the kernel's client maps" "$device" '^rnbd[0-9]+$'
    assert_true "the client writes" dd if=/dev/urandom of="/dev/$device" bs=512 count=2 oflag=direct
    assert_true "the client writes with fsync" dd if=/dev/urandom of="/dev/$device" bs=512 \
        count=1 seek=8 \
        oflag=direct,dsync
    assert_true "the client discards" blkdiscard -o 1M -l 64k "/dev/$device"
    assert_true "the client reads" dd if="/dev/$device" of=/dev/null bs=512 count=1 iflag=direct
    sleep 2
    assert_true "the client unmaps" kernel_unmap "$device"
    captured kernel-client-our-server
    assert_true "the server exits cleanly" stop_server
    losetup -d "$disk"
    rtrs-server key generate "$LAB_WORK/server.key" >"$LAB_WORK/server.pub"
    rtrs-client key generate "$LAB_WORK/db1.key" >"$LAB_WORK/db1.pub"
    echo "db1 $(cat "$LAB_WORK/db1.pub")" >"$LAB_WORK/clients"
    start_server --export vol=mem:16M --listen rdma://10.0.0.2 --queue-depth 16 \
        --key-file "$LAB_WORK/server.key" --clients-file "$LAB_WORK/clients"
    capture our-client-our-server
    assert_true "the volume attaches with a key" attach vol --path rdma://10.0.0.1@10.0.0.2 \
        --shards 1 \
        --socket "$LAB_WORK/s" --key-file "$LAB_WORK/db1.key" \
        --server-key "$(cat "$LAB_WORK/server.pub")"
    assert_true "the session writes and reads" qemu "$LAB_WORK/s" "write -P 7 8192 4096" \
        "read -P 7 8192 4096"
    assert_true "the volume detaches" detach vol
    captured our-client-our-server
    assert_true "the server with keys exits cleanly" stop_server
}
