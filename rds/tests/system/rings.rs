//! Tests of rings through which programs and their node pass messages (`rds/src/channel/ring.rs`).

use crate::preload::python;

/// Python code that accesses the words of its process's rings, in the order of the sockets. The
/// second ring of a socket, for messages to the program, begins at `SECOND`.
const WORDS: &str = r#"
LOCK, HEAD = 128, 256
SECOND = 640 + (256 << 10)
SENT, TAIL, TAKEN = SECOND + 20, SECOND + 128, SECOND + 136
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
def word(at, value=None, number=0, form="I"):
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(ring(number) + at)
        if value is None:
            return struct.unpack(form, memory.read(struct.calcsize(form)))[0]
        assert memory.write(struct.pack(form, value)) == struct.calcsize(form)
"#;

/// Children and threads that end with the test, and whose errors fail it.
const CHILDREN: &str = r#"
import ctypes, signal, threading, traceback
LIMIT = 60
parent = os.getpid()
def fork(body):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        assert os.getppid() == parent, "the test has ended"
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
def ended(child):
    ends = os.pidfd_open(child)
    assert select.select([ends], [], [], LIMIT)[0], "a child does not end"
    os.close(ends)
    return os.waitpid(child, 0)[1]
class Thread(threading.Thread):
    def __init__(self, body):
        super().__init__(daemon=True)
        self.body, self.is_done = body, False
        self.start()
    def run(self):
        self.body()
        self.is_done = True
    def ended(self):
        self.join(LIMIT)
        assert self.is_done, "a thread has failed or does not end"
def blocking(s):
    # With a time limit, so that a lost wake-up is an error.
    s.setblocking(True)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", LIMIT, 0))
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
        "{WORDS}{CHILDREN}{}",
        r#"
# Long messages take the socket, as do those of a process that finds the ring locked.
a, b = sock(A), sock(B, 4000)
# Waits while the other port is congested: the reader may be slow.
a.setblocking(True)
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 600000)
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 600000)
# Turns, which end with the other process.
to_child, to_parent = os.pipe(), os.pipe()
def turn(fd):
    assert select.select([fd], [], [], LIMIT)[0], "no turn"
    assert os.read(fd, 1), "the other process has ended"
count = 1500
def send(number):
    if number % 5 == 0:
        # A thread of another process holds the lock.
        word(LOCK, 1)
    length = 100000 if number % 7 == 0 else number
    a.sendto(struct.pack("I", number) + bytes(length), (B, 4000))
    word(LOCK, 0)
def odd():
    os.close(to_child[1])
    os.close(to_parent[0])
    for number in range(1, count, 2):
        turn(to_child[0])
        send(number)
        os.write(to_parent[1], b"x")
child = fork(odd)
os.close(to_child[0])
os.close(to_parent[1])
b.settimeout(LIMIT)
def receive():
    for number in range(count):
        got = b.recv(200000)
        assert struct.unpack("I", got[:4])[0] == number, (number, got[:4])
reader = Thread(receive)
for number in range(0, count, 2):
    send(number)
    os.write(to_child[1], b"x")
    turn(to_parent[0])
reader.ended()
assert ended(child) == 0
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
        "{WORDS}{CHILDREN}{}",
        r#"
b = sock(B, 4000)
def spoils(head):
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
for head in (4, 1 << 31, 0xffffffff, 1 << 19):
    assert ended(fork(lambda: spoils(head))) == 0
c = sock(A, 5000)
c.sendto(b"whole", (B, 4000))
assert b.recv(10) == b"whole"
"#
    ));
}

/// Checks that a socket without messages stays readable only while a token is left, which the next
/// call takes.
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
        "{CHILDREN}{DRAINED}{}",
        r#"
a, b = sock(A), sock(B, 4000)
# Waits while the other port is congested.
a.setblocking(True)
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 << 20)
# Many more short messages than a ring holds wait for the reader.
count = 9000
for number in range(count):
    a.sendto(struct.pack("I", number), (B, 4000))
def send():
    for number in range(count, count + 60):
        length = (150000, 5000, 900000)[number % 3]
        a.sendto(struct.pack("I", number) + bytes([number % 256]) * length, (B, 4000))
sender = Thread(send)
for number in range(count + 60):
    got = b.recv(1 << 20)
    assert struct.unpack("I", got[:4])[0] == number, (number, got[:4], len(got))
    assert number < count or len(got) == 4 + (150000, 5000, 900000)[number % 3], (number, len(got))
    assert got[4:].count(number % 256) == len(got) - 4, number
sender.ended()
drained(b)
"#
    ));
}

#[test]
fn all_threads_and_processes_that_wait_for_messages_get_one() {
    python(&format!(
        "{CHILDREN}{DRAINED}{}",
        r#"
a, b = sock(A), sock(B, 4000)
blocking(b)
def receives():
    assert len(b.recv(10)) == 1
for round in range(30):
    got = []
    readers = [Thread(lambda: got.append(b.recv(10))) for _ in range(4)]
    children = [fork(receives) for _ in range(2)]
    # Sometimes they wait already, which does not matter for the result.
    time.sleep(0.005 * (round % 3))
    for number in range(6):
        a.sendto(bytes([number]), (B, 4000))
    for reader in readers:
        reader.ended()
    assert [ended(child) for child in children] == [0, 0]
    assert len(set(got)) == 4, got
drained(b)
"#
    ));
}

#[test]
fn readers_that_are_killed_leave_a_usable_socket() {
    python(&format!(
        "{CHILDREN}{DRAINED}{}",
        r#"
import random
a, b = sock(A), sock(B, 4000)
blocking(b)
a.setblocking(False)
def receives():
    while True:
        b.recv(100)
for round in range(40):
    child = fork(receives)
    for number in range(random.randrange(1, 60)):
        try:
            a.sendto(bytes(50), (B, 4000))
        except BlockingIOError:
            assert select.select([], [a], [], LIMIT)[1], round
    os.kill(child, signal.SIGKILL)
    assert ended(child) == signal.SIGKILL
    # What the child has left is followed by another message.
    a.sendto(b"end", (B, 4000))
    while b.recv(100) != b"end":
        pass
drained(b)
"#
    ));
}

/// The words are those of a reader that is killed after it has taken a message: before it claims
/// the token, or before it takes the token.
#[test]
fn a_reader_that_is_killed_before_it_takes_its_token_makes_no_other_wait() {
    python(&format!(
        "{WORDS}{CHILDREN}{DRAINED}{}",
        r#"
a, b = sock(A), sock(B, 4000)
blocking(b)
for claims in (False, True):
    a.sendto(b"taken", (B, 4000))
    assert select.select([b], [], [], LIMIT)[0]
    # A token may come before its message.
    while word(SECOND, number=1, form="Q") == word(TAIL, number=1, form="Q"):
        time.sleep(0.001)
    if claims:
        word(TAKEN, word(SENT, number=1), number=1)
    word(TAIL, word(SECOND, number=1, form="Q"), number=1, form="Q")
    drained(b)
    for number in range(3):
        a.sendto(bytes([number]), (B, 4000))
        assert select.select([b], [], [], LIMIT)[0]
        assert b.recv(10) == bytes([number])
drained(b)
"#
    ));
}

/// A reader is killed after it has taken a token that was not its own, before it can say so.
#[test]
fn messages_without_a_token_get_another_one() {
    python(&format!(
        "{CHILDREN}{DRAINED}{}",
        r#"
a, b = sock(A), sock(B, 4000)
blocking(b)
# The C library's functions, not those of librds_preload.so.
raw = ctypes.CDLL("libc.so.6")
for round in range(2):
    a.sendto(b"left", (B, 4000))
    assert select.select([b], [], [], LIMIT)[0]
    taken = 0
    while raw.recv(b.fileno(), bytes(48), 48, socket.MSG_DONTWAIT) == 48:
        taken += 1
    assert taken
    assert select.select([b], [], [], LIMIT)[0]
    assert b.recv(10) == b"left"
    drained(b)
"#
    ));
}

#[test]
fn a_program_that_overwrites_the_ring_of_its_messages_harms_only_itself() {
    python(&format!(
        "{WORDS}{CHILDREN}{}",
        r#"
b = sock(B, 4000)
def spoils(port, at, value, form):
    a = sock(A, port)
    b.sendto(b"whole", (A, port))
    assert a.recv(10) == b"whole"
    word(at, value, -1, form)
    for number in range(60):
        b.sendto(bytes(1000), (A, port))
    a.setblocking(False)
    for number in range(100):
        try:
            a.recv(2000)
        except OSError as error:
            assert error.errno in (errno.EAGAIN, errno.EPROTO), error
words = [(at, value, "Q") for at in (SECOND, TAIL) for value in (7, 1 << 20, (1 << 64) - 8)]
words += [(at, value, "I") for at in (SENT, TAKEN, SECOND + 16) for value in (9, 1 << 31)]
for number, (at, value, form) in enumerate(words):
    assert ended(fork(lambda: spoils(6000 + number, at, value, form))) == 0, (at, value)
c = sock(A, 5000)
for number in range(100):
    b.sendto(bytes([number]), (A, 5000))
    assert c.recv(10) == bytes([number])
    c.sendto(bytes([number]), (B, 4000))
    assert b.recv(10) == bytes([number])
"#
    ));
}

#[test]
fn a_wait_for_messages_restarts_after_signals() {
    python(&format!(
        "{CHILDREN}{}",
        r#"
a, b = sock(A), sock(B, 4000)
b.setblocking(True)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.siginterrupt(signal.SIGUSR1, False)
waits = threading.get_ident()
def disturb():
    for _ in range(200):
        signal.pthread_kill(waits, signal.SIGUSR1)
        time.sleep(0.001)
    a.sendto(b"end", (B, 4000))
other = Thread(disturb)
# The function of librds_preload.so, without the loop of Python.
assert ctypes.CDLL(None).recv(b.fileno(), bytes(10), 10, 0) == 3
other.ended()
"#
    ));
}
