//! A backend that holds chosen IOs until a test lets them go.
//!
//! Held IOs have not run: they have no effect until released, then run in the order they came.
//! So a test can make a write late on purpose. The [`PauseHandle`] works from any thread; a
//! device that holds IOs looks every millisecond whether they may go.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{
    BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoOp, SharedErrors,
};
use rtrs_core::mem::Region;
use rtrs_core::time::{Duration, Instant, earliest};

use crate::backend::target::INFLIGHT_MAX;

const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
struct State {
    /// Operations held; None when nothing is.
    filter: Option<(Vec<IoOp>, Range<u64>)>,
    held: usize,
    /// Held IOs that may still go, one by one.
    tickets: usize,
}

/// The test's end of a [`PauseSource`].
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

    /// IOs held now, over all cores.
    pub fn held(&self) -> usize {
        self.state.lock().held
    }

    /// Lets `count` held IOs go; those that come later are still held.
    pub fn release(&self, count: usize) {
        let mut state = self.state.lock();
        state.tickets = state.held.min(state.tickets + count);
    }

    /// Lets all go and holds nothing more.
    pub fn release_all(&self) {
        let mut state = self.state.lock();
        state.filter = None;
        state.tickets = state.held;
    }

    fn is_chosen(&self, io: &Io) -> bool {
        let mut state = self.state.lock();
        let Some((ops, range)) = &state.filter else { return false };
        let end = io.offset.saturating_add(u64::from(io.len).max(1));
        let chosen =
            (ops.is_empty() || ops.contains(&io.op)) && io.offset < range.end && range.start < end;
        state.held += usize::from(chosen);
        chosen
    }

    /// Takes one ticket, for an IO that is held no longer.
    fn take_ticket(&self) -> bool {
        let mut state = self.state.lock();
        if state.tickets == 0 {
            return false;
        }
        state.tickets -= 1;
        state.held -= 1;
        true
    }

    /// Held IOs went away with their device.
    fn forget(&self, count: usize) {
        let mut state = self.state.lock();
        state.held -= count;
        state.tickets = state.tickets.min(state.held);
    }
}

/// Holds chosen IOs of a backend.
#[derive(Debug)]
pub struct PauseSource {
    inner: Arc<dyn BlockSource>,
    handle: Arc<PauseHandle>,
}

impl PauseSource {
    /// Over a backend; holds nothing until the handle says so.
    pub fn new(inner: Arc<dyn BlockSource>) -> (Self, Arc<PauseHandle>) {
        let handle = Arc::new(PauseHandle::default());
        (Self { inner, handle: Arc::clone(&handle) }, handle)
    }
}

impl BlockSource for PauseSource {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn shared_errors(&self) -> SharedErrors {
        self.inner.shared_errors()
    }

    fn is_volatile(&self) -> bool {
        self.inner.is_volatile()
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(PauseDevice {
            inner: self.inner.open(core)?,
            handle: Arc::clone(&self.handle),
            held: VecDeque::with_capacity(INFLIGHT_MAX),
            going: VecDeque::with_capacity(INFLIGHT_MAX),
            now: Instant::ZERO,
        }))
    }

    fn settle(&self) -> io::Result<()> {
        self.inner.settle()
    }
}

#[derive(Debug)]
struct PauseDevice {
    inner: Box<dyn BlockDevice>,
    handle: Arc<PauseHandle>,
    held: VecDeque<Io>,
    /// Released, on the way to the backend.
    going: VecDeque<Io>,
    now: Instant,
}

impl BlockDevice for PauseDevice {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn attach_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        self.inner.attach_region(region)
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        if self.handle.is_chosen(&io) {
            self.held.push_back(io);
            return Ok(());
        }
        self.inner.submit(io)
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        while !self.held.is_empty() && self.handle.take_ticket() {
            self.going.extend(self.held.pop_front());
        }
        let mut any = false;
        while let Some(io) = self.going.pop_front() {
            if let Err(io) = self.inner.submit(io) {
                self.going.push_front(io);
                break;
            }
            any = true;
        }
        self.inner.poll(now) || any
    }

    fn reap(&mut self) -> Option<Completion> {
        self.inner.reap()
    }

    fn inflight(&self) -> usize {
        self.held.len() + self.going.len() + self.inner.inflight()
    }

    fn deadline(&self) -> Option<Instant> {
        let holds = !self.held.is_empty() || !self.going.is_empty();
        earliest(holds.then(|| self.now + LOOK), self.inner.deadline())
    }
}

impl Drop for PauseDevice {
    fn drop(&mut self) {
        self.handle.forget(self.held.len());
    }
}
