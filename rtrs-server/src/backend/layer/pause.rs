//! A layer that holds selected IOs until a test releases them.
//!
//! Held IOs have no effect until they are released, and then run in order of arrival. A test can
//! thus deliberately delay a write. The [`PauseHandle`] works from any thread; a device that holds
//! IOs checks every millisecond whether they may continue.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{BlockSource, Geometry, Io, IoOp};
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};

use super::filter::{Filter, Layer, Verdict};

const POLL_INTERVAL: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
struct State {
    /// Operations and range of IOs to hold; None to hold nothing.
    filter: Option<(Vec<IoOp>, Range<u64>)>,
    held: usize,
    /// Number of held IOs that may continue.
    tickets: usize,
}

/// Handle to a [`pause`] layer, for tests.
#[derive(Debug, Default)]
pub struct PauseHandle {
    state: Mutex<State>,
}

impl PauseHandle {
    /// Holds every IO with these operations (all if empty) from now on.
    pub fn hold(&self, ops: &[IoOp]) {
        self.hold_range(ops, 0..u64::MAX);
    }

    /// Holds IOs with these operations (all if empty) that touch these bytes from now on. A flush
    /// counts as touching byte 0.
    pub fn hold_range(&self, ops: &[IoOp], range: Range<u64>) {
        self.state.lock().filter = Some((ops.to_vec(), range));
    }

    /// Number of IOs currently held, across all shards.
    pub fn held(&self) -> usize {
        self.state.lock().held
    }

    /// Releases `count` IOs; later ones are still held.
    pub fn release(&self, count: usize) {
        let mut state = self.state.lock();
        state.tickets = state.held.min(state.tickets + count);
    }

    /// Releases all held IOs and stops holding IOs.
    pub fn release_all(&self) {
        let mut state = self.state.lock();
        state.filter = None;
        state.tickets = state.held;
    }
}

/// Adds a layer that holds selected IOs to a backend. Nothing is held until the handle requests it.
pub fn pause(inner: Arc<dyn BlockSource>) -> (Layer, Arc<PauseHandle>) {
    let handle = Arc::new(PauseHandle::default());
    (Layer { inner, filter: Arc::clone(&handle) as Arc<dyn Filter> }, handle)
}

impl Filter for PauseHandle {
    fn decide(&self, io: &Io, _: &Geometry, _: &mut Prng) -> Verdict {
        let mut state = self.state.lock();
        let Some((ops, range)) = &state.filter else { return Verdict::Pass };
        let end = io.offset.saturating_add(u64::from(io.len).max(1));
        let named = ops.is_empty() || ops.contains(&io.op);
        if !named || io.offset >= range.end || range.start >= end {
            return Verdict::Pass;
        }
        state.held += 1;
        Verdict::Hold
    }

    /// Consumes one ticket for an IO that is released.
    fn may_continue(&self, _: Instant, _: Instant) -> bool {
        let mut state = self.state.lock();
        if state.tickets == 0 {
            return false;
        }
        state.tickets -= 1;
        state.held -= 1;
        true
    }

    fn next_check(&self, _: Instant, now: Instant) -> Instant {
        now + POLL_INTERVAL
    }

    fn forget(&self, count: usize) {
        let mut state = self.state.lock();
        state.held -= count;
        state.tickets = state.tickets.min(state.held);
    }
}
