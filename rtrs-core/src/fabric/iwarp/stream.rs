//! One connection: TCP on the ring, then the MPA start-up, then a stream machine until the end.
//!
//! At most one send and one receive run at a time, each owning the slices it touches. A connection
//! ends in steps: posted work (or a Terminate) is sent, FIN is sent, the peer's FIN is awaited
//! until a timeout, running operations are canceled and *their completions awaited*, and only then
//! is all remaining work flushed and `Closed` reported. So after `Closed`, the kernel no longer
//! holds any of the memory.

mod sealed;
mod socket;

use std::io;
use std::net::{IpAddr, SocketAddr};

use self::socket::StreamSocket;
use super::batch::BATCH_SLICES;
use super::env::{Env, token};
use super::listener::IwarpRequest;
use super::mpa::{START_DATA_MAX, START_LEN, StartFrame, StartHeader};
use super::options::IwarpOptions;
use super::qp::QpMachine;
use super::secure::Securing;
use super::tls::TlsStream;
use crate::fabric::{CloseReason, ConnectFailure, ConnectParams, FabricEvent, PrivateData};
use crate::mem::{IoVecs, MemSlice};
use crate::rt::{Completed, Fd, Op};
use crate::time::{Duration, Instant};

/// Time that canceled operations may take before the socket is shut down.
const CANCEL_BOUND: Duration = Duration::from_millis(500);

/// Phases of a connection, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Initiator: TCP connect.
    Connecting,
    /// Initiator: the TLS handshake.
    Securing,
    /// Initiator: sending the request.
    Requesting,
    /// Initiator: receiving the reply's header.
    ReplyHeader,
    /// Initiator: receiving the reply's private data.
    ReplyData(StartHeader),
    /// Responder: accepted; `flush` sends the reply.
    Accepted,
    /// Responder: sending the reply.
    Replying,
    /// Full operation.
    Open,
    /// Local graceful disconnect: posted work is sent, then FIN; waiting for the peer's FIN.
    Draining,
    /// The peer violated the protocol: Terminate and FIN are sent; waiting for the peer's FIN.
    Terminating,
    /// Operations are being canceled.
    Stopping,
    /// The end was reported.
    Gone,
}

/// Connection of the provider `tcp` or `tls`.
#[derive(Debug)]
pub(super) struct IwarpConn {
    pub(super) machine: QpMachine,
    socket: StreamSocket,
    phase: Phase,
    remote: SocketAddr,
    /// Remainder of a start-up frame to send or receive.
    start: Option<MemSlice>,
    request: Option<StartFrame>,
    /// Whether this is an initiator that has not reported `Established`.
    attempting: bool,
    rejected: Option<PrivateData>,
    reason: Option<CloseReason>,
    await_first: bool,
    /// TLS records, once the handshake has ended; None over plain TCP.
    tls: Option<Box<TlsStream>>,
    /// TLS handshake of an outgoing connection, until it ends.
    securing: Option<Box<Securing>>,
    /// Time at which `on_deadline` must be called.
    pub(super) deadline: Option<Instant>,
}

impl IwarpConn {
    fn new(machine: QpMachine, fd: Fd, remote: SocketAddr, phase: Phase) -> Self {
        Self {
            socket: StreamSocket::new(fd, machine.qp),
            machine,
            phase,
            remote,
            start: None,
            request: None,
            attempting: phase == Phase::Connecting,
            rejected: None,
            reason: None,
            await_first: false,
            tls: None,
            securing: None,
            deadline: None,
        }
    }

    /// Starts an outgoing connection on a new socket.
    pub(super) fn connect(
        env: &mut Env<'_>,
        machine: QpMachine,
        fd: Fd,
        params: &ConnectParams,
    ) -> Self {
        let remote = params.remote;
        let mut conn = Self::new(machine, fd, remote, Phase::Connecting);
        let IwarpOptions { crc, plain, .. } = *env.options;
        let request = StartFrame::request(crc, plain, params.private_data);
        conn.request = Some(request);
        conn.deadline = Some(env.now + params.timeout);
        if let Some(tls) = env.tls {
            let name = params.peer_name.as_deref();
            let handshake = tls.endpoint.connect(remote.ip(), name, request.encode());
            conn.securing = Some(Box::new(Securing::new(handshake)));
        }
        conn.socket.connect(env.port, remote);
        conn
    }

    /// Takes over an accepted connection whose request has been read. The reply is sent by `flush`.
    ///
    /// # Errors
    /// Returns the system's error if memory for TLS cannot be allocated.
    pub(super) fn accept(
        env: &mut Env<'_>,
        mut machine: QpMachine,
        request: IwarpRequest,
        remote: SocketAddr,
        private_data: PrivateData,
    ) -> io::Result<Self> {
        let IwarpRequest { fd, frame, session } = request;
        let (reply, terms) = frame.accept(env.options.crc, env.options.plain, private_data);
        machine.open(terms);
        let mut conn = Self::new(machine, Fd::new(fd), remote, Phase::Accepted);
        if let Some(session) = session {
            let tls = TlsStream::new(*session, &[], &conn.machine, BATCH_SLICES)?;
            conn.tls = Some(Box::new(tls));
        }
        conn.await_first = terms.rtr_expected;
        conn.load_start(&reply)?;
        conn.deadline = Some(env.now + env.options.startup_timeout);
        Ok(conn)
    }

    /// Returns true if the connection may be dropped.
    pub(super) fn is_gone(&self) -> bool {
        self.phase == Phase::Gone
    }

    /// Returns the local address.
    pub(super) fn local_ip(&self) -> Option<IpAddr> {
        self.socket.local_ip()
    }

    pub(super) fn peer_has_all(&self) -> Option<bool> {
        self.socket.peer_has_all()
    }

    /// Returns true if work may be posted.
    pub(super) fn takes_work(&self) -> bool {
        !matches!(self.phase, Phase::Draining | Phase::Terminating | Phase::Stopping | Phase::Gone)
    }

    fn load_start(&mut self, frame: &StartFrame) -> io::Result<()> {
        let bytes = frame.encode();
        self.start = match &mut self.tls {
            Some(tls) => tls.seal_start(&bytes)?,
            None => self.machine.start_buffer(true, bytes.len()).inspect(|b| b.copy_in(0, &bytes)),
        };
        Ok(())
    }

    fn send_start(&mut self, env: &Env<'_>) {
        if let Some(buf) = self.start.clone() {
            self.socket.send(env.port, buf);
        }
    }

    /// Receives exactly the next part of a start-up frame, and nothing after it.
    fn recv_start(&mut self, env: &Env<'_>, from: usize, len: usize) {
        self.start = self.machine.start_buffer(false, from + len).and_then(|s| s.slice(from, len));
        self.recv_start_rest(env);
    }

    fn recv_start_rest(&mut self, env: &Env<'_>) {
        if let Some(buf) = self.start.clone() {
            self.socket.recv(env.port, buf);
        }
    }

    /// Sends the reply if a request was accepted, or otherwise posted work.
    pub(super) fn flush(&mut self, env: &mut Env<'_>) {
        if self.phase == Phase::Accepted {
            self.phase = Phase::Replying;
            self.send_start(env);
        } else {
            self.advance(env);
        }
    }

    /// Disconnects gracefully.
    pub(super) fn disconnect(&mut self, env: &mut Env<'_>) {
        match self.phase {
            Phase::Open => {
                self.reason = Some(CloseReason::Local);
                self.phase = Phase::Draining;
                self.deadline = Some(env.now + env.options.close_timeout);
                self.advance(env);
            }
            Phase::Draining | Phase::Terminating | Phase::Stopping | Phase::Gone => {}
            _ => self.stop(env, CloseReason::Local),
        }
    }

    /// Aborts the connection; the peer sees a reset.
    pub(super) fn abort(&mut self, env: &mut Env<'_>) {
        self.socket.reset_on_close();
        self.stop(env, CloseReason::Local);
    }

    /// Cancels running operations; the end is reported when they have completed.
    fn stop(&mut self, env: &mut Env<'_>, reason: CloseReason) {
        if matches!(self.phase, Phase::Stopping | Phase::Gone) {
            return;
        }
        self.reason.get_or_insert(reason);
        self.phase = Phase::Stopping;
        self.deadline = Some(env.now + CANCEL_BOUND);
        self.socket.cancel(env.port);
        self.finish(env);
    }

    /// Reports the end once all operations have completed.
    fn finish(&mut self, env: &mut Env<'_>) {
        if !self.socket.is_idle() {
            return;
        }
        self.phase = Phase::Gone;
        self.deadline = None;
        self.machine.flush_all(env.core);
        let reason = self.reason.take().unwrap_or(CloseReason::Local);
        let qp = self.machine.qp;
        let failure = match self.rejected.take() {
            Some(data) => ConnectFailure::Rejected(Box::new(data)),
            None => ConnectFailure::Failed(reason),
        };
        env.core.report(FabricEvent::ended(qp, !self.attempting, failure));
    }

    /// Handles an expired timer.
    pub(super) fn on_deadline(&mut self, env: &mut Env<'_>) {
        match self.phase {
            Phase::Stopping => {
                self.socket.shut_down();
                self.deadline = Some(env.now + CANCEL_BOUND);
            }
            Phase::Draining | Phase::Terminating => {
                self.socket.reset_on_close();
                self.stop(env, CloseReason::TimedOut);
            }
            Phase::Open if self.socket.is_send_broken() => {
                self.stop(env, CloseReason::Lost("sending failed".into()));
            }
            Phase::Gone => {}
            _ => {
                self.socket.reset_on_close();
                self.stop(env, CloseReason::TimedOut);
            }
        }
    }

    /// Handles the completion of an operation.
    pub(super) fn completed(&mut self, env: &mut Env<'_>, kind: u64, done: Completed) {
        let result = done.count();
        self.socket.completed(kind);
        match kind {
            token::CONNECT => {
                drop(done);
                self.connected(env, result);
            }
            token::SEND => match done.op {
                Op::SendMsg { iov, .. } => self.sent(env, iov, result),
                // Dropped first, because the operation's memory is needed next.
                other => {
                    drop(other);
                    self.start_sent(env, result);
                }
            },
            _ => match done.op {
                Op::RecvMsg { iov, .. } => self.received(env, iov, result),
                other => {
                    drop(other);
                    self.start_received(env, result);
                }
            },
        }
        self.advance(env);
    }

    fn connected(&mut self, env: &mut Env<'_>, result: io::Result<usize>) {
        if self.phase != Phase::Connecting {
            return;
        }
        match result {
            Ok(_) if self.securing.is_some() => {
                self.phase = Phase::Securing;
                self.compute(env, Vec::new());
            }
            Ok(_) => {
                self.phase = Phase::Requesting;
                let loaded = self.request.map_or(Ok(()), |request| self.load_start(&request));
                match loaded {
                    Ok(()) => self.send_start(env),
                    Err(e) => self.stop(env, lost("the request", &e)),
                }
            }
            Err(e) => {
                let reason = lost(&format!("connect to {}", self.remote), &e);
                self.stop(env, reason);
            }
        }
    }

    fn start_sent(&mut self, env: &mut Env<'_>, result: io::Result<usize>) {
        if self.phase == Phase::Securing {
            self.securing_sent(env, result);
            return;
        }
        if !matches!(self.phase, Phase::Requesting | Phase::Replying) {
            return;
        }
        let rest = match (result, &self.start) {
            (Ok(count), Some(buf)) => buf.slice(count, buf.len() - count),
            (Err(e), _) => {
                self.stop(env, lost("sending a start-up frame", &e));
                return;
            }
            (Ok(_), None) => None,
        };
        if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
            self.start = Some(rest);
            self.send_start(env);
        } else if self.phase == Phase::Requesting {
            self.phase = Phase::ReplyHeader;
            let bound = env.now + env.options.startup_timeout;
            self.deadline = Some(self.deadline.map_or(bound, |at| at.min(bound)));
            self.recv_start(env, 0, START_LEN);
        } else {
            self.start = None;
            self.phase = Phase::Open;
            let bound = env.now + env.options.startup_timeout;
            self.deadline = self.await_first.then_some(bound);
            let private_data = Box::default();
            env.core.report(FabricEvent::Established { qp: self.machine.qp, private_data });
        }
    }

    fn start_received(&mut self, env: &mut Env<'_>, result: io::Result<usize>) {
        if self.phase == Phase::Securing {
            self.securing_received(env, result);
            return;
        }
        if !matches!(self.phase, Phase::ReplyHeader | Phase::ReplyData(_)) {
            return;
        }
        let rest = match (result, &self.start) {
            (Ok(count), Some(buf)) if count > 0 => buf.slice(count, buf.len() - count),
            (Err(e), _) => {
                self.stop(env, lost("waiting for the reply", &e));
                return;
            }
            _ => {
                let mut first = [0; 2];
                let got = self.start.as_ref().map_or(0, |rest| rest.offset());
                if got >= 2
                    && let Some(buf) = self.machine.start_buffer(false, 2)
                {
                    buf.copy_out(0, &mut first);
                }
                // [21, 3] begins a TLS alert (RFC 8446 section 5.1), sent in answer to the
                // cleartext request.
                let reason = match first {
                    [21, 3] => CloseReason::Tls(
                        "the server accepts only TLS on this port; use tls://".into(),
                    ),
                    _ => {
                        let what = "the peer closed the connection instead of replying";
                        CloseReason::Lost(what.into())
                    }
                };
                self.stop(env, reason);
                return;
            }
        };
        if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
            self.start = Some(rest);
            self.recv_start_rest(env);
            return;
        }
        match self.phase {
            Phase::ReplyHeader => {
                let mut bytes = [0; START_LEN];
                if let Some(buf) = self.machine.start_buffer(false, START_LEN) {
                    buf.copy_out(0, &mut bytes);
                }
                match StartHeader::decode(&bytes, true) {
                    Ok(header) if header.data_len > 0 => {
                        self.phase = Phase::ReplyData(header);
                        self.recv_start(env, START_LEN, header.data_len);
                    }
                    Ok(header) => self.replied(env, header),
                    Err(e) => self.stop(env, CloseReason::Protocol(e.to_string())),
                }
            }
            Phase::ReplyData(header) => self.replied(env, header),
            _ => {}
        }
    }

    fn replied(&mut self, env: &mut Env<'_>, header: StartHeader) {
        let mut bytes = [0; START_LEN + START_DATA_MAX];
        let len = START_LEN + header.data_len;
        if self.tls.is_some() {
            self.machine.stage.copy_out(self.machine.staged().0, &mut bytes[..len]);
            self.machine.skip_staged(len);
        } else if let Some(buf) = self.machine.start_buffer(false, len) {
            buf.copy_out(0, &mut bytes[..len]);
        }
        self.start = None;
        let reply = StartFrame::decode(header, &bytes[START_LEN..len], true);
        if reply.reject {
            self.rejected = Some(reply.private_data);
            self.stop(env, CloseReason::Peer);
            return;
        }
        let Some(request) = self.request.take() else { return };
        match reply.settle(&request) {
            Ok(terms) => {
                self.machine.open(terms);
                self.phase = Phase::Open;
                self.attempting = false;
                self.deadline = None;
                let private_data = Box::new(reply.private_data);
                env.core.report(FabricEvent::Established { qp: self.machine.qp, private_data });
            }
            Err(what) => self.stop(env, CloseReason::Protocol(what.into())),
        }
    }

    fn sent(&mut self, env: &mut Env<'_>, mut iov: Box<IoVecs>, result: io::Result<usize>) {
        match result {
            Ok(count) => {
                env.core.counters.sends += 1;
                env.core.counters.bytes_sent += count as u64;
                iov.advance(count);
                if iov.is_empty() {
                    iov.clear();
                    self.socket.keep_send_list(iov);
                    self.batch_sent(env);
                } else if self.phase == Phase::Stopping {
                    self.socket.keep_send_list(iov);
                } else {
                    self.socket.send_list(env.port, iov);
                }
            }
            Err(e) => {
                self.socket.keep_send_list(iov);
                if !matches!(self.phase, Phase::Stopping | Phase::Gone) {
                    // The peer may have sent a Terminate before it closed: keep reading briefly.
                    tracing::debug!(qp = self.machine.qp.0, error = %e, "send failed");
                    self.socket.break_sending();
                    self.deadline = Some(env.now + CANCEL_BOUND);
                }
            }
        }
    }

    fn received(&mut self, env: &mut Env<'_>, mut iov: Box<IoVecs>, result: io::Result<usize>) {
        if self.tls.is_some() {
            // Records that are decrypted in place must not be held by anything else.
            iov.clear();
        }
        self.socket.keep_recv_list(iov);
        match result {
            Ok(count) => {
                env.core.counters.receives += 1;
                env.core.counters.bytes_received += count as u64;
                if count == 0 {
                    self.socket.end_receiving();
                }
                if self.phase != Phase::Stopping || count > 0 {
                    match self.tls.is_some() {
                        true => self.open_records(env, count),
                        false => self.machine.rx_done(env.core, count),
                    }
                }
                if self.await_first && self.machine.has_heard() {
                    self.await_first = false;
                    if self.phase == Phase::Open && !self.socket.is_send_broken() {
                        self.deadline = None;
                    }
                }
            }
            Err(e) => {
                if e.raw_os_error() != Some(libc::ECANCELED) {
                    self.stop(env, lost("receiving", &e));
                }
            }
        }
    }

    fn kick_send(&mut self, env: &mut Env<'_>) {
        if self.socket.is_sending() || self.socket.is_send_broken() {
            return;
        }
        if self.tls.is_some() {
            self.kick_send_sealed(env);
            return;
        }
        if !self.machine.has_output() {
            return;
        }
        let Some(mut iov) = self.socket.take_send_list() else { return };
        if self.machine.tx_prepare(&mut iov) > 0 {
            self.socket.send_list(env.port, iov);
        } else {
            self.socket.keep_send_list(iov);
        }
    }

    fn kick_recv(&mut self, env: &Env<'_>) {
        if self.socket.is_receiving() || self.socket.has_peer_ended() {
            return;
        }
        let Some(mut iov) = self.socket.take_recv_list() else { return };
        match &mut self.tls {
            Some(tls) => tls.rx_prepare(&mut self.machine, &mut iov),
            None => self.machine.rx_prepare(&mut iov),
        }
        self.socket.recv_list(env.port, iov);
    }

    fn send_fin(&mut self, env: &mut Env<'_>) {
        let sends = !self.socket.is_send_broken();
        if sends && self.tls.as_mut().is_some_and(|tls| tls.close()) {
            self.kick_send(env);
        } else {
            self.socket.send_fin();
        }
    }

    /// Starts all operations that can run now.
    fn advance(&mut self, env: &mut Env<'_>) {
        match self.phase {
            Phase::Open | Phase::Draining => {
                if let Some(failure) = &self.machine.failure {
                    let reason = failure.reason.clone();
                    if failure.terminate.is_some() || self.has_alert() {
                        let peer = self.socket.peer().map(tracing::field::display);
                        tracing::warn!(peer, qp = self.machine.qp.0, %reason, "terminating");
                        self.reason.get_or_insert(reason);
                        self.phase = Phase::Terminating;
                        self.deadline = Some(env.now + env.options.close_timeout);
                        self.advance(env);
                    } else {
                        self.stop(env, reason);
                    }
                    return;
                }
                self.kick_send(env);
                self.kick_recv(env);
                if self.phase == Phase::Draining
                    && !self.socket.is_sending()
                    && (self.machine.is_drained() || self.socket.is_send_broken())
                {
                    self.send_fin(env);
                }
            }
            Phase::Terminating => {
                self.kick_send(env);
                if !self.socket.is_sending() {
                    self.send_fin(env);
                }
                let ended = self.socket.has_peer_ended() || self.socket.is_send_broken();
                if self.socket.is_fin_sent() && ended {
                    self.stop(env, CloseReason::Local);
                } else {
                    self.kick_recv(env);
                }
            }
            Phase::Stopping => self.finish(env),
            Phase::ReplyHeader | Phase::ReplyData(_) if self.tls.is_some() => {
                match &self.machine.failure {
                    Some(failure) => {
                        let reason = failure.reason.clone();
                        self.stop(env, reason);
                    }
                    None => self.kick_recv(env),
                }
            }
            _ => {}
        }
    }
}

/// Returns the close reason for a system error.
fn lost(what: &str, error: &io::Error) -> CloseReason {
    if error.raw_os_error() == Some(libc::ETIMEDOUT) {
        CloseReason::TimedOut
    } else {
        CloseReason::Lost(format!("{what}: {error}"))
    }
}
