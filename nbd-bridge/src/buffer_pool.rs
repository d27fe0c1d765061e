//! Memory shared by the bridges of a shard: one registered region, cut into equal buffers.
//!
//! RDMA pins a region when it is registered, so the bridges of many devices must share regions. A
//! bridge may hold buffers up to its share (`rtrs_core::shares`): no device gets less than half of
//! an equal share, even when another device holds its buffers because its disk hangs. A bridge that
//! finds no pool with room for its share creates another one, and so does a bridge that waits too
//! long for memory that others hold.

use std::cell::RefCell;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use rtrs_core::mem::{Pool, Region};
use rtrs_core::shares::Shares;

/// Size of one buffer: two writes of 128 KiB and the headers between them.
pub(crate) const BUFFER_LEN: usize = 256 * 1024 + 4096;
/// Minimum number of buffers reserved for each bridge: one for receiving and one for reads.
const LEAST: u32 = 2;

/// The pools of one shard, for all bridges created with them.
#[derive(Clone, Debug, Default)]
pub struct BufferPools(Rc<RefCell<Vec<Weak<BufferPool>>>>);

impl BufferPools {
    /// Takes a share of a pool of `count` buffers, for a bridge that already has the shares `had`.
    /// If `had` is not empty, the pool must have free memory; otherwise any pool will do.
    ///
    /// # Errors
    /// The system's error if memory is refused.
    pub(crate) fn join(&self, count: u32, had: &[Option<Share>]) -> io::Result<Share> {
        let mut pools = self.0.borrow_mut();
        pools.retain(|pool| pool.strong_count() > 0);
        let alive = pools.iter().filter_map(Weak::upgrade);
        let is_had =
            |pool: &Rc<BufferPool>| had.iter().flatten().any(|share| Rc::ptr_eq(&share.pool, pool));
        let mut others = alive.filter(|pool| pool.capacity() == count as usize && !is_had(pool));
        if let Some(share) = others.find_map(|pool| pool.join(had.is_empty())) {
            return Ok(share);
        }
        let pool = Rc::new(BufferPool::new(count)?);
        pools.push(Rc::downgrade(&pool));
        pool.join(true).ok_or_else(|| io::Error::other("a new pool has no room for a bridge"))
    }
}

/// Buffers of one size in one region, each with a reference count.
#[derive(Debug)]
struct BufferPool {
    region: Arc<Region>,
    rows: RefCell<Rows>,
}

#[derive(Debug)]
struct Rows {
    pool: Pool,
    holders: Vec<u32>,
    /// Whether each buffer is known to be backed by physical memory.
    real: Vec<bool>,
    shares: Shares,
    /// Whether each share is in use.
    members: Vec<bool>,
    /// Bytes populated for all members.
    touched: usize,
}

impl BufferPool {
    fn new(count: u32) -> io::Result<Self> {
        let pool = Pool::new(count, BUFFER_LEN)?;
        let region = Arc::clone(pool.region());
        let shares = Shares::with_least(count as usize, LEAST);
        let (holders, real) = (vec![0; count as usize], vec![false; count as usize]);
        let rows = Rows { pool, holders, real, shares, members: Vec::new(), touched: 0 };
        Ok(Self { region, rows: RefCell::new(rows) })
    }

    fn capacity(&self) -> usize {
        self.rows.borrow().pool.capacity()
    }

    /// Adds a share for one more bridge, if there is room. If `waits` is set, the bridge can wait
    /// for its reserve, so other bridges may currently be using it.
    fn join(self: Rc<Self>, waits: bool) -> Option<Share> {
        let mut rows = self.rows.borrow_mut();
        let first = !rows.members.contains(&true);
        let fits = rows.shares.fits_device() && (waits || rows.shares.has_room_for_device());
        if !first && !fits {
            return None;
        }
        let free = rows.members.iter().position(|taken| !taken);
        let member = free.unwrap_or_else(|| {
            rows.members.push(false);
            rows.members.len() - 1
        });
        rows.members[member] = true;
        rows.shares.add();
        drop(rows);
        Some(Share { pool: self, member, touched: 0 })
    }
}

/// A bridge's share of a pool.
#[derive(Debug)]
pub(crate) struct Share {
    pool: Rc<BufferPool>,
    member: usize,
    /// Bytes populated for this share.
    touched: usize,
}

impl Share {
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.pool.region
    }

    /// Backs the buffers that are taken first with physical memory: up to `bytes`, in addition to
    /// the bytes of the other members. Freed buffers are reused before others, so traffic that fits
    /// into the populated buffers needs no fresh memory.
    pub(crate) fn touch(&mut self, bytes: usize) {
        let bytes = bytes.min(self.region().len());
        self.touched += bytes;
        let rows = &mut *self.pool.rows.borrow_mut();
        rows.touched += bytes;
        let count = rows.touched.div_ceil(BUFFER_LEN).min(rows.pool.available());
        let taken: Vec<u32> = (0..count).filter_map(|_| rows.pool.take()).collect();
        for &index in taken.iter().rev() {
            if !std::mem::replace(&mut rows.real[index as usize], true) {
                // The previous holder no longer needs the contents.
                rows.pool.slice(index).fill(0);
            }
            rows.pool.give(index);
        }
    }

    /// Takes a whole buffer with a reference count of one.
    pub(crate) fn take(&self) -> Option<u32> {
        let rows = &mut *self.pool.rows.borrow_mut();
        if !rows.shares.may_take(self.member) {
            return None;
        }
        let index = rows.pool.take()?;
        rows.holders[index as usize] = 1;
        rows.shares.take(self.member);
        Some(index)
    }

    /// Adds a reference to a buffer that this bridge has taken.
    pub(crate) fn hold(&self, index: u32) {
        let holders = &mut self.pool.rows.borrow_mut().holders[index as usize];
        assert!(*holders > 0, "only a held buffer can be held again");
        *holders += 1;
    }

    /// Drops a reference; the last one frees the buffer. Returns true if it was the last.
    pub(crate) fn release(&self, index: u32) -> bool {
        let rows = &mut *self.pool.rows.borrow_mut();
        let holders = &mut rows.holders[index as usize];
        debug_assert!(*holders > 0, "buffer {index} has no holder");
        if *holders == 0 {
            tracing::error!(index, what = "a buffer was freed twice", "internal error");
            return false;
        }
        *holders -= 1;
        let last = *holders == 0;
        if last {
            rows.pool.give(index);
            rows.shares.give(self.member);
        }
        last
    }

    /// Whether the caller holds the only reference.
    pub(crate) fn is_sole_holder(&self, index: u32) -> bool {
        self.pool.rows.borrow().holders[index as usize] == 1
    }

    /// Number of buffers that this bridge may take now.
    pub(crate) fn room(&self) -> usize {
        self.pool.rows.borrow().shares.room_for(self.member)
    }

    /// Number of buffers guaranteed to this bridge whatever others do: the whole pool if no other
    /// bridge shares the pool.
    pub(crate) fn guaranteed(&self) -> usize {
        self.pool.rows.borrow().shares.guaranteed()
    }

    /// Total number of buffers.
    pub(crate) fn capacity(&self) -> usize {
        self.pool.capacity()
    }

    /// Number of buffers held by this bridge.
    pub(crate) fn held(&self) -> usize {
        self.pool.rows.borrow().shares.held(self.member)
    }
}

impl Drop for Share {
    /// Returns the share to the pool. A device or the ring may still write to buffers that are
    /// held, so these and their share stay allocated as long as the pool exists.
    fn drop(&mut self) {
        let rows = &mut *self.pool.rows.borrow_mut();
        let held = rows.shares.held(self.member);
        if held > 0 {
            tracing::debug!("{held} buffers of a closed bridge are still in use and stay reserved");
            return;
        }
        rows.members[self.member] = false;
        rows.touched -= self.touched;
        rows.shares.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_that_does_not_fit_opens_another_pool() {
        let pools = BufferPools::default();
        let regions = |shares: &[Share]| {
            let mut ids: Vec<_> = shares.iter().map(|share| share.region().id()).collect();
            ids.dedup();
            ids.len()
        };
        // The reserves are at most half of a pool: with two buffers each, a pool of 16 has room for
        // four.
        let mut shares: Vec<_> = (0..8).map(|_| pools.join(16, &[]).unwrap()).collect();
        assert_eq!(regions(&shares), 2);
        shares.push(pools.join(17, &[]).unwrap());
        assert_eq!(regions(&shares), 3, "pools of different sizes are separate");
    }

    #[test]
    fn volumes_share_a_pool_and_starved_ones_move() {
        let pools = BufferPools::default();
        let mut shares = Vec::new();
        for _ in 0..50 {
            let share = pools.join(246, &[]).unwrap();
            while share.take().is_some() {}
            shares.push(share);
        }
        let region = shares[0].region().id();
        assert!(shares.iter().all(|share| share.region().id() == region));
        // Two starved bridges share the new pool.
        let [one, two] = [0, 1].map(|_| Some(shares.pop().unwrap()));
        let [one, two] = [one, two].map(|had| pools.join(246, &[had]).unwrap());
        assert_eq!(one.region().id(), two.region().id());
        assert_ne!(one.region().id(), region);
    }

    #[test]
    fn a_pool_is_freed_with_its_last_bridge() {
        let pools = BufferPools::default();
        let [one, two] = [0, 1].map(|_| pools.join(16, &[]).unwrap());
        let region = Arc::downgrade(one.region());
        drop(one);
        assert!(region.strong_count() > 0);
        drop(two);
        assert_eq!(region.strong_count(), 0);
        assert!(pools.join(16, &[]).unwrap().take().is_some());
        assert_eq!(pools.0.borrow().len(), 1, "closed pools are forgotten");
    }

    #[test]
    fn buffers_in_use_are_not_reused_after_their_bridge_ends() {
        let pools = BufferPools::default();
        let [one, two] = [0, 1].map(|_| pools.join(16, &[]).unwrap());
        let left = [one.take().unwrap(), one.take().unwrap()];
        drop(one);
        let all: Vec<u32> = std::iter::from_fn(|| two.take()).collect();
        assert!(!all.is_empty() && left.iter().all(|left| !all.contains(left)), "{left:?} {all:?}");
        all.iter().for_each(|&index| assert!(two.release(index)));
        // A share with buffers in use stays reserved; one without is freed.
        let three = pools.join(16, &[]).unwrap();
        assert_eq!(three.guaranteed(), 2);
        drop(three);
        assert_eq!(two.guaranteed(), 4);
    }

    #[test]
    fn memory_is_touched_once_per_live_bridge() {
        let pools = BufferPools::default();
        let mut one = pools.join(64, &[]).unwrap();
        one.touch(BUFFER_LEN + 1);
        for _ in 0..40 {
            pools.join(64, &[]).unwrap().touch(BUFFER_LEN);
        }
        let mut two = pools.join(64, &[]).unwrap();
        two.touch(BUFFER_LEN);
        assert_eq!(two.pool.rows.borrow().touched, 2 * BUFFER_LEN + 1);
    }
}
