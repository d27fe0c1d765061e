//! State directory where the simulated server keeps the export's epoch for the next server.
//!
//! As in `rtrs-server/src/state.rs`, one thread saves, one job after another, and queued jobs are
//! saved together. A save has two steps. In the first, the number is written, so that a server that
//! starts after this one was killed finds it. In the second, the number becomes durable, and
//! requests that wait for it are answered. Unless the seed says otherwise, the two coincide.
//!
//! The file is the server's own (`rtrs-server/src/engine/epoch_file.rs`), on a medium that in some
//! runs refuses writes and tears them. Clearing the file always works here: a medium that also
//! refuses to clear the file hides a loss from the next server, as docs/explanation/fence.md says.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};
use rtrs_server::engine::epoch::{EpochState, EpochStore};
use rtrs_server::engine::epoch_file::{EpochFile, Medium};

use super::Plant;
use super::options::{MS, Saves};

/// Epoch of the export, which outlives servers.
#[derive(Debug)]
pub(super) struct KeptEpoch(Mutex<State>);

#[derive(Debug)]
struct State {
    /// File as the running server has it open.
    file: Option<EpochFile<SimFile>>,
    /// File as the last server left it.
    left: SimFile,
    /// Generator of later epochs; the first server finds no file, and starts with epoch 0.
    fresh: Prng,
    is_first: bool,
    saves: Option<Saves>,
    plant: Plant,
    prng: Prng,
    /// Jobs that are waiting for the thread.
    jobs: Vec<Arc<EpochState>>,
    /// Epoch being saved, with the end of the save, the number, and how often it has been raised.
    busy: Option<(Instant, Arc<EpochState>, u64, u32)>,
    /// Time at which the server is killed, before the save ends.
    kill_at: Option<Instant>,
    stats: EpochStats,
}

/// Content of the file, which refuses changes if the seed says so.
#[derive(Clone, Debug)]
struct SimFile {
    content: Option<Vec<u8>>,
    fails: bool,
    prng: Prng,
}

impl SimFile {
    fn refuse(&mut self) -> io::Result<()> {
        match self.fails && self.prng.chance(Ratio::new(2, 3)) {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }
}

impl Medium for SimFile {
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.content.clone())
    }

    fn replace(&mut self, content: &[u8]) -> io::Result<()> {
        self.refuse()?;
        self.content = Some(content.to_vec());
        Ok(())
    }

    fn overwrite(&mut self, at: usize, bytes: &[u8]) -> io::Result<()> {
        let refused = self.refuse();
        let done = match refused {
            Ok(()) => bytes.len(),
            // Writes none, some or all of the data.
            Err(_) => [0, self.prng.index(bytes.len()), bytes.len()][self.prng.index(3)],
        };
        let content = self.content.as_mut().expect("an open file");
        content[at..at + done].copy_from_slice(&bytes[..done]);
        refused
    }

    fn clear(&mut self) -> io::Result<()> {
        self.content = Some(Vec::new());
        Ok(())
    }
}

/// Counters of saves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EpochStats {
    /// Number of saves that took time.
    pub(super) late: u64,
    /// Number of servers that exited before a save finished.
    pub(super) cut: u64,
}

impl KeptEpoch {
    pub(super) fn new(saves: Option<Saves>, seed: u64, plant: Plant) -> Arc<Self> {
        let fails = saves.is_some_and(|saves| saves.fails);
        let prng = Prng::new(seed ^ 0x746f_726e_5f66_696b);
        Arc::new(Self(Mutex::new(State {
            file: None,
            left: SimFile { content: None, fails, prng },
            fresh: Prng::new(seed ^ 0x6672_6573_685f_6e6f),
            is_first: true,
            saves,
            plant,
            prng: Prng::new(seed ^ 0x7361_7665_735f),
            jobs: Vec::new(),
            busy: None,
            kill_at: None,
            stats: EpochStats::default(),
        })))
    }

    /// Returns the number that a server finds when it starts or exports the disk again.
    pub(super) fn number(&self) -> u64 {
        let state = &mut *self.0.lock();
        let fresh = if state.is_first { 0 } else { state.fresh.next_u64() };
        state.is_first = false;
        // The medium works when a server starts: only earlier failures count.
        let fails = std::mem::replace(&mut state.left.fails, false);
        let file = match state.file.take() {
            Some(mut file) => {
                file.medium().fails = false;
                file.reopen(fresh).map(|_| file)
            }
            None => EpochFile::open(state.left.clone(), fresh),
        };
        let file = state.file.insert(file.expect("it can be written"));
        (file.medium().fails, state.left.fails) = (fails, fails);
        file.number()
    }

    pub(super) fn stats(&self) -> EpochStats {
        self.0.lock().stats
    }

    /// Makes all further saves instantaneous.
    pub(super) fn calm(&self) {
        let state = &mut *self.0.lock();
        (state.saves, state.kill_at) = (None, None);
        let open = state.file.as_mut().map(EpochFile::medium);
        open.into_iter().chain([&mut state.left]).for_each(|file| file.fails = false);
        if let Some((at, ..)) = &mut state.busy {
            *at = Instant::ZERO;
        }
    }

    /// Ends the server's process and its thread.
    pub(super) fn abandon(&self) {
        let state = &mut *self.0.lock();
        state.stats.cut += u64::from(state.busy.take().is_some());
        state.kill_at = None;
        state.jobs.clear();
        if let Some(mut file) = state.file.take() {
            state.left = file.medium().clone();
        }
    }

    /// Whether the server is to be killed now; returns true only once.
    pub(super) fn kills(&self, now: Instant) -> bool {
        self.0.lock().kill_at.take_if(|at| *at <= now).is_some()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let state = self.0.lock();
        let busy = state.busy.as_ref().map(|(at, ..)| *at);
        [busy, state.kill_at].into_iter().flatten().min()
    }

    /// Runs one turn of the saving thread. Returns whether anything was saved.
    pub(super) fn turn(&self, now: Instant) -> bool {
        let state = &mut *self.0.lock();
        let mut any = false;
        loop {
            if let Some((_, kept, number, rises)) = state.busy.take_if(|(at, ..)| *at <= now) {
                if state.plant == Plant::LateSave {
                    state.write(number);
                }
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
                // A hanging save eventually fails on its own.
                let within = if hang.is_some() { time.min(5500 * MS) } else { time };
                self.kill_at = Some(now + self.prng.duration(Duration::ZERO..=within));
            }
        }
        if self.plant != Plant::LateSave {
            self.write(number);
        }
        self.busy = Some((now + time, job, number, rises));
    }

    fn write(&mut self, number: u64) {
        let file = self.file.as_mut().expect("a server runs");
        file.save(number).expect("it can be cleared");
    }
}

impl EpochStore for KeptEpoch {
    fn save(&self, _key: &str, state: &Arc<EpochState>) {
        let kept = &mut *self.0.lock();
        if kept.saves.is_none() && kept.busy.is_none() {
            let (number, rises) = state.begin_save();
            kept.write(number);
            return state.end_save(rises);
        }
        kept.jobs.push(Arc::clone(state));
    }
}
