//! Runs that provoke one kind of bug, each verified by removing the rule that prevents the bug
//! (`mutants.rs`).

use rtrs_client::{Failover, NoPath};
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::Duration;

use super::{DEAF, FaultMix, MS, Options, half, pick};

impl Options {
    /// Makes it likely that a client is detached while its writes execute in the backend, and that
    /// the next client, started before the first has ended, soon writes to the same sectors.
    pub(super) fn hunt_left_writes(&mut self, prng: &mut Prng) {
        self.hunt_dead_writes(prng);
        let faults = &mut self.faults;
        (faults.client_restart, faults.client_leave) = (0, 3);
        (faults.silence, faults.qp_error) = (0, 0);
        self.renamed = true;
    }

    /// Makes it likely that requests arrive while their path is being fenced off, at a core that
    /// learns of the fencing late, long after the client's requests timed out.
    pub(super) fn hunt_unfenced_writes(&mut self, prng: &mut Prng) {
        (self.heartbeat, self.server_heartbeat) = (50 * MS, DEAF);
        self.no_path = pick(prng, &[NoPath::Fail, NoPath::QueueFor(50 * MS)]);
        (self.load_time, self.io_timeout) = (4000 * MS, 100 * MS);
        (self.client_cores, self.server_cores) = (2, 2);
        (self.message_max, self.server_message_max) = (MS / 5, 300 * MS);
        (self.nbd, self.pinned) = (false, None);
        let (gap_max, lasts_max) = (400 * MS, 700 * MS);
        self.faults = FaultMix { gap_max, lasts_max, late_requests: 1, ..FaultMix::NONE };
        let disk = &mut self.disk;
        (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[16, 32]), 5 * MS, 2000);
        (work.reads, work.span_max, work.overlap) = (Ratio::new(1, 2), 4, false);
        (work.depth, self.queue_depth) = (24, self.queue_depth.max(16));
    }

    /// Makes it likely that a client without FENCE repeats a write while its first copy is
    /// executing in the backend and the server does not yet know that the path is dead. Only faults
    /// that lose messages in transit are used: late messages would overwrite newer data, as can
    /// happen with the kernel's client and server.
    pub(super) fn hunt_kernel_copies(&mut self, prng: &mut Prng) {
        self.kernel = Some(pick(prng, &[Failover::Fast, Failover::Fast, Failover::Strict]));
        (self.heartbeat, self.server_heartbeat) = (50 * MS, 1000 * MS);
        (self.no_path, self.load_time) = (NoPath::Queue, 3000 * MS);
        (self.world.link.detect, self.queue_depth) = (None, self.queue_depth.max(16));
        let (gap_max, lasts_max) = (300 * MS, 300 * MS);
        let faults = FaultMix { gap_max, lasts_max, link_down: 4, ..FaultMix::NONE };
        self.faults = FaultMix { server_restart: pick(prng, &[0, 1]), ..faults };
        let disk = &mut self.disk;
        (disk.slow, disk.slow_max) = (Ratio::new(1, 4), 600 * MS);
        (disk.stuck, disk.errors, disk.room) = (Ratio::ZERO, Ratio::ZERO, 64);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[16, 32]), 3 * MS, 2000);
        (work.reads, work.span_max, work.overlap) = (Ratio::new(1, 2), 4, false);
        work.depth = 24;
    }

    /// Makes it likely that the power fails when all writes since the last flush were acknowledged
    /// while that flush was in transit, or that a client leaves such writes to the next one.
    pub(super) fn hunt_covered_writes(&mut self, prng: &mut Prng) {
        (self.heartbeat, self.server_heartbeat) = (50 * MS, 50 * MS);
        (self.no_path, self.load_time) = (NoPath::Queue, 20_000 * MS);
        (self.client_cores, self.nbd, self.pinned) = (1, false, None);
        self.faults = FaultMix { gap_max: 300 * MS, power_cut: 1, ..FaultMix::NONE };
        let disk = &mut self.disk;
        (disk.write_cache, disk.slow, disk.slow_max) = (true, Ratio::new(1, 2), 20 * MS);
        (disk.stuck, disk.errors, disk.room) = (Ratio::ZERO, Ratio::ZERO, 64);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (256, 10 * MS, 2000);
        (work.reads, work.span_max, work.overlap) = (Ratio::new(1, 10), 4, false);
        (work.depth, work.fua, work.zeroes) = (2, Ratio::ZERO, Ratio::ZERO);
        work.flushes = Ratio::new(1, 2);
        if half(prng) {
            work.flushes = Ratio::new(1, 20);
            self.faults.client_restart = 1;
            self.takeover = Some(pick(prng, &[0, 20, 200]) * MS);
        }
    }

    /// Makes it likely that a write that failed for lack of a path is immediately followed by
    /// another to the same sectors, while requests of the first may still arrive: the server core
    /// that receives them learns late, often after a second, that the path is fenced off.
    pub(super) fn hunt_rewrites(&mut self, prng: &mut Prng) {
        self.hunt_unfenced_writes(prng);
        self.io_timeout = pick(prng, &[30, 60, 100]) * MS;
        (self.message_max, self.server_message_max) = (MS / 5, pick(prng, &[600, 1500]) * MS);
        (self.faults.give_up, self.faults.late_requests) = pick(prng, &[(1, 0), (0, 1)]);
        self.faults.lasts_max = pick(prng, &[600, 1000]) * MS;
        (self.load_time, self.work.ios_max) = (24_000 * MS, 12_000);
        self.work.rewrites = true;
    }

    /// Makes it likely that the client dies a few seconds after a power failure, with no flush in
    /// between, and that another client takes over.
    pub(super) fn hunt_saved_epoch(&mut self, prng: &mut Prng) {
        self.hunt_covered_writes(prng);
        self.faults =
            FaultMix { gap_max: 6000 * MS, power_cut: 1, client_restart: 1, ..FaultMix::NONE };
        self.takeover = Some(pick(prng, &[0, 20, 200]) * MS);
        (self.world.link.bandwidth, self.load_time) = (None, 40_000 * MS);
        let work = &mut self.work;
        (work.sectors, work.gap_max) = (32, 40 * MS);
        (work.reads, work.flushes) = (Ratio::new(1, 2), Ratio::new(1, 150));
    }

    /// Makes it likely that acknowledgments of writes arrive when the server's cache is already in
    /// a new epoch. Nothing is read, since reads would reveal which writes in flight are done.
    pub(super) fn hunt_old_answers(&mut self, prng: &mut Prng) {
        (self.heartbeat, self.server_heartbeat) = (50 * MS, 50 * MS);
        (self.no_path, self.io_timeout) = (NoPath::Queue, 1000 * MS);
        (self.nbd, self.pinned, self.world.flights) = (false, None, true);
        (self.world.link.bandwidth, self.load_time) = (None, 2000 * MS);
        self.faults = FaultMix { gap_max: 300 * MS, late_answers: 1, ..FaultMix::NONE };
        let disk = &mut self.disk;
        (disk.write_cache, disk.slow, disk.room) = (true, Ratio::ZERO, 64);
        (disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (4096, pick(prng, &[MS / 2, 2 * MS]), 8000);
        (work.depth, self.queue_depth) = (16, 32);
        (work.reads, work.flushes) = (Ratio::ZERO, Ratio::new(1, pick(prng, &[10, 40])));
        (work.fua, work.zeroes, work.overlap) = (Ratio::ZERO, Ratio::ZERO, false);
    }

    /// Makes it likely that the memory of a read is reused immediately, while its data arrives a
    /// second time and its memory window is slow to close.
    pub(super) fn hunt_reused_buffers(&mut self, prng: &mut Prng) {
        (self.late_data, self.nbd, self.pinned) = (true, false, None);
        (self.always_invalidate, self.invalidate_reads) = (true, true);
        self.no_path = NoPath::Queue;
        self.world.bind = BindMode::Pending;
        self.world.revoke_max = Some(pick(prng, &[1, 5]) * MS);
        self.faults = FaultMix { gap_max: 500 * MS, qp_error: 1, ..FaultMix::NONE };
        let disk = &mut self.disk;
        (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
        let work = &mut self.work;
        (work.reads, work.gap_max, work.ios_max) = (Ratio::new(2, 3), MS / 2, 3000);
        (work.depth, self.queue_depth) = (8, self.queue_depth.max(16));
    }

    /// Makes requests longer than the front end's buffers, so that it splits them.
    pub(super) fn hunt_long_requests(&mut self, prng: &mut Prng) {
        (self.nbd, self.pinned) = (true, None);
        self.world.link.bandwidth = None;
        let work = &mut self.work;
        (work.sectors, work.span_max, work.depth) = (3072, 1536, 4);
        (work.gap_max, work.ios_max) = (pick(prng, &[1, 20]) * MS, 60);
        (work.reads, work.overlap, work.zeroes) = (Ratio::new(1, 2), false, Ratio::ZERO);
    }

    /// Makes it likely that a write waits for a dead path while its NBD connection is closed, and
    /// that newer writes go to the same sectors over another connection.
    pub(super) fn hunt_dropped_writes(&mut self, prng: &mut Prng) {
        (self.nbd, self.nbd_drops) = (true, true);
        (self.heartbeat, self.server_heartbeat) = (pick(prng, &[50, 100]) * MS, 50 * MS);
        self.no_path = pick(prng, &[NoPath::Queue, NoPath::QueueFor(Duration::from_secs(60))]);
        self.load_time = 3000 * MS;
        self.client_cores = pick(prng, &[1, 2, 2]);
        self.faults = FaultMix {
            gap_max: 200 * MS,
            lasts_max: 400 * MS,
            silence: 2,
            blackhole: 2,
            qp_error: pick(prng, &[0, 1]),
            ..FaultMix::NONE
        };
        let disk = &mut self.disk;
        (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[16, 32]), 3 * MS, 2000);
        (work.reads, work.span_max, work.overlap) = (Ratio::new(1, 2), 4, false);
        work.depth = pick(prng, &[8, 24]);
    }
}
