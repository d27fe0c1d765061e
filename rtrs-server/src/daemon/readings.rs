//! Keeps reloads in order: the configuration that is read last is applied last.
//!
//! A number is incremented before each reading, so that a command that saves an export can find out
//! whether a reload may have read the old file: if no reload is running when the command begins,
//! and the number has not changed once the file is written, every reload reads the new file.

use parking_lot::Mutex;

/// Reloads, each from before it reads the configuration until its exports are changed.
#[derive(Debug, Default)]
pub(super) struct Readings(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Number of the last reading.
    last: u64,
    /// Number of reloads that have not ended.
    running: usize,
    /// Number of the last reading whose exports were applied.
    applied: u64,
}

/// A reload that has begun to read. Ends when dropped.
#[derive(Debug)]
pub(super) struct Reading<'a> {
    readings: &'a Readings,
    number: u64,
}

impl Readings {
    /// Begins a reading. The caller holds the lock that orders the readings.
    pub(super) fn begin(&self) -> Reading<'_> {
        let mut state = self.0.lock();
        state.last += 1;
        state.running += 1;
        Reading { readings: self, number: state.last }
    }

    /// Number of the last reading, and whether a reload is running.
    pub(super) fn state(&self) -> (u64, bool) {
        let state = self.0.lock();
        (state.last, state.running > 0)
    }
}

impl Reading<'_> {
    /// Whether no later reading has been applied. The caller holds the lock for changes to exports.
    pub(super) fn may_apply(&self) -> bool {
        let mut state = self.readings.0.lock();
        let may = state.applied < self.number;
        if may {
            state.applied = self.number;
        }
        may
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.readings.0.lock().running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_applied_in_order() {
        let readings = Readings::default();
        let [first, second, third] = [(); 3].map(|()| readings.begin());
        assert!(second.may_apply() && !first.may_apply());
        assert_eq!(readings.state(), (3, true));
        drop((first, second));
        assert!(third.may_apply());
        drop(third);
        assert_eq!(readings.state(), (3, false));
    }
}
