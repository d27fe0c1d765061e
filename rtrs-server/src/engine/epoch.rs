//! The epoch of an export: the number of its failed syncs.
//!
//! Linux reports a write-back error once per open file description, and an export has only one,
//! shared by all shards and sessions. The request that receives the error therefore reports it on
//! behalf of all: the shard raises the epoch, and the next flush of every session fails if the
//! session has acknowledged writes that no successful flush has covered since (`engine/ledger.rs`).
//!
//! A successful sync is answered only when the results of all syncs that began before its end are
//! known, because one of those may have consumed the error (`rtrs_core::sync_order`,
//! `engine/io/sync.rs`).
//!
//! The epoch is part of the cache ID in OPEN_RSP, so that a client in a new session notices a
//! failure too. An [`EpochStore`] keeps the epoch across restarts of the server; a failed sync is
//! answered only after its epoch has been saved.

use std::fmt;
use std::sync::Arc;

use rtrs_core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use rtrs_core::sync_order::SyncOrder;

/// Current and saved epoch of an export.
#[derive(Debug, Default)]
pub struct EpochState {
    /// Epoch at the start of the process.
    base: u64,
    rises: AtomicU32,
    saved: AtomicU32,
    /// Whether the epoch is in the queue of a store.
    queued: AtomicBool,
}

impl EpochState {
    /// Epoch after `rises` rises. The sum wraps, because a saved epoch may be any number.
    fn number_at(&self, rises: u32) -> u64 {
        self.base.wrapping_add(u64::from(rises))
    }

    /// Returns the epoch to be saved. A store calls it just before saving, so that the save
    /// includes all rises up to then.
    pub fn begin_save(&self) -> (u64, u32) {
        self.queued.store(false, Ordering::SeqCst);
        let rises = self.rises.load(Ordering::SeqCst);
        (self.number_at(rises), rises)
    }

    /// Records that the epoch from `begin_save` was saved, or cannot be saved.
    pub fn end_save(&self, rises: u32) {
        self.saved.fetch_max(rises, Ordering::SeqCst);
    }
}

/// Epoch at the time of an event, to be compared with later epochs of the same export.
#[derive(Clone, Debug)]
pub struct EpochMark {
    state: Arc<EpochState>,
    rises: u32,
}

impl EpochMark {
    /// Returns the mark after `rises` rises.
    pub fn after(&self, rises: u32) -> Self {
        Self { state: Arc::clone(&self.state), rises }
    }
}

/// Keeps epochs across restarts of the server.
pub trait EpochStore: fmt::Debug + Send + Sync {
    /// Queues the epoch of the export with this `key`, without blocking.
    fn save(&self, key: &str, state: &Arc<EpochState>);
}

/// Record of a clean stop, for the next process.
pub trait StopMark: fmt::Debug + Send + Sync {
    /// Records that everything is flushed, and that no more writes will follow.
    fn note(&self);
}

/// Epoch and outstanding syncs of one export, shared by all shards.
#[derive(Debug, Default)]
pub struct SyncEpoch {
    state: Arc<EpochState>,
    /// Part of the cache ID that differs between starts of the server. Set if the epoch cannot be
    /// saved, or if only this process knows of unflushed data.
    salt: u64,
    stop: Option<Box<dyn StopMark>>,
    store: Option<(Arc<dyn EpochStore>, String)>,
    order: SyncOrder,
    /// Number of the daemon's running flushes whose failure would raise the epoch.
    flushing: AtomicU32,
}

/// A running flush of the daemon, until its result is recorded.
#[derive(Debug)]
pub(crate) struct Flushing<'a>(&'a AtomicU32);

impl Drop for Flushing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl SyncEpoch {
    /// Creates an epoch that a store keeps, with the last saved number.
    pub fn kept(base: u64, store: Arc<dyn EpochStore>, key: String) -> Arc<Self> {
        let state = EpochState { base, ..EpochState::default() };
        Arc::new(Self { state: Arc::new(state), store: Some((store, key)), ..Self::default() })
    }

    /// Creates an epoch that is not saved. `salt` differs between processes.
    pub fn unkept(salt: u64) -> Arc<Self> {
        Arc::new(Self { salt, ..Self::default() })
    }

    /// Makes the cache IDs depend on a number of this process, which a clean stop passes on to the
    /// next one. Called before the epoch is shared.
    pub(crate) fn tied(mut self: Arc<Self>, number: u64, stop: Box<dyn StopMark>) -> Arc<Self> {
        let Some(own) = Arc::get_mut(&mut self) else { return Self::unkept(number) };
        own.salt ^= number;
        own.stop = Some(stop);
        self
    }

    /// Order of the export's syncs.
    pub fn order(&self) -> &SyncOrder {
        &self.order
    }

    /// Whether the cache IDs depend on this process until a clean stop is recorded.
    pub fn is_tied(&self) -> bool {
        self.stop.is_some()
    }

    /// Records the start of a flush by the daemon, whose failure will raise the epoch.
    pub(crate) fn begin_flush(&self) -> Flushing<'_> {
        self.flushing.fetch_add(1, Ordering::SeqCst);
        Flushing(&self.flushing)
    }

    /// Records that everything is flushed, and that no more writes will follow. Does nothing if a
    /// failed sync is not saved or another flush is still running: the next process could not learn
    /// of a loss.
    pub fn note_clean_stop(&self) {
        if let Some(stop) = &self.stop
            && self.flushing.load(Ordering::SeqCst) == 0
            && self.is_saved(self.rises())
        {
            stop.note();
        }
    }

    /// Number of failed syncs since the start of the process.
    pub fn rises(&self) -> u32 {
        self.state.rises.load(Ordering::Acquire)
    }

    /// Epoch, counted across restarts.
    pub fn number(&self) -> u64 {
        self.state.number_at(self.rises())
    }

    /// Returns the mark after `rises` rises.
    pub fn mark(&self, rises: u32) -> EpochMark {
        EpochMark { state: Arc::clone(&self.state), rises }
    }

    /// Whether a sync of the export has failed since the mark was set, or may have failed: an
    /// export found again under the search path is a new object, with the saved number.
    pub fn has_risen_since(&self, mark: &EpochMark) -> bool {
        let rises = mark.state.rises.load(Ordering::Acquire);
        let same = Arc::ptr_eq(&self.state, &mark.state);
        let unknown = || self.store.is_none() || self.number() != mark.state.number_at(rises);
        rises > mark.rises || !same && unknown()
    }

    /// Records a failed sync. Returns the number of rises that must be saved before the failure is
    /// reported.
    pub fn raise(&self) -> u32 {
        let rises = self.state.rises.fetch_add(1, Ordering::SeqCst) + 1;
        match &self.store {
            Some((store, key)) => {
                if !self.state.queued.swap(true, Ordering::SeqCst) {
                    store.save(key, &self.state);
                }
            }
            None => self.state.end_save(rises),
        }
        rises
    }

    /// Whether `rises` rises have been saved.
    pub fn is_saved(&self, rises: u32) -> bool {
        self.state.saved.load(Ordering::Acquire) >= rises
    }

    /// Returns the cache ID of an open that began after `rises` rises, in this instance of the host
    /// or process.
    pub fn cache_id(&self, instance: u64, rises: u32) -> u64 {
        let epoch = self.state.number_at(rises);
        match (instance, epoch, self.salt) {
            // An unknown instance.
            (0, ..) => 0,
            (_, 0, 0) => instance,
            _ => mix(mix(instance ^ self.salt) ^ epoch).max(1),
        }
    }
}

/// Spreads a number over 64 bits (the finalizer of splitmix64).
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[derive(Debug, Default)]
    struct Queue(Mutex<Vec<Arc<EpochState>>>);

    impl EpochStore for Queue {
        fn save(&self, _key: &str, state: &Arc<EpochState>) {
            self.0.lock().push(Arc::clone(state));
        }
    }

    #[test]
    fn concurrent_advances_are_saved_together() {
        let queue = Arc::new(Queue::default());
        let epoch = SyncEpoch::kept(7, Arc::clone(&queue) as _, "vol".into());
        assert_eq!((epoch.number(), epoch.raise(), epoch.raise()), (7, 1, 2));
        assert_eq!(queue.0.lock().len(), 1, "one save covers both");
        let state = queue.0.lock().pop().unwrap();
        let (number, rises) = state.begin_save();
        assert_eq!((number, rises), (9, 2));
        assert_eq!(epoch.raise(), 3, "too late for that save");
        state.end_save(rises);
        assert!(epoch.is_saved(2) && !epoch.is_saved(3));
        assert_eq!(queue.0.lock().pop().unwrap().begin_save(), (10, 3));
    }

    #[test]
    fn any_saved_number_can_advance() {
        let queue = Arc::new(Queue::default());
        let epoch = SyncEpoch::kept(u64::MAX, Arc::clone(&queue) as _, "vol".into());
        epoch.raise();
        assert_eq!((epoch.number(), queue.0.lock()[0].begin_save()), (0, (0, 1)));
        assert_ne!(epoch.cache_id(5, 0), epoch.cache_id(5, 1));
    }

    #[test]
    fn cache_ids_differ_by_epoch_and_process() {
        let epoch = SyncEpoch::default();
        assert_eq!(epoch.cache_id(5, 0), 5, "as before the first failure");
        assert_eq!(epoch.cache_id(0, 3), 0, "unknown");
        let mut ids = vec![epoch.cache_id(5, 0), epoch.cache_id(5, 1), epoch.cache_id(5, 2)];
        ids.extend([epoch.cache_id(6, 1), SyncEpoch::unkept(9).cache_id(5, 0)]);
        ids.push(SyncEpoch::kept(3, Arc::new(Queue::default()), String::new()).cache_id(5, 0));
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 6);
        let later = SyncEpoch::kept(2, Arc::new(Queue::default()), String::new());
        assert_eq!(later.cache_id(5, 0), epoch.cache_id(5, 2), "the same after a restart");
    }
}
