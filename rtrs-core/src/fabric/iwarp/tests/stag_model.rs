//! Loom model of a window's owner and of peers on other shards (`crate::sync`).
//!
//! The table has three entries: a registration, a window over it, and one more. A cell represents
//! each half of the registered memory: peers share it, and the owner uses it exclusively. Loom
//! reports peers that access a cell concurrently with the owner, and owners that miss the effect of
//! a peer's access.

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;
use crate::sync::model;

const PD: u64 = 1;
const HALF: usize = 512;

/// One window, bound to the first half of the memory.
struct Model {
    table: Arc<StagTable>,
    region: Arc<Region>,
    /// Address of the memory's first byte.
    base: u64,
    key: Rkey,
    halves: [UnsafeCell<()>; 2],
}

impl Model {
    fn new() -> loom::sync::Arc<Self> {
        let table = StagTable::new();
        let region = Region::new(2 * HALF).unwrap();
        let (parent, base) = table.register(PD, &region, Access::LOCAL).unwrap();
        let index = table.make_window(PD, parent).unwrap();
        let unbound = Rkey(table.last_stag(index));
        let halves = [UnsafeCell::new(()), UnsafeCell::new(())];
        let mut model = Self { table, region, base, key: unbound, halves };
        model.key = model.bind(unbound, 0).unwrap();
        loom::sync::Arc::new(model)
    }

    fn bind(&self, key: Rkey, half: usize) -> Result<Rkey, FabricError> {
        let slice = self.region.slice(half * HALF, HALF).unwrap();
        self.table.bind(PD, key, &slice, Access::REMOTE_WRITE)
    }

    /// Writes to a half with this key, as a peer. Returns false if the key does not allow it.
    fn write(&self, key: Rkey, half: usize) -> bool {
        let addr = self.base + (half * HALF) as u64;
        let Ok(held) = self.table.acquire(PD, key.0, addr, HALF, REMOTE_WRITE) else {
            return false;
        };
        assert_eq!((held.region, held.offset), (self.region.id(), half * HALF));
        self.halves[half].with(|_| ());
        self.table.release(held);
        true
    }

    /// Uses a half as the owner, while no key reaches it.
    fn use_half(&self, half: usize) {
        self.halves[half].with_mut(|_| ());
    }
}

/// Runs `peer` on a separate shard.
fn on_shard<T: 'static>(
    model: &loom::sync::Arc<Model>,
    peer: impl FnOnce(&Model) -> T + 'static,
) -> thread::JoinHandle<T> {
    let model = loom::sync::Arc::clone(model);
    thread::spawn(move || peer(&model))
}

#[test]
fn no_access_outlives_a_revoke() {
    model(|| {
        let model = Model::new();
        let peers = [(); 2].map(|()| on_shard(&model, |model| model.write(model.key, 0)));
        let revoked = model.table.revoke(PD, model.key).is_ok();
        if revoked {
            model.use_half(0);
        }
        assert!(!model.write(model.key, 0), "a dead key allows no new access");
        for peer in peers {
            peer.join().unwrap();
        }
        assert!(model.table.revoke(PD, model.key).is_ok(), "no access is in progress");
    });
}

#[test]
fn a_key_never_reaches_the_range_of_its_successor() {
    model(|| {
        let model = Model::new();
        let within = on_shard(&model, |model| model.write(model.key, 0));
        let beyond = on_shard(&model, |model| model.write(model.key, 1));
        let bound = model.bind(model.key, 1);
        if bound.is_ok() {
            model.use_half(0);
        }
        assert!(!model.write(model.key, 0), "a dead key allows no new access");
        within.join().unwrap();
        assert!(!beyond.join().unwrap(), "the key of the first half reaches the second");
        let next = bound.or_else(|_| model.bind(model.key, 1)).unwrap();
        assert!(model.write(next, 1) && !model.write(next, 0));
    });
}

#[test]
fn an_entry_held_by_an_access_is_not_reused() {
    model(|| {
        let model = Model::new();
        let other = Region::new(2 * HALF).unwrap();
        let (stag, base) = model.table.register(PD, &other, Access::REMOTE_WRITE).unwrap();
        let id = other.id();
        let peers = [(); 2].map(|()| {
            on_shard(&model, move |model| {
                let Ok(held) = model.table.acquire(PD, stag, base, 1, REMOTE_WRITE) else { return };
                assert_eq!(held.region, id, "the access names the region of the next key");
                model.table.release(held);
            })
        });
        model.table.deregister(stag, id);
        let next = model.table.register(PD, &model.region, Access::REMOTE_WRITE);
        if let Ok((next, _)) = next {
            assert_eq!(next >> 8, stag >> 8, "the only free entry");
            assert_ne!(next, stag);
        }
        for peer in peers {
            peer.join().unwrap();
        }
        assert!(model.table.acquire(PD, stag, base, 1, REMOTE_WRITE).is_err());
        let next = next.or_else(|_| model.table.register(PD, &other, Access::REMOTE_WRITE));
        assert!(next.is_ok(), "no access is in progress");
    });
}

#[test]
fn invalidating_a_key_leaves_its_successor_valid() {
    model(|| {
        let model = Model::new();
        let peer = on_shard(&model, |model| model.table.invalidate(PD, model.key.0).is_ok());
        let next = model.bind(model.key, 1).unwrap();
        assert!(model.write(next, 1), "the peer invalidated another key");
        peer.join().unwrap();
        assert!(model.write(next, 1), "the peer invalidated another key");
    });
}

#[test]
fn at_most_one_of_two_binds_of_a_key_succeeds() {
    model(|| {
        let model = Model::new();
        let other = on_shard(&model, |model| model.bind(model.key, 0));
        let own = model.bind(model.key, 1);
        let other = other.join().unwrap();
        let (key, half) = match (own, other) {
            (Ok(key), Err(_)) => (key, 1),
            (Err(_), Ok(key)) => (key, 0),
            both => panic!("{both:?}"),
        };
        assert!(model.write(key, half) && !model.write(key, 1 - half));
        assert!(!model.write(model.key, 0) && !model.write(model.key, 1));
    });
}

#[test]
fn keys_created_and_dropped_concurrently_have_separate_entries() {
    model(|| {
        let model = Model::new();
        let register = |model: &Model| {
            model.table.register(PD, &model.region, Access::REMOTE_WRITE).map(|(stag, _)| stag)
        };
        let first = register(&model).unwrap();
        let other = on_shard(&model, register);
        model.table.deregister(first, model.region.id());
        let own = register(&model);
        let keys = [own, other.join().unwrap()];
        assert_eq!(keys.iter().filter(|key| key.is_ok()).count(), 1, "{keys:?}");
        for stag in keys.into_iter().flatten() {
            assert_ne!(stag, first);
            let sge = Sge { slice: model.region.whole(), lkey: stag };
            assert!(model.table.check_local(PD, &sge, false).is_some());
        }
    });
}
