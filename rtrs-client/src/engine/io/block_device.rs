//! A session's device, as its user on a shard sees it.
//!
//! After the session has removed the device, the user's device fails all IO.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io};
use rtrs_core::losses::Losses;
use rtrs_core::mem::Region;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::Shard;
use crate::engine::device_set::DeviceIndex;
use crate::engine::device_table::{DeviceToken, OpenDevice, Reaped};

/// Device of a session on one shard, for its user.
#[derive(Debug)]
pub struct SessionDevice {
    shard: Rc<RefCell<Shard>>,
    device: DeviceIndex,
    /// Token of the device in the device table.
    token: DeviceToken,
    /// Description in the device table, refreshed by each poll.
    info: Arc<OpenDevice>,
    /// IOs submitted after the device was removed.
    ended: VecDeque<Completion>,
    /// Number of losses when the last reaped IO ended, if that was a flush.
    losses_at_end: Option<u64>,
}

impl SessionDevice {
    /// Creates the handle of a device that is or was open.
    pub(crate) fn new(shard: &Rc<RefCell<Shard>>, device: DeviceIndex) -> Self {
        let devices = &shard.borrow().ios.devices;
        let (info, token) = (Arc::clone(devices.info(device)), Rc::clone(devices.token(device)));
        let (shard, ended, losses_at_end) = (Rc::clone(shard), VecDeque::new(), None);
        Self { shard, device, token, info, ended, losses_at_end }
    }

    /// Ends queued IO; IO submitted afterwards fails immediately.
    pub fn close(&mut self) {
        if let Some(mut shard) = self.shard() {
            shard.ios.devices.close(self.device);
            shard.ios.cancel(self.device, &|_| true);
        }
    }

    /// Deregisters memory that no IO in flight uses.
    pub fn detach_region(&mut self, region: &Region) {
        if let Some(mut shard) = self.shard() {
            shard.detach(self.device, region);
        }
    }

    /// Shard, while the device is in the shard's table.
    fn shard(&self) -> Option<RefMut<'_, Shard>> {
        let shard = self.shard.borrow_mut();
        Rc::ptr_eq(shard.ios.devices.token(self.device), &self.token).then_some(shard)
    }
}

impl BlockDevice for SessionDevice {
    fn geometry(&self) -> &Geometry {
        &self.info.geometry
    }

    fn attach_region(&mut self, region: &Arc<Region>) -> std::io::Result<()> {
        self.shard().map_or(Ok(()), |mut shard| shard.attach(Some(self.device), region))
    }

    fn claim(&mut self) -> bool {
        let (device, shard) = (self.device, self.shard());
        shard.is_none_or(|mut shard| shard.ios.devices.claim(device))
    }

    fn release_claim(&mut self) {
        if let Some(mut shard) = self.shard() {
            shard.ios.devices.release_claim(self.device);
        }
    }

    fn take_losses(&mut self) -> Option<Arc<Losses>> {
        self.shard()?.ios.devices.take_losses(self.device)
    }

    fn losses_at_end(&self) -> Option<u64> {
        self.losses_at_end
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if let Some(mut shard) = self.shard() {
            return shard.ios.submit(self.device, io);
        }
        self.ended.push_back(Completion::new(io.tag, IoStatus::Aborted));
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        let Some(mut shard) = self.shard() else { return false };
        // Update the time for the next submissions, because the last event may be long past.
        shard.ios.now = now;
        let info = shard.ios.devices.info(self.device);
        let new = (!Arc::ptr_eq(&self.info, info)).then(|| Arc::clone(info));
        drop(shard);
        if let Some(info) = new {
            self.info = info;
        }
        false
    }

    fn take_given_up(&mut self) -> Option<u64> {
        self.shard()?.ios.devices.take_given_up(self.device)
    }

    fn reap(&mut self) -> Option<Completion> {
        let done = self.shard().and_then(|mut shard| shard.ios.devices.reap(self.device));
        let Some(Reaped { completion, losses }) = done else { return self.ended.pop_front() };
        self.losses_at_end = losses;
        Some(completion)
    }

    fn cancel(&mut self, fits: &dyn Fn(u64) -> bool) {
        if let Some(mut shard) = self.shard() {
            shard.ios.cancel(self.device, fits);
        }
    }

    fn inflight(&self) -> usize {
        let shard = self.shard().map_or(0, |shard| shard.ios.devices.inflight_of(self.device));
        shard + self.ended.len()
    }
}
