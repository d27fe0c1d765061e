//! Groups of volumes that `apply` handles together, with the action for each.

use std::time::Instant;

use super::act::Allowed;
use crate::cmd::global::GlobalArgs;
use crate::error::Error;
use crate::volumes::difference::{Task, Wanted};

/// Session with its action.
pub(in crate::cmd) struct Item {
    pub(super) name: String,
    /// None for a session that the file does not list.
    pub(super) wanted: Option<Wanted>,
    pub(super) task: Task,
    /// Problem found before anything was done.
    pub(super) error: Option<Error>,
}

/// Volumes of a session, or a single volume, with the context for handling them.
pub(super) struct Group<'a> {
    pub(super) items: &'a [Item],
    pub(super) may: Allowed,
    /// Deadline for retries of an attach to a running session.
    pub(super) retry_until: Instant,
    pub(super) global: &'a GlobalArgs,
}
