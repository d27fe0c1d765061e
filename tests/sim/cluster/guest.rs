//! Second session alongside the writer's. Its flushes consume errors that the disk reports only
//! once.
//!
//! The session opens the export for reading, or as a second writer (`migration`), and flushes
//! occasionally. The results of those flushes are not checked: only the session's effects on the
//! first one matter. In some runs the session is a user like the first, with its own oracle and a
//! workload on its own sectors, after those of the first. A neighbor is such a user of another
//! export. In some of these runs, one block contains sectors of both sessions, and both change
//! parts of it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use nbd_bridge::{BufferPools, Group, Seat};
use rtrs_client::engine::{ClientEngine, ClientMessage};
use rtrs_client::{DeviceIndex, PathTarget, SessionConfig, SessionDevice, VolumeConfig};
use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::sim::{World, sim_ip};
use rtrs_core::identity::Identity;
use rtrs_core::ids::{CoreIndex, SessionId};
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::AccessMode;

use super::super::Failure;
use super::super::host::{Inbox, Pace, path_target, session_config, take_arrived, volume};
use super::super::log::Log;
use super::super::options::{Guest as Kind, MS, Options, WorkOptions};
use super::super::oracle::Oracle;
use super::super::workload::{Rules, Workload};

/// Longest pause between two flushes.
const GAP_MAX: Duration = Duration::from_millis(40);
/// Number of sectors that the session writes to.
pub(super) const SECTORS: u32 = 32;
/// Number of these sectors that the session uses in runs in which it shares a block.
const MIXED_SECTORS: u32 = 4;
/// Name of a neighbor's export.
pub(super) const NEIGHBOR: &str = "other";
/// Core number of the session in the log, after all others.
const CORE: usize = 0x7e;

/// The only core of the second session.
#[derive(Debug)]
pub(super) struct Guest {
    core: ClientEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: Inbox<ClientMessage>,
    device: Option<SessionDevice>,
    /// Workload and oracle, in runs in which the session writes.
    work: Option<(Workload, Oracle)>,
    pub(super) pace: Pace,
    prng: Prng,
    next_at: Instant,
    is_flushing: bool,
    is_detaching: bool,
}

fn address() -> IpAddr {
    sim_ip(41)
}

impl Guest {
    pub(super) fn new(
        world: &World,
        options: &Options,
        home: Option<Identity>,
        rules: &Rules,
        log: &Log,
    ) -> Option<Self> {
        let (access, export, base) = match options.guest? {
            Kind::Reader => (AccessMode::ReadOnly, "vol", 0),
            Kind::Writer => (AccessMode::Migration, "vol", options.work.sectors),
            Kind::Neighbor => (AccessMode::ReadWrite, NEIGHBOR, 0),
        };
        let node = world.node(address());
        let path = path_target(options, 0);
        let remotes: Vec<SocketAddr> = path.remotes.clone();
        let config = SessionConfig {
            name: "guest".into(),
            volumes: vec![VolumeConfig { access, identity: home, ..volume(export) }],
            id: SessionId([0xee; 16]),
            shards: 1,
            open_patience: Duration::from_secs(60),
            paths: vec![PathTarget { local: Some(address()), remotes, ..path }],
            ..session_config(options, 1, None, None)
        };
        let core = ClientEngine::new(world.now(), CoreIndex(0), &Arc::new(config), &[[0xee; 16]]);
        let work = options.extra.guest_writes.then(|| {
            let own = WorkOptions {
                sectors: if options.extra.mixed { MIXED_SECTORS } else { SECTORS },
                depth: options.work.depth.clamp(2, 8),
                span_max: options.work.span_max.min(8),
                gap_max: if options.extra.mixed { MS } else { options.work.gap_max.max(5 * MS) },
                ..options.work.clone()
            };
            let oracle = Oracle::new(SECTORS, own.overlap, options.disk.write_cache);
            // The guest's requests do not pass through a port that requests PREFLUSH.
            let rules = Rules {
                options: own,
                nbd: options.extra.mixed,
                alone: false,
                stalls: false,
                nbd_drops: false,
                preflush: false,
                ..rules.clone()
            };
            let prng = Prng::new(options.seed ^ 0x6775_6573_745f_696f);
            let work = Workload::new(CORE, &rules, prng, log.clone());
            (work.based_at(base), oracle)
        });
        Some(Self {
            core,
            fabrics: vec![Box::new(world.fabric(node))],
            inbox: Inbox::new(),
            device: None,
            work,
            pace: Pace::new(),
            prng: Prng::new(options.seed ^ 0x6775_6573_7473),
            next_at: Instant::ZERO,
            is_flushing: false,
            is_detaching: false,
        })
    }

    /// Returns the time at which the session needs a turn even without events.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let flush = self.device.as_ref().filter(|_| !self.is_flushing && !self.is_detaching);
        let own = earliest(self.inbox.deadline(), flush.map(|_| self.next_at));
        let fabric = self.fabrics[0].deadline();
        let work = self.work().and_then(Workload::deadline);
        earliest(earliest(self.core.deadline(), fabric), earliest(own, work))
    }

    pub(super) fn detach(&mut self, now: Instant) {
        self.is_detaching = true;
        self.core.detach(now, &mut self.fabrics);
    }

    pub(super) fn is_done(&self) -> bool {
        self.core.is_done()
    }

    /// Returns the session's workload, if the session writes.
    pub(super) fn work(&self) -> Option<&Workload> {
        self.work.as_ref().map(|(work, _)| work)
    }

    pub(super) fn work_mut(&mut self) -> Option<&mut Workload> {
        self.work.as_mut().map(|(work, _)| work)
    }

    /// Returns the oracle for the session's sectors.
    pub(super) fn oracle_mut(&mut self) -> Option<&mut Oracle> {
        self.work.as_mut().map(|(_, oracle)| oracle)
    }

    /// Runs a turn of the session's core. Returns whether anything happened.
    pub(super) fn turn(&mut self, now: Instant) -> Result<bool, Failure> {
        let Self { core, fabrics, inbox, .. } = self;
        let mut busy = take_arrived(now, core, fabrics, inbox);
        if let Some((work, oracle)) = &mut self.work {
            if !work.is_open()
                && let Some(device) = core.device(DeviceIndex::FIRST)
            {
                let seat = Seat { group: Group::new(1, |_| ()), shard: 0 };
                work.open(now, device, seat, &BufferPools::default());
            }
            busy |= work.turn(now, oracle)?;
            work.check()?;
        } else {
            if self.device.is_none() {
                self.device = core.device(DeviceIndex::FIRST);
            }
            busy |= self.flush(now);
        }
        busy |= self.core.pump(now, &mut self.fabrics);
        self.fabrics[0].flush(now);
        while let Some((_, message)) = self.core.take_message() {
            self.inbox.push(now + MS / 10, message);
        }
        Ok(busy)
    }

    fn flush(&mut self, now: Instant) -> bool {
        let Some(device) = &mut self.device else { return false };
        device.poll(now);
        let mut busy = false;
        while device.reap().is_some() {
            (busy, self.is_flushing) = (true, false);
        }
        if now < self.next_at || self.is_flushing || self.is_detaching {
            return busy;
        }
        self.next_at = now + self.prng.duration(Duration::ZERO..=GAP_MAX);
        let (op, flags) = (IoOp::Flush, IoFlags::default());
        let io = Io { tag: 1, op, flags, offset: 0, len: 0, buf: None };
        self.is_flushing = device.submit(io).is_ok();
        true
    }
}
