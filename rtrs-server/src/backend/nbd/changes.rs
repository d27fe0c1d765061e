//! Acknowledged changes that may not be durable yet, grouped by the connection that carried them.
//!
//! A flush proves only that the server behind its own connection has made durable what that
//! instance of the server acknowledged. Another connection may lead to an earlier instance, whose
//! cache is gone, or to another host. A flush of the export is therefore complete when each
//! connection with unsettled changes has answered a flush of its own. A connection that closes with
//! unsettled changes counts as a loss, and one flush fails for each loss; the engine informs all
//! sessions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use rtrs_core::block::WakeHandle;
use rtrs_core::time::Duration;

/// Maximum time for a connection to answer a flush on behalf of another, counted from the answer to
/// that other connection's flush.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Unsettled changes of one connection.
#[derive(Debug)]
pub(super) struct Account {
    /// Number of the latest change acknowledged over the connection.
    latest: AtomicU64,
    /// Changes up to this number are durable or counted as lost.
    settled: AtomicU64,
    /// Changes up to this number are to be settled by a flush over the connection.
    requested: AtomicU64,
    wake: WakeHandle,
}

impl Account {
    /// Records a successful flush over the connection, submitted at `mark`.
    pub(super) fn settle(&self, mark: u64) {
        self.settled.fetch_max(mark, Ordering::SeqCst);
    }

    /// Whether changes up to `mark` are unsettled.
    pub(super) fn owes(&self, mark: u64) -> bool {
        let due = self.latest.load(Ordering::SeqCst).min(mark);
        self.settled.load(Ordering::SeqCst) < due
    }

    /// Whether any change is unsettled.
    pub(super) fn owes_any(&self) -> bool {
        self.owes(u64::MAX)
    }

    /// Whether another connection is waiting for a flush over this one.
    pub(super) fn is_requested(&self) -> bool {
        self.owes(self.requested.load(Ordering::SeqCst))
    }

    /// Requests a flush over the connection that settles changes up to `mark`.
    fn request(&self, mark: u64) {
        self.requested.fetch_max(mark, Ordering::SeqCst);
        self.wake.wake();
    }
}

/// Changes of an export, numbered in the order of their acknowledgment, and their losses.
#[derive(Debug)]
pub(super) struct Changes {
    latest: AtomicU64,
    accounts: Mutex<Vec<Arc<Account>>>,
    /// Incremented with each change to `accounts`.
    version: AtomicU64,
    losses: AtomicU64,
    /// Number of losses for which a flush has failed.
    reported: AtomicU64,
    /// Number of flushes waiting for other connections.
    waiting: AtomicU32,
    pub(super) answer_max: Duration,
}

impl Changes {
    pub(super) fn new(answer_max: Duration) -> Self {
        Self {
            latest: AtomicU64::new(0),
            accounts: Mutex::default(),
            version: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            reported: AtomicU64::new(0),
            waiting: AtomicU32::new(0),
            answer_max,
        }
    }

    /// Adds the account of a connection; `wake` wakes its shard.
    pub(super) fn join(&self, wake: WakeHandle) -> Arc<Account> {
        let [latest, settled, requested] = [0; 3].map(AtomicU64::new);
        let account = Arc::new(Account { latest, settled, requested, wake });
        let mut accounts = self.accounts.lock();
        accounts.push(Arc::clone(&account));
        self.version.fetch_add(1, Ordering::SeqCst);
        account
    }

    /// Removes the account of a connection that is closed. Unsettled changes count as a loss.
    pub(super) fn leave(&self, account: &Arc<Account>) {
        self.lose(account);
        let mut accounts = self.accounts.lock();
        accounts.retain(|other| !Arc::ptr_eq(other, account));
        self.version.fetch_add(1, Ordering::SeqCst);
        drop(accounts);
        self.wake_waiting();
    }

    /// Records a change that is acknowledged without being durable.
    pub(super) fn add(&self, account: &Account) {
        let number = self.latest.fetch_add(1, Ordering::SeqCst) + 1;
        account.latest.fetch_max(number, Ordering::SeqCst);
    }

    /// Number of the latest change that a flush submitted now must cover.
    pub(super) fn mark(&self) -> u64 {
        self.latest.load(Ordering::SeqCst)
    }

    /// Counts a loss if the connection has unsettled changes. Returns whether it had any.
    pub(super) fn lose(&self, account: &Account) -> bool {
        let lost = account.owes_any();
        if lost {
            // Counted before the changes are marked as settled, for flushes that wait for them.
            self.losses.fetch_add(1, Ordering::SeqCst);
            account.settle(account.latest.load(Ordering::SeqCst));
        }
        lost
    }

    /// Marks all losses as reported. Returns false if one had not been reported yet.
    pub(super) fn report(&self) -> bool {
        let losses = self.losses.load(Ordering::SeqCst);
        self.reported.fetch_max(losses, Ordering::SeqCst) >= losses
    }

    /// Counts a flush that starts or stops waiting for other connections.
    pub(super) fn count_waiting(&self, begins: bool) {
        if begins {
            self.waiting.fetch_add(1, Ordering::SeqCst);
        } else {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Wakes the shards of all connections if a flush is waiting.
    pub(super) fn wake_waiting(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.accounts.lock().iter().for_each(|account| account.wake.wake());
        }
    }
}

/// A connection's copy of the list of all accounts, renewed when the list has changed.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// One more than the version of the copy; 0 if there is none.
    copied: u64,
    accounts: Vec<Arc<Account>>,
}

impl Peers {
    fn renew(&mut self, changes: &Changes) -> &[Arc<Account>] {
        if self.copied != changes.version.load(Ordering::SeqCst) + 1 {
            let accounts = changes.accounts.lock();
            self.copied = changes.version.load(Ordering::SeqCst) + 1;
            self.accounts.clone_from(&accounts);
        }
        &self.accounts
    }

    /// Requests a flush over each other connection with unsettled changes up to `mark`.
    pub(super) fn request(&mut self, changes: &Changes, own: &Arc<Account>, mark: u64) {
        let accounts = self.renew(changes).iter();
        let others = accounts.filter(|account| !Arc::ptr_eq(account, own) && account.owes(mark));
        others.for_each(|account| account.request(mark));
    }

    /// Whether no connection has unsettled changes up to `mark`.
    pub(super) fn are_settled(&mut self, changes: &Changes, mark: u64) -> bool {
        !self.renew(changes).iter().any(|account| account.owes(mark))
    }

    /// Records that all changes up to `mark` are as durable as a server without flushes makes them.
    pub(super) fn settle(&mut self, changes: &Changes, mark: u64) {
        self.renew(changes).iter().for_each(|account| account.settle(mark));
    }

    /// Counts changes up to `mark` as lost if their connections do not answer. Returns the number
    /// of these connections.
    pub(super) fn give_up(&mut self, changes: &Changes, mark: u64) -> usize {
        let accounts = self.renew(changes).iter();
        accounts.filter(|account| account.owes(mark) && changes.lose(account)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_settles_only_changes_of_its_connection() {
        let changes = Changes::new(ANSWER_MAX);
        let [one, two] = [(); 2].map(|()| changes.join(WakeHandle::idle()));
        let mut peers = Peers::default();
        changes.add(&one);
        let mark = changes.mark();
        peers.request(&changes, &two, mark);
        two.settle(mark);
        assert!(one.is_requested() && !peers.are_settled(&changes, mark));
        // Later changes do not matter to the flush.
        changes.add(&one);
        one.settle(mark);
        assert!(peers.are_settled(&changes, mark) && changes.report());
        assert!(one.owes_any() && !one.is_requested());
    }

    #[test]
    fn a_connection_lost_with_unsettled_changes_is_reported_once() {
        let changes = Changes::new(ANSWER_MAX);
        let [one, two] = [(); 2].map(|()| changes.join(WakeHandle::idle()));
        let mut peers = Peers::default();
        changes.add(&one);
        let mark = changes.mark();
        assert!(!changes.lose(&two) && changes.lose(&one) && !changes.lose(&one));
        assert!(peers.are_settled(&changes, mark));
        assert!(!changes.report() && changes.report());
        changes.add(&two);
        changes.leave(&two);
        assert!(!changes.report() && peers.are_settled(&changes, changes.mark()));
        changes.leave(&one);
        assert!(changes.report());
    }
}
