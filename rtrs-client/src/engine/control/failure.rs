//! Failures that end a session or one of its volumes.

/// Reason why volumes on different servers cannot share a session.
pub(super) const ONE_SERVER: &str =
    "all volumes of a session must be on one server, and the session is bound to another server";

/// Failure that ends a session or one of its volumes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionFailure {
    /// The server refused to open the export.
    #[error("the server refused to open {export:?}: {errno}{hint}")]
    OpenRefused {
        /// Requested export.
        export: String,
        /// Name of the errno that the server returned.
        errno: String,
        /// Suggested remedy.
        hint: String,
    },
    /// No path came up, or none opened the volume; the text contains the error of each path.
    #[error("no path to the server: {0}")]
    Unreachable(String),
    /// The server's operator evicted the session.
    #[error("evicted by the server's operator; detach, and attach again for a new session")]
    Evicted,
    /// The server's operator removed the export.
    #[error(
        "the server's operator removed the export; detach, and attach again if it is exported \
         again"
    )]
    Removed,
    /// Another client has opened the export for writing while this one had no path.
    #[error(
        "another client has opened the export for writing while this client was disconnected, so \
         requests of this session must no longer run; detach, and attach again"
    )]
    Displaced,
    /// The server's limits or its device are unusable.
    #[error("{0}")]
    Unusable(String),
}
