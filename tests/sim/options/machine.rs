//! Runs whose user is a virtual machine, with clients that die and return.
//!
//! They form a family of their own, with their own generator, so no other run changes.

use rtrs_client::{NoPath, SlowIo};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::Duration;

use super::{DiskOptions, Extra, FaultMix, MS, Options, WorkOptions, half, pick};

const MACHINES: u64 = 0x6d61_6368_696e_6573;

/// Virtual machine that uses the device.
#[derive(Clone, Copy, Debug)]
pub struct MachineOptions {
    /// Whether the guest has turned off its write cache.
    pub through: bool,
    /// Whether kicks and calls use event indices.
    pub events: bool,
    /// Whether requests use indirect tables.
    pub indirect: bool,
    /// Maximum length of a piece of data in an indirect table.
    pub piece_max: u32,
    /// Number of buffers of the front end on each core.
    pub buffers: u32,
    /// Initial index of the rings.
    pub first: u16,
    /// Whether processes die between the steps of a request.
    pub tears: bool,
}

impl Options {
    /// Draws the settings of a run with a virtual machine.
    pub fn draw_machine(seed: u64) -> Self {
        let prng = &mut Prng::new(seed ^ MACHINES);
        let mut drawn = Self::draw(prng.next_u64());
        drawn.seed = seed;
        drawn.unmix();
        (drawn.heartbeat, drawn.server_heartbeat) = (pick(prng, &[50, 100]) * MS, 100 * MS);
        (drawn.stall_max, drawn.pinned, drawn.operated) = (None, None, false);
        (drawn.other_servers, drawn.late_data, drawn.rival) = (false, false, false);
        (drawn.guest, drawn.kernel, drawn.renamed) = (None, None, false);
        (drawn.nbd, drawn.nbd_drops, drawn.preflush) = (false, false, false);
        (drawn.world.flights, drawn.world.revoke_max, drawn.world.bounces) = (false, None, false);
        drawn.no_path = pick(prng, &[NoPath::Queue, NoPath::QueueFor(Duration::from_secs(60))]);
        (drawn.io_timeout, drawn.slow_io) = (5000 * MS, SlowIo::Wait);
        let message_max = pick(prng, &[MS / 5, MS]);
        (drawn.message_max, drawn.server_message_max) = (message_max, message_max);
        drawn.load_time = pick(prng, &[1000, 2000, 4000]) * MS;
        drawn.extra = Extra { machine: Some(MachineOptions::draw(prng)), ..Extra::default() };
        drawn.work = WorkOptions::draw(prng, drawn.chunk_size);
        drawn.disk = DiskOptions::draw(prng);
        drawn.faults = FaultMix::draw(prng, drawn.paths);
        let faults = &mut drawn.faults;
        faults.client_restart = pick(prng, &[1, 3, 6]);
        (faults.gap_max, faults.away_max) = (pick(prng, &[50, 200, 400]) * MS, 50 * MS);
        // A guest does not resend anything itself: its requests are in the rings.
        drawn.takeover = Some(Duration::ZERO);
        let work = &mut drawn.work;
        (work.gap_max, work.ios_max) = (pick(prng, &[1, 5]) * MS, pick(prng, &[500, 1500]));
        let through = drawn.extra.machine.is_some_and(|machine| machine.through);
        work.fua = if through { Ratio::new(1, 1) } else { Ratio::ZERO };
        drawn
    }
}

impl MachineOptions {
    fn draw(prng: &mut Prng) -> Self {
        Self {
            through: prng.chance(Ratio::new(1, 4)),
            events: prng.chance(Ratio::new(3, 4)),
            indirect: half(prng),
            piece_max: pick(prng, &[512, 1000, 4096]),
            buffers: pick(prng, &[1, 2, 4, 16]),
            first: pick(prng, &[0, 100, 65_500]),
            tears: prng.chance(Ratio::new(3, 4)),
        }
    }
}
