//! A client controlled by the test, in a fixture's virtual time: answers arrive when the fixture
//! settles.

use std::ops::{Deref, DerefMut};

use rtrs_core::fabric::{FabricEvent, PdUse};
use rtrs_core::ids::QpNum;
use rtrs_core::tests::PlayedClient;
use rtrs_core::wire::{AccessMode, Imm, OpenRsp};

pub(super) use rtrs_core::tests::{
    Answer as Reply, Data, PathOptions as PeerOptions, io_header as io, read_message,
};

use super::fixture::{Fixture, client_ip};

/// The client's side of one path.
#[derive(Debug)]
pub(super) struct Peer(PlayedClient);

impl Deref for Peer {
    type Target = PlayedClient;

    fn deref(&self) -> &PlayedClient {
        &self.0
    }
}

impl DerefMut for Peer {
    fn deref_mut(&mut self) -> &mut PlayedClient {
        &mut self.0
    }
}

impl Peer {
    pub(super) fn new(fixture: &Fixture, options: PeerOptions) -> Self {
        let pd = PdUse::Connect { local: None, remote: fixture.address };
        let world = fixture.world.clone();
        let fabric = Box::new(fixture.client_fabric());
        Self(PlayedClient::new(fabric, pd, options, move || world.now()))
    }

    /// Connects all connections and introduces the session as `name`.
    pub(super) fn up(fixture: &mut Fixture, options: PeerOptions, name: &str) -> Self {
        let mut peer = Self::new(fixture, options);
        for cid in 0..options.cid_num {
            peer.connect(fixture, cid).unwrap();
        }
        peer.info(fixture, name);
        assert_eq!(peer.chunks.len(), usize::from(peer.queue_depth));
        peer
    }

    /// Connects like `up`, and opens `vol` for reading and writing as device 0.
    pub(super) fn open(fixture: &mut Fixture, options: PeerOptions) -> Self {
        let mut peer = Self::up(fixture, options, "sess");
        peer.send_open(0, "vol", AccessMode::ReadWrite);
        assert_eq!(peer.reply(fixture).errno, 0);
        peer
    }

    pub(super) fn connect(&mut self, fixture: &mut Fixture, cid: u16) -> Result<(), i16> {
        let request = self.options.request(cid).encode();
        self.connect_raw(fixture, &request)
    }

    /// Connects with arbitrary private data. The error is the errno of the reject.
    pub(super) fn connect_raw(
        &mut self,
        fixture: &mut Fixture,
        private_data: &[u8],
    ) -> Result<(), i16> {
        let qp = self.ask(fixture, private_data);
        self.answer(fixture, qp).expect("no answer")
    }

    /// Requests a connection.
    pub(super) fn ask(&mut self, fixture: &Fixture, private_data: &[u8]) -> QpNum {
        let local = client_ip(self.options.local);
        self.0.ask(local, fixture.address, private_data)
    }

    /// Result of a connection request, if it was answered; the error is the errno of the reject.
    pub(super) fn answer(&mut self, fixture: &mut Fixture, qp: QpNum) -> Option<Result<(), i16>> {
        self.settle(fixture);
        self.asked(qp, false)
    }

    /// Sends INFO_REQ and processes INFO_RSP; receives are then posted on all connections.
    pub(super) fn info(&mut self, fixture: &mut Fixture, name: &str) {
        self.introduce(name);
        self.settle(fixture);
        self.take_info().expect("no INFO_RSP");
    }

    /// Sends arbitrary bytes as the first message of connection 0.
    pub(super) fn send_info(&mut self, fixture: &mut Fixture, bytes: &[u8]) {
        self.0.send_info(bytes);
        self.settle(fixture);
    }

    /// Opens a device. Returns the response or the errno.
    pub(super) fn open_device(
        &mut self,
        fixture: &mut Fixture,
        name: &str,
        access: AccessMode,
    ) -> Result<OpenRsp, u16> {
        self.clear_result();
        self.send_open(15, name, access);
        match self.reply(fixture).errno {
            0 => Ok(OpenRsp::decode(&self.result(OpenRsp::LEN)).unwrap()),
            errno => Err(errno),
        }
    }

    fn settle(&mut self, fixture: &mut Fixture) {
        fixture.settle();
        self.drain();
    }

    /// Returns all received immediates in order, and stores new keys as a client does.
    pub(super) fn immediates(&mut self, fixture: &mut Fixture) -> Vec<(usize, Imm)> {
        self.settle(fixture);
        std::iter::from_fn(|| self.take_immediate()).collect()
    }

    pub(super) fn replies(&mut self, fixture: &mut Fixture) -> Vec<Reply> {
        let immediates = self.immediates(fixture).into_iter();
        immediates.filter_map(|(conn, imm)| Reply::from_immediate(conn, imm)).collect()
    }

    /// Returns the answer, asserting that there is exactly one.
    pub(super) fn reply(&mut self, fixture: &mut Fixture) -> Reply {
        let replies = self.replies(fixture);
        assert_eq!(replies.len(), 1, "{replies:?}; events: {:?}", self.events);
        replies[0]
    }

    /// Number of connections that were closed.
    pub(super) fn closed(&mut self, fixture: &mut Fixture) -> usize {
        self.settle(fixture);
        let closed = |event: &&FabricEvent| matches!(event, FabricEvent::Closed { .. });
        self.events.iter().filter(closed).count()
    }

    /// Closes all connections in order.
    pub(super) fn leave(&mut self, fixture: &mut Fixture) {
        for qp in self.conns.clone() {
            self.fabric.disconnect(fixture.now(), qp);
        }
        self.fabric.flush(fixture.now());
        fixture.settle();
    }
}
