//! Promotion of a volume on the new host of a virtual machine that moves.
//!
//! The session on the old host has the export open with access `rw`, and the session on the new
//! host with access `migration`, so that no third session can write. Each open says that the
//! session runs no IO yet ([`OpenFlags::waits`](rtrs_core::wire::OpenFlags::waits)). Once its user
//! claims the device, an open with access `rw` is sent repeatedly over a path that serves the
//! volume. The server grants it only after the old session has closed the export and none of that
//! session's requests can still reach the disk. From then on the server refuses the old session if
//! it returns.

use rtrs_core::time::{Duration, Instant};

/// Interval between two opens, which adds to the time that the machine stands still.
const EVERY: Duration = Duration::from_millis(100);

/// Progress of a promotion.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Promotion {
    /// The volume has its final access.
    None,
    /// The user has not claimed the device.
    Unclaimed,
    /// The user waits for the device.
    Claimed {
        /// Time of the next open.
        next: Instant,
        /// Reason why the server has refused the last open, if it has.
        refusal: Option<u16>,
    },
}

impl Promotion {
    /// Whether the volume does not have its final access yet.
    pub(super) fn is_pending(&self) -> bool {
        *self != Self::None
    }

    /// Records that the user claims the device. The first open is due immediately.
    pub(super) fn claim(&mut self, now: Instant) {
        if *self == Self::Unclaimed {
            *self = Self::Claimed { next: now, refusal: None };
        }
    }

    /// Time of the next open.
    pub(super) fn due(&self) -> Option<Instant> {
        match self {
            Self::Claimed { next, .. } => Some(*next),
            Self::None | Self::Unclaimed => None,
        }
    }

    /// Records that an open is sent.
    pub(super) fn begin(&mut self, now: Instant) {
        if let Self::Claimed { next, .. } = self {
            *next = now + EVERY;
        }
    }

    /// Records a refused open. Returns whether the reason is not that of the open before.
    pub(super) fn refused(&mut self, errno: u16) -> bool {
        match self {
            Self::Claimed { refusal, .. } => refusal.replace(errno) != Some(errno),
            Self::None | Self::Unclaimed => false,
        }
    }

    /// Records that no path serves the volume: what the server has answered may be outdated.
    pub(super) fn lost(&mut self) {
        if let Self::Claimed { refusal, .. } = self {
            *refusal = None;
        }
    }

    /// Reason why the server has refused the last open, if it has.
    pub(super) fn refusal(&self) -> Option<u16> {
        match self {
            Self::Claimed { refusal, .. } => *refusal,
            Self::None | Self::Unclaimed => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::wire::errno;

    use super::*;

    #[test]
    fn a_claimed_volume_is_opened_again_until_it_is_promoted() {
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        let mut promotion = Promotion::Unclaimed;
        assert_eq!((promotion.is_pending(), promotion.due()), (true, None));
        promotion.claim(at(5));
        assert_eq!(promotion.due(), Some(at(5)));
        promotion.begin(at(7));
        promotion.claim(at(8));
        assert_eq!(promotion.due(), Some(at(107)), "claimed once");
        let [held, frozen] = [errno::EPERM, errno::EACCES];
        let are_new = [held, held, frozen, held].map(|errno| promotion.refused(errno));
        assert_eq!((are_new, promotion.refusal()), ([true, false, true, true], Some(held)));
        promotion.lost();
        assert_eq!(promotion.refusal(), None);
        let mut none = Promotion::None;
        none.claim(at(0));
        assert_eq!((none.is_pending(), none.due()), (false, None));
    }
}
