//! A request on a shard: the states that it waits in, with what each of them needs.
//!
//! A path has one row per permit on each shard that it sends requests to, made when the first one
//! comes; nothing is allocated per IO. A request that does not wait is in no state: it is on its
//! way through `pipeline.rs`. Every change of state is asserted to be one that can happen.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::RemoteMem;
use rtrs_core::ids::Rkey;
use rtrs_core::time::Instant;

use super::progress::IoProgress;
use super::sync::Settling;
use super::table::ConnRow;
use crate::engine::device_table::DeviceId;

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// Another change of a block has to end first (`turns.rs`).
    Turn,
    /// The device is full.
    Queued,
    /// The device works on it.
    Submitted,
    /// The device is done; other syncs, or the epoch that is being saved, decide what is answered.
    Settling,
    /// The send queue is full; the answer waits.
    Responding,
}

impl RequestState {
    /// True when a request may go on to wait for that instead: mostly in the order above, steps of
    /// an IO again, and from anywhere to the end.
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
    /// It came before the client had proved who it is.
    pub(super) unproved: bool,
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
    /// Nanoseconds that it was at the device.
    pub(super) backend_ns: u64,
    /// It has data although it is an error: why an OPEN is refused.
    pub(super) explained: bool,
}

impl Reply {
    /// The answer to a request that is no IO, or is refused.
    pub(super) const fn errno(errno: u16) -> Self {
        Self { errno, io: None, backend_ns: 0, explained: false }
    }

    /// The answer to an IO that was valid.
    pub(super) const fn to_io(errno: u16, io: &IoProgress) -> Self {
        let done = Some((io.op, io.flags.fua || io.post_flush));
        Self { io: done, backend_ns: io.backend_ns, ..Self::errno(errno) }
    }
}

/// What an IO waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    Blocked,
    Turn,
    Queued,
    Submitted,
    Settling(Settling),
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

    /// Begins to wait. Panics when that cannot be: that is a bug of this crate.
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
        assert!(from.may_become(self.state()), "illegal move from {from:?} to {:?}", self.state());
    }
}

impl Wait {
    const fn state(self) -> RequestState {
        match self {
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
        Turn,
    };

    #[test]
    fn what_a_request_waits_for_in_turn() {
        const ALL: [RequestState; 10] = [
            Free, Deferred, Revoking, Control, Blocked, Turn, Queued, Submitted, Settling,
            Responding,
        ];
        let device = [Blocked, Turn, Queued, Submitted, Responding];
        for (from, expected) in [
            (Free, [&[Deferred, Revoking, Control][..], &device].concat()),
            (Deferred, [&[Free, Revoking, Control][..], &device].concat()),
            (Revoking, [&[Free, Control][..], &device].concat()),
            (Control, vec![Free, Responding]),
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
