//! Runs for rare sequences: a power cut between the parts of a write; and a second server process
//! on a disk without a lock, which cannot fence a path to the first process.
//!
//! Each is drawn by a separate generator, among runs that have no other additions.

use rtrs_client::NoPath;
use rtrs_core::prng::{Prng, Ratio};

use super::{DEAF, FaultMix, MS, Options, pick};

const PART_LOSSES: u64 = 0x7061_7274_5f6c_6f73;
const TWINS: u64 = 0x7477_696e_735f_5f21;
const UNLOCKED: u64 = 0x756e_6c6f_636b_6564;

impl Options {
    /// Draws the rare sequences.
    pub(super) fn draw_sequences(&mut self) {
        if self.paths < 2 || !self.is_plain() {
            return;
        }
        let own = &mut Prng::new(self.seed ^ PART_LOSSES);
        if own.chance(Ratio::new(1, 4)) {
            return self.hunt_part_losses(own);
        }
        let own = &mut Prng::new(self.seed ^ TWINS);
        if own.chance(Ratio::new(1, 4)) {
            return self.hunt_twins(own);
        }
        let own = &mut Prng::new(self.seed ^ UNLOCKED);
        self.extra.unlocked = own.chance(Ratio::new(1, 4));
    }

    /// Whether the run is an ordinary mix without additions.
    fn is_plain(&self) -> bool {
        let extra = &self.extra;
        let changes = extra.removal.is_some() || extra.truncation.is_some() || extra.resizes;
        let more = extra.late_disk || extra.saves.is_some() || extra.second || extra.guest_writes;
        let lasts = self.takeover.is_none() && self.faults.client_restart == 0;
        self.is_ordinary() && !changes && !more && lasts && !self.operated && !self.nbd
    }

    /// Makes it likely that a path leads to a second server process when a path to the first dies
    /// with writes in transit, which still arrive at the first.
    fn hunt_twins(&mut self, prng: &mut Prng) {
        (self.extra.twin, self.extra.unlocked) = (true, true);
        (self.paths, self.heartbeat, self.server_heartbeat) = (2, 50 * MS, DEAF);
        (self.no_path, self.load_time) = (NoPath::Queue, 8000 * MS);
        (self.message_max, self.server_message_max) = (MS / 5, MS / 5);
        (self.preflush, self.late_data, self.pinned) = (false, false, None);
        self.queue_depth = self.queue_depth.max(16);
        self.faults = FaultMix::NONE;
        let disk = &mut self.disk;
        // Operations that one process has begun are unknown to the other.
        (disk.latency_max, disk.room) = (MS / 1000, 64);
        (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[16, 32]), 3 * MS, 4000);
        (work.reads, work.span_max, work.overlap) = (Ratio::new(1, 2), 4, false);
        // Each process counts its own failed syncs.
        (work.flushes, work.depth) = (Ratio::ZERO, 16);
    }

    /// Makes it likely that a write of several requests loses its first request to a power cut
    /// while the others are in flight, and that a flush reports the loss before the whole write has
    /// ended.
    fn hunt_part_losses(&mut self, prng: &mut Prng) {
        self.hunt_old_answers(prng);
        (self.preflush, self.late_data, self.client_cores) = (false, false, 2);
        let work = &mut self.work;
        (work.span_max, work.depth) = (work.span_max.max(40), 8);
        work.flushes = pick(prng, &[Ratio::new(1, 3), Ratio::new(1, 8)]);
    }
}
