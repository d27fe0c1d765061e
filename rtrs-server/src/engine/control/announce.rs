//! CHANGED on one path: selects the devices that the client must reopen.
//!
//! The client's posted receives limit what may be sent: at most one CHANGED per device may be
//! unanswered, and at most [`UNANSWERED_MAX`] overall. An OPEN of the device over the path, refused
//! or not, is the answer. Its response reports the current size, so a device that changes again
//! before the response needs no second CHANGED. Devices beyond the limit are announced when there
//! is room, in ID order. Only the first such device is stored, so a client that never answers takes
//! up no more memory.

use crate::engine::device_table::DeviceId;

/// Maximum number of unanswered CHANGED on a path; the client has posted this many receives.
pub(super) const UNANSWERED_MAX: usize = 8;

/// Announcements on a path.
#[derive(Debug, Default)]
pub(super) struct Announcer {
    unanswered: Vec<DeviceId>,
    /// Lowest device whose announcement is postponed; this device and all higher devices are
    /// announced later.
    behind: Option<DeviceId>,
}

impl Announcer {
    /// Records that a device has changed. Returns the device if it must be announced now.
    pub(super) fn changed(&mut self, device: DeviceId) -> Option<DeviceId> {
        if self.unanswered.contains(&device) {
            return None;
        }
        if self.unanswered.len() >= UNANSWERED_MAX {
            self.behind = Some(self.behind.map_or(device, |first| first.min(device)));
            return None;
        }
        self.unanswered.push(device);
        Some(device)
    }

    /// Records that the client reopened a device, in a session that has used `ids` IDs. Returns a
    /// device that must be announced now; the call must then be repeated.
    pub(super) fn answered(&mut self, device: DeviceId, ids: u32) -> Option<DeviceId> {
        self.unanswered.retain(|one| *one != device);
        while self.unanswered.len() < UNANSWERED_MAX {
            let next = self.behind.take()?;
            if next.0 >= ids {
                return None;
            }
            self.behind = Some(DeviceId(next.0 + 1));
            // The response to this OPEN reports the current state.
            if let Some(due) = Some(next).filter(|next| *next != device) {
                let due = self.changed(due);
                if due.is_some() {
                    return due;
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_announced_once_until_it_is_reopened() {
        let mut announcer = Announcer::default();
        let id = DeviceId(3);
        assert_eq!(announcer.changed(id), Some(id));
        assert_eq!(announcer.changed(id), None);
        assert_eq!(announcer.changed(DeviceId(4)), Some(DeviceId(4)));
        assert_eq!(announcer.answered(id, 5), None);
        assert_eq!(announcer.changed(DeviceId(4)), None);
        assert_eq!(announcer.changed(id), Some(id));
        assert_eq!(announcer.answered(DeviceId(9), 5), None, "one that was not announced");
    }

    #[test]
    fn announcements_beyond_the_limit_are_sent_later() {
        let mut announcer = Announcer::default();
        let ids = 30;
        let mut sent: Vec<DeviceId> =
            (0..ids).map(DeviceId).filter_map(|id| announcer.changed(id)).collect();
        assert_eq!(sent.len(), UNANSWERED_MAX);
        let mut at = 0;
        while let Some(next) = sent.get(at).copied() {
            at += 1;
            while let Some(due) = announcer.answered(next, ids) {
                sent.push(due);
            }
            assert!(sent.len() - at <= UNANSWERED_MAX, "{sent:?}");
        }
        assert_eq!(sent, (0..ids).map(DeviceId).collect::<Vec<_>>());
        assert_eq!(announcer.changed(DeviceId(2)), Some(DeviceId(2)), "nothing is left behind");
    }

    #[test]
    fn a_client_that_never_answers_costs_nothing_more() {
        let mut announcer = Announcer::default();
        for round in 0..1000 {
            for id in 0..100 {
                let due = announcer.changed(DeviceId(id));
                assert_eq!(due.is_some(), round == 0 && id < 8, "{round} {id}");
            }
        }
        assert_eq!(announcer.unanswered.len(), UNANSWERED_MAX);
    }
}
