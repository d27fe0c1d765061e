//! Reasons why a target could not be opened.

use std::error::Error as _;
use std::fmt;

use crate::backend::BackendError;
use crate::error::Error;
use crate::stats::next_attempt;

/// Reason why a target could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::daemon) struct OpenError {
    pub(in crate::daemon) why: String,
    /// Whether another program holds the image, for example a virtual machine. It may let go of the
    /// image for a moment only, so the server does not try again by itself.
    pub(in crate::daemon) is_held: bool,
}

impl OpenError {
    pub(super) fn new(error: &Error) -> Self {
        let (mut cause, mut is_held) = (error.source(), false);
        while let Some(error) = cause {
            is_held |= error.downcast_ref().is_some_and(BackendError::is_held);
            cause = error.source();
        }
        Self { why: error.chain().to_string(), is_held }
    }

    /// Time of the next attempt, for the operator.
    pub(super) const fn next_attempt(&self) -> &'static str {
        next_attempt(!self.is_held)
    }
}

impl From<String> for OpenError {
    fn from(why: String) -> Self {
        Self { why, is_held: false }
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
