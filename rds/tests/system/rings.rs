//! Tests of rings through which programs pass messages to their node (`rds/src/channel/ring.rs`).

use crate::preload::python;

/// Python code for access to the words of its process's rings, in the order of the sockets.
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
