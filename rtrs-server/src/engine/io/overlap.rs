//! Strays: what the disk still works on for paths that are closed.
//!
//! Nobody hears how such a request ends, and its client may have taken it for failed by now: a
//! write that lands late must not land over a newer one. So each core enters, when it closes its
//! part of a path, what the device may still change there. It does so before it tells the control
//! core that it has stopped serving the path: before a FENCE for it is answered, and before the
//! client can connect it anew. A change to the same bytes that comes later, on whatever core,
//! path or session, waits until the stray has ended (`deferred.rs`). All else goes on: reads, changes
//! elsewhere, other exports. A stray gives its permit back, since this is a closer guard.
//!
//! One table per export, shared by all cores and sessions. Usual IO reads one number of it.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rtrs_core::ids::{PermitId, SessionId};

use super::Shard;
use super::request::RequestState;
use crate::engine::message::Outbox;
use crate::path::PathKey;

/// A request of a closed path, and the bytes that it may still change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stray {
    /// Its session.
    pub session: SessionId,
    /// Its path.
    pub path: PathKey,
    /// The permit that it had.
    pub permit: PermitId,
    /// What it may change.
    pub bytes: Range<u64>,
}

/// The strays of an export.
#[derive(Debug, Default)]
pub struct Strays {
    /// How many are in the list.
    count: AtomicUsize,
    list: Mutex<Vec<Stray>>,
}

impl Strays {
    /// How many there are.
    pub fn len(&self) -> usize {
        // Acquire pairs with the releases below: what a stray that has ended did is done.
        self.count.load(Ordering::Acquire)
    }

    /// True when there is none, as usual.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True when there is one like this.
    pub fn any(&self, is: impl FnMut(&Stray) -> bool) -> bool {
        !self.is_empty() && self.list.lock().iter().any(is)
    }

    /// True when one may still change some of these bytes.
    pub fn touch(&self, bytes: &Range<u64>) -> bool {
        self.any(|stray| stray.touches(bytes))
    }

    /// A path is closed while this request of it runs.
    pub fn enter(&self, stray: Stray) {
        let mut list = self.list.lock();
        list.push(stray);
        self.count.store(list.len(), Ordering::Release);
    }

    /// It has ended. Nothing happens if it was no stray.
    pub fn leave(&self, path: PathKey, permit: PermitId) {
        let mut list = self.list.lock();
        list.retain(|stray| (stray.path, stray.permit) != (path, permit));
        self.count.store(list.len(), Ordering::Release);
    }
}

impl Stray {
    /// True when it may still change some of these bytes.
    pub fn touches(&self, bytes: &Range<u64>) -> bool {
        if rtrs_core::mutated!(DeferredByStart) {
            return self.bytes.start == bytes.start;
        }
        self.bytes.start < bytes.end && bytes.start < self.bytes.end
    }
}

impl Shard {
    /// The path is closed while a device works on this request: a stray, if it changes anything.
    /// It stays `Submitted` and counts as in flight.
    pub(super) fn leave_running(&self, row: u32, permit: PermitId) {
        let Some(path) = self.path(row) else { return };
        let (session, key) = (&path.shared.session, path.shared.key);
        if let Some(io) = path.requests[permit.index()].io
            && let Some(bytes) = io.may_change()
            && let Some(strays) = self.devices.strays(io.export)
        {
            tracing::debug!(path = %key, %permit, ?bytes, "left running at the disk");
            strays.enter(Stray { session: session.id, path: key, permit, bytes });
        }
        // Who has the permit next finds it in the table.
        session.permits.release(permit, self.holder(path));
    }

    /// The device is done with a request that was left running.
    pub(super) fn stray_ended(&mut self, row: u32, permit: PermitId, out: &mut Outbox) {
        let core = self.core;
        let Some(path) = self.paths.get_mut(row as usize).and_then(Option::as_deref_mut) else {
            return;
        };
        let request = &mut path.requests[permit.index()];
        if let Some(strays) = request.io.and_then(|io| self.devices.strays(io.export)) {
            strays.leave(path.shared.key, permit);
        }
        request.go(RequestState::Free);
        path.inflight -= 1;
        path.shared.counters.core(core).inflight.sub(1);
        self.after_release(row, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strays_hold_up_what_meets_them() {
        let strays = Strays::default();
        assert!(strays.is_empty() && !strays.touch(&(0..u64::MAX)));
        let stray = |path, bytes| {
            let (session, permit) = (SessionId([1; 16]), PermitId(6));
            Stray { session, path: PathKey(path), permit, bytes }
        };
        strays.enter(stray(1, 4096..8192));
        strays.enter(stray(2, 0..512));
        assert_eq!(strays.len(), 2);
        for (bytes, meets) in [
            (0..512, true),
            (511..512, true),
            (512..4096, false),
            (512..4097, true),
            (8191..8192, true),
            (8192..9000, false),
            (0..u64::MAX, true),
        ] {
            assert_eq!(strays.touch(&bytes), meets, "{bytes:?}");
        }
        // Of another path, or another permit: they stay.
        strays.leave(PathKey(1), PermitId(7));
        strays.leave(PathKey(3), PermitId(6));
        assert_eq!(strays.len(), 2);
        strays.leave(PathKey(1), PermitId(6));
        assert!(strays.any(|stray| stray.path == PathKey(2)));
        assert!(!strays.any(|stray| stray.path == PathKey(1)));
        assert!(!strays.touch(&(4096..8192)) && strays.touch(&(0..1)));
        strays.leave(PathKey(2), PermitId(6));
        assert!(strays.is_empty() && !strays.touch(&(0..u64::MAX)));
    }
}
