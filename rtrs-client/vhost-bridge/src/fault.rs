//! Ring faults: protocol violations by the driver, which stop the ring.

/// Violation of the ring protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    /// The ring is not in the guest's memory, or is not aligned.
    #[error("the ring is outside the memory of the guest, or is not aligned")]
    Ring,
    /// The ring has a size that is not allowed.
    #[error("a ring of {0} descriptors; it must be a power of two up to 32768")]
    Size(u32),
    /// The driver offers more requests than the ring has descriptors.
    #[error("more requests are available than the ring has descriptors")]
    AvailableIndex,
    /// A descriptor number beyond the end of the table.
    #[error("descriptor {0} in a table of {1}")]
    Index(u16, u32),
    /// A descriptor chain that loops or is too long.
    #[error("a chain of more than 1024 descriptors, or 2048 pieces of memory")]
    TooLong,
    /// A descriptor of zero length.
    #[error("a descriptor of zero bytes")]
    Empty,
    /// An address outside the guest's memory.
    #[error("memory at {0:#x}, outside the guest's memory")]
    Address(u64),
    /// A device-readable descriptor after a device-writable one.
    #[error("a readable descriptor after a writable one")]
    Order,
    /// An indirect table in an indirect table.
    #[error("an indirect table in an indirect table")]
    Nested,
    /// An indirect table that is empty or ends within a descriptor.
    #[error("an indirect table of {0} bytes")]
    TableLength(u32),
    /// A request without its header.
    #[error("a request of {0} bytes; the header has 16")]
    Header(u64),
    /// A request without memory for its status.
    #[error("a request without memory for its status")]
    NoStatus,
    /// The kick descriptor cannot be read.
    #[error("the kick descriptor cannot be read")]
    Kick,
    /// The record of requests in flight does not belong to the ring.
    #[error("the record of requests in flight does not fit the ring")]
    Inflight,
    /// The file behind the guest's memory was truncated.
    #[error("guest memory was truncated")]
    Truncated,
    /// A request that is in flight twice, or more requests than the ring has descriptors.
    #[error("more requests in flight than the ring has descriptors")]
    TooMany,
}
