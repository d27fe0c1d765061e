//! Ping client: one queue pair of a tool that pings.
//!
//! ```text
//! ping-pong:  Connecting > ReadHalf > WriteHalf > Pausing > ReadHalf ...
//! the others: Connecting > Opening > Flying, Pausing ... > Asking (bandwidth)
//! all end in Closing > Ended
//! ```
//! A step that exceeds the timeout counts as a loss and closes the connection, because on a
//! reliable connection nothing can follow lost data. Call `start` once, then pass the client every
//! event of its queue pair and poll the client at its deadline; take its events after each call.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::event::{PingEvent, PingFailure, rejected};
use super::messages::{
    ALIVE_INTERVAL, Buffer, Messages, RECVS, SAYS_ALIVE, SAYS_DONE, SEND, WR_BIND, WR_DATA,
    WR_MESSAGE, limits, remote,
};
use super::tally::Tally;
use crate::fabric::{
    Access, BindResult, ConnectFailure, ConnectParams, Fabric, FabricError, FabricEvent, PdUse,
    PrivateData, SgeList, WcOp, WcStatus, Window, WorkCompletion, WorkRequest, WrOp,
};
use crate::ids::{QpNum, Rkey};
use crate::time::{Duration, Instant, earliest};
use crate::wire::{PingHello, PingInfo, PingMode, PingReply, PingStatus, fill_pattern};

/// Configuration of a ping client.
#[derive(Clone, Debug)]
pub struct PingClientConfig {
    /// Source address; if None, the system chooses it.
    pub local: Option<IpAddr>,
    /// Address of the server.
    pub remote: SocketAddr,
    /// Parameters of the ping, as sent to the server.
    pub hello: PingHello,
    /// Speak exactly rping's protocol: send none of these parameters.
    pub rping: bool,
    /// Number of rounds or operations; 0 means until `stop`.
    pub count: u64,
    /// Time from the start of a round to the start of the next.
    pub interval: Duration,
    /// Compare the returned data.
    pub validate: bool,
    /// Timeout for connecting and for each step.
    pub timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Connecting,
    /// The server reads the client's data.
    ReadHalf {
        began: Instant,
    },
    /// The server writes the data back.
    WriteHalf {
        round: Instant,
        began: Instant,
        read: Duration,
    },
    /// Waiting for the address of the server's buffer.
    Opening,
    /// Operations are in flight.
    Flying {
        began: Instant,
    },
    /// Waiting for the next round.
    Pausing {
        until: Instant,
    },
    /// Bandwidth: waiting for the server's result.
    Asking,
    Closing,
    Ended,
}

/// Memory accessible to the server, with its current key.
#[derive(Debug)]
struct Shared {
    buffer: Buffer,
    window: Option<Arc<dyn Window>>,
    access: Access,
    key: Rkey,
}

/// Ping client of one queue pair.
#[derive(Debug)]
pub struct PingClient {
    config: PingClientConfig,
    qp: Option<QpNum>,
    state: State,
    parts: Option<Parts>,
    /// Server's buffer, in the one-sided modes.
    theirs: PingInfo,
    events: VecDeque<PingEvent>,
    failure: Option<PingFailure>,
    began: Instant,
    /// Time at which the current step times out.
    late: Instant,
    alive: Instant,
    tally: Tally,
    inflight: u16,
    stopping: bool,
}

#[derive(Debug)]
struct Parts {
    messages: Messages,
    /// Data that the server may read, or the source of the client's writes.
    start: Shared,
    /// Memory that the server may write, or the target of the client's reads.
    sink: Shared,
}

impl PingClient {
    /// Creates a client that has not been started.
    #[must_use]
    pub fn new(config: PingClientConfig) -> Self {
        Self {
            config,
            qp: None,
            state: State::Idle,
            parts: None,
            theirs: PingInfo::GO_AHEAD,
            events: VecDeque::new(),
            failure: None,
            began: Instant::ZERO,
            late: Instant::ZERO,
            alive: Instant::ZERO,
            tally: Tally::default(),
            inflight: 0,
            stopping: false,
        }
    }

    /// Returns the queue pair, while there is one.
    #[must_use]
    pub const fn qp(&self) -> Option<QpNum> {
        self.qp
    }

    /// Returns true if the ping has ended.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// Returns the number of rounds or operations begun.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.tally.begun()
    }

    /// Returns the number of rounds or operations answered successfully.
    #[must_use]
    pub const fn answered(&self) -> u64 {
        self.tally.answered()
    }

    /// Returns the number of the server's own operations in duplex mode, as reported at the end.
    #[must_use]
    pub const fn peer_done(&self) -> u64 {
        self.tally.peer_done()
    }

    /// Returns the time from the first operation to the last known completion.
    #[must_use]
    pub fn flight_time(&self) -> Duration {
        self.tally.flight_time()
    }

    /// Returns the next event.
    pub fn next_event(&mut self) -> Option<PingEvent> {
        self.events.pop_front()
    }

    /// Returns the time by which `poll` must be called even if nothing happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Idle | State::Ended | State::Closing => None,
            State::Pausing { until } => earliest(Some(until), self.alive_at()),
            _ => earliest(Some(self.late), self.alive_at()),
        }
    }

    /// Returns when a keepalive is due. In the one-sided modes, the server does not notice the
    /// client otherwise.
    fn alive_at(&self) -> Option<Instant> {
        let one_sided = self.config.hello.mode != PingMode::PingPong;
        let up = matches!(self.state, State::Flying { .. } | State::Pausing { .. });
        (one_sided && up).then_some(self.alive)
    }

    /// Starts the connection attempt.
    pub fn start(&mut self, now: Instant, fabric: &mut dyn Fabric) {
        self.began = now;
        if let Err(failure) = self.try_start(now, fabric) {
            self.state = State::Ended;
            self.events.push_back(PingEvent::Ended(Err(failure)));
        }
    }

    fn try_start(&mut self, now: Instant, fabric: &mut dyn Fabric) -> Result<(), PingFailure> {
        let PingClientConfig { local, remote, hello, rping, timeout, .. } = self.config;
        if hello.server_invalidate && !fabric.capabilities().remote_invalidate {
            return Err(PingFailure::Local(format!(
                "{}:// has no keys that a peer may invalidate (its memory windows are of type 1); \
                 omit --server-invalidate, or use tcp://",
                fabric.capabilities().scheme
            )));
        }
        let pd = fabric.alloc_pd(PdUse::Connect { local, remote })?;
        let size = hello.size as usize;
        let make = |access: Access| -> Result<Shared, FabricError> {
            let windows = hello.server_invalidate;
            let buffer = Buffer::new(&pd, size, if windows { Access::LOCAL } else { access })?;
            let window = if windows { Some(pd.window(&buffer.registration)?) } else { None };
            let key = buffer.registration.rkey();
            Ok(Shared { buffer, window, access, key })
        };
        let parts = Parts {
            messages: Messages::new(&pd)?,
            start: make(Access::REMOTE_READ)?,
            sink: make(Access::REMOTE_WRITE)?,
        };
        let private_data =
            if rping { PrivateData::EMPTY } else { PrivateData::new(&hello.encode()) };
        let params = ConnectParams {
            local,
            remote,
            private_data,
            limits: limits(hello.depth),
            timeout,
            peer_name: None,
        };
        let qp = fabric.connect(now, &pd, &params)?;
        self.qp = Some(qp);
        self.state = State::Connecting;
        // The provider's own timeout expires first.
        self.late = now + timeout + Duration::from_secs(1);
        parts.messages.post_all(fabric, qp)?;
        self.parts = Some(parts);
        Ok(())
    }

    /// Stops beginning new rounds; the current one may finish.
    pub fn stop(&mut self, now: Instant, fabric: &mut dyn Fabric) {
        self.stopping = true;
        match self.state {
            State::Pausing { .. } => self.next_round(now, fabric),
            State::Idle => self.state = State::Ended,
            State::Connecting => {
                self.fail(now, fabric, PingFailure::Connect("stopped".into()));
            }
            _ => {}
        }
    }

    /// Handles an event of this queue pair.
    pub fn handle_event(&mut self, now: Instant, event: FabricEvent, fabric: &mut dyn Fabric) {
        match event {
            FabricEvent::Established { private_data, .. } => {
                if self.state == State::Connecting {
                    self.on_established(now, &private_data, fabric);
                }
            }
            FabricEvent::ConnectFailed { failure, .. } => {
                let failure = match failure {
                    ConnectFailure::Rejected(data) => rejected(&data, self.config.rping),
                    ConnectFailure::Failed(reason) => PingFailure::Connect(reason.to_string()),
                };
                self.failure.get_or_insert(failure);
                self.end();
            }
            FabricEvent::Closed { reason, .. } => {
                if self.state != State::Closing {
                    self.failure.get_or_insert_with(|| PingFailure::Closed(reason.to_string()));
                }
                self.end();
            }
            FabricEvent::Completion(wc) => self.on_completion(now, &wc, fabric),
            FabricEvent::Request(_) => {}
        }
    }

    /// Advances timers. Returns true if anything happened.
    pub fn poll(&mut self, now: Instant, fabric: &mut dyn Fabric) -> bool {
        let what = match self.state {
            State::Idle | State::Closing | State::Ended => return false,
            State::Pausing { until } if now >= until => {
                self.next_round(now, fabric);
                return true;
            }
            State::Pausing { .. } => return self.send_alive(now, fabric),
            _ if now < self.late => return self.send_alive(now, fabric),
            State::Connecting => "connection",
            State::ReadHalf { .. } => "go-ahead after the server's read",
            State::WriteHalf { .. } => "go-ahead after the server's write",
            State::Opening => "address of the server's buffer",
            State::Flying { .. } => "end of a request",
            State::Asking => "result from the server",
        };
        let after = self.config.timeout;
        self.fail(now, fabric, PingFailure::Silent { what, after });
        true
    }

    fn send_alive(&mut self, now: Instant, fabric: &mut dyn Fabric) -> bool {
        if self.alive_at().is_none_or(|at| now < at) {
            return false;
        }
        self.alive = now + ALIVE_INTERVAL;
        let info = PingInfo { size: SAYS_ALIVE, ..PingInfo::GO_AHEAD };
        if let Err(failure) = self.send(&info, fabric) {
            self.fail(now, fabric, failure);
        }
        true
    }

    fn send(&mut self, info: &PingInfo, fabric: &mut dyn Fabric) -> Result<(), PingFailure> {
        let (Some(parts), Some(qp)) = (&mut self.parts, self.qp) else {
            return Err(PingFailure::Local("not connected".into()));
        };
        Ok(parts.messages.send(fabric, qp, info, SEND)?)
    }

    fn fail(&mut self, now: Instant, fabric: &mut dyn Fabric, failure: PingFailure) {
        self.failure.get_or_insert(failure);
        if let (Some(qp), false) = (self.qp, self.state == State::Closing) {
            self.state = State::Closing;
            fabric.abort(now, qp);
        }
    }

    fn end(&mut self) {
        if self.state != State::Ended {
            self.state = State::Ended;
            self.qp = None;
            self.parts = None;
            self.events.push_back(PingEvent::Ended(self.failure.take().map_or(Ok(()), Err)));
        }
    }

    fn on_established(&mut self, now: Instant, data: &PrivateData, fabric: &mut dyn Fabric) {
        if !self.config.rping {
            match PingReply::decode(data.as_bytes()) {
                Ok(PingReply { status: PingStatus::Good }) => {}
                Ok(PingReply { status }) => {
                    return self.fail(now, fabric, PingFailure::Refused(status));
                }
                Err(_) => {
                    let text = "the server accepted without a ping reply, so it is not an RTRS \
                                server; use --rping for rping -s";
                    return self.fail(now, fabric, PingFailure::NoPing(text.into()));
                }
            }
        }
        self.events.push_back(PingEvent::Connected { after: now - self.began });
        self.alive = now + ALIVE_INTERVAL;
        if self.config.hello.mode == PingMode::PingPong {
            return self.next_round(now, fabric);
        }
        self.state = State::Opening;
        self.late = now + self.config.timeout;
        self.fill(0);
        let info = self.parts.as_ref().map_or(PingInfo::GO_AHEAD, |parts| {
            let writes = self.config.hello.mode.writes();
            let shared = if writes { &parts.sink } else { &parts.start };
            shared.buffer.info()
        });
        if let Err(failure) = self.send(&info, fabric) {
            self.fail(now, fabric, failure);
        }
    }

    /// Fills the start buffer with the pattern of round `n`, and clears the sink.
    fn fill(&self, n: u64) {
        let Some(parts) = &self.parts else { return };
        let mut pattern = vec![0; parts.start.buffer.len];
        fill_pattern(n, &mut pattern);
        parts.start.buffer.all().copy_in(0, &pattern);
        parts.sink.buffer.all().fill(0xff);
    }

    /// Returns true while rounds or operations are left to begin.
    fn has_more(&self) -> bool {
        self.config.count == 0 || self.tally.begun() < self.config.count
    }

    /// Begins the next round, or finishes if none is left.
    fn next_round(&mut self, now: Instant, fabric: &mut dyn Fabric) {
        let bandwidth = self.config.hello.mode.is_bandwidth();
        let next = if !self.has_more() || self.stopping {
            if bandwidth { self.ask(now, fabric) } else { self.finish(now, fabric) }
        } else if self.config.hello.mode == PingMode::PingPong {
            self.begin_pong(now, fabric)
        } else {
            self.fly(now, fabric)
        };
        if let Err(failure) = next {
            self.fail(now, fabric, failure);
        }
    }

    fn finish(&mut self, now: Instant, fabric: &mut dyn Fabric) -> Result<(), PingFailure> {
        if let Some(qp) = self.qp {
            self.state = State::Closing;
            fabric.disconnect(now, qp);
        }
        Ok(())
    }

    fn begin_pong(&mut self, now: Instant, fabric: &mut dyn Fabric) -> Result<(), PingFailure> {
        self.fill(self.tally.begun());
        self.tally.begin();
        self.state = State::ReadHalf { began: now };
        self.late = now + self.config.timeout;
        self.advertise(true, fabric)
    }

    /// Advertises the start or the sink to the server, under a new key if the old one was
    /// invalidated.
    fn advertise(&mut self, start: bool, fabric: &mut dyn Fabric) -> Result<(), PingFailure> {
        let (Some(parts), Some(qp)) = (&mut self.parts, self.qp) else { return Ok(()) };
        let shared = if start { &mut parts.start } else { &mut parts.sink };
        if let Some(window) = &shared.window {
            let id = WR_BIND + u64::from(start);
            let (BindResult::Done(key) | BindResult::Pending(key)) =
                fabric.bind(qp, window, &shared.buffer.all(), shared.access, id)?;
            shared.key = key;
        }
        let info = PingInfo { rkey: shared.key, ..shared.buffer.info() };
        Ok(parts.messages.send(fabric, qp, &info, SEND)?)
    }

    fn on_completion(&mut self, now: Instant, wc: &WorkCompletion, fabric: &mut dyn Fabric) {
        if matches!(self.state, State::Closing | State::Ended) || wc.status == WcStatus::Flushed {
            return;
        }
        let failure = match wc.status {
            WcStatus::Success => match self.on_success(now, wc, fabric) {
                Ok(()) => return,
                Err(failure) => failure,
            },
            WcStatus::LocalError if wc.op == WcOp::Recv => {
                PingFailure::Protocol("a message longer than 64 bytes".into())
            }
            status => PingFailure::Closed(format!("a local request failed: {status}")),
        };
        self.fail(now, fabric, failure);
    }

    fn on_success(
        &mut self,
        now: Instant,
        wc: &WorkCompletion,
        fabric: &mut dyn Fabric,
    ) -> Result<(), PingFailure> {
        match (wc.op, wc.wr_id) {
            (WcOp::Recv, at) if at < RECVS => {
                let (Some(parts), Some(qp)) = (&self.parts, self.qp) else { return Ok(()) };
                let info = parts.messages.take(at, wc.byte_len).map_err(|len| {
                    PingFailure::Protocol(format!("a message of {len} bytes; expected 16"))
                })?;
                parts.messages.post_recv(fabric, qp, at)?;
                self.on_message(now, &info, wc.invalidated, fabric)
            }
            (WcOp::RecvRdmaWithImm, at) if at < RECVS => {
                let (Some(parts), Some(qp)) = (&self.parts, self.qp) else { return Ok(()) };
                parts.messages.post_recv(fabric, qp, at)?;
                self.on_immediate(now, wc.imm, fabric)
            }
            (_, WR_DATA) => self.on_data(now, fabric),
            _ => Ok(()),
        }
    }

    fn on_message(
        &mut self,
        now: Instant,
        info: &PingInfo,
        invalidated: Option<Rkey>,
        fabric: &mut dyn Fabric,
    ) -> Result<(), PingFailure> {
        match self.state {
            State::ReadHalf { began } => {
                self.check_invalidated(true, invalidated)?;
                self.state = State::WriteHalf { round: began, began: now, read: now - began };
                self.late = now + self.config.timeout;
                self.advertise(false, fabric)
            }
            State::WriteHalf { round, began, read } => {
                self.check_invalidated(false, invalidated)?;
                self.round_done(now, round, Some(read), Some(now - began), fabric)
            }
            State::Opening => {
                if info.size != self.config.hello.size {
                    let (found, size) = (info.size, self.config.hello.size);
                    let text = format!("a buffer of {found} bytes; expected {size}");
                    return Err(PingFailure::Protocol(text));
                }
                self.theirs = *info;
                self.tally.start(now);
                self.next_round(now, fabric);
                Ok(())
            }
            State::Asking => {
                self.tally.end(info.addr, now);
                self.finish(now, fabric)
            }
            _ => Err(PingFailure::Protocol("an unexpected message".into())),
        }
    }

    fn check_invalidated(&self, start: bool, invalidated: Option<Rkey>) -> Result<(), PingFailure> {
        let Some(parts) = &self.parts else { return Ok(()) };
        let shared = if start { &parts.start } else { &parts.sink };
        let wanted = self.config.hello.server_invalidate.then_some(shared.key);
        if wanted == invalidated {
            return Ok(());
        }
        let text = match (wanted, invalidated) {
            (Some(key), None) => format!("a go-ahead that does not invalidate key {key}"),
            (_, Some(key)) => format!("an unrequested invalidation of key {key}"),
            (None, None) => return Ok(()),
        };
        Err(PingFailure::Protocol(text))
    }

    /// Compares the returned data with the data sent.
    fn compare(&self, seq: u64) -> Result<(), PingFailure> {
        let Some(parts) = self.parts.as_ref().filter(|_| self.config.validate) else {
            return Ok(());
        };
        let start = parts.start.buffer.all().to_vec();
        let sink = parts.sink.buffer.all().to_vec();
        match start.iter().zip(&sink).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(PingFailure::Mismatch { seq, at, size: self.config.hello.size }),
        }
    }

    fn round_done(
        &mut self,
        now: Instant,
        began: Instant,
        read: Option<Duration>,
        write: Option<Duration>,
        fabric: &mut dyn Fabric,
    ) -> Result<(), PingFailure> {
        let seq = self.tally.begun() - 1;
        self.compare(seq)?;
        self.tally.end_round(began, now);
        let text = self.parts.as_ref().map_or_else(Vec::new, |parts| {
            let mut text = parts.sink.buffer.all().to_vec();
            text.truncate(crate::wire::text_len(&text).saturating_sub(1));
            text
        });
        self.events.push_back(PingEvent::Round { seq, read, write, text });
        let until = began + self.config.interval;
        if until > now && self.has_more() && !self.stopping {
            self.state = State::Pausing { until };
        } else {
            self.next_round(now, fabric);
        }
        Ok(())
    }

    /// Starts as many operations as may be in flight, in the one-sided modes.
    fn fly(&mut self, now: Instant, fabric: &mut dyn Fabric) -> Result<(), PingFailure> {
        let (Some(qp), hello) = (self.qp, self.config.hello) else { return Ok(()) };
        if hello.mode == PingMode::WriteLatency {
            self.fill(self.tally.begun());
        }
        let Some(parts) = &self.parts else { return Ok(()) };
        if hello.mode == PingMode::ReadLatency && self.config.validate {
            parts.sink.buffer.all().fill(0xff);
        }
        #[allow(clippy::cast_possible_truncation, reason = "a number that wraps will do")]
        let imm = (hello.mode == PingMode::WriteLatency).then_some(self.tally.begun() as u32);
        let remote = remote(&self.theirs);
        let (op, source) = match hello.mode.writes() {
            true => (WrOp::RdmaWrite { remote, imm }, &parts.start.buffer),
            false => (WrOp::RdmaRead { remote }, &parts.sink.buffer),
        };
        let depth = if hello.mode.is_bandwidth() { hello.depth } else { 1 };
        let size = hello.size as usize;
        self.state = State::Flying { began: now };
        self.late = now + self.config.timeout;
        while self.inflight < depth && self.has_more() {
            let sges = SgeList::one(source.sge(0, size));
            let wr_id = if imm.is_some() { WR_MESSAGE } else { WR_DATA };
            fabric.post_send(qp, WorkRequest { wr_id, op, sges, signaled: true })?;
            self.inflight += 1;
            self.tally.begin();
        }
        Ok(())
    }

    /// Handles the completion of a read, or of a write in bandwidth mode.
    fn on_data(&mut self, now: Instant, fabric: &mut dyn Fabric) -> Result<(), PingFailure> {
        let State::Flying { began } = self.state else { return Ok(()) };
        self.inflight -= 1;
        if !self.config.hello.mode.is_bandwidth() {
            return self.round_done(now, began, Some(now - began), None, fabric);
        }
        self.tally.answer(now);
        self.late = now + self.config.timeout;
        if self.has_more() && !self.stopping {
            self.fly(now, fabric)
        } else if self.inflight == 0 {
            if self.config.hello.mode == PingMode::ReadBandwidth {
                self.compare(self.tally.begun() - 1)?;
            }
            self.ask(now, fabric)
        } else {
            Ok(())
        }
    }

    fn on_immediate(
        &mut self,
        now: Instant,
        imm: Option<u32>,
        fabric: &mut dyn Fabric,
    ) -> Result<(), PingFailure> {
        let State::Flying { began } = self.state else {
            return Err(PingFailure::Protocol("an unexpected immediate".into()));
        };
        #[allow(clippy::cast_possible_truncation, reason = "as it was sent")]
        let wanted = (self.tally.begun() - 1) as u32;
        if self.config.hello.mode != PingMode::WriteLatency || imm != Some(wanted) {
            let text = format!("immediate {imm:?}; expected {wanted}");
            return Err(PingFailure::Protocol(text));
        }
        self.inflight -= 1;
        self.round_done(now, began, None, Some(now - began), fabric)
    }

    /// Reports, in bandwidth mode, that all operations are done; the answer follows all operations.
    fn ask(&mut self, now: Instant, fabric: &mut dyn Fabric) -> Result<(), PingFailure> {
        self.state = State::Asking;
        self.late = now + self.config.timeout;
        let info = PingInfo { addr: self.tally.answered(), size: SAYS_DONE, ..PingInfo::GO_AHEAD };
        self.send(&info, fabric)
    }
}
