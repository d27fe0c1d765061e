//! RTRS client that tests drive over a real transport: it sends exactly the bytes that it is given.
//!
//! [`Peer`] is one path of a session on its own fabric, selected by [`Transport`] and driven by the
//! test's thread: a [`PlayedClient`] that can wait. [`RawMpa`](crate::RawMpa) is for malformed
//! frames. Every wait has a time limit and panics with a description of the missing message.

use std::net::{IpAddr, SocketAddr};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::time::{Duration as StdDuration, Instant as Deadline};

use rtrs_core::fabric::{CloseReason, FabricEvent, PdUse};
use rtrs_core::ids::QpNum;
use rtrs_core::rt::{Clock, Ring};
use rtrs_core::tests::PlayedClient;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Imm, Name, Open, OpenFlags, OpenRsp};

pub use rtrs_core::tests::{Answer, Data, PathOptions as PeerOptions, read_message};

use crate::transport::Transport;

/// Maximum wait for each of the server's answers.
const ANSWER_TIME_MAX: StdDuration = StdDuration::from_secs(60);

/// The client's end of a path.
#[derive(Debug)]
pub struct Peer {
    client: PlayedClient,
    server: SocketAddr,
    // Dropped after the fabric: running operations hold their memory until the ring ends.
    ring: Rc<Ring>,
}

impl Deref for Peer {
    type Target = PlayedClient;

    fn deref(&self) -> &PlayedClient {
        &self.client
    }
}

impl DerefMut for Peer {
    fn deref_mut(&mut self) -> &mut PlayedClient {
        &mut self.client
    }
}

impl Peer {
    /// Creates a peer that has not connected yet.
    ///
    /// # Panics
    /// Panics if the system refuses a ring or memory.
    #[must_use]
    pub fn new(server: SocketAddr, options: PeerOptions) -> Self {
        let ring = Ring::new(64).expect("a ring");
        let fabric = Transport::of_environment().fabric(&ring);
        let pd = PdUse::Connect { local: Some(source(options)), remote: server };
        let client = PlayedClient::new(fabric, pd, options, || Clock.now());
        Self { client, server, ring }
    }

    /// Creates a connected path whose session introduces itself as `name`.
    ///
    /// # Panics
    /// Panics if the server refuses the path.
    #[must_use]
    pub fn up(server: SocketAddr, options: PeerOptions, name: &str) -> Self {
        let mut peer = Self::connected(server, options);
        peer.introduce(name);
        peer
    }

    /// Creates a path with all connections, before INFO_REQ.
    ///
    /// # Panics
    /// Panics if the server refuses a connection.
    #[must_use]
    pub fn connected(server: SocketAddr, options: PeerOptions) -> Self {
        let mut peer = Self::new(server, options);
        for cid in 0..options.cid_num {
            peer.connect(cid).unwrap_or_else(|errno| panic!("connection {cid} refused: {errno}"));
        }
        peer
    }

    /// Runs one turn: takes received messages and sends posted ones.
    fn turn(&mut self) {
        let now = Clock.now();
        self.fabric.poll(now);
        self.drain();
        self.fabric.flush(now);
        self.ring.turn_or_sleep(Some(Duration::from_millis(1))).expect("the ring turns");
    }

    /// Runs turns for this long, at least one, regardless of events.
    pub fn idle(&mut self, time: StdDuration) {
        let start = Deadline::now();
        loop {
            self.turn();
            if start.elapsed() >= time {
                return;
            }
        }
    }

    /// Runs turns until `check` returns a value, for at most `limit`.
    fn wait<T>(
        &mut self,
        limit: StdDuration,
        what: &str,
        mut check: impl FnMut(&mut PlayedClient) -> Option<T>,
    ) -> T {
        let start = Deadline::now();
        loop {
            if let Some(value) = check(&mut self.client) {
                return value;
            }
            let waited = start.elapsed();
            assert!(waited < limit, "no {what}; received: {:?}", self.events);
            self.turn();
        }
    }

    /// Connects connection `cid`.
    ///
    /// # Errors
    /// Returns the negative errno of the server's reject.
    pub fn connect(&mut self, cid: u16) -> Result<(), i16> {
        let request = self.options.request(cid).encode();
        self.connect_raw(&request)
    }

    /// Connects with any private data.
    ///
    /// # Errors
    /// Returns the negative errno of the server's reject.
    ///
    /// # Panics
    /// Panics if the server does not answer at all, or its answer is not 56 bytes long.
    pub fn connect_raw(&mut self, private_data: &[u8]) -> Result<(), i16> {
        let qp = self.client.ask(source(self.options), self.server, private_data);
        let padded = !Transport::of_environment().is_tcp();
        self.wait(ANSWER_TIME_MAX, "answer to CON_REQ", |client| client.asked(qp, padded))
    }

    /// Sends INFO_REQ and takes INFO_RSP, then posts receives on all connections.
    ///
    /// # Panics
    /// Panics if the server does not answer.
    pub fn introduce(&mut self, name: &str) {
        self.client.introduce(name);
        self.take_info_rsp();
    }

    /// Takes INFO_RSP.
    ///
    /// # Panics
    /// Panics if INFO_RSP is missing or malformed.
    pub fn take_info_rsp(&mut self) {
        self.wait(ANSWER_TIME_MAX, "INFO_RSP", |client| {
            client.take_info().or_else(|| {
                not_closed(client, "no INFO_RSP");
                None
            })
        });
    }

    /// Opens an export.
    ///
    /// # Errors
    /// Returns the errno of the answer.
    ///
    /// # Panics
    /// Panics if the answer is missing or malformed.
    pub fn open(&mut self, name: &str, access: AccessMode) -> Result<OpenRsp, u16> {
        let dev_name = Name::new(name.as_bytes()).expect("a name");
        let open = Open { access, flags: OpenFlags::default(), dev_name };
        self.open_raw(&open.encode())
    }

    /// Opens an export with any OPEN message.
    ///
    /// # Errors
    /// Returns the errno of the answer.
    ///
    /// # Panics
    /// Panics if the answer is missing or malformed.
    pub fn open_raw(&mut self, open: &[u8; Open::LEN]) -> Result<OpenRsp, u16> {
        self.send_open_raw(0, open, OpenRsp::LEN);
        match self.answer().errno {
            0 => Ok(OpenRsp::decode(&self.result(OpenRsp::LEN)).expect("an OPEN_RSP")),
            errno => Err(errno),
        }
    }

    /// Closes a device and returns the errno of the answer.
    pub fn close(&mut self, device_id: u32) -> u16 {
        self.send_close(0, device_id);
        self.answer().errno
    }

    /// Takes the next answer, answering heartbeats in the meantime.
    ///
    /// # Panics
    /// Panics if no answer arrives, or a connection ends first.
    pub fn answer(&mut self) -> Answer {
        self.wait(ANSWER_TIME_MAX, "answer", |client| {
            while let Some((conn, imm)) = client.take_immediate() {
                if matches!(imm, Imm::Heartbeat { .. }) {
                    client.send_imm(0, Imm::HeartbeatAck.encode());
                }
                if let Some(answer) = Answer::from_immediate(conn, imm) {
                    return Some(answer);
                }
            }
            not_closed(client, "not answered");
            None
        })
    }

    /// Waits until all the peer's connections are closed, for at most `limit` each; returns the
    /// reasons.
    ///
    /// # Panics
    /// Panics if a close takes too long.
    pub fn ended(&mut self, what: &str, limit: StdDuration) -> Vec<CloseReason> {
        let what = format!("end of the path after: {what}");
        let closed = |event: &FabricEvent| match event {
            FabricEvent::Closed { reason, .. } => Some(reason.clone()),
            _ => None,
        };
        (0..self.conns.len()).map(|_| self.wait(limit, &what, |c| c.take(closed))).collect()
    }

    /// Checks that the path works: SESS_INFO is answered on each connection.
    ///
    /// # Panics
    /// Panics if the path does not work.
    pub fn check_alive(&mut self, what: &str) {
        for conn in 0..self.conns.len() {
            self.send_sess_info((conn, 1), 2);
            let answer = self.answer();
            assert_eq!((answer.conn, answer.errno), (conn, 0), "SESS_INFO after: {what}");
        }
    }

    /// Removes closed connections from `left`.
    fn strike_closed(&self, left: &mut Vec<QpNum>) {
        for event in &self.events {
            if let FabricEvent::Closed { qp, .. } = event {
                left.retain(|open| open != qp);
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let mut left = std::mem::take(&mut self.conns);
        self.strike_closed(&mut left);
        for qp in &left {
            self.fabric.abort(Clock.now(), *qp);
        }
        for _ in 0..200 {
            self.events.clear();
            self.turn();
            self.strike_closed(&mut left);
            if left.is_empty() {
                break;
            }
        }
    }
}

/// Panics if a connection has ended, because no more messages would arrive over it.
fn not_closed(client: &PlayedClient, what: &str) {
    for event in &client.events {
        if let FabricEvent::Closed { reason, .. } = event {
            panic!("{what}, but closed: {reason}");
        }
    }
}

fn source(options: PeerOptions) -> IpAddr {
    Transport::of_environment().source(options.local)
}
