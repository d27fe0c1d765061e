//! CHANGED on one path: which devices the client has still to open again.
//!
//! The client's receives bound what may be sent: at most one CHANGED of a device is unanswered, and
//! at most [`UNANSWERED_MAX`] of all. An OPEN of the device over the path, refused or not, is the
//! answer; it reports the size of that time, so a device that changes again before that needs no
//! second CHANGED. Devices beyond the bound are announced when there is room, in the order of their
//! IDs: of these only the first is kept, so a client that never answers costs nothing more.

use crate::engine::device_table::DeviceId;

/// CHANGED that a path may leave unanswered. The client has posted receives for as many.
pub(super) const UNANSWERED_MAX: usize = 8;

/// What a path has announced.
#[derive(Debug, Default)]
pub(super) struct Announcer {
    unanswered: Vec<DeviceId>,
    /// From this device on all are to be announced.
    behind: Option<DeviceId>,
}

impl Announcer {
    /// A device has changed. Some: it is to be announced now.
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

    /// The client has opened a device again. Some: another is to be announced now; ask again. The
    /// session has used so many IDs.
    pub(super) fn answered(&mut self, device: DeviceId, ids: u32) -> Option<DeviceId> {
        self.unanswered.retain(|one| *one != device);
        while self.unanswered.len() < UNANSWERED_MAX {
            let next = self.behind.take()?;
            if next.0 >= ids {
                return None;
            }
            self.behind = Some(DeviceId(next.0 + 1));
            // The answer to this OPEN says what there is to say.
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
    fn a_device_is_announced_once_until_it_is_opened_again() {
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
    fn what_exceeds_the_bound_is_announced_later() {
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
