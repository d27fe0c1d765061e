//! Partial writes, and the changes that take turns with them.
//!
//! A partial write changes bytes within one block: the block is read, the bytes are inserted, and
//! the block is written. No other change to that block may run in between, on any shard, path or
//! session. [`Ranges`] implements the turns, with one list per export. While no partial write is in
//! flight, a change costs one load.
//!
//! Requests waiting for their turn are rechecked each time their shard runs, like blocked requests
//! (`pipeline.rs`), and shards wake each other.

use rtrs_core::ids::{ChunkIndex, CoreIndex};
use rtrs_core::ranges::{Key, Piece, Ranges};

use super::Shard;
use super::pipeline::Step;
use super::progress::{IoProgress, Turn};
use super::request::{RequestState, State};
use super::table::RequestRef;
use crate::engine::message::{Outbox, ShardMessage};
use crate::engine::partial::PartOfBlock;

fn key(shard: CoreIndex, at: RequestRef, io: &IoProgress) -> Key {
    let piece = if io.partial.is_some() { Piece::Fragment(0) } else { Piece::Running };
    Key { shard: shard.0.into(), row: at.tag(), piece }
}

/// Wakes other shards to check their waiting requests.
fn wake(out: &mut Outbox) -> impl FnMut(usize) {
    |shard| {
        if let Ok(core) = u16::try_from(shard) {
            out.shard(CoreIndex(core), ShardMessage::Wake);
        }
    }
}

impl Step<'_> {
    /// Whether an IO need not be entered in the turn list, which is the usual case.
    pub(super) fn is_free(&self, io: &IoProgress) -> bool {
        let alone = || self.devices.turns(io.export).is_none_or(Ranges::is_empty);
        let skips = io.partial.is_some() && rtrs_core::mutated!(PartialWithoutTurn);
        io.turn == Turn::None && (!io.changes() || io.partial.is_none() && alone()) || skips
    }

    /// Whether it is the turn of this request's IO, or the IO needs none. Otherwise enters the IO
    /// in the turn list, where it waits.
    pub(super) fn takes_turn(&mut self, out: &mut Outbox) -> bool {
        let Some(io) = self.path.requests[self.at.permit].io().copied() else { return true };
        if self.is_free(&io) || io.turn == Turn::Runs {
            return true;
        }
        let Some(turns) = self.devices.turns(io.export) else { return true };
        let key = key(self.path.holder().core, self.at, &io);
        let entered = match (io.turn, io.partial) {
            (Turn::None, Some(_)) => {
                turns.enter(key, io.bytes(), wake(out));
                self.devices.note_partial_write();
                true
            }
            (Turn::None, None) => turns.queue(key, io.bytes()),
            _ => true,
        };
        let starts = !entered || turns.start(key);
        let turn = match (entered, starts) {
            (false, _) => Turn::None,
            (true, false) => Turn::Waits,
            (true, true) => Turn::Runs,
        };
        if let Some(io) = self.request().io_mut() {
            io.turn = turn;
        }
        starts
    }

    /// Ends this request's turn, so that others may take theirs.
    pub(super) fn end_turn(&mut self, out: &mut Outbox) {
        let core = self.path.holder().core;
        let Some(io) = self.path.requests[self.at.permit].io_mut() else { return };
        if std::mem::replace(&mut io.turn, Turn::None) == Turn::None {
            return;
        }
        let own = key(core, self.at, io);
        if let Some(turns) = self.devices.turns(io.export) {
            turns.end(own.shard, |key| *key == own, wake(out));
        }
    }

    /// Inserts the bytes of a partial write into the block that was read.
    pub(super) fn put_in(&self, io: &IoProgress, part: PartOfBlock) -> bool {
        let chunk = self.path.chunks().chunk(ChunkIndex::from(self.at.permit));
        let bytes = chunk.slice(0, part.len as usize);
        let block = chunk.slice(part.block_at as usize, io.len as usize);
        let place = block.and_then(|block| block.slice(part.from as usize, part.len as usize));
        match (place, bytes) {
            (Some(place), Some(bytes)) => {
                place.copy_from(&bytes);
                true
            }
            _ => false,
        }
    }
}

impl Shard {
    /// Enters this shard's requests in flight in the turn lists of exports with partial writes that
    /// wait for this. Returns whether there were any such exports.
    pub(super) fn look(&mut self, out: &mut Outbox) -> bool {
        let Self { index, devices, paths, .. } = self;
        if !devices.must_look() {
            return false;
        }
        let mut any = false;
        for (export, turns, round) in devices.to_look_at() {
            any = true;
            for (row, path) in paths.iter_mut().filter(|(_, path)| path.inflight() > 0) {
                for (permit, request) in path.requests.iter_mut() {
                    let State::Io(..) = request.get() else { continue };
                    let state = request.state();
                    let begins = matches!(state, RequestState::Throttled | RequestState::Blocked);
                    let Some(io) = request.io_mut().filter(|io| io.export == export) else {
                        continue;
                    };
                    // A throttled or blocked request is entered when it begins to run.
                    if begins || !io.changes() || io.turn != Turn::None {
                        continue;
                    }
                    let key = key(*index, RequestRef { path: row, permit }, io);
                    if turns.meets(key, &io.bytes()) {
                        io.turn = Turn::Runs;
                    }
                }
            }
            turns.has_looked(usize::from(index.0), round, wake(out));
        }
        any
    }
}
