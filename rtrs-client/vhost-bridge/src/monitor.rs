//! Handler of a monitor's messages, which query the device and set up its rings.
//!
//! The crate `vhost` reads messages and checks their form. An error of this handler ends the
//! connection.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use rtrs_core::mem::TruncationAlarm;
use rtrs_core::mutated;
use rtrs_core::rt::{Clock, Sender};
use rtrs_core::time::Instant;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::command::{Action, Command, RingStart, Stopped};
use crate::config::{self, Config, RINGS_MAX, has};
use crate::dirty_log::{DirtyLog, RingLog};
use crate::inflight::{Area, AreaSize};
use crate::memory::{FilePart, GuestMemory, GuestRegion, REGIONS_MAX};
use crate::shared::Shared;
use crate::vring::{RingSetup, used_len};

/// Address of a memory region in this process, which a monitor asks for during post-copy migration.
type Base = u64;

/// Memory region and its address in the monitor's address space.
#[derive(Debug)]
struct Mapped {
    region: Arc<GuestRegion>,
    monitor_address: u64,
}

impl Mapped {
    /// Maps a region that the monitor shares.
    fn new(of: &Monitor, region: &VhostUserMemoryRegion, file: &File) -> Result<Self> {
        let VhostUserMemoryRegion { guest_phys_addr, memory_size, user_addr, mmap_offset } =
            *region;
        let part = FilePart { file, offset: mmap_offset, len: memory_size };
        let mut regions = of.shared.regions.lock();
        let region = regions.map(guest_phys_addr, part, &of.alarm);
        let region = Arc::new(region.map_err(Error::ReqHandlerError)?);
        Ok(Self { region, monitor_address: user_addr })
    }

    /// Converts an address in the monitor to one in the guest.
    fn guest_address(&self, address: u64) -> Option<GuestAddress> {
        let offset = address.checked_sub(self.monitor_address)?;
        let inside = offset < self.region.len();
        inside.then(|| GuestAddress(self.region.start_addr().0 + offset))
    }
}

/// Setup of a ring by the monitor.
#[derive(Debug, Default)]
struct RingConfig {
    size: u32,
    /// Guest addresses of the descriptor table, the available ring and the used ring.
    addresses: Option<[GuestAddress; 3]>,
    /// Address in the dirty log of the used ring, if writes to the used ring are logged.
    log: Option<u64>,
    base: u16,
    call: Option<OwnedFd>,
    fault: Option<OwnedFd>,
    is_enabled: bool,
    is_started: bool,
}

/// State of a monitor's connection.
#[derive(Debug)]
pub(crate) struct Monitor {
    shared: Arc<Shared>,
    shards: Vec<Sender<Command>>,
    /// Set when a file behind the mapped memory is truncated.
    alarm: Arc<TruncationAlarm>,
    /// Features that the driver has accepted.
    features: u64,
    /// Whether the guest may have set its cache mode on another host. Monitors do not transfer it.
    is_mode_unknown: bool,
    mapped: Vec<Mapped>,
    memory: Arc<GuestMemory>,
    area: Option<Area>,
    /// Dirty log that the monitor has passed last.
    log: Option<Arc<DirtyLog>>,
    rings: Vec<RingConfig>,
    /// Deadline for requests in flight, from the first stop to the next start. All rings share one
    /// deadline, because a monitor stops them one after the other.
    drained_by: Option<Instant>,
}

impl Monitor {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        shards: &[Sender<Command>],
        alarm: &Arc<TruncationAlarm>,
    ) -> Self {
        // A guest that reconnects keeps its cache mode.
        let is_mode_unknown = shared.is_arriving() && !shared.is_in_use();
        if !shared.is_in_use() {
            shared.set_cache(!is_mode_unknown);
        }
        Self {
            shared: Arc::clone(shared),
            shards: shards.to_vec(),
            alarm: Arc::clone(alarm),
            features: 0,
            is_mode_unknown,
            mapped: Vec::new(),
            memory: Arc::default(),
            area: None,
            log: None,
            drained_by: None,
            rings: (0..shared.rings.max).map(|_| RingConfig::default()).collect(),
        }
    }

    fn send(&self, ring: u16, action: Action) {
        let shard = usize::from(ring) % self.shards.len();
        self.shards[shard].send(Command { ring, action });
    }

    fn ring(&mut self, index: u32) -> Result<&mut RingConfig> {
        let index = usize::try_from(index).map_err(|_| Error::InvalidParam)?;
        self.rings.get_mut(index).ok_or(Error::InvalidParam)
    }

    /// Returns a ring whose setup may change because it is not running.
    fn stopped_ring(&mut self, index: u32) -> Result<&mut RingConfig> {
        let ring = self.ring(index)?;
        match ring.is_started {
            true => Err(Error::InvalidOperation("the ring is running")),
            false => Ok(ring),
        }
    }

    /// Adopts the mapped regions as the guest's memory.
    fn adopt_memory(&mut self) -> Result<()> {
        self.mapped.sort_by_key(|mapped| mapped.region.start_addr());
        let regions = self.mapped.iter().map(|mapped| Arc::clone(&mapped.region)).collect();
        self.memory = match self.mapped.is_empty() {
            true => Arc::default(),
            false => {
                let memory = GuestMemory::from_arc_regions(regions);
                Arc::new(memory.map_err(|_| Error::InvalidOperation("memory regions overlap"))?)
            }
        };
        self.check_log()?;
        for ring in self.started() {
            self.send(ring, Action::Memory(Arc::clone(&self.memory)));
        }
        Ok(())
    }

    /// Rings that are running.
    fn started(&self) -> impl Iterator<Item = u16> {
        let started = (0..).zip(&self.rings).filter(|(_, ring)| ring.is_started);
        started.map(|(at, _)| at)
    }

    /// Dirty log of a ring. None if no log is in use.
    fn log_of(&self, ring: u16) -> Option<RingLog> {
        let log = self.log.as_ref().filter(|_| has(self.features, LOG_ALL_BIT))?;
        Some(RingLog { log: Arc::clone(log), used: self.rings[usize::from(ring)].log })
    }

    /// Checks that the dirty log, if one is in use, has a bit for each page of the guest.
    fn check_log(&self) -> Result<()> {
        let Some(log) = self.log.as_ref().filter(|_| has(self.features, LOG_ALL_BIT)) else {
            return Ok(());
        };
        let regions = self.memory.iter().map(|region| region.last_addr().0.checked_add(1));
        let rings = self.rings.iter().filter_map(|ring| {
            let len = u16::try_from(ring.size).map_or(0, used_len);
            Some(ring.log?.checked_add(len))
        });
        match regions.chain(rings).all(|end| end.is_some_and(|end| log.covers(end))) {
            true => Ok(()),
            false => Err(Error::InvalidOperation("a dirty log shorter than the memory needs")),
        }
    }

    /// Makes running rings use their current dirty log, and waits until they do: the monitor drops
    /// an earlier log after that, and relies on a new one.
    fn apply_log(&self, rings: impl Iterator<Item = u16>) -> Result<()> {
        self.check_log()?;
        let (reply, applied) = mpsc::channel();
        for ring in rings {
            self.send(ring, Action::Log { log: self.log_of(ring), reply: reply.clone() });
        }
        drop(reply);
        match applied.recv_timeout(LOG_TIME) {
            Err(RecvTimeoutError::Timeout) => {
                Err(Error::InvalidOperation("the shards did not adopt the dirty log in time"))
            }
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(()),
        }
    }

    fn start(&mut self, index: u16, kick: OwnedFd) -> Result<()> {
        let record = match &self.area {
            Some(area) => Some(area.record(index).ok_or(Error::InvalidOperation(
                "the record of requests in flight has no place for the ring",
            ))?),
            None => None,
        };
        let has_enable = has(self.features, PROTOCOL_FEATURES_BIT);
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let (memory, alarm) = (Arc::clone(&self.memory), Arc::clone(&self.alarm));
        let log = self.log_of(index);
        let ring = self.ring(index.into())?;
        let [descriptors, available, used] =
            ring.addresses.ok_or(Error::InvalidOperation("a ring without addresses"))?;
        let (size, base) = (ring.size, ring.base);
        let setup = RingSetup {
            size,
            descriptors,
            available,
            used,
            base,
            event_idx,
            memory,
            alarm,
            record,
            log,
        };
        // Monitors do not re-enable a ring that they restart.
        let is_enabled = ring.is_enabled || !has_enable;
        let copy = |fd: &Option<OwnedFd>| fd.as_ref().map(OwnedFd::try_clone).transpose();
        let call = copy(&ring.call).map_err(Error::ReqHandlerError)?;
        let fault = copy(&ring.fault).map_err(Error::ReqHandlerError)?;
        ring.is_started = true;
        self.drained_by = None;
        let start = RingStart { setup, kick, call, fault, is_enabled };
        self.send(index, Action::Start(Box::new(start)));
        Ok(())
    }

    /// Stops rings concurrently. Requests in flight end first, or fail at the deadline.
    fn stop(&mut self, rings: impl Iterator<Item = u16>) {
        let now = Clock.now();
        let drain = self.shared.drain;
        let by = *self.drained_by.get_or_insert_with(|| now + drain);
        let within = by.since(now);
        let mut replies = Vec::new();
        for at in rings.filter(|at| self.rings[usize::from(*at)].is_started) {
            let (reply, stopped) = mpsc::channel();
            self.send(at, Action::Stop { within, reply });
            replies.push((at, stopped));
        }
        for (at, stopped) in replies {
            let ring = &mut self.rings[usize::from(at)];
            ring.is_started = false;
            // A shard that has ended has already answered all requests that it could.
            if let Ok(Stopped { next }) = stopped.recv() {
                ring.base = next;
            }
        }
    }

    /// Ends the connection: stops the rings once the requests in flight have ended. Returns whether
    /// any ring was running.
    pub(crate) fn end(&mut self) -> bool {
        let any = self.rings.iter().any(|ring| ring.is_started);
        self.stop(0..self.shared.rings.max);
        any
    }
}

/// Number of the feature with which rings are enabled by a message.
const PROTOCOL_FEATURES_BIT: u32 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits().ilog2();

/// Number of the feature with which all writes to the guest's memory are logged.
const LOG_ALL_BIT: u32 = VhostUserVirtioFeatures::LOG_ALL.bits().ilog2();

/// Time limit for the shards to use a changed dirty log.
const LOG_TIME: Duration = Duration::from_secs(30);

/// Fails because the device does not offer the operation.
fn not_offered<T>() -> Result<T> {
    Err(Error::InvalidOperation("the device does not support this operation"))
}

impl VhostUserBackendReqHandlerMut for Monitor {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    /// Does nothing: the message is deprecated, and the device serves one monitor at a time.
    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop(0..self.shared.rings.max);
        (self.features, self.log) = (0, None);
        // Monitors reset the device before they load the state of a guest that arrives.
        if !self.shared.is_arriving() {
            self.is_mode_unknown = false;
            self.shared.set_cache(true);
        }
        self.rings.iter_mut().for_each(|ring| *ring = RingConfig::default());
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(&self.shared.geometry.lock()))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !config::acceptable() != 0 {
            return Err(Error::InvalidOperation("a feature that is never offered"));
        }
        let had_log = has(std::mem::replace(&mut self.features, features), LOG_ALL_BIT);
        // A driver that cannot set the mode has not set it before.
        if self.is_mode_unknown {
            self.shared.set_cache(!has(features, VIRTIO_BLK_F_CONFIG_WCE));
        }
        self.shared.set_flush(has(features, VIRTIO_BLK_F_FLUSH));
        self.apply_log(self.started())?;
        if had_log && !has(features, LOG_ALL_BIT) {
            // The next migration has a log of its own, perhaps for more memory.
            self.log = None;
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<Base>>> {
        let mapped = regions.iter().zip(&files);
        let mapped = mapped.map(|(region, file)| Mapped::new(self, region, file));
        self.mapped = mapped.collect::<Result<_>>()?;
        self.adopt_memory().map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.stopped_ring(index)?.size = num;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let guest = |address| {
            let found = self.mapped.iter().find_map(|mapped| mapped.guest_address(address));
            found.ok_or(Error::InvalidOperation("a ring outside the memory of the guest"))
        };
        let addresses = [guest(descriptor)?, guest(available)?, guest(used)?];
        let ring = self.ring(index)?;
        if ring.is_started && ring.addresses != Some(addresses) {
            return Err(Error::InvalidOperation("the ring is running"));
        }
        ring.addresses = Some(addresses);
        ring.log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        // A migration that begins or ends sends this message for running rings.
        let running = ring.is_started.then(|| u16::try_from(index)).transpose();
        self.apply_log(running.map_err(|_| Error::InvalidParam)?.into_iter())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.stopped_ring(index)?.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let at = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        self.ring(index)?;
        self.stop(std::iter::once(at));
        Ok(VhostUserVringState::new(index, self.ring(index)?.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.ok_or(Error::InvalidOperation("a ring without kicks"))?.into();
        match self.ring(index.into())?.is_started {
            true => self.send(index.into(), Action::Kick(fd)),
            false => self.start(index.into(), fd)?,
        }
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let ring = self.ring(index.into())?;
        ring.call = fd.map(OwnedFd::from);
        if ring.is_started {
            let call = ring.call.as_ref().map(OwnedFd::try_clone).transpose();
            self.send(index.into(), Action::Call(call.map_err(Error::ReqHandlerError)?));
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let ring = self.ring(index.into())?;
        ring.fault = fd.map(OwnedFd::from);
        if ring.is_started {
            let fault = ring.fault.as_ref().map(OwnedFd::try_clone).transpose();
            self.send(index.into(), Action::Fault(fault.map_err(Error::ReqHandlerError)?));
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(config::protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match features & !config::protocol_features().bits() {
            0 => Ok(()),
            _ => Err(Error::InvalidOperation("a protocol feature that was not offered")),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.shared.rings.max.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let ring = self.ring(index)?;
        ring.is_enabled = enable;
        if ring.is_started {
            let at = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
            self.send(at, Action::Enable(enable));
        }
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let Shared { geometry, rings, .. } = &*self.shared;
        let (geometry, is_writeback) = (&geometry.lock(), self.shared.has_cache());
        let part = Config { geometry, rings: rings.told, is_writeback }.read(offset, size);
        part.ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        let text = "a write to the configuration space other than of the cache mode";
        let is_writeback = config::written(offset, buf).ok_or(Error::InvalidOperation(text))?;
        self.is_mode_unknown = false;
        self.shared.set_cache(is_writeback);
        // The monitor does not repeat this message for the next process.
        self.area.iter().for_each(|area| area.note_write_through(!is_writeback));
        Ok(())
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        not_offered()
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        not_offered()
    }

    fn get_inflight_fd(
        &mut self,
        inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        let VhostUserInflight { num_queues: rings, queue_size: descriptors, .. } = *inflight;
        let size = checked(AreaSize { rings, descriptors })?;
        let (area, file) = Area::create(size, &self.alarm).map_err(Error::ReqHandlerError)?;
        area.note_write_through(!self.shared.has_cache());
        self.area = Some(area);
        Ok((VhostUserInflight::new(size.bytes(), 0, rings, descriptors), file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = *inflight;
        let size = checked(AreaSize { rings: num_queues, descriptors: queue_size })?;
        if mmap_size < size.bytes() {
            return Err(Error::InvalidOperation("a record that is too short for its rings"));
        }
        let area = Area::map(size, &file, mmap_offset, &self.alarm);
        let area = area.map_err(Error::ReqHandlerError)?;
        // An area that an earlier process has made holds the mode of the guest here.
        self.is_mode_unknown &= self.area.is_some();
        if !self.is_mode_unknown && self.shared.is_arriving() {
            self.shared.set_cache(true);
        }
        if area.is_write_through() && !mutated!(VhostModeForgotten) {
            self.shared.set_cache(false);
        }
        self.area = Some(area);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<Base>> {
        if self.mapped.len() >= REGIONS_MAX {
            return Err(Error::InvalidOperation("too many memory regions"));
        }
        let mapped = Mapped::new(self, region, &file)?;
        self.mapped.push(mapped);
        self.adopt_memory().map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let is_it = |mapped: &Mapped| {
            (mapped.region.start_addr().0, mapped.region.len(), mapped.monitor_address)
                == (region.guest_phys_addr, region.memory_size, region.user_addr)
        };
        let found = self.mapped.iter().position(is_it);
        let at = found.ok_or(Error::InvalidOperation("no such memory region"))?;
        self.mapped.remove(at);
        self.adopt_memory()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        not_offered()
    }

    fn check_device_state(&mut self) -> Result<()> {
        not_offered()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        not_offered()
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let VhostUserLog { mmap_size, mmap_offset } = *log;
        let part = FilePart { file: &file, offset: mmap_offset, len: mmap_size };
        let log = DirtyLog::map(part, &mut self.shared.regions.lock(), &self.alarm);
        let log = log.map_err(Error::ReqHandlerError)?;
        let log = Arc::new(log);
        self.log = Some(Arc::clone(&log));
        self.apply_log(self.started())?;
        // A monitor that starts the device during a migration passes the log after the rings were
        // started, and an earlier process may have died before it marked its last writes.
        if has(self.features, LOG_ALL_BIT) {
            log.mark_all(&self.memory);
        }
        Ok(())
    }
}

/// Checks the size of an area that the monitor requests.
fn checked(size: AreaSize) -> Result<AreaSize> {
    let is_usable = (1..=RINGS_MAX).contains(&size.rings) && size.descriptors > 0;
    is_usable.then_some(size).ok_or(Error::InvalidParam)
}
