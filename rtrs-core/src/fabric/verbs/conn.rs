//! One connection: its steps through the connection manager, and why it ended.
//!
//! ```text
//! connect:  Resolving > Looking > Routing > Connecting > Open > Draining
//! accept:   Accepting (the reply waits for `flush`) > Answered > Open > Draining
//! ```
//! A step that fails gives an [`End`]; the fabric then takes the connection down (ending.rs): its
//! queue pair is destroyed, and `end` holds the reason. Only `Draining`, which waits until all that
//! was posted has been acknowledged, stands between a disconnect and its end.

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

/// Time the kernel is given to resolve an address at first, doubled that often at most.
const RESOLVE_FIRST_MS: i32 = 100;
const RESOLVE_DOUBLED_MAX: u32 = 4;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waiting for the peer's address.
    Resolving,
    /// Waiting for a look at the port.
    Looking,
    /// Waiting for the route there.
    Routing,
    /// Waiting for the peer's answer.
    Connecting,
    /// The queue pair takes receives; the reply goes out with the next flush.
    Accepting,
    /// Waiting for the peer to confirm.
    Answered,
    /// Up.
    Open,
    /// To be closed as soon as all is sent.
    Draining,
}

/// RDMA reads that may be outstanding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reads {
    /// Of the peer, served by us.
    pub(super) responder: u8,
    /// Of ours.
    pub(super) initiator: u8,
}

impl Reads {
    /// What both agree to.
    pub(super) fn min(self, other: Self) -> Self {
        Self {
            responder: self.responder.min(other.responder),
            initiator: self.initiator.min(other.initiator),
        }
    }
}

/// Why a connection is to be taken down.
pub(super) type End = ConnectFailure;

/// What is said of a connection whose queue pair is being destroyed.
#[derive(Debug)]
pub(super) enum Last {
    /// That it ended, and why.
    Report(End),
    /// Nothing: it had not begun, and its user got an error.
    Nothing,
}

pub(super) fn lost(what: impl Into<String>) -> CloseReason {
    CloseReason::Lost(what.into())
}

/// What came of a step.
#[derive(Debug)]
pub(super) enum Step {
    /// It goes on.
    On,
    /// It goes on with `on_port`, after a look at its port.
    Look,
    /// It is up now, with the peer's private data.
    Up(PrivateData),
    /// It is over.
    Over(End),
}

/// A connection. The queue pair is first: it goes before its identifier.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) qp: Qp,
    pub(super) id: Arc<CmId>,
    pub(super) name: QpNum,
    /// The domain's number, for checks of local memory.
    pub(super) pd: u64,
    pub(super) stage: Stage,
    pub(super) reads: Reads,
    /// Ours, for the connect or the reply.
    pub(super) private_data: PrivateData,
    /// When the stage is over at the latest.
    pub(super) deadline: Option<Instant>,
    /// What the completions say went wrong, first.
    pub(super) cause: Option<CloseReason>,
    /// Waits for the next flush.
    pub(super) dirty: bool,
    /// Is being taken down.
    pub(super) dying: bool,
    /// It ended: its queue pair is being destroyed.
    pub(super) end: Option<Last>,
    /// The peer or the connection manager ended it, so nothing need be waited for.
    pub(super) peer_knows: bool,
    /// Entries reserved in the completion queue.
    pub(super) cq_entries: u32,
    /// Of a connect: from where, to where.
    pub(super) route: Option<(Option<SocketAddr>, SocketAddr)>,
    /// How often the address was resolve_attempts for.
    resolve_attempts: u32,
}

impl Conn {
    /// A connection with the identifier `id`; `pd` is the domain's number, `cq_entries` what was
    /// reserved for its queue pair.
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
            route: None,
            resolve_attempts: 0,
        }
    }

    /// Asks for the peer's address. The kernel looks again only when the neighbor table changes
    /// or when the time it was given is over, and misses a change that comes before it waits (on
    /// a link that answers at once). So it is given a short time, and resolve_attempts again.
    pub(super) fn resolve(&mut self) -> io::Result<()> {
        let (local, remote) = self.route.ok_or(io::ErrorKind::InvalidInput)?;
        let wait = RESOLVE_FIRST_MS << self.resolve_attempts.min(RESOLVE_DOUBLED_MAX);
        self.resolve_attempts += 1;
        self.id.resolve_addr(local, remote, wait)
    }

    /// True when the peer could have seen or can see this connection as established.
    pub(super) fn was_up(&self) -> bool {
        matches!(self.stage, Stage::Open | Stage::Draining)
    }

    /// True when the peer may know the connection as established, so it needs a DREQ.
    pub(super) fn peer_connected(&self) -> bool {
        self.was_up() || self.stage == Stage::Answered
    }

    /// True when receives may be posted.
    pub(super) fn takes_receives(&self) -> bool {
        !self.dying && self.stage != Stage::Draining
    }

    /// True when requests may be posted.
    pub(super) fn takes_requests(&self) -> bool {
        !self.dying && self.stage == Stage::Open
    }

    /// An event of the connection manager.
    pub(super) fn on_event(&mut self, event: &CmEvent, options: &VerbsOptions) -> Step {
        let result = match (event.kind, self.stage) {
            (CmEventKind::AddrResolved, Stage::Resolving) => self.on_address(),
            (CmEventKind::AddrError, Stage::Resolving) if event.status == -libc::ETIMEDOUT => {
                // Until our own deadline.
                self.resolve().map(|()| Step::On).map_err(step("resolve the peer's address"))
            }
            (CmEventKind::RouteResolved, Stage::Routing) => self.on_route(options),
            (CmEventKind::Response, Stage::Connecting) => self.on_response(event, options),
            // iWARP: the kernel has brought the queue pair up.
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
                    CloseReason::Lost("the connection manager gave it up".into())
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
            return Err(lost(format!("the route to the peer does not lead over {name} any more")));
        }
        self.stage = Stage::Looking;
        Ok(Step::Look)
    }

    /// Its port was looked at: over one that is down nothing may be sent (dreq.rs).
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
        // Old kernels lack the option; the timeout is then the path's own.
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

    /// A completion of this queue pair: `report` gets what its posters hear. Gives the end that
    /// follows from it, if one does.
    pub(super) fn on_completion(
        &mut self,
        wc: &Wc,
        mut report: impl FnMut(FabricEvent),
    ) -> Option<End> {
        if wc.tag.recv {
            let wr_id = self.qp.recv_done(wc.tag.seq)?;
            if wc.status == WcStatus::Success && self.stage == Stage::Answered {
                // Data before the peer's last message of the handshake: it is up all the same.
                // The identifier of one that ends is in use elsewhere.
                if !self.dying {
                    let _ = self.id.notify_established();
                }
                self.stage = Stage::Open;
                self.deadline = None;
                report(FabricEvent::Established {
                    qp: self.name,
                    private_data: PrivateData::EMPTY,
                });
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

    /// The reason that is reported, once all completions are in: they explain more than the
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

/// The device ended the queue pair without a completion error. On a healthy device the cause is a
/// refused request of the peer.
fn unexplained() -> CloseReason {
    CloseReason::Protocol(
        "a request of the peer was refused (key, bounds, rights or length)".into(),
    )
}

/// What a failed completion says about the connection.
fn cause(wc: &Wc) -> Option<CloseReason> {
    Some(match (wc.status, wc.tag.recv) {
        (WcStatus::Success | WcStatus::Flushed, _) => return None,
        (WcStatus::RetryExceeded, _) => CloseReason::TimedOut,
        (WcStatus::RemoteAccess | WcStatus::RemoteOperation, _) => {
            CloseReason::PeerTerminated(wc.status.to_string())
        }
        (WcStatus::LocalError, true) => {
            CloseReason::Protocol("a message that does not fit the receive posted for it".into())
        }
        (WcStatus::LocalError, false) => {
            CloseReason::Lost("the device refused a request of ours".into())
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

/// For calls that take a timeout: not shorter than ours, which decides.
fn millis(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis().saturating_add(500)).unwrap_or(i32::MAX)
}

/// What a reject means. Its status is a code of IBA table 102, or an errno with iWARP.
fn reject(event: &CmEvent) -> End {
    /// The peer's program refused.
    const CONSUMER: i32 = 28;
    /// Nobody listens there.
    const INVALID_SERVICE: i32 = 8;
    /// The peer's connection manager did not get its answer in time.
    const TIMEOUT: i32 = 4;
    let has_data = event.private_data.as_bytes().iter().any(|&byte| byte != 0);
    match event.status {
        CONSUMER if has_data => ConnectFailure::Rejected(event.private_data),
        // Without private data: its program ended, or dropped the request.
        CONSUMER => ConnectFailure::Failed(CloseReason::Peer),
        INVALID_SERVICE => ConnectFailure::Failed(lost("nobody listens on that port")),
        TIMEOUT => ConnectFailure::Failed(CloseReason::TimedOut),
        errno if errno < 0 && has_data => ConnectFailure::Rejected(event.private_data),
        errno if errno < 0 => {
            ConnectFailure::Failed(lost(io::Error::from_raw_os_error(-errno).to_string()))
        }
        code => ConnectFailure::Failed(lost(format!(
            "refused by the peer's connection manager, reason {code}"
        ))),
    }
}

/// What an event that ends everything means.
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
        CmEventKind::TimewaitExit => "the connection manager gave it up",
        CmEventKind::Disconnected => "the peer went away",
        _ => "the connection manager ended it",
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
    fn rejects_are_told_apart() {
        let refused = event(CmEventKind::Rejected, 28, b"no");
        assert_eq!(reject(&refused), ConnectFailure::Rejected(PrivateData::new(b"no")));
        let dropped = event(CmEventKind::Rejected, 28, &[0; 148]);
        assert_eq!(reject(&dropped), ConnectFailure::Failed(CloseReason::Peer));
        let nobody = event(CmEventKind::Rejected, 8, &[0; 148]);
        assert_eq!(reject(&nobody), ConnectFailure::Failed(lost("nobody listens on that port")));
        let refused = reject(&event(CmEventKind::Rejected, -libc::ECONNREFUSED, b""));
        let ConnectFailure::Failed(reason) = refused else { panic!("{refused:?}") };
        assert!(reason.to_string().contains("refused"), "{reason}");
    }

    #[test]
    fn failures_say_what_and_why() {
        let timed_out = failure(&event(CmEventKind::AddrError, -libc::ETIMEDOUT, b""));
        assert_eq!(timed_out, CloseReason::TimedOut);
        let reason = failure(&event(CmEventKind::Unreachable, -libc::EHOSTUNREACH, b""));
        assert!(reason.to_string().contains("cannot be reached: No route"), "{reason}");
    }

    #[test]
    fn causes_follow_from_completions() {
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
