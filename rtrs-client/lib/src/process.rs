//! The process that opened a volume.

use crate::error::{Error, ErrorKind};

/// ID of the process to which the threads of a volume belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// Fails in a child of the process, which has no threads to serve the volume.
    pub(crate) fn check(self) -> Result<(), Error> {
        if self == Self::current() {
            return Ok(());
        }
        let text = "cannot use the volume: another process has opened it; open it after the fork";
        Err(Error::new(ErrorKind::Forked, text))
    }

    /// Process other than this one.
    #[cfg(test)]
    pub(crate) fn other() -> Self {
        Self(std::process::id() + 1)
    }
}
