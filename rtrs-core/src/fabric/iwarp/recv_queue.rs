//! Posted receives, oldest first. Consecutive receives without a buffer and with the same ID share
//! one entry: a server posts as many identical receives as its clients may have requests in flight.

use std::collections::VecDeque;

use crate::mem::MemSlice;

/// Posted receive.
#[derive(Debug)]
pub(super) struct PostedRecv {
    pub(super) wr_id: u64,
    pub(super) buf: Option<MemSlice>,
}

/// Receive queue of a queue pair.
#[derive(Debug, Default)]
pub(super) struct RecvQueue {
    /// Receives with their repeat counts.
    entries: VecDeque<(PostedRecv, u32)>,
    len: usize,
}

impl RecvQueue {
    /// Returns the number of posted receives.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Posts a receive.
    pub(super) fn push(&mut self, recv: PostedRecv) {
        self.len += 1;
        if let Some((last, count)) = self.entries.back_mut()
            && last.buf.is_none()
            && recv.buf.is_none()
            && last.wr_id == recv.wr_id
        {
            *count += 1;
        } else {
            self.entries.push_back((recv, 1));
        }
    }

    /// Returns the oldest receive.
    pub(super) fn front(&self) -> Option<&PostedRecv> {
        self.entries.front().map(|(recv, _)| recv)
    }

    /// Removes the oldest receive.
    pub(super) fn pop(&mut self) -> Option<PostedRecv> {
        let (recv, count) = self.entries.front_mut()?;
        self.len -= 1;
        if *count > 1 {
            *count -= 1;
            return Some(PostedRecv { wr_id: recv.wr_id, buf: None });
        }
        self.entries.pop_front().map(|(recv, _)| recv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Region;

    #[test]
    fn receives_are_taken_in_posting_order() {
        let region = Region::new(64).expect("memory");
        let buf = |at: usize| region.slice(at, 8);
        let posted = [
            (1, None),
            (1, None),
            (2, None),
            (1, None),
            (1, buf(0)),
            (1, buf(8)),
            (1, None),
            (1, None),
        ];
        let mut queue = RecvQueue::default();
        let key = |recv: &PostedRecv| (recv.wr_id, recv.buf.as_ref().map(|buf| buf.offset()));
        for round in 0..3 {
            for (wr_id, buf) in &posted {
                queue.push(PostedRecv { wr_id: *wr_id, buf: buf.clone() });
            }
            assert_eq!(queue.len(), posted.len(), "round {round}");
            for (left, (wr_id, buf)) in (0..posted.len()).rev().zip(&posted) {
                let expected = Some((*wr_id, buf.as_ref().map(|buf| buf.offset())));
                assert_eq!(queue.front().map(key), expected);
                assert_eq!(queue.pop().as_ref().map(key), expected);
                assert_eq!(queue.len(), left);
            }
            assert!(queue.pop().is_none() && queue.front().is_none());
        }
    }

    #[test]
    fn identical_receives_take_no_memory() {
        let mut queue = RecvQueue::default();
        for _ in 0..100_000 {
            queue.push(PostedRecv { wr_id: 7, buf: None });
        }
        assert_eq!((queue.len(), queue.entries.len()), (100_000, 1));
        // The same holds if a receive is posted for each one used.
        for _ in 0..1000 {
            assert_eq!(queue.pop().map(|recv| recv.wr_id), Some(7));
            queue.push(PostedRecv { wr_id: 7, buf: None });
        }
        assert_eq!((queue.len(), queue.entries.len()), (100_000, 1));
    }
}
