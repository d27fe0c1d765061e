//! What the cores of a process share, and what one core has of a device.
//!
//! Devices are opened once for the process ([`VerbsShared`]); what one reports out of band may be
//! read by any core and is told to all. A [`CoreDevice`] is a core's completion channel and queues
//! on a device. Queues are shared by the core's queue pairs, so that one poll and one request for
//! a report serve them all; a further one is made when the entries run out.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::domain::VerbsPd;
use super::reaper::Reaper;
use super::regions::Regions;
use super::sys::{AsyncEvent, CompChannel, Context, Cq, EventChannel, Wc};
use super::{info, remedy};
use crate::fabric::{FabricError, MadeAside};
use crate::ids::QpNum;
use crate::rt::{Fd, Op, Port, Sender};

/// What a core is told from outside.
#[derive(Debug)]
pub(super) enum Report {
    /// By a device; all cores hear it.
    Device(DeviceReport),
    /// By the reaper, about a queue pair of this core.
    Gone(Gone),
    /// By the reaper, about memory that this core has registered there.
    Made(Box<MadeAside>),
}

/// What a device reported.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceReport {
    /// The device's key.
    pub(super) context: usize,
    pub(super) what: AsyncEvent,
}

/// A queue pair was destroyed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gone {
    pub(super) name: QpNum,
    /// It could not be: it may still use its memory.
    pub(super) failed: bool,
}

/// What the cores of a process share: the devices that are open, the keys of local memory.
#[derive(Debug)]
pub struct VerbsShared {
    /// For identifiers that only keep a device open.
    channel: Arc<EventChannel>,
    contexts: Mutex<Vec<Weak<Context>>>,
    pub(super) regions: Arc<Regions>,
    next_id: AtomicU32,
    cores: Mutex<Vec<(u32, Sender<Report>)>>,
    /// Requests that wait for their answer.
    pub(super) half_open: Arc<AtomicU32>,
    pub(super) reaper: Arc<Reaper>,
}

impl VerbsShared {
    /// Looks whether this host can do RDMA at all. There need not be a device yet: see
    /// [`devices`](super::devices).
    ///
    /// # Errors
    /// `System`; says what is missing and what would help: the module rdma_ucm, the device file
    /// /dev/infiniband/rdma_cm, the permission to open it.
    pub fn open() -> Result<Arc<Self>, FabricError> {
        remedy::check_connection_manager()?;
        let channel = EventChannel::new().map_err(|e| {
            FabricError::system("cannot use the RDMA connection manager (rdma_ucm)", e)
        })?;
        let reaper = Reaper::start()
            .map_err(|e| FabricError::system("cannot start the thread that ends queue pairs", e))?;
        Ok(Arc::new(Self {
            reaper: Arc::new(reaper),
            channel,
            contexts: Mutex::new(Vec::new()),
            regions: Arc::default(),
            next_id: AtomicU32::new(1),
            cores: Mutex::new(Vec::new()),
            half_open: Arc::default(),
        }))
    }

    fn fresh_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The device that has this address of ours.
    fn context_of(&self, address: SocketAddr) -> Result<Arc<Context>, FabricError> {
        let ip = address.ip();
        let scope = match address {
            SocketAddr::V6(v6) => v6.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        let found = Context::of_address(&self.channel, ip, scope)
            .and_then(|found| found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV)))
            .map_err(|e| remedy::no_device(ip, &info::names(), e))?;
        let mut contexts = self.contexts.lock();
        contexts.retain(|context| context.strong_count() > 0);
        let known = contexts.iter().filter_map(Weak::upgrade).find(|c| c.key() == found.key());
        Ok(known.unwrap_or_else(|| {
            let found = Arc::new(found);
            contexts.push(Arc::downgrade(&found));
            found
        }))
    }

    /// A domain on the device that has this address of ours.
    pub(super) fn domain(
        &self,
        address: SocketAddr,
        require_imm: bool,
    ) -> Result<VerbsPd, FabricError> {
        let context = self.context_of(address)?;
        if require_imm && context.limits().iwarp {
            return Err(remedy::no_immediates(context.name()));
        }
        VerbsPd::new(&context, self.fresh_id(), &self.regions, &self.reaper)
    }

    /// A core wants to hear of devices; gives its number for `leave`.
    pub(super) fn join(&self, sender: Sender<Report>) -> u32 {
        let core = self.fresh_id();
        self.cores.lock().push((core, sender));
        core
    }

    pub(super) fn leave(&self, core: u32) {
        self.cores.lock().retain(|(id, _)| *id != core);
    }

    fn tell(&self, report: DeviceReport) {
        for (_, sender) in self.cores.lock().iter() {
            sender.send(Report::Device(report));
        }
    }

    /// Takes what a device reports and tells all cores, the caller too.
    pub(super) fn spread(&self, context: &Context) {
        // Bounded, should a device never stop.
        for _ in 0..256 {
            match context.next_async() {
                Ok(Some(AsyncEvent::Other)) => {}
                Ok(Some(what)) => {
                    tracing::info!(device = context.name(), ?what, "an RDMA device reports");
                    self.tell(DeviceReport { context: context.key(), what });
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::error!(device = context.name(), %error, "an RDMA device is gone");
                    let what = AsyncEvent::DeviceFailed;
                    self.tell(DeviceReport { context: context.key(), what });
                    return;
                }
            }
        }
    }
}

/// The address of ours from which the kernel would send to `remote`.
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

/// A descriptor that is polled through the core's ring.
#[derive(Debug)]
pub(super) struct Watch {
    fd: Fd,
    token: u64,
    armed: bool,
}

impl Watch {
    pub(super) fn new(fd: Fd, token: u64) -> Self {
        Self { fd, token, armed: false }
    }

    /// Asks the ring for the next time the descriptor is readable, once.
    pub(super) fn arm(&mut self, port: &Port) {
        if !self.armed {
            self.armed = true;
            let events = libc::POLLIN as u32;
            port.submit(Op::Poll { fd: self.fd.clone(), events }, self.token);
        }
    }

    /// The ring said so.
    pub(super) fn fired(&mut self) {
        self.armed = false;
    }
}

/// A completion queue and who has places in it.
#[derive(Debug)]
struct CqSlot {
    cq: Rc<Cq>,
    entries: u32,
    reserved: u32,
    /// The channel will report the next completion.
    armed: bool,
}

/// A core's part of a device.
#[derive(Debug)]
pub(super) struct CoreDevice {
    cqs: Vec<CqSlot>,
    channel: Rc<CompChannel>,
    pub(super) completions: Watch,
    pub(super) reports: Watch,
}

/// Completion queue entries made at least, so that a few connections share a queue.
const CQ_ENTRIES_MIN: u32 = 1024;
/// Connections of the first one's size that share a queue.
const CQ_SHARE: u32 = 4;

/// Entries of a queue made for `need` of them.
fn queue_entries(need: u32, most: u32) -> u32 {
    need.saturating_mul(CQ_SHARE).max(CQ_ENTRIES_MIN).min(most)
}

impl CoreDevice {
    /// `tokens` are those of the completion channel and of the device's own reports.
    pub(super) fn new(context: &Arc<Context>, tokens: (u64, u64)) -> Result<Self, FabricError> {
        let failed = |e| {
            FabricError::system(format!("cannot use completion queues of {}", context.name()), e)
        };
        let channel = CompChannel::new(context).map_err(failed)?;
        let completions = Watch::new(Fd::new(channel.pollable().map_err(failed)?), tokens.0);
        let reports = Watch::new(Fd::new(context.async_pollable().map_err(failed)?), tokens.1);
        Ok(Self { cqs: Vec::new(), channel, completions, reports })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.channel.context()
    }

    /// A queue with `need` places for one more queue pair.
    pub(super) fn reserve(&mut self, need: u32) -> Result<Rc<Cq>, FabricError> {
        for slot in &mut self.cqs {
            if slot.entries - slot.reserved >= need {
                slot.reserved += need;
                return Ok(Rc::clone(&slot.cq));
            }
        }
        let context = self.channel.context();
        let most = context.limits().cqe_max;
        if need > most {
            let what = "completions in one queue";
            return Err(remedy::queue_too_long(context.name(), what, need.into(), most));
        }
        let entries = queue_entries(need, most);
        let cq = Cq::new(&self.channel, entries, self.cqs.len()).map_err(|e| {
            let name = context.name();
            FabricError::system(
                format!("cannot make a queue of {entries} completions on {name}"),
                e,
            )
        })?;
        let slot = CqSlot { cq: Rc::clone(&cq), entries, reserved: need, armed: false };
        self.cqs.push(slot);
        Ok(cq)
    }

    /// Gives places back, after the queue pair is destroyed and the queue drained.
    pub(super) fn release(&mut self, cq: &Rc<Cq>, need: u32) {
        if let Some(slot) = self.cqs.iter_mut().find(|slot| Rc::ptr_eq(&slot.cq, cq)) {
            slot.reserved -= need;
        }
    }

    /// The channel is readable: takes its reports. An armed queue makes one; when none is armed any
    /// more the channel is empty, and asking it would be a system call for nothing.
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

    /// Takes some completions of each queue; one that is empty will report the next. False when
    /// there is none and all are armed.
    pub(super) fn take(&mut self, into: &mut Vec<Wc>) -> io::Result<bool> {
        let before = into.len();
        for slot in &mut self.cqs {
            if slot.cq.poll(into)? == 0 && !slot.armed {
                slot.cq.arm()?;
                slot.armed = true;
                // What came between the two made no report.
                slot.cq.poll(into)?;
            }
        }
        Ok(into.len() > before)
    }

    /// Takes all completions there are, up to what the queues hold.
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
    fn the_kernels_route_names_the_source() {
        let loopback = SocketAddr::from(([127, 0, 0, 1], 1234));
        assert_eq!(source_for(loopback).unwrap(), loopback.ip());
        let error = source_for(SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 1)));
        // With or without an IPv6 route: an address or an error that names the peer.
        if let Err(e) = error {
            assert!(e.to_string().contains("no route to"), "{e}");
        }
    }
}
