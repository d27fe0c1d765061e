//! State of RDMA devices: the part shared by all shards of a process, and each shard's own part.
//!
//! Devices are opened once for the process ([`VerbsShared`]); any shard may read a device's
//! asynchronous events, which are passed to all shards. A [`CoreDevice`] is a shard's completion
//! channel and its queues on a device. Queues are shared by the shard's queue pairs, so that one
//! poll and one notification request serve them all; another queue is created when the entries run
//! out.

use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use parking_lot::Mutex;

use super::domain::VerbsPd;
use super::dreq::DreqKeeper;
use super::reaper::Reaper;
use super::regions::Regions;
use super::sys::{AsyncEvent, CmId, CompChannel, Context, Cq, EventChannel, Wc};
use super::teardown::Torn;
use super::{hint, info, windows};
use crate::fabric::rdma::device::MemoryWindows;
use crate::fabric::{AsyncRegistration, ConnRequest, FabricError};
use crate::ids::QpNum;
use crate::rt::{Fd, Op, OpId, Port, Sender};
use crate::time::Duration;

/// Notifications to a shard from other threads.
#[derive(Debug)]
pub(super) enum Report {
    /// Event of a device, sent to all shards.
    Device(DeviceReport),
    /// The reaper has destroyed a queue pair of this shard.
    Destroyed(Destroyed),
    /// The reaper has registered memory for this shard.
    Made(Box<AsyncRegistration>),
    /// State of a pending connection's port.
    Port { qp: QpNum, down: bool },
    /// A request arrived on a device that was not known before.
    Request(Box<ConnRequest>),
    /// Result of an attempt to listen again on an address that was lost.
    Listener(Box<Tried>),
}

/// Event of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceReport {
    /// Key of the device.
    pub(super) context: usize,
    pub(super) what: AsyncEvent,
}

/// Outcome of destroying a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Destroyed {
    pub(super) name: QpNum,
    pub(super) torn: Torn,
}

/// Result of an attempt to listen on an address.
#[derive(Debug)]
pub(super) struct Tried {
    pub(super) address: SocketAddr,
    /// Listener, or the reason why there is none.
    pub(super) outcome: Result<CmId, FabricError>,
}

/// State shared by the shards of a process: the open devices, and the keys of local memory.
#[derive(Debug)]
pub struct VerbsShared {
    /// Channel for identifiers that only keep a device open.
    channel: Arc<EventChannel>,
    /// Open devices. Each is kept for as long as it exists, because librdmacm keeps it open as
    /// well.
    contexts: Mutex<Vec<Arc<Context>>>,
    /// Devices that are being removed and must not be reopened during removal.
    removed: Mutex<Vec<Weak<Context>>>,
    null: Arc<File>,
    pub(super) regions: Arc<Regions>,
    next_id: AtomicU64,
    cores: Mutex<Vec<(u64, Sender<Report>)>>,
    /// Number of connection requests waiting for an answer.
    pub(super) half_open: Arc<AtomicU32>,
    /// Threads for calls that may take a long time.
    pub(super) reaper: Arc<Reaper>,
    /// Threads for calls that are expected to be short.
    pub(super) calls: Reaper,
    /// Holds the identifiers of ended connections.
    pub(super) dreqs: DreqKeeper,
}

impl VerbsShared {
    /// Checks whether this host supports RDMA. No device is required yet: see
    /// [`devices`](super::devices).
    ///
    /// # Errors
    /// `System`, with what is missing and a hint: the module rdma_ucm, the device file
    /// /dev/infiniband/rdma_cm, or the permission to open it.
    pub fn open() -> Result<Arc<Self>, FabricError> {
        hint::check_connection_manager()?;
        let no_thread = |e| FabricError::system("cannot start a thread for driver calls", e);
        let reaper = Arc::new(Reaper::start("rdma-end").map_err(no_thread)?);
        let channel = EventChannel::new(&reaper).map_err(|e| {
            FabricError::system("cannot use the RDMA connection manager (rdma_ucm)", e)
        })?;
        let null =
            File::open("/dev/null").map_err(|e| FabricError::system("cannot open /dev/null", e))?;
        let shared = Arc::new(Self {
            reaper,
            calls: Reaper::start("rdma-call").map_err(no_thread)?,
            dreqs: DreqKeeper::start().map_err(no_thread)?,
            channel,
            contexts: Mutex::default(),
            removed: Mutex::default(),
            null: Arc::new(null),
            regions: Arc::default(),
            next_id: AtomicU64::new(1),
            cores: Mutex::new(Vec::new()),
            half_open: Arc::default(),
        });
        let watched = Arc::downgrade(&shared);
        let watch = thread::Builder::new().name("rdma-watch".into()).stack_size(WATCH_STACK);
        watch
            .spawn(move || watch_devices(&watched))
            .map_err(|e| FabricError::system("cannot start the thread that watches devices", e))?;
        Ok(shared)
    }

    fn fresh_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the device that has this local address.
    fn context_of(&self, address: SocketAddr) -> Result<Arc<Context>, FabricError> {
        let found = Context::of_address(&self.channel, &self.null, address)
            .and_then(|found| found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV)))
            .map_err(|e| hint::no_device(address.ip(), &info::names(), e))?;
        self.check_present(found.key())?;
        if let Some(known) = self.known(found.key()) {
            return Ok(known);
        }
        let found = Arc::new(found);
        let device = found.name();
        // Done without the lock: a shard that asks for another device must not wait.
        match windows::of_context(&found) {
            MemoryWindows::Usable => {}
            MemoryWindows::Untried(why) => {
                tracing::debug!(device, why, "memory windows were not tried");
            }
            MemoryWindows::Missing(why) => {
                tracing::info!(device, why, "an RDMA device has no memory windows");
            }
        }
        let mut contexts = self.contexts.lock();
        // Another thread may have opened the device at the same time.
        if let Some(known) = contexts.iter().find(|context| context.key() == found.key()) {
            return Ok(Arc::clone(known));
        }
        contexts.push(Arc::clone(&found));
        Ok(found)
    }

    fn known(&self, key: usize) -> Option<Arc<Context>> {
        self.contexts.lock().iter().find(|context| context.key() == key).cloned()
    }

    /// Returns true if the identifier's device is already kept, in which case `keep` does not call
    /// the driver.
    pub(super) fn keeps(&self, id: &CmId) -> bool {
        id.context_key().is_none_or(|key| self.known(key).is_some())
    }

    /// Refuses a device that is being removed and still in use.
    fn check_present(&self, key: usize) -> Result<(), FabricError> {
        let mut removed = self.removed.lock();
        removed.retain(|context| context.strong_count() > 0);
        match removed.iter().filter_map(Weak::upgrade).find(|context| context.key() == key) {
            Some(context) => Err(hint::removed(context.name())),
            None => Ok(()),
        }
    }

    /// Keeps the identifier's device, which librdmacm has opened and which has this local address,
    /// so that the device is released when it is removed.
    pub(super) fn keep(&self, id: &CmId, address: SocketAddr) -> Result<(), FabricError> {
        if self.keeps(id) { Ok(()) } else { self.context_of(address).map(drop) }
    }

    /// Notifies all shards of devices that are being removed.
    fn look_for_removed(&self) {
        // Check without the lock, which shards take.
        let contexts = self.contexts.lock().clone();
        for context in contexts.iter().filter(|context| !context.is_present()) {
            tracing::warn!(device = context.name(), "an RDMA device is being removed");
            self.removed(context);
        }
    }

    fn removed(&self, context: &Arc<Context>) {
        context.set_removed();
        self.removed.lock().push(Arc::downgrade(context));
        self.contexts.lock().retain(|known| known.key() != context.key());
        let what = AsyncEvent::DeviceRemoved;
        self.broadcast(DeviceReport { context: context.key(), what });
    }

    /// Creates a domain on the device that has this local address.
    pub(super) fn domain(
        &self,
        address: SocketAddr,
        require_imm: bool,
    ) -> Result<VerbsPd, FabricError> {
        let context = self.context_of(address)?;
        if require_imm && context.limits().iwarp {
            return Err(hint::no_immediates(context.name()));
        }
        VerbsPd::new(&context, self.fresh_id(), &self.regions, &self.reaper)
    }

    /// Subscribes a shard to device events; returns the number to pass to `leave`.
    pub(super) fn join(&self, sender: Sender<Report>) -> u64 {
        let core = self.fresh_id();
        self.cores.lock().push((core, sender));
        core
    }

    pub(super) fn leave(&self, core: u64) {
        self.cores.lock().retain(|(id, _)| *id != core);
    }

    fn broadcast(&self, report: DeviceReport) {
        for (_, sender) in self.cores.lock().iter() {
            sender.send(Report::Device(report));
        }
    }

    /// Passes a device's events to all shards, including the caller's. Returns false if the device
    /// no longer exists and will report nothing more.
    pub(super) fn broadcast_events(&self, context: &Arc<Context>) -> bool {
        // Limited, in case a device never stops reporting events.
        for _ in 0..256 {
            match context.next_async() {
                Ok(Some(AsyncEvent::Other)) => {}
                Ok(Some(what)) => {
                    tracing::info!(device = context.name(), ?what, "an RDMA device reports");
                    self.broadcast(DeviceReport { context: context.key(), what });
                }
                Ok(None) => return true,
                Err(error) => {
                    tracing::error!(device = context.name(), %error, "an RDMA device is unusable");
                    self.removed(context);
                    return false;
                }
            }
        }
        true
    }
}

/// Interval between checks for removed devices.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// Stack size of the checking thread, which makes few calls.
const WATCH_STACK: usize = 64 << 10;

/// Checks whether devices are being removed, as long as the state is in use. A driver that cannot
/// revoke a device from its users waits for them before it reports the removal to them; until then
/// only sysfs shows it.
fn watch_devices(shared: &Weak<VerbsShared>) {
    while let Some(shared) = shared.upgrade() {
        shared.look_for_removed();
        drop(shared);
        thread::sleep(WATCH_EVERY);
    }
}

/// Returns the local address from which the kernel would send to `remote`.
pub(super) fn source_for(remote: SocketAddr) -> Result<IpAddr, FabricError> {
    let failed = |e| FabricError::system(format!("no route to {remote}"), e);
    let any: SocketAddr = match remote {
        SocketAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    // Connecting a datagram socket sends nothing; it looks up the route.
    let socket = std::net::UdpSocket::bind(any).map_err(failed)?;
    socket.connect(remote).map_err(failed)?;
    socket.local_addr().map(|address| address.ip()).map_err(failed)
}

/// Descriptor that is polled through the shard's ring.
#[derive(Debug)]
pub(super) struct Watch {
    fd: Fd,
    token: u64,
    armed: Option<OpId>,
}

impl Watch {
    pub(super) fn new(fd: Fd, token: u64) -> Self {
        Self { fd, token, armed: None }
    }

    /// Requests one notification from the ring when the descriptor is readable.
    pub(super) fn arm(&mut self, port: &Port) {
        if self.armed.is_none() {
            let events = libc::POLLIN as u32;
            let poll = Op::Poll { fd: self.fd.clone(), events };
            self.armed = Some(port.submit(poll, self.token));
        }
    }

    /// Stops polling: the ring no longer holds the descriptor.
    fn stop(&self, port: &Port) {
        if let Some(poll) = self.armed {
            port.cancel(poll);
        }
    }

    /// Handles the ring's notification.
    pub(super) fn fired(&mut self) {
        self.armed = None;
    }
}

/// Completion queue and the number of its reserved entries.
#[derive(Debug)]
struct CqSlot {
    cq: Rc<Cq>,
    entries: u32,
    reserved: u32,
    /// The channel will report the next completion.
    armed: bool,
    /// The device reported that the queue failed.
    failed: bool,
}

/// A shard's state for a device.
#[derive(Debug)]
pub(super) struct CoreDevice {
    cqs: Vec<CqSlot>,
    channel: Rc<CompChannel>,
    /// Completion interrupt vector; shards are spread over the vectors.
    vector: u32,
    pub(super) completions: Watch,
    pub(super) reports: Watch,
}

/// Minimum number of entries of a completion queue, so that a few connections share it.
const CQ_ENTRIES_MIN: u32 = 1024;
/// Number of connections of the same size as the first that fit in a queue.
const CQ_SHARE: u32 = 4;

/// Returns the number of entries of a queue created for `need` entries.
fn queue_entries(need: u32, most: u32) -> u32 {
    need.saturating_mul(CQ_SHARE).max(CQ_ENTRIES_MIN).min(most)
}

impl CoreDevice {
    /// Creates the state. `tokens` are those of the completion channel and of the device's events;
    /// `core` is the shard's number.
    pub(super) fn new(
        context: &Arc<Context>,
        tokens: (u64, u64),
        core: u64,
    ) -> Result<Self, FabricError> {
        let failed = |e| {
            FabricError::system(format!("cannot use completion queues of {}", context.name()), e)
        };
        let channel = CompChannel::new(context).map_err(failed)?;
        let completions = Watch::new(Fd::new(channel.pollable().map_err(failed)?), tokens.0);
        let reports = Watch::new(Fd::new(context.async_pollable().map_err(failed)?), tokens.1);
        #[allow(clippy::cast_possible_truncation, reason = "it only spreads shards")]
        Ok(Self { cqs: Vec::new(), channel, vector: core as u32, completions, reports })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.channel.context()
    }

    /// Records that one of the queues failed; it is not known which, so none is used for another
    /// queue pair.
    pub(super) fn queues_failed(&mut self) {
        for slot in &mut self.cqs {
            slot.failed = true;
        }
    }

    /// Stops polling the descriptors through the ring.
    pub(super) fn stop(&self, port: &Port) {
        self.completions.stop(port);
        self.reports.stop(port);
    }

    /// Returns a queue with `need` free entries for another queue pair.
    pub(super) fn reserve(&mut self, need: u32) -> Result<Rc<Cq>, FabricError> {
        for slot in &mut self.cqs {
            if !slot.failed && slot.entries - slot.reserved >= need {
                slot.reserved += need;
                return Ok(Rc::clone(&slot.cq));
            }
        }
        let context = self.channel.context();
        let most = context.limits().cqe_max;
        if need > most {
            let what = "completions in one queue";
            return Err(hint::queue_too_long(context.name(), what, need.into(), most));
        }
        let entries = queue_entries(need, most);
        // If the device lacks the resources for this vector, use vector 0.
        let new = |vector| Cq::new(&self.channel, entries, self.cqs.len(), vector);
        let cq = new(self.vector).or_else(|_| new(0)).map_err(|e| {
            let name = context.name();
            FabricError::system(
                format!("cannot create a queue of {entries} completions on {name}"),
                e,
            )
        })?;
        let slot =
            CqSlot { cq: Rc::clone(&cq), entries, reserved: need, armed: false, failed: false };
        self.cqs.push(slot);
        Ok(cq)
    }

    /// Releases entries once the queue pair has been destroyed and the queue drained.
    pub(super) fn release(&mut self, cq: &Rc<Cq>, need: u32) {
        if let Some(slot) = self.cqs.iter_mut().find(|slot| Rc::ptr_eq(&slot.cq, cq)) {
            slot.reserved -= need;
        }
    }

    /// Takes the notifications from the readable channel. An armed queue sends one; once none is
    /// armed, the channel is empty and reading it would waste a system call.
    pub(super) fn on_readable(&mut self) -> io::Result<()> {
        while let Some(index) = self.channel.next()? {
            if let Some(slot) = self.cqs.get_mut(index) {
                slot.armed = false;
            }
            if !self.cqs.iter().any(|slot| slot.armed) {
                break;
            }
        }
        Ok(())
    }

    /// Takes some completions from each queue and arms the queues that are empty. Returns false if
    /// there are none and all queues are armed.
    pub(super) fn take(&mut self, into: &mut Vec<Wc>) -> io::Result<bool> {
        let before = into.len();
        for slot in self.cqs.iter_mut().filter(|slot| !slot.failed) {
            if slot.cq.poll(into)? == 0 && !slot.armed {
                slot.cq.arm()?;
                slot.armed = true;
                // Completions that arrived between the two calls caused no notification.
                slot.cq.poll(into)?;
            }
        }
        Ok(into.len() > before)
    }

    /// Takes all available completions, up to the capacity of the queues.
    pub(super) fn take_all(&mut self, into: &mut Vec<Wc>) -> io::Result<()> {
        for slot in &self.cqs {
            for _ in 0..=slot.entries {
                if slot.cq.poll(into)? == 0 {
                    break;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_sized_for_a_few_connections() {
        assert_eq!(queue_entries(10, 32_767), CQ_ENTRIES_MIN);
        assert_eq!(queue_entries(3081, 32_767), 4 * 3081);
        assert_eq!(queue_entries(20_000, 32_767), 32_767);
        assert_eq!(queue_entries(10, 100), 100);
    }

    #[test]
    fn the_source_address_follows_the_kernels_route() {
        let loopback = SocketAddr::from(([127, 0, 0, 1], 1234));
        assert_eq!(source_for(loopback).unwrap(), loopback.ip());
        let error = source_for(SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 1)));
        // With or without an IPv6 route, the result is an address or an error that names the peer.
        if let Err(e) = error {
            assert!(e.to_string().contains("no route to"), "{e}");
        }
    }
}
