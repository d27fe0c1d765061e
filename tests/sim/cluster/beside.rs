//! Other sessions that run beside the session under load: a session that is being detached while
//! the next client is already running under another name, a session that is refused write access, a
//! session whose host sleeps while the next client is running, and a session that waits for
//! exclusive access.

use std::sync::Arc;

use nbd_bridge::{BufferPools, Group};
use rtrs_client::DeviceIndex;
use rtrs_client::engine::{ClientEngine, ClientMessage};
use rtrs_core::block::BlockDevice;
use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::sim::sim_ip;
use rtrs_core::ids::{CoreIndex, SessionId};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::AccessMode;

use super::super::Failure;
use super::super::host::{ClientHost, Inbox, Pace, session_config, take_arrived};
use super::super::port::{Port, SharedFaults};
use super::Cluster;

/// Core of a session that has no users.
#[derive(Debug)]
struct IdleCore {
    core: ClientEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: Inbox<ClientMessage>,
}

impl IdleCore {
    fn deadline(&self) -> Option<Instant> {
        earliest(self.core.deadline(), self.inbox.deadline())
    }

    /// Runs one turn, as the core's driver does. Returns the core's messages, and whether anything
    /// happened.
    fn turn(&mut self, now: Instant) -> (Vec<(CoreIndex, ClientMessage)>, bool) {
        let Self { core, fabrics, inbox } = self;
        let mut busy = take_arrived(now, core, fabrics, inbox);
        busy |= core.pump(now, fabrics);
        fabrics[0].flush(now);
        let mut messages = Vec::new();
        while let Some(message) = core.take_message() {
            messages.push(message);
        }
        (messages, busy)
    }
}

/// All sessions beside the session under load.
#[derive(Debug, Default)]
pub(super) struct Beside {
    /// Sessions that are being detached.
    leaving: Vec<Vec<IdleCore>>,
    /// Session that asks for write access while another session is writing.
    rival: Vec<IdleCore>,
    /// Session whose host is asleep.
    asleep: Vec<IdleCore>,
    /// Session whose host has woken up.
    returned: Vec<IdleCore>,
    /// Session that waits for exclusive access on the new host of a virtual machine.
    target: Vec<IdleCore>,
    /// Whether the users of a departed client move to the next client.
    moves: bool,
    /// Whether any of these sessions has existed. If so, registered memory may belong to more than
    /// one client.
    pub(super) any: bool,
}

impl Beside {
    fn all(&self) -> impl Iterator<Item = &IdleCore> {
        let others = self.rival.iter().chain(&self.returned).chain(&self.target);
        self.leaving.iter().flatten().chain(others)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.all().fold(None, |at, core| earliest(at, core.deadline()))
    }

    /// Drops the session that is refused write access, without detaching.
    pub(super) fn end_rival(&mut self) {
        self.rival.clear();
    }

    /// Whether no session is being detached.
    pub(super) fn is_empty(&self) -> bool {
        self.leaving.is_empty()
    }
}

impl Cluster {
    /// Separates the client from its workloads, with all its IO in flight.
    fn take_client(&mut self, now: Instant) -> Vec<IdleCore> {
        let mut cores = Vec::new();
        for mut host in std::mem::take(&mut self.client) {
            host.work.abandon(now, &mut self.oracle, true);
            self.works.push(host.work);
            let (core, fabrics, inbox) = (host.core, host.fabrics, host.inbox);
            cores.push(IdleCore { core, fabrics, inbox });
        }
        self.retry_at = None;
        self.oracle.client_gone(self.beside.moves);
        self.beside.any = true;
        cores
    }

    /// Stops the client's host with all IO in flight. The next user of the device is a different
    /// session.
    pub(in super::super) fn put_to_sleep(&mut self) {
        self.beside.asleep = self.take_client(self.now());
    }

    /// Wakes the sleeping host. Returns the number of its IOs in flight.
    pub(in super::super) fn wake_up(&mut self) -> usize {
        self.beside.returned = std::mem::take(&mut self.beside.asleep);
        self.wake_all();
        self.returned_inflight()
    }

    /// Returns the number of unfinished IOs of the client that has returned.
    pub(in super::super) fn returned_inflight(&self) -> usize {
        self.beside.returned.iter().map(|core| core.core.inflight()).sum()
    }

    /// Whether the session of the returned client has failed.
    pub(in super::super) fn is_returned_refused(&self) -> bool {
        self.beside.returned.first().is_some_and(|home| home.core.failure().is_some())
    }

    /// Detaches the client that has returned.
    pub(in super::super) fn end_returned(&mut self) {
        let now = self.now();
        let mut cores = std::mem::take(&mut self.beside.returned);
        let Some(home) = cores.first_mut() else { return };
        home.core.detach(now, &mut home.fabrics);
        self.beside.leaving.push(cores);
    }

    /// Detaches the client with all its IO in flight. The next user of the device is a different
    /// session.
    pub(super) fn leave_client(&mut self) {
        let now = self.now();
        let mut cores = self.take_client(now);
        if let (Some(second), Some(home)) = (&mut self.second, cores.first()) {
            second.client_gone(now, false, &home.core);
        }
        let Some(home) = cores.first_mut() else { return };
        home.core.detach(now, &mut home.fabrics);
        self.beside.leaving.push(cores);
    }

    /// Starts a session with its own name that repeatedly asks for write access.
    pub(in super::super) fn start_rival(&mut self) {
        let node = self.world.node(sim_ip(21));
        let mut config = session_config(&self.options, 0xee, None, None);
        (config.shards, config.name) = (1, "rival".to_owned());
        (config.id, config.open_patience) = (SessionId([0xee; 16]), Duration::from_secs(600));
        config.paths.truncate(1);
        config.paths[0].local = Some(sim_ip(21));
        let fabric = self.world.fabric(node);
        let core = ClientEngine::new(self.now(), CoreIndex(0), &Arc::new(config), &[[0xee; 16]]);
        let fabrics = vec![Port::boxed(fabric, SharedFaults::clone(&self.ports[0]))];
        self.beside.rival.push(IdleCore { core, fabrics, inbox: Inbox::new() });
        self.beside.any = true;
    }

    /// Starts the session of a new host, which waits until it is the only writer.
    pub(in super::super) fn start_target(&mut self) {
        self.clients_started += 1;
        let number = self.clients_started;
        let mut config = session_config(&self.options, number, None, None);
        config.name = format!("target{number}");
        config.open_patience = Duration::from_secs(60);
        (config.volumes[0].access, config.volumes[0].promotes) = (AccessMode::Migration, true);
        let config = Arc::new(config);
        let uuid = |at: usize| [0xa0 + at as u8; 16].map(|byte: u8| byte ^ number);
        let uuids: Vec<[u8; 16]> = (0..self.options.paths).map(uuid).collect();
        for at in 0..self.options.client_cores {
            let fabric = self.world.fabric(self.nodes[0]);
            let core = ClientEngine::new(self.world.now(), CoreIndex(at), &config, &uuids);
            let fabrics = vec![Port::boxed(fabric, SharedFaults::clone(&self.ports[0]))];
            self.beside.target.push(IdleCore { core, fabrics, inbox: Inbox::new() });
        }
        self.beside.any = true;
        self.wake_all();
    }

    /// Ends the new host's process.
    pub(in super::super) fn end_target(&mut self) {
        self.beside.target.clear();
    }

    /// Makes the users of a departed client move to the next client, as when a virtual machine
    /// migrates.
    pub(in super::super) fn move_users(&mut self) {
        self.beside.moves = true;
    }

    /// Whether every core of the new host has the device open, in any access mode.
    pub(in super::super) fn is_target_open(&self) -> bool {
        let target = &self.beside.target;
        let is_open = |core: &IdleCore| core.core.device(DeviceIndex::FIRST).is_some();
        !target.is_empty() && target.iter().all(is_open)
    }

    /// Claims the device of the new host on all cores. Returns whether the server has granted
    /// exclusive access, according to each core's state.
    pub(in super::super) fn claim_target(&self) -> bool {
        let claim = |core: &IdleCore| {
            core.core.device(DeviceIndex::FIRST).is_some_and(|mut device| device.claim())
        };
        let claims: Vec<_> = self.beside.target.iter().map(claim).collect();
        !claims.is_empty() && claims.iter().all(|is_granted| *is_granted)
    }

    /// Withdraws the new host's claims on all cores: its virtual machine has ended.
    pub(in super::super) fn release_target(&mut self) {
        for core in &self.beside.target {
            if let Some(mut device) = core.core.device(DeviceIndex::FIRST) {
                device.release_claim();
            }
        }
        self.wake_all();
    }

    /// Makes the new host's session the one under load. There must be no other client.
    pub(in super::super) fn adopt_target(&mut self) {
        assert!(self.client.is_empty(), "the old host still runs");
        let works = std::mem::take(&mut self.works);
        (self.has_opened, self.retry_at) = (false, None);
        self.group = Group::new(works.len(), |_| ());
        let cores = std::mem::take(&mut self.beside.target);
        for (IdleCore { core, fabrics, inbox }, work) in cores.into_iter().zip(works) {
            let (pools, pace) = (BufferPools::default(), Pace::new());
            self.client.push(ClientHost { core, fabrics, inbox, work, pools, pace });
        }
        self.wake_all();
    }

    /// Runs a turn of these sessions. Returns whether anything happened.
    pub(super) fn turn_beside(&mut self, now: Instant) -> Result<bool, Failure> {
        let mut any = false;
        if let Some(guest) = &mut self.guest
            && std::mem::take(&mut guest.pace.due)
        {
            guest.pace.due = guest.turn(now)?;
            any |= guest.pace.due;
        }
        let Beside { leaving, rival, returned, target, .. } = &mut self.beside;
        let is_none = [&*rival, &*returned, &*target].iter().all(|cores| cores.is_empty());
        if leaving.is_empty() && is_none {
            return Ok(any);
        }
        let message_max = self.options.message_max;
        for cores in leaving.iter_mut().chain([rival, returned, target]) {
            for at in 0..cores.len() {
                let (messages, busy) = cores[at].turn(now);
                any |= busy;
                for (to, message) in messages {
                    let takes = self.prng.duration(Duration::ZERO..=message_max);
                    cores[to.index()].inbox.push(now + takes, message);
                }
            }
        }
        self.beside.leaving.retain(|cores| !cores[0].core.is_done());
        let open = self.beside.rival.iter().any(|rival| rival.core.is_open(DeviceIndex::FIRST));
        if open && self.client.first().is_some_and(|home| home.core.is_open(DeviceIndex::FIRST)) {
            let text = "the server lets a second session write alongside the first";
            return Err(Failure::new("blocks", text));
        }
        Ok(any)
    }
}
