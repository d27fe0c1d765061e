//! IOs waiting to be issued: one queue for each device, served in turn.
//!
//! Devices take turns, one request each, so that none has to wait for everything that another has
//! submitted.

use std::collections::VecDeque;

use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::device_table::IOS_MAX;

/// Row of an IO in the table of accepted IOs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IoRow(pub(super) u32);

/// Queues of all devices.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    queues: Vec<VecDeque<IoRow>>,
    /// Devices with a non-empty queue.
    some: DeviceSet,
    /// Device that had its turn last.
    last: Option<DeviceIndex>,
    count: usize,
}

impl Waiting {
    /// Adds a queue for this device, if it has none.
    pub(super) fn add_device(&mut self, device: DeviceIndex) {
        while self.queues.len() <= device.index() {
            self.queues.push(VecDeque::new());
        }
        self.queues[device.index()].reserve_exact(IOS_MAX);
    }

    /// Queues an IO behind all others for its device.
    pub(super) fn push(&mut self, device: DeviceIndex, row: IoRow) {
        self.queues[device.index()].push_back(row);
        self.some.insert(device);
        self.count += 1;
    }

    /// Device whose turn is next, among those that are not blocked.
    pub(super) fn next(&self, blocked: DeviceSet) -> Option<DeviceIndex> {
        self.some.without(blocked).next_after(self.last)
    }

    /// Records that a device had its turn.
    pub(super) fn turn_taken(&mut self, device: DeviceIndex) {
        self.last = Some(device);
    }

    /// IO to be issued next for this device.
    pub(super) fn front(&self, device: DeviceIndex) -> Option<IoRow> {
        self.queues.get(device.index())?.front().copied()
    }

    /// Removes the IO to be issued next for this device.
    pub(super) fn pop_front(&mut self, device: DeviceIndex) {
        let queue = &mut self.queues[device.index()];
        self.count -= usize::from(queue.pop_front().is_some());
        if queue.is_empty() {
            self.some.remove(device);
        }
    }

    /// Removes an IO from the queue.
    pub(super) fn remove(&mut self, device: DeviceIndex, row: IoRow) {
        let queue = &mut self.queues[device.index()];
        let before = queue.len();
        queue.retain(|waiting| *waiting != row);
        self.count -= before - queue.len();
        if queue.is_empty() {
            self.some.remove(device);
        }
    }

    /// Waiting IOs for a device, in order.
    pub(super) fn of(&self, device: DeviceIndex) -> impl Iterator<Item = IoRow> {
        self.queues.get(device.index()).into_iter().flatten().copied()
    }

    /// All waiting IOs.
    pub(super) fn iter(&self) -> impl Iterator<Item = IoRow> {
        self.queues.iter().flatten().copied()
    }

    /// Devices with waiting IOs.
    pub(super) fn devices(&self) -> DeviceSet {
        self.some
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }
}
