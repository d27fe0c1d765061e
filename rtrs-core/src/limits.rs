//! Protocol limits, and the two numbers that an operator chooses.
//!
//! The constants are those of the Linux modules `rtrs` and `rnbd` (docs/PROTOCOL.md, constants);
//! the assertions at the end of the list check their consistency at build time. [`Limits`] is a
//! validated pair of queue depth and chunk size: servers create one from their configuration,
//! clients from the values that a server announces. All code that multiplies, shifts or indexes by
//! the two numbers takes a `Limits` or relies on its guarantees.

use crate::ids::PermitId;

/// Default TCP and RDMA CM port of a server.
pub const PORT_DEFAULT: u16 = 1234;
/// Default number of chunks per path.
pub const QUEUE_DEPTH_DEFAULT: u32 = 512;
/// Maximum number of chunks per path: the depth is encoded in 16 bits.
pub const QUEUE_DEPTH_MAX: u32 = 65535;
/// Default chunk size in bytes.
pub const CHUNK_SIZE_DEFAULT: u32 = 128 << 10;
/// Minimum chunk size in bytes.
pub const CHUNK_SIZE_MIN: u32 = 8192;
/// Maximum chunk size in bytes: with one chunk, all payload bits of the immediate encode the
/// offset.
pub const CHUNK_SIZE_MAX: u32 = 1 << IMM_PAYLOAD_BITS;
/// Bytes at the end of a chunk for the user header, the RTRS message and descriptors.
pub const MAX_HDR_SIZE: u32 = 4096;
/// Payload bits of an immediate, shared by a request's permit and offset.
pub const IMM_PAYLOAD_BITS: u32 = 28;
/// Maximum number of connections per path that a server accepts.
pub const CONNS_PER_PATH_MAX: u16 = 4096;
/// Maximum size in bytes of a server's buffers for a path's connections, in addition to the chunks.
pub const CONNECTION_BUFFERS_MAX: u64 = 32 << 20;
/// Buffer bytes of one connection over TCP.
pub const TCP_CONNECTION_BUFFERS: u64 = 128 << 10;
/// Buffer bytes of one connection over TLS: records are larger than their content, and are
/// decrypted in place.
pub const TLS_CONNECTION_BUFFERS: u64 = 260 << 10;
/// Maximum number of connections per path over TCP that a server accepts.
pub const TCP_CONNS_PER_PATH_MAX: u16 = (CONNECTION_BUFFERS_MAX / TCP_CONNECTION_BUFFERS) as u16;
/// Maximum number of connections per path over TLS that a server accepts.
pub const TLS_CONNS_PER_PATH_MAX: u16 = (CONNECTION_BUFFERS_MAX / TLS_CONNECTION_BUFFERS) as u16;
/// Maximum number of paths per session that a server accepts.
pub const PATHS_PER_SESSION_MAX: usize = 128;
/// Maximum number of 4 KiB segments in a read or write by the kernel's client.
pub const SEGMENTS_MAX: u16 = 128;
/// Length of a name on the wire in bytes, including the terminating NUL.
pub const NAME_FIELD_LEN: usize = 255;
/// Maximum length of a name in bytes, without the NUL.
pub const NAME_LEN_MAX: usize = NAME_FIELD_LEN - 1;
/// Sector size in bytes: the unit of all positions and sizes in RNBD, whatever the block size.
pub const SECTOR_SIZE: u32 = 512;

/// The pool of a path must be smaller than this number of bytes, because clients compute its size
/// in 32 bits.
const POOL_SIZE_END: u64 = 1 << 32;

const _: () = assert!(CONNECTION_BUFFERS_MAX / TCP_CONNECTION_BUFFERS == 256);
const _: () = assert!(CHUNK_SIZE_DEFAULT.is_power_of_two());
const _: () = assert!(CHUNK_SIZE_MIN.is_power_of_two() && CHUNK_SIZE_MIN > MAX_HDR_SIZE);
const _: () = assert!(CHUNK_SIZE_DEFAULT - MAX_HDR_SIZE == 126_976);
const _: () =
    assert!(ceil_log2(QUEUE_DEPTH_DEFAULT) + ceil_log2(CHUNK_SIZE_DEFAULT) <= IMM_PAYLOAD_BITS);
// The 28-bit rule limits the pool to far below 4 GiB, so the pool size needs no check of its own.
const _: () = assert!(1u64 << IMM_PAYLOAD_BITS < POOL_SIZE_END);
// A permit fits in its newtype at any depth.
const _: () = assert!(QUEUE_DEPTH_MAX <= u16::MAX as u32);
const _: () = assert!(CHUNK_SIZE_DEFAULT - MAX_HDR_SIZE <= SEGMENTS_MAX as u32 * 4096);

/// Returns the number of bits needed to number `n` objects: the logarithm to base 2, rounded up; 0
/// for `n` below 2.
pub const fn ceil_log2(n: u32) -> u32 {
    if n < 2 { 0 } else { u32::BITS - (n - 1).leading_zeros() }
}

/// Queue depth and chunk size that are consistent with each other and with the wire format.
///
/// Guarantees: depth 1..=65535; chunk size a power of two from 8192 bytes; permit and offset
/// together fit in the 28 payload bits of an immediate; the whole pool is at most 256 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    queue_depth: u16,
    chunk_size: u32,
}

impl Limits {
    /// The kernel server's defaults: 512 chunks of 128 KiB.
    pub const DEFAULT: Self =
        Self { queue_depth: QUEUE_DEPTH_DEFAULT as u16, chunk_size: CHUNK_SIZE_DEFAULT };

    /// Validates a queue depth (chunks) and a chunk size (bytes).
    ///
    /// # Errors
    /// Returns which number is wrong, and valid alternatives.
    pub const fn new(queue_depth: u32, chunk_size: u32) -> Result<Self, LimitsError> {
        if !chunk_size.is_power_of_two() || chunk_size < CHUNK_SIZE_MIN {
            return Err(LimitsError::ChunkSize { chunk_size, nearest: nearest_chunk(chunk_size) });
        }
        if chunk_size > CHUNK_SIZE_MAX {
            return Err(LimitsError::ChunkSize { chunk_size, nearest: CHUNK_SIZE_MAX });
        }
        if queue_depth == 0 || queue_depth > QUEUE_DEPTH_MAX {
            let depth_max = depth_max(chunk_size);
            return Err(LimitsError::QueueDepth { queue_depth, chunk_size, depth_max });
        }
        if ceil_log2(queue_depth) + ceil_log2(chunk_size) > IMM_PAYLOAD_BITS {
            return Err(LimitsError::DoNotFit {
                queue_depth,
                chunk_size,
                depth_max: depth_max(chunk_size),
                chunk_max: 1 << (IMM_PAYLOAD_BITS - ceil_log2(queue_depth)),
            });
        }
        Ok(Self { queue_depth: queue_depth as u16, chunk_size })
    }

    /// Returns the same limits with this depth, which must be between 1 and the current one.
    pub const fn with_depth(self, queue_depth: u16) -> Self {
        assert!(
            queue_depth > 0 && queue_depth <= self.queue_depth,
            "a depth that was not validated"
        );
        Self { queue_depth, ..self }
    }

    /// Returns the number of chunks per path, which is also the number of permits per session.
    pub const fn queue_depth(self) -> u16 {
        self.queue_depth
    }

    /// Returns the chunk size in bytes.
    pub const fn chunk_size(self) -> u32 {
        self.chunk_size
    }

    /// Returns the maximum data length of a request in bytes: the chunk size without the space for
    /// headers.
    pub const fn max_io_size(self) -> u32 {
        self.chunk_size - MAX_HDR_SIZE
    }

    /// Returns the total size in bytes of a path's chunks.
    pub const fn pool_size(self) -> u64 {
        self.queue_depth as u64 * self.chunk_size as u64
    }

    /// Returns how permit and offset are encoded in an immediate.
    pub const fn mem_bits(self) -> MemBits {
        MemBits::for_depth(self.queue_depth)
    }

    /// Returns true if a chunk with that number exists.
    pub const fn has_permit(self, permit: PermitId) -> bool {
        permit.0 < self.queue_depth
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Number of offset bits in a request's immediate; the permit takes the rest of the 28.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemBits(u8);

impl MemBits {
    /// Returns the number of offset bits for a queue depth: `28 - ceil(log2(queue_depth))`, which
    /// is 12 to 28. A depth of 0 counts as 1.
    #[allow(clippy::cast_possible_truncation, reason = "12 to 28")]
    pub const fn for_depth(queue_depth: u16) -> Self {
        Self((IMM_PAYLOAD_BITS - ceil_log2(queue_depth as u32)) as u8)
    }

    /// Returns the number of offset bits.
    pub const fn get(self) -> u32 {
        self.0 as u32
    }

    /// Returns true if the permit and the offset fit. [`Limits`] guarantees this for its permits
    /// and for offsets inside its chunks.
    pub const fn fits(self, permit: PermitId, offset: u32) -> bool {
        offset >> self.0 == 0 && (permit.0 as u32) >> (IMM_PAYLOAD_BITS - self.0 as u32) == 0
    }
}

/// Returns the maximum number of chunks of this size that the immediate can number; `chunk_size`
/// has been validated.
const fn depth_max(chunk_size: u32) -> u32 {
    let by_rule = 1u32 << (IMM_PAYLOAD_BITS - ceil_log2(chunk_size));
    if by_rule > QUEUE_DEPTH_MAX { QUEUE_DEPTH_MAX } else { by_rule }
}

/// Returns a valid chunk size close to an invalid one.
const fn nearest_chunk(chunk_size: u32) -> u32 {
    if chunk_size <= CHUNK_SIZE_MIN {
        CHUNK_SIZE_MIN
    } else if chunk_size >= CHUNK_SIZE_MAX {
        CHUNK_SIZE_MAX
    } else {
        chunk_size.next_power_of_two()
    }
}

/// Reason why a queue depth and a chunk size cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// The chunk size alone is wrong.
    #[error(
        "chunk size {chunk_size} is not a power of two from {CHUNK_SIZE_MIN} to \
         {CHUNK_SIZE_MAX} bytes; use {nearest}"
    )]
    ChunkSize {
        /// Requested chunk size in bytes.
        chunk_size: u32,
        /// Closest valid size.
        nearest: u32,
    },
    /// The queue depth alone is wrong.
    #[error(
        "queue depth {queue_depth} is not between 1 and {QUEUE_DEPTH_MAX}; with chunks of \
         {chunk_size} bytes up to {depth_max} fit"
    )]
    QueueDepth {
        /// Requested depth in chunks.
        queue_depth: u32,
        /// Chunk size in bytes.
        chunk_size: u32,
        /// Maximum depth for that chunk size.
        depth_max: u32,
    },
    /// Each number is valid, but chunk number and offset together do not fit in the 28 bits.
    #[error(
        "queue depth {queue_depth} and chunk size {chunk_size} do not fit the 28 bits they share \
         in a request; use a depth of at most {depth_max}, or chunks of at most {chunk_max} \
         bytes{}",
        if *chunk_max < CHUNK_SIZE_MIN { " (which is too small to be used)" } else { "" }
    )]
    DoNotFit {
        /// Requested depth in chunks.
        queue_depth: u32,
        /// Requested chunk size in bytes.
        chunk_size: u32,
        /// Maximum depth for that chunk size.
        depth_max: u32,
        /// Maximum chunk size for that depth, in bytes.
        chunk_max: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_rounded_up() {
        let cases = [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (500, 9), (512, 9), (513, 10)];
        for (n, bits) in cases {
            assert_eq!(ceil_log2(n), bits, "{n}");
        }
        assert_eq!(ceil_log2(65535), 16);
        assert_eq!(ceil_log2(u32::MAX), 32);
    }

    #[test]
    fn offset_bits_depend_on_the_depth() {
        for (depth, bits) in [(0, 28), (1, 28), (2, 27), (500, 19), (512, 19), (513, 18)] {
            assert_eq!(MemBits::for_depth(depth).get(), bits, "{depth}");
        }
        assert_eq!(MemBits::for_depth(u16::MAX).get(), 12);
    }

    #[test]
    fn the_defaults_match_the_kernels() {
        let limits = Limits::new(512, 131_072).unwrap();
        assert_eq!(limits, Limits::DEFAULT);
        assert_eq!(limits.max_io_size(), 0x1f000);
        assert_eq!(limits.pool_size(), 64 << 20);
        assert_eq!(limits.mem_bits().get(), 19);
        assert!(limits.has_permit(PermitId(511)) && !limits.has_permit(PermitId(512)));
    }

    #[test]
    fn accepts_the_edges_of_the_28_bit_rule() {
        for (depth, chunk) in [(1, 1 << 28), (2, 1 << 27), (256, 1 << 20), (32768, 8192)] {
            assert!(Limits::new(depth, chunk).is_ok(), "{depth} x {chunk}");
            let error = Limits::new(depth + 1, chunk).unwrap_err();
            let LimitsError::DoNotFit { depth_max, .. } = error else { panic!("{error:?}") };
            assert_eq!(depth_max, depth);
        }
        // 65535 chunks need 16 bits, which leaves 4096 bytes per chunk.
        assert!(matches!(Limits::new(65535, 8192), Err(LimitsError::DoNotFit { .. })));
    }

    #[test]
    fn refusals_suggest_valid_values() {
        let text = |depth, chunk| Limits::new(depth, chunk).unwrap_err().to_string();
        assert!(text(512, 4096).contains("use 8192"));
        assert!(text(512, 0).contains("use 8192"));
        assert!(text(512, 100_000).contains("use 131072"));
        assert!(text(1, 1 << 29).contains("use 268435456"));
        assert!(text(1, u32::MAX).contains("use 268435456"));
        assert!(text(0, 131_072).contains("up to 2048 fit"));
        assert!(text(65536, 131_072).contains("65536 is not between 1 and 65535"));
        let both = text(512, 1 << 20);
        assert!(both.contains("depth of at most 256") && both.contains("524288 bytes"), "{both}");
    }

    #[test]
    fn every_suggestion_is_accepted() {
        for depth in [1u32, 2, 3, 100, 512, 513, 4096, 65535] {
            for shift in 13..=28 {
                match Limits::new(depth, 1 << shift) {
                    Ok(limits) => assert!(limits.pool_size() <= 1 << 28),
                    Err(LimitsError::DoNotFit { depth_max, chunk_max, .. }) => {
                        assert!(Limits::new(depth_max, 1 << shift).is_ok());
                        assert!(
                            chunk_max < CHUNK_SIZE_MIN || Limits::new(depth, chunk_max).is_ok()
                        );
                    }
                    Err(other) => panic!("{depth} x 2^{shift}: {other}"),
                }
            }
        }
    }
}
