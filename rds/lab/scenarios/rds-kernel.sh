#!/usr/bin/env bash
# lab: our RDS node and the kernel's: data, pings, congestion, both address orders, IPv6, probes
# topology: one
# paths: 1
# limit: 360
# groups: rds ours

# Kernel sockets on many ports, so that some use a path other than the first: all messages arrive.
many_sockets() { # to
    rds_in rk timeout 60 python3 - "$1" <<'END'
import socket, sys
sockets = []
for port in range(20000, 20064):
    s = socket.socket(21, socket.SOCK_SEQPACKET)
    s.bind(("10.9.0.5", port))
    sockets.append(s)
# Blocking calls: an unanswered probe would block some of the sends forever.
for s in sockets:
    for number in range(4):
        s.sendto(b"%d" % number, (sys.argv[1], 4000))
END
}

read_many() { # address
    rds_preloaded ru timeout 60 python3 - "$1" <<'END'
import socket, sys
s = socket.socket(21, socket.SOCK_SEQPACKET)
s.bind((sys.argv[1], 4000))
print("bound", flush=True)
seen = {}
for _ in range(256):
    data, source = s.recvfrom(100)
    seen.setdefault(source[1], []).append(int(data))
assert len(seen) == 64, len(seen)
assert all(numbers == [0, 1, 2, 3] for numbers in seen.values()), seen
END
}

# Reads from a port, once its senders are blocked, everything that they have sent.
slow_reader() { # how address
    "rds_$1" "$(side_of "$1")" timeout 90 python3 - "$2" <<'END'
import os, socket, struct, sys, time
s = socket.socket(21, socket.SOCK_SEQPACKET)
s.bind((sys.argv[1], 4100))
print("bound", flush=True)
path = os.environ["LAB_WORK"] + "/congested"
while not os.path.exists(path):
    time.sleep(0.01)
for number in range(int(open(path).read())):
    assert s.recv(5000) == struct.pack("I", number) * 1000
END
}

# Sends to the port until it is congested (ENOBUFS), and again when it is not.
stopped_sender() { # how address to
    "rds_$1" "$(side_of "$1")" timeout 60 python3 - "$2" "$3" <<'END'
import errno, os, socket, struct, sys, time
s = socket.socket(21, socket.SOCK_SEQPACKET)
s.bind((sys.argv[1], 0))
s.setblocking(False)
to = (sys.argv[2], 4100)
sent = 0
deadline = time.time() + 50 * int(os.environ["LAB_SLOW"])
while time.time() < deadline:
    try:
        s.sendto(struct.pack("I", sent) * 1000, to)
        sent += 1
    except OSError as error:
        if error.errno == errno.ENOBUFS:
            break
        time.sleep(0.001)
else:
    raise SystemExit("never congested")
path = os.environ["LAB_WORK"] + "/congested"
open(path + ".new", "w").write(str(sent))
os.rename(path + ".new", path)
while True:
    try:
        s.sendto(b"again", to)
        break
    except OSError as error:
        assert time.time() < deadline, error
        time.sleep(0.01)
END
}

# The namespace of programs over the library, or over the kernel.
side_of() { # preloaded|in
    case $1 in preloaded) echo ru ;; *) echo rk ;; esac
}

congestion() { # how address, of the reader and of the sender
    local reader
    rm -f "$LAB_WORK/congested"
    slow_reader "$1" "$2" >"$LAB_WORK/slow.out" 2>&1 &
    reader=$!
    wait_until 20 "the reader" grep -q bound "$LAB_WORK/slow.out" || return 1
    stopped_sender "$3" "$4" "$2" || return 1
    wait $reader
}

scenario() {
    export LAB_WORK
    # shellcheck source=rds/lab/rds.sh
    . rds/lab/rds.sh
    local own reader tool
    assert_true "two namespaces are connected, and the kernel has RDS" rds_up
    assert_true "our nodes start, one smaller and one larger than the kernel's" rds_node ru \
        10.9.0.1 10.9.0.9 fd09::1 fd09::9
    for own in 10.9.0.1 10.9.0.9; do
        expect_true "$own pings the kernel" rds_by ru timeout 30 rds ping 10.9.0.5 -c 5 -i 10ms \
            -I $own
        expect_true "the kernel pings $own" rds_in rk timeout 30 rds ping $own -c 5 -i 10ms \
            -I 10.9.0.5 --kernel
        expect_true "messages of all sizes from $own to the kernel" rds_sizes ru "-I $own" \
            rk "-I 10.9.0.5 --kernel" 10.9.0.5 4000
        expect_true "messages of all sizes from the kernel to $own" rds_sizes rk \
            "-I 10.9.0.5 --kernel" ru "-I $own" $own 4000
    done
    expect_true "IPv6: fd09::1 pings the kernel" rds_by ru timeout 30 rds ping fd09::5 -c 5 \
        -i 10ms -I fd09::1
    expect_true "IPv6: the kernel pings fd09::9" rds_in rk timeout 30 rds ping fd09::9 -c 5 \
        -i 10ms -I fd09::5 --kernel
    expect_true "IPv6: messages from the kernel to fd09::9" rds_sizes rk "-I fd09::5 --kernel" \
        ru "-I fd09::9" fd09::9 4000
    expect_true "IPv6: messages from fd09::1 to the kernel" rds_sizes ru "-I fd09::1" \
        rk "-I fd09::5 --kernel" fd09::5 4000
    for own in 10.9.0.1 10.9.0.9; do
        read_many $own >"$LAB_WORK/many.out" 2>&1 &
        reader=$!
        assert_within 20 "a reader at $own" grep -q bound "$LAB_WORK/many.out"
        expect_true "64 sockets of the kernel send to $own" many_sockets $own
        expect_true "all messages arrive in order" wait $reader
    done
    expect_true "a program on the kernel's side gets ENOBUFS, and continues" congestion \
        preloaded 10.9.0.1 in 10.9.0.5
    expect_true "ours gets ENOBUFS from the kernel's port, and continues" congestion in 10.9.0.5 \
        preloaded 10.9.0.1
    assert_true "a server over the kernel's node" rds_serve rk -I 10.9.0.5 --kernel
    for own in 10.9.0.1 10.9.0.9; do
        expect_true "messages of 1 MiB both ways, $own and the kernel" rds_load ru 10.9.0.5 \
            -I $own -q 1048576 -a 1048576 -d 2 -n 20 -t $((60 * LAB_SLOW))s
    done
    kill "$RDS_SERVER" && wait "$RDS_SERVER" 2>/dev/null
    for tool in rds_lat rds_bw; do
        expect_true "qperf $tool, the kernel on one end and the library on the other" \
            rds_qperf $tool
    done
    expect_true "the kernel's node is shown" rds_in rk rds info --kernel -I 10.9.0.5 -o json
    for tool in rds-ping rds-info; do
        command -v $tool >/dev/null || continue
        case $tool in
            rds-ping)
                expect_true "rds-ping of rds-tools over the library" rds_preloaded ru timeout 30 \
                    rds-ping -c 3 -i 0.1 -I 10.9.0.1 10.9.0.5
                expect_true "rds-ping of rds-tools over the kernel" rds_in rk timeout 30 \
                    rds-ping -c 3 -i 0.1 -I 10.9.0.5 10.9.0.9
                ;;
            rds-info)
                expect_match "rds-info of rds-tools over the library" \
                    "$(rds_preloaded ru timeout 30 rds-info -cn 2>&1)" 'send_queued.*10\.9\.0\.5'
                ;;
        esac
    done
}
