//! Tests of processes that hold a socket with `librds_preload.so`: without their former privileges,
//! forked, started by another program, or given a descriptor.

use crate::preload::python;

/// Changes a socket in every way, and checks that each change has worked.
const CHANGES: &str = r#"
RUN = os.environ["RDS_DIR"]
def hide():
    # No process can connect to the nodes anymore.
    for name in os.listdir(RUN):
        if name.endswith(".sock"):
            os.rename(os.path.join(RUN, name), os.path.join(RUN, name + ".hidden"))
def outq(s):
    return struct.unpack("i", fcntl.ioctl(s, 0x5411, b"\0" * 4))[0]
def change(s, size):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * size
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * size
    s.connect((B, 4000))
    assert s.getpeername() == (B, 4000)
    s.setsockopt(SOL_RDS, 6, 1)
    s.sendto(bytes(700), ("127.0.0.99", 4000))
    to = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 4000, bytes([127, 0, 0, 99]))
    s.setsockopt(SOL_RDS, 1, to)
    assert outq(s) == 0
    try:
        s.getsockopt(SOL_RDS, 10000, 1)
    except OSError as error:
        assert error.errno == errno.ENOSPC
"#;

#[test]
fn sockets_can_be_changed_without_access_to_the_node() {
    python(&format!(
        r#"{CHANGES}
a, b, c = sock(A), sock(B, 4000), sock(A)
hide()
change(a, 30000)
# A child, at the same time as its parent.
child = os.fork()
for size in range(31000, 31050):
    change(a if child else c, size)
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
# Without the connection for requests, which the program closes by accident.
keep = {{s.fileno() for s in (a, b, c)}}
for fd in map(int, os.listdir("/proc/self/fd")):
    if fd > 2 and fd not in keep:
        try:
            os.close(fd)
        except OSError:
            pass
change(a, 32000)
r, w = os.pipe()
change(c, 33000)
a.send(b"whole")
assert b.recv(10) == b"whole"
"#
    ));
}

#[test]
fn sockets_can_be_changed_after_privileges_are_dropped() {
    python(&format!(
        r#"{CHANGES}
a, b = sock(A), sock(B, 4000)
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
else:
    hide()
change(a, 30000)
change(b, 31000)
a.send(b"whole")
assert b.recv(10) == b"whole"
"#
    ));
}

#[test]
fn a_program_changes_the_sockets_that_it_inherits_without_access_to_the_node() {
    python(&format!(
        r#"{CHANGES}
a, b = sock(A), sock(B, 4000)
hide()
script = sys.orig_argv[-1].split("a, b =")[0] + '''
s = socket.socket(AF_RDS, socket.SOCK_SEQPACKET, fileno=int(os.environ["FD"]))
change(s, 30000)
s.sendto(b"of the program", (B, 4000))
'''
os.set_inheritable(a.fileno(), True)
environment = dict(os.environ, FD=str(a.fileno()))
subprocess.run([sys.executable, "-c", script], close_fds=False, env=environment, check=True)
assert b.recv(100) == b"of the program"
"#
    ));
}

#[test]
fn sockets_are_passed_over_unix_sockets() {
    python(
        r#"
b = sock(B, 4000)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
if os.fork() == 0:
    # A bound and an unbound socket, among other descriptors.
    bound, plain = sock(A, 5000), socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
    socket.send_fds(theirs, [b"x"], [0, bound.fileno(), plain.fileno(), 1])
    theirs.recv(1)
    os._exit(0)
data, fds, flags, source = socket.recv_fds(ours, 1, 4)
assert data == b"x" and len(fds) == 4
ours.send(b"x")
assert os.wait()[1] == 0
bound = socket.socket(AF_RDS, socket.SOCK_SEQPACKET, 0, fds[1])
plain = socket.socket(AF_RDS, socket.SOCK_SEQPACKET, 0, fds[2])
assert bound.getsockname() == (A, 5000)
plain.bind((A, 5001))
for s in (bound, plain):
    s.sendto(b"passed", (B, 4000))
    b.settimeout(30)
    got, source = b.recvfrom(10)
    assert got == b"passed" and source == s.getsockname()
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == AF_RDS
assert os.fstat(fds[0]) and os.fstat(fds[3])
"#,
    );
}
