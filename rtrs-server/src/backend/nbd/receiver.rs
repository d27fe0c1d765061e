//! Receiving end of a connection to an NBD server.
//!
//! Replies are received into a buffer, and the rest of a large payload goes directly to its
//! destination.

use std::io;

use nbd_bridge::client::{BadReply, Reply};
use rtrs_core::mem::{MemSlice, Region};
use rtrs_core::rt::{Fd, Op, OpId, Port};

use super::outstanding::Outstanding;

/// Size of the buffer for replies.
const BUFFER: usize = 64 << 10;
/// Number of bytes examined to determine what follows.
const HEAD: usize = 32;
/// Token for receives.
pub(super) const RECEIVE: u64 = 1;

/// Data of a read that is being received.
#[derive(Clone, Copy)]
struct Incoming {
    row: u32,
    at: usize,
    left: usize,
}

/// Answer to a request.
pub(super) struct Answered {
    pub(super) row: u32,
    /// NBD error; 0 for success.
    pub(super) error: u32,
}

/// Receiver of replies.
pub(super) struct Receiver {
    running: Option<OpId>,
    buffer: MemSlice,
    /// Range of unprocessed data in the buffer.
    filled: (usize, usize),
    incoming: Option<Incoming>,
}

impl Receiver {
    pub(super) fn new() -> io::Result<Self> {
        let buffer = Region::new(BUFFER)?.whole();
        Ok(Self { running: None, buffer, filled: (0, 0), incoming: None })
    }

    /// Receive in flight on the ring.
    pub(super) fn running(&self) -> Option<OpId> {
        self.running
    }

    /// Submits a receive to the ring. Nothing is received while no request is outstanding, so that
    /// an idle connection can be handed over (`last_flush.rs`).
    pub(super) fn receive(&mut self, fd: &Fd, port: &Port, outstanding: &Outstanding) {
        if self.running.is_some() || outstanding.is_empty() {
            return;
        }
        let buf = match self.incoming {
            // All received data has been processed.
            Some(Incoming { row, at, left }) => outstanding.slot(row).target(at, left),
            None => self.room(),
        };
        let fd = fd.clone();
        self.running = Some(port.submit(Op::Recv { fd, buf }, RECEIVE));
    }

    /// Moves unprocessed data to the start of the buffer and returns the rest of the buffer.
    fn room(&mut self) -> MemSlice {
        let (start, end) = self.filled;
        // The remaining bytes are at most part of a reply header.
        if start > 0 {
            let mut part = [0; HEAD];
            let part = &mut part[..end - start];
            self.buffer.copy_out(start, part);
            self.buffer.copy_in(0, part);
            self.filled = (0, end - start);
        }
        let room = self.buffer.slice(self.filled.1, BUFFER - self.filled.1);
        room.unwrap_or_else(|| unreachable!("within the buffer"))
    }

    /// Records that the receive has completed.
    pub(super) fn ended(&mut self) {
        self.running = None;
    }

    /// Adds received bytes, which [`Self::next`] processes.
    pub(super) fn add(&mut self, count: usize) {
        match &mut self.incoming {
            Some(incoming) => {
                incoming.at += count;
                incoming.left -= count;
                self.incoming = Some(*incoming).filter(|incoming| incoming.left > 0);
            }
            None => self.filled.1 += count,
        }
    }

    /// Processes received bytes up to the next answer. Returns None if all are processed.
    pub(super) fn next(
        &mut self,
        outstanding: &mut Outstanding,
    ) -> Result<Option<Answered>, BadReply> {
        loop {
            let (start, end) = self.filled;
            if let Some(Incoming { row, at, left }) = self.incoming {
                let count = left.min(end - start);
                let Some(from) = self.buffer.slice(start, count) else {
                    unreachable!("within the buffer")
                };
                outstanding.slot(row).target(at, count).copy_from(&from);
                self.filled.0 += count;
                if count < left {
                    self.incoming = Some(Incoming { row, at: at + count, left: left - count });
                    return Ok(None);
                }
                self.incoming = None;
                continue;
            }
            let mut head = [0; HEAD];
            let head = &mut head[..HEAD.min(end - start)];
            self.buffer.copy_out(start, head);
            let Some((count, reply)) = outstanding.parse(head)? else { return Ok(None) };
            self.filled.0 += count;
            match reply {
                Reply::Nothing => {}
                Reply::Data { row, at, len } => {
                    self.incoming = Some(Incoming { row, at: at as usize, left: len as usize });
                }
                Reply::Hole { row, at, len } => {
                    outstanding.slot(row).target(at as usize, len as usize).fill(0);
                }
                Reply::End { row, error } => return Ok(Some(Answered { row, error })),
            }
        }
    }

    /// Discards the unprocessed data of a failed connection.
    pub(super) fn reset(&mut self) {
        (self.filled, self.incoming) = ((0, 0), None);
    }
}
