//! A request at the server: its states in walk order, and the row that carries it.
//!
//! Each core has one row per permit for every path that sent it a request, made when the first
//! one comes; nothing is allocated per IO. The states name what a request waits for. Every move
//! goes through the table below, which a test holds against the documented one.

use std::ops::Range;

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::fabric::RemoteMem;
use rtrs_core::ids::Rkey;
use rtrs_core::proto::{Moves, step};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use crate::engine::device_table::DeviceId;
use crate::engine::ledger::FlushMark;
use crate::export::ExportIndex;

/// Where a request is, in walk order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestState {
    /// No request.
    Free,
    /// Its immediate came; it has no right to its permit yet.
    Arrived,
    /// Another path's request holds the permit: wait until that one ended.
    Parked,
    /// The peer's key for the chunk is being taken away.
    Revoking,
    /// The chunk is ours; its header is being judged.
    Parsing,
    /// An open or close is with the control core.
    Control,
    /// The disk still has an older write of a closed path to the same place.
    Barred,
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
        (Self::Free, &[Self::Arrived]),
        (Self::Arrived, &[Self::Parked, Self::Revoking, Self::Parsing, Self::Free]),
        (Self::Parked, &[Self::Revoking, Self::Parsing, Self::Free]),
        (Self::Revoking, &[Self::Parsing, Self::Free]),
        (
            Self::Parsing,
            &[
                Self::Control,
                Self::Barred,
                Self::Queued,
                Self::Submitted,
                Self::Responding,
                Self::Free,
            ],
        ),
        (Self::Control, &[Self::Responding, Self::Free]),
        (Self::Barred, &[Self::Queued, Self::Submitted, Self::Responding, Self::Free]),
        (Self::Queued, &[Self::Submitted, Self::Responding, Self::Free]),
        (Self::Submitted, &[Self::Queued, Self::Settling, Self::Responding, Self::Free]),
        (Self::Settling, &[Self::Submitted, Self::Queued, Self::Responding, Self::Free]),
        (Self::Responding, &[Self::Free]),
    ];
}

/// Which step of an IO the device works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoStep {
    /// A flush asked for before the IO (PREFLUSH).
    PreFlush,
    /// The IO itself, in parts where the device takes less at once.
    Data,
    /// A flush in place of FUA, for a device without FUA.
    PostFlush,
}

/// What remains of an IO.
#[derive(Clone, Copy, Debug)]
pub struct IoProgress {
    /// The export it goes to.
    pub export: ExportIndex,
    /// The session's number for it.
    pub device: DeviceId,
    /// What it does.
    pub op: IoOp,
    /// How.
    pub flags: IoFlags,
    /// The step the device works on, or works on next.
    pub step: IoStep,
    /// A flush must follow the data.
    pub post_flush: bool,
    /// Next byte on the device.
    pub offset: u64,
    /// Bytes done.
    pub done: u32,
    /// Bytes in all.
    pub len: u32,
    /// Bytes of the part the device works on.
    pub part: u32,
    /// The export's epoch when it was submitted first.
    pub epoch: Option<u32>,
    /// Of a flush: what it covers.
    pub mark: FlushMark,
    /// Of a sync that is out: its number.
    pub number: Option<u64>,
    /// Of a sync that has ended: syncs with lower numbers decide what it is worth.
    pub horizon: u64,
    /// Of a sync that has failed: the epoch to be saved before it is answered.
    pub saved_by: u32,
    /// From then on it is answered whether that is saved or not.
    pub unsaved_at: Instant,
    /// How the step ended that settles.
    pub status: IoStatus,
}

/// True for what changes the content of a device.
pub const fn changes(op: IoOp) -> bool {
    !matches!(op, IoOp::Read | IoOp::Flush)
}

impl IoProgress {
    /// True for what changes the content of the device.
    pub const fn changes(&self) -> bool {
        changes(self.op)
    }

    /// All its bytes on the device.
    pub fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.len)
    }

    /// The bytes that the device may change by the step it works on, if that changes any. What was
    /// done before has happened, and what remains is not begun once the path is closed.
    pub fn may_change(&self) -> Option<Range<u64>> {
        let from = self.offset + u64::from(self.done);
        let changes = self.changes() && self.step == IoStep::Data;
        changes.then(|| from..from + u64::from(self.part))
    }
}

/// One row: a request, or room for one.
#[derive(Debug)]
pub struct Request {
    state: RequestState,
    /// Row of the connection it came over, in the core's table.
    pub conn: u32,
    /// Where in the chunk the RTRS message lies.
    pub offset: u32,
    /// Bytes of user data before the user header.
    pub data_len: u32,
    /// Where a read's result goes; None for requests without one.
    pub target: Option<RemoteMem>,
    /// The key to invalidate at the peer with the answer.
    pub invalidate: Option<Rkey>,
    /// Errno of the answer, 0 for success.
    pub errno: u16,
    /// What the device still has to do.
    pub io: Option<IoProgress>,
    /// The chunk's new key, from its bind to the answer.
    pub rkey: Rkey,
    /// The chunk got its new key when the old one was taken away.
    pub rebound: bool,
    /// It met its original, and was counted for that.
    pub copy: bool,
    /// The last answer of this row told of a loss of this device. It has arrived when the permit is
    /// used again on this path.
    pub told: Option<DeviceId>,
    /// When it arrived, for the latency sum.
    pub since: Instant,
}

impl Default for Request {
    fn default() -> Self {
        Self::new()
    }
}

impl Request {
    /// An empty row.
    pub const fn new() -> Self {
        Self {
            state: RequestState::Free,
            conn: 0,
            offset: 0,
            data_len: 0,
            target: None,
            invalidate: None,
            errno: 0,
            io: None,
            rkey: Rkey(0),
            rebound: false,
            copy: false,
            told: None,
            since: Instant::ZERO,
        }
    }

    /// Where the request is.
    pub const fn state(&self) -> RequestState {
        self.state
    }

    /// Moves on. Panics when the table does not have the move: that is our own fault.
    #[track_caller]
    pub fn go(&mut self, to: RequestState) {
        step(&mut self.state, to);
    }

    /// A request arrived: the row forgets the last one.
    pub fn arrive(&mut self, conn: u32, offset: u32, now: Instant) {
        self.go(RequestState::Arrived);
        self.conn = conn;
        self.offset = offset;
        self.data_len = 0;
        self.target = None;
        self.invalidate = None;
        self.errno = 0;
        self.io = None;
        (self.rebound, self.copy) = (false, false);
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::proto::table;

    use super::RequestState;

    #[test]
    fn the_walk_of_a_request() {
        assert_eq!(
            table::<RequestState>(),
            "Free: Arrived\n\
             Arrived: Parked, Revoking, Parsing, Free\n\
             Parked: Revoking, Parsing, Free\n\
             Revoking: Parsing, Free\n\
             Parsing: Control, Barred, Queued, Submitted, Responding, Free\n\
             Control: Responding, Free\n\
             Barred: Queued, Submitted, Responding, Free\n\
             Queued: Submitted, Responding, Free\n\
             Submitted: Queued, Settling, Responding, Free\n\
             Settling: Submitted, Queued, Responding, Free\n\
             Responding: Free\n"
        );
    }
}
