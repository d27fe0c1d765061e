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

/// Maximum number of descriptors that a packet carries.
pub(crate) const FDS_MAX: usize = 2;

/// Returns the descriptors passed along, in order; those beyond [`FDS_MAX`] are closed.
pub(crate) fn passed_fds(control: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let rights = |message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    };
    let mut fds: Vec<OwnedFd> = control.drain().filter_map(rights).flatten().collect();
    fds.truncate(FDS_MAX);
    fds
}
