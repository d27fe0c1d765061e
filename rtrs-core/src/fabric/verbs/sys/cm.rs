//! Event channels and identifiers of the RDMA connection manager.
//!
//! Queue pairs are not tied to identifiers (librdmacm could do that): [`super::Qp`] sets their
//! states from the attributes that an identifier provides. This gives control over timers and retry
//! counts, and the only requirement is that independent handles are dropped in the right order.
//! Every event is copied and acknowledged before it is used, so destroying or moving an identifier
//! never waits for its own caller.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_sys::{
    ibv_event_type, ibv_qp_attr, rdma_accept, rdma_ack_cm_event, rdma_bind_addr, rdma_cm_event,
    rdma_cm_event_type as event_type, rdma_cm_id, rdma_conn_param, rdma_connect,
    rdma_create_event_channel, rdma_create_id, rdma_destroy_event_channel, rdma_destroy_id,
    rdma_disconnect, rdma_establish, rdma_event_channel, rdma_get_cm_event, rdma_get_src_port,
    rdma_init_qp_attr, rdma_listen, rdma_migrate_id, rdma_notify, rdma_port_space, rdma_reject,
    rdma_resolve_addr, rdma_resolve_route, rdma_set_option,
};

use super::outcome::{outcome, taken};
use crate::fabric::PrivateData;
use crate::fabric::verbs::reaper::Reaper;

/// `RDMA_OPTION_ID` and its option `ACK_TIMEOUT`, from <rdma/rdma_cma.h>.
const OPTION_LEVEL_ID: libc::c_int = 0;
const OPTION_ACK_TIMEOUT: libc::c_int = 3;

/// Maximum length of private data in a reject (`IB_CM_REJ_PRIVATE_DATA_SIZE`).
const REJECT_DATA_MAX: usize = 148;

/// Descriptor on which the connection manager reports events.
#[derive(Debug)]
pub(crate) struct EventChannel {
    raw: NonNull<rdma_event_channel>,
    /// Destroys the identifiers of this channel.
    reaper: Arc<Reaper>,
}

// SAFETY: librdmacm guards its own state; the channel itself is a descriptor that never changes.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    /// Creates a non-blocking channel. Its identifiers are destroyed by `reaper`.
    pub(crate) fn new(reaper: &Arc<Reaper>) -> io::Result<Arc<Self>> {
        // SAFETY: no arguments; null means an error.
        let raw = NonNull::new(unsafe { rdma_create_event_channel() })
            .ok_or_else(io::Error::last_os_error)?;
        let channel = Self { raw, reaper: Arc::clone(reaper) };
        set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    fn fd(&self) -> libc::c_int {
        // SAFETY: the channel exists until it is dropped.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// Returns a duplicate descriptor of the channel for polling.
    pub(crate) fn pollable(&self) -> io::Result<OwnedFd> {
        duplicate(self.fd())
    }

    /// Returns the next event, acknowledged; None if there is none.
    pub(crate) fn next(self: &Arc<Self>) -> io::Result<Option<CmEvent>> {
        let mut raw: *mut rdma_cm_event = ptr::null_mut();
        // SAFETY: the channel is alive and `raw` receives the pointer.
        let got = unsafe { rdma_get_cm_event(self.raw.as_ptr(), &raw mut raw) };
        if !taken(got)? {
            return Ok(None);
        }
        // SAFETY: on success `raw` points to an event that this thread owns until it is
        // acknowledged; its private data, if any, is `private_data_len` bytes inside it. The
        // identifier of a connect request is new and owned by the receiver.
        let event = unsafe {
            let event = &*raw;
            let kind = CmEventKind::from_raw(event.event);
            let conn = &event.param.conn;
            let private_data = if conn.private_data.is_null() {
                PrivateData::EMPTY
            } else {
                PrivateData::new(std::slice::from_raw_parts(
                    conn.private_data.cast::<u8>(),
                    usize::from(conn.private_data_len),
                ))
            };
            let request = (kind == CmEventKind::Request)
                .then(|| NonNull::new(event.id))
                .flatten()
                .map(|raw| CmId { raw, channel: Arc::clone(self), in_place: false });
            CmEvent {
                id: IdKey(event.id as usize),
                kind,
                status: event.status,
                private_data,
                responder_reads: conn.responder_resources,
                initiator_reads: conn.initiator_depth,
                request,
            }
        };
        // SAFETY: the event came from `rdma_get_cm_event` and is acknowledged once.
        unsafe { rdma_ack_cm_event(raw) };
        Ok(Some(event))
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: every identifier holds its channel, so none are left; all events were
        // acknowledged when they were received.
        unsafe { rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}

/// Kind of a connection manager event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CmEventKind {
    AddrResolved,
    AddrError,
    RouteResolved,
    RouteError,
    Request,
    Response,
    ConnectError,
    Unreachable,
    Rejected,
    Established,
    Disconnected,
    DeviceRemoval,
    AddrChange,
    TimewaitExit,
    Other,
}

impl CmEventKind {
    fn from_raw(raw: event_type::Type) -> Self {
        match raw {
            event_type::RDMA_CM_EVENT_ADDR_RESOLVED => Self::AddrResolved,
            event_type::RDMA_CM_EVENT_ADDR_ERROR => Self::AddrError,
            event_type::RDMA_CM_EVENT_ROUTE_RESOLVED => Self::RouteResolved,
            event_type::RDMA_CM_EVENT_ROUTE_ERROR => Self::RouteError,
            event_type::RDMA_CM_EVENT_CONNECT_REQUEST => Self::Request,
            event_type::RDMA_CM_EVENT_CONNECT_RESPONSE => Self::Response,
            event_type::RDMA_CM_EVENT_CONNECT_ERROR => Self::ConnectError,
            event_type::RDMA_CM_EVENT_UNREACHABLE => Self::Unreachable,
            event_type::RDMA_CM_EVENT_REJECTED => Self::Rejected,
            event_type::RDMA_CM_EVENT_ESTABLISHED => Self::Established,
            event_type::RDMA_CM_EVENT_DISCONNECTED => Self::Disconnected,
            event_type::RDMA_CM_EVENT_DEVICE_REMOVAL => Self::DeviceRemoval,
            event_type::RDMA_CM_EVENT_ADDR_CHANGE => Self::AddrChange,
            event_type::RDMA_CM_EVENT_TIMEWAIT_EXIT => Self::TimewaitExit,
            _ => Self::Other,
        }
    }
}

/// Key of an identifier in events; used only for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct IdKey(usize);

/// Copy of an event.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub(crate) id: IdKey,
    pub(crate) kind: CmEventKind,
    /// Negative errno, or the reason for a reject.
    pub(crate) status: i32,
    pub(crate) private_data: PrivateData,
    /// In a request: number of reads that the peer intends to keep outstanding.
    pub(crate) responder_reads: u8,
    /// In a request: number of reads that the peer would serve.
    pub(crate) initiator_reads: u8,
    /// Identifier of a connect request.
    pub(crate) request: Option<CmId>,
}

#[cfg(test)]
impl CmEvent {
    /// Creates an event as the connection manager would report it.
    pub(crate) fn of(kind: CmEventKind, status: i32, private_data: PrivateData) -> Self {
        let (id, request) = (IdKey(0), None);
        Self { id, kind, status, private_data, responder_reads: 0, initiator_reads: 0, request }
    }
}

/// Parameters of connect and accept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnParam<'a> {
    pub(crate) private_data: &'a [u8],
    pub(crate) responder_reads: u8,
    pub(crate) initiator_reads: u8,
    /// Retry count of a connect, used by both ends.
    pub(crate) retry_count: u8,
    /// The device's number for the local queue pair.
    pub(crate) qp_num: u32,
}

impl ConnParam<'_> {
    fn to_raw(self) -> rdma_conn_param {
        // SAFETY: plain data, for which all zeroes is valid.
        let mut raw: rdma_conn_param = unsafe { std::mem::zeroed() };
        raw.private_data = self.private_data.as_ptr().cast();
        raw.private_data_len = u8::try_from(self.private_data.len()).unwrap_or(u8::MAX);
        raw.responder_resources = self.responder_reads;
        raw.initiator_depth = self.initiator_reads;
        raw.retry_count = self.retry_count;
        // 7: wait indefinitely for a receive, as the kernel's RTRS does.
        raw.rnr_retry_count = 7;
        raw.qp_num = self.qp_num;
        raw
    }
}

/// Identifier of a listener, an attempt or a connection. When dropped, it is destroyed on a reaper
/// thread, because the kernel may wait for pending work.
#[derive(Debug)]
pub(crate) struct CmId {
    raw: NonNull<rdma_cm_id>,
    channel: Arc<EventChannel>,
    /// Whether the identifier is destroyed on the thread that drops it.
    in_place: bool,
}

// SAFETY: librdmacm synchronizes its own state, and an identifier is used through one owner at a
// time.
unsafe impl Send for CmId {}
// SAFETY: calls through a shared reference only read fields that change with events of this
// identifier (taken on one thread), or make a system call. `disconnect` reads such a field on
// another thread: the device, which never changes once an identifier is connected.
unsafe impl Sync for CmId {}

/// Handle of a dropped identifier. The channel is dropped after the identifier.
struct DroppedId {
    raw: NonNull<rdma_cm_id>,
    _channel: Arc<EventChannel>,
}

// SAFETY: this is the only handle to its identifier, and librdmacm is thread-safe.
unsafe impl Send for DroppedId {}

impl DroppedId {
    fn destroy(self) {
        // SAFETY: this is the only handle to the identifier, and no queue pair is tied to it. The
        // call waits for an event that the shard has taken and not yet acknowledged; the shard
        // acknowledges it immediately. An established identifier notifies its peer.
        unsafe { rdma_destroy_id(self.raw.as_ptr()) };
    }
}

impl CmId {
    pub(crate) fn new(channel: &Arc<EventChannel>) -> io::Result<Self> {
        let mut raw: *mut rdma_cm_id = ptr::null_mut();
        // SAFETY: the channel is alive, and `raw` receives the pointer.
        outcome(unsafe {
            rdma_create_id(
                channel.raw.as_ptr(),
                &raw mut raw,
                ptr::null_mut(),
                rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        let raw =
            NonNull::new(raw).ok_or_else(|| io::Error::other("rdma_create_id returned null"))?;
        Ok(Self { raw, channel: Arc::clone(channel), in_place: false })
    }

    /// Destroys the identifier on this thread. When this returns, everything that the identifier
    /// was bound to is free.
    pub(crate) fn destroy(mut self) {
        self.in_place = true;
    }

    pub(crate) fn key(&self) -> IdKey {
        IdKey(self.raw.as_ptr() as usize)
    }

    fn fields(&self) -> &rdma_cm_id {
        // SAFETY: the identifier exists until it is dropped.
        unsafe { self.raw.as_ref() }
    }

    /// Returns the device's context, once the identifier is bound to a device.
    pub(super) fn verbs(&self) -> Option<NonNull<rdma_sys::ibv_context>> {
        NonNull::new(self.fields().verbs)
    }

    /// Returns a key for the device's context, used only for comparison.
    pub(crate) fn context_key(&self) -> Option<usize> {
        self.verbs().map(|raw| raw.as_ptr() as usize)
    }

    pub(crate) fn port_number(&self) -> u8 {
        self.fields().port_num
    }

    pub(crate) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let raw = socket2::SockAddr::from(address);
        // SAFETY: a valid socket address of an IP family, whose length librdmacm knows.
        outcome(unsafe { rdma_bind_addr(self.raw.as_ptr(), raw.as_ptr().cast_mut().cast()) })
    }

    pub(crate) fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        outcome(unsafe { rdma_listen(self.raw.as_ptr(), backlog) })
    }

    /// Returns the port to which the identifier is bound.
    pub(crate) fn local_port(&self) -> u16 {
        // SAFETY: the identifier is alive.
        u16::from_be(unsafe { rdma_get_src_port(self.raw.as_ptr()) })
    }

    pub(crate) fn resolve_addr(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout_ms: i32,
    ) -> io::Result<()> {
        let local = local.map(socket2::SockAddr::from);
        let remote = socket2::SockAddr::from(remote);
        let from = local.as_ref().map_or(ptr::null_mut(), |a| a.as_ptr().cast_mut().cast());
        // SAFETY: valid socket addresses of IP families; null leaves the choice to the kernel.
        outcome(unsafe {
            rdma_resolve_addr(
                self.raw.as_ptr(),
                from,
                remote.as_ptr().cast_mut().cast(),
                timeout_ms,
            )
        })
    }

    pub(crate) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        outcome(unsafe { rdma_resolve_route(self.raw.as_ptr(), timeout_ms) })
    }

    /// Sets the exponent of the local ACK timeout. On RoCE, this must be called before
    /// `resolve_route`, which derives the path's packet lifetime from it.
    pub(crate) fn set_ack_timeout(&self, mut exponent: u8) -> io::Result<()> {
        // SAFETY: the option takes one byte, which is copied during the call.
        outcome(unsafe {
            rdma_set_option(
                self.raw.as_ptr(),
                OPTION_LEVEL_ID,
                OPTION_ACK_TIMEOUT,
                (&raw mut exponent).cast(),
                1,
            )
        })
    }

    pub(crate) fn connect(&self, param: ConnParam<'_>) -> io::Result<()> {
        let mut raw = param.to_raw();
        // SAFETY: the parameters and the private data that they point to outlive the call.
        outcome(unsafe { rdma_connect(self.raw.as_ptr(), &raw mut raw) })
    }

    /// Sends the active side's last handshake message.
    pub(crate) fn establish(&self) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        outcome(unsafe { rdma_establish(self.raw.as_ptr()) })
    }

    pub(crate) fn accept(&self, param: ConnParam<'_>) -> io::Result<()> {
        let mut raw = param.to_raw();
        // SAFETY: as in `connect`.
        outcome(unsafe { rdma_accept(self.raw.as_ptr(), &raw mut raw) })
    }

    pub(crate) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let len = private_data.len().min(REJECT_DATA_MAX);
        #[allow(clippy::cast_possible_truncation, reason = "at most 148")]
        // SAFETY: `len` valid bytes, copied during the call.
        outcome(unsafe { rdma_reject(self.raw.as_ptr(), private_data.as_ptr().cast(), len as u8) })
    }

    /// Sends a DREQ, or answers the peer's.
    pub(crate) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        outcome(unsafe { rdma_disconnect(self.raw.as_ptr()) })
    }

    /// Notifies the connection manager that data arrived before the peer's last handshake message.
    pub(crate) fn notify_established(&self) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        outcome(unsafe { rdma_notify(self.raw.as_ptr(), ibv_event_type::IBV_EVENT_COMM_EST) })
    }

    /// Moves the identifier to a different channel. Waits until the old channel's thread has
    /// acknowledged the identifier's pending events, which it does immediately.
    pub(crate) fn migrate(&mut self, to: &Arc<EventChannel>) -> io::Result<()> {
        if Arc::ptr_eq(&self.channel, to) {
            return Ok(());
        }
        // SAFETY: both channels are alive.
        outcome(unsafe { rdma_migrate_id(self.raw.as_ptr(), to.raw.as_ptr()) })?;
        self.channel = Arc::clone(to);
        Ok(())
    }

    pub(crate) fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: librdmacm keeps a whole sockaddr_storage there; all its views are plain data.
        ip_address(unsafe { &self.fields().route.addr.src_addr_union.src_storage })
    }

    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        ip_address(unsafe { &self.fields().route.addr.dst_addr_union.dst_storage })
    }

    /// Returns the attributes, with their mask, that move this connection's queue pair to `state`.
    pub(super) fn qp_attributes(
        &self,
        state: rdma_sys::ibv_qp_state::Type,
    ) -> io::Result<(ibv_qp_attr, libc::c_int)> {
        /// Bits 21 to 24 are internal to the kernel; librdmacm removes them as well.
        const KERNEL_BITS: libc::c_int = 0x1e0_0000;
        // SAFETY: plain data, for which all zeroes is valid.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = state;
        let mut mask = 0;
        // SAFETY: both are local variables, written during the call.
        outcome(unsafe {
            rdma_init_qp_attr(self.raw.as_ptr(), &raw mut attributes, &raw mut mask)
        })?;
        Ok((attributes, mask & !KERNEL_BITS))
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        let dropped = DroppedId { raw: self.raw, _channel: Arc::clone(&self.channel) };
        if self.in_place {
            dropped.destroy();
        } else {
            self.channel.reaper.take(move || dropped.destroy());
        }
    }
}

fn ip_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let len = match libc::c_int::from(storage.ss_family) {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return None,
    };
    // SAFETY: sockaddr_storage holds either kind of address, is aligned for both, and its family
    // says which.
    let address = unsafe {
        if len == size_of::<libc::sockaddr_in>() {
            let v4 = &*ptr::from_ref(storage).cast::<libc::sockaddr_in>();
            SocketAddr::from((
                u32::from_be(v4.sin_addr.s_addr).to_be_bytes(),
                u16::from_be(v4.sin_port),
            ))
        } else {
            let v6 = &*ptr::from_ref(storage).cast::<libc::sockaddr_in6>();
            SocketAddr::V6(std::net::SocketAddrV6::new(
                v6.sin6_addr.s6_addr.into(),
                u16::from_be(v6.sin6_port),
                v6.sin6_flowinfo,
                v6.sin6_scope_id,
            ))
        }
    };
    Some(match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::from((v4, v6.port())),
            None => address,
        },
        SocketAddr::V4(_) => address,
    })
}

/// Makes a library's descriptor non-blocking.
pub(super) fn set_nonblocking(fd: libc::c_int) -> io::Result<()> {
    // SAFETY: plain descriptor calls without pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    if unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Duplicates a library's descriptor.
pub(super) fn duplicate(fd: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the library keeps the descriptor open while its object lives, which the caller's
    // borrow ensures for the duration of this call.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}
