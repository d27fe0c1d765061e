//! Ways to cause and detect losses: syncs that fail with varying statuses, users of one device that
//! each receive their own report, and sessions in which only zeroes await a flush. Also NBD users
//! that stop in the middle of payloads.
//!
//! Each is drawn from a separate generator, so that runs of the saved seeds do not change.

use rtrs_client::SlowIo;
use rtrs_core::prng::{Prng, Ratio};

use super::{FaultMix, Guest, MS, Options, half, pick};

const STATUSES: u64 = 0x7374_6174_7573_6573;
const USERS: u64 = 0x7477_6f5f_7573_6572;
const ZEROES: u64 = 0x7a65_726f_6573_5f21;
const STALLS: u64 = 0x7374_616c_6c73_5f21;

/// Ways in which losses are caused and detected.
#[derive(Clone, Copy, Debug, Default)]
pub struct Losses {
    /// Whether syncs of the disk fail with varying statuses.
    pub statuses: bool,
    /// Whether the cores' NBD connections are separate users, each with its own loss reports.
    pub users: bool,
    /// Whether only zeroes and discards await a flush, because all data is written durably.
    pub zeroes: bool,
    /// Whether durable writes never report errors of other writes.
    pub apart: bool,
    /// Whether NBD users stop in the middle of payloads, while the disk is slow or paths fail.
    pub stalls: bool,
}

impl Options {
    /// Draws additions to a run that is otherwise complete.
    pub(super) fn draw_additions(&mut self) {
        self.draw_extra();
        if !self.other_servers {
            self.draw_losses();
            self.draw_stalls();
            self.draw_sequences();
        }
    }

    /// Draws the ways to cause and detect losses.
    fn draw_losses(&mut self) {
        let seed = self.seed;
        let loses = self.disk.writeback.num > 0 && self.extra.saves.is_none();
        if loses {
            self.extra.losses.statuses = half(&mut Prng::new(seed ^ STATUSES));
            let own = &mut Prng::new(seed ^ USERS);
            if half(own) {
                self.add_users(own);
            } else if self.extra.losses.statuses && half(own) {
                self.add_others(own);
            }
        }
        let own = &mut Prng::new(seed ^ ZEROES);
        let cut = self.disk.write_cache && self.faults.power_cut > 0 && self.is_ordinary();
        if (loses || cut && self.faults.client_restart == 0) && own.chance(Ratio::new(2, 3)) {
            self.add_zeroes(own);
        }
    }

    /// Draws users that stop in the middle of payloads.
    fn draw_stalls(&mut self) {
        let own = &mut Prng::new(self.seed ^ STALLS);
        let hangs = self.extra.late_disk && self.slow_io == SlowIo::Fail;
        let alone = !self.extra.second && self.guest.is_none() && self.extra.truncation.is_none();
        let others = self.nbd && self.is_ordinary() && !self.work.parts && !self.extra.resizes;
        if alone && (hangs && half(own) || others && own.chance(Ratio::new(1, 3))) {
            self.extra.losses.stalls = true;
        }
    }

    /// Makes it likely that one user's flush consumes the error of a loss, during or before another
    /// user's flush.
    fn add_users(&mut self, prng: &mut Prng) {
        (self.extra.losses.users, self.extra.losses.statuses) = (true, true);
        (self.nbd, self.client_cores) = (true, 2);
        (self.disk.writeback, self.load_time) = (Ratio::new(1, 20), 3000 * MS);
        let work = &mut self.work;
        (work.sectors, work.span_max, work.gap_max) = (256, 8, 5 * MS);
        (work.reads, work.ios_max) = (Ratio::new(1, 4), 600);
        work.flushes = pick(prng, &[Ratio::new(1, 8), Ratio::new(1, 4)]);
        work.fua = pick(prng, &[Ratio::ZERO, Ratio::new(1, 20)]);
        if half(prng) {
            // There are no other faults before the end.
            self.faults = FaultMix { gap_max: self.load_time * 4, power_cut: 1, ..FaultMix::NONE };
        }
        if half(prng) {
            // The sync that receives the error may complete long after another one.
            let disk = &mut self.disk;
            (disk.slow, disk.slow_max) = (Ratio::new(1, 4), pick(prng, &[5, 50]) * MS);
            disk.room = 64;
        }
    }

    /// Makes it likely that a durable write consumes the error of another session's write.
    fn add_others(&mut self, prng: &mut Prng) {
        (self.guest, self.extra.guest_writes) = (Some(Guest::Writer), true);
        self.extra.little_memory = false;
        (self.disk.fua, self.disk.writeback) = (true, Ratio::new(1, 20));
        self.load_time = 3000 * MS;
        let work = &mut self.work;
        (work.fua, work.reads) = (Ratio::new(1, 3), Ratio::new(1, 4));
        (work.flushes, work.ios_max) = (pick(prng, &[Ratio::new(1, 8), Ratio::new(1, 4)]), 600);
    }

    /// Makes it likely that zeroes are lost, and that another user's sync consumes the error.
    fn add_zeroes(&mut self, prng: &mut Prng) {
        if self.preflush {
            (self.work.zeroes, self.work.fua) = (Ratio::new(1, 2), Ratio::new(1, 3));
            return;
        }
        self.extra.losses.zeroes = true;
        self.disk.fua = true;
        self.work.zeroes = Ratio::new(2, 3);
        self.work.flushes = pick(prng, &[Ratio::new(1, 20), Ratio::new(1, 5)]);
        (self.work.sectors, self.work.ios_max) = (256, 800);
        (self.work.gap_max, self.load_time) = (5 * MS, 3000 * MS);
        self.extra.losses.apart = half(prng);
        if self.disk.writeback.num > 0 {
            self.disk.writeback = Ratio::new(1, 20);
            self.guest = self.guest.or(Some(Guest::Writer));
        }
    }
}
