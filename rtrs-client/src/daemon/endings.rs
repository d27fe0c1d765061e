//! Stopped front ends, counted across all shards by shard 0.

use crate::engine::{ClientEngine, DeviceIndex, Outstanding};

/// A shard's front ends that have stopped.
#[derive(Debug, Default)]
pub(crate) struct FrontsStopped {
    /// Number of IOs that had not ended.
    pub(crate) abandoned: usize,
    /// Devices whose clients may connect to the next process.
    pub(crate) may_return: Vec<DeviceIndex>,
}

/// State in which a volume left its users when it stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeftToUsers {
    /// Whether clients were connected, or had lost their connections, and may connect to the next
    /// process.
    pub(crate) may_return: bool,
    pub(crate) outstanding: Outstanding,
}

impl LeftToUsers {
    /// Whether the volume's next process must know this one's epoch. A detach declares that users
    /// that have disconnected cleanly are done. Users of an earlier process may not have connected
    /// yet.
    pub(crate) fn needs_epoch(self, detached: bool) -> bool {
        match self.outstanding {
            Outstanding::Loss | Outstanding::Inherited => true,
            Outstanding::Unflushed => self.may_return || !detached,
            Outstanding::Reported => self.may_return,
            Outstanding::Nothing => false,
        }
    }
}

/// A device whose front ends are stopping.
#[derive(Debug)]
struct Ending {
    device: DeviceIndex,
    /// Number of shards whose front end is still running.
    running: usize,
    abandoned: usize,
}

/// The record of stopped front ends, kept on shard 0.
#[derive(Debug, Default)]
pub(crate) struct Endings {
    /// Number of IOs that had not ended when all front ends of a shard stopped.
    pub(crate) abandoned: usize,
    /// Devices being stopped individually.
    devices: Vec<Ending>,
    /// Devices whose clients may connect to the next process.
    may_return: Vec<DeviceIndex>,
}

impl Endings {
    /// Counts a shard's front ends after all have stopped.
    pub(crate) fn add(&mut self, stopped: FrontsStopped) {
        self.abandoned += stopped.abandoned;
        self.may_return.extend(stopped.may_return);
    }

    /// Counts one stopped front end of this device; each of the `shards` has one. Returns the
    /// number of IOs that had not ended, once all have stopped.
    pub(crate) fn add_device(
        &mut self,
        device: DeviceIndex,
        stopped: FrontsStopped,
        shards: usize,
    ) -> Option<usize> {
        let at = self.devices.iter().position(|ending| ending.device == device);
        let at = at.unwrap_or_else(|| {
            self.devices.push(Ending { device, running: shards, abandoned: 0 });
            self.devices.len() - 1
        });
        self.may_return.extend(stopped.may_return);
        let ending = &mut self.devices[at];
        ending.running = ending.running.saturating_sub(1);
        ending.abandoned += stopped.abandoned;
        (ending.running == 0).then(|| self.devices.swap_remove(at).abandoned)
    }

    /// Takes the record of how a device, whose front ends have all stopped, left its users.
    pub(crate) fn left(
        &mut self,
        device: DeviceIndex,
        engine: &ClientEngine,
    ) -> Option<LeftToUsers> {
        let before = self.may_return.len();
        // The index may be reused.
        self.may_return.retain(|left| *left != device);
        let may_return = self.may_return.len() < before;
        engine.outstanding(device).map(|outstanding| LeftToUsers { may_return, outstanding })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_needed_by_users_that_may_continue() {
        let needs = |outstanding, may_return, detached| {
            LeftToUsers { may_return, outstanding }.needs_epoch(detached)
        };
        for (may, detached) in [(false, false), (false, true), (true, false), (true, true)] {
            assert!(!needs(Outstanding::Nothing, may, detached));
            assert_eq!(needs(Outstanding::Reported, may, detached), may);
            assert_eq!(needs(Outstanding::Unflushed, may, detached), may || !detached);
            assert!(needs(Outstanding::Inherited, may, detached));
            assert!(needs(Outstanding::Loss, may, detached));
        }
    }

    #[test]
    fn a_device_has_stopped_when_all_shards_have() {
        let mut endings = Endings::default();
        let device = DeviceIndex::FIRST;
        let stopped = |abandoned| FrontsStopped { abandoned, may_return: Vec::new() };
        assert_eq!(endings.add_device(device, stopped(1), 2), None);
        assert_eq!(endings.add_device(device, stopped(2), 2), Some(3));
        assert_eq!(endings.add_device(device, stopped(0), 1), Some(0), "a new device");
        endings.add(stopped(4));
        assert_eq!(endings.abandoned, 4);
    }
}
