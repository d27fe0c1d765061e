//! A second session beside the writer, which takes what the disk reports to one sync only.
//!
//! It opens the export for reading, or as a second writer (`migration`), and flushes now and then.
//! What becomes of its own IO nobody judges: it is there for what it does to the other session.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rtrs_client::machine::{ClientCore, Letter};
use rtrs_client::{PathTarget, SessionConfig, SessionDevice};
use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::sim::{World, sim_ip};
use rtrs_core::identity::Identity;
use rtrs_core::ids::{CoreIndex, SessionId};
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::AccessMode;

use super::super::host::{Inbox, Pace, path_target, session_config};
use super::super::options::{Guest as Kind, MS, Options};

/// Longest pause between two flushes.
const GAP_MAX: Duration = Duration::from_millis(40);

/// The session's only core.
#[derive(Debug)]
pub(super) struct Guest {
    core: ClientCore,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: Inbox<Letter>,
    device: Option<SessionDevice>,
    pub(super) pace: Pace,
    prng: Prng,
    next_at: Instant,
    waits: bool,
    leaves: bool,
}

fn address() -> IpAddr {
    sim_ip(41)
}

impl Guest {
    pub(super) fn new(world: &World, options: &Options, home: Option<Identity>) -> Option<Self> {
        let access = match options.guest? {
            Kind::Reader => AccessMode::ReadOnly,
            Kind::Writer => AccessMode::Migration,
        };
        let node = world.node(address());
        let path = path_target(options, 0);
        let remotes: Vec<SocketAddr> = path.remotes.clone();
        let config = SessionConfig {
            name: "guest".into(),
            id: SessionId([0xee; 16]),
            access,
            cores: 1,
            open_patience: Duration::from_secs(60),
            paths: vec![PathTarget { local: Some(address()), remotes, ..path }],
            ..session_config(options, 1, None, home)
        };
        let core = ClientCore::new(world.now(), CoreIndex(0), &Arc::new(config), &[[0xee; 16]]);
        Some(Self {
            core,
            fabrics: vec![Box::new(world.fabric(node))],
            inbox: Inbox::new(),
            device: None,
            pace: Pace::new(),
            prng: Prng::new(options.seed ^ 0x6775_6573_7473),
            next_at: Instant::ZERO,
            waits: false,
            leaves: false,
        })
    }

    /// When something is to be done even if nothing happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let flush = self.device.as_ref().filter(|_| !self.waits && !self.leaves);
        let own = earliest(self.inbox.deadline(), flush.map(|_| self.next_at));
        let fabric = self.fabrics[0].deadline();
        earliest(earliest(self.core.deadline(), fabric), own)
    }

    pub(super) fn detach(&mut self, now: Instant) {
        self.leaves = true;
        self.core.detach(now, &mut self.fabrics);
    }

    pub(super) fn is_done(&self) -> bool {
        self.core.is_done()
    }

    /// Turns its core. True when anything happened.
    pub(super) fn turn(&mut self, now: Instant) -> bool {
        let Self { core, fabrics, inbox, .. } = self;
        let mut busy = false;
        while let Some(letter) = inbox.pop(now) {
            busy = true;
            core.handle_letter(now, letter, fabrics);
        }
        busy |= fabrics[0].poll(now);
        while let Some(event) = fabrics[0].next_event() {
            busy = true;
            core.handle_event(now, 0, event, fabrics);
        }
        busy |= core.poll(now, fabrics);
        if self.device.is_none() {
            self.device = core.device();
        }
        busy |= self.flush(now);
        busy |= self.core.pump(now, &mut self.fabrics);
        self.fabrics[0].flush(now);
        while let Some((_, letter)) = self.core.take_letter() {
            self.inbox.push(now + MS / 10, letter);
        }
        busy
    }

    fn flush(&mut self, now: Instant) -> bool {
        let Some(device) = &mut self.device else { return false };
        device.poll(now);
        let mut busy = false;
        while device.reap().is_some() {
            (busy, self.waits) = (true, false);
        }
        if now < self.next_at || self.waits || self.leaves {
            return busy;
        }
        self.next_at = now + self.prng.duration(Duration::ZERO..=GAP_MAX);
        let (op, flags) = (IoOp::Flush, IoFlags::default());
        let io = Io { tag: 1, op, flags, offset: 0, len: 0, buf: None };
        self.waits = device.submit(io).is_ok();
        true
    }
}
