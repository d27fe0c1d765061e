//! What was typed after `path` and `policy`: changes of a session that is attached.

use clap::{Args, Subcommand};
use rtrs_core::config::{Millis, Portal};

use super::NameArgs;
use crate::config::Policy;

/// `path`.
#[derive(Debug, Args)]
pub struct PathArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: PathCommand,
}

/// The subcommands of `path`.
#[derive(Debug, Subcommand)]
pub enum PathCommand {
    /// List the paths of a session
    ///
    /// The first column is the name that the other commands take.
    List(NameArgs),
    /// Add a path to a session, and wait until it is connected
    ///
    /// It stays also if it cannot be connected yet, and is tried again like any other.
    Add(PathAddArgs),
    /// Take a path out of a session for good
    ///
    /// It gets no new requests; those in flight end first, or go to the other paths when their time
    /// is over. No IO fails. The last path, and the only connected one, are refused.
    Remove(PathLeaveArgs),
    /// Disconnect a path until it is told to reconnect
    ///
    /// Otherwise the same as remove.
    Disconnect(PathLeaveArgs),
    /// Connect a path: at once if it is down, anew if it is up
    ///
    /// A path that is up gets no new requests and is closed first, as with disconnect. The only
    /// connected path may be reconnected too: IO waits meanwhile.
    Reconnect(PathLeaveArgs),
}

/// `path add`.
#[derive(Debug, Args)]
pub struct PathAddArgs {
    /// The name the session was attached with.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The path, as attach --path takes it.
    #[arg(value_name = "PATH")]
    pub path: Portal,
}

/// A path that is to leave.
#[derive(Debug, Args)]
pub struct PathLeaveArgs {
    /// The name the session was attached with.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The path, as attach --path takes it or path list shows it.
    #[arg(value_name = "PATH")]
    pub path: String,

    /// Give its requests in flight this long, in ms if no unit is written [default: 5s]
    ///
    /// What is not answered then goes to the other paths, as when a path dies.
    #[arg(long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub within: Millis,

    /// Also when it is the last path, or the only connected one
    ///
    /// IO then waits for a path as long as --no-path says.
    #[arg(long)]
    pub force: bool,
}

/// `policy`.
#[derive(Debug, Args)]
pub struct PolicyArgs {
    /// The name the session was attached with.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// How paths are picked from now on.
    #[arg(value_name = "POLICY", value_enum)]
    pub policy: Policy,
}
