//! Writes that a disk lost on their way out of its cache: a flush that fails tells of them. And
//! those that a durable write with PREFLUSH has flushed.

use std::ops::Range;

use super::super::Failure;
use super::{Oracle, USERS, Write};

impl Write {
    pub(super) fn is_acked(&self) -> bool {
        self.acked || self.old
    }
}

impl Oracle {
    /// True for a write in flight over a power cut, where what the server said before comes late.
    pub(super) fn may_be_old(&self, id: u32) -> bool {
        self.flights && self.writes[id as usize].start < self.last_cut
    }

    /// A write was acknowledged by the server before the cut or by the one after. It may have
    /// happened by now or be lost; a flush promises it all the same.
    pub(super) fn acked_or_lost(&mut self, id: u32) {
        self.write_failed(id, true);
        self.writes[id as usize].old = true;
    }

    /// A write flushed what was acknowledged before it began, as far as no power cut lies between.
    pub(in super::super) fn flushed_before(&mut self, id: u32) {
        let (start, cut) = (self.writes[id as usize].start, self.last_cut);
        for write in self.writes.iter_mut().filter(|w| w.acked && w.finish < start) {
            write.durable |= write.start > cut;
        }
    }

    /// A flush of a user has failed where the disk loses writes: that user's flushes do not cover
    /// any more what was submitted by now and is not durable.
    pub(in super::super) fn excuse_unflushed(&mut self, user: usize) {
        for write in self.writes.iter_mut().filter(|write| !write.durable) {
            write.excused[user] = Some(0);
        }
    }

    /// Nothing is asked of flushes of these users that begin after `since`, as far as the power
    /// took it before it was flushed.
    pub(super) fn excuse(
        &mut self,
        users: Range<usize>,
        since: u64,
        which: impl Fn(&Write) -> bool,
    ) {
        let cut = self.last_cut;
        let gone = |write: &Write| write.finish < cut || write.old;
        let lost = |write: &Write| write.is_acked() && !write.durable && gone(write);
        for write in self.writes.iter_mut().filter(|write| lost(write) && which(write)) {
            for excused in &mut write.excused[users.clone()] {
                *excused = Some(excused.map_or(since, |earlier| earlier.min(since)));
            }
        }
    }

    /// A flush of a user that began at `start` was acknowledged.
    pub(in super::super) fn flush_acked(&mut self, user: usize, start: u64) -> Result<(), Failure> {
        self.tick();
        self.judge_cut(start)?;
        for id in 0..self.writes.len() {
            let write = &mut self.writes[id];
            let excused = write.excused[user].is_some_and(|since| since <= start);
            if write.durable || excused || !write.is_acked() || write.finish >= start {
                continue;
            }
            write.durable = true;
            self.promised(u32::try_from(id).unwrap_or(u32::MAX))?;
        }
        Ok(())
    }

    /// A flush of a user that began at `start` failed with an error of the device. True when it can
    /// have been for a power cut that nobody had told this user of, or, if so said, whose telling
    /// counts for none.
    pub(in super::super) fn flush_failed(&mut self, user: usize, start: u64, again: bool) -> bool {
        let now = self.tick();
        self.cut_is_reported();
        let (cut, at) = self.reported[user];
        let news = cut != self.last_cut || start < at;
        let was_lost = |write: &Write| {
            !write.durable && write.start < self.last_cut && (news || write.finish > at)
        };
        let news = news || again;
        let doubt = self.doubt && self.last_cut > 0 && news;
        let reported = doubt || self.writes.iter().any(was_lost);
        if cut != self.last_cut {
            self.reported[user] = (self.last_cut, now);
        }
        self.excuse(user..user + 1, now, |_| true);
        reported
    }

    /// A client was killed. If the next one takes over, its users go on, and are to be told of what
    /// a power cut takes; once more if it has been told, since they may not have heard of it.
    pub(in super::super) fn client_gone(&mut self, takeover: bool) {
        if takeover {
            (self.doubt, self.reported) = (true, [(0, 0); USERS]);
            return;
        }
        self.cut_is_reported();
        for write in &mut self.writes {
            write.orphan |= write.acked;
        }
        self.excuse(0..USERS, 0, |write| write.orphan);
    }
}
