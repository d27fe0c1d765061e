//! The session as a block device of one core, over that core's part of it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io};
use rtrs_core::losses::Losses;
use rtrs_core::mem::Region;
use rtrs_core::time::Instant;

use super::shard::ShardSession;

/// The session as a block device of one core.
#[derive(Debug)]
pub struct SessionDevice {
    session: Rc<RefCell<ShardSession>>,
    geometry: Geometry,
}

impl SessionDevice {
    /// This core's view of a session whose device is open.
    pub(crate) fn new(session: Rc<RefCell<ShardSession>>) -> Self {
        let geometry = session.borrow().geometry.clone();
        Self { session, geometry }
    }
}

impl BlockDevice for SessionDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn attach_region(&mut self, region: &Arc<Region>) -> std::io::Result<()> {
        self.session.borrow_mut().attach_region(region)
    }

    fn take_losses(&mut self) -> Option<Arc<Losses>> {
        self.session.borrow_mut().take_losses()
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        self.session.borrow_mut().submit(io)
    }

    fn poll(&mut self, now: Instant) -> bool {
        // The time of what is submitted next; the last event may be long ago.
        self.session.borrow_mut().now = now;
        false
    }

    fn reap(&mut self) -> Option<Completion> {
        self.session.borrow_mut().completed.pop_front()
    }

    fn cancel(&mut self, fits: &dyn Fn(u64) -> bool) {
        self.session.borrow_mut().cancel(fits);
    }

    fn inflight(&self) -> usize {
        let session = self.session.borrow();
        session.inflight() + session.completed.len()
    }
}
