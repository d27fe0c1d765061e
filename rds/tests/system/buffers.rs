//! Tests of programs' send and receive buffers: only payload counts, until it is acknowledged or
//! read, and the sizes are those of the kernel.

use crate::preload::python;

const SETUP: &str = r#"
import ctypes, threading
libc = ctypes.CDLL(None, use_errno=True)
ABSENT = "127.0.0.77"
CANCEL = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 4000, bytes([127, 0, 0, 77]))
def size(s, option, bytes):
    s.setsockopt(socket.SOL_SOCKET, option, bytes)
def counter(name):
    s = socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
    buffer, length = ctypes.create_string_buffer(1 << 20), ctypes.c_uint(1 << 20)
    each = libc.getsockopt(s.fileno(), SOL_RDS, 10000, buffer, ctypes.byref(length))
    data = buffer.raw[:length.value]
    parts = [data[at:at + each] for at in range(0, len(data), each)]
    s.close()
    return {p[:32].split(b"\0")[0].decode(): struct.unpack("Q", p[32:])[0] for p in parts}[name]
def until(check):
    deadline = time.time() + 30
    while not check():
        assert time.time() < deadline
        time.sleep(0.005)
def queued(s):
    return struct.unpack("i", fcntl.ioctl(s, 0x5411, b"\0" * 4))[0]
def is_writable(s, wait):
    poll = select.poll()
    poll.register(s, select.POLLOUT)
    return bool(poll.poll(wait * 1000))
def fill(s, message, to, expected):
    """Sends without blocking until `expected` bytes are in the send buffer, and it is full."""
    sent = 0
    while sent < expected:
        try:
            s.sendto(message, to)
            sent += len(message)
        except BlockingIOError:
            # The node has not read what was sent before.
            assert is_writable(s, 30), (sent, expected)
    assert sent == expected
"#;

#[test]
fn a_send_buffer_holds_payload_until_it_is_acknowledged() {
    python(&format!(
        "{SETUP}{}",
        r#"
for length in (64, 1024, 8192, 65536):
    a = sock(A)
    a.setblocking(False)
    size(a, socket.SO_SNDBUF, 100000)
    message, to = bytes(length), (ABSENT, 4000)
    # The message that exceeds the buffer is still taken.
    expected = -(-100000 // length) * length
    fill(a, message, to, expected)
    for _ in range(3):
        assert not is_writable(a, 0), "it is full"
        fails(errno.EAGAIN, a.sendto, message, to)
        assert queued(a) == expected
    a.setblocking(True)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 20000))
    fails(errno.ETIMEDOUT, a.sendto, message, to)
    # An empty message is refused as well, and so is one that is longer than the buffer.
    fails(errno.ETIMEDOUT, a.sendto, b"", to)
    fails(errno.EMSGSIZE, a.sendto, bytes(100001), to)
    a.setsockopt(SOL_RDS, 1, CANCEL)
    assert is_writable(a, 30) and queued(a) == 0
    a.setblocking(False)
    fill(a, message, to, expected)
    # A larger buffer has room immediately.
    size(a, socket.SO_SNDBUF, 200000)
    assert is_writable(a, 30)
    fill(a, message, to, -(-200000 // length) * length - expected)
    fails(errno.EAGAIN, a.sendto, message, to)
    a.close()
"#
    ));
}

#[test]
fn polls_wake_when_a_full_send_buffer_has_room() {
    python(&format!(
        "{SETUP}{}",
        r#"
a, b = sock(A), sock(B, 4000)
a.setblocking(False)
size(a, socket.SO_SNDBUF, 20000)
epoll = select.epoll()
epoll.register(a, select.EPOLLOUT | select.EPOLLET)
waits = (lambda: is_writable(a, 30), lambda: bool(select.select([], [a], [], 30)[1]),
         lambda: bool(epoll.poll(30)))
total = 30000
def receive():
    for number in range(total):
        got = b.recv(100)
        assert struct.unpack("I", got[:4])[0] == number and len(got) == 64, (number, got)
    done.append(True)
done = []
reader = threading.Thread(target=receive)
reader.start()
number = refused = 0
while number < total:
    try:
        a.sendto(struct.pack("I", number) + bytes(60), (B, 4000))
        number += 1
    except OSError as error:
        if error.errno == errno.ENOBUFS:
            # The reader is slow.
            assert select.select([a], [], [], 30)[0]
            fails(errno.EAGAIN, a.recv, 10)
            continue
        assert error.errno == errno.EAGAIN
        refused += 1
        assert waits[refused % 3](), number
reader.join(30)
assert done
"#
    ));
}

#[test]
fn all_processes_with_a_socket_share_its_buffers() {
    python(&format!(
        "{SETUP}{}",
        r#"
a, to = sock(A), (ABSENT, 4000)
a.setblocking(False)
size(a, socket.SO_SNDBUF, 100000)
def child(call):
    pid = os.fork()
    if pid == 0:
        call()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
child(lambda: fill(a, bytes(1000), to, 50000))
fill(a, bytes(1000), to, 30000)
# A program that inherits the socket.
script = '''
import socket, select, sys
s = socket.socket(21, socket.SOCK_SEQPACKET, fileno=int(sys.argv[1]))
for _ in range(20):
    # The socket is nonblocking, and the node may not have read what was sent before.
    assert select.select([], [s], [], 30)[1]
    s.sendto(bytes(1000), ("127.0.0.77", 4000))
'''
os.set_inheritable(a.fileno(), True)
subprocess.run([sys.executable, "-c", script, str(a.fileno())], close_fds=False, check=True)
assert queued(a) == 100000 and not is_writable(a, 0)
child(lambda: fails(errno.EAGAIN, a.sendto, b"x", to))
fails(errno.EAGAIN, a.sendto, b"x", to)
child(lambda: a.setsockopt(SOL_RDS, 1, CANCEL))
assert is_writable(a, 30) and queued(a) == 0
# What a child reads makes room for all.
b = sock(B, 4001)
size(b, socket.SO_RCVBUF, 20000)
before = counter("recv_queued")
for _ in range(20):
    a.sendto(bytes(1000), (B, 4001))
until(lambda: counter("recv_queued") - before == 20)
maps = counter("cong_update_received")
child(lambda: [b.recv(2000) for _ in range(12)])
for _ in range(11):
    a.sendto(bytes(1000), (B, 4001))
assert sum(len(b.recv(2000)) for _ in range(19)) == 19000
assert counter("cong_update_received") == maps
"#
    ));
}

#[test]
fn a_receive_buffer_holds_payload_until_it_is_read() {
    python(&format!(
        "{SETUP}{}",
        r#"
a, b = sock(A), sock(B, 4000)
a.setblocking(False)
size(b, socket.SO_RCVBUF, 20000)
def send(count):
    for _ in range(count):
        before = counter("recv_queued")
        a.sendto(bytes(1000), (B, 4000))
        until(lambda: counter("recv_queued") > before)
def changes(count):
    before = counter("cong_update_received")
    def changed():
        until(lambda: counter("cong_update_received") - before == count)
        # A node publishes an update to programs after counting it, and before its next answer.
        counter("cong_update_received")
    return changed
send(1)
assert len(b.recv(2000)) == 1000
for round in range(3):
    # 20,000 bytes are not above the limit, wherever they wait; 21,000 are.
    send(20)
    changed = changes(1)
    send(1)
    changed()
    fails(errno.ENOBUFS, a.sendto, b"x", (B, 4000))
    # Below half of the buffer, the port accepts messages again. A peek removes nothing.
    changed = changes(1)
    assert b.recv(10, socket.MSG_PEEK) == bytes(10)
    for _ in range(11):
        assert len(b.recv(10)) == 10
    fails(errno.ENOBUFS, a.sendto, b"x", (B, 4000))
    assert b.recv(2000) == bytes(1000)
    changed()
    assert select.select([a], [], [], 30)[0]
    fails(errno.EAGAIN, a.recv, 10)
    send(1)
    for _ in range(10):
        assert b.recv(2000) == bytes(1000)
# Empty messages take no room.
size(b, socket.SO_RCVBUF, 5000)
for _ in range(2000):
    while True:
        try:
            a.sendto(b"", (B, 4000))
            break
        except BlockingIOError:
            assert is_writable(a, 30)
assert all(b.recv(10) == b"" for _ in range(2000))
"#
    ));
}

#[test]
fn a_socket_that_cannot_send_still_receives() {
    python(&format!(
        "{SETUP}{}",
        r#"
# The send buffer of b stays full; what b reads still makes room for its peers.
a, b = sock(A), sock(B, 4000)
a.setblocking(False)
size(b, socket.SO_RCVBUF, 5000)
b.setblocking(False)
size(b, socket.SO_SNDBUF, 5000)
fill(b, bytes(1000), (ABSENT, 4000), 5000)
for round in range(20):
    sent = 0
    while True:
        try:
            a.sendto(bytes(1000), (B, 4000))
            sent += 1
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                break
            assert error.errno == errno.EAGAIN
            assert is_writable(a, 30)
    for _ in range(sent):
        assert select.select([b], [], [], 30)[0]
        assert len(b.recv(2000)) == 1000
    assert select.select([a], [], [], 30)[0]
    fails(errno.EAGAIN, a.recv, 10)
    assert not is_writable(b, 0)
"#
    ));
}
