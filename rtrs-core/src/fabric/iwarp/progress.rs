//! Receive progress of the stream machine.

use super::mpa::Features;
use super::stag::Placing;
use crate::mem::MemSlice;

/// Kind of a tagged frame, which determines its delivery.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tagged {
    Write,
    Response { last: bool },
}

/// Tagged frame whose remainder is received directly into its target.
#[derive(Debug)]
pub(super) struct Direct {
    /// Destination of the part of the payload that has not arrived.
    pub(super) rest: MemSlice,
    /// Checksum so far.
    pub(super) sum: u32,
    pub(super) payload_len: usize,
    pub(super) trailer: usize,
    pub(super) kind: Tagged,
    pub(super) _placing: Option<Placing>,
}

/// Send whose last segment has not arrived.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Message {
    pub(super) opcode: u8,
    /// Bytes received so far, including the prefix.
    pub(super) received: u32,
    pub(super) prefix: [u8; Features::PREFIX_LEN],
}

/// Receive state.
#[derive(Debug, Default)]
pub(super) struct Rx {
    /// Whether the peer has sent a valid frame.
    pub(super) heard: bool,
    /// Whether the next frame may be an empty Send that is not a message.
    pub(super) swallow_send: bool,
    /// Staged bytes are `read..write`.
    pub(super) read: usize,
    pub(super) write: usize,
    pub(super) direct: Option<Direct>,
    pub(super) message: Message,
    /// Messages received so far, by queue.
    pub(super) received: [u32; 2],
    pub(super) bulk: u8,
}

impl Rx {
    /// Releases the target memory of a partially received frame.
    pub(super) fn drop_direct(&mut self) {
        self.direct = None;
    }
}
