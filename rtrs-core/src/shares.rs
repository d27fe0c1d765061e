//! What each device may have of something that all devices of a shard use: IO rows, permits, or
//! buffers.
//!
//! Half of it is divided evenly: that much is there for a device whatever the others do, also when
//! the disk behind one of them hangs and holds what it has. The other half is for whoever comes
//! first. So no device gets less than half of its share, and the only device of a session has all.

/// Who has how much of something.
#[derive(Debug)]
pub struct Shares {
    all: u32,
    /// The smallest reserve of a device, as long as there is more than that for all.
    least: u32,
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
    pub fn new(all: usize) -> Self {
        Self::with_least(all, 1)
    }

    /// The same, with at least so much kept for each device, if there is more than that for all.
    pub fn with_least(all: usize, least: u32) -> Self {
        let all = u32::try_from(all).unwrap_or(u32::MAX);
        Self { all, least, devices: 0, reserve: 0, held: Vec::new(), total: 0, beyond: 0 }
    }

    /// So much is to be shared from now on; nobody has any of it.
    pub fn set_all(&mut self, all: usize) {
        self.all = u32::try_from(all).unwrap_or(u32::MAX);
        self.divide(self.devices);
    }

    /// One more device takes part.
    pub fn add(&mut self) {
        self.divide(self.devices + 1);
    }

    /// One takes no part any more; it has nothing left. What is kept for each of the others grows
    /// only if there is so much.
    pub fn remove(&mut self) {
        let devices = self.devices - 1;
        let before = self.reserve;
        self.divide(devices);
        if !self.has_reserves(devices, self.reserve) {
            self.set_reserve(before);
        }
    }

    /// What is kept for each of so many devices.
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

    /// True when the reserves of so many devices are free, or theirs already.
    fn has_reserves(&self, devices: u32, reserve: u32) -> bool {
        let used: u32 = self.held.iter().map(|held| reserve.min(*held)).sum();
        let kept = u64::from(reserve) * u64::from(devices);
        kept.saturating_sub(u64::from(used)) <= u64::from(self.all.saturating_sub(self.total))
    }

    /// True when the reserves with a further device are no more than half of all.
    pub fn fits_device(&self) -> bool {
        let devices = self.devices + 1;
        let reserve = self.reserve_of(devices);
        reserve >= self.least && reserve * devices <= self.all / 2
    }

    /// True when a further device fits, and its reserve is free besides what is kept for the others
    /// then.
    pub fn has_room_for_device(&self) -> bool {
        let devices = self.devices + 1;
        self.fits_device() && self.has_reserves(devices, self.reserve_of(devices))
    }

    /// What a device may have in all, whatever the others do.
    pub fn sure(&self) -> usize {
        if self.devices == 1 { self.all as usize } else { self.reserve as usize }
    }

    /// How much more a device may have.
    pub fn room_for(&self, device: usize) -> usize {
        let held = self.held.get(device).copied().unwrap_or(0);
        let common = self.all.saturating_sub(self.reserve * self.devices);
        let room = self.reserve.saturating_sub(held) + common.saturating_sub(self.beyond);
        room.min(self.all.saturating_sub(self.total)) as usize
    }

    /// True while a device may have one more.
    pub fn may_take(&self, device: usize) -> bool {
        self.room_for(device) > 0
    }

    /// A device has one more.
    pub fn take(&mut self, device: usize) {
        if self.held.len() <= device {
            self.held.resize(device + 1, 0);
        }
        self.beyond += u32::from(self.held[device] >= self.reserve);
        self.held[device] += 1;
        self.total += 1;
    }

    /// A device has one less.
    pub fn give(&mut self, device: usize) {
        let held = &mut self.held[device];
        *held -= 1;
        self.total -= 1;
        self.beyond -= u32::from(*held >= self.reserve);
    }

    /// What a device has.
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

    /// Takes as much as a device may have; how much it has then.
    fn fill(shares: &mut Shares, device: usize) -> usize {
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
    fn who_has_too_much_when_another_comes_gets_no_more_until_it_has_less() {
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
    fn at_least_so_much_is_kept_while_a_further_device_has_room() {
        let mut shares = Shares::with_least(16, 2);
        let mut devices = 0;
        while shares.has_room_for_device() {
            shares.add();
            devices += 1;
        }
        assert_eq!((devices, shares.sure()), (4, 2), "half of all is for reserves");
        assert_eq!(fill(&mut shares, 0), 10);
        assert_eq!((shares.room_for(1), shares.room_for(3)), (2, 2));
        // A device that comes while another has too much would have no reserve.
        let mut shares = Shares::with_least(16, 2);
        shares.add();
        assert_eq!(shares.sure(), 16);
        (0..13).for_each(|_| shares.take(0));
        assert!(!shares.has_room_for_device());
        assert!(shares.fits_device());
        shares.give(0);
        assert!(shares.has_room_for_device());
    }

    #[test]
    fn when_a_device_goes_the_others_keep_their_reserves() {
        let mut shares = Shares::with_least(248, 2);
        (0..42).for_each(|_| shares.add());
        let hung = fill(&mut shares, 0);
        assert_eq!((hung, shares.sure()), (166, 2));
        shares.remove();
        assert!((1..41).all(|device| fill(&mut shares, device) >= 2));
        assert_eq!(shares.sure(), 2, "there was no more to keep");
        (0..hung).for_each(|_| shares.give(0));
        shares.remove();
        assert_eq!(shares.sure(), 3);
    }
}
