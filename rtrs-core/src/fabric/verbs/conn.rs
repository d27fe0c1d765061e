//! A connection: its steps through the connection manager, and the reason why it ends.
//!
//! ```text
//! connect:  Resolving > Looking > Routing > Connecting > Open > Draining
//! accept:   Accepting (the reply waits for `flush`) > Answered > Open > Draining
//! ```
//! A failed step returns an [`End`]; the fabric then takes the connection down (ending.rs): it
//! destroys the queue pair and stores the reason in `end`. A disconnect passes through `Draining`,
//! which waits until all posted work has been acknowledged.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use super::options::{Retry, VerbsOptions};
use super::sys::{CmEvent, CmEventKind, CmId, ConnParam, Posted, Qp, Wc};
use crate::fabric::{
    CloseReason, ConnectFailure, FabricEvent, PrivateData, WcStatus, WorkCompletion,
};
use crate::ids::{QpNum, Rkey};
use crate::time::{Duration, Instant};

/// First timeout for the kernel to resolve an address; doubled at most `RESOLVE_DOUBLED_MAX` times.
const RESOLVE_FIRST_MS: i32 = 100;
const RESOLVE_DOUBLED_MAX: u32 = 4;

/// Stage of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waiting for the peer's address.
    Resolving,
    /// Waiting for the state of the port.
    Looking,
    /// Waiting for the route to the peer.
    Routing,
    /// Waiting for the peer's answer.
    Connecting,
    /// The queue pair accepts receives; the next flush sends the reply.
    Accepting,
    /// Waiting for the peer to confirm.
    Answered,
    /// Established.
    Open,
    /// Closing as soon as everything has been sent.
    Draining,
}

/// Limits on outstanding RDMA reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reads {
    /// Reads by the peer, served by this end.
    pub(super) responder: u8,
    /// Reads by this end.
    pub(super) initiator: u8,
}

impl Reads {
    /// Returns the limits that both ends accept.
    pub(super) fn min(self, other: Self) -> Self {
        Self {
            responder: self.responder.min(other.responder),
            initiator: self.initiator.min(other.initiator),
        }
    }
}

/// Reason why a connection is taken down.
pub(super) type End = ConnectFailure;

/// Last report of a connection whose queue pair is being destroyed.
#[derive(Debug)]
pub(super) enum Last {
    /// Report the end and its reason.
    Report(End),
    /// Report nothing: the connection was never started, and its user received an error.
    Nothing,
}

pub(super) fn lost(what: impl Into<String>) -> CloseReason {
    CloseReason::Lost(what.into())
}

/// Result of a step.
#[derive(Debug)]
pub(super) enum Step {
    /// The connection proceeds.
    On,
    /// The connection proceeds with `on_port` once its port has been checked.
    Look,
    /// The connection is established, with the peer's private data.
    Up(PrivateData),
    /// The connection has ended.
    Over(End),
}

/// Addresses of an outgoing connection, and the attempts to resolve the peer's.
#[derive(Debug)]
pub(super) struct Resolver {
    local: Option<SocketAddr>,
    remote: SocketAddr,
    attempts: u32,
}

impl Resolver {
    /// Creates the state before the first attempt; without `local`, the system chooses the source.
    pub(super) fn new(local: Option<SocketAddr>, remote: SocketAddr) -> Self {
        Self { local, remote, attempts: 0 }
    }

    /// Starts resolving the peer's address. The kernel retries only when the neighbor table changes
    /// or when the timeout expires, and misses a change that happens before it starts waiting (on a
    /// link that answers immediately). So the first timeouts are short, and the call is repeated.
    fn resolve(&mut self, id: &CmId) -> io::Result<()> {
        let wait = RESOLVE_FIRST_MS << self.attempts.min(RESOLVE_DOUBLED_MAX);
        self.attempts += 1;
        id.resolve_addr(self.local, self.remote, wait)
    }
}

/// Connection. The queue pair is the first field, so that it is dropped before its identifier.
#[derive(Debug)]
pub(super) struct VerbsConn {
    pub(super) qp: Qp,
    pub(super) id: Arc<CmId>,
    pub(super) name: QpNum,
    /// Number of the domain, for checks of local memory.
    pub(super) pd: u64,
    pub(super) stage: Stage,
    pub(super) reads: Reads,
    /// Local private data, for the connect request or the reply.
    pub(super) private_data: PrivateData,
    /// Time by which the stage must end.
    pub(super) deadline: Option<Instant>,
    /// First failure reported by completions.
    pub(super) cause: Option<CloseReason>,
    /// Waiting for the next flush.
    pub(super) dirty: bool,
    /// Being taken down.
    pub(super) dying: bool,
    /// The connection has ended; its queue pair is being destroyed.
    pub(super) end: Option<Last>,
    /// The peer or the connection manager ended the connection, so there is nothing to wait for.
    pub(super) peer_knows: bool,
    /// Number of entries reserved in the completion queue.
    pub(super) cq_entries: u32,
    /// Resolution of the peer's address; None for an accepted connection.
    pub(super) resolver: Option<Resolver>,
}

impl VerbsConn {
    /// Creates a connection with the identifier `id`; `pd` is the domain's number, `cq_entries` the
    /// number of entries reserved for its queue pair.
    pub(super) fn new(qp: Qp, id: CmId, name: QpNum, pd: u64, cq_entries: u32) -> Self {
        Self {
            qp,
            id: Arc::new(id),
            name,
            pd,
            stage: Stage::Resolving,
            reads: Reads::default(),
            private_data: PrivateData::EMPTY,
            deadline: None,
            cause: None,
            dirty: false,
            dying: false,
            end: None,
            peer_knows: false,
            cq_entries,
            resolver: None,
        }
    }

    /// Starts resolving the peer's address.
    pub(super) fn resolve(&mut self) -> io::Result<()> {
        self.resolver.as_mut().ok_or(io::ErrorKind::InvalidInput)?.resolve(&self.id)
    }

    /// Returns true if the peer could have seen, or can see, this connection as established.
    pub(super) fn was_up(&self) -> bool {
        matches!(self.stage, Stage::Open | Stage::Draining)
    }

    /// Returns true if the peer may regard the connection as established, so that it needs a DREQ.
    pub(super) fn peer_connected(&self) -> bool {
        self.was_up() || self.stage == Stage::Answered
    }

    /// Returns true if receives may be posted.
    pub(super) fn takes_receives(&self) -> bool {
        !self.dying && self.stage != Stage::Draining
    }

    /// Returns true if requests may be posted.
    pub(super) fn takes_requests(&self) -> bool {
        !self.dying && self.stage == Stage::Open
    }

    /// Handles an event of the connection manager.
    pub(super) fn on_event(&mut self, event: &CmEvent, options: &VerbsOptions) -> Step {
        let result = match (event.kind, self.stage) {
            (CmEventKind::AddrResolved, Stage::Resolving) => self.on_address(),
            (CmEventKind::AddrError, Stage::Resolving) if event.status == -libc::ETIMEDOUT => {
                // Retry until the connection's own deadline.
                self.resolve().map(|()| Step::On).map_err(step("resolve the peer's address"))
            }
            (CmEventKind::RouteResolved, Stage::Routing) => self.on_route(options),
            (CmEventKind::Response, Stage::Connecting) => self.on_response(event, options),
            // With iWARP, the kernel has brought the queue pair up.
            (CmEventKind::Established, Stage::Connecting) => {
                self.qp.set_reads(self.reads.initiator > 0);
                self.up(event.private_data)
            }
            (CmEventKind::Established, Stage::Answered) => self.up(PrivateData::EMPTY),
            (CmEventKind::Rejected, Stage::Connecting) => {
                self.peer_knows = true;
                return Step::Over(reject(event));
            }
            (CmEventKind::Disconnected | CmEventKind::TimewaitExit, _) if self.was_up() => {
                self.peer_knows = true;
                return Step::Over(ConnectFailure::Failed(if self.stage == Stage::Draining {
                    CloseReason::Local
                } else if event.kind == CmEventKind::Disconnected {
                    CloseReason::Peer
                } else {
                    CloseReason::Lost("the connection manager gave up".into())
                }));
            }
            (CmEventKind::AddrResolved | CmEventKind::RouteResolved, _)
            | (CmEventKind::Established | CmEventKind::Other | CmEventKind::Request, _) => {
                Ok(Step::On)
            }
            _ => return Step::Over(ConnectFailure::Failed(failure(event))),
        };
        result.unwrap_or_else(|reason| Step::Over(ConnectFailure::Failed(reason)))
    }

    fn up(&mut self, private_data: PrivateData) -> Result<Step, CloseReason> {
        self.stage = Stage::Open;
        self.deadline = None;
        Ok(Step::Up(private_data))
    }

    fn on_address(&mut self) -> Result<Step, CloseReason> {
        let context = self.qp.pd().context();
        if self.id.context_key() != Some(context.key()) {
            let name = context.name();
            return Err(lost(format!("the route to the peer no longer uses {name}")));
        }
        self.stage = Stage::Looking;
        Ok(Step::Look)
    }

    /// Continues once the port has been checked: nothing may be sent over a port that is down
    /// (dreq.rs).
    pub(super) fn on_port(&mut self, now: Instant, down: bool, options: &VerbsOptions) -> Step {
        let result = self.prepare(now, down, options);
        result.unwrap_or_else(|reason| Step::Over(ConnectFailure::Failed(reason)))
    }

    fn prepare(
        &mut self,
        now: Instant,
        down: bool,
        options: &VerbsOptions,
    ) -> Result<Step, CloseReason> {
        if down {
            let (device, number) = (self.qp.pd().context().name(), self.id.port_number());
            return Err(lost(format!("port {number} of {device} is down")));
        }
        let retry = Retry::within(options.path_timeout);
        // Old kernels lack this option; they use the path's timeout.
        let _ = self.id.set_ack_timeout(retry.ack_timeout);
        self.qp.enter_init(&self.id, self.reads.responder > 0).map_err(step("prepare"))?;
        self.qp.post_recvs().map_err(step("post receives"))?;
        self.stage = Stage::Routing;
        let left = self.deadline.map_or(options.startup_timeout, |at| at.since(now));
        self.id.resolve_route(millis(left)).map_err(step("find the route"))?;
        Ok(Step::On)
    }

    fn on_route(&mut self, options: &VerbsOptions) -> Result<Step, CloseReason> {
        self.stage = Stage::Connecting;
        let param = ConnParam {
            private_data: self.private_data.as_bytes(),
            responder_reads: self.reads.responder,
            initiator_reads: self.reads.initiator,
            retry_count: Retry::within(options.path_timeout).count,
            qp_num: self.qp.number(),
        };
        self.id.connect(param).map_err(step("send the request"))?;
        Ok(Step::On)
    }

    fn on_response(
        &mut self,
        event: &CmEvent,
        options: &VerbsOptions,
    ) -> Result<Step, CloseReason> {
        let retry = Retry::within(options.path_timeout);
        self.qp
            .enter_rtr(&self.id, options.min_rnr_timer, None)
            .and_then(|()| self.qp.enter_rts(&self.id, retry.count, retry.ack_timeout, None))
            .and_then(|()| self.id.establish())
            .map_err(step("start"))?;
        self.qp.set_reads(event.initiator_reads > 0 && self.reads.initiator > 0);
        self.up(event.private_data)
    }

    /// Sends the reply of an accepted connection.
    pub(super) fn answer(&mut self, options: &VerbsOptions) -> Result<(), CloseReason> {
        let retry = Retry::within(options.path_timeout);
        self.qp.post_recvs().map_err(step("post receives"))?;
        let Reads { responder, initiator } = self.reads;
        self.qp
            .enter_rtr(&self.id, options.min_rnr_timer, Some(responder))
            .and_then(|()| {
                let (count, timeout) = (retry.count, retry.ack_timeout);
                self.qp.enter_rts(&self.id, count, timeout, Some(initiator))
            })
            .map_err(step("start"))?;
        self.qp.set_reads(initiator > 0);
        let param = ConnParam {
            private_data: self.private_data.as_bytes(),
            responder_reads: responder,
            initiator_reads: initiator,
            retry_count: retry.count,
            qp_num: self.qp.number(),
        };
        self.stage = Stage::Answered;
        self.id.accept(param).map_err(step("send the reply"))
    }

    /// Handles a completion of this queue pair; `report` receives the events for its user. Returns
    /// the resulting end, if any.
    pub(super) fn on_completion(
        &mut self,
        wc: &Wc,
        mut report: impl FnMut(FabricEvent),
    ) -> Option<End> {
        if wc.tag.recv {
            let wr_id = self.qp.recv_done(wc.tag.seq)?;
            if wc.status == WcStatus::Success && self.stage == Stage::Answered {
                // Data arrived before the peer's last handshake message, so the connection is
                // established. If the connection is ending, its identifier is in use elsewhere.
                if !self.dying {
                    let _ = self.id.notify_established();
                }
                self.stage = Stage::Open;
                self.deadline = None;
                report(FabricEvent::Established { qp: self.name, private_data: Box::default() });
            }
            report(FabricEvent::Completion(WorkCompletion {
                byte_len: wc.byte_len,
                imm: wc.imm,
                invalidated: wc.invalidated.map(Rkey),
                ..WorkCompletion::new(self.name, wr_id, wc.arrived, wc.status)
            }));
        } else {
            let name = self.name;
            self.qp.send_done(wc.tag, wc.status, |posted| report(completion(name, posted)));
        }
        if self.cause.is_none() {
            self.cause = cause(wc);
        }
        if wc.status != WcStatus::Success {
            let reason = self.cause.clone().unwrap_or_else(unexplained);
            return Some(ConnectFailure::Failed(reason));
        }
        let drained = self.stage == Stage::Draining && self.qp.sends_open() == 0;
        drained.then_some(ConnectFailure::Failed(CloseReason::Local))
    }

    /// Returns the reason to report once all completions have arrived: they explain more than the
    /// connection manager's reason or the peer's DREQ.
    pub(super) fn explain(&mut self, end: End, was_in_error: bool) -> End {
        let vague = matches!(end, ConnectFailure::Failed(CloseReason::Peer | CloseReason::Lost(_)))
            || end == ConnectFailure::Failed(unexplained());
        match self.cause.take() {
            Some(cause) if vague => ConnectFailure::Failed(cause),
            None if end == ConnectFailure::Failed(CloseReason::Peer) && was_in_error => {
                ConnectFailure::Failed(unexplained())
            }
            _ => end,
        }
    }
}

/// Returns the reason when the device put the queue pair into the error state without a completion
/// error. On a healthy device, the cause is a refused request from the peer.
fn unexplained() -> CloseReason {
    CloseReason::Protocol(
        "a request of the peer was refused (key, bounds, rights or length)".into(),
    )
}

/// Returns the cause that a failed completion implies for the connection.
fn cause(wc: &Wc) -> Option<CloseReason> {
    Some(match (wc.status, wc.tag.recv) {
        (WcStatus::Success | WcStatus::Flushed, _) => return None,
        (WcStatus::RetryExceeded, _) => CloseReason::TimedOut,
        (WcStatus::RemoteAccess | WcStatus::RemoteOperation, _) => {
            CloseReason::PeerTerminated(wc.status.to_string())
        }
        (WcStatus::LocalError, true) => {
            CloseReason::Protocol("a message that does not fit its receive".into())
        }
        (WcStatus::LocalError, false) => {
            CloseReason::Lost("the device refused a local request".into())
        }
    })
}

pub(super) fn completion(qp: QpNum, posted: Posted) -> FabricEvent {
    let Posted { wr_id, op, status } = posted;
    FabricEvent::Completion(WorkCompletion::new(qp, wr_id, op, status))
}

fn step(what: &'static str) -> impl Fn(io::Error) -> CloseReason {
    move |e| lost(format!("cannot {what}: {e}"))
}

/// Converts a timeout for system calls: not shorter than `limit`, which the caller enforces.
fn millis(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis().saturating_add(500)).unwrap_or(i32::MAX)
}

/// Interprets a reject. Its status is a code from IBA table 102, or an errno with iWARP.
fn reject(event: &CmEvent) -> End {
    /// The peer's program refused.
    const CONSUMER: i32 = 28;
    /// No listener at that service ID.
    const INVALID_SERVICE: i32 = 8;
    /// The peer's connection manager did not receive an answer in time.
    const TIMEOUT: i32 = 4;
    let has_data = event.private_data.as_bytes().iter().any(|&byte| byte != 0);
    match event.status {
        CONSUMER if has_data => ConnectFailure::Rejected(Box::new(event.private_data)),
        // Without private data, the peer's program exited or dropped the request.
        CONSUMER => ConnectFailure::Failed(CloseReason::Peer),
        INVALID_SERVICE => ConnectFailure::Failed(lost("nothing listens on that port")),
        TIMEOUT => ConnectFailure::Failed(CloseReason::TimedOut),
        errno if errno < 0 && has_data => ConnectFailure::Rejected(Box::new(event.private_data)),
        errno if errno < 0 => {
            ConnectFailure::Failed(lost(io::Error::from_raw_os_error(-errno).to_string()))
        }
        code => ConnectFailure::Failed(lost(format!(
            "refused by the peer's connection manager, reason {code}"
        ))),
    }
}

/// Interprets an event that ends the connection.
fn failure(event: &CmEvent) -> CloseReason {
    if event.status == -libc::ETIMEDOUT && event.kind != CmEventKind::Unreachable {
        return CloseReason::TimedOut;
    }
    let what = match event.kind {
        CmEventKind::AddrError => "the peer's address cannot be resolved",
        CmEventKind::RouteError => "there is no route to the peer",
        CmEventKind::ConnectError => "the connection could not be set up",
        CmEventKind::Unreachable => "the peer cannot be reached",
        CmEventKind::DeviceRemoval => "the device was removed",
        CmEventKind::AddrChange => "the address moved to another device",
        CmEventKind::TimewaitExit => "the connection manager gave up",
        CmEventKind::Disconnected => "the peer disconnected",
        _ => "the connection manager ended the connection",
    };
    if event.status < 0 {
        let error = io::Error::from_raw_os_error(-event.status);
        return lost(format!("{what}: {error}"));
    }
    lost(what)
}

#[cfg(test)]
mod tests {
    use super::super::sys::WrTag;
    use super::*;
    use crate::fabric::WcOp;

    fn event(kind: CmEventKind, status: i32, private_data: &[u8]) -> CmEvent {
        CmEvent::of(kind, status, PrivateData::new(private_data))
    }

    #[test]
    fn reject_kinds_are_distinguished() {
        let refused = event(CmEventKind::Rejected, 28, b"no");
        assert_eq!(reject(&refused), ConnectFailure::Rejected(Box::new(PrivateData::new(b"no"))));
        let dropped = event(CmEventKind::Rejected, 28, &[0; 148]);
        assert_eq!(reject(&dropped), ConnectFailure::Failed(CloseReason::Peer));
        let unheard = event(CmEventKind::Rejected, 8, &[0; 148]);
        assert_eq!(reject(&unheard), ConnectFailure::Failed(lost("nothing listens on that port")));
        let refused = reject(&event(CmEventKind::Rejected, -libc::ECONNREFUSED, b""));
        let ConnectFailure::Failed(reason) = refused else { panic!("{refused:?}") };
        assert!(reason.to_string().contains("refused"), "{reason}");
    }

    #[test]
    fn failures_name_the_action_and_cause() {
        let timed_out = failure(&event(CmEventKind::AddrError, -libc::ETIMEDOUT, b""));
        assert_eq!(timed_out, CloseReason::TimedOut);
        let reason = failure(&event(CmEventKind::Unreachable, -libc::EHOSTUNREACH, b""));
        assert!(reason.to_string().contains("cannot be reached: No route"), "{reason}");
    }

    #[test]
    fn causes_are_derived_from_completions() {
        let wc = |status, recv| Wc {
            tag: WrTag { qp: QpNum(1), recv, bind: false, seq: 0 },
            status,
            arrived: WcOp::Recv,
            byte_len: 0,
            imm: None,
            invalidated: None,
        };
        assert_eq!(cause(&wc(WcStatus::Flushed, true)), None);
        assert_eq!(cause(&wc(WcStatus::RetryExceeded, false)), Some(CloseReason::TimedOut));
        let refused = cause(&wc(WcStatus::RemoteAccess, false));
        assert_eq!(refused, Some(CloseReason::PeerTerminated("remote access error".into())));
        assert!(matches!(cause(&wc(WcStatus::LocalError, true)), Some(CloseReason::Protocol(_))));
    }
}
