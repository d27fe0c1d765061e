//! Writes that a disk lost while writing back its cache, which a failed flush reports, and writes
//! that a durable write with PREFLUSH has flushed.

use std::ops::Range;

use super::super::Failure;
use super::{Oracle, USERS, Write};

impl Write {
    pub(super) fn is_acked(&self) -> bool {
        self.acked || self.old
    }
}

impl Oracle {
    /// Whether a write in flight during a power cut may have an acknowledgment from before the cut,
    /// in runs whose network delivers such messages late.
    pub(super) fn may_be_old(&self, id: u32) -> bool {
        self.flights && self.writes[id as usize].start < self.last_cut
    }

    /// Records a write that either the server acknowledged before the power cut or the next server
    /// acknowledged after it. The write may by now have been executed or lost; a flush covers it in
    /// either case.
    pub(super) fn acked_or_lost(&mut self, id: u32) {
        self.write_failed(id, true);
        self.writes[id as usize].old = true;
    }

    /// Records that a write flushed the writes acknowledged before it began and since the last
    /// power cut.
    pub(in super::super) fn flushed_before(&mut self, id: u32) {
        let (start, cut) = (self.writes[id as usize].start, self.last_cut);
        for write in self.writes.iter_mut().filter(|w| w.acked && w.finish < start) {
            write.durable |= write.start > cut;
        }
    }

    /// Records a failed flush of a user if the disk loses writes: later flushes of that user no
    /// longer cover writes that were submitted by now and are not durable.
    pub(in super::super) fn excuse_unflushed(&mut self, user: usize) {
        for write in self.writes.iter_mut().filter(|write| !write.durable) {
            write.excused[user] = Some(0);
        }
    }

    /// Excuses flushes of these users that begin after `since` from covering writes that a power
    /// cut lost before they were flushed.
    pub(super) fn excuse(
        &mut self,
        users: Range<usize>,
        since: u64,
        which: impl Fn(&Write) -> bool,
    ) {
        let cut = self.last_cut;
        // The cut may have lost the first parts of a write that was acknowledged after it.
        let part_max = self.part_max;
        let has_parts = |write: &Write| write.start < cut && write.count > part_max;
        let gone = |write: &Write| write.finish < cut || write.old || has_parts(write);
        let lost = |write: &Write| write.is_acked() && !write.durable && gone(write);
        for write in self.writes.iter_mut().filter(|write| lost(write) && which(write)) {
            for excused in &mut write.excused[users.clone()] {
                *excused = Some(excused.map_or(since, |earlier| earlier.min(since)));
            }
        }
    }

    /// Whether there was a power cut.
    pub(in super::super) fn has_cut(&self) -> bool {
        self.last_cut > 0
    }

    /// Records an acknowledged flush of a user that began at `start`.
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

    /// Records a flush of a user that began at `start` and failed with an error from the device.
    /// Returns true if the cause may be a power cut that was not yet reported to this user or, with
    /// `again`, one whose report does not count.
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

    /// Records a killed client. If the next client takes over, its users continue, and a power
    /// cut's losses must be reported to them, again if they were reported before, since that report
    /// may not have arrived.
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
