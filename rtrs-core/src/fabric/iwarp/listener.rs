//! Listening sockets and half-open connections: accepted by TCP, with the request not yet read.
//!
//! A half-open connection costs a descriptor and one small buffer from a fixed pool. There are at
//! most `half_open_max`; if there is another, or descriptors run out, the oldest connection of the
//! source with the most connections is closed (`proto/quota.rs`). Each connection has
//! `startup_timeout` to send its request. The request is read in two exact steps, so no byte after
//! it is consumed and another shard can take over the bare socket.

mod greeting;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::OwnedFd;

use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, TcpKeepalive, Type};

use super::env::{Env, token};
use super::mpa::{START_DATA_MAX, START_LEN, StartFrame, StartHeader};
use super::options::IwarpOptions;
use super::secure::{GREETING_BUFFER, Greeting};
use super::tls::seal_once;
use crate::fabric::{ConnRequest, FabricError, FabricEvent, PrivateData, ProofError};
use crate::log_limit::LogLimit;
use crate::mem::Pool;
use crate::proto::quota::{Quota, Source};
use crate::rt::{Completed, Fd, Op, OpId, Port};
use crate::time::{Duration, Instant, earliest};
use crate::tls::Session;

/// Buffers in addition to `half_open_max`, for connections that are being closed.
const SPARE_BUFFERS: u32 = 64;
/// Idle time of a connection after which the system sends keepalive probes: less than the time for
/// which firewalls and NAT remember an idle connection.
const PROBE_AFTER: Duration = Duration::from_secs(60);
/// Interval between keepalive probes.
const PROBE_EVERY: Duration = Duration::from_secs(15);
/// Number of unanswered probes that close a connection. A host may be suspended for a while.
const PROBES_MAX: u32 = 8;
/// Pause after an accept that failed for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Pause after a half-open connection was closed to free a descriptor.
const SHORT_PAUSE: Duration = Duration::from_millis(1);

/// Provider state of a [`ConnRequest`].
#[derive(Debug)]
pub(super) struct IwarpRequest {
    pub(super) fd: OwnedFd,
    pub(super) frame: StartFrame,
    /// TLS session; None over plain TCP.
    pub(super) session: Option<Box<Session>>,
}

#[derive(Debug)]
struct Listener {
    fd: Fd,
    accept: Option<OpId>,
    retry_at: Option<Instant>,
    closing: bool,
    /// Whether the service manager holds the socket too.
    is_passed: bool,
}

#[derive(Debug)]
pub(super) struct HalfOpen {
    pub(super) fd: Fd,
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
    pub(super) buffer: u32,
    /// Bytes of the frame received so far; `want` is the number expected.
    got: usize,
    want: usize,
    header: Option<StartHeader>,
    deadline: Instant,
    pub(super) op: Option<OpId>,
    /// TLS handshake; None over plain TCP.
    pub(super) greeting: Option<Greeting>,
}

/// Listeners and half-open connections of a shard.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    listeners: BTreeMap<u64, Listener>,
    pub(super) half_open: BTreeMap<u64, HalfOpen>,
    /// Half-open connections by source.
    pub(super) quota: Quota<u64>,
    /// Half-open connections closed to make room, since start.
    crowded_out: u64,
    /// Rate limits for log lines about peers that demand markers, and about invalid requests.
    markers: LogLimit,
    strange: LogLimit,
    /// Rate limit for log lines about a lack of descriptors.
    descriptors: LogLimit,
    /// Peers whose handshakes were refused, until they are reported.
    pub(super) refused: VecDeque<(SocketAddr, ProofError)>,
    /// Canceled connections, whose buffers are released when their operations complete.
    pub(super) doomed: HashMap<u64, HalfOpen>,
    pub(super) pool: Option<Pool>,
    next_id: u64,
}

impl Listeners {
    /// Starts listening on an address, using the service manager's socket for it, if any.
    pub(super) fn listen(
        &mut self,
        env: &Env<'_>,
        address: SocketAddr,
    ) -> Result<SocketAddr, FabricError> {
        let failed = |e| FabricError::system(format!("cannot listen on {address}"), e);
        let passed = env.options.passed_at(address);
        let socket = match passed {
            Some(passed) => passed.socket.try_clone(),
            None => bound_socket(address, env.options.backlog),
        };
        let socket = socket.map_err(failed)?;
        let bound = socket
            .local_addr()
            .map_err(failed)?
            .as_socket()
            .ok_or_else(|| failed(io::Error::other("no address")))?;
        if self.pool.is_none() {
            let count = env.options.half_open_max.saturating_add(SPARE_BUFFERS);
            let len = if env.tls.is_some() { GREETING_BUFFER } else { START_LEN + START_DATA_MAX };
            self.pool = Some(Pool::new(count, len).map_err(failed)?);
        }
        let fd = Fd::new(socket);
        let id = self.fresh_id();
        let is_passed = passed.is_some();
        let mut listener = Listener { fd, accept: None, retry_at: None, closing: false, is_passed };
        listener.accept(env.port, id);
        self.listeners.insert(id, listener);
        Ok(bound)
    }

    fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Stops listening and closes half-open connections.
    pub(super) fn stop(&mut self, port: &Port) {
        self.listeners.retain(|_, listener| {
            listener.closing = true;
            listener.retry_at = None;
            // A pending accept holds the socket; shutting the socket down frees its port
            // immediately. The service manager's socket stays open for the next process.
            if !listener.is_passed {
                let _ = SockRef::from(&listener.fd).shutdown(Shutdown::Both);
            }
            if let Some(id) = listener.accept {
                port.cancel(id);
            }
            listener.accept.is_some()
        });
        while let Some((id, _)) = self.half_open.first_key_value() {
            self.doom(port, *id);
        }
    }

    /// Returns the number of half-open connections.
    pub(super) fn half_open(&self) -> usize {
        self.half_open.len()
    }

    /// Returns the number of half-open connections that were closed to make room.
    pub(super) fn crowded_out(&self) -> u64 {
        self.crowded_out
    }

    /// Records that a session has gained (`known`) or lost a path from this address.
    pub(super) fn know(&mut self, peer: IpAddr, known: bool) {
        match known {
            true => self.quota.know(Source::of(peer)),
            false => self.quota.forget(Source::of(peer)),
        }
    }

    /// Returns the time by which `poll` must be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        // All have the same timeout, so the oldest expires first.
        let half = self.half_open.first_key_value().map(|(_, half)| half.deadline);
        let retry = self.listeners.values().filter_map(|l| l.retry_at).min();
        earliest(half, retry)
    }

    /// Runs timers. Returns true if anything happened.
    pub(super) fn poll(&mut self, env: &Env<'_>) -> bool {
        let mut any = false;
        for (id, listener) in &mut self.listeners {
            if listener.retry_at.is_some_and(|at| at <= env.now) {
                listener.retry_at = None;
                listener.accept(env.port, *id);
                any = true;
            }
        }
        while let Some((id, first)) = self.half_open.first_key_value() {
            if first.deadline > env.now {
                break;
            }
            self.doom(env.port, *id);
            any = true;
        }
        any
    }

    /// Removes a connection that is no longer half-open.
    fn take(&mut self, id: u64) -> Option<HalfOpen> {
        self.quota.remove(id);
        self.half_open.remove(&id)
    }

    /// Closes a half-open connection to make room. Returns false if there is none.
    fn crowd_out(&mut self, port: &Port) -> bool {
        let Some(id) = self.quota.victim() else { return false };
        self.crowded_out += 1;
        self.doom(port, id);
        true
    }

    pub(super) fn doom(&mut self, port: &Port, id: u64) {
        let Some(half) = self.take(id) else { return };
        match half.op {
            Some(op) => {
                port.cancel(op);
                self.doomed.insert(id, half);
            }
            None => self.release(half.buffer),
        }
    }

    pub(super) fn release(&mut self, buffer: u32) {
        if let Some(pool) = &mut self.pool {
            pool.give(buffer);
        }
    }

    /// Handles the completion of an accept.
    pub(super) fn accepted(&mut self, env: &mut Env<'_>, id: u64, done: Completed) {
        let Some(listener) = self.listeners.get_mut(&id) else { return };
        listener.accept = None;
        let fd = done.into_fd();
        if listener.closing {
            self.listeners.remove(&id);
            return;
        }
        match fd {
            Ok(fd) => {
                listener.accept(env.port, id);
                self.admit(env, Fd::new(fd));
            }
            Err(e) => match e.raw_os_error() {
                Some(libc::ECONNABORTED | libc::EINTR | libc::EAGAIN) => {
                    listener.accept(env.port, id);
                }
                // Connections that send nothing must not lock out others.
                Some(libc::EMFILE | libc::ENFILE) if !self.half_open.is_empty() => {
                    listener.retry_at = Some(env.now + SHORT_PAUSE);
                    if let Some(left_out) = self.descriptors.admit(env.now) {
                        tracing::warn!(
                            error = %e, left_out,
                            "cannot accept a connection; closing the oldest one that has sent \
                             nothing; raise the limit of open files"
                        );
                    }
                    self.crowd_out(env.port);
                }
                _ => {
                    listener.retry_at = Some(env.now + ACCEPT_PAUSE);
                    if let Some(left_out) = self.descriptors.admit(env.now) {
                        tracing::warn!(
                            error = %e, left_out,
                            "cannot accept a connection; trying again shortly; if descriptors run \
                             out, raise the limit of open files"
                        );
                    }
                }
            },
        }
    }

    fn admit(&mut self, env: &mut Env<'_>, fd: Fd) {
        let socket = SockRef::from(&fd);
        let address = |a: io::Result<SockAddr>| a.ok().and_then(|a| a.as_socket());
        let (peer, local) = (address(socket.peer_addr()), address(socket.local_addr()));
        let (Some(peer), Some(local)) = (peer, local) else { return };
        if tune(&socket, env.options).is_err() {
            return;
        }
        let Some(buffer) = self.pool.as_mut().and_then(Pool::take) else { return };
        let id = self.fresh_id();
        let deadline = env.now + env.options.startup_timeout;
        let mut half = HalfOpen {
            fd,
            peer,
            local,
            buffer,
            got: 0,
            want: START_LEN,
            header: None,
            deadline,
            op: None,
            greeting: None,
        };
        if let Some(tls) = env.tls {
            let Some(greeting) = Greeting::new(tls) else {
                self.release(buffer);
                return;
            };
            half.greeting = Some(greeting);
        }
        self.receive(env.port, id, &mut half);
        self.half_open.insert(id, half);
        self.quota.add(id, Source::of(peer.ip()));
        // The new connection counts too: if its source has the most, that source loses one.
        while self.quota.total() > env.options.half_open_max && self.crowd_out(env.port) {}
    }

    pub(super) fn receive(&self, port: &Port, id: u64, half: &mut HalfOpen) {
        let whole = self.pool.as_ref().map(|pool| pool.slice(half.buffer));
        if half.greeting.is_some() {
            (half.got, half.want) = (0, GREETING_BUFFER);
        }
        if let Some(buf) = whole.and_then(|s| s.slice(half.got, half.want - half.got)) {
            let op = Op::Recv { fd: half.fd.clone(), buf };
            half.op = Some(port.submit(op, token::of(id, token::HALF_OPEN)));
        }
    }

    /// Returns a half-open connection whose operation has completed, with the number of bytes
    /// moved. None if the connection has ended.
    pub(super) fn take_back(&mut self, id: u64, done: Completed) -> Option<(HalfOpen, usize)> {
        let count = done.count().unwrap_or(0);
        // The completed operation holds the buffer.
        drop(done);
        if let Some(half) = self.doomed.remove(&id) {
            self.release(half.buffer);
            return None;
        }
        let mut half = self.half_open.remove(&id)?;
        half.op = None;
        if count == 0 {
            self.drop_half(id, &half);
            return None;
        }
        Some((half, count))
    }

    /// Releases the resources of a half-open connection.
    pub(super) fn drop_half(&mut self, id: u64, half: &HalfOpen) {
        self.quota.remove(id);
        self.release(half.buffer);
    }

    /// Handles the completion of a receive on a half-open connection.
    pub(super) fn received(&mut self, env: &mut Env<'_>, id: u64, done: Completed) {
        let Some((mut half, count)) = self.take_back(id, done) else { return };
        half.got += count;
        if half.greeting.is_some() {
            self.greet(env, id, half, count);
            return;
        }
        if half.got == half.want && half.header.is_none() {
            let mut bytes = [0; START_LEN];
            self.copy(&half, 0, &mut bytes);
            match StartHeader::decode(&bytes, false) {
                Ok(header) => {
                    half.header = Some(header);
                    half.want += header.data_len;
                }
                Err(e) => {
                    let tls = bytes[0] == 22 && bytes[1] == 3;
                    let hint = if tls { "a TLS client, which needs a tls:// portal" } else { "" };
                    if let Some(left_out) = self.strange.admit(env.now) {
                        let (peer, error) = (half.peer, e);
                        tracing::info!(%peer, %error, hint, left_out, "not a connection request");
                    }
                    self.drop_half(id, &half);
                    return;
                }
            }
        }
        if half.got < half.want {
            self.receive(env.port, id, &mut half);
            self.half_open.insert(id, half);
            return;
        }
        self.quota.remove(id);
        let mut data = [0; START_DATA_MAX];
        let len = half.want - START_LEN;
        self.copy(&half, START_LEN, &mut data[..len]);
        self.release(half.buffer);
        let Some(header) = half.header else { return };
        let frame = StartFrame::decode(header, &data[..len], false);
        self.report(env, half, frame, None);
    }

    /// Reports a complete request.
    pub(super) fn report(
        &mut self,
        env: &mut Env<'_>,
        half: HalfOpen,
        frame: StartFrame,
        session: Option<Box<Session>>,
    ) {
        let Some(fd) = half.fd.into_owned() else { return };
        let identity = session.as_ref().map(|session| session.peer.clone()).unwrap_or_default();
        let request = IwarpRequest { fd, frame, session };
        if frame.markers {
            // RFC 5044 section 7.1.1: an end that cannot insert markers refuses the connection.
            if let Some(left_out) = self.markers.admit(env.now) {
                let peer = half.peer;
                tracing::info!(%peer, left_out, "refused: the peer demands markers");
            }
            request.refuse(&PrivateData::EMPTY);
            return;
        }
        env.core.report(FabricEvent::Request(Box::new(ConnRequest {
            private_data: frame.private_data,
            peer: half.peer,
            local: half.local,
            identity,
            inner: Box::new(request),
        })));
    }

    pub(super) fn copy(&self, half: &HalfOpen, from: usize, to: &mut [u8]) {
        if let Some(pool) = &self.pool {
            pool.slice(half.buffer).copy_out(from, to);
        }
    }
}

impl Listener {
    fn accept(&mut self, port: &Port, id: u64) {
        let op = Op::Accept { fd: self.fd.clone() };
        self.accept = Some(port.submit(op, token::of(id, token::ACCEPT)));
    }
}

impl IwarpRequest {
    /// Sends a refusal and closes. The frame fits in the empty send buffer, so the call does not
    /// block.
    pub(super) fn refuse(self, private_data: &PrivateData) {
        let mut bytes = self.frame.refuse(*private_data).encode();
        if let Some(session) = self.session {
            match seal_once(*session, &bytes) {
                Ok(record) => bytes = record,
                Err(_) => return,
            }
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let _ = SockRef::from(&self.fd).send_with_flags(&bytes, flags);
    }
}

fn bound_socket(address: SocketAddr, backlog: i32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(backlog)?;
    Ok(socket)
}

/// Sets the options common to all stream sockets.
pub(super) fn tune(socket: &SockRef<'_>, options: &IwarpOptions) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if options.user_timeout.is_some() {
        // Linux would drop a connection that has a user timeout after a single lost probe. Clients
        // set such a timeout; the server's probes keep their idle connections alive.
        return socket.set_tcp_user_timeout(options.user_timeout);
    }
    let probes = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_EVERY);
    socket.set_tcp_keepalive(&probes.with_retries(PROBES_MAX))
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn idle_connections_are_probed_unless_a_single_lost_probe_would_end_them() {
        let listener = bound_socket("127.0.0.1:0".parse().unwrap(), 1).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let client = TcpStream::connect(address).unwrap();
        let (server, _) = listener.accept().unwrap();
        tune(&SockRef::from(&server), &IwarpOptions::default()).unwrap();
        assert!(server.keepalive().unwrap() && server.tcp_nodelay().unwrap());
        assert_eq!(server.tcp_keepalive_time().unwrap(), PROBE_AFTER);
        assert_eq!(server.tcp_keepalive_interval().unwrap(), PROBE_EVERY);
        assert_eq!(server.tcp_keepalive_retries().unwrap(), PROBES_MAX);
        let user_timeout = Some(Duration::from_secs(4));
        let client = SockRef::from(&client);
        tune(&client, &IwarpOptions { user_timeout, ..IwarpOptions::default() }).unwrap();
        assert_eq!(client.tcp_user_timeout().unwrap(), user_timeout);
        assert!(!client.keepalive().unwrap());
    }
}
