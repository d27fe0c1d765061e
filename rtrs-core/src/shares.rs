//! Fair sharing of a resource among the devices of a shard: IO rows, permits, or buffers.
//!
//! Half of the resource is divided evenly into reserves. A device's reserve is available to it
//! regardless of the others, even if the disk behind another device hangs and does not return its
//! share. The other half is granted first come, first served. So every device can use at least half
//! of its even share, and the only device of a session can use everything.

/// Shares of a resource.
#[derive(Debug)]
pub struct Shares {
    all: u32,
    /// Minimum reserve of a device as long as the total suffices for all.
    least: u32,
    /// Number of devices that share the resource.
    devices: u32,
    /// Reserve of each device.
    reserve: u32,
    held: Vec<u32>,
    /// Total amount in use.
    total: u32,
    /// Amount in use beyond the reserves.
    beyond: u32,
}

impl Shares {
    /// Creates shares of `all` units, without devices.
    pub fn new(all: usize) -> Self {
        Self::with_least(all, 1)
    }

    /// Like [`Self::new`], with a reserve of at least `least` for each device as long as the total
    /// suffices for all.
    pub fn with_least(all: usize, least: u32) -> Self {
        let all = u32::try_from(all).unwrap_or(u32::MAX);
        Self { all, least, devices: 0, reserve: 0, held: Vec::new(), total: 0, beyond: 0 }
    }

    /// Changes the total amount, none of which may be in use.
    pub fn set_all(&mut self, all: usize) {
        self.all = u32::try_from(all).unwrap_or(u32::MAX);
        self.divide(self.devices);
    }

    /// Adds a device.
    pub fn add(&mut self) {
        self.divide(self.devices + 1);
    }

    /// Removes a device, which must have nothing in use. The reserves of the others grow only if
    /// the amount is available.
    pub fn remove(&mut self) {
        let devices = self.devices - 1;
        let before = self.reserve;
        self.divide(devices);
        if !self.has_reserves(devices, self.reserve) {
            self.set_reserve(before);
        }
    }

    /// Returns the reserve of each of `devices` devices.
    fn reserve_of(&self, devices: u32) -> u32 {
        let even = (self.all / 2).checked_div(devices).unwrap_or(0);
        let least = self.least.saturating_mul(devices) < self.all;
        even.max(if least { self.least } else { 0 })
    }

    fn divide(&mut self, devices: u32) {
        self.devices = devices;
        self.set_reserve(self.reserve_of(devices));
    }

    fn set_reserve(&mut self, reserve: u32) {
        self.reserve = reserve;
        let beyond = self.held.iter().map(|held| held.saturating_sub(self.reserve));
        self.beyond = beyond.sum();
    }

    /// Returns true if the reserves of `devices` devices are free, or already in use by them.
    fn has_reserves(&self, devices: u32, reserve: u32) -> bool {
        let used: u32 = self.held.iter().map(|held| reserve.min(*held)).sum();
        let kept = u64::from(reserve) * u64::from(devices);
        kept.saturating_sub(u64::from(used)) <= u64::from(self.all.saturating_sub(self.total))
    }

    /// Returns true if the reserves, including another device's, are no more than half of the
    /// total.
    pub fn fits_device(&self) -> bool {
        let devices = self.devices + 1;
        let reserve = self.reserve_of(devices);
        reserve >= self.least && reserve * devices <= self.all / 2
    }

    /// Returns true if another device fits, and its reserve is free in addition to those of the
    /// others.
    pub fn has_room_for_device(&self) -> bool {
        let devices = self.devices + 1;
        self.fits_device() && self.has_reserves(devices, self.reserve_of(devices))
    }

    /// Returns the amount that a device may use regardless of the others.
    pub fn guaranteed(&self) -> usize {
        if self.devices == 1 { self.all as usize } else { self.reserve as usize }
    }

    /// Returns how much more a device may take.
    pub fn room_for(&self, device: usize) -> usize {
        let held = self.held.get(device).copied().unwrap_or(0);
        let common = self.all.saturating_sub(self.reserve * self.devices);
        let room = self.reserve.saturating_sub(held) + common.saturating_sub(self.beyond);
        room.min(self.all.saturating_sub(self.total)) as usize
    }

    /// Returns true if a device may take one more unit.
    pub fn may_take(&self, device: usize) -> bool {
        self.room_for(device) > 0
    }

    /// Takes one unit for a device.
    pub fn take(&mut self, device: usize) {
        if self.held.len() <= device {
            self.held.resize(device + 1, 0);
        }
        self.beyond += u32::from(self.held[device] >= self.reserve);
        self.held[device] += 1;
        self.total += 1;
    }

    /// Gives back one unit used by a device.
    pub fn give(&mut self, device: usize) {
        let held = &mut self.held[device];
        *held -= 1;
        self.total -= 1;
        self.beyond -= u32::from(*held >= self.reserve);
    }

    /// Returns the amount that a device uses.
    pub fn held(&self, device: usize) -> usize {
        self.held.get(device).map_or(0, |held| *held as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(all: usize, devices: usize) -> Shares {
        let mut shares = Shares::new(all);
        (0..devices).for_each(|_| shares.add());
        shares
    }

    /// Takes as much as a device may take; returns the amount it then uses.
    fn fill(shares: &mut Shares, device: usize) -> usize {
        while shares.may_take(device) {
            shares.take(device);
        }
        shares.held(device)
    }

    #[test]
    fn a_single_device_may_use_everything() {
        for all in [1, 2, 3, 255, 1024] {
            assert_eq!(fill(&mut shares(all, 1), 0), all);
        }
    }

    #[test]
    fn each_device_is_guaranteed_half_its_share() {
        for (all, devices) in [(255, 2), (1024, 2), (1024, 128), (255, 100), (12, 7), (8, 7)] {
            let mut shares = shares(all, devices);
            let held: Vec<_> = (0..devices).map(|device| fill(&mut shares, device)).collect();
            let least = (all / devices / 2).max(1);
            assert!(held.iter().all(|held| *held >= least), "{all}: {held:?}");
            assert_eq!(held.iter().sum::<usize>(), all, "{devices} devices use all there is");
            for device in (0..devices).rev() {
                (0..held[device]).for_each(|_| shares.give(device));
            }
            assert_eq!(shares.beyond, 0);
        }
        let mut shares = shares(4, 7);
        assert_eq!((0..7).map(|device| fill(&mut shares, device)).sum::<usize>(), 4);
    }

    #[test]
    fn a_device_above_its_limit_gets_nothing_until_it_is_below() {
        let mut shares = shares(16, 1);
        assert_eq!(fill(&mut shares, 0), 16);
        shares.add();
        let (first, second) = (0, 1);
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

    #[test]
    fn a_minimum_is_reserved_for_each_device() {
        let mut shares = Shares::with_least(16, 2);
        let mut devices = 0;
        while shares.has_room_for_device() {
            shares.add();
            devices += 1;
        }
        assert_eq!((devices, shares.guaranteed()), (4, 2), "half of all is for reserves");
        assert_eq!(fill(&mut shares, 0), 10);
        assert_eq!((shares.room_for(1), shares.room_for(3)), (2, 2));
        // A device added while another uses too much would have no reserve.
        let mut shares = Shares::with_least(16, 2);
        shares.add();
        assert_eq!(shares.guaranteed(), 16);
        (0..13).for_each(|_| shares.take(0));
        assert!(!shares.has_room_for_device());
        assert!(shares.fits_device());
        shares.give(0);
        assert!(shares.has_room_for_device());
    }

    #[test]
    fn the_others_keep_their_reserves_when_a_device_leaves() {
        let mut shares = Shares::with_least(248, 2);
        (0..42).for_each(|_| shares.add());
        let hung = fill(&mut shares, 0);
        assert_eq!((hung, shares.guaranteed()), (166, 2));
        shares.remove();
        assert!((1..41).all(|device| fill(&mut shares, device) >= 2));
        assert_eq!(shares.guaranteed(), 2, "there was no more to keep");
        (0..hung).for_each(|_| shares.give(0));
        shares.remove();
        assert_eq!(shares.guaranteed(), 3);
    }
}
