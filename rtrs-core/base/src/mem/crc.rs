//! CRC32C (Castagnoli), the checksum of MPA frames, computed in pieces.
//!
//! The vectorized implementation comes from a library; another library verifies it in the tests.

use crc_fast::{CrcAlgorithm, Digest};

/// Extends a CRC32C over more bytes; a sum of 0 starts a new CRC. `crc32c_append(crc32c(a), b)` is
/// the sum of `a` followed by `b`.
#[must_use]
#[allow(clippy::cast_possible_truncation, reason = "a 32-bit sum in a 64-bit word")]
pub fn crc32c_append(sum: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!sum));
    digest.update(bytes);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::crc32c_append;

    #[test]
    fn crc32c_is_independent_of_chunking() {
        assert_eq!(crc32c_append(0, b"123456789"), 0xe306_9283);
        let bytes: Vec<u8> = (0..70_000_u32).map(|i| ((i * 31) >> 3) as u8).collect();
        for len in (0..600).chain([4095, 4096, 4097, 61_440, 70_000]) {
            let whole = crc32c::crc32c(&bytes[..len]);
            assert_eq!(crc32c_append(0, &bytes[..len]), whole, "{len} bytes");
            let cut = len * 5 / 7;
            let front = crc32c_append(0, &bytes[..cut]);
            assert_eq!(crc32c_append(front, &bytes[cut..len]), whole, "cut at {cut}");
        }
    }
}
