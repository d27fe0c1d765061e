//! A path's request rows on a shard: one for each permit, allocated in blocks.
//!
//! A block is allocated when one of its permits is first used. Clients reuse the most recently
//! freed permit, so a lightly loaded session has few blocks, and the steady state allocates none.

use std::ops::{Index, IndexMut};

use rtrs_core::ids::PermitId;

use super::request::Request;

/// Number of rows in a block.
const BLOCK: usize = 32;

/// Stands in for every row that has not been allocated.
static FREE: Request = Request::new();

/// A path's request rows.
#[derive(Debug)]
pub(super) struct Rows(Box<[Option<Box<[Request; BLOCK]>>]>);

impl Rows {
    /// Creates the table for `queue_depth` permits, without any rows.
    pub(super) fn new(queue_depth: u16) -> Self {
        Self((0..usize::from(queue_depth).div_ceil(BLOCK)).map(|_| None).collect())
    }

    /// Row of a permit, if allocated.
    pub(super) fn get(&self, permit: PermitId) -> Option<&Request> {
        let block = self.0.get(permit.index() / BLOCK)?.as_ref()?;
        Some(&block[permit.index() % BLOCK])
    }

    /// All allocated rows, mutably.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (PermitId, &mut Request)> {
        let blocks = self.0.iter_mut().enumerate();
        let made = blocks.filter_map(|(at, block)| Some((at * BLOCK, block.as_deref_mut()?)));
        made.flat_map(|(first, block)| (first..).map(permit).zip(block))
    }

    /// All allocated rows.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PermitId, &Request)> {
        let blocks = self.0.iter().enumerate();
        let made = blocks.filter_map(|(at, block)| Some((at * BLOCK, block.as_deref()?)));
        made.flat_map(|(first, block)| (first..).map(permit).zip(block))
    }
}

#[allow(clippy::cast_possible_truncation, reason = "a queue depth has 16 bits")]
const fn permit(at: usize) -> PermitId {
    PermitId(at as u16)
}

impl Index<PermitId> for Rows {
    type Output = Request;

    fn index(&self, permit: PermitId) -> &Request {
        self.get(permit).unwrap_or(&FREE)
    }
}

impl IndexMut<PermitId> for Rows {
    fn index_mut(&mut self, permit: PermitId) -> &mut Request {
        let block = &mut self.0[permit.index() / BLOCK];
        let make = || Box::new([const { Request::new() }; BLOCK]);
        &mut block.get_or_insert_with(make)[permit.index() % BLOCK]
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::RequestState;
    use super::*;

    #[test]
    fn rows_are_allocated_in_blocks_on_first_use() {
        assert_eq!(Rows::new(u16::MAX).iter().count(), 0);
        let mut rows = Rows::new(70);
        let made = |rows: &Rows| rows.iter().map(|(permit, _)| permit.0).collect::<Vec<_>>();
        assert!(made(&rows).is_empty());
        assert!(rows.get(PermitId(40)).is_none());
        assert_eq!(rows[PermitId(40)].state(), RequestState::Free);
        assert!(made(&rows).is_empty(), "reading allocates none");
        let row: *const Request = &mut rows[PermitId(40)];
        assert_eq!(made(&rows), (32..64).collect::<Vec<_>>());
        assert!(std::ptr::eq(row, rows.get(PermitId(40)).expect("made")));
        rows[PermitId(69)].end();
        assert_eq!(made(&rows), (32..96).collect::<Vec<_>>());
        assert!(rows.get(PermitId(500)).is_none(), "beyond the depth");
    }
}
