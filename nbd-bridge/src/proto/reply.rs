//! Heads of replies, written into the caller's bytes.
//!
//! Each function writes one head at the start of `out` and returns its length; the data of a read
//! goes out behind it from where the device put it. No allocation. The connection code calls
//! [`success`], [`failure`] and [`read_head`], which choose between simple and structured as
//! the NBD document demands: with structured replies negotiated a read is never answered by a
//! simple reply, and errors go out as chunks because these can say why.
//!
//! Source: "Simple reply message", "Structured reply chunk message", "Structured reply types".

use super::wire::{ChunkHeader, NbdError, STRING_MAX, SimpleReply, clip, reply_flags, reply_type};

/// Length of the head before the data of a structured read: chunk head and offset.
pub const READ_HEAD_LEN: usize = ChunkHeader::LEN + 8;
/// Bytes that hold any head of this file, an error with a message of up to 100 bytes included;
/// longer messages are cut to the room there is.
pub const ROOM: usize = ChunkHeader::LEN + 4 + 2 + 100 + 8;

/// Why a head was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// `out` is shorter than the head.
    #[error("no room for the head of a reply")]
    NoRoom,
    /// Data of no length, or of one that the head cannot say.
    #[error("{0} bytes cannot stand in one chunk")]
    BadLength(u32),
}

/// A finished request without data: write, flush, trim, cache, write zeroes. Always a simple
/// reply, which is allowed for them in either mode and the shortest.
///
/// # Errors
/// `out` is shorter than 16 bytes.
pub fn success(out: &mut [u8], cookie: u64) -> Result<usize, ReplyError> {
    simple(out, cookie, None)
}

/// A failed request of any kind. `message` is seen by people and only in structured mode.
///
/// # Errors
/// `out` is too short; [`ROOM`] bytes always do.
pub fn failure(
    out: &mut [u8],
    structured: bool,
    cookie: u64,
    error: NbdError,
    message: &str,
) -> Result<usize, ReplyError> {
    if structured {
        error_chunk(out, cookie, error, message, true)
    } else {
        simple(out, cookie, Some(error))
    }
}

/// What precedes the `len` bytes of a successful read that started at `offset`: 16 bytes of a
/// simple reply or the 28 of a single data chunk with DONE.
///
/// # Errors
/// `out` is too short, or `len` is 0 or too long for a chunk.
pub fn read_head(
    out: &mut [u8],
    structured: bool,
    cookie: u64,
    offset: u64,
    len: u32,
) -> Result<usize, ReplyError> {
    if structured { offset_data(out, cookie, offset, len, true) } else { simple(out, cookie, None) }
}

/// A simple reply.
///
/// # Errors
/// `out` is shorter than 16 bytes.
pub fn simple(out: &mut [u8], cookie: u64, error: Option<NbdError>) -> Result<usize, ReplyError> {
    put(out, &[&SimpleReply { error: error.map_or(0, NbdError::code), cookie }.encode()])
}

/// `NBD_REPLY_TYPE_NONE`, always the last chunk of its reply.
///
/// # Errors
/// `out` is shorter than 20 bytes.
pub fn none(out: &mut [u8], cookie: u64) -> Result<usize, ReplyError> {
    put(out, &[&chunk(reply_type::NONE, cookie, 0, true)])
}

/// The first [`READ_HEAD_LEN`] bytes of `NBD_REPLY_TYPE_OFFSET_DATA`; `len` bytes of data follow.
///
/// # Errors
/// `out` is too short, or `len` is 0 or too long for a chunk.
pub fn offset_data(
    out: &mut [u8],
    cookie: u64,
    offset: u64,
    len: u32,
    done: bool,
) -> Result<usize, ReplyError> {
    let payload = len.checked_add(8).filter(|_| len > 0).ok_or(ReplyError::BadLength(len))?;
    put(out, &[&chunk(reply_type::OFFSET_DATA, cookie, payload, done), &offset.to_be_bytes()])
}

/// `NBD_REPLY_TYPE_OFFSET_HOLE`: `len` bytes from `offset` read as zeroes.
///
/// # Errors
/// `out` is shorter than 32 bytes, or `len` is 0.
pub fn offset_hole(
    out: &mut [u8],
    cookie: u64,
    offset: u64,
    len: u32,
    done: bool,
) -> Result<usize, ReplyError> {
    if len == 0 {
        return Err(ReplyError::BadLength(len));
    }
    let head = chunk(reply_type::OFFSET_HOLE, cookie, 12, done);
    put(out, &[&head, &offset.to_be_bytes(), &len.to_be_bytes()])
}

/// `NBD_REPLY_TYPE_ERROR` with a message, cut to the room there is.
///
/// # Errors
/// `out` is shorter than 26 bytes.
pub fn error_chunk(
    out: &mut [u8],
    cookie: u64,
    error: NbdError,
    message: &str,
    done: bool,
) -> Result<usize, ReplyError> {
    put_error(out, reply_type::ERROR, cookie, error, message, &[], done)
}

/// `NBD_REPLY_TYPE_ERROR_OFFSET`: as [`error_chunk`], for the byte at `offset`.
///
/// # Errors
/// `out` is shorter than 34 bytes.
pub fn error_offset(
    out: &mut [u8],
    cookie: u64,
    error: NbdError,
    message: &str,
    offset: u64,
    done: bool,
) -> Result<usize, ReplyError> {
    let tail = offset.to_be_bytes();
    put_error(out, reply_type::ERROR_OFFSET, cookie, error, message, &tail, done)
}

fn put_error(
    out: &mut [u8],
    kind: u16,
    cookie: u64,
    error: NbdError,
    message: &str,
    tail: &[u8],
    done: bool,
) -> Result<usize, ReplyError> {
    let fixed = 6 + tail.len();
    let room = out.len().checked_sub(ChunkHeader::LEN + fixed).ok_or(ReplyError::NoRoom)?;
    let message = clip(message, room.min(STRING_MAX)).as_bytes();
    // At most 4096 + 14.
    let len = (fixed + message.len()) as u32;
    let message_len = message.len() as u16;
    put(
        out,
        &[
            &chunk(kind, cookie, len, done),
            &error.code().to_be_bytes(),
            &message_len.to_be_bytes(),
            message,
            tail,
        ],
    )
}

fn chunk(kind: u16, cookie: u64, len: u32, done: bool) -> [u8; ChunkHeader::LEN] {
    let flags = if done { reply_flags::DONE } else { 0 };
    ChunkHeader { flags, kind, cookie, len }.encode()
}

fn put(out: &mut [u8], parts: &[&[u8]]) -> Result<usize, ReplyError> {
    let total = parts.iter().map(|part| part.len()).sum();
    let mut rest = out.get_mut(..total).ok_or(ReplyError::NoRoom)?;
    for part in parts {
        let (room, next) = rest.split_at_mut_checked(part.len()).ok_or(ReplyError::NoRoom)?;
        room.copy_from_slice(part);
        rest = next;
    }
    Ok(total)
}

#[cfg(test)]
mod tests;
