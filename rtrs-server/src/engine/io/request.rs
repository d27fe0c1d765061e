//! A request on a shard: the states that it waits in, with what each of them needs.
//!
//! A path has one row per permit on each shard that it sends requests to, made when the first one
//! comes; nothing is allocated per IO. A request that does not wait is in no state: it is on its
//! way through `pipeline.rs`. Every change of state goes through the table below, which a test
//! holds against the documented one.

use std::ops::Range;

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::fabric::RemoteMem;
use rtrs_core::ids::Rkey;
use rtrs_core::proto::{Moves, allowed};
use rtrs_core::time::Instant;

use super::sync::Settling;
use super::table::ConnRow;
use crate::engine::device_table::DeviceId;
use crate::engine::ledger::FlushMark;
use crate::export::ExportIndex;

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestState {
    /// No request.
    Free,
    /// Another path's request holds the permit: it waits until that one has ended.
    Deferred,
    /// The peer's key for the chunk is being revoked.
    Revoking,
    /// The control shard works on it: an open, a close or a fence.
    Control,
    /// The disk still has an older write of a closed path to the same bytes.
    Blocked,
    /// The device is full.
    Queued,
    /// The device works on it.
    Submitted,
    /// The device is done; other syncs, or the epoch that is being saved, decide what is answered.
    Settling,
    /// The send queue is full; the answer waits.
    Responding,
}

impl Moves for RequestState {
    const MOVES: &'static [(Self, &'static [Self])] = &[
        (
            Self::Free,
            &[
                Self::Deferred,
                Self::Revoking,
                Self::Control,
                Self::Blocked,
                Self::Queued,
                Self::Submitted,
                Self::Responding,
            ],
        ),
        (
            Self::Deferred,
            &[
                Self::Revoking,
                Self::Control,
                Self::Blocked,
                Self::Queued,
                Self::Submitted,
                Self::Responding,
                Self::Free,
            ],
        ),
        (
            Self::Revoking,
            &[
                Self::Control,
                Self::Blocked,
                Self::Queued,
                Self::Submitted,
                Self::Responding,
                Self::Free,
            ],
        ),
        (Self::Control, &[Self::Responding, Self::Free]),
        (Self::Blocked, &[Self::Queued, Self::Submitted, Self::Responding, Self::Free]),
        (Self::Queued, &[Self::Submitted, Self::Responding, Self::Free]),
        (Self::Submitted, &[Self::Queued, Self::Settling, Self::Responding, Self::Free]),
        (Self::Settling, &[Self::Submitted, Self::Queued, Self::Responding, Self::Free]),
        (Self::Responding, &[Self::Free]),
    ];
}

/// What is known of a request when it arrives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    /// The connection it came over.
    pub(super) conn: ConnRow,
    /// Where in the chunk the RTRS message lies.
    pub(super) offset: u32,
    /// When it arrived.
    pub(super) since: Instant,
    /// It met its original, and was counted for that.
    pub(super) is_copy: bool,
    /// The chunk's new key, once it is bound.
    pub(super) key: Option<Rkey>,
}

/// What the RTRS message says of the answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parsed {
    pub(super) arrival: Arrival,
    /// Bytes of user data before the user header.
    pub(super) data_len: u32,
    /// Where a read's result goes; None for requests without one.
    pub(super) target: Option<RemoteMem>,
    /// The key to invalidate at the peer with the answer.
    pub(super) invalidate: Option<Rkey>,
}

/// How a request is answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply {
    /// 0 for success.
    pub(super) errno: u16,
    /// Of an IO that was valid: what it did, and whether it had to be durable.
    pub(super) io: Option<(IoOp, bool)>,
}

impl Reply {
    /// The answer to a request that is no IO, or is refused.
    pub(super) const fn errno(errno: u16) -> Self {
        Self { errno, io: None }
    }
}

/// What an IO waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    Blocked,
    Queued,
    Submitted,
    Settling(Settling),
}

/// Which step of an IO the device works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IoStep {
    /// A flush before the IO (PREFLUSH).
    PreFlush,
    /// The IO itself, in parts where the device takes less at once.
    Data,
    /// A flush in place of FUA, for a device without FUA.
    PostFlush,
}

/// What remains of an IO.
#[derive(Clone, Copy, Debug)]
pub(super) struct IoProgress {
    pub(super) export: ExportIndex,
    pub(super) device: DeviceId,
    pub(super) op: IoOp,
    pub(super) flags: IoFlags,
    /// The step that the device works on, or works on next.
    pub(super) step: IoStep,
    /// A flush must follow the data.
    pub(super) post_flush: bool,
    /// The first byte on the device.
    pub(super) offset: u64,
    /// Bytes done.
    pub(super) done: u32,
    /// Bytes in all.
    pub(super) len: u32,
    /// Bytes of the part that the device works on.
    pub(super) part: u32,
    /// The export's epoch when it was submitted first.
    pub(super) epoch: Option<u32>,
    /// Of a flush: what it covers.
    pub(super) mark: FlushMark,
    /// Of a sync that is out: its number.
    pub(super) number: Option<u64>,
}

/// True for what changes the content of a device.
pub(super) const fn changes(op: IoOp) -> bool {
    !matches!(op, IoOp::Read | IoOp::Flush)
}

impl IoProgress {
    /// True for what changes the content of the device.
    pub(super) const fn changes(&self) -> bool {
        changes(self.op)
    }

    /// All its bytes on the device.
    pub(super) fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.len)
    }

    /// The bytes that the device may change by the step it works on, if that changes any. What was
    /// done before has happened, and what remains is not begun once the path is closed.
    pub(super) fn may_change(&self) -> Option<Range<u64>> {
        let from = self.offset + u64::from(self.done);
        let changes = self.changes() && self.step == IoStep::Data;
        changes.then(|| from..from + u64::from(self.part))
    }

    /// What the device is to do next is a flush.
    pub(super) fn is_flush(&self) -> bool {
        self.step != IoStep::Data || self.op == IoOp::Flush
    }
}

/// What a request waits for, with all that is needed to go on.
#[derive(Clone, Copy, Debug)]
pub(super) enum State {
    Free,
    /// It has no permit.
    Deferred(Arrival),
    Revoking(Arrival),
    Control(Parsed),
    Io(Parsed, Wait, IoProgress),
    Responding(Parsed, Reply),
}

/// One row: a request that waits, or room for one.
#[derive(Debug)]
pub(super) struct Request {
    state: State,
    /// The last answer of this row reported a loss of this device. The client has that answer when
    /// it uses the permit again on this path.
    pub(super) reported_loss: Option<DeviceId>,
}

impl Request {
    /// An empty row.
    pub(super) const fn new() -> Self {
        Self { state: State::Free, reported_loss: None }
    }

    /// The state with its data.
    pub(super) const fn get(&self) -> &State {
        &self.state
    }

    /// What it waits for.
    pub(super) const fn state(&self) -> RequestState {
        match self.state {
            State::Free => RequestState::Free,
            State::Deferred(_) => RequestState::Deferred,
            State::Revoking(_) => RequestState::Revoking,
            State::Control(_) => RequestState::Control,
            State::Io(_, wait, _) => wait.state(),
            State::Responding(..) => RequestState::Responding,
        }
    }

    /// The IO that it waits with.
    pub(super) const fn io(&self) -> Option<&IoProgress> {
        match &self.state {
            State::Io(_, _, io) => Some(io),
            _ => None,
        }
    }

    /// The same, to go on with.
    pub(super) const fn io_mut(&mut self) -> Option<&mut IoProgress> {
        match &mut self.state {
            State::Io(_, _, io) => Some(io),
            _ => None,
        }
    }

    /// Begins to wait. Panics when the table does not allow it: that is a bug of this crate.
    #[track_caller]
    pub(super) fn go(&mut self, to: State) {
        let from = self.state();
        self.state = to;
        self.moved(from);
    }

    /// An IO begins to wait for something else; nothing happens when it already does.
    #[track_caller]
    pub(super) fn wait(&mut self, to: Wait) {
        let from = self.state();
        if let State::Io(_, wait, _) = &mut self.state
            && from != to.state()
        {
            *wait = to;
            self.moved(from);
        }
    }

    /// The request has ended.
    #[track_caller]
    pub(super) fn end(&mut self) {
        if self.state() != RequestState::Free {
            self.go(State::Free);
        }
    }

    #[track_caller]
    fn moved(&self, from: RequestState) {
        assert!(allowed(from, self.state()), "illegal move from {from:?} to {:?}", self.state());
    }
}

impl Wait {
    const fn state(self) -> RequestState {
        match self {
            Self::Blocked => RequestState::Blocked,
            Self::Queued => RequestState::Queued,
            Self::Submitted => RequestState::Submitted,
            Self::Settling(_) => RequestState::Settling,
        }
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::proto::table;

    use super::RequestState;

    #[test]
    fn what_a_request_waits_for_in_turn() {
        assert_eq!(
            table::<RequestState>(),
            "Free: Deferred, Revoking, Control, Blocked, Queued, Submitted, Responding\n\
             Deferred: Revoking, Control, Blocked, Queued, Submitted, Responding, Free\n\
             Revoking: Control, Blocked, Queued, Submitted, Responding, Free\n\
             Control: Responding, Free\n\
             Blocked: Queued, Submitted, Responding, Free\n\
             Queued: Submitted, Responding, Free\n\
             Submitted: Queued, Settling, Responding, Free\n\
             Settling: Submitted, Queued, Responding, Free\n\
             Responding: Free\n"
        );
    }
}
