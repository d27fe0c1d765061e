//! What sessions had open of exports that the operator has removed by force.
//!
//! Such a session goes on, with its other exports. A client that compares what it opens ends its
//! device for good when it hears of the removal (EIDRM): so it must not open the name again, even
//! after all its paths were lost, and get what has the name by then. A kernel's client knows no
//! such end; it opens what has the name when it connects again, as after a restart of the server.
//! What the session had not flushed is kept for that (`ended.rs`).
//!
//! At most [`REMOVED_MAX`] are remembered; the oldest is forgotten for one more.

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
    /// Under which id, while the session lasts and has not closed it.
    device: Option<DeviceId>,
    /// Its client may not open the name again.
    refused: bool,
}

/// What sessions had open of removed exports, oldest first.
#[derive(Debug, Default)]
pub(super) struct Removed(VecDeque<RemovedOpen>);

impl Removed {
    /// An export was removed that the session has open under that id.
    pub(super) fn add(&mut self, session: &SessionShared, device: DeviceId, export: Known) {
        if self.0.len() >= REMOVED_MAX {
            self.0.pop_front();
        }
        let (id, refused) = (session.id, session.compares());
        self.0.push_back(RemovedOpen { session: id, export, device: Some(device), refused });
    }

    /// True when the session may not open the name.
    pub(super) fn contains(&self, session: SessionId, name: &[u8]) -> bool {
        let is = |one: &RemovedOpen| {
            let same = bare(one.export.name().as_bytes()) == bare(name);
            same && one.refused && one.session == session
        };
        self.0.iter().any(is) && !rtrs_core::mutated!(RemovedReopened)
    }

    /// The device that a session had open under this name.
    pub(super) fn device(&self, session: SessionId, name: &[u8]) -> Option<DeviceId> {
        let is = |one: &&RemovedOpen| {
            let same = bare(one.export.name().as_bytes()) == bare(name);
            same && one.session == session && one.device.is_some()
        };
        self.0.iter().find(is)?.device
    }

    /// The session has closed an id.
    pub(super) fn closed(&mut self, session: SessionId, device: DeviceId) {
        self.0.retain(|one| one.session != session || one.device != Some(device));
    }

    /// A session has ended: what it had open of removed exports, and under which ids.
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
