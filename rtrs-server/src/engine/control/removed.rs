//! Exports that sessions had open when the operator removed them by force.
//!
//! Such a session continues with its other exports. A client that compares the identities of the
//! exports it opens fails its device permanently when it learns of the removal (EIDRM). Such a
//! client must not reopen the name, even after it has lost all its paths, because by then another
//! export may have the name. A kernel client does not support such a removal: on reconnect, as
//! after a restart of the server, it opens whatever export has the name. The session's unflushed
//! writes are kept for this case (`ended.rs`).
//!
//! At most [`REMOVED_MAX`] entries are kept; the oldest are dropped first.

use std::collections::VecDeque;

use rtrs_core::ids::SessionId;

use super::ended::Known;
use crate::engine::device_table::DeviceId;
use crate::engine::session::SessionShared;
use crate::export::bare;

const REMOVED_MAX: usize = 1024;

#[derive(Debug)]
struct RemovedOpen {
    session: SessionId,
    export: Known,
    /// The export's device ID, until the session ends or closes the device.
    device: Option<DeviceId>,
    /// Whether the client must not reopen the name.
    refused: bool,
}

/// Removed exports that sessions had open, oldest first.
#[derive(Debug, Default)]
pub(super) struct Removed(VecDeque<RemovedOpen>);

impl Removed {
    /// Adds a removed export that the session has open under this ID.
    pub(super) fn add(&mut self, session: &SessionShared, device: DeviceId, export: Known) {
        if self.0.len() >= REMOVED_MAX {
            self.0.pop_front();
        }
        let (id, refused) = (session.id, session.compares());
        self.0.push_back(RemovedOpen { session: id, export, device: Some(device), refused });
    }

    /// Whether the session may not open the name.
    pub(super) fn contains(&self, session: SessionId, name: &[u8]) -> bool {
        let is = |one: &RemovedOpen| {
            let same = bare(one.export.name().as_bytes()) == bare(name);
            same && one.refused && one.session == session
        };
        self.0.iter().any(is) && !rtrs_core::mutated!(RemovedReopened)
    }

    /// Device that a session had open under this name.
    pub(super) fn device(&self, session: SessionId, name: &[u8]) -> Option<DeviceId> {
        let is = |one: &&RemovedOpen| {
            let same = bare(one.export.name().as_bytes()) == bare(name);
            same && one.session == session && one.device.is_some()
        };
        self.0.iter().find(is)?.device
    }

    /// Records that the session closed a device.
    pub(super) fn closed(&mut self, session: SessionId, device: DeviceId) {
        self.0.retain(|one| one.session != session || one.device != Some(device));
    }

    /// Returns the removed exports that an ended session had open, with their IDs.
    pub(super) fn session_ended(&mut self, session: &SessionShared) -> Vec<(DeviceId, Known)> {
        let mut left = Vec::new();
        self.0.retain_mut(|one| {
            if one.session != session.id {
                return true;
            }
            left.extend(one.device.take().map(|device| (device, one.export.clone())));
            one.refused
        });
        left
    }
}
