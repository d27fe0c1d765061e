//! The plan of the commands about a session that is attached.
//!
//! Owns [`ManagePlan`].

use rtrs_core::local::RunDir;
use rtrs_core::settings::Portal;
use serde::{Deserialize, Serialize};

use super::session::check_path;
use super::usage;
use crate::cli::{Output, PathCommand};
use crate::error::Error;
use crate::settings::Policy;

/// A command about a session, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagePlan {
    /// The session.
    pub name: String,
    /// What is done.
    pub step: Step,
    /// Where control sockets live.
    pub run_dir: RunDir,
    /// For people or programs.
    pub output: Output,
}

/// What is done to a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It is shown.
    Status,
    /// Its counters are shown.
    Stats,
    /// It ends.
    Detach {
        /// Time for running requests in milliseconds.
        within_ms: u64,
        /// Also when its device is in use.
        force: bool,
    },
    /// It chooses paths in another way.
    Policy(Policy),
    /// Its paths are listed or changed.
    Path(PathStep),
}

/// What is done to a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathStep {
    /// All are listed.
    List,
    /// One more.
    Add(Portal),
    /// It goes for good.
    Remove(Leave),
    /// It goes until it is told to come back.
    Disconnect(Leave),
    /// It comes back, or is connected anew.
    Reconnect(Leave),
}

/// A path that is to go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    /// Its name, as listings show it.
    pub path: String,
    /// Time for its requests in flight, in milliseconds; then they go to other paths.
    #[serde(default = "within_ms_default")]
    pub within_ms: u64,
    /// Also when it is the last.
    #[serde(default)]
    pub force: bool,
}

fn within_ms_default() -> u64 {
    5000
}

/// Judges what is typed after `path`; returns the session's name too.
pub(super) fn path_step(command: &PathCommand) -> Result<(&str, PathStep), Error> {
    let (step, args): (fn(Leave) -> PathStep, _) = match command {
        PathCommand::List(args) => return Ok((&args.name, PathStep::List)),
        PathCommand::Add(args) => {
            check_path(&args.path)?;
            return Ok((&args.name, PathStep::Add(args.path.clone())));
        }
        PathCommand::Remove(args) => (PathStep::Remove, args),
        PathCommand::Disconnect(args) => (PathStep::Disconnect, args),
        PathCommand::Reconnect(args) => (PathStep::Reconnect, args),
    };
    let (path, within_ms) = (path_name(&args.path), args.within.millis());
    if path.is_empty() {
        return Err(usage("the path is empty; write it as path list shows it"));
    }
    Ok((&args.name, step(Leave { path, within_ms, force: args.force })))
}

/// The name of a path that was typed: as listings write it, if it is a portal.
pub(crate) fn path_name(text: &str) -> String {
    text.parse().map_or_else(|_| text.to_owned(), |portal: Portal| portal.to_string())
}
