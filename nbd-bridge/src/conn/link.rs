//! Socket of a connection, and its operations on the ring.

use rtrs_core::mem::{IoVecs, MemSlice};
use rtrs_core::rt::{
    Fd, Op as RingOp, OpId, PeerEnd, Port, peer_end, unacknowledged_bytes, unread,
};
use rtrs_core::time::{Duration, Instant};

use crate::peer::Peer;

/// Timeout between receives in the middle of a message, and for a send in addition to the time that
/// its bytes take at [`SEND_RATE_MIN`].
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum rate, in bytes per second, at which a client must read a reply.
const SEND_RATE_MIN: u64 = 256 * 1024;
/// Tokens for a connection's sends; the slot number is in the low bits.
pub(crate) const TOKEN_SEND: u64 = 1 << 32;

/// Socket of a connection with the operations in flight on it.
#[derive(Debug)]
pub(super) struct Link {
    fd: Fd,
    /// Slot of the connection, which identifies its operations.
    slot: u64,
    /// Connected over TCP, where a disconnected client looks like one that only shut down its
    /// sending side.
    tcp: bool,
    /// Accepted by a unix socket listener, so the other end is the client itself, not a relay.
    local: bool,
    /// The other end is the kernel, which has no timeouts.
    kernel: bool,
    receiving: Option<OpId>,
    sending: Option<OpId>,
    /// Poll that reports a hangup of the client, even while no receive is running.
    watching: Option<OpId>,
    /// The client has shut down its sending side, so a poll could not report anything else.
    half_closed: bool,
    /// The socket is unusable; no more sends or receives.
    broken: bool,
    /// Time when bytes last arrived, or when the connection began waiting for them.
    heard: Instant,
    /// Start and deadline of the send in progress.
    send_began: Instant,
    send_by: Instant,
}

impl Link {
    pub(super) fn new(fd: Fd, slot: usize, kernel: bool, now: Instant) -> std::io::Result<Self> {
        let address = socket2::SockRef::from(&fd).local_addr()?;
        let tcp = !address.is_unix();
        let local = !tcp && !address.is_unnamed();
        Ok(Self {
            fd,
            slot: slot as u64,
            tcp,
            local,
            kernel,
            receiving: None,
            sending: None,
            watching: None,
            half_closed: false,
            broken: false,
            heard: now,
            send_began: now,
            send_by: now,
        })
    }

    pub(super) fn is_kernel(&self) -> bool {
        self.kernel
    }

    pub(super) fn is_tcp(&self) -> bool {
        self.tcp
    }

    pub(super) fn peer(&self) -> Peer {
        Peer::of(&self.fd)
    }

    /// State of the socket's other end.
    pub(super) fn peer_end(&self) -> PeerEnd {
        peer_end(&self.fd)
    }

    /// Whether the other end, which is gone, has read everything that was sent. False if unknown.
    /// The kernel reports a unix socket that was closed with unread data as ECONNRESET; a socket
    /// that was only shut down keeps the data.
    pub(super) fn has_read_everything(&self) -> bool {
        let error = || socket2::SockRef::from(&self.fd).take_error();
        self.local
            && !self.is_sending()
            && matches!(unacknowledged_bytes(&self.fd), Ok(0))
            && matches!(error(), Ok(None))
    }

    /// Number of bytes that have arrived but have not been received.
    pub(super) fn unread(&self) -> u64 {
        unread(&self.fd).unwrap_or(0) as u64
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    pub(super) fn is_receiving(&self) -> bool {
        self.receiving.is_some()
    }

    pub(super) fn is_sending(&self) -> bool {
        self.sending.is_some()
    }

    /// Whether no operation is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.receiving.is_none() && self.sending.is_none() && self.watching.is_none()
    }

    /// Whether a hangup would go unnoticed while no receive is running.
    pub(super) fn is_unwatched(&self) -> bool {
        self.watching.is_none() && !self.half_closed
    }

    pub(super) fn receive(&mut self, now: Instant, buf: MemSlice, port: &Port) {
        let op = RingOp::Recv { fd: self.fd.clone(), buf };
        self.receiving = Some(port.submit(op, self.slot));
        self.heard = now;
    }

    pub(super) fn send(&mut self, now: Instant, vecs: Box<IoVecs>, port: &Port) {
        let seconds = vecs.remaining() as u64 / SEND_RATE_MIN;
        self.send_began = now;
        self.send_by = now + STALL_TIMEOUT + Duration::from_secs(seconds);
        let op = RingOp::SendMsg { fd: self.fd.clone(), iov: vecs };
        self.sending = Some(port.submit(op, TOKEN_SEND | self.slot));
    }

    /// Asks the ring to report a hangup.
    pub(super) fn watch(&mut self, port: &Port) {
        let watch = RingOp::hangup(self.fd.clone());
        self.watching = Some(port.submit(watch, self.slot));
    }

    pub(super) fn receive_ended(&mut self) {
        self.receiving = None;
    }

    pub(super) fn send_ended(&mut self) {
        self.sending = None;
    }

    pub(super) fn watch_ended(&mut self) {
        self.watching = None;
    }

    /// Records that bytes have arrived.
    pub(super) fn heard_at(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Records that the client has shut down its sending side.
    pub(super) fn set_half_closed(&mut self) {
        self.half_closed = true;
    }

    /// Cancels operations that wait for the client to send something.
    pub(super) fn cancel_receive(&self, port: &Port) {
        for id in [self.receiving, self.watching].into_iter().flatten() {
            port.cancel(id);
        }
    }

    pub(super) fn cancel_send(&self, port: &Port) {
        if let Some(id) = self.sending {
            port.cancel(id);
        }
    }

    /// Makes the socket unusable. Returns false if it was already unusable.
    pub(super) fn break_off(&mut self) -> bool {
        if std::mem::replace(&mut self.broken, true) {
            return false;
        }
        // IOs on the device may keep the connection object alive for a long time.
        if !self.kernel
            && let Err(error) = socket2::SockRef::from(&self.fd).shutdown(std::net::Shutdown::Both)
        {
            tracing::debug!("cannot shut down the socket of an NBD client: {error}");
        }
        true
    }

    /// Time when bytes last arrived, or when the connection began waiting for them.
    pub(super) fn heard(&self) -> Instant {
        self.heard
    }

    /// Returns the deadline for the rest of a message, if a receive is running.
    pub(super) fn receive_by(&self) -> Option<Instant> {
        self.receiving.is_some().then(|| self.heard + STALL_TIMEOUT)
    }

    /// Returns when the send in progress began.
    pub(super) fn send_began(&self) -> Option<Instant> {
        self.sending.is_some().then_some(self.send_began)
    }

    /// Returns the deadline for the send in progress.
    pub(super) fn send_by(&self) -> Option<Instant> {
        self.sending.is_some().then_some(self.send_by)
    }
}
