//! Where the answer to a request of a client goes.

use rtrs_core::ids::{CoreIndex, PermitId};

use crate::path::key::PathKey;

/// Where the answer to a request of a client goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    /// The path it came over.
    pub path: PathKey,
    /// The shard of its connection.
    pub core: CoreIndex,
    /// Its permit.
    pub permit: PermitId,
}
