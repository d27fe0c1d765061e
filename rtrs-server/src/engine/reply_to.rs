//! Destination of the answer to a client's request.

use rtrs_core::ids::{CoreIndex, PermitId};

use crate::path::key::PathKey;

/// Destination of the answer to a client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    /// Path that the request arrived over.
    pub path: PathKey,
    /// Shard of its connection.
    pub core: CoreIndex,
    /// Permit of the request.
    pub permit: PermitId,
}
