//! Tests with third-party programs and `librds_preload.so`: Python's `socket` module and qperf.

use std::path::PathBuf;

use rtrs_tests::{COPY_TIME_MAX, Finished, Proc, requires, wait_for};

use crate::stand::{LIMIT, Stand};

/// Returns the path of the library, beside the `rds` program.
fn library() -> PathBuf {
    let dir = rtrs_tests::bin("rds").parent().expect("a directory").to_owned();
    let path = dir.join("librds_preload.so");
    assert!(path.is_file(), "{} is not built: cargo build --workspace", path.display());
    path
}

pub(crate) fn start(stand: &Stand, program: &str, args: &[&str]) -> Proc {
    let mut command = stand.command(program.into(), args);
    command.env("LD_PRELOAD", library());
    Proc::start(command)
}

/// Runs a Python script with two nodes, 127.0.0.1 and 127.0.0.2.
pub(crate) fn python(script: &str) -> Option<Finished> {
    if !requires(&["python3"]) {
        return None;
    }
    let stand = Stand::new(2);
    let script = format!("{HEAD}\n{script}");
    Some(start(&stand, "python3", &["-c", &script]).wait(COPY_TIME_MAX).ok())
}

pub(crate) const HEAD: &str = r#"
import array, errno, fcntl, os, select, socket, struct, subprocess, sys, time
AF_RDS, SOL_RDS = 21, 276
A, B = "127.0.0.1", "127.0.0.2"
def sock(address, port=0):
    s = socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
    s.settimeout(30)
    s.bind((address, port))
    return s
def read(fd, size):
    # A timeout of Python makes the descriptor nonblocking.
    select.select([fd], [], [], 30)
    return os.read(fd, size)
def fails(code, call, *args):
    try:
        call(*args)
    except OSError as error:
        assert error.errno == code, (errno.errorcode.get(error.errno), errno.errorcode[code])
        return
    raise AssertionError("the call does not fail with " + errno.errorcode[code])
"#;

#[test]
fn python_sends_and_receives() {
    python(
        r#"
a, b = sock(A), sock(B, 4000)
assert b.getsockname() == (B, 4000) and a.getsockname()[0] == A and a.getsockname()[1] > 1
for size in (0, 1, 100, 8192, 65536, 65537, 100000):
    data = os.urandom(size)
    assert a.sendto(data, (B, 4000)) == size
    got, source = b.recvfrom(200000)
    assert got == data and source == a.getsockname(), size
# Truncated data is lost and reported; MSG_PEEK keeps the message.
a.sendto(b"0123456789", (B, 4000))
assert b.recv(4, socket.MSG_PEEK) == b"0123"
got, control, flags, source = b.recvmsg(4)
assert got == b"0123" and flags & socket.MSG_TRUNC and source == a.getsockname()
# Several parts, and a default destination.
fails(errno.ENOTCONN, a.send, b"x")
a.connect((B, 4000))
assert a.getpeername() == (B, 4000)
assert a.sendmsg([b"one", b"", b"two"]) == 6
parts = [bytearray(2), bytearray(10)]
assert b.recvmsg_into(parts)[0] == 6 and parts[0] + parts[1][:4] == b"onetwo"
os.write(a.fileno(), b"written")
assert read(b.fileno(), 100) == b"written"
# Up to 1 MiB with a larger buffer.
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 << 20)
assert a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 4 << 20
data = os.urandom(1 << 20)
a.send(data)
assert b.recv(2 << 20) == data
fails(errno.EMSGSIZE, a.send, data + b"x")
# A ping.
a.sendto(b"", (B, 0))
assert a.recvfrom(10) == (b"", (B, 0))
"#,
    );
}

#[test]
fn errors_match_the_kernel() {
    python(
        r#"
new = lambda: socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
fails(errno.EADDRNOTAVAIL, new().bind, ("127.0.0.77", 0))
fails(errno.EINVAL, new().bind, ("0.0.0.0", 0))
fails(errno.EINVAL, new().bind, ("224.0.0.1", 0))
fails(errno.EINVAL, new().bind, (A, 1))
a = sock(A, 3000)
fails(errno.EADDRINUSE, new().bind, (A, 3000))
fails(errno.EINVAL, a.bind, (A, 3001))
fails(errno.ENOTCONN, new().sendto, b"x", (B, 4000))
fails(errno.EINVAL, a.sendto, b"x", ("0.0.0.0", 4000))
fails(errno.EMSGSIZE, a.sendto, bytes(200000), (B, 4000))
fails(errno.EOPNOTSUPP, a.sendto, b"x", socket.MSG_OOB, (B, 4000))
fails(errno.EOPNOTSUPP, a.listen, 1)
fails(errno.EOPNOTSUPP, a.shutdown, socket.SHUT_RDWR)
fails(errno.EOPNOTSUPP, a.sendmsg, [b"x"], [(SOL_RDS, 3, bytes(32))], 0, (B, 4000))
fails(errno.EOPNOTSUPP, a.setsockopt, SOL_RDS, 2, bytes(32))
fails(errno.ENOPROTOOPT, a.setsockopt, SOL_RDS, 99, 1)
a.setblocking(False)
fails(errno.EAGAIN, a.recv, 10)
a.setblocking(True)
a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 20000))
fails(errno.ETIMEDOUT, a.recv, 10)
fails(errno.ESOCKTNOSUPPORT, socket.socket, AF_RDS, socket.SOCK_DGRAM)
fails(errno.ESOCKTNOSUPPORT, socket.socket, AF_RDS, socket.SOCK_SEQPACKET, 7)
assert a.getsockopt(SOL_RDS, 8) == 2
assert a.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == AF_RDS
assert a.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET
# The type of service is accepted and ignored.
fcntl.ioctl(a, 0x89e0, struct.pack("B", 3))
assert fcntl.ioctl(a, 0x89e1, b"\x07") == b"\x00"
# Other sockets are unaffected.
u, v = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
u.send(b"plain")
assert v.recv(10) == b"plain"
"#,
    );
}

#[test]
fn options_for_control_messages_lose_no_data() {
    python(
        r#"
a, b = sock(A), sock(B, 4000)
TIMESTAMP, TIMESTAMP_NEW, PASSCRED, PASSSEC = 29, 63, 16, 34
for option in (TIMESTAMP, PASSCRED, PASSSEC):
    assert b.getsockopt(socket.SOL_SOCKET, option) == 0
    b.setsockopt(socket.SOL_SOCKET, option, 1)
    assert b.getsockopt(socket.SOL_SOCKET, option) == 1
for size in (0, 100, 65536, 65537, 100000):
    data, before = os.urandom(size), time.time()
    a.sendto(data, (B, 4000))
    got, control, flags, source = b.recvmsg(200000, 200)
    assert got == data and flags & socket.MSG_CTRUNC == 0, (size, flags)
    assert [c[:2] for c in control] == [(socket.SOL_SOCKET, TIMESTAMP)], control
    seconds, micros = struct.unpack("qq", control[0][2])
    assert before - 1 <= seconds + micros / 1e6 <= time.time() + 1
# Without room for the control message, only that is lost.
a.sendto(bytes(100000), (B, 4000))
got, control, flags, source = b.recvmsg(200000)
assert len(got) == 100000 and control == [] and flags & socket.MSG_CTRUNC
b.setsockopt(SOL_RDS, TIMESTAMP_NEW, 1)
a.sendto(b"new", (B, 4000))
assert b.recvmsg(10, 200)[1][0][:2] == (socket.SOL_SOCKET, TIMESTAMP_NEW)
b.setsockopt(socket.SOL_SOCKET, TIMESTAMP, 0)
a.sendto(b"off", (B, 4000))
assert b.recvmsg(10, 200)[1] == []
"#,
    );
}

#[test]
fn a_congested_port_refuses_and_notifies() {
    python(
        r#"
a, b, c = sock(A), sock(B, 4000), sock(B, 4001)
a.setsockopt(SOL_RDS, 6, 1)
a.setblocking(False)
poll = select.poll()
poll.register(a, select.POLLOUT)
sent, refused = 0, 0
deadline = time.time() + 30
while True:
    assert time.time() < deadline
    try:
        a.sendto(struct.pack("I", sent) * 1000, (B, 4000))
        sent += 1
    except OSError as error:
        if error.errno == errno.ENOBUFS:
            break
        assert error.errno == errno.EAGAIN
        refused += 1
        # Never refused for lack of space while it is writable.
        poll.poll(10000)
# The messages to the congested port may fill the send buffer briefly.
a.settimeout(30)
a.sendto(b"other", (B, 4001))
a.setblocking(False)
assert c.recv(10) == b"other"
for number in range(sent):
    assert b.recv(5000) == struct.pack("I", number) * 1000
poll = select.poll()
poll.register(a, select.POLLIN)
assert poll.poll(30000)
data, control, flags, source = a.recvmsg(100, 1000)
assert data == b"" and control[0][:2] == (SOL_RDS, 5), control
assert struct.unpack("Q", control[0][2])[0] == 1 << (4000 % 64)
a.setblocking(True)
a.sendto(b"again", (B, 4000))
assert b.recv(10) == b"again"
"#,
    );
}

#[test]
fn the_end_of_congestion_wakes_polls_without_a_monitor() {
    python(
        r#"
a, b, c = sock(A), sock(B, 4000), sock(A, 5000)
b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 20000)
a.setblocking(False)
def congest():
    sent, deadline = 0, time.time() + 30
    while True:
        assert time.time() < deadline
        try:
            a.sendto(bytes(1000), (B, 4000))
            sent += 1
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return sent
            assert error.errno == errno.EAGAIN
            select.select([], [a], [], 10)
def drain(sent):
    for _ in range(sent):
        assert len(b.recv(2000)) == 1000
def polled():
    poll = select.poll()
    poll.register(a, select.POLLIN)
    return lambda wait: bool(poll.poll(wait * 1000))
def epolled():
    epoll = select.epoll()
    epoll.register(a, select.EPOLLIN | select.EPOLLET)
    return lambda wait: any(flags & select.EPOLLIN for _, flags in epoll.poll(wait))
selected = lambda: lambda wait: bool(select.select([a], [], [], wait)[0])
for kind in (polled, epolled, selected):
    sent = congest()
    is_woken = kind()
    assert not is_woken(0.1), "nothing has changed"
    drain(sent)
    assert is_woken(30)
    # As in the kernel, nothing can be received, and the port takes messages again.
    fails(errno.EAGAIN, a.recv, 10)
    assert not is_woken(0)
    a.sendto(b"again", (B, 4000))
    assert b.recv(10) == b"again"
# Messages behind an update are seen by a peek, and by a receive that waits.
for flags in (socket.MSG_PEEK, 0):
    sent = congest()
    drain(sent)
    assert selected()(30)
    c.sendto(b"behind", a.getsockname())
    a.settimeout(30)
    assert a.recv(10, flags) == b"behind"
    a.setblocking(False)
a.settimeout(30)
assert a.recv(10) == b"behind"
a.setblocking(False)
fails(errno.EAGAIN, a.recv, 10)
"#,
    );
}

#[test]
fn descriptors_are_duplicated_and_inherited() {
    python(
        r#"
a, b = sock(A), sock(B, 4000)
# dup, dup2, F_DUPFD
for fd in (os.dup(b.fileno()), os.dup2(b.fileno(), 77), fcntl.fcntl(b, fcntl.F_DUPFD, 80)):
    a.sendto(b"dup", (B, 4000))
    assert read(fd, 10) == b"dup"
    os.close(fd)
# A descriptor that was an RDS socket and was reused.
fd = b.fileno()
r, w = os.pipe()
copy = os.dup(fd)
os.dup2(r, fd)
os.write(w, b"pipe")
assert os.read(fd, 10) == b"pipe"
os.dup2(copy, fd)
os.close(copy)
# fork
child = os.fork()
if child == 0:
    got, source = b.recvfrom(100)
    b.sendto(got + b" of the child", source)
    os._exit(0)
a.sendto(b"answer", (B, 4000))
assert a.recv(100) == b"answer of the child"
assert os.waitpid(child, 0)[1] == 0
# exec: another program finds the inherited socket.
script = '''
import os, select, socket, sys
s = socket.socket(21, socket.SOCK_SEQPACKET, fileno=int(sys.argv[1]))
assert s.getsockname() == ("127.0.0.2", 4000), s.getsockname()
# It is nonblocking because of the timeout of the previous program.
select.select([s], [], [], 30)
got, source = s.recvfrom(100)
s.sendto(got + b" after exec", source)
'''
os.set_inheritable(b.fileno(), True)
run = subprocess.Popen([sys.executable, "-c", script, str(b.fileno())], close_fds=False)
a.sendto(b"still", (B, 4000))
assert a.recv(100) == b"still after exec"
assert run.wait() == 0
# The port is free when the last descriptor is closed.
b.close()
deadline = time.time() + 20
while True:
    try:
        again = sock(B, 4000)
        break
    except OSError as error:
        assert error.errno == errno.EADDRINUSE and time.time() < deadline
        time.sleep(0.01)
"#,
    );
}

#[test]
fn descriptors_are_polled() {
    python(
        r#"
a, b = sock(A), sock(B, 4000)
epoll = select.epoll()
epoll.register(b, select.EPOLLIN | select.EPOLLOUT)
assert epoll.poll(5) == [(b.fileno(), select.EPOLLOUT)]
assert select.select([b], [], [], 0)[0] == []
a.sendto(b"x", (B, 4000))
assert select.select([b], [], [], 20)[0] == [b]
assert epoll.poll(5) == [(b.fileno(), select.EPOLLIN | select.EPOLLOUT)]
b.recv(10)
assert select.select([b], [], [], 0)[0] == []
# Sent messages are counted until they have arrived.
deadline = time.time() + 20
while struct.unpack("i", fcntl.ioctl(a, 0x5411, b"\0" * 4))[0]:
    assert time.time() < deadline
# Cancels messages to an address without a node.
a.sendto(bytes(1000), ("127.0.0.99", 4000))
while struct.unpack("i", fcntl.ioctl(a, 0x5411, b"\0" * 4))[0] != 1000:
    assert time.time() < deadline
to = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 4000, bytes([127, 0, 0, 99]))
a.setsockopt(SOL_RDS, 1, to)
assert struct.unpack("i", fcntl.ioctl(a, 0x5411, b"\0" * 4))[0] == 0
"#,
    );
}

#[test]
fn info_options_match_the_kernel() {
    python(
        r#"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def info(s, option, room):
    buffer = ctypes.create_string_buffer(room)
    length = ctypes.c_uint32(room)
    result = libc.getsockopt(s.fileno(), SOL_RDS, option, buffer, ctypes.byref(length))
    return result, length.value, buffer.raw[:length.value], ctypes.get_errno()
a, b = sock(A, 3000), sock(B, 4000)
a.sendto(b"x", (B, 4000))
b.recv(10)
result, length, data, error = info(a, 10000, 0)
assert result == -1 and error == errno.ENOSPC and length % 40 == 0 and length > 400
result, length, data, error = info(a, 10000, length)
assert result == 40
counters = {data[at:at + 32].rstrip(b"\0"): data[at + 32:at + 40] for at in range(0, length, 40)}
assert struct.unpack("Q", counters[b"send_queued"])[0] == 1
result, length, data, error = info(a, 10001, 100)
assert (result, length) == (42, 42)
next_tx, next_rx, local, peer, name, flags, tos = struct.unpack("=QQ4s4s16sBB", data)
assert local == bytes([127, 0, 0, 1]) and peer == bytes([127, 0, 0, 2]) and flags & 4
assert name.rstrip(b"\0") == b"tcp"
result, length, data, error = info(a, 10006, 100)
assert (result, length) == (28, 28)
sndbuf, bound, connected = struct.unpack("=I4s4s", data[:12])
assert struct.unpack("!H", data[12:14])[0] == 3000
# An unbound socket shows all nodes of the host.
result, length, data, error = info(socket.socket(AF_RDS, socket.SOCK_SEQPACKET), 10006, 1000)
assert (result, length) == (28, 56)
"#,
    );
}

#[test]
fn a_long_message_needs_no_free_descriptor() {
    python(
        r#"
import resource
a, b = sock(A), sock(B, 4000)
data = os.urandom(100000)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
a.sendto(data, (B, 4000))
assert select.select([b], [], [], 30)[0]
# Without a timeout, for which Python would poll: that fails as well.
b.setblocking(True)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
assert b.recv(200000) == data
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
"#,
    );
}

#[test]
fn a_node_without_a_free_descriptor_delivers_long_messages() {
    if !requires(&["python3"]) {
        return;
    }
    let stand = Stand::new(2);
    let script = format!(
        r#"{HEAD}
import resource
a, b = sock(A), sock(B, 4000)
def limit(*limits):
    return resource.prlimit(int(sys.argv[1]), resource.RLIMIT_NOFILE, *limits)
limits = limit()
assert limits[0] == limits[1], limits
data = os.urandom(100000)
limit((0, limits[1]))
a.sendto(data, (B, 4000))
assert b.recv(200000) == data
limit(limits)
a.sendto(b"next", (B, 4000))
assert b.recv(100) == b"next"
"#
    );
    let pid = stand.pid(2).to_string();
    let _ = start(&stand, "python3", &["-c", &script, &pid]).wait(COPY_TIME_MAX).ok();
}

#[test]
fn invalid_arguments_are_refused_as_by_the_kernel() {
    python(
        r#"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
class Time(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]
def call(name, *args):
    result = getattr(libc, name)(*args)
    return result if result >= 0 else -ctypes.get_errno()
a, b = sock(A), sock(B, 4000)
a.connect((B, 4000))
fd = a.fileno()
# Null pointers.
for name, args in (("send", (None, 100, 0)), ("write", (None, 100)), ("recv", (None, 100, 0)),
                   ("read", (None, 1)), ("writev", (None, 2)), ("readv", (None, 2))):
    assert call(name, fd, *args) == -errno.EFAULT, name
assert call("send", fd, None, 0, 0) == 0 and b.recv(10) == b""
# Lengths of options.
room = ctypes.create_string_buffer(8192)
for name, length, expected in ((10000, -1, -errno.EINVAL), (5, -1, -errno.EINVAL),
                               (5, 3, -errno.EINVAL), (5, 4, 0), (10000, 8192, 40)):
    length = ctypes.c_int(length)
    assert call("getsockopt", fd, SOL_RDS, name, room, ctypes.byref(length)) == expected, name
assert call("getsockopt", fd, SOL_RDS, 10000, None, ctypes.byref(length)) == -errno.EFAULT
# As many parts as the system accepts, and one more.
parts = (Part * 1025)(*[Part(ctypes.addressof(room) + at, 1) for at in range(1025)])
assert call("writev", fd, parts, 1024) == 1024
select.select([b], [], [], 30)
assert call("readv", b.fileno(), parts, 1024) == 1024
assert call("writev", fd, parts, 1025) == call("readv", fd, parts, 1025) == -errno.EINVAL
# A time limit is checked after each message.
b.setblocking(True)
a.send(b"one")
messages = ctypes.create_string_buffer(64 * 4)
assert call("recvmmsg", b.fileno(), messages, 4, 0, ctypes.byref(Time(0, 1))) == 1
"#,
    );
}

/// Compiles a program in C and returns its path.
pub(crate) fn compile(stand: &Stand, source: &str) -> String {
    let program = stand.dir().join("program");
    let file = program.with_extension("c");
    std::fs::write(&file, source).expect("a source file");
    let [program, file] = [program, file].map(|path| path.to_str().expect("a path").to_owned());
    let mut compile = std::process::Command::new("cc");
    compile.args(["-pthread", "-o", &program, &file]);
    let _ = Proc::start(compile).wait(LIMIT).ok();
    program
}

/// At the fork, other threads are in the middle of calls; in the child, these threads do not exist.
#[test]
fn children_of_threaded_programs_use_their_descriptors() {
    if !requires(&["cc"]) {
        return;
    }
    let stand = Stand::new(1);
    let source = r#"
        #include <pthread.h>
        #include <sys/socket.h>
        #include <sys/wait.h>
        #include <unistd.h>
        static void *use(void *none) {
            for (;;) {
                int fd = socket(21, SOCK_SEQPACKET, 0);
                close(dup(fd));
                close(fd);
            }
        }
        int main(void) {
            pthread_t thread;
            int fd = socket(21, SOCK_SEQPACKET, 0);
            for (int number = 0; number < 2; number++) pthread_create(&thread, 0, use, 0);
            for (int round = 0; round < 1000; round++) {
                int state = 0;
                pid_t child = fork();
                if (child == 0) {
                    alarm(30);
                    _exit(close(dup(fd)) || close(fd));
                }
                if (waitpid(child, &state, 0) != child || state) return 1;
            }
            return 0;
        }"#;
    let program = compile(&stand, source);
    let _ = start(&stand, &program, &[]).wait(COPY_TIME_MAX).ok();
}

/// The child shares its parent's memory, but not its descriptors.
#[test]
fn vfork_children_close_only_their_descriptors() {
    if !requires(&["cc", "python3"]) {
        return;
    }
    let stand = Stand::new(2);
    let source = r#"
        #include <arpa/inet.h>
        #include <sys/socket.h>
        #include <sys/wait.h>
        #include <unistd.h>
        static struct sockaddr_in at(const char *address, int port) {
            struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
            inet_pton(AF_INET, address, &to.sin_addr);
            return to;
        }
        int main(void) {
            struct sockaddr_in own = at("127.0.0.1", 0), to = at("127.0.0.2", 4000);
            int fd = socket(21, SOCK_SEQPACKET, 0);
            if (bind(fd, (void *)&own, sizeof own)) return 1;
            pid_t child = vfork();
            if (child == 0) {
                dup2(0, fd);
                close(fd);
                execlp("true", "true", (char *)0);
                _exit(1);
            }
            waitpid(child, 0, 0);
            return sendto(fd, "whole", 5, 0, (void *)&to, sizeof to) != 5 || close(fd);
        }"#;
    let program = compile(&stand, source);
    let script = format!(
        "{HEAD}\nb = sock(B, 4000)\na = sock(A)\na.sendto(b'up', (B, 4000))\n\
         assert b.recv(10) == b'up'\nsubprocess.run([{program:?}], check=True)\n\
         assert b.recv(10) == b'whole'"
    );
    let _ = start(&stand, "python3", &["-c", &script]).wait(COPY_TIME_MAX).ok();
}

/// Without a node on the host, the library does nothing.
#[test]
fn calls_go_to_the_kernel_without_a_node() {
    if !requires(&["python3"]) {
        return;
    }
    let scratch = rtrs_tests::Scratch::new();
    let script = format!(
        "{HEAD}\ntry:\n    sock(A)\nexcept OSError as e:\n    \
         assert e.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL), e"
    );
    let mut command = std::process::Command::new("python3");
    command.args(["-c", &script]).env("LD_PRELOAD", library()).env("RDS_DIR", scratch.dir());
    let _ = Proc::start(command).wait(LIMIT).ok();
}

#[test]
fn qperf_runs_over_the_preload_library() {
    if !requires(&["qperf"]) {
        return;
    }
    let stand = Stand::new(2);
    let port = rtrs_tests::free_port().to_string();
    let server = start(&stand, "qperf", &["-lp", &port]);
    for test in ["rds_lat", "rds_bw"] {
        let measured = wait_for("qperf", LIMIT, || {
            // qperf binds its RDS sockets to the addresses of its TCP connection.
            let args = ["-lp", &port, "-t", "1", "127.0.0.1", test];
            let finished = start(&stand, "qperf", &args).wait(LIMIT);
            let is_good = finished.stdout.contains(" = ");
            if !is_good {
                println!("{finished:?}; its server: {}", server.output());
            }
            is_good.then_some(finished)
        });
        println!("{}", measured.stdout);
        assert!(measured.stderr.is_empty(), "{measured:?}");
    }
    drop(server);
}
