//! Reasons why a connection cannot continue.

use rtrs_core::fabric::FabricError;
use rtrs_core::ids::PermitId;
use rtrs_core::wire::{NameError, WireError, errno_name};

/// Protocol violation by the server, or an error of the local transport.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConnectionFault {
    /// Invalid message with this name.
    #[error("bad {0}: {1}")]
    Message(&'static str, WireError),
    /// Answer with invalid bytes.
    #[error("{0}")]
    Answer(#[from] WireError),
    /// Answer that is too long.
    #[error("answer of {0} bytes")]
    AnswerSize(usize),
    /// Answer for a permit not in use by the service connection.
    #[error("answer for permit {0} on the service connection")]
    Permit(PermitId),
    /// Message with this name before the connect response.
    #[error("{0} before the connect response")]
    BeforeAccept(&'static str),
    /// Message before INFO_REQ.
    #[error("a message before INFO_REQ")]
    BeforeInfo,
    /// INFO_RSP that was not requested.
    #[error("unexpected INFO_RSP")]
    UnexpectedInfo,
    /// Accept that contains an errno.
    #[error("accepted with error {0}")]
    AcceptedWithError(i16),
    /// Unusable limits of the server.
    #[error(
        "unusable bounds: queue depth {queue_depth}, largest request {max_io_size}, largest \
         header {max_hdr_size}"
    )]
    Bounds { queue_depth: u16, max_io_size: u32, max_hdr_size: u32 },
    /// Unusable logical block size.
    #[error("the server's block size is {0}")]
    BlockSize(u32),
    /// Logical block size that exceeds the largest request.
    #[error("the server's block size of {block} does not fit its largest request of {largest}")]
    LargeBlocks { block: u32, largest: u32 },
    /// Device with too many sectors.
    #[error("the server's device has {0} sectors")]
    Sectors(u64),
    /// Fence refused with the server's errno.
    #[error("the server refused a fence: {}", errno_name(*.0))]
    FenceRefused(u16),
    /// Export name that cannot be sent.
    #[error("export name: {0}")]
    ExportName(NameError),
    /// Error of the local transport while reposting a receive.
    #[error("receive not reposted: {0}")]
    Receive(String),
    /// Other error of the local transport.
    #[error("{0}")]
    Fabric(String),
}

impl ConnectionFault {
    /// Returns the fault for an invalid message with this name, for `map_err`.
    pub(crate) fn message(name: &'static str) -> impl Fn(WireError) -> Self {
        move |error| Self::Message(name, error)
    }

    /// Returns the fault for a receive that cannot be reposted.
    pub(crate) fn receive(error: &FabricError) -> Self {
        Self::Receive(error.to_string())
    }
}

impl From<FabricError> for ConnectionFault {
    fn from(error: FabricError) -> Self {
        Self::Fabric(error.to_string())
    }
}
