//! Sending end of a connection to an NBD server. Each send batches many requests and takes their
//! data directly from the IOs' memory.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use nbd_bridge::wire::RequestHeader;
use rtrs_core::mem::{IoVecs, Region};
use rtrs_core::rt::{Fd, Op, OpId, Port};

use super::outstanding::{Outstanding, ROWS};

/// Maximum number of slices in one send: a header and data for each of 128 requests.
const SLICES: usize = 256;
/// Number of bytes at which a send is full.
const SEND_BYTES: usize = 1 << 20;
/// Token of a send.
pub(super) const SEND: u64 = 0;

/// Sender of requests.
pub(super) struct Sender {
    /// Rows whose requests must be sent, in order.
    queue: VecDeque<u32>,
    /// Request headers, by row.
    heads: Arc<Region>,
    vecs: Option<Box<IoVecs>>,
    running: Option<OpId>,
}

impl Sender {
    pub(super) fn new() -> io::Result<Self> {
        let heads = Region::new(ROWS * RequestHeader::LEN)?;
        let (queue, vecs) = (VecDeque::with_capacity(ROWS), Some(IoVecs::new(SLICES)));
        Ok(Self { queue, heads, vecs, running: None })
    }

    /// Send in flight on the ring.
    pub(super) fn running(&self) -> Option<OpId> {
        self.running
    }

    /// Queues a request.
    pub(super) fn push(&mut self, row: u32) {
        self.queue.push_back(row);
    }

    /// Removes the first queued request.
    pub(super) fn pop(&mut self) -> Option<u32> {
        self.queue.pop_front()
    }

    /// Replaces the queue with these requests.
    pub(super) fn replace(&mut self, rows: impl Iterator<Item = u32>) {
        self.queue.clear();
        self.queue.extend(rows);
    }

    /// Submits queued requests to the ring.
    pub(super) fn send(&mut self, fd: &Fd, port: &Port, outstanding: &mut Outstanding) {
        if self.running.is_some() || self.queue.is_empty() {
            return;
        }
        let Some(mut iov) = self.vecs.take() else { return };
        let mut bytes = 0;
        while iov.room() >= 2
            && bytes < SEND_BYTES
            && let Some(row) = self.queue.pop_front()
        {
            let at = row as usize * RequestHeader::LEN;
            self.heads.copy_in(at, &outstanding.header(row));
            let head = self.heads.slice(at, RequestHeader::LEN);
            iov.push(head.unwrap_or_else(|| unreachable!("room for all rows")));
            bytes += RequestHeader::LEN;
            if let Some(data) = outstanding.slot(row).payload() {
                bytes += data.len();
                iov.push(data.clone());
            }
        }
        self.submit(fd.clone(), iov, port);
    }

    fn submit(&mut self, fd: Fd, iov: Box<IoVecs>, port: &Port) {
        self.running = Some(port.submit(Op::SendMsg { fd, iov }, SEND));
    }

    /// Processes a completed send. If the connection `is_up`, the rest of an incomplete send is
    /// submitted.
    pub(super) fn ended(&mut self, send: SentMessage, is_up: bool, port: &Port) -> io::Result<()> {
        self.running = None;
        let SentMessage { fd, mut iov, result } = send;
        let result = result.map(|count| iov.advance(count));
        if result.is_ok() && !iov.is_empty() && is_up {
            self.submit(fd, iov, port);
        } else {
            iov.clear();
            self.vecs = Some(iov);
        }
        result
    }
}

/// A send that the ring has executed.
pub(super) struct SentMessage {
    pub(super) fd: Fd,
    pub(super) iov: Box<IoVecs>,
    /// Number of bytes sent.
    pub(super) result: io::Result<usize>,
}
