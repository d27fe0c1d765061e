//! Devices, protection domains, registrations and windows.
//!
//! librdmacm opens each device once for the process; a [`Context`] keeps it open by holding an
//! identifier that is bound to it. librdmacm never closes a device on its own, not even one that
//! was removed (rdma-core 44, `ucma_put_device`), and drivers that cannot revoke a device from its
//! users (rdma_rxe, siw) delay its removal until no process has it open. So the context of a
//! removed device closes the device's descriptors.

use std::ffi::CStr;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::io::ErrorKind::NotFound;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rdma_sys::{
    ibv_access_flags, ibv_ack_async_event, ibv_alloc_mw, ibv_alloc_pd, ibv_async_event,
    ibv_close_device, ibv_context, ibv_dealloc_mw, ibv_dealloc_pd, ibv_dereg_mr, ibv_device,
    ibv_device_attr, ibv_device_cap_flags, ibv_free_device_list, ibv_get_async_event,
    ibv_get_device_list, ibv_get_device_name, ibv_gid, ibv_mr, ibv_mw, ibv_mw_type,
    ibv_open_device, ibv_pd, ibv_port_attr, ibv_query_device, ibv_query_gid, ibv_query_port,
    ibv_reg_mr, ibv_transport_type,
};

use super::cm::{CmId, EventChannel, duplicate, set_nonblocking};
use super::outcome::{outcome, taken};
use crate::fabric::Access;
use crate::mem::Region;

/// Vendor ID of rdma_rxe, a software device where each post is a system call.
const VENDOR_SOFT_ROCE: u32 = 0x00ff_ffff;

/// Directory in which sysfs lists the devices that can be opened.
const SYSFS: &str = "/sys/class/infiniband_verbs";

/// Limits and capabilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceLimits {
    pub(crate) qp_wr_max: u32,
    pub(crate) cqe_max: u32,
    pub(crate) sge_max: u32,
    /// Maximum number of RDMA reads that a queue pair serves concurrently.
    pub(crate) responder_reads_max: u8,
    /// Maximum number of RDMA reads that a queue pair can have outstanding.
    pub(crate) initiator_reads_max: u8,
    /// The device reports memory windows of type 1. Its provider library may lack the calls for
    /// them: see [`Context::has_windows`].
    pub(crate) windows: bool,
    /// Number of ports, which are numbered from 1.
    pub(crate) ports: u8,
    /// iWARP: no RDMA write with immediate, reads need a writable sink.
    pub(crate) iwarp: bool,
    /// The device is rdma_rxe.
    pub(crate) soft_roce: bool,
}

impl DeviceLimits {
    fn new(raw: &ibv_device_attr, iwarp: bool) -> Self {
        let count = |value: libc::c_int| u32::try_from(value).unwrap_or(0);
        let few = |value: libc::c_int| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
        Self {
            qp_wr_max: count(raw.max_qp_wr),
            cqe_max: count(raw.max_cqe),
            sge_max: count(raw.max_sge),
            responder_reads_max: few(raw.max_qp_rd_atom),
            initiator_reads_max: few(raw.max_qp_init_rd_atom),
            windows: raw.max_mw > 0
                && raw.device_cap_flags & ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW.0 != 0,
            ports: raw.phys_port_cnt,
            iwarp,
            soft_roce: !iwarp && raw.vendor_id == VENDOR_SOFT_ROCE,
        }
    }
}

fn query(context: NonNull<ibv_context>) -> io::Result<DeviceLimits> {
    // SAFETY: plain data, for which all zeroes is valid.
    let mut raw: ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: an open context; the attributes are written during the call.
    outcome(unsafe { ibv_query_device(context.as_ptr(), &raw mut raw) })?;
    // SAFETY: an open context has a valid device pointer for as long as it exists.
    let transport = unsafe { (*(*context.as_ptr()).device).transport_type };
    Ok(DeviceLimits::new(&raw, transport == ibv_transport_type::IBV_TRANSPORT_IWARP))
}

fn name_of(device: *mut ibv_device) -> String {
    // SAFETY: a device's name is a C string inside the device.
    let name = unsafe { CStr::from_ptr(ibv_get_device_name(device)) };
    name.to_string_lossy().into_owned()
}

/// Opens the device called `name`.
fn open(name: &str) -> io::Result<NonNull<ibv_context>> {
    let mut count = 0;
    // SAFETY: `count` is written; null means an error.
    let list = unsafe { ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        return Err(io::Error::last_os_error());
    }
    let mut found = Err(io::Error::from(NotFound));
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` devices.
        let device = unsafe { *list.add(at) };
        if name_of(device) == name {
            // SAFETY: a device from the list; null means an error.
            found = NonNull::new(unsafe { ibv_open_device(device) })
                .ok_or_else(io::Error::last_os_error);
            break;
        }
    }
    // SAFETY: the list came from `ibv_get_device_list`; an open context keeps its device.
    unsafe { ibv_free_device_list(list) };
    found
}

/// Asynchronous event of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AsyncEvent {
    /// A queue pair failed; `qp_num` is the device's number for it.
    QpFailed { qp_num: u32, what: &'static str },
    /// A port went down or came up.
    Port { number: u8, up: bool },
    /// The device failed.
    DeviceFailed,
    /// The device is being removed, or has been removed.
    DeviceRemoved,
    /// A completion queue failed or overran.
    CqFailed,
    /// Any other event, which is ignored.
    Other,
}

/// `ibv_event_type` as plain numbers: a device may report an event that these headers lack.
mod event {
    pub(super) const CQ_ERR: u32 = 0;
    pub(super) const QP_FATAL: u32 = 1;
    pub(super) const QP_REQ_ERR: u32 = 2;
    pub(super) const QP_ACCESS_ERR: u32 = 3;
    pub(super) const DEVICE_FATAL: u32 = 8;
    pub(super) const PORT_ACTIVE: u32 = 9;
    pub(super) const PORT_ERR: u32 = 10;
}

/// Open device.
#[derive(Debug)]
pub(crate) struct Context {
    raw: NonNull<ibv_context>,
    limits: DeviceLimits,
    name: String,
    /// Path of the device in sysfs, and its inode when it was opened.
    sysfs: Option<(PathBuf, u64)>,
    removed: AtomicBool,
    /// Memory windows can be used, as far as is known.
    windows: AtomicBool,
    /// Keeps the device open; the last field, so that it is dropped last.
    held: Held,
}

/// Reference that keeps a device open.
#[derive(Debug)]
enum Held {
    /// librdmacm, for as long as an identifier is bound to the device.
    Bound {
        _id: CmId,
        /// /dev/null, opened in advance so that a device can be released even when no descriptor is
        /// free.
        null: Arc<File>,
    },
    /// Opened directly; closed on drop.
    Opened,
}

// SAFETY: libibverbs synchronizes its own state; contexts may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Returns the device that has this address. None if the address is on this host but belongs to
    /// no RDMA device, or to one that is being removed. `null` is /dev/null.
    pub(crate) fn of_address(
        channel: &Arc<EventChannel>,
        null: &Arc<File>,
        mut address: SocketAddr,
    ) -> io::Result<Option<Self>> {
        let id = CmId::new(channel)?;
        address.set_port(0);
        id.bind(address)?;
        let Some(raw) = id.verbs() else { return Ok(None) };
        let limits = query(raw)?;
        // SAFETY: an open context; its descriptor and device live as long as it does.
        let (fd, name) = unsafe { ((*raw.as_ptr()).async_fd, name_of((*raw.as_ptr()).device)) };
        set_nonblocking(fd)?;
        // SAFETY: the device of an open context; its paths are C strings inside it.
        let sysfs = unsafe { CStr::from_ptr((*(*raw.as_ptr()).device).dev_path.as_ptr()) };
        let sysfs = PathBuf::from(OsStr::from_bytes(sysfs.to_bytes()));
        let sysfs = match sysfs.metadata() {
            Ok(found) => Some((sysfs, found.ino())),
            // The connection manager still knows a device whose driver is waiting for its users.
            Err(error) if error.kind() == NotFound && Path::new(SYSFS).exists() => return Ok(None),
            Err(_) => None,
        };
        let held = Held::Bound { _id: id, null: Arc::clone(null) };
        Ok(Some(Self::held(raw, limits, name, sysfs, held)))
    }

    /// Briefly opens the device called `name`, independently of librdmacm.
    pub(crate) fn of_name(name: &str) -> io::Result<Self> {
        let raw = open(name)?;
        let limits = query(raw).inspect_err(|_| {
            // SAFETY: opened above, and nothing was created in it.
            unsafe { ibv_close_device(raw.as_ptr()) };
        })?;
        Ok(Self::held(raw, limits, name.to_owned(), None, Held::Opened))
    }

    fn held(
        raw: NonNull<ibv_context>,
        limits: DeviceLimits,
        name: String,
        sysfs: Option<(PathBuf, u64)>,
        held: Held,
    ) -> Self {
        let (removed, windows) = (AtomicBool::new(false), AtomicBool::new(limits.windows));
        Self { raw, limits, name, sysfs, removed, windows, held }
    }

    /// Returns true if memory windows of type 1 can be used: the device reports them, and none of
    /// their calls was found to be missing.
    pub(crate) fn has_windows(&self) -> bool {
        self.windows.load(Ordering::Acquire)
    }

    /// Records that windows do not work, whatever the device reports. Returns true if this is new.
    pub(crate) fn set_without_windows(&self) -> bool {
        self.windows.swap(false, Ordering::AcqRel)
    }

    /// Returns true while sysfs lists the device.
    pub(crate) fn is_present(&self) -> bool {
        self.sysfs.as_ref().is_none_or(|(path, ino)| {
            path.metadata().map_or_else(|e| e.kind() != NotFound, |found| found.ino() == *ino)
        })
    }

    /// Records that the device is being removed: the context closes the device's descriptors when
    /// it is no longer used.
    pub(crate) fn set_removed(&self) {
        self.removed.store(true, Ordering::Release);
    }

    /// Returns true after [`Self::set_removed`].
    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    pub(crate) fn key(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    /// Returns the attributes of a port.
    pub(super) fn port(&self, number: u8) -> io::Result<ibv_port_attr> {
        // SAFETY: plain data, for which all zeroes is valid.
        let mut attributes: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context; the call writes only the part of the structure that the first
        // version of the library defined.
        outcome(unsafe { ibv_query_port(self.raw(), number, (&raw mut attributes).cast()) })?;
        Ok(attributes)
    }

    /// Returns a global identifier of a port, or None if that entry of its table is not set.
    pub(super) fn gid(&self, port: u8, at: u8) -> Option<ibv_gid> {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: an open context; the identifier is written during the call.
        let code = unsafe { ibv_query_gid(self.raw(), port, at.into(), &raw mut gid) };
        // SAFETY: both views of the union are plain bytes. The last eight are the interface ID.
        let set = code == 0 && unsafe { gid.raw[8..] != [0; 8] };
        set.then_some(gid)
    }

    /// Returns a descriptor that is readable when the device has an event to report.
    pub(crate) fn async_pollable(&self) -> io::Result<OwnedFd> {
        // SAFETY: an open context.
        duplicate(unsafe { (*self.raw.as_ptr()).async_fd })
    }

    /// Returns the next event, already acknowledged, or None if there is none.
    pub(crate) fn next_async(&self) -> io::Result<Option<AsyncEvent>> {
        let mut raw = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: an open context, whose descriptor does not block; `raw` is written on success.
        let got = unsafe { ibv_get_async_event(self.raw.as_ptr(), raw.as_mut_ptr()) };
        if !taken(got)? {
            return Ok(None);
        }
        let pointer = raw.as_mut_ptr();
        // SAFETY: the event was filled in. Its type is read as a number, because it may be one that
        // the Rust enum lacks; the element is read as the type says, and a queue pair it names
        // lives until the event is acknowledged.
        let event = unsafe {
            let kind = (&raw const (*pointer).event_type).cast::<u32>().read();
            let element = &raw const (*pointer).element;
            match kind {
                event::QP_FATAL | event::QP_REQ_ERR | event::QP_ACCESS_ERR => {
                    AsyncEvent::QpFailed {
                        qp_num: (*(*element).qp).qp_num,
                        what: match kind {
                            event::QP_REQ_ERR => "an invalid request from the peer",
                            event::QP_ACCESS_ERR => "a forbidden access by the peer",
                            _ => "a failure of the queue pair",
                        },
                    }
                }
                event::PORT_ACTIVE | event::PORT_ERR => AsyncEvent::Port {
                    number: u8::try_from((*element).port_num).unwrap_or(0),
                    up: kind == event::PORT_ACTIVE,
                },
                event::DEVICE_FATAL => AsyncEvent::DeviceFailed,
                event::CQ_ERR => AsyncEvent::CqFailed,
                _ => AsyncEvent::Other,
            }
        };
        // SAFETY: acknowledged once.
        unsafe { ibv_ack_async_event(pointer) };
        Ok(Some(event))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let null = match &self.held {
            Held::Opened => {
                // SAFETY: opened once by `of_name`; everything created in the context held it.
                unsafe { ibv_close_device(self.raw.as_ptr()) };
                return;
            }
            Held::Bound { .. } if !self.is_removed() => return,
            Held::Bound { null, .. } => null,
        };
        // librdmacm keeps the context open until it next looks for devices, and would not notice
        // the removal of the last device. What it keeps open from here on is /dev/null. SAFETY: the
        // context lives as long as the identifier that is bound to it, which is dropped after this;
        // everything created in the context held it, so nothing is left that uses the descriptors.
        // Calls on them fail from here on, except for closing them, which librdmacm does.
        let fds = unsafe { [(*self.raw.as_ptr()).cmd_fd, (*self.raw.as_ptr()).async_fd] };
        for fd in fds {
            // EBUSY and EINTR are temporary.
            for _ in 0..100 {
                // SAFETY: as above.
                if unsafe { libc::dup3(null.as_raw_fd(), fd, libc::O_CLOEXEC) } >= 0 {
                    break;
                }
                let error = io::Error::last_os_error();
                tracing::warn!(%error, device = %self.name, "cannot release a removed device");
                std::thread::yield_now();
            }
        }
    }
}

/// Protection domain of a device.
#[derive(Debug)]
pub(crate) struct Pd {
    raw: NonNull<ibv_pd>,
    /// Number of queue pairs in the domain.
    queue_pairs: AtomicU32,
    context: Arc<Context>,
}

// SAFETY: libibverbs synchronizes its own state; domains may be used from any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(crate) fn new(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: an open context; null means an error.
        let raw = NonNull::new(unsafe { ibv_alloc_pd(context.raw()) })
            .ok_or_else(io::Error::last_os_error)?;
        Ok(Self { raw, queue_pairs: AtomicU32::new(0), context: Arc::clone(context) })
    }

    /// Returns the number of queue pairs created in the domain and not yet destroyed.
    pub(crate) fn queue_pairs(&self) -> u32 {
        self.queue_pairs.load(Ordering::Acquire)
    }

    pub(super) fn add_queue_pair(&self) {
        self.queue_pairs.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that the device has definitely destroyed a queue pair.
    pub(super) fn remove_queue_pair(&self) {
        self.queue_pairs.fetch_sub(1, Ordering::Release);
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: everything created in the domain holds it, so nothing is left in it.
        unsafe { ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// Registered memory.
#[derive(Debug)]
pub(crate) struct Mr {
    raw: NonNull<ibv_mr>,
    region: Arc<Region>,
    pd: Arc<Pd>,
}

// SAFETY: libibverbs synchronizes its own state; the fields read here never change.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

/// Converts access rights to verbs flags.
pub(super) fn access_flags(access: Access) -> libc::c_uint {
    let mut flags = 0;
    for (wanted, flag) in [
        (access.local_write, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        (access.remote_write, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
        (access.remote_read, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
    ] {
        if wanted {
            flags |= flag.0;
        }
    }
    flags
}

impl Mr {
    /// Registers a whole region, and permits window binds if the device has windows.
    pub(crate) fn new(pd: &Arc<Pd>, region: &Arc<Region>, access: Access) -> io::Result<Self> {
        let context = pd.context();
        let mut flags = access_flags(access);
        if access.remote_write {
            // The device refuses a peer's writes where local writes are not permitted.
            flags |= ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        }
        if context.limits.iwarp && access.local_write {
            // The answer to a read is a write by the peer (RFC 5040, 4.5).
            flags |= ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        }
        if context.has_windows() {
            flags |= ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        }
        // SAFETY: the region is mapped for its whole length and held until after the
        // deregistration; peers and the device may change its bytes at any time, which regions are
        // designed for.
        let raw = NonNull::new(unsafe {
            let base = region.device_address(0).cast();
            ibv_reg_mr(pd.raw.as_ptr(), base, region.len(), flags.cast_signed())
        })
        .ok_or_else(io::Error::last_os_error)?;
        Ok(Self { raw, region: Arc::clone(region), pd: Arc::clone(pd) })
    }

    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: the registration exists until it is dropped.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    pub(crate) fn base(&self) -> u64 {
        self.region.device_address(0) as u64
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(super) fn raw(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: windows hold their registration, so none is bound to it.
        let code = unsafe { ibv_dereg_mr(self.raw.as_ptr()) };
        if code != 0 {
            // The device may still access the memory, so it must not be used for anything else.
            tracing::error!(code, device = %self.pd.context.name, "cannot deregister memory");
            std::mem::forget(Arc::clone(&self.region));
        }
    }
}

/// Memory window of type 1, valid on every queue pair of its domain.
#[derive(Debug)]
pub(crate) struct Mw {
    raw: NonNull<ibv_mw>,
    mr: Arc<Mr>,
    key: AtomicU32,
    /// True while a thread changes the window.
    busy: AtomicBool,
    /// A bind failed, so the state of the window's key is unknown.
    broken: AtomicBool,
}

// SAFETY: libibverbs synchronizes its own state; the one field that changes does so under `busy`.
unsafe impl Send for Mw {}
// SAFETY: as above.
unsafe impl Sync for Mw {}

impl Mw {
    pub(crate) fn new(mr: &Arc<Mr>) -> io::Result<Self> {
        // SAFETY: a live domain; None and null are errors.
        let raw = unsafe { ibv_alloc_mw(mr.pd.raw.as_ptr(), ibv_mw_type::IBV_MW_TYPE_1) };
        let raw = raw.and_then(NonNull::new).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: just created.
        let key = AtomicU32::new(unsafe { (*raw.as_ptr()).rkey });
        Ok(Self {
            raw,
            mr: Arc::clone(mr),
            key,
            busy: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        })
    }

    pub(crate) fn key(&self) -> u32 {
        self.key.load(Ordering::Acquire)
    }

    pub(crate) fn mr(&self) -> &Arc<Mr> {
        &self.mr
    }

    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.mr.pd
    }

    pub(crate) fn set_broken(&self) {
        self.broken.store(true, Ordering::Release);
    }

    /// Runs a change with the window's handle and its previous key; `run` returns the new key.
    /// Returns None if another thread is changing the window, which is a bug in the caller, or if
    /// the window is broken.
    pub(super) fn change<E>(
        &self,
        run: impl FnOnce(NonNull<ibv_mw>, u32) -> Result<u32, E>,
    ) -> Option<Result<u32, E>> {
        if self.broken.load(Ordering::Acquire) || self.busy.swap(true, Ordering::Acquire) {
            return None;
        }
        let changed = run(self.raw, self.key());
        if let Ok(key) = changed {
            self.key.store(key, Ordering::Release);
        }
        self.busy.store(false, Ordering::Release);
        Some(changed)
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: this is the only handle to the window, and its registration still exists.
        let code = unsafe { ibv_dealloc_mw(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(code, device = %self.mr.pd.context.name, "cannot free a window");
            std::mem::forget(Arc::clone(&self.mr));
        }
    }
}
