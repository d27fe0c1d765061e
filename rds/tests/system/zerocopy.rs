//! Tests of MSG_ZEROCOPY in programs that use the library.

use crate::preload::python;

const SETUP: &str = r#"
SO_ZEROCOPY, MSG_ZEROCOPY, COOKIE, COMPLETION = 60, 0x4000000, 12, 13
def send(s, data, cookie, to=(B, 4000)):
    return s.sendmsg([data], [(SOL_RDS, COOKIE, struct.pack("I", cookie))], MSG_ZEROCOPY, to)
def cookies(control):
    found = []
    for level, kind, data in control:
        if (level, kind) == (SOL_RDS, COMPLETION):
            assert len(data) == 36
            words = struct.unpack("9I", data)
            assert 1 <= words[0] <= 8 and not any(words[1 + words[0]:]), words
            found += words[1:1 + words[0]]
    return found
def completions(s, count):
    s.setblocking(False)
    found = []
    while len(found) < count:
        assert select.select([s], [], [], 30)[0], found
        data, control, flags, source = s.recvmsg(100, 200)
        assert data == b"" and flags & socket.MSG_CTRUNC == 0
        found += cookies(control)
    fails(errno.EAGAIN, s.recvmsg, 100, 200)
    return found
"#;

#[test]
fn a_sender_is_notified_when_its_messages_have_arrived() {
    python(&format!(
        "{SETUP}{}",
        r#"
a, b = sock(A), sock(B, 4000)
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
assert a.getsockopt(socket.SOL_SOCKET, SO_ZEROCOPY) == 0
a.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
assert a.getsockopt(socket.SOL_SOCKET, SO_ZEROCOPY) == 1
sizes = (1, 100, 8192, 65536, 65537, 100000)
for cookie, size in enumerate(sizes):
    assert send(a, bytes([cookie]) * size, cookie + 10) == size
for cookie, size in enumerate(sizes):
    assert b.recv(200000) == bytes([cookie]) * size
assert completions(a, len(sizes)) == [cookie + 10 for cookie in range(len(sizes))]
# A control message has up to 8 cookies; the largest cookie has no special meaning.
a.settimeout(30)
want = [0xffffffff - number for number in range(20)]
for cookie in want:
    send(a, b"x", cookie)
assert sum(len(b.recv(10)) for cookie in want) == len(want)
assert completions(a, len(want)) == want
# Completions are also delivered with a message, after its other control messages.
a.setsockopt(socket.SOL_SOCKET, 29, 1)
a.settimeout(None)
send(a, b"question", 5)
b.sendto(b"answer", a.getsockname()) if b.recv(10) == b"question" else None
found = []
while True:
    # A blocking receive returns only with a message.
    data, control, flags, source = a.recvmsg(100, 200)
    assert data == b"answer"
    assert control[0][:2] == (socket.SOL_SOCKET, 29), control
    found += cookies(control[1:])
    break
if not found:
    found = completions(a, 1)
assert found == [5]
"#
    ));
}

#[test]
fn canceled_messages_and_messages_to_the_same_node_complete() {
    python(&format!(
        "{SETUP}{}",
        r#"
a, b = sock(A), sock(A, 4000)
a.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
send(a, b"own", 1, (A, 4000))
assert b.recv(10) == b"own"
assert completions(a, 1) == [1]
# A peer that does not exist.
send(a, bytes(1000), 2, ("127.0.0.99", 4000))
to = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 4000, bytes([127, 0, 0, 99]))
a.setsockopt(SOL_RDS, 1, to)
assert completions(a, 1) == [2]
# Completions stay if the receive has no room for them.
send(a, b"own", 3, (A, 4000))
assert b.recv(10) == b"own"
assert select.select([a], [], [], 30)[0]
fails(errno.EAGAIN, a.recv, 10)
assert cookies(a.recvmsg(10, 200)[1]) == [3]
"#
    ));
}

#[test]
fn zerocopy_sends_without_a_cookie_or_the_option_are_refused() {
    python(&format!(
        "{SETUP}{}",
        r#"
a, b = sock(A), sock(B, 4000)
fails(errno.EINVAL, send, a, b"x", 1)
fails(errno.EINVAL, a.sendto, b"x", MSG_ZEROCOPY, (B, 4000))
for value in (-1, 2):
    fails(errno.EINVAL, a.setsockopt, socket.SOL_SOCKET, SO_ZEROCOPY, value)
a.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
fails(errno.EINVAL, a.sendto, b"x", MSG_ZEROCOPY, (B, 4000))
fails(errno.EINVAL, send, a, b"", 1)
fails(errno.EINVAL, a.sendmsg, [b"x"], [(SOL_RDS, COOKIE, bytes(4))], 0, (B, 4000))
fails(errno.EINVAL, a.sendmsg, [b"x"], [(SOL_RDS, COOKIE, bytes(3))], MSG_ZEROCOPY, (B, 4000))
fails(errno.EMSGSIZE, send, a, bytes(200000), 1)
fails(errno.ENOTCONN, send, socket.socket(AF_RDS, socket.SOCK_SEQPACKET), b"x", 1)
# Nothing was sent, and so nothing completes.
a.setblocking(False)
fails(errno.EAGAIN, a.recvmsg, 10, 200)
a.sendto(b"first", (B, 4000))
assert b.recv(10) == b"first"
"#
    ));
}
