//! Changes to a running session, and the reasons why they are refused.

use rtrs_core::time::Duration;

use super::failure::{ONE_SERVER, SessionFailure};
use crate::engine::session::{PATHS_MAX, PathTarget, Tuning, VOLUMES_MAX, VolumeConfig};

/// Change to a running session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Add a path, under an identity that no path of the session has had before.
    Add {
        /// Addresses and provider of the path.
        target: PathTarget,
        /// Identity of the path on the server.
        uuid: [u8; 16],
        /// Paths that the new one may duplicate, because they will be removed.
        replaces: Vec<String>,
    },
    /// Remove the path; once gone, it is no longer listed.
    Remove(Leaving),
    /// Disconnect the path until a reconnect is requested.
    Disconnect(Leaving),
    /// Reconnect the path: at once if it is down, after its requests if it is up.
    Reconnect(Leaving),
    /// Apply other settings.
    Tune(Box<Tuning>),
    /// Add a volume, which each path opens.
    AddVolume(VolumeConfig),
    /// Close a volume that its user has released, once its IO has ended. The last volume of a
    /// session cannot be closed on its own.
    CloseVolume {
        /// Export name.
        export: String,
    },
    /// Have the volume's server give it up, so that another server can take it over.
    SwitchVolume {
        /// Export name.
        export: String,
    },
}

/// Request to take a path out of use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Name of the path, as in listings.
    pub path: String,
    /// Time for the path's requests to finish; after that, they move to the other paths.
    pub within: Duration,
    /// Take the path out of use even if IO must then wait for another path.
    pub force: bool,
}

/// Reason why a running session cannot be changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// The session is being detached.
    #[error("the session is being detached")]
    Detaching,
    /// No volume of the session has been open yet.
    #[error("the session is still attaching; try again once it is open")]
    Attaching,
    /// The session has failed.
    #[error("{0}")]
    Failed(SessionFailure),
    /// The change was sent to a shard other than the control shard.
    #[error("only the control shard changes a session")]
    NotControl,
    /// The session has no path with this name.
    #[error("no path {0}; see path list")]
    NoPath(String),
    /// The session already has a path with this name.
    #[error("path {name} already exists{}", if *.leaving { ", and is leaving" } else { "" })]
    PathExists {
        /// Name of the path.
        name: String,
        /// Whether the path is being taken out of use.
        leaving: bool,
    },
    /// The session already has a path to the same addresses.
    #[error(
        "path {name} would duplicate path {existing}, which leads to the same address; use another \
         address of the server, or of this host (tcp://LOCAL@HOST)"
    )]
    DuplicatePath {
        /// Name of the new path.
        name: String,
        /// Name of the existing path.
        existing: String,
    },
    /// The session has the maximum number of paths.
    #[error("the session already has {PATHS_MAX} paths, the maximum")]
    TooManyPaths,
    /// All path slots are in use.
    #[error("no slot for another path")]
    NoSlot,
    /// The path with this name has ended with its session.
    #[error("path {0} has ended")]
    PathEnded(String),
    /// The session would have no path without this one.
    #[error("{0} is the last path of the session; add another first, or use --force")]
    LastPath(String),
    /// IO would wait without this path.
    #[error(
        "{0} is the only connected path, and IO would wait for another; connect another first, or \
         use --force"
    )]
    IoWouldWait(String),
    /// IO would fail without this path.
    #[error(
        "{0} is the only connected path, and with no-path fail IO would end with errors; connect \
         another first, or use --force"
    )]
    IoWouldFail(String),
    /// The session has no volume for this export.
    #[error("the session has no volume {0}")]
    NoVolume(String),
    /// The session already has a volume for this export.
    #[error(
        "volume {export} already exists{}",
        if *.closing { " and is still being closed" } else { "" }
    )]
    VolumeExists {
        /// Export name.
        export: String,
        /// Whether the volume is being closed.
        closing: bool,
    },
    /// The volume of this export is pinned to a server other than the session's.
    #[error("cannot add volume {0}: {ONE_SERVER}")]
    OtherServer(String),
    /// The session has the maximum number of volumes.
    #[error("the session already has {VOLUMES_MAX} volumes, the maximum")]
    TooManyVolumes,
    /// The session would have no volume without this one.
    #[error("{0} is the last volume of the session; detach the session")]
    LastVolume(String),
    /// The volume of this export cannot move between servers.
    #[error("the export of {0} cannot move to another server (see its option gateway)")]
    OneGateway(String),
    /// No server could take over the volume of this export.
    #[error("no path to another gateway of {0} is connected")]
    NoOtherGateway(String),
    /// The control shard is processing another request.
    #[error("the session is busy; try again")]
    Busy,
}
