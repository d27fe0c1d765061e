//! Tests of exports that other servers also serve: opens on a standby, requests for a move, and IO
//! after the export has moved.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io};
use rtrs_core::gateway::{Gateway, GatewayBusy, GatewayEvent, GatewayNotify, Standing};
use rtrs_core::ids::SessionId;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{AccessMode, ClientExtensions, Imm, Move, OpenRsp, OpenRspTail, Rw, errno};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, io as io_header};
use crate::backend::NullSource;
use crate::engine::message::{ControlMessage, Message};
use crate::export::{Export, ExportIndex};

const RW: AccessMode = AccessMode::ReadWrite;

/// An export that a test moves.
#[derive(Clone, Debug, Default)]
struct Moving {
    active: Arc<AtomicBool>,
    asked: Arc<Mutex<Vec<SessionId>>>,
    writers: Arc<Mutex<Vec<SessionId>>>,
    left: Arc<AtomicBool>,
    busy: Arc<AtomicBool>,
}

impl Gateway for Moving {
    fn standing(&self) -> Standing {
        Standing { active: self.active.load(Ordering::SeqCst), term: 5 }
    }
    fn take_over(&self, session: SessionId) -> Result<(), GatewayBusy> {
        self.asked.lock().push(session);
        if self.busy.load(Ordering::SeqCst) { Err(GatewayBusy) } else { Ok(()) }
    }
    fn opened_by(&self, session: SessionId) {
        self.writers.lock().push(session);
    }
    fn begin_release(&self) {
        self.left.store(true, Ordering::SeqCst);
    }
    fn release(&self, _within: Duration) -> io::Result<()> {
        unreachable!("only an operator's drain calls this")
    }
    fn on_change(&self, _notify: GatewayNotify) {}
}

impl BlockSource for Moving {
    fn geometry(&self) -> Geometry {
        Geometry::plain(1 << 20)
    }
    fn gateway(&self) -> Option<&dyn Gateway> {
        Some(self)
    }
    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        let device = NullSource::new(1 << 20, 512).open(core)?;
        Ok(Box::new(MovingDevice { device, active: Arc::clone(&self.active), moved: Vec::new() }))
    }
}

#[derive(Debug)]
struct MovingDevice {
    device: Box<dyn BlockDevice>,
    active: Arc<AtomicBool>,
    moved: Vec<u64>,
}

impl BlockDevice for MovingDevice {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.active.load(Ordering::SeqCst) {
            return self.device.submit(io);
        }
        self.moved.push(io.tag);
        Ok(())
    }
    fn poll(&mut self, now: Instant) -> bool {
        self.device.poll(now) || !self.moved.is_empty()
    }
    fn reap(&mut self) -> Option<Completion> {
        let moved = self.moved.pop().map(|tag| Completion::new(tag, IoStatus::Moved));
        moved.or_else(|| self.device.reap())
    }
    fn inflight(&self) -> usize {
        self.device.inflight() + self.moved.len()
    }
}

fn fixture(active: bool) -> (Fixture, Moving, ExportIndex) {
    let fixture = Fixture::new(StandOptions::default());
    let moving = Moving::default();
    moving.active.store(active, Ordering::SeqCst);
    let export = Export::new("moves", Arc::new(moving.clone()));
    let at = fixture.exports.add(&Arc::new(export)).unwrap();
    (fixture, moving, at)
}

/// A path of a client that supports gateways.
fn with_gateways(path: u8) -> PeerOptions {
    let extensions =
        ClientExtensions { changed: true, gateways: true, ..ClientExtensions::default() };
    PeerOptions { session: 1, path, local: path, extensions, ..PeerOptions::default() }
}

fn standing(peer: &mut Peer, fixture: &mut Fixture, access: AccessMode) -> Option<Standing> {
    peer.clear_result();
    peer.send_open_for(15, "moves", access, OpenRspTail::LONG_LEN);
    assert_eq!(peer.reply(fixture).errno, 0);
    let bytes = peer.result(OpenRspTail::LONG_LEN);
    assert_eq!(OpenRsp::decode(&bytes[..OpenRsp::LEN]).unwrap().device_id, 0);
    OpenRspTail::decode(&bytes).unwrap().standing
}

fn ask(peer: &mut Peer, fixture: &mut Fixture, device_id: u32, away: bool) -> u16 {
    peer.send_move(15, Move { device_id, away });
    peer.reply(fixture).errno
}

#[test]
fn a_standby_opens_only_for_clients_that_support_gateways() {
    let (mut fixture, moving, _) = fixture(false);
    let mut new = Peer::up(&mut fixture, PeerOptions { session: 2, ..with_gateways(2) }, "new");
    assert_eq!(standing(&mut new, &mut fixture, RW), Some(Standing { active: false, term: 5 }));
    assert!(moving.writers.lock().is_empty(), "a standby has no writers");
    let old = PeerOptions { extensions: ClientExtensions::default(), ..with_gateways(1) };
    let mut old = Peer::up(&mut fixture, old, "old");
    assert_eq!(old.open_device(&mut fixture, "moves", RW).map(drop), Err(errno::EBUSY));
    assert!(old.open_device(&mut fixture, "vol", RW).is_ok());
}

#[test]
fn only_a_writer_may_request_a_takeover() {
    let (mut fixture, moving, at) = fixture(false);
    let mut peer = Peer::up(&mut fixture, with_gateways(1), "sess");
    assert_eq!(ask(&mut peer, &mut fixture, 0, false), errno::ENOTCONN);
    standing(&mut peer, &mut fixture, AccessMode::ReadOnly);
    assert_eq!(ask(&mut peer, &mut fixture, 0, false), errno::EPERM);
    standing(&mut peer, &mut fixture, RW);
    assert_eq!(ask(&mut peer, &mut fixture, 0, false), 0);
    assert_eq!(*moving.asked.lock(), [SessionId([1; 16])]);
    moving.busy.store(true, Ordering::SeqCst);
    assert_eq!(ask(&mut peer, &mut fixture, 0, false), errno::EAGAIN);
    // The export is now active, and the client opens it again.
    moving.active.store(true, Ordering::SeqCst);
    let event = ControlMessage::Gateway(at, GatewayEvent::Active);
    fixture.send(Message::Control(event));
    fixture.settle();
    assert_eq!(peer.immediates(&mut fixture), [(0, Imm::Changed { device: 0 })]);
    assert_eq!(standing(&mut peer, &mut fixture, RW), Some(Standing { active: true, term: 5 }));
    assert_eq!(*moving.writers.lock(), [SessionId([1; 16])]);
    assert_eq!(ask(&mut peer, &mut fixture, 0, true), 0);
    assert!(moving.left.load(Ordering::SeqCst));
    // A takeover of an export with only one server is refused.
    peer.open_device(&mut fixture, "vol", RW).unwrap();
    assert_eq!(ask(&mut peer, &mut fixture, 1, false), errno::EINVAL);
}

#[test]
fn io_on_a_moved_export_is_not_answered() {
    let (mut fixture, moving, _) = fixture(true);
    let mut peer = Peer::up(&mut fixture, with_gateways(1), "sess");
    let mut second = Peer::up(&mut fixture, with_gateways(2), "sess");
    standing(&mut peer, &mut fixture, RW);
    peer.send_write((1, 6), io_header(Rw::WRITE, 0, 512), &[7; 512]);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    moving.active.store(false, Ordering::SeqCst);
    for fua in [false, true] {
        let (peer, permit) = if fua { (&mut second, 7) } else { (&mut peer, 6) };
        peer.send_write((1, permit), io_header(Rw::WRITE.fua(fua), 0, 512), &[7; 512]);
        assert_eq!(peer.replies(&mut fixture).len(), 0, "no answer");
        assert_eq!(peer.closed(&mut fixture), 3, "its path ends");
    }
    assert_eq!(fixture.counters().device_errors, 0);
    fixture.settle();
    assert!(fixture.sessions().is_empty());
}

#[test]
fn sessions_end_when_the_export_moves_away() {
    let (mut fixture, moving, at) = fixture(true);
    let mut peer = Peer::up(&mut fixture, with_gateways(1), "sess");
    standing(&mut peer, &mut fixture, RW);
    let mut other = Peer::up(&mut fixture, PeerOptions { session: 2, ..with_gateways(2) }, "other");
    other.open_device(&mut fixture, "vol", RW).unwrap();
    moving.active.store(false, Ordering::SeqCst);
    fixture.send(Message::Control(ControlMessage::Gateway(at, GatewayEvent::Standby)));
    fixture.settle();
    assert_eq!((peer.closed(&mut fixture), other.closed(&mut fixture)), (3, 0));
    let mut again = Peer::up(&mut fixture, with_gateways(3), "sess");
    assert!(!standing(&mut again, &mut fixture, RW).unwrap().active);
}
