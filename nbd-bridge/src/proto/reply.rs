//! Headers of replies.
//!
//! The data of a read is sent after its header, directly from where the device put it. [`success`],
//! [`failure`] and [`read_head`] choose between the forms as the NBD specification requires: once
//! structured replies are negotiated, a read is never answered with a simple reply, and errors are
//! sent as chunks because these can carry the reason.
//!
//! Source: "Simple reply message", "Structured reply chunk message", "Structured reply types".

use std::ops::Deref;

use super::wire::{
    ChunkHeader, ExtendedChunkHeader, ExtendedRequest, NbdError, PAYLOAD_MAX, RequestHeader,
    SimpleReply, base_allocation, clip, reply_flags, reply_type,
};

/// Maximum length of an error message; longer ones are truncated.
const MESSAGE_MAX: usize = 100;
/// Enough space for any header: an error chunk with its code, the length of its message, and the
/// message.
pub const ROOM: usize = ExtendedChunkHeader::LEN + 4 + 2 + MESSAGE_MAX;

/// Form of a connection's replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Simple replies only.
    Simple,
    /// Structured chunks for reads and errors.
    Structured,
    /// Extended chunks for everything.
    Extended,
}

impl Form {
    /// Length of request headers on connections of this form.
    pub const fn request_len(self) -> usize {
        match self {
            Self::Extended => ExtendedRequest::LEN,
            Self::Simple | Self::Structured => RequestHeader::LEN,
        }
    }
}

/// Request that a reply answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Form of the reply.
    pub form: Form,
    /// The cookie of the request.
    pub cookie: u64,
    /// The offset of the request, for extended chunks.
    pub offset: u64,
}

/// A chunk of a reply.
struct Chunk {
    last: bool,
    kind: u16,
    /// Length of the payload.
    len: u32,
}

/// An encoded header, ready to be sent.
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

    /// Creates a chunk with a payload of `len` bytes, which begins with `parts`.
    fn chunk(of: Answered, chunk: Chunk, parts: [&[u8]; 3]) -> Self {
        let (Answered { form, cookie, offset }, Chunk { last, kind, len }) = (of, chunk);
        let flags = if last { reply_flags::DONE } else { 0 };
        let [a, b, c] = parts;
        if form == Form::Extended {
            let len = len.into();
            let header = ExtendedChunkHeader { flags, kind, cookie, offset, len };
            return Self::new(&[&header.encode(), a, b, c]);
        }
        Self::new(&[&ChunkHeader { flags, kind, cookie, len }.encode(), a, b, c])
    }
}

/// Reply to a successful request without data: write, flush, trim, cache, write zeroes. It is a
/// simple reply unless headers are extended: both other forms allow it, and it is the shortest.
pub fn success(of: Answered) -> Head {
    match of.form {
        Form::Extended => {
            Head::chunk(of, Chunk { last: true, kind: reply_type::NONE, len: 0 }, [&[]; 3])
        }
        Form::Simple | Form::Structured => Head::simple(of.cookie, 0),
    }
}

/// Reply to a failed request of any kind. `message` is for users and is not sent in simple replies.
pub fn failure(of: Answered, error: NbdError, message: &str) -> Head {
    if of.form == Form::Simple {
        return Head::simple(of.cookie, error.code());
    }
    let message = clip(message, MESSAGE_MAX).as_bytes();
    // At most `MESSAGE_MAX`.
    let message_len = (message.len() as u16).to_be_bytes();
    let parts = [&error.code().to_be_bytes()[..], &message_len, message];
    let len = 6 + message.len() as u32;
    Head::chunk(of, Chunk { last: true, kind: reply_type::ERROR, len }, parts)
}

/// Size in bytes of an extent in a block status reply.
pub const fn extent_len(form: Form) -> usize {
    if matches!(form, Form::Extended) { 16 } else { 8 }
}

/// Header before `count` extents of `base:allocation`.
pub fn status_head(of: Answered, count: u32) -> Head {
    let context = base_allocation::ID.to_be_bytes();
    let extents = count * extent_len(of.form) as u32;
    if of.form == Form::Extended {
        let chunk = Chunk { last: true, kind: reply_type::BLOCK_STATUS_EXT, len: 8 + extents };
        return Head::chunk(of, chunk, [&context, &count.to_be_bytes(), &[]]);
    }
    let chunk = Chunk { last: true, kind: reply_type::BLOCK_STATUS, len: 4 + extents };
    Head::chunk(of, chunk, [&context, &[], &[]])
}

/// Header before the `len` bytes at `offset` of a successful read: a data chunk, which may be the
/// `last` one, or a simple reply, which precedes only the first bytes.
pub fn read_head(of: Answered, offset: u64, len: u32, last: bool) -> Head {
    if of.form == Form::Simple {
        return success(of);
    }
    debug_assert!(0 < len && len <= PAYLOAD_MAX, "a read of {len} bytes was not refused");
    let chunk = Chunk { last, kind: reply_type::OFFSET_DATA, len: 8 + len };
    Head::chunk(of, chunk, [&offset.to_be_bytes(), &[], &[]])
}

#[cfg(test)]
mod tests;
