//! A layer that holds chosen IOs until a test releases them.
//!
//! Held IOs have not run: they have no effect until released, then run in the order they came.
//! So a test can make a write late on purpose. The [`PauseHandle`] works from any thread; a
//! device that holds IOs looks every millisecond whether they may go.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{BlockSource, Geometry, Io, IoOp};
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};

use super::filter::{Filter, Layer, Verdict};

const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
struct State {
    /// Operations held; None when nothing is.
    filter: Option<(Vec<IoOp>, Range<u64>)>,
    held: usize,
    /// Held IOs that may still go, one by one.
    tickets: usize,
}

/// The test's end of a [`pause`].
#[derive(Debug, Default)]
pub struct PauseHandle {
    state: Mutex<State>,
}

impl PauseHandle {
    /// Holds from now on every IO of these operations (all, when empty).
    pub fn hold(&self, ops: &[IoOp]) {
        self.hold_range(ops, 0..u64::MAX);
    }

    /// Holds from now on IOs of these operations (all, when empty) that touch these bytes. A
    /// flush counts as touching byte 0.
    pub fn hold_range(&self, ops: &[IoOp], range: Range<u64>) {
        self.state.lock().filter = Some((ops.to_vec(), range));
    }

    /// IOs held now, over all shards.
    pub fn held(&self) -> usize {
        self.state.lock().held
    }

    /// Releases `count` held IOs; those that come later are still held.
    pub fn release(&self, count: usize) {
        let mut state = self.state.lock();
        state.tickets = state.held.min(state.tickets + count);
    }

    /// Releases all and holds nothing more.
    pub fn release_all(&self) {
        let mut state = self.state.lock();
        state.filter = None;
        state.tickets = state.held;
    }
}

/// Holds chosen IOs of a backend: none until the handle says so.
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

    /// Takes one ticket, for an IO that is held no longer.
    fn may_go(&self, _: Instant, _: Instant) -> bool {
        let mut state = self.state.lock();
        if state.tickets == 0 {
            return false;
        }
        state.tickets -= 1;
        state.held -= 1;
        true
    }

    fn look_at(&self, _: Instant, now: Instant) -> Instant {
        now + LOOK
    }

    fn forget(&self, count: usize) {
        let mut state = self.state.lock();
        state.held -= count;
        state.tickets = state.tickets.min(state.held);
    }
}
