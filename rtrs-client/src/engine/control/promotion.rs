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

/// Least interval between two opens, which adds to the time that the machine stands still. An open
/// is repeated after a sixteenth of the time since the claim, and at most [`EVERY_MAX`].
const EVERY: Duration = Duration::from_millis(100);

/// Longest interval between two opens.
const EVERY_MAX: Duration = Duration::from_secs(2);

/// Progress of a promotion.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Promotion {
    /// The volume has its final access.
    None,
    /// The user does not claim the device.
    Unclaimed,
    /// The user waits for the device.
    Claimed(Claim),
}

/// Claim of a device.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Claim {
    /// Number of shards on which the user claims the device.
    shards: u32,
    since: Instant,
    /// Time of the next open.
    next: Instant,
    /// Reason why the server has refused the last open, if it has.
    refusal: Option<u16>,
}

impl Promotion {
    /// Whether the volume does not have its final access yet.
    pub(super) fn is_pending(&self) -> bool {
        *self != Self::None
    }

    /// Records that the user claims the device on another shard. The first open is due immediately.
    pub(super) fn claim(&mut self, now: Instant) {
        match self {
            Self::None => {}
            Self::Unclaimed => {
                *self = Self::Claimed(Claim { shards: 1, since: now, next: now, refusal: None });
            }
            Self::Claimed(claim) => claim.shards += 1,
        }
    }

    /// Records that the user no longer claims the device on one of the shards: its virtual machine
    /// has ended, and that of the old host may continue.
    pub(super) fn release(&mut self) {
        if let Self::Claimed(claim) = self {
            claim.shards -= 1;
            if claim.shards == 0 && !rtrs_core::mutated!(ClaimKept) {
                *self = Self::Unclaimed;
            }
        }
    }

    fn claimed(&mut self) -> Option<&mut Claim> {
        match self {
            Self::Claimed(claim) => Some(claim),
            Self::None | Self::Unclaimed => None,
        }
    }

    /// Time of the next open.
    pub(super) fn due(&self) -> Option<Instant> {
        match self {
            Self::Claimed(claim) => Some(claim.next),
            Self::None | Self::Unclaimed => None,
        }
    }

    /// Records that an open is sent.
    pub(super) fn begin(&mut self, now: Instant) {
        if let Some(claim) = self.claimed() {
            claim.next = now + (now.since(claim.since) / 16).clamp(EVERY, EVERY_MAX);
        }
    }

    /// Records a refused open. Returns whether the reason is not that of the open before.
    pub(super) fn refused(&mut self, errno: u16) -> bool {
        self.claimed().is_some_and(|claim| claim.refusal.replace(errno) != Some(errno))
    }

    /// Records that no path serves the volume: what the server has answered may be outdated.
    pub(super) fn lost(&mut self) {
        if let Some(claim) = self.claimed() {
            claim.refusal = None;
        }
    }

    /// Reason why the server has refused the last open, if it has.
    pub(super) fn refusal(&self) -> Option<u16> {
        match self {
            Self::Claimed(claim) => claim.refusal,
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
        assert_eq!(promotion.due(), Some(at(107)), "the claim of another shard changes nothing");
        let [held, frozen] = [errno::EPERM, errno::EACCES];
        let are_new = [held, held, frozen, held].map(|errno| promotion.refused(errno));
        assert_eq!((are_new, promotion.refusal()), ([true, false, true, true], Some(held)));
        promotion.lost();
        assert_eq!(promotion.refusal(), None);
        for (now, next) in [(1_605, 1_705), (3_205, 3_405), (1_000_005, 1_002_005)] {
            promotion.begin(at(now));
            assert_eq!(promotion.due(), Some(at(next)));
        }
        promotion.release();
        assert_eq!(promotion.due(), Some(at(1_002_005)), "another shard claims the device");
        promotion.release();
        assert_eq!((promotion.is_pending(), promotion.due()), (true, None));
        promotion.claim(at(2_000_000));
        assert_eq!(promotion.due(), Some(at(2_000_000)));
        let mut none = Promotion::None;
        none.claim(at(0));
        assert_eq!((none.is_pending(), none.due()), (false, None));
    }
}
