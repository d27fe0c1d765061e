//! A shard's queue pairs by number, with their timers.
//!
//! A number consists of a slot (low half) and the slot's generation (high half), so that a number
//! is not reused while an event of its previous owner may be pending.

use std::collections::BTreeSet;

use super::FabricError;
use crate::ids::QpNum;
use crate::time::Instant;

#[derive(Debug)]
struct Slot<C> {
    generation: u16,
    conn: Option<Box<C>>,
    /// Deadline of the queue pair's entry in the timer table, if it has one.
    armed: Option<Instant>,
}

/// Queue pairs with their state and timers.
#[derive(Debug)]
pub(super) struct QpTable<C> {
    slots: Vec<Slot<C>>,
    free: Vec<u16>,
    timers: BTreeSet<(Instant, u32)>,
}

impl<C> QpTable<C> {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), timers: BTreeSet::new() }
    }

    /// Reserves a new number, which `insert` uses or `remove` releases.
    pub(super) fn reserve(&mut self) -> Result<QpNum, FabricError> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u16::try_from(self.slots.len())
                    .map_err(|_| FabricError::Unsupported("more than 65536 connections"))?;
                self.slots.push(Slot { generation: 0, conn: None, armed: None });
                index
            }
        };
        let generation = &mut self.slots[usize::from(index)].generation;
        *generation = generation.wrapping_add(1);
        Ok(QpNum(u32::from(*generation) << 16 | u32::from(index)))
    }

    fn index(&self, qp: QpNum) -> Option<usize> {
        let index = (qp.0 & 0xffff) as usize;
        let slot = self.slots.get(index)?;
        (u32::from(slot.generation) == qp.0 >> 16).then_some(index)
    }

    pub(super) fn get(&self, qp: QpNum) -> Option<&C> {
        self.slots[self.index(qp)?].conn.as_deref()
    }

    pub(super) fn get_mut(&mut self, qp: QpNum) -> Option<&mut C> {
        let index = self.index(qp)?;
        self.slots[index].conn.as_deref_mut()
    }

    pub(super) fn insert(&mut self, qp: QpNum, conn: C) {
        if let Some(index) = self.index(qp) {
            self.slots[index].conn = Some(Box::new(conn));
        }
    }

    /// Removes a queue pair and its timer, and frees its slot.
    pub(super) fn remove(&mut self, qp: QpNum) -> Option<Box<C>> {
        let index = self.index(qp)?;
        self.arm(qp, None);
        self.free.push((qp.0 & 0xffff) as u16);
        self.slots[index].conn.take()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &C> {
        self.slots.iter().filter_map(|slot| slot.conn.as_deref())
    }

    #[cfg(feature = "verbs")]
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut C> {
        self.slots.iter_mut().filter_map(|slot| slot.conn.as_deref_mut())
    }

    /// Sets a queue pair's only timer.
    pub(super) fn arm(&mut self, qp: QpNum, deadline: Option<Instant>) {
        let Some(index) = self.index(qp) else { return };
        let before = std::mem::replace(&mut self.slots[index].armed, deadline);
        if before != deadline {
            if let Some(at) = before {
                self.timers.remove(&(at, qp.0));
            }
            if let Some(at) = deadline {
                self.timers.insert((at, qp.0));
            }
        }
    }

    /// Returns the earliest timer.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Returns a queue pair whose timer has expired and clears the timer.
    pub(super) fn take_expired(&mut self, now: Instant) -> Option<QpNum> {
        let qp = self.timers.first().filter(|(at, _)| *at <= now).map(|(_, qp)| QpNum(*qp))?;
        self.arm(qp, None);
        Some(qp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the numbers of a slot that is reused many times.
    #[test]
    fn a_wrapped_generation_does_not_reuse_a_number_in_use() {
        let mut table = QpTable::new();
        let live = table.reserve().unwrap();
        table.insert(live, "live");
        let mut last = live;
        for _ in 0..=2 * u32::from(u16::MAX) {
            let next = table.reserve().unwrap();
            assert!(next != last && next != live);
            assert!(table.get(last).is_none() || last == live);
            table.insert(next, "next");
            assert_eq!(table.remove(next).as_deref(), Some(&"next"));
            last = next;
        }
        assert_eq!(table.get(live), Some(&"live"));
    }
}
