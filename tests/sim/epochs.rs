//! The state directory of the simulated server: where it keeps the export's epoch for the next one.
//!
//! As in `rtrs-server/src/state.rs` one thread saves, one job after the other, and jobs that wait
//! are saved together. A save has two moments. At the first the number is written, so that a server
//! that starts after this one was killed finds it. At the second it is durable, and what waits for
//! that is answered. Where a seed does not draw otherwise both come at once.

use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};
use rtrs_server::engine::epoch::{EpochState, EpochStore};

use super::Plant;
use super::options::{MS, Saves};

/// The export's epoch as it outlives servers.
#[derive(Debug)]
pub(super) struct KeptEpoch(Mutex<State>);

#[derive(Debug)]
struct State {
    number: u64,
    saves: Option<Saves>,
    plant: Plant,
    prng: Prng,
    /// Wait for the thread.
    jobs: Vec<Arc<EpochState>>,
    /// Being saved, with number and rises, until when.
    busy: Option<(Instant, Arc<EpochState>, u64, u32)>,
    /// When the server is killed, before the save ends.
    kill_at: Option<Instant>,
    stats: EpochStats,
}

/// What there was to save.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EpochStats {
    /// Saves that took their time.
    pub(super) late: u64,
    /// Servers that ended before a save did.
    pub(super) cut: u64,
}

impl KeptEpoch {
    pub(super) fn new(saves: Option<Saves>, seed: u64, plant: Plant) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            number: 0,
            saves,
            plant,
            prng: Prng::new(seed ^ 0x7361_7665_735f),
            jobs: Vec::new(),
            busy: None,
            kill_at: None,
            stats: EpochStats::default(),
        })))
    }

    /// What a server that starts finds.
    pub(super) fn number(&self) -> u64 {
        self.0.lock().number
    }

    pub(super) fn stats(&self) -> EpochStats {
        self.0.lock().stats
    }

    /// From now on saves take no time.
    pub(super) fn calm(&self) {
        let state = &mut *self.0.lock();
        (state.saves, state.kill_at) = (None, None);
        if let Some((at, ..)) = &mut state.busy {
            *at = Instant::ZERO;
        }
    }

    /// The server's process has ended, and with it the thread.
    pub(super) fn abandon(&self) {
        let state = &mut *self.0.lock();
        state.stats.cut += u64::from(state.busy.take().is_some());
        state.kill_at = None;
        state.jobs.clear();
    }

    /// True once when the server is to be killed now.
    pub(super) fn kills(&self, now: Instant) -> bool {
        self.0.lock().kill_at.take_if(|at| *at <= now).is_some()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let state = self.0.lock();
        let busy = state.busy.as_ref().map(|(at, ..)| *at);
        [busy, state.kill_at].into_iter().flatten().min()
    }

    /// A turn of the thread. True when anything was saved.
    pub(super) fn turn(&self, now: Instant) -> bool {
        let state = &mut *self.0.lock();
        let mut any = false;
        loop {
            if let Some((_, kept, number, rises)) = state.busy.take_if(|(at, ..)| *at <= now) {
                state.number = number;
                kept.end_save(rises);
                any = true;
            }
            if state.busy.is_some() || state.jobs.is_empty() {
                return any;
            }
            let job = state.jobs.remove(0);
            state.begin(now, job);
        }
    }
}

impl State {
    fn begin(&mut self, now: Instant, job: Arc<EpochState>) {
        let (number, rises) = job.begin_save();
        let mut time = Duration::ZERO;
        if let Some(saves) = self.saves {
            let hang = saves.hang.filter(|_| self.prng.chance(Ratio::new(1, 2)));
            time = hang.unwrap_or_else(|| self.prng.duration(Duration::ZERO..=saves.time_max));
            self.stats.late += 1;
            if saves.kills && self.prng.chance(Ratio::new(3, 4)) {
                // Where a save hangs the failure is told by itself in the end.
                let within = if hang.is_some() { time.min(5500 * MS) } else { time };
                self.kill_at = Some(now + self.prng.duration(Duration::ZERO..=within));
            }
        }
        if self.plant != Plant::LateSave {
            self.number = number;
        }
        self.busy = Some((now + time, job, number, rises));
    }
}

impl EpochStore for KeptEpoch {
    fn save(&self, _key: &str, state: &Arc<EpochState>) {
        let kept = &mut *self.0.lock();
        if kept.saves.is_none() && kept.busy.is_none() {
            let (number, rises) = state.begin_save();
            kept.number = number;
            return state.end_save(rises);
        }
        kept.jobs.push(Arc::clone(state));
    }
}
