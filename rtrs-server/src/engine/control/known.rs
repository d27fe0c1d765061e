//! Addresses from which sessions have, or have had, paths. Listeners reserve capacity for them.
//!
//! Before a connection's request is read, only its address is known (`rtrs_core::proto::quota`). An
//! address becomes known when a session that has opened an export has a path from that address, and
//! stays known after the path has ended, because the client is likely to return. At most
//! [`KNOWN_MAX`] addresses without a path are remembered; the least recently used address is
//! forgotten first.

use std::collections::BTreeMap;
use std::net::IpAddr;

use rtrs_core::ids::ProviderIndex;

use crate::engine::ctx::Ctx;

/// Maximum number of remembered addresses without a path.
const KNOWN_MAX: usize = 1024;

/// Client address, with the provider that serves it.
pub(super) type PeerAddress = (ProviderIndex, IpAddr);

/// Known addresses.
#[derive(Debug, Default)]
pub(super) struct KnownPeers {
    paths: BTreeMap<PeerAddress, u32>,
    /// Addresses without paths, in the order in which their last path ended.
    idle: BTreeMap<u64, PeerAddress>,
    last: u64,
}

impl KnownPeers {
    /// Records a path that is up. Returns true if its address was not known before.
    pub(super) fn path_up(&mut self, place: PeerAddress) -> bool {
        if let Some(paths) = self.paths.get_mut(&place) {
            *paths += 1;
            return false;
        }
        self.paths.insert(place, 1);
        let before = self.idle.len();
        self.idle.retain(|_, idle| *idle != place);
        self.idle.len() == before
    }

    /// Records paths that are up, and reports addresses that were not known before.
    pub(super) fn paths_up(&mut self, places: Vec<PeerAddress>, ctx: &mut Ctx<'_>) {
        for place in places {
            if self.path_up(place) {
                report_address(place, true, ctx);
            }
        }
    }

    /// Records the end of a path. Returns the address that is now forgotten, if any.
    pub(super) fn path_ended(&mut self, place: PeerAddress) -> Option<PeerAddress> {
        let paths = self.paths.get_mut(&place)?;
        *paths -= 1;
        if *paths > 0 {
            return None;
        }
        self.paths.remove(&place);
        self.last += 1;
        self.idle.insert(self.last, place);
        if self.idle.len() > KNOWN_MAX {
            self.idle.pop_first().map(|(_, place)| place)
        } else {
            None
        }
    }
}

/// Reports an address to the listeners.
pub(super) fn report_address((provider, address): PeerAddress, known: bool, ctx: &mut Ctx<'_>) {
    ctx.fabrics[provider.index()].know_peer(address, known);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(n: usize) -> PeerAddress {
        let n = u32::try_from(n).unwrap();
        (ProviderIndex(0), IpAddr::from(n.to_be_bytes()))
    }

    #[test]
    fn a_peer_is_added_once_and_stays_known() {
        let mut known = KnownPeers::default();
        assert!(known.path_up(place(1)) && !known.path_up(place(1)));
        assert_eq!(known.path_ended(place(1)), None);
        assert_eq!(known.path_ended(place(1)), None);
        assert!(!known.path_up(place(1)), "the path reconnected");
        assert_eq!(known.path_ended(place(1)), None);
        // The same address on a different provider is a separate entry.
        assert!(known.path_up((ProviderIndex(1), place(1).1)));
        assert_eq!(known.path_ended(place(7)), None, "never known");
    }

    #[test]
    fn peers_without_a_path_are_forgotten_in_order() {
        let mut known = KnownPeers::default();
        assert!(known.path_up(place(0)));
        for n in 1..=KNOWN_MAX {
            assert!(known.path_up(place(n)));
            assert_eq!(known.path_ended(place(n)), None);
        }
        assert!(!known.path_up(place(1)));
        assert_eq!(known.path_ended(place(1)), None);
        assert!(known.path_up(place(5000)));
        assert_eq!(known.path_ended(place(5000)), Some(place(2)));
        assert_eq!(
            known.path_ended(place(0)),
            Some(place(3)),
            "an address with a path is kept until the path ends"
        );
    }
}
