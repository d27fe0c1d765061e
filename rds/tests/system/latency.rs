//! Tests of the latencies of received messages (SO_RDS_MSG_RXPATH_LATENCY) with the library.

use crate::preload::python;

#[test]
fn latencies_are_delivered_with_the_message() {
    python(
        r#"
a, b = sock(A), sock(B, 4000)
LATENCY, CONTROL = 10, 11
def latencies():
    data, control, flags, source = b.recvmsg(200000, 200)
    assert flags & socket.MSG_CTRUNC == 0
    return len(data), control
b.setsockopt(SOL_RDS, LATENCY, bytes([3, 0, 1, 2]))
for size in (0, 100, 100000):
    begun = time.monotonic_ns()
    a.sendto(bytes(size), (B, 4000))
    assert select.select([b], [], [], 30)[0]
    arrived = time.monotonic_ns()
    time.sleep(0.02)
    read = time.monotonic_ns()
    got, control = latencies()
    ended = time.monotonic_ns()
    assert got == size and [c[:2] for c in control] == [(SOL_RDS, CONTROL)]
    count, *positions, header, payload, rest = struct.unpack("4B4xQQQ", control[0][2])
    assert (count, positions) == (3, [0, 1, 2])
    # The last one is the time since the message was complete.
    assert read - arrived <= rest <= ended - begun, (read - arrived, rest, ended - begun)
    assert header + payload + rest <= ended - begun, (header, payload, rest, ended - begun)
# Only one latency, after a timestamp.
b.setsockopt(SOL_RDS, LATENCY, bytes([1, 2, 0, 0]))
b.setsockopt(socket.SOL_SOCKET, 29, 1)
a.sendto(b"x", (B, 4000))
got, control = latencies()
assert [c[:2] for c in control] == [(socket.SOL_SOCKET, 29), (SOL_RDS, CONTROL)], control
count, *positions, first, second, third = struct.unpack("4B4xQQQ", control[1][2])
assert (count, positions, second, third) == (1, [2, 0, 0], 0, 0) and first > 0
# A refused value turns latencies off, or changes nothing.
for value, count in ((bytes(3), 2), (bytes(8), 2), (bytes([4, 0, 0, 0]), 2),
                     (bytes([1, 3, 0, 0]), 1)):
    fails(errno.EFAULT, b.setsockopt, SOL_RDS, LATENCY, value)
    a.sendto(b"x", (B, 4000))
    assert len(latencies()[1]) == count, value
fails(errno.ENOPROTOOPT, b.getsockopt, SOL_RDS, LATENCY, 4)
"#,
    );
}
