//! IOs that wait to be issued: a queue for each device, and whose turn it is.
//!
//! Devices take turns, one request each, so that none waits behind all that another has asked for.

use std::collections::VecDeque;

use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::device_table::IOS_MAX;

/// The row of an IO in the table of those that a shard has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IoRow(pub(super) u32);

/// The queues of all devices.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    queues: Vec<VecDeque<IoRow>>,
    /// Devices whose queues are not empty.
    some: DeviceSet,
    /// The device that had the last turn.
    last: Option<DeviceIndex>,
    count: usize,
}

impl Waiting {
    /// There is a queue for this device.
    pub(super) fn add_device(&mut self, device: DeviceIndex) {
        while self.queues.len() <= device.index() {
            self.queues.push(VecDeque::new());
        }
        self.queues[device.index()].reserve_exact(IOS_MAX);
    }

    /// An IO waits behind all others of its device.
    pub(super) fn push(&mut self, device: DeviceIndex, row: IoRow) {
        self.queues[device.index()].push_back(row);
        self.some.insert(device);
        self.count += 1;
    }

    /// The device whose turn it is, of those that are not blocked.
    pub(super) fn next(&self, blocked: DeviceSet) -> Option<DeviceIndex> {
        self.some.without(blocked).next_after(self.last)
    }

    /// A device had its turn.
    pub(super) fn turn_taken(&mut self, device: DeviceIndex) {
        self.last = Some(device);
    }

    /// The IO that is issued next of this device.
    pub(super) fn front(&self, device: DeviceIndex) -> Option<IoRow> {
        self.queues.get(device.index())?.front().copied()
    }

    /// That one does not wait any more.
    pub(super) fn pop_front(&mut self, device: DeviceIndex) {
        let queue = &mut self.queues[device.index()];
        self.count -= usize::from(queue.pop_front().is_some());
        if queue.is_empty() {
            self.some.remove(device);
        }
    }

    /// An IO does not wait any more.
    pub(super) fn remove(&mut self, device: DeviceIndex, row: IoRow) {
        let queue = &mut self.queues[device.index()];
        let before = queue.len();
        queue.retain(|waiting| *waiting != row);
        self.count -= before - queue.len();
        if queue.is_empty() {
            self.some.remove(device);
        }
    }

    /// Those of a device, in order.
    pub(super) fn of(&self, device: DeviceIndex) -> impl Iterator<Item = IoRow> {
        self.queues.get(device.index()).into_iter().flatten().copied()
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = IoRow> {
        self.queues.iter().flatten().copied()
    }

    /// Devices of which some wait.
    pub(super) fn devices(&self) -> DeviceSet {
        self.some
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }
}
