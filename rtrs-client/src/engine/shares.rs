//! What each device may have of something that all devices of a shard use: IO rows, or permits.
//!
//! Half of it is divided evenly: that much is there for a device whatever the others do, also when
//! the disk behind one of them hangs and holds what it has. The other half is for whoever comes
//! first. So no device gets less than half of its share, and the only device of a session has all.

use super::device_set::DeviceIndex;

/// Who has how much of something.
#[derive(Debug)]
pub(crate) struct Shares {
    all: u32,
    /// Devices that share it.
    devices: u32,
    /// Kept for each of them.
    reserve: u32,
    held: Vec<u32>,
    /// What all have.
    total: u32,
    /// What devices have beyond their reserves.
    beyond: u32,
}

impl Shares {
    /// So much is to be shared, by nobody yet.
    pub(crate) fn new(all: usize) -> Self {
        let all = u32::try_from(all).unwrap_or(u32::MAX);
        Self { all, devices: 0, reserve: 0, held: Vec::new(), total: 0, beyond: 0 }
    }

    /// So much is to be shared from now on; nobody has any of it.
    pub(crate) fn set_all(&mut self, all: usize) {
        self.all = u32::try_from(all).unwrap_or(u32::MAX);
        self.divide(self.devices);
    }

    /// One more device takes part.
    pub(crate) fn add(&mut self) {
        self.divide(self.devices + 1);
    }

    /// One takes no part any more; it has nothing left.
    pub(crate) fn remove(&mut self) {
        self.divide(self.devices - 1);
    }

    fn divide(&mut self, devices: u32) {
        self.devices = devices;
        let even = (self.all / 2).checked_div(devices).unwrap_or(0);
        self.reserve = even.max(u32::from(self.all > devices));
        let beyond = self.held.iter().map(|held| held.saturating_sub(self.reserve));
        self.beyond = beyond.sum();
    }

    /// True while a device may have one more.
    pub(crate) fn may_take(&self, device: DeviceIndex) -> bool {
        let held = self.held.get(device.index()).copied().unwrap_or(0);
        let room = self.all.saturating_sub(self.reserve * self.devices);
        self.total < self.all && (held < self.reserve || self.beyond < room)
    }

    /// A device has one more.
    pub(crate) fn take(&mut self, device: DeviceIndex) {
        let at = device.index();
        if self.held.len() <= at {
            self.held.resize(at + 1, 0);
        }
        self.beyond += u32::from(self.held[at] >= self.reserve);
        self.held[at] += 1;
        self.total += 1;
    }

    /// A device has one less.
    pub(crate) fn give(&mut self, device: DeviceIndex) {
        let held = &mut self.held[device.index()];
        *held -= 1;
        self.total -= 1;
        self.beyond -= u32::from(*held >= self.reserve);
    }

    /// What a device has.
    pub(crate) fn held(&self, device: DeviceIndex) -> usize {
        self.held.get(device.index()).map_or(0, |held| *held as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(all: usize, devices: u16) -> Shares {
        let mut shares = Shares::new(all);
        (0..devices).for_each(|_| shares.add());
        shares
    }

    /// Takes as much as a device may have; how much it has then.
    fn fill(shares: &mut Shares, device: u16) -> usize {
        let device = DeviceIndex(device);
        while shares.may_take(device) {
            shares.take(device);
        }
        shares.held(device)
    }

    #[test]
    fn the_only_device_has_all() {
        for all in [1, 2, 3, 255, 1024] {
            assert_eq!(fill(&mut shares(all, 1), 0), all);
        }
    }

    #[test]
    fn half_of_its_share_is_there_for_each_device_whatever_the_others_have() {
        for (all, devices) in [(255, 2), (1024, 2), (1024, 128), (255, 100), (12, 7), (8, 7)] {
            let mut shares = shares(all, devices);
            let held: Vec<_> = (0..devices).map(|device| fill(&mut shares, device)).collect();
            let least = (all / usize::from(devices) / 2).max(1);
            assert!(held.iter().all(|held| *held >= least), "{all}: {held:?}");
            assert_eq!(held.iter().sum::<usize>(), all, "{devices} devices use all there is");
            for device in (0..devices).rev() {
                (0..held[usize::from(device)]).for_each(|_| shares.give(DeviceIndex(device)));
            }
            assert_eq!(shares.beyond, 0);
        }
        let mut shares = shares(4, 7);
        assert_eq!((0..7).map(|device| fill(&mut shares, device)).sum::<usize>(), 4);
    }

    #[test]
    fn who_has_too_much_when_another_comes_gets_no_more_until_it_has_less() {
        let mut shares = shares(16, 1);
        assert_eq!(fill(&mut shares, 0), 16);
        shares.add();
        let (first, second) = (DeviceIndex(0), DeviceIndex(1));
        assert!(!shares.may_take(first) && !shares.may_take(second), "there is none");
        shares.give(first);
        assert!(!shares.may_take(first) && shares.may_take(second));
        (0..3).for_each(|_| shares.give(first));
        assert!(!shares.may_take(first), "four are kept for the other one");
        shares.give(first);
        assert!(shares.may_take(first));
        assert_eq!(fill(&mut shares, 1), 5);
        (0..5).for_each(|_| shares.give(second));
        shares.remove();
        assert_eq!(fill(&mut shares, 0), 16);
    }
}
