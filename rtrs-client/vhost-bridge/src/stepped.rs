//! Front end without threads, for simulations: the test passes the monitor's messages directly and
//! runs each shard's turns, and the process may die at any access to the guest's memory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rtrs_core::mem::TruncationAlarm;
use rtrs_core::rt::mailbox;
use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserInflight, VhostUserMemoryRegion, VhostUserVringAddrFlags,
};
use vhost::vhost_user::{Result, VhostUserBackendReqHandlerMut, VhostUserVirtioFeatures};

pub use crate::accesses::run_until_death;
use crate::driver::{GUEST_AT, Guest, GuestRing, MEMORY_LEN, MONITOR_AT};
use crate::monitor::Monitor;
use crate::service::Seat;
use crate::shared::Shared;

/// Ring of a guest, with events that are read without waiting.
#[derive(Debug)]
pub struct SteppedRing {
    /// Ring as its driver sees it.
    pub ring: GuestRing,
    kick: OwnedFd,
    call: OwnedFd,
}

impl SteppedRing {
    /// Creates a ring that begins at this index.
    ///
    /// # Errors
    /// The system's error if there is no descriptor left.
    pub fn new(index: u16, size: u16, first: u16) -> io::Result<Self> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self { ring: GuestRing::new(index, size, first), kick: event()?, call: event()? })
    }

    /// Kicks the device for a new request if the device asks for that.
    pub fn kick(&mut self, guest: &Guest) {
        if self.ring.kick(guest, 1) {
            // A full counter is readable already.
            let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
        }
    }

    /// Whether the device has called the driver since the last check.
    pub fn take_call(&self) -> bool {
        rustix::io::read(&self.call, &mut [0; 8]).is_ok()
    }

    /// Returns the heads of the answers that the driver has not taken, in order.
    pub fn unseen(&mut self, guest: &Guest) -> Vec<u16> {
        let seen = self.ring.seen;
        let heads = std::iter::from_fn(|| self.ring.answer(guest)).map(|(head, _)| head).collect();
        self.ring.seen = seen;
        heads
    }
}

/// Front end of one process.
#[derive(Debug)]
pub struct Process {
    monitor: Monitor,
    seats: Vec<Option<Seat>>,
}

impl Process {
    /// Starts the front end of a volume on this many shards.
    ///
    /// # Errors
    /// The system's error if there is no descriptor left.
    pub fn new(name: &str, shards: u16) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(name, shards)?);
        let (mut senders, mut seats) = (Vec::new(), Vec::new());
        for shard in 0..shards {
            let (sender, mailbox) = mailbox()?;
            senders.push(sender);
            let (shared, service) = (Arc::clone(&shared), None);
            seats.push(Some(Seat { shared, shard, mailbox, service }));
        }
        let alarm = TruncationAlarm::of(Arc::clone(&shared.share))?;
        let monitor = Monitor::new(&shared, &senders, &alarm);
        Ok(Self { monitor, seats })
    }

    /// Takes the seat of a shard.
    pub fn take_seat(&mut self, shard: usize) -> Option<Seat> {
        self.seats.get_mut(shard)?.take()
    }

    /// Connects a guest that records its requests in flight, and starts its rings.
    ///
    /// # Errors
    /// The error that ends the connection.
    pub fn connect(&mut self, guest: &mut Guest, rings: &mut [SteppedRing]) -> Result<()> {
        let monitor = &mut self.monitor;
        let wanted = guest.wanted & !VhostUserVirtioFeatures::LOG_ALL.bits();
        let features = guest.kept_features.unwrap_or(monitor.get_features()? & wanted);
        guest.kept_features = Some(features);
        monitor.set_features(features)?;
        let size = rings.iter().map(|ring| ring.ring.size).max().unwrap_or(1);
        let count = rings.len() as u16;
        let (area, file) = match guest.record.take() {
            Some(record) => record,
            None => monitor.get_inflight_fd(&VhostUserInflight::new(0, 0, count, size))?,
        };
        monitor.set_inflight_fd(&area, copy(&file)?)?;
        guest.record = Some((area, file));
        self.share_memory(guest)?;
        for ring in rings {
            ring.ring.adopt(features);
            self.start(ring)?;
        }
        Ok(())
    }

    /// Shares the guest's memory, again if it was shared before.
    ///
    /// # Errors
    /// See [`Self::connect`].
    pub fn share_memory(&mut self, guest: &Guest) -> Result<()> {
        let region = VhostUserMemoryRegion::new(GUEST_AT, MEMORY_LEN, MONITOR_AT, 0);
        self.monitor.set_mem_table(&[region], vec![copy(guest.file())?], None).map(drop)
    }

    fn start(&mut self, ring: &SteppedRing) -> Result<()> {
        let monitor = &mut self.monitor;
        let SteppedRing { ring, kick, call } = ring;
        let (at, index) = (u32::from(ring.index), ring.index as u8);
        monitor.set_vring_num(at, ring.size.into())?;
        // After a restart, monitors know only how many answers the guest has seen.
        monitor.set_vring_base(at, ring.seen.into())?;
        let [table, available, used] =
            ring.addresses().map(|address| address - GUEST_AT + MONITOR_AT);
        let flags = VhostUserVringAddrFlags::empty();
        monitor.set_vring_addr(at, flags, table, used, available, 0)?;
        let file = |fd: &OwnedFd| fd.try_clone().map(File::from).map_err(system);
        monitor.set_vring_call(index, Some(file(call)?))?;
        monitor.set_vring_kick(index, Some(file(kick)?))?;
        monitor.set_vring_enable(at, true)
    }

    /// Pauses or resumes a ring.
    ///
    /// # Errors
    /// See [`Self::connect`].
    pub fn enable(&mut self, ring: u16, is_enabled: bool) -> Result<()> {
        self.monitor.set_vring_enable(ring.into(), is_enabled)
    }

    /// Turns the guest's write cache on or off.
    ///
    /// # Errors
    /// See [`Self::connect`].
    pub fn set_writeback(&mut self, is_writeback: bool) -> Result<()> {
        let flags = VhostUserConfigFlags::WRITABLE;
        self.monitor.set_config(32, &[u8::from(is_writeback)], flags)
    }
}

fn system(error: io::Error) -> vhost::vhost_user::Error {
    vhost::vhost_user::Error::ReqHandlerError(error)
}

fn copy(file: &File) -> Result<File> {
    file.try_clone().map_err(system)
}
