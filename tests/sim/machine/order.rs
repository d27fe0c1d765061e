//! Order in which a front end submits the requests of a ring: those that an earlier process left
//! come first, and all are submitted in the order in which the driver offered them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_client::SessionDevice;
use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp};
use rtrs_core::losses::Losses;
use rtrs_core::mem::Region;
use rtrs_core::time::Instant;

use super::super::Failure;

/// Requests of a ring in the order of their offers.
#[derive(Debug)]
pub(super) struct Order {
    /// Requests of which nothing was submitted.
    waiting: VecDeque<Io>,
    /// Request that was submitted last.
    last: Option<Io>,
    failure: Option<Failure>,
}

impl Order {
    /// Begins with the requests that an earlier process left.
    pub(super) fn new(left: impl Iterator<Item = Io>) -> Self {
        Self { waiting: left.collect(), last: None, failure: None }
    }

    /// Adds an offered request.
    pub(super) fn offer(&mut self, io: Io) {
        self.waiting.push_back(io);
    }

    /// Returns the first violation.
    pub(super) fn take(&mut self) -> Option<Failure> {
        self.failure.take()
    }

    /// Records an IO that the front end submits.
    fn submitted(&mut self, io: &Io) {
        let begins = |next: &Io| next.op == io.op && next.offset == io.offset;
        if self.waiting.front().is_some_and(begins) {
            self.last = self.waiting.pop_front();
            return;
        }
        let (from, to) = (io.offset, io.offset + u64::from(io.len));
        let within = |last: &Io| {
            last.op == io.op && last.offset < from && to <= last.offset + u64::from(last.len)
        };
        // The flush of a durable write comes when the write has ended.
        if io.op == IoOp::Flush || self.last.as_ref().is_some_and(within) {
            return;
        }
        let next = self.waiting.front().map(|next| (next.op, next.offset));
        let text = format!("{:?} at {} was submitted instead of {next:?}", io.op, io.offset);
        self.failure.get_or_insert_with(|| Failure::new("order", text));
    }
}

/// Device of a session whose user is watched.
#[derive(Debug)]
pub(super) struct Watched {
    inner: SessionDevice,
    order: Rc<RefCell<Order>>,
}

impl Watched {
    pub(super) fn new(inner: SessionDevice, order: Rc<RefCell<Order>>) -> Self {
        Self { inner, order }
    }
}

impl BlockDevice for Watched {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn refresh(&mut self) {
        self.inner.refresh();
    }

    fn attach_region(&mut self, region: &Arc<Region>) -> std::io::Result<()> {
        self.inner.attach_region(region)
    }

    fn claim(&mut self) -> bool {
        self.inner.claim()
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        let copy = io.clone();
        self.inner.submit(io)?;
        self.order.borrow_mut().submitted(&copy);
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.inner.poll(now)
    }

    fn take_given_up(&mut self) -> Option<u64> {
        self.inner.take_given_up()
    }

    fn reap(&mut self) -> Option<Completion> {
        self.inner.reap()
    }

    fn cancel(&mut self, fits: &dyn Fn(u64) -> bool) {
        self.inner.cancel(fits);
    }

    fn inflight(&self) -> usize {
        self.inner.inflight()
    }

    fn rests(&self) -> bool {
        self.inner.rests()
    }

    fn take_losses(&mut self) -> Option<Arc<Losses>> {
        self.inner.take_losses()
    }

    fn losses_at_end(&self) -> Option<u64> {
        self.inner.losses_at_end()
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }
}
