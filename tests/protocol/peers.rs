//! Tests of violations by RTRS peers on the wire: raw bytes and hand-driven clients against a real
//! server, one test for each family of violations. In each test, an innocent session continues
//! undisturbed; every violation is answered with its errno or ends only that path; afterwards the
//! server is still running, with its descriptors and memory unchanged.
//!
//! Runs over TCP loopback, or over an RDMA device if `RTRS_TEST_RDMA` names one: the lab scenarios
//! `interop-ks-hostile-*` run it there, except for tests about TCP (`start.rs` in part,
//! `stream.rs`).

mod discover;
mod handshake;
mod keys;
mod proofs;
mod request;
mod start;
mod stream;

use std::net::SocketAddr;
use std::time::Duration;

use rtrs_core::fabric::CloseReason;
use rtrs_core::wire::{AccessMode, IoHeader, Rw, errno};
use rtrs_tests::{
    ClientBuilder, Innocent, Peer, PeerOptions, Scratch, Server, Stand, Transport, resident_memory,
    skip, wait_for,
};

const MIB: u64 = 1 << 20;
/// Queue depth that is not a power of two: the immediate can encode permits 24 to 31, which do not
/// exist.
const DEPTH: u16 = 24;
const CHUNK: usize = 64 << 10;
/// Handshake timeout of these servers over TCP, for start-up steps and handshakes.
const HANDSHAKE: Duration = Duration::from_secs(180);
/// Handshake timeout over TCP in tests that wait for it.
const SHORT: Duration = Duration::from_secs(12);
/// Handshake timeout in an emulated machine with a software RDMA device.
const HANDSHAKE_RDMA: Duration = Duration::from_secs(15);
/// Time within which a violation must close the connection; any timeout comes much later.
const AT_ONCE: Duration = Duration::from_secs(60);
/// [`AT_ONCE`] over RDMA, where a test of proofs waits for the handshake timeout.
const AT_ONCE_RDMA: Duration = Duration::from_secs(15);
/// Time within which a path must end, for any reason.
const PATIENCE: Duration = Duration::from_secs(60);

const RESET: i16 = -(errno::ECONNRESET.cast_signed());

/// A server with an innocent session on its export `vol0`, and exports for other sessions.
struct Scene {
    // Declared first, so that it is dropped and ends before its session does.
    innocent: Innocent,
    stand: Stand,
    server: SocketAddr,
    descriptors: usize,
    memory: u64,
    last_session: u8,
}

impl Scene {
    fn new() -> Self {
        Self::with(&[])
    }

    fn with(args: &[&str]) -> Self {
        Self::with_handshakes(handshake(), args)
    }

    /// Starts a scene with a different handshake timeout.
    fn with_handshakes(within: Duration, args: &[&str]) -> Self {
        let server = Server::builder()
            .export("vol0=mem:16M")
            .export("vol1=mem:1M")
            .export("vol2=mem:1M,block-size=4096")
            .export("ro=mem:1M,ro")
            .export("slow=mem:1M,delay=3s")
            .args(&["--queue-depth", "24", "--chunk-size", "64k"])
            .args(&["--handshake-timeout", &format!("{}ms", within.as_millis())])
            .args(&["--shards", "2"])
            // Silence does not end a path here, so that an ignored violation is noticed.
            .args(&["--heartbeat", "1m"])
            .args(args);
        let stand = Stand::start(Scratch::new(), server, |client: ClientBuilder| {
            client.args(&["--heartbeat", "1m"])
        });
        let innocent = Innocent::start(stand.client.front(), "vol0");
        let server: SocketAddr = stand.server.address().parse().expect("an address");
        let pid = stand.server.pid();
        let (descriptors, memory) = (descriptors(pid), resident_memory(pid));
        Self { innocent, stand, server, descriptors, memory, last_session: 0 }
    }

    /// Returns the options for a path in a new session.
    fn options(&mut self) -> PeerOptions {
        self.last_session += 1;
        PeerOptions::new(self.last_session, self.last_session)
    }

    /// Returns a connected path in a new session.
    fn peer(&mut self) -> Peer {
        let options = self.options();
        Peer::up(self.server, options, &format!("peer{}", options.session))
    }

    /// Returns a path like [`Self::peer`], with `vol1` open for writing as device 0.
    fn writer(&mut self) -> Peer {
        let mut peer = self.peer();
        // The previous path may have only just ended, taking its session with it.
        let opened = wait_for("the export to be free", PATIENCE, || {
            match peer.open("vol1", AccessMode::ReadWrite) {
                Err(errno::EPERM) => None,
                other => Some(other),
            }
        });
        assert_eq!(opened.expect("open vol1").device_id, 0);
        peer
    }

    /// Runs a violation that ends its path.
    fn fatal(&mut self, what: &str, violation: impl FnOnce(&mut Peer)) -> Vec<CloseReason> {
        let mut peer = self.writer();
        violation(&mut peer);
        peer.ended(what, at_once())
    }

    /// Checks that the innocent session was not disturbed and that the server uses as many
    /// resources as before, then ends both.
    fn end(mut self) {
        self.stand.server.check_alive();
        let pid = self.stand.server.pid();
        wait_for("the server's descriptors to come back", PATIENCE, || {
            (descriptors(pid) <= self.descriptors).then_some(())
        });
        let grown = resident_memory(pid).saturating_sub(self.memory);
        assert!(grown < 32 * MIB, "the server kept {grown} bytes");
        self.innocent.check();
        let stats = self.stand.client.command(&["stats", "vol0", "-o", "json"]).ok().json();
        let path = &stats["paths"][0];
        assert_eq!((&path["errors"], &path["reconnects"]), (&0.into(), &0.into()), "{stats}");
        self.stand.finish();
    }
}

fn is_tcp() -> bool {
    Transport::of_environment().is_tcp()
}

/// Returns the handshake timeout.
fn handshake() -> Duration {
    if is_tcp() { HANDSHAKE } else { HANDSHAKE_RDMA }
}

/// Returns the time within which a violation must end its path.
fn at_once() -> Duration {
    if is_tcp() { AT_ONCE } else { AT_ONCE_RDMA }
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a live process").count()
}

fn io(rw: Rw, sector: u64, bi_size: u32) -> IoHeader {
    IoHeader { rw, sector, bi_size, ..IoHeader::default() }
}

fn info_req(name: &[u8]) -> [u8; 272] {
    let mut bytes = [0; 272];
    bytes[2..2 + name.len()].copy_from_slice(name);
    bytes
}
