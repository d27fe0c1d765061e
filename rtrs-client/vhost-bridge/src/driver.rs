//! Virtual machine monitor and driver for tests, in one: sets up rings by messages, and offers
//! requests in them, including malformed ones.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rtrs_core::mem::TruncationAlarm;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{
    Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
};
use vm_memory::{AtomicAccess, Bytes, MemoryRegionAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::memory::{FilePart, GuestRegion};

pub mod migration;

/// Address of the guest's memory in the guest.
pub const GUEST_AT: u64 = 1 << 32;
/// Address of the guest's memory in the monitor.
pub(crate) const MONITOR_AT: u64 = 0x7000_0000_0000;
/// Length of the guest's memory.
pub const MEMORY_LEN: u64 = 96 << 20;

/// Length of a page.
pub const PAGE: u64 = 4096;

/// Length of the memory of one ring.
const RING_LEN: u64 = 256 << 10;
const AVAILABLE_AT: u64 = 0x8000;
const USED_AT: u64 = 0x1_0000;
const TABLES_AT: u64 = 0x2_0000;

/// Offset of the memory for requests.
pub const SLOTS_AT: u64 = 8 << 20;
const SLOT_LEN: u64 = 1 << 20;
/// Offset of a request's data within its slot.
const DATA_AT: u64 = 4096;
/// Number of requests that a guest has memory for.
pub const SLOTS: u16 = 64;
/// Number of descriptors reserved for a request in [`GuestRing::start`].
const SLOT_DESCRIPTORS: u16 = 4;

/// Returns the offset of an entry in the first ring's list of available requests.
#[cfg(test)]
pub(crate) fn available_entry(index: u16, size: u16) -> u64 {
    AVAILABLE_AT + 4 + 2 * u64::from(index % size)
}

/// Time limit for everything that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// Types of requests.
pub mod kind {
    pub use virtio_bindings::virtio_blk::{
        VIRTIO_BLK_T_DISCARD as DISCARD, VIRTIO_BLK_T_FLUSH as FLUSH, VIRTIO_BLK_T_GET_ID as ID,
        VIRTIO_BLK_T_IN as READ, VIRTIO_BLK_T_OUT as WRITE, VIRTIO_BLK_T_WRITE_ZEROES as ZEROES,
    };
}

/// Guest's memory, and the connection of its monitor.
#[allow(missing_debug_implementations, reason = "the connection has none")]
pub struct Guest {
    file: File,
    memory: Arc<GuestRegion>,
    /// Features that the driver accepts of those offered.
    pub wanted: u64,
    /// Features that the driver has accepted before, whatever is offered now.
    pub kept_features: Option<u64>,
    /// Whether requests in flight are recorded.
    is_recording: bool,
    pub(crate) record: Option<(VhostUserInflight, File)>,
    monitor: Option<Frontend>,
    /// Features that the driver has accepted.
    features: u64,
    /// Pages that the guest itself has written.
    written: Mutex<BTreeSet<u64>>,
}

/// Piece of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Offset in the guest's memory.
    pub at: u64,
    pub len: u32,
    pub is_writable: bool,
}

/// Descriptor as laid out in memory.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RawDescriptor {
    /// Address in the guest.
    pub address: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

impl RawDescriptor {
    /// Returns a descriptor of a piece, with a successor if there is one.
    pub fn new(piece: Piece, next: Option<u16>) -> Self {
        let write = if piece.is_writable { VRING_DESC_F_WRITE } else { 0 };
        let more = if next.is_some() { VRING_DESC_F_NEXT } else { 0 };
        let flags = (write | more) as u16;
        Self { address: GUEST_AT + piece.at, len: piece.len, flags, next: next.unwrap_or(0) }
    }

    /// Returns a descriptor of an indirect table at this offset.
    pub fn table(at: u64, len: u32) -> Self {
        Self { address: GUEST_AT + at, len, flags: VRING_DESC_F_INDIRECT as u16, next: 0 }
    }

    /// Returns the bytes in memory.
    pub fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

impl Default for Guest {
    fn default() -> Self {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd"));
        ftruncate(&file, MEMORY_LEN).expect("memory");
        let alarm = TruncationAlarm::new().expect("an alarm");
        let part = FilePart { file: &file, offset: 0, len: MEMORY_LEN };
        let memory = Arc::new(GuestRegion::map(0, part, &alarm).expect("a mapping"));
        let (wanted, is_recording) = (u64::MAX, false);
        let (kept_features, record, monitor) = (None, None, None);
        let (features, written) = (0, Mutex::default());
        Self {
            file,
            memory,
            wanted,
            kept_features,
            is_recording,
            record,
            monitor,
            features,
            written,
        }
    }
}

impl Guest {
    /// Makes a guest whose requests in flight are recorded.
    pub fn recording() -> Self {
        Self { is_recording: true, ..Self::default() }
    }

    /// Connects a monitor, and starts these rings at their current indices.
    pub fn connect(&mut self, socket: &Path, rings: &mut [GuestRing]) {
        let begin = Instant::now();
        let mut monitor = loop {
            match Frontend::connect(socket, 1) {
                Ok(monitor) => break monitor,
                Err(error) => assert!(begin.elapsed() < PATIENCE, "cannot connect: {error:?}"),
            }
            thread::sleep(Duration::from_millis(10));
        };
        monitor.set_owner().expect("owner");
        let offered = monitor.get_features().expect("features");
        let protocol = monitor.get_protocol_features().expect("protocol features");
        let wanted = VhostUserProtocolFeatures::all()
            - VhostUserProtocolFeatures::XEN_MMAP
            - VhostUserProtocolFeatures::STATUS;
        monitor.set_protocol_features(protocol & wanted).expect("protocol features");
        monitor.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert!(monitor.get_queue_num().expect("rings") >= rings.len() as u64);
        let wanted = self.wanted & !VhostUserVirtioFeatures::LOG_ALL.bits();
        let features = self.kept_features.unwrap_or(offered & wanted);
        self.features = features;
        monitor.set_features(features).expect("features");
        if self.is_recording {
            self.record(&mut monitor, rings);
        }
        let region = self.region();
        monitor.add_mem_region(&region).expect("memory");
        for ring in rings {
            ring.adopt(features);
            ring.start_on(&mut monitor);
        }
        self.monitor = Some(monitor);
    }

    fn record(&mut self, monitor: &mut Frontend, rings: &[GuestRing]) {
        let descriptors = rings.iter().map(|ring| ring.size).max().unwrap_or(1);
        let count = u16::try_from(rings.len()).expect("few rings");
        let wanted = VhostUserInflight::new(0, 0, count, descriptors);
        let (area, file) = match self.record.take() {
            Some(record) => record,
            None => monitor.get_inflight_fd(&wanted).expect("a record"),
        };
        monitor.set_inflight_fd(&area, file.as_raw_fd()).expect("the record");
        self.record = Some((area, file));
    }

    /// Returns the guest's memory as messages describe it.
    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_AT,
            memory_size: MEMORY_LEN,
            userspace_addr: MONITOR_AT,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Truncates the memory to this length, for the guest and the device.
    pub fn truncate(&self, len: u64) {
        ftruncate(&self.file, len).expect("a shorter file");
    }

    /// Returns the file that holds the guest's memory.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the connection.
    pub fn monitor(&mut self) -> &mut Frontend {
        self.monitor.as_mut().expect("a connected monitor")
    }

    /// Cuts the connection.
    pub fn disconnect(&mut self) {
        self.monitor = None;
    }

    /// Waits until the device has cut the connection. `after` names the cause in a panic message.
    pub fn wait_for_cut(&mut self, after: &str) {
        let monitor = self.monitor();
        let begin = Instant::now();
        while monitor.get_features().is_ok() {
            assert!(begin.elapsed() < PATIENCE, "{after}: the connection is still there");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Forgets the requests that were in flight, as a restarted guest does.
    pub fn forget_record(&mut self) {
        self.record = None;
    }

    /// Writes to the record of requests in flight.
    pub fn forge_record(&self, at: u64, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        let (_, file) = self.record.as_ref().expect("a record");
        file.write_all_at(bytes, at).expect("the record's file");
    }

    /// Returns the configuration space.
    pub fn config(&mut self) -> Vec<u8> {
        let buffer = [0; 60];
        let flags = VhostUserConfigFlags::empty();
        self.monitor().get_config(0, 60, flags, &buffer).expect("the configuration").1
    }

    /// Passes a channel on which the device reports changes.
    pub fn pass_channel(&mut self, channel: &UnixStream) {
        self.monitor().set_backend_request_fd(channel).expect("the channel");
    }

    /// Sets whether the device may take requests from a ring. Returns false if the connection was
    /// cut.
    #[must_use]
    pub fn enable(&mut self, ring: usize, is_enabled: bool) -> bool {
        self.monitor().set_vring_enable(ring, is_enabled).is_ok()
    }

    /// Sets the cache mode.
    pub fn set_writeback(&mut self, is_writeback: bool) {
        let (flags, mode) = (VhostUserConfigFlags::WRITABLE, [u8::from(is_writeback)]);
        self.monitor().set_config(32, flags, &mode).expect("the cache mode");
    }

    /// Reads memory of the guest.
    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, MemoryRegionAddress(at)).expect("memory");
        bytes
    }

    /// Writes memory of the guest.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.note_written(at, bytes.len() as u64);
        self.memory.write_slice(bytes, MemoryRegionAddress(at)).expect("memory");
    }

    fn load<T: AtomicAccess>(&self, at: u64) -> T {
        self.memory.load(MemoryRegionAddress(at), Ordering::Acquire).expect("memory")
    }

    fn note_written(&self, at: u64, len: u64) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.extend(at / PAGE..(at + len).div_ceil(PAGE));
    }

    fn store<T: AtomicAccess>(&self, at: u64, value: T) {
        self.note_written(at, 1);
        self.memory.store(value, MemoryRegionAddress(at), Ordering::Release).expect("memory");
    }
}

/// Ring of a guest, as its driver sees it.
#[derive(Debug)]
pub struct GuestRing {
    pub index: u16,
    pub size: u16,
    has_events: bool,
    /// Index of the next request to be offered.
    pub next: u16,
    /// Index of the next answer to be seen.
    pub seen: u16,
    /// Index of the next request to be taken by the device, if an earlier device has said so.
    pub base: Option<u16>,
    kick: EventFd,
    call: EventFd,
    fault: EventFd,
}

impl GuestRing {
    /// Makes a ring that begins at this index.
    pub fn new(index: u16, size: u16, first: u16) -> Self {
        let event = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        let (kick, call, fault) = (event(), event(), event());
        Self {
            index,
            size,
            has_events: false,
            next: first,
            seen: first,
            base: None,
            kick,
            call,
            fault,
        }
    }

    fn at(&self, offset: u64) -> u64 {
        RING_LEN * u64::from(self.index) + offset
    }

    /// Returns the addresses of the descriptors, the available and the used ring in the guest.
    pub fn addresses(&self) -> [u64; 3] {
        [0, AVAILABLE_AT, USED_AT].map(|offset| GUEST_AT + self.at(offset))
    }

    /// Adopts the features that the driver has accepted.
    pub(crate) fn adopt(&mut self, features: u64) {
        self.has_events = features >> VIRTIO_RING_F_EVENT_IDX & 1 != 0;
    }

    /// Returns the slot of a request with this head.
    pub fn slot(head: u16) -> u16 {
        head / SLOT_DESCRIPTORS
    }

    /// Uses events for kicks and calls.
    pub fn use_events(&mut self) {
        self.has_events = true;
    }

    /// Writes the ring's indices to memory, as a driver does before it starts the device.
    pub fn reset(&self, guest: &Guest) {
        guest.store(self.at(AVAILABLE_AT), 0_u16);
        guest.store(self.at(AVAILABLE_AT) + 2, self.next);
        guest.store(self.at(USED_AT), 0_u16);
        guest.store(self.at(USED_AT) + 2, self.seen);
    }

    /// Sets up and enables the ring.
    pub fn start_on(&self, monitor: &mut Frontend) {
        let at = usize::from(self.index);
        monitor.set_vring_num(at, self.size).expect("size");
        monitor.set_vring_base(at, self.base.unwrap_or(self.next)).expect("base");
        self.set_addresses(monitor, false);
        monitor.set_vring_call(at, &self.call).expect("call");
        monitor.set_vring_err(at, &self.fault).expect("err");
        monitor.set_vring_kick(at, &self.kick).expect("kick");
        monitor.set_vring_enable(at, true).expect("enable");
    }

    /// Passes a new kick descriptor, which starts a stopped ring.
    pub fn renew_kick(&mut self, monitor: &mut Frontend) {
        self.kick = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        monitor.set_vring_kick(usize::from(self.index), &self.kick).expect("kick");
    }

    /// Passes the ring's addresses, and whether writes to the used ring are logged.
    pub fn set_addresses(&self, monitor: &mut Frontend, is_logged: bool) {
        let log = is_logged.then(|| GUEST_AT + self.at(USED_AT));
        self.try_addresses(monitor, log).expect("addresses");
    }

    /// Passes the ring's addresses, and the address in the log of the used ring if there is one.
    fn try_addresses(&self, monitor: &mut Frontend, log: Option<u64>) -> vhost::Result<()> {
        let address = |offset| MONITOR_AT + self.at(offset);
        let addresses = VringConfigData {
            queue_max_size: self.size,
            queue_size: self.size,
            flags: u32::from(log.is_some()),
            desc_table_addr: address(0),
            used_ring_addr: address(USED_AT),
            avail_ring_addr: address(AVAILABLE_AT),
            log_addr: log,
        };
        monitor.set_vring_addr(self.index.into(), &addresses)
    }

    /// Writes a descriptor.
    pub fn describe(&self, guest: &Guest, index: u16, descriptor: RawDescriptor) {
        guest.write(self.at(16 * u64::from(index)), &descriptor.bytes());
    }

    /// Writes an indirect table, and returns its descriptor.
    pub fn describe_table(&self, guest: &Guest, slot: u16, pieces: &[Piece]) -> RawDescriptor {
        let at = self.at(TABLES_AT) + 16 * 256 * u64::from(slot % 32);
        for (index, piece) in (0_u16..).zip(pieces) {
            let next = (usize::from(index) + 1 < pieces.len()).then_some(index + 1);
            let bytes = RawDescriptor::new(*piece, next).bytes();
            guest.write(at + 16 * u64::from(index), &bytes);
        }
        RawDescriptor::table(at, 16 * u32::try_from(pieces.len()).expect("few pieces"))
    }

    /// Offers a chain whose descriptors were written before.
    pub fn offer(&mut self, guest: &Guest, head: u16) {
        let entry = 4 + 2 * u64::from(self.next % self.size);
        guest.store(self.at(AVAILABLE_AT) + entry, head);
        self.next = self.next.wrapping_add(1);
        self.publish(guest, self.next);
    }

    /// Publishes the index of the next request to be offered.
    pub fn publish(&self, guest: &Guest, index: u16) {
        guest.store(self.at(AVAILABLE_AT) + 2, index);
        fence(Ordering::SeqCst);
    }

    /// Kicks the device if the device asks for a kick. Returns whether it does.
    pub fn kick(&mut self, guest: &Guest, offered: u16) -> bool {
        let asks = if self.has_events {
            let event: u16 = guest.load(self.at(USED_AT) + 4 + 8 * u64::from(self.size));
            let old = self.next.wrapping_sub(offered);
            self.next.wrapping_sub(event).wrapping_sub(1) < self.next.wrapping_sub(old)
        } else {
            guest.load::<u16>(self.at(USED_AT)) & 1 == 0
        };
        if asks {
            self.kick_always();
        }
        asks
    }

    /// Kicks the device.
    pub fn kick_always(&self) {
        self.kick.write(1).expect("a kick");
    }

    /// Returns the next answer, if there is one: the head, and the number of bytes written.
    pub fn answer(&mut self, guest: &Guest) -> Option<(u16, u32)> {
        if guest.load::<u16>(self.at(USED_AT) + 2) == self.seen {
            return None;
        }
        let entry = self.at(USED_AT) + 4 + 8 * u64::from(self.seen % self.size);
        let (head, len): (u32, u32) = (guest.load(entry), guest.load(entry + 4));
        self.seen = self.seen.wrapping_add(1);
        Some((u16::try_from(head).expect("a head"), len))
    }

    /// Asks for a call with the next answer.
    pub fn ask_call(&self, guest: &Guest) {
        guest.store(self.at(AVAILABLE_AT) + 4 + 2 * u64::from(self.size), self.seen);
        fence(Ordering::SeqCst);
    }

    /// Sets whether the device may leave out calls, where events are not used.
    pub fn ignore_calls(&self, guest: &Guest, ignored: bool) {
        guest.store(self.at(AVAILABLE_AT), u16::from(ignored));
    }

    /// Waits for a call and returns the next answer. Fails if an answer comes without a call.
    pub fn wait(&mut self, guest: &Guest) -> (u16, u32) {
        loop {
            if let Some(answer) = self.answer(guest) {
                return answer;
            }
            self.ask_call(guest);
            if let Some(answer) = self.answer(guest) {
                return answer;
            }
            assert!(self.is_called(PATIENCE), "no call, and {:?}", self.answer(guest));
        }
    }

    /// Waits for a call. Returns false after a timeout.
    pub fn is_called(&self, time: Duration) -> bool {
        is_signaled(&self.call, time)
    }

    /// Waits until the device reports a fault of the driver. Returns false after a timeout.
    pub fn is_faulty(&self, time: Duration) -> bool {
        is_signaled(&self.fault, time)
    }
}

fn is_signaled(event: &EventFd, time: Duration) -> bool {
    let end = Instant::now() + time;
    while event.read().is_err() {
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_micros(50));
    }
    true
}

/// Request of a guest.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub kind: u32,
    pub sector: u64,
    /// Length of the data.
    pub len: u32,
}

impl GuestRing {
    /// Returns the offset of a slot's data.
    pub fn data_at(slot: u16) -> u64 {
        SLOTS_AT + SLOT_LEN * u64::from(slot) + DATA_AT
    }

    fn pieces(guest: &Guest, slot: u16, request: Request) -> [Piece; 3] {
        let start = SLOTS_AT + SLOT_LEN * u64::from(slot);
        let Request { kind, sector, len } = request;
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        guest.write(start, &header);
        guest.write(start + 16, &[0xEE]);
        let is_writable = kind == kind::READ || kind == kind::ID;
        [
            Piece { at: start, len: 16, is_writable: false },
            Piece { at: start + DATA_AT, len, is_writable },
            Piece { at: start + 16, len: 1, is_writable: true },
        ]
    }

    /// Offers a request in a free slot, with one descriptor for each of its parts.
    pub fn start(&mut self, guest: &Guest, slot: u16, request: Request) {
        let pieces = Self::pieces(guest, slot, request);
        let head = slot * SLOT_DESCRIPTORS;
        let pieces = pieces.iter().filter(|piece| piece.len > 0);
        let count = u16::try_from(pieces.clone().count()).expect("few pieces");
        for (at, piece) in (0..).zip(pieces) {
            let next = (at + 1 < count).then_some(head + at + 1);
            self.describe(guest, head + at, RawDescriptor::new(*piece, next));
        }
        self.offer(guest, head);
    }

    /// Offers a request with an indirect table. The data is in these pieces.
    pub fn start_indirect(&mut self, guest: &Guest, slot: u16, request: Request, data: &[Piece]) {
        let [header, _, status] = Self::pieces(guest, slot, request);
        let pieces = [&[header], data, &[status]].concat();
        let table = self.describe_table(guest, slot, &pieces);
        self.describe(guest, slot * SLOT_DESCRIPTORS, table);
        self.offer(guest, slot * SLOT_DESCRIPTORS);
    }

    /// Offers a request with an indirect table, whose data is in pieces of at most this length.
    pub fn start_cut(&mut self, guest: &Guest, slot: u16, request: Request, piece_max: u32) {
        let is_writable = request.kind == kind::READ || request.kind == kind::ID;
        let piece = |from: u32| Piece {
            at: Self::data_at(slot) + u64::from(from),
            len: piece_max.min(request.len - from),
            is_writable,
        };
        let starts = (0..request.len).step_by(piece_max as usize);
        let pieces: Vec<_> = starts.map(piece).collect();
        self.start_indirect(guest, slot, request, &pieces);
    }

    /// Returns the status byte of a slot's request.
    pub fn status(guest: &Guest, slot: u16) -> u8 {
        guest.read(SLOTS_AT + SLOT_LEN * u64::from(slot) + 16, 1)[0]
    }

    /// Waits for the next answer. Returns its slot, status and length.
    pub fn finish(&mut self, guest: &Guest) -> (u16, u8, u32) {
        let (head, len) = self.wait(guest);
        let slot = Self::slot(head);
        (slot, Self::status(guest, slot), len)
    }

    /// Returns slot and status of the next answer, if there is one.
    pub fn try_finish(&mut self, guest: &Guest) -> Option<(u16, u8)> {
        let slot = self.answer(guest)?.0 / SLOT_DESCRIPTORS;
        Some((slot, Self::status(guest, slot)))
    }

    /// Runs one request in slot 0. Returns its status and length.
    pub fn run(&mut self, guest: &Guest, request: Request) -> (u8, u32) {
        self.start(guest, 0, request);
        self.kick(guest, 1);
        let (slot, status, len) = self.finish(guest);
        assert_eq!(slot, 0);
        (status, len)
    }

    /// Writes data. Returns the status.
    pub fn put(&mut self, guest: &Guest, sector: u64, data: &[u8]) -> u8 {
        guest.write(Self::data_at(0), data);
        let len = u32::try_from(data.len()).expect("a length");
        self.run(guest, Request { kind: kind::WRITE, sector, len }).0
    }

    /// Reads data.
    pub fn get(&mut self, guest: &Guest, sector: u64, len: usize) -> Vec<u8> {
        let request =
            Request { kind: kind::READ, sector, len: u32::try_from(len).expect("a length") };
        assert_eq!(self.run(guest, request), (0, request.len + 1));
        guest.read(Self::data_at(0), len)
    }

    /// Runs a request with a range. Returns the status.
    pub fn range(&mut self, guest: &Guest, kind: u32, sector: u64, sectors: u32) -> u8 {
        let range = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
        guest.write(Self::data_at(0), &range);
        self.run(guest, Request { kind, sector: 0, len: 16 }).0
    }
}
