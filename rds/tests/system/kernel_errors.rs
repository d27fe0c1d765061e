//! Tests that socket options and errors match those of the kernel, as seen by programs with the
//! library.

use crate::preload::python;

#[test]
fn the_transport_is_selected_once_and_must_exist() {
    python(
        r#"
new = lambda: socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
a = new()
assert a.getsockopt(SOL_RDS, 8) == -1
for value, code in ((99, errno.EINVAL), (-1, errno.EINVAL), (0, errno.ENOPROTOOPT),
                    (1, errno.ENOPROTOOPT), (struct.pack("ii", 2, 0), errno.EINVAL),
                    (b"\x02", errno.EINVAL)):
    fails(code, a.setsockopt, SOL_RDS, 8, value)
assert a.getsockopt(SOL_RDS, 8) == -1
a.setsockopt(SOL_RDS, 8, 2)
assert a.getsockopt(SOL_RDS, 8) == 2
fails(errno.EOPNOTSUPP, a.setsockopt, SOL_RDS, 8, 2)
a.bind((A, 0))
assert a.getsockopt(SOL_RDS, 8) == 2
fails(errno.EOPNOTSUPP, sock(A).setsockopt, SOL_RDS, 8, 2)
"#,
    );
}

#[test]
fn unbound_sockets_fail_as_in_the_kernel() {
    python(
        r#"
import threading
new = lambda: socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
a = new()
fails(errno.EAGAIN, a.recv, 10, socket.MSG_DONTWAIT)
a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50000))
fails(errno.ETIMEDOUT, a.recv, 10)
to = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 4000, bytes([127, 0, 0, 2]))
fails(errno.ENOTCONN, a.setsockopt, SOL_RDS, 1, to)
fails(errno.ENOTCONN, a.setsockopt, SOL_RDS, 2, bytes(32))
fails(errno.EINVAL, a.setsockopt, SOL_RDS, 3, bytes(16))
# A default destination gives the socket a family, and no address.
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def own(s):
    buffer, size = ctypes.create_string_buffer(28), ctypes.c_uint(28)
    assert libc.getsockname(s.fileno(), buffer, ctypes.byref(size)) == 0
    return buffer.raw[:size.value]
assert own(a) == bytes(16)
a.connect((B, 4000))
assert own(a) == struct.pack("=H", socket.AF_INET) + bytes(14)
# A receive waits until another thread binds the socket.
b, got = new(), []
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 30, 0))
thread = threading.Thread(target=lambda: got.append(b.recv(10)))
thread.start()
time.sleep(0.1)
b.bind((B, 4000))
c = sock(A)
c.sendto(b"bound", (B, 4000))
thread.join(60)
assert got == [b"bound"]
"#,
    );
}

#[test]
fn calls_that_rds_does_not_have_fail_as_in_the_kernel() {
    python(
        r#"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
pair = (ctypes.c_int * 2)()
assert libc.socketpair(AF_RDS, socket.SOCK_SEQPACKET, 0, pair) == -1
assert ctypes.get_errno() == errno.EOPNOTSUPP
assert libc.socketpair(socket.AF_UNIX, socket.SOCK_STREAM, 0, pair) == 0
a, b = sock(A), sock(B, 4000)
fails(errno.EDESTADDRREQ, a.connect, ("0.0.0.0", 4000))
fails(errno.EINVAL, a.connect, ("224.0.0.1", 4000))
fails(errno.EINVAL, a.connect, ("255.255.255.255", 4000))
for level, name in ((socket.IPPROTO_TCP, socket.TCP_NODELAY), (socket.IPPROTO_IP, socket.IP_TTL)):
    fails(errno.ENOPROTOOPT, a.setsockopt, level, name, 1)
    fails(errno.ENOPROTOOPT, a.getsockopt, level, name)
for kind, size, code in ((1, 48, errno.EINVAL), (3, 32, errno.EOPNOTSUPP),
                         (6, 72, errno.EOPNOTSUPP), (77, 48, errno.EINVAL)):
    fails(code, a.sendmsg, [b"x"], [(SOL_RDS, kind, bytes(size))], 0, (B, 4000))
# MSG_OOB takes no message.
a.sendto(b"stays", (B, 4000))
select.select([b], [], [], 30)
assert b.recv(10, socket.MSG_OOB) == b""
assert b.recv(10) == b"stays"
"#,
    );
}
