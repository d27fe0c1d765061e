//! Heads of replies.
//!
//! The data of a read is sent behind its head, from where the device put it. No allocation.
//! [`success`], [`failure`] and [`read_head`] choose between simple and structured as the NBD
//! document demands: once structured replies are negotiated, a read is never answered by a simple
//! reply, and errors are sent as chunks because these can carry the reason.
//!
//! Source: "Simple reply message", "Structured reply chunk message", "Structured reply types".

use std::ops::Deref;

use super::wire::{
    ChunkHeader, NbdError, PAYLOAD_MAX, SimpleReply, base_allocation, clip, reply_flags, reply_type,
};

/// Maximum length of an error message; longer ones are truncated.
const MESSAGE_MAX: usize = 100;
/// Size that fits any head: an error chunk with its code, the length of its message, and the
/// message.
pub const ROOM: usize = ChunkHeader::LEN + 4 + 2 + MESSAGE_MAX;

/// An encoded head, ready to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    bytes: [u8; ROOM],
    len: usize,
}

impl Deref for Head {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Head {
    fn new(parts: &[&[u8]]) -> Self {
        let mut head = Self { bytes: [0; ROOM], len: 0 };
        for part in parts {
            head.bytes[head.len..][..part.len()].copy_from_slice(part);
            head.len += part.len();
        }
        head
    }

    fn simple(cookie: u64, error: u32) -> Self {
        Self::new(&[&SimpleReply { error, cookie }.encode()])
    }

    /// Creates a chunk of a reply. Its payload begins with `parts`.
    fn chunk(header: ChunkHeader, parts: [&[u8]; 3]) -> Self {
        let [a, b, c] = parts;
        Self::new(&[&header.encode(), a, b, c])
    }
}

/// Reply to a successful request without data: write, flush, trim, cache, write zeroes. Always a
/// simple reply, which is allowed for these in either mode and is the shortest.
pub fn success(cookie: u64) -> Head {
    Head::simple(cookie, 0)
}

/// Reply to a failed request of any kind. `message` is for users and only sent in structured mode.
pub fn failure(structured: bool, cookie: u64, error: NbdError, message: &str) -> Head {
    if !structured {
        return Head::simple(cookie, error.code());
    }
    let message = clip(message, MESSAGE_MAX).as_bytes();
    // At most `MESSAGE_MAX`.
    let message_len = (message.len() as u16).to_be_bytes();
    let parts = [&error.code().to_be_bytes()[..], &message_len, message];
    let len = 6 + message.len() as u32;
    Head::chunk(
        ChunkHeader { flags: reply_flags::DONE, kind: reply_type::ERROR, cookie, len },
        parts,
    )
}

/// Head before `count` extents of `base:allocation`.
pub fn status_head(cookie: u64, count: u32) -> Head {
    let (flags, kind) = (reply_flags::DONE, reply_type::BLOCK_STATUS);
    let context = base_allocation::ID.to_be_bytes();
    let header = ChunkHeader { flags, kind, cookie, len: 4 + 8 * count };
    Head::chunk(header, [&context, &[], &[]])
}

/// Head before the `len` bytes at `offset` of a successful read: a data chunk, which may be the
/// `last` one, or a simple reply, which precedes only the first bytes.
pub fn read_head(structured: bool, cookie: u64, offset: u64, len: u32, last: bool) -> Head {
    if !structured {
        return success(cookie);
    }
    debug_assert!(0 < len && len <= PAYLOAD_MAX, "a read of {len} bytes was not refused");
    let flags = if last { reply_flags::DONE } else { 0 };
    let header = ChunkHeader { flags, kind: reply_type::OFFSET_DATA, cookie, len: 8 + len };
    Head::chunk(header, [&offset.to_be_bytes(), &[], &[]])
}

#[cfg(test)]
mod tests;
