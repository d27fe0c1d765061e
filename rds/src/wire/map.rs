//! Congestion map: the ports of a node to which nothing may be sent now.

use std::fmt;

/// Length of a map in bytes: one bit per port.
pub const MAP_LEN: usize = 8192;

/// One bit per port of a node, the lowest bit of a byte first.
#[derive(Clone, PartialEq, Eq)]
pub struct CongestionMap(Box<[u8]>);

impl Default for CongestionMap {
    fn default() -> Self {
        Self(vec![0; MAP_LEN].into_boxed_slice())
    }
}

impl CongestionMap {
    /// Creates a map from a payload; `None` if the length is wrong.
    pub fn from_payload(payload: Vec<u8>) -> Option<Self> {
        (payload.len() == MAP_LEN).then(|| Self(payload.into_boxed_slice()))
    }

    /// Returns the map as a payload.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether the port is congested.
    pub fn get(&self, port: u16) -> bool {
        self.0[usize::from(port / 8)] & bit(port) != 0
    }

    /// Sets or clears the bit of a port. Returns false if the bit already had that value.
    pub fn set(&mut self, port: u16, congested: bool) -> bool {
        let changes = self.get(port) != congested;
        if changes {
            self.0[usize::from(port / 8)] ^= bit(port);
        }
        changes
    }

    /// Returns the groups with a port that is congested here and not in `newer`: bit N covers
    /// all ports with remainder N when divided by 64.
    pub fn cleared(&self, newer: &Self) -> u64 {
        let mut groups = [0; 8];
        for (old, new) in self.0.chunks_exact(8).zip(newer.0.chunks_exact(8)) {
            for (group, (old, new)) in groups.iter_mut().zip(old.iter().zip(new)) {
                *group |= old & !new;
            }
        }
        u64::from_le_bytes(groups)
    }

    /// Returns the congested ports.
    pub fn ports(&self) -> impl Iterator<Item = u16> {
        // Most words are zero.
        let words = self.bytes().chunks_exact(8).enumerate();
        let used = words.filter(|(_, word)| *word != [0; 8]);
        let first = used.map(|(at, _)| u16::try_from(at * 64).unwrap_or(u16::MAX));
        first.flat_map(|first| (0..64).map(move |bit| first + bit)).filter(|port| self.get(*port))
    }
}

const fn bit(port: u16) -> u8 {
    1 << (port % 8)
}

impl fmt::Debug for CongestionMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.ports()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_placed_as_in_the_kernel() {
        let mut map = CongestionMap::default();
        assert!(map.set(4001, true) && !map.set(4001, true) && map.get(4001));
        // From a capture: port 4001 is bit 1 of byte 500.
        assert_eq!(map.bytes()[500], 2);
        assert_eq!(map.bytes().iter().filter(|byte| **byte != 0).count(), 1);
        assert!(!map.get(4000) && !map.get(4002));
        map.set(65535, true);
        assert_eq!(map.bytes()[8191], 0x80);
        assert_eq!(map.ports().collect::<Vec<_>>(), [4001, 65535]);
        let same = CongestionMap::from_payload(map.bytes().to_vec()).unwrap();
        assert_eq!(same, map);
        assert!(CongestionMap::from_payload(vec![0; 8191]).is_none());
    }

    #[test]
    fn cleared_bits_are_reported_by_group() {
        let mut old = CongestionMap::default();
        old.set(4001, true);
        old.set(64, true);
        old.set(7, true);
        let mut new = old.clone();
        assert_eq!(old.cleared(&new), 0);
        new.set(4001, false);
        new.set(64, false);
        new.set(9, true);
        assert_eq!(old.cleared(&new), 1 << (4001 % 64) | 1);
    }
}
