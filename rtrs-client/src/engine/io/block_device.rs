//! A device of the session as its user on a shard has it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io};
use rtrs_core::losses::Losses;
use rtrs_core::mem::Region;
use rtrs_core::time::Instant;

use super::Shard;
use crate::engine::device_table::{DeviceIndex, OpenDevice};

/// A device of the session on one shard.
#[derive(Debug)]
pub struct SessionDevice {
    shard: Rc<RefCell<Shard>>,
    device: DeviceIndex,
    /// What the device table says of it, looked at again with each poll.
    info: Arc<OpenDevice>,
}

impl SessionDevice {
    /// A device of the session that was open once.
    pub(crate) fn new(shard: Rc<RefCell<Shard>>, device: DeviceIndex) -> Self {
        let info = Arc::clone(shard.borrow().devices.info(device));
        Self { shard, device, info }
    }

    /// Ends what waits to be issued; what is submitted from now on ends at once.
    pub fn close(&mut self) {
        let mut shard = self.shard.borrow_mut();
        shard.devices.close(self.device);
        shard.cancel(self.device, &|_| true);
    }
}

impl BlockDevice for SessionDevice {
    fn geometry(&self) -> &Geometry {
        &self.info.geometry
    }

    fn attach_region(&mut self, region: &Arc<Region>) -> std::io::Result<()> {
        self.shard.borrow_mut().attach_region(region)
    }

    fn take_losses(&mut self) -> Option<Arc<Losses>> {
        self.shard.borrow_mut().devices.take_losses(self.device)
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        self.shard.borrow_mut().submit(self.device, io)
    }

    fn poll(&mut self, now: Instant) -> bool {
        let mut shard = self.shard.borrow_mut();
        // The time of what is submitted next; the last event may be long ago.
        shard.now = now;
        let info = shard.devices.info(self.device);
        if !Arc::ptr_eq(&self.info, info) {
            self.info = Arc::clone(info);
        }
        false
    }

    fn take_given_up(&mut self) -> Option<u64> {
        self.shard.borrow_mut().devices.take_given_up(self.device)
    }

    fn reap(&mut self) -> Option<Completion> {
        self.shard.borrow_mut().devices.reap(self.device)
    }

    fn cancel(&mut self, fits: &dyn Fn(u64) -> bool) {
        self.shard.borrow_mut().cancel(self.device, fits);
    }

    fn inflight(&self) -> usize {
        self.shard.borrow().devices.inflight_of(self.device)
    }
}
