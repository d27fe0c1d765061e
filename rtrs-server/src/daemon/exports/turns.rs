//! Turns, the locks for changes: only one thread at a time changes an export, and none while
//! another thread changes all exports. Changes to different exports do not wait for each other,
//! because each may take as long as its target does.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::access_list::bare;
use crate::settings::Settings;

/// Maximum time that a change waits for another change: longer than opening a target may take.
const TURN_MAX: Duration = Duration::from_secs(15);

#[derive(Debug, Default)]
struct State {
    /// Names of the exports that are being changed.
    names: BTreeSet<String>,
    /// Whether all exports are being changed.
    all: bool,
    /// Number of changes to all exports that are waiting for their turn. Other changes begin after
    /// these. A preview is not a change.
    waiting: usize,
}

impl State {
    fn is_free_for(&self, name: &str) -> bool {
        !self.all && self.waiting == 0 && !self.names.contains(name)
    }

    fn is_free_for_all(&self) -> bool {
        !self.all && self.names.is_empty()
    }
}

/// Turns of all threads that change exports.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Turns {
    /// Whether the server has no exports to change.
    ping_only: bool,
    state: Mutex<State>,
    /// Notified when a turn ends.
    ended: Condvar,
}

/// The right to change one export or all of them; released when dropped.
#[derive(Debug)]
pub(in crate::daemon) struct Turn<'a> {
    turns: &'a Turns,
    /// Name of the export; `None` for all.
    name: Option<String>,
}

impl Turns {
    pub(super) fn new(set: &Settings) -> Self {
        Self { ping_only: set.ping_only, ..Self::default() }
    }

    /// Waits for the turn to change all exports.
    pub(in crate::daemon) fn begin_all(&self) -> Result<Turn<'_>, String> {
        self.check()?;
        self.of_all(TURN_MAX).ok_or_else(still_running)
    }

    /// Waits until all exports can be examined while none is changed. Changes do not wait for a
    /// preview that has not begun.
    pub(in crate::daemon) fn begin_preview(&self) -> Result<Turn<'_>, String> {
        self.check()?;
        self.to_preview(TURN_MAX).ok_or_else(still_running)
    }

    /// Waits for the turn to change an export.
    pub(in crate::daemon) fn begin(&self, name: &str) -> Result<Turn<'_>, String> {
        self.check()?;
        self.of(name, TURN_MAX).ok_or_else(|| {
            format!(
                "another change of export {name:?}, or of all exports, is still running; try again"
            )
        })
    }

    fn check(&self) -> Result<(), String> {
        if self.ping_only {
            return Err("the server only answers pings (ping-only)".to_owned());
        }
        Ok(())
    }

    /// Waits up to `within` for the turn to change an export.
    pub(super) fn of(&self, name: &str, within: Duration) -> Option<Turn<'_>> {
        let name = bare(name);
        let mut state = self.state.lock();
        if !self.wait_until(&mut state, within, |state| state.is_free_for(name)) {
            return None;
        }
        state.names.insert(name.to_owned());
        Some(Turn { turns: self, name: Some(name.to_owned()) })
    }

    /// Waits up to `within` for the turn to change all exports.
    pub(super) fn of_all(&self, within: Duration) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        state.waiting += 1;
        let is_free = self.wait_until(&mut state, within, State::is_free_for_all);
        state.waiting -= 1;
        state.all |= is_free;
        drop(state);
        if is_free {
            return Some(Turn { turns: self, name: None });
        }
        // Other changes may have waited for this change.
        self.ended.notify_all();
        None
    }

    /// Waits up to `within` for the turn to examine all exports.
    fn to_preview(&self, within: Duration) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        let is_free = |state: &State| state.waiting == 0 && state.is_free_for_all();
        if !self.wait_until(&mut state, within, is_free) {
            return None;
        }
        state.all = true;
        Some(Turn { turns: self, name: None })
    }

    /// Whether a change to an export could begin.
    pub(super) fn are_free_for(&self, name: &str) -> bool {
        self.state.lock().is_free_for(bare(name))
    }

    fn wait_until(
        &self,
        state: &mut MutexGuard<'_, State>,
        within: Duration,
        is_free: impl Fn(&State) -> bool,
    ) -> bool {
        let until = Instant::now() + within;
        while !is_free(state) {
            if self.ended.wait_until(state, until).timed_out() {
                return is_free(state);
            }
        }
        true
    }
}

fn still_running() -> String {
    "another change of the exports is still running; try again".to_owned()
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock();
        match &self.name {
            Some(name) => drop(state.names.remove(name)),
            None => state.all = false,
        }
        drop(state);
        self.turns.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn changes_to_different_exports_do_not_wait_for_each_other() {
        let turns = Turns::default();
        let of_a = turns.of("a", Duration::ZERO).unwrap();
        let of_b = turns.of("b", Duration::ZERO).unwrap();
        assert!(turns.of("//a", Duration::ZERO).is_none() && !turns.are_free_for("a"));
        drop(of_a);
        assert!(turns.of("a", Duration::ZERO).is_some());
        assert!(turns.of_all(Duration::ZERO).is_none());
        drop(of_b);
        let all = turns.of_all(Duration::ZERO).unwrap();
        assert!(turns.of("a", Duration::ZERO).is_none());
        assert!(turns.of_all(Duration::ZERO).is_none());
        drop(all);
        assert!(turns.are_free_for("a"));
    }

    #[test]
    fn a_change_to_all_exports_precedes_later_ones() {
        let turns = Turns::default();
        let first = turns.of("a", Duration::ZERO).unwrap();
        thread::scope(|scope| {
            let all = scope.spawn(|| turns.of_all(LONG).is_some());
            while turns.state.lock().waiting == 0 {
                thread::yield_now();
            }
            assert!(turns.of("b", Duration::ZERO).is_none());
            let later = scope.spawn(|| turns.of("b", LONG).is_some());
            drop(first);
            assert!(all.join().unwrap() && later.join().unwrap());
        });
    }

    #[test]
    fn a_preview_that_waits_delays_no_change() {
        let turns = Turns::default();
        let first = turns.of("a", Duration::ZERO).unwrap();
        thread::scope(|scope| {
            let preview = scope.spawn(|| turns.to_preview(LONG).is_some());
            // The preview begins to wait at some point during this loop.
            for _ in 0..100 {
                assert!(turns.of("b", Duration::ZERO).is_some());
                thread::sleep(Duration::from_millis(1));
            }
            drop(first);
            assert!(preview.join().unwrap());
        });
        let _preview = turns.to_preview(Duration::ZERO).unwrap();
        assert!(turns.of("a", Duration::ZERO).is_none(), "nothing changes meanwhile");
    }
}
