//! Why a session, or a volume of it, cannot go on.

/// Why a session, or a volume of it, cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionFailure {
    /// The server refused to open the export.
    #[error("the server refused to open {export:?}: {errno}{hint}")]
    OpenRefused {
        /// The export asked for.
        export: String,
        /// The server's errno by name.
        errno: String,
        /// What would do.
        hint: String,
    },
    /// No path came up, or none opened the volume; what each of them met.
    #[error("no path to the server: {0}")]
    Unreachable(String),
    /// The server's operator ended the session for good.
    #[error(
        "evicted by the server's operator: IO ends with errors; detach, and attach again for a \
         new session"
    )]
    Evicted,
    /// The server's operator removed the export.
    #[error(
        "the server's operator removed the export: IO ends with errors; detach, and attach again \
         if it is exported again"
    )]
    Removed,
    /// What the server grants cannot be worked with.
    #[error("{0}")]
    Unusable(String),
}
