//! Tests of rings through which programs pass messages to their node (`rds/src/channel/ring.rs`).

use crate::preload::python;

/// Access to the words of the rings of this process, by the order of their sockets.
const WORDS: &str = r#"
LOCK, HEAD = 128, 256
def maps():
    lines = [line for line in open("/proc/self/maps") if "memfd:rds-flow" in line]
    return {int(line.split()[4]): int(line.split("-")[0], 16) for line in lines}
# Inode numbers, which the system does not assign in order.
rings = []
def sock(address, port=0, sock=sock):
    before = maps()
    s = sock(address, port)
    rings.extend(maps().keys() - before.keys())
    return s
def ring(number):
    return maps()[rings[number]]
def word(at, value=None, number=0):
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(ring(number) + at)
        if value is None:
            return struct.unpack("I", memory.read(4))[0]
        assert memory.write(struct.pack("I", value)) == 4
"#;

#[test]
fn short_messages_take_the_ring() {
    python(&format!(
        "{WORDS}{}",
        r#"
a = sock(A)
for length in (0, 1, 64, 8192, 65536):
    before = word(HEAD)
    a.sendto(bytes(length), (B, 4000))
    assert word(HEAD) - before >= length + 56, length
before = word(HEAD)
a.sendto(bytes(65537), (B, 4000))
assert word(HEAD) == before
"#
    ));
}

#[test]
fn messages_of_all_lengths_and_processes_stay_in_order() {
    python(&format!(
        "{WORDS}{}",
        r#"
# Long messages take the socket, as do those of a process that finds the ring locked.
a, b = sock(A), sock(B, 4000)
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 600000)
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 600000)
to_child, to_parent = os.pipe(), os.pipe()
count = 1500
def send(number):
    if number % 5 == 0:
        # A thread of another process holds the lock.
        word(LOCK, 1)
    length = 100000 if number % 7 == 0 else number
    a.sendto(struct.pack("I", number) + bytes(length), (B, 4000))
    word(LOCK, 0)
child = os.fork()
b.settimeout(30)
if child == 0:
    for number in range(1, count, 2):
        assert os.read(to_child[0], 1)
        send(number)
        os.write(to_parent[1], b"x")
    os._exit(0)
import threading
def receive():
    for number in range(count):
        got = b.recv(200000)
        assert struct.unpack("I", got[:4])[0] == number, (number, got[:4])
    done.append(True)
done = []
reader = threading.Thread(target=receive)
reader.start()
for number in range(0, count, 2):
    send(number)
    os.write(to_child[1], b"x")
    assert os.read(to_parent[0], 1)
reader.join(60)
assert done and os.waitpid(child, 0)[1] == 0
"#
    ));
}

#[test]
fn a_process_killed_while_sending_blocks_no_other_process() {
    python(&format!(
        "{WORDS}{}",
        r#"
a, b = sock(A), sock(B, 4000)
a.sendto(b"first", (B, 4000))
word(LOCK, 1)
for number in range(300):
    a.sendto(struct.pack("I", number), (B, 4000))
    if number % 50 == 0:
        assert select.select([], [a], [], 30)[1]
assert word(LOCK) == 1
assert b.recv(10) == b"first"
assert [struct.unpack("I", b.recv(10))[0] for _ in range(300)] == list(range(300))
"#
    ));
}

#[test]
fn a_program_that_breaks_its_ring_loses_that_socket_only() {
    python(&format!(
        "{WORDS}{}",
        r#"
b = sock(B, 4000)
for head in (4, 1 << 31, 0xffffffff, 1 << 19):
    if os.fork() == 0:
        a = sock(A, 5000)
        word(HEAD, head, -1)
        # Anything on the socket makes the node look.
        a.settimeout(30)
        try:
            while True:
                a.sendto(bytes(70000), (B, 4999))
                time.sleep(0.01)
        except OSError as error:
            assert error.errno == errno.ENETDOWN, error
        os._exit(0)
    assert os.wait()[1] == 0
c = sock(A, 5000)
c.sendto(b"whole", (B, 4000))
assert b.recv(10) == b"whole"
"#
    ));
}

/// Checks that a socket that has no messages is not readable for longer than a token is left, which
/// the next call takes.
const DRAINED: &str = r#"
def drained(s):
    for _ in range(100):
        if not select.select([s], [], [], 0)[0]:
            return
        fails(errno.EAGAIN, s.recv, 10, socket.MSG_DONTWAIT)
    assert False, "it stays readable"
"#;

#[test]
fn a_socket_is_readable_while_messages_wait() {
    python(&format!(
        "{DRAINED}{}",
        r#"
a, b = sock(A), sock(B, 4000)
b.setblocking(True)
def is_readable(wait=0):
    return bool(select.select([b], [], [], wait)[0])
epoll = select.epoll()
epoll.register(b, select.EPOLLIN | select.EPOLLET)
assert not is_readable() and not epoll.poll(0)
for round in range(300):
    count = round % 4 + 1
    for number in range(count):
        a.sendto(struct.pack("II", round, number), (B, 4000))
    for number in range(count):
        assert is_readable(30), (round, number)
        assert b.recv(10, socket.MSG_PEEK) == struct.pack("II", round, number)
        assert b.recv(10) == struct.pack("II", round, number)
    drained(b)
    fails(errno.EAGAIN, b.recv, 10, socket.MSG_DONTWAIT)
# An edge comes with the first message after a call has found nothing.
b.setblocking(False)
def drain():
    got = []
    while True:
        try:
            got.append(b.recv(10))
        except BlockingIOError:
            return got
epoll.poll(0)
assert drain() == []
for round in range(100):
    a.sendto(b"x", (B, 4000))
    got = []
    while not got:
        assert epoll.poll(30), round
        got = drain()
    assert got == [b"x"]
"#
    ));
}

#[test]
fn long_and_short_messages_arrive_in_order() {
    python(&format!(
        "{DRAINED}{}",
        r#"
import threading
a, b = sock(A), sock(B, 4000)
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 << 20)
# Many more than a ring holds, without content, wait for a reader that is late.
count = 9000
def send():
    for number in range(count):
        a.sendto(struct.pack("I", number), (B, 4000))
    for number in range(count, count + 40):
        length = 150000 if number % 3 == 0 else 5000
        a.sendto(struct.pack("I", number) + bytes(length), (B, 4000))
sender = threading.Thread(target=send)
sender.start()
time.sleep(0.3)
for number in range(count + 40):
    got = b.recv(1 << 20)
    assert struct.unpack("I", got[:4])[0] == number, (number, len(got))
sender.join(30)
drained(b)
"#
    ));
}

#[test]
fn all_threads_and_processes_that_wait_for_messages_get_one() {
    python(&format!(
        "{DRAINED}{}",
        r#"
import threading
a, b = sock(A), sock(B, 4000)
b.setblocking(True)
for round in range(30):
    got = []
    readers = [threading.Thread(target=lambda: got.append(b.recv(10))) for _ in range(4)]
    for reader in readers:
        reader.start()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            os._exit(0 if len(b.recv(10)) == 1 else 1)
        children.append(child)
    time.sleep(0.005 * (round % 3))
    for number in range(6):
        a.sendto(bytes([number]), (B, 4000))
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive(), (round, got)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    assert len(set(got)) == 4
drained(b)
"#
    ));
}

#[test]
fn readers_that_are_killed_leave_a_usable_socket() {
    python(
        r#"
import random, signal
a, b = sock(A), sock(B, 4000)
b.setblocking(True)
a.setblocking(False)
for round in range(40):
    child = os.fork()
    if child == 0:
        while True:
            b.recv(100)
    for number in range(random.randrange(1, 60)):
        try:
            a.sendto(bytes(50), (B, 4000))
        except BlockingIOError:
            select.select([], [a], [], 30)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # What the child has left is followed by another message.
    a.sendto(b"end", (B, 4000))
    while True:
        assert select.select([b], [], [], 30)[0], round
        if b.recv(100) == b"end":
            break
"#,
    );
}
