//! Tests of counters and TCP connections from the point of view of programs with the library.

use crate::preload::python;

/// Reads the counters and the TCP connections of all nodes, like rds-info.
const INFO: &str = r#"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def info(option):
    s = socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
    buffer, size = ctypes.create_string_buffer(1 << 20), ctypes.c_uint(1 << 20)
    each = libc.getsockopt(s.fileno(), SOL_RDS, option, buffer, ctypes.byref(size))
    assert each >= 0, ctypes.get_errno()
    s.close()
    return each, buffer.raw[:size.value]
def counters():
    each, data = info(10000)
    parts = [data[at:at + each] for at in range(0, len(data), each)]
    return {p[:32].split(b"\0")[0].decode(): struct.unpack("Q", p[32:])[0] for p in parts}
def grows(name, by, before):
    deadline = time.time() + 60
    while counters()[name] - before[name] < by:
        assert time.time() < deadline, (name, by, counters()[name] - before[name])
        time.sleep(0.02)
"#;

#[test]
fn refused_sends_of_programs_are_counted() {
    python(&format!(
        "{INFO}{}",
        r#"
a, b = sock(A), sock(B, 4000)
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 20000)
a.setblocking(False)
saw, before = {}, counters()
def count(to, code):
    deadline = time.time() + 60
    while saw.get(code, 0) < 50:
        assert time.time() < deadline, (saw, code)
        try:
            a.sendto(bytes(1000), to)
        except OSError as error:
            saw[error.errno] = saw.get(error.errno, 0) + 1
count((B, 4000), errno.ENOBUFS)
count(("127.0.0.77", 4000), errno.EAGAIN)
after = counters()
assert after["cong_send_error"] - before["cong_send_error"] == saw[errno.ENOBUFS], saw
assert after["send_queue_full"] - before["send_queue_full"] == saw[errno.EAGAIN], saw
# A call that waits counts once; so does one of a forked child.
assert after["cong_send_blocked"] == before["cong_send_blocked"]
if os.fork() == 0:
    c = sock(A)
    c.settimeout(None)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50000))
    fails(errno.ETIMEDOUT, c.sendto, b"x", (B, 4000))
    os._exit(0)
assert os.wait()[1] == 0
assert counters()["cong_send_blocked"] - before["cong_send_blocked"] == 1
"#
    ));
}

#[test]
fn payload_bytes_and_emptied_buffers_are_counted() {
    python(&format!(
        "{INFO}{}",
        r#"
a, b = sock(A), sock(B, 4000)
before = counters()
a.sendto(bytes(1000), (B, 4000))
assert len(b.recv(2000)) == 1000
for name, by in (("copy_from_user", 1000), ("copy_to_user", 1000), ("send_queue_empty", 1),
                 ("recv_bytes_added_to_sock", 1000), ("recv_bytes_freed_fromsock", 1000),
                 ("tcp_data_ready_calls", 1)):
    grows(name, by, before)
for name in ("recv_ack_required", "tcp_write_space_calls", "tcp_sndbuf_full",
             "tcp_listen_closed_stale"):
    assert name in before, name
"#
    ));
}

#[test]
fn the_tcp_connections_of_nodes_are_listed() {
    python(&format!(
        "{INFO}{}",
        r#"
assert info(10007) == (41, b"")
a, b = sock(A), sock(B, 4000)
a.sendto(bytes(1000), (B, 4000))
assert len(b.recv(2000)) == 1000
each, data = info(10007)
ends = set()
for at in range(0, len(data), each):
    fields = struct.unpack("=4s2s4s2sQQIIIx", data[at:at + each])
    own, peer = [(socket.inet_ntoa(fields[n]), int.from_bytes(fields[n + 1])) for n in (0, 2)]
    assert own[1] and peer[1] and fields[4:6] == (0, 0) and fields[6] >= 48, fields
    ends.add((own, peer))
# Both ends of one connection.
assert len(ends) == 2 and {(peer, own) for own, peer in ends} == ends, ends
assert {own[0] for own, _ in ends} == {A, B}
"#
    ));
}
