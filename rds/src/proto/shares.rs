//! Shares of a limit, which keep any one user from taking all of it.

use std::collections::BTreeMap;

/// User whose processes own sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UserId(pub u32);

impl UserId {
    /// Owner of the sockets of the node's own process, to which shares do not apply. No process has
    /// this user ID.
    pub const NODE: Self = Self(u32::MAX);
}

/// A limit, and the amount that all users together are using.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) limit: usize,
    pub(crate) total: usize,
}

/// Use of a limit, by user. A user may have three quarters of what all others leave, so that there
/// is always room for one more user.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    used: BTreeMap<UserId, usize>,
}

impl Shares {
    /// Adds to the amount in use by a user.
    pub(crate) fn charge(&mut self, user: UserId, amount: usize) {
        *self.used.entry(user).or_default() += amount;
    }

    /// Subtracts from the amount in use by a user.
    pub(crate) fn discharge(&mut self, user: UserId, amount: usize) {
        let Some(used) = self.used.get_mut(&user) else { return };
        *used = used.saturating_sub(amount);
        if *used == 0 {
            self.used.remove(&user);
        }
    }

    /// Whether the share of a user has room for this amount. A user that uses nothing may exceed
    /// its share: otherwise the longest messages would never pass.
    pub(crate) fn has_room(&self, user: UserId, whole: Use, amount: usize) -> bool {
        let own = self.used.get(&user).copied().unwrap_or(0);
        own == 0 || user == UserId::NODE || own + amount <= share(whole, own)
    }

    /// Whether a user that was refused may try again. Part of its share must be free, so that the
    /// user does not retry for each message.
    pub(crate) fn has_relaxed(&self, user: UserId, whole: Use) -> bool {
        let own = self.used.get(&user).copied().unwrap_or(0);
        let share = share(whole, own);
        own == 0 || user == UserId::NODE || own <= share - share / 8
    }
}

/// Returns the share of a user that uses `own` of the total.
fn share(whole: Use, own: usize) -> usize {
    let left = whole.limit.saturating_sub(whole.total.saturating_sub(own));
    left - left.div_ceil(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: UserId = UserId(1000);
    const MODEST: UserId = UserId(1001);

    #[test]
    fn each_user_leaves_room_for_others() {
        let mut shares = Shares::default();
        let mut total = 0;
        let mut take = |user| {
            let mut taken = 0;
            while shares.has_room(user, Use { limit: 1000, total }, 1) {
                shares.charge(user, 1);
                (total, taken) = (total + 1, taken + 1);
            }
            taken
        };
        assert_eq!(take(GREEDY), 750);
        assert_eq!(take(MODEST), 187, "three quarters of what is left");
        assert_eq!(take(GREEDY), 0);
        assert_eq!(take(UserId(7)), 47);
        // Another user has left.
        shares.discharge(MODEST, 187);
        let whole = Use { limit: 1000, total: total - 187 };
        assert!(!shares.has_room(GREEDY, whole, 1) && shares.has_room(MODEST, whole, 150));
    }

    #[test]
    fn a_refused_user_tries_again_when_a_part_of_its_share_is_free() {
        let mut shares = Shares::default();
        let whole = |total| Use { limit: 1000, total };
        shares.charge(GREEDY, 750);
        assert!(!shares.has_room(GREEDY, whole(750), 1) && !shares.has_relaxed(GREEDY, whole(750)));
        shares.discharge(GREEDY, 50);
        assert!(shares.has_room(GREEDY, whole(700), 1) && !shares.has_relaxed(GREEDY, whole(700)));
        shares.discharge(GREEDY, 50);
        assert!(shares.has_relaxed(GREEDY, whole(650)));
    }

    #[test]
    fn the_first_part_and_the_node_itself_may_exceed_the_share() {
        let mut shares = Shares::default();
        let whole = Use { limit: 1000, total: 0 };
        assert!(shares.has_room(GREEDY, whole, 1000));
        shares.charge(GREEDY, 1000);
        shares.charge(UserId::NODE, 900);
        assert!(shares.has_room(UserId::NODE, Use { total: 900, ..whole }, 100));
        assert!(!shares.has_room(GREEDY, Use { total: 1000, ..whole }, 0));
        shares.discharge(GREEDY, 1000);
        assert!(!shares.used.contains_key(&GREEDY), "idle users are forgotten");
    }
}
