//! Byte-wise little-endian loads and stores over fixed arrays and checked prefixes.
//!
//! Every decoder first turns its input into an array of the message's fixed length with
//! [`fixed`]; from then on offsets are constants and nothing can be out of bounds. Nothing is
//! assumed about alignment, and no struct is ever laid over memory.

use super::WireError;

/// The first `N` bytes of a message.
pub(super) fn fixed<'a, const N: usize>(
    message: &'static str,
    bytes: &'a [u8],
) -> Result<&'a [u8; N], WireError> {
    bytes.first_chunk::<N>().ok_or_else(|| WireError::short(message, N, bytes.len()))
}

/// `N` bytes at a constant offset of an array. A wrong offset is our own fault and panics.
pub(super) fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(take(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(take(bytes, at))
}

/// Stores an array at a constant offset.
pub(super) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

/// Checks the type field that opens every message after the handshake.
pub(super) fn expect_type(
    message: &'static str,
    bytes: &[u8],
    expected: (u16, &'static str),
) -> Result<(), WireError> {
    let found = u16_at(bytes, 0);
    if found == expected.0 {
        Ok(())
    } else {
        Err(WireError::value(message, 0, "type", u64::from(found), expected.1))
    }
}
