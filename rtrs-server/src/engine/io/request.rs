//! A request on a shard: its waiting states, with the data of each.
//!
//! A path has one row per permit on each shard that it sends requests to, allocated when the first
//! one arrives; nothing is allocated per IO. A request that does not wait is in no state:
//! `pipeline.rs` is processing it. Every change of state is asserted to be valid.

use rtrs_core::block::IoOp;
use rtrs_core::extents;
use rtrs_core::fabric::RemoteMem;
use rtrs_core::ids::Rkey;
use rtrs_core::mem::MemSlice;
use rtrs_core::time::Instant;

use super::progress::IoProgress;
use super::sync::Settling;
use super::table::ConnRow;
use crate::engine::device_table::DeviceId;

/// Waiting state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestState {
    /// No request.
    Free,
    /// Another path's request holds the permit; this request waits for that one to end.
    Deferred,
    /// The peer's key for the chunk is being revoked.
    Revoking,
    /// The control shard is processing it: an open, a close or a fence.
    Control,
    /// Delayed by the export's rate limits.
    Throttled,
    /// An older write of a closed path to the same bytes has not finished on the disk.
    Blocked,
    /// Another change to a block must end first (`turns.rs`).
    Turn,
    /// The device queue is full.
    Queued,
    /// The device is processing it.
    Submitted,
    /// The device has finished; other syncs, or the epoch that is being saved, decide the answer.
    Settling,
    /// The send queue is full; the answer waits.
    Responding,
}

impl RequestState {
    /// Whether a request may change to that state: mostly in the order above, repeatedly for the
    /// steps of an IO, and from any state to `Free`.
    fn may_become(self, to: Self) -> bool {
        match (self, to) {
            (from, Self::Free) => from != Self::Free,
            (Self::Settling, Self::Queued | Self::Submitted)
            | (Self::Submitted, Self::Queued | Self::Settling) => true,
            (_, Self::Settling) => false,
            (Self::Control, to) => to == Self::Responding,
            (from, to) => from < to,
        }
    }
}

/// Data of a request on arrival.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    /// Connection that the request arrived over.
    pub(super) conn: ConnRow,
    /// Offset of the RTRS message in the chunk.
    pub(super) offset: u32,
    /// Time of arrival.
    pub(super) since: Instant,
    /// Whether the original request was still in flight, so that this one was counted as a replay.
    pub(super) is_copy: bool,
    /// Whether it arrived before the client had authenticated.
    pub(super) unproved: bool,
    /// New key of the chunk, once bound.
    pub(super) key: Option<Rkey>,
}

/// Data of the RTRS message that the answer needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parsed {
    pub(super) arrival: Arrival,
    /// Bytes of user data before the user header.
    pub(super) data_len: u32,
    /// Destination of a read's result; None for other requests.
    pub(super) target: Option<RemoteMem>,
    /// Key to invalidate at the peer with the answer.
    pub(super) invalidate: Option<Rkey>,
}

impl Parsed {
    /// Shortens the data to the part of the chunk that an extent list uses.
    pub(super) fn cut(self, chunk: &MemSlice) -> Self {
        let list = chunk.slice(0, self.data_len as usize);
        let used = list.and_then(|list| u32::try_from(extents::used_len(&list)).ok());
        Self { data_len: used.unwrap_or(self.data_len), ..self }
    }
}

/// Contents of the answer to a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply {
    /// Errno, 0 for success.
    pub(super) errno: u16,
    /// For a valid IO: the operation, and whether it had to be durable.
    pub(super) io: Option<(IoOp, bool)>,
    /// Nanoseconds spent in the device.
    pub(super) backend_ns: u64,
    /// Whether the answer has data although it is an error: the reason for refusing an OPEN.
    pub(super) explained: bool,
}

impl Reply {
    /// Creates the answer to a request that is not an IO or was refused.
    pub(super) const fn errno(errno: u16) -> Self {
        Self { errno, io: None, backend_ns: 0, explained: false }
    }

    /// Creates the answer to a valid IO.
    pub(super) const fn to_io(errno: u16, io: &IoProgress) -> Self {
        let done = Some((io.op, io.flags.fua || io.post_flush));
        Self { io: done, backend_ns: io.device_time.spent_ns(), ..Self::errno(errno) }
    }
}

/// Waiting state of an IO.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    Throttled,
    Blocked,
    Turn,
    Queued,
    Submitted,
    Settling(Settling),
}

/// Waiting state of a request, with the data needed to continue.
#[derive(Clone, Copy, Debug)]
pub(super) enum State {
    Free,
    /// The request has no permit.
    Deferred(Arrival),
    Revoking(Arrival),
    Control(Parsed),
    Io(Parsed, Wait, IoProgress),
    Responding(Parsed, Reply),
}

/// One row: a waiting request, or a free row.
#[derive(Debug)]
pub(super) struct Request {
    state: State,
    /// Device whose loss the last answer from this row reported. The client has received that
    /// answer by the time it uses the permit again on this path.
    pub(super) reported_loss: Option<DeviceId>,
}

impl Request {
    /// Creates a free row.
    pub(super) const fn new() -> Self {
        Self { state: State::Free, reported_loss: None }
    }

    /// State with its data.
    pub(super) const fn get(&self) -> &State {
        &self.state
    }

    /// State of the request.
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

    /// Connection that the request arrived over.
    pub(super) const fn conn(&self) -> Option<ConnRow> {
        match &self.state {
            State::Free => None,
            State::Deferred(arrival) | State::Revoking(arrival) => Some(arrival.conn),
            State::Control(request) | State::Io(request, ..) | State::Responding(request, _) => {
                Some(request.arrival.conn)
            }
        }
    }

    /// IO of the request, if its state has one.
    pub(super) const fn io(&self) -> Option<&IoProgress> {
        match &self.state {
            State::Io(_, _, io) => Some(io),
            _ => None,
        }
    }

    /// Mutable access to the IO of the request.
    pub(super) const fn io_mut(&mut self) -> Option<&mut IoProgress> {
        match &mut self.state {
            State::Io(_, _, io) => Some(io),
            _ => None,
        }
    }

    /// Changes the state. Panics if the change is invalid, which is a bug in this crate.
    #[track_caller]
    pub(super) fn go(&mut self, to: State) {
        let from = self.state();
        self.state = to;
        self.moved(from);
    }

    /// Changes the waiting state of an IO; does nothing if it is already in that state.
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

    /// Ends the request.
    #[track_caller]
    pub(super) fn end(&mut self) {
        if self.state() != RequestState::Free {
            self.go(State::Free);
        }
    }

    #[track_caller]
    fn moved(&self, from: RequestState) {
        assert!(from.may_become(self.state()), "illegal move from {from:?} to {:?}", self.state());
    }
}

impl Wait {
    const fn state(self) -> RequestState {
        match self {
            Self::Throttled => RequestState::Throttled,
            Self::Blocked => RequestState::Blocked,
            Self::Turn => RequestState::Turn,
            Self::Queued => RequestState::Queued,
            Self::Submitted => RequestState::Submitted,
            Self::Settling(_) => RequestState::Settling,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::RequestState::{
        self, Blocked, Control, Deferred, Free, Queued, Responding, Revoking, Settling, Submitted,
        Throttled, Turn,
    };

    #[test]
    fn request_states_follow_their_order() {
        const ALL: [RequestState; 11] = [
            Free, Deferred, Revoking, Control, Throttled, Blocked, Turn, Queued, Submitted,
            Settling, Responding,
        ];
        let device = [Throttled, Blocked, Turn, Queued, Submitted, Responding];
        for (from, expected) in [
            (Free, [&[Deferred, Revoking, Control][..], &device].concat()),
            (Deferred, [&[Free, Revoking, Control][..], &device].concat()),
            (Revoking, [&[Free, Control][..], &device].concat()),
            (Control, vec![Free, Responding]),
            (Throttled, vec![Free, Blocked, Turn, Queued, Submitted, Responding]),
            (Blocked, vec![Free, Turn, Queued, Submitted, Responding]),
            (Turn, vec![Free, Queued, Submitted, Responding]),
            (Queued, vec![Free, Submitted, Responding]),
            (Submitted, vec![Free, Queued, Settling, Responding]),
            (Settling, vec![Free, Queued, Submitted, Responding]),
            (Responding, vec![Free]),
        ] {
            let moves: Vec<_> = ALL.into_iter().filter(|to| from.may_become(*to)).collect();
            assert_eq!(moves, expected, "from {from:?}");
        }
    }
}
