//! Reasons why a target could not be opened.

use std::error::Error as _;
use std::fmt;

use crate::backend::BackendError;
use crate::error::Error;

/// Reason why a target could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::daemon) struct OpenError {
    pub(in crate::daemon) why: String,
    pub(super) holder: Holder,
}

/// Whether another program holds the image of an export, for example a virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Holder {
    /// The error has a different reason.
    #[default]
    None,
    Holds,
    /// A program that held the image no longer did at the last check. It may take the image again:
    /// a virtual machine that restarts briefly releases its image.
    HasLetGo,
}

impl OpenError {
    pub(super) fn new(error: &Error) -> Self {
        let (mut cause, mut holder) = (error.source(), Holder::None);
        while let Some(error) = cause {
            if error.downcast_ref().is_some_and(BackendError::is_held) {
                holder = Holder::Holds;
            }
            cause = error.source();
        }
        Self { why: error.chain().to_string(), holder }
    }

    /// Reason for an export whose image another program holds.
    #[cfg(test)]
    pub(super) fn held(why: String) -> Self {
        Self { why, holder: Holder::Holds }
    }

    /// Reason for an export whose image another program, named in `why`, held until the last check.
    pub(super) fn let_go(why: String) -> Self {
        Self { why, holder: Holder::HasLetGo }
    }
}

impl From<String> for OpenError {
    fn from(why: String) -> Self {
        Self { why, holder: Holder::None }
    }
}

impl From<&str> for OpenError {
    fn from(why: &str) -> Self {
        why.to_owned().into()
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}
