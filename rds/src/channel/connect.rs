//! Connections between a node and its users, and passed descriptors.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage};

/// Creates connections to a node.
pub trait Connect: fmt::Debug + Send + Sync {
    /// Creates a new connection (SOCK_SEQPACKET).
    ///
    /// # Errors
    /// The system's error.
    fn connect(&self) -> io::Result<OwnedFd>;
}

/// Returns the first descriptor passed along; others are closed.
pub(crate) fn first_fd(control: &mut RecvAncillaryBuffer<'_>) -> Option<OwnedFd> {
    let rights = |message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    };
    let mut fds = control.drain().filter_map(rights).flatten();
    let first = fds.next();
    fds.for_each(drop);
    first
}
