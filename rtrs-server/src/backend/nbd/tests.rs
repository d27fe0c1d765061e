//! Tests of the backend with third-party servers: nbdkit, qemu-nbd and nbd-server. They cover the
//! backend contract, server restarts, and refusals.

mod model;
mod store;

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rtrs_core::block::{BlockSource, IoFlags, IoOp};
use rtrs_core::rt::Clock;
use rtrs_core::skip::skip;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;

use crate::backend::conformance::{Keeps, Rig, run as conforms};
use crate::backend::open_target;

const MIB: u64 = 1 << 20;
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Returns whether a program is installed; if not, reports that the test is skipped.
fn requires(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has = std::env::split_paths(&path).any(|dir| dir.join(tool).is_file());
    if !has {
        skip(&format!("no {tool}"));
    }
    has
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Clock.now() + WAIT_MAX;
    while !done() {
        assert!(Clock.now() < end, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns a TCP port that was free a moment ago. It is below the port range of outgoing
/// connections, one of which could otherwise take it before the server does.
fn free_port() -> u16 {
    let random = || RandomState::new().build_hasher().finish() % 22_000;
    let drawn = || 10_000 + u16::try_from(random()).unwrap();
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(drawn).take(1000).find(is_free).unwrap()
}

/// A test's directory, removed when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("rtrs-nbd-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn text(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// Creates a file of this size.
    fn disk(&self, name: &str, len: u64) -> String {
        let path = self.text(name);
        File::options()
            .create(true)
            .write(true)
            .truncate(false)
            .open(&path)
            .unwrap()
            .set_len(len)
            .unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A third-party server, stopped when dropped.
struct Upstream {
    child: Child,
    /// File with the process ID of a server that detaches from its parent.
    pid_file: Option<String>,
    url: String,
}

impl Upstream {
    fn start(mut command: Command, url: String, mut ready: impl FnMut() -> bool) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        wait_for("a server", || {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{command:?} has ended: {ended:?}");
            ready()
        });
        Self { child, pid_file: None, url }
    }

    /// Starts a server on a unix socket in this directory.
    fn unix(scratch: &Scratch, name: &str, make: impl FnOnce(&str) -> Command) -> Self {
        let socket = scratch.text("socket");
        let _ = fs::remove_file(&socket);
        let url = format!("nbd+unix:///{name}?socket={socket}");
        Self::start(make(&socket), url, || UnixStream::connect(&socket).is_ok())
    }

    fn nbdkit(scratch: &Scratch, args: &[&str]) -> Self {
        Self::unix(scratch, "", |socket| {
            let mut command = Command::new("nbdkit");
            command.args(["-f", "--exit-with-parent", "-U", socket]).args(args);
            command
        })
    }

    fn qemu(scratch: &Scratch, args: &[&str]) -> Self {
        Self::unix(scratch, "disk", |socket| {
            let mut command = Command::new("qemu-nbd");
            command.args(["-t", "-e", "16", "-x", "disk", "-k", socket]).args(args);
            command
        })
    }

    /// Starts nbd-server on a TCP port.
    fn nbd_server(scratch: &Scratch, options: &str) -> Self {
        let port = free_port();
        let disk = scratch.disk("disk", 64 * MIB);
        let general = format!("[generic]\nlistenaddr = 127.0.0.1\nport = {port}\n");
        let config = format!("{general}[disk]\nexportname = {disk}\n{options}");
        fs::write(scratch.text("config"), config).unwrap();
        let pid_file = scratch.text("pid");
        let mut command = Command::new("nbd-server");
        command.args(["-C", &scratch.text("config"), "-p", &pid_file]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().unwrap();
        let url = format!("nbd://127.0.0.1:{port}/disk");
        let upstream = Self { child, pid_file: Some(pid_file), url };
        wait_for("a server", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        upstream
    }

    fn open(&self, options: &str) -> Result<Arc<dyn BlockSource>, String> {
        // Long, because the machine may be busy.
        let spec = format!("x={},connect-timeout=2m{options}", self.url).parse().unwrap();
        open_target(&spec).map_err(|error| error.to_string())
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let pid = self.pid_file.as_ref().and_then(|path| fs::read_to_string(path).ok());
        if let Some(pid) = pid {
            let _ = Command::new("kill").arg(pid.trim()).status();
        }
    }
}

#[test]
fn the_backend_conforms_with_nbdkit() {
    if !requires("nbdkit") {
        return;
    }
    let scratch = Scratch::new("nbdkit");
    for args in [
        &["memory", "64M"][..],
        // One connection for all shards.
        &["--filter=multi-conn", "memory", "64M", "multi-conn-mode=disable"],
        // Without zeroes and FUA.
        &["--filter=nozero", "--filter=fua", "memory", "8M"],
        &["--filter=blocksize-policy", "memory", "8M", "blocksize-minimum=4096"],
        // The plugin determines the size of structured replies; this case covers simple replies.
        &["--no-sr", "memory", "8M"],
    ] {
        let upstream = Upstream::nbdkit(&scratch, args);
        let source = upstream.open("").unwrap();
        assert_eq!(source.geometry().fua, !args.contains(&"--filter=fua"), "{args:?}");
        conforms(&source, Keeps::Data);
    }
    let upstream = Upstream::nbdkit(&scratch, &["-r", "memory", "8M"]);
    let error = upstream.open("").map(drop).unwrap_err();
    assert!(error.contains("is read-only; export it with `ro`"), "{error}");
    conforms(&upstream.open(",ro").unwrap(), Keeps::Data);
    conforms(&upstream.open(",ro,block-size=4096").unwrap(), Keeps::Data);
}

#[test]
fn the_backend_conforms_with_qemu_nbd() {
    if !requires("qemu-nbd") {
        return;
    }
    let scratch = Scratch::new("qemu");
    let (raw, qcow) = (scratch.disk("disk.raw", 64 * MIB), scratch.text("disk.qcow2"));
    let mut create = Command::new("qemu-img");
    create.args(["create", "-f", "qcow2", &qcow, "64M"]);
    assert!(create.output().unwrap().status.success());
    for args in [["-f", "raw", &raw], ["-f", "qcow2", &qcow]] {
        let upstream = Upstream::qemu(&scratch, &args);
        conforms(&upstream.open("").unwrap(), Keeps::Data);
    }
    let upstream = Upstream::qemu(&scratch, &["-f", "raw", &raw]);
    let wrong = format!("x={}", upstream.url.replace("disk?", "none?"));
    let error = open_target(&wrong.parse().unwrap()).map(drop).unwrap_err().to_string();
    assert!(
        error.contains("the server has no such export") && error.contains("nbdinfo"),
        "{error}"
    );
}

#[test]
fn the_backend_conforms_with_nbd_server() {
    if !requires("nbd-server") {
        return;
    }
    let scratch = Scratch::new("server");
    for options in ["flush = true\nfua = true\ntrim = true\n", ""] {
        let upstream = Upstream::nbd_server(&scratch, options);
        conforms(&upstream.open("").unwrap(), Keeps::Data);
    }
}

#[test]
fn a_missing_server_is_refused_with_a_reason() {
    let refuse_within = |limit: &str, target: &str| {
        let spec = format!("x={target},connect-timeout={limit}").parse().unwrap();
        open_target(&spec).map(drop).unwrap_err().to_string()
    };
    let refuse = |target: &str| refuse_within("2m", target);
    let error = refuse(&format!("nbd://127.0.0.1:{}/disk", free_port()));
    assert!(error.contains("cannot be reached at 127.0.0.1:"), "{error}");
    assert!(error.contains("check that the server runs"), "{error}");
    let error = refuse("nbd+unix:///disk?socket=/nonexistent/sock");
    assert!(error.contains("cannot be reached at /nonexistent/sock: No such file"), "{error}");
    // A server that accepts connections but never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = refuse_within("1s", &format!("nbd://{}/disk", silent.local_addr().unwrap()));
    assert!(error.contains("cannot be reached") || error.contains("within 1 s"), "{error}");
    // A server that speaks a different protocol.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let served = std::thread::spawn(move || {
        let (mut client, _) = other.accept().unwrap();
        client.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n").unwrap();
    });
    let error = refuse(&format!("nbd://{address}/disk"));
    assert!(error.contains("the server does not speak NBD"), "{error}");
    served.join().unwrap();
}

#[test]
fn a_restarted_server_is_reconnected_and_a_loss_reported_once() {
    if !requires("nbdkit") {
        return;
    }
    for conn in ["auto", "disable"] {
        let scratch = Scratch::new("restarts");
        let disk = scratch.disk("disk", 8 * MIB);
        let mode = format!("multi-conn-mode={conn}");
        let args = ["--filter=multi-conn", "file", &disk, &mode];
        let upstream = Upstream::nbdkit(&scratch, &args);
        let source = upstream.open("").unwrap();
        let mut rig = Rig::new(&*source, 0);
        let flush = |rig: &mut Rig| {
            let io = rig.io(IoOp::Flush, 0, 0);
            rig.run(io)
        };
        assert_eq!(rig.write(0, &[1; 4096]), IoStatus::Ok);
        assert_eq!(flush(&mut rig), IoStatus::Ok);

        // All data is flushed: nothing is lost, and requests wait in the meantime.
        drop(upstream);
        let io = rig.transfer(IoOp::Read, 0, 8192, 4096);
        rig.device.submit(io).unwrap();
        (0..20).for_each(|_| rig.turn());
        assert_eq!(rig.device.inflight(), 1, "it waits");
        wait_for("the outage", || source.outage().is_some());
        let upstream = Upstream::nbdkit(&scratch, &args);
        assert!(matches!(rig.drain()[..], [(_, IoStatus::Ok)]));
        assert_eq!(source.outage(), None);
        assert_eq!(rig.region.slice(8192, 4096).unwrap().to_vec(), vec![1; 4096]);
        assert_eq!(flush(&mut rig), IoStatus::Ok);

        // An unflushed write may be lost with the server.
        assert_eq!(rig.write(4096, &[2; 4096]), IoStatus::Ok);
        drop(upstream);
        let upstream = Upstream::nbdkit(&scratch, &args);
        assert_eq!(rig.read(0, 4096), vec![1; 4096]);
        assert_eq!(flush(&mut rig), IoStatus::Io, "the loss");
        assert_eq!(flush(&mut rig), IoStatus::Ok, "once");
        // A write with FUA cannot be lost.
        assert_eq!(rig.write_at(4096, &[3; 4096], 0, true), IoStatus::Ok);
        drop(upstream);
        let upstream = Upstream::nbdkit(&scratch, &args);
        assert_eq!(rig.read(4096, 4096), vec![3; 4096]);
        assert_eq!(flush(&mut rig), IoStatus::Ok);

        // A server with a different disk is rejected.
        drop(upstream);
        scratch.disk("disk", 4 * MIB);
        let upstream = Upstream::nbdkit(&scratch, &args);
        let io = rig.transfer(IoOp::Read, 0, 0, 4096);
        rig.device.submit(io).unwrap();
        (0..100).for_each(|_| rig.turn());
        assert_eq!(rig.device.inflight(), 1, "a shorter disk is refused");
        drop(upstream);
        scratch.disk("disk", 16 * MIB);
        let _upstream = Upstream::nbdkit(&scratch, &args);
        assert!(matches!(rig.drain()[..], [(_, IoStatus::Ok)]));
        wait_for("the new size", || source.geometry().size == 16 * MIB);
        assert_eq!(source.settle().map_err(|error| error.to_string()), Ok(()));
    }
}

#[test]
fn a_restarted_server_with_a_new_cache_is_refused() {
    if !requires("nbdkit") {
        return;
    }
    let scratch = Scratch::new("cache");
    let disk = scratch.disk("disk", 8 * MIB);
    let size = format!("get_size=echo {}", 8 * MIB);
    let read = "pread=dd if=/dev/zero count=$3 iflag=count_bytes";
    // This server offers no flush.
    let plain = ["eval", &size, read, "pwrite=cat >/dev/null"];
    let upstream = Upstream::nbdkit(&scratch, &plain);
    let source = upstream.open("").unwrap();
    assert!(!source.geometry().write_cache);
    let mut rig = Rig::new(&*source, 0);
    assert_eq!(rig.write(0, &[1; 4096]), IoStatus::Ok);
    drop(upstream);
    let upstream = Upstream::nbdkit(&scratch, &["file", &disk]);
    let io = rig.transfer(IoOp::Read, 0, 0, 4096);
    rig.device.submit(io).unwrap();
    (0..100).for_each(|_| rig.turn());
    assert_eq!(rig.device.inflight(), 1, "no flush would reach its cache");
    drop(upstream);
    let _upstream = Upstream::nbdkit(&scratch, &plain);
    assert!(matches!(rig.drain()[..], [(_, IoStatus::Ok)]));
}

#[test]
fn the_loss_of_any_unflushed_change_is_reported() {
    if !requires("nbdkit") {
        return;
    }
    let scratch = Scratch::new("changes");
    let disk = scratch.disk("disk", 8 * MIB);
    for op in [IoOp::Write, IoOp::WriteZeroes, IoOp::Discard] {
        for fua in [false, true] {
            let upstream = Upstream::nbdkit(&scratch, &["file", &disk]);
            let source = upstream.open("").unwrap();
            let mut rig = Rig::new(&*source, 0);
            let changed = match op {
                IoOp::Write => rig.write_at(0, &[1; 4096], 0, fua),
                _ => rig.clear(op, 0, 4096, IoFlags { fua, ..IoFlags::default() }),
            };
            assert_eq!(changed, IoStatus::Ok, "{op:?}, FUA {fua}");
            drop(upstream);
            let _upstream = Upstream::nbdkit(&scratch, &["file", &disk]);
            rig.read(0, 4096);
            let flush = rig.io(IoOp::Flush, 0, 0);
            let expected = if fua { IoStatus::Ok } else { IoStatus::Io };
            assert_eq!(rig.run(flush), expected, "{op:?}, FUA {fua}");
        }
    }
}

#[test]
fn errors_of_the_server_keep_their_meaning() {
    if !requires("nbdkit") {
        return;
    }
    let scratch = Scratch::new("back");
    for (error, status) in [("ENOSPC", IoStatus::NoSpace), ("EIO", IoStatus::Io)] {
        let kind = format!("error={error}");
        let args = ["--filter=error", "memory", "8M", &kind, "error-pwrite-rate=1"];
        let upstream = Upstream::nbdkit(&scratch, &args);
        let source = upstream.open("").unwrap();
        let mut rig = Rig::new(&*source, 0);
        assert_eq!(rig.write(0, &[1; 512]), status);
        assert_eq!(rig.read(0, 512), vec![0; 512]);
    }
}
