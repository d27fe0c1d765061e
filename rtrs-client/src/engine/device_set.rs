//! Device numbers and sets of device numbers.

use super::session::VOLUMES_MAX;

/// Number of a device in its session: the index of its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceIndex(pub u16);

impl DeviceIndex {
    /// Device of the first volume with which a session begins.
    pub const FIRST: Self = Self(0);

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// All devices that a session can have, in order.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..VOLUMES_MAX).map_while(|at| u16::try_from(at).ok()).map(Self)
    }
}

/// Set of devices, one bit for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceSet(u128);

const _: () = assert!(VOLUMES_MAX <= u128::BITS as usize, "a bit for each volume");

impl DeviceSet {
    fn bit(device: DeviceIndex) -> u128 {
        1 << device.0
    }

    pub(crate) fn insert(&mut self, device: DeviceIndex) {
        self.0 |= Self::bit(device);
    }

    pub(crate) fn remove(&mut self, device: DeviceIndex) {
        self.0 &= !Self::bit(device);
    }

    pub(crate) fn contains(self, device: DeviceIndex) -> bool {
        self.0 & Self::bit(device) != 0
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Devices in this set that are not in the other one.
    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// First device after this one in cyclic order, with this one last; after None, the first of
    /// all.
    pub(crate) fn next_after(self, device: Option<DeviceIndex>) -> Option<DeviceIndex> {
        if self.is_empty() {
            return None;
        }
        let first = device.map_or(0, |device| u32::from(device.0) + 1) % u128::BITS;
        let steps = self.0.rotate_right(first).trailing_zeros();
        u16::try_from((first + steps) % u128::BITS).ok().map(DeviceIndex)
    }

    /// All devices, in order.
    pub(crate) fn iter(self) -> impl Iterator<Item = DeviceIndex> {
        let mut left = self;
        std::iter::from_fn(move || {
            let first = left.next_after(None)?;
            left.remove(first);
            Some(first)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_for_the_next_device_wraps_around() {
        let mut set = DeviceSet::default();
        assert_eq!(set.next_after(Some(DeviceIndex(5))), None);
        for device in [0, 5, 127] {
            set.insert(DeviceIndex(device));
        }
        let next = |set: DeviceSet, after: u16| {
            set.next_after(Some(DeviceIndex(after))).map(|next| next.0)
        };
        assert_eq!(set.next_after(None), Some(DeviceIndex(0)));
        for (after, expected) in [(0, 5), (4, 5), (5, 127), (126, 127), (127, 0)] {
            assert_eq!(next(set, after), Some(expected), "after {after}");
        }
        set.remove(DeviceIndex(0));
        assert_eq!(next(set, 127), Some(5));
        let mut blocked = DeviceSet::default();
        blocked.insert(DeviceIndex(5));
        assert_eq!(next(set.without(blocked), 127), Some(127), "the only one that is left");
        assert_eq!(set.iter().map(|device| device.0).collect::<Vec<_>>(), [5, 127]);
        assert!(set.without(set).is_empty() && !set.contains(DeviceIndex(0)));
    }
}
