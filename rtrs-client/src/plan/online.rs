//! The plan of `path`: what is done to which path of an attached session.
//!
//! Owns [`PathPlan`].

use rtrs_core::config::Portal;

use super::session::{check_name, check_path};
use super::{usage, within_ms};
use crate::cli::{Output, PathCommand};
use crate::error::Error;
use rtrs_core::local::RunDir;

/// `path`, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPlan {
    /// The session.
    pub name: String,
    /// What is done.
    pub step: PathStep,
    /// Where control sockets live.
    pub run_dir: RunDir,
    /// For people or programs.
    pub output: Output,
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leave {
    /// Its name, as listings show it.
    pub path: String,
    /// Time for its requests in flight, in milliseconds.
    pub within_ms: u64,
    /// Also when it is the last.
    pub force: bool,
}

impl PathPlan {
    pub(super) fn new(
        command: &PathCommand,
        run_dir: RunDir,
        output: Output,
    ) -> Result<Self, Error> {
        let leave = |args: &crate::cli::PathLeaveArgs| {
            let path = path_name(&args.path);
            if path.is_empty() {
                return Err(usage("the path is empty; write it as path list shows it"));
            }
            Ok(Leave { path, within_ms: within_ms(args.within)?, force: args.force })
        };
        let (name, step) = match command {
            PathCommand::List(args) => (&args.name, PathStep::List),
            PathCommand::Add(args) => {
                check_path(&args.path)?;
                (&args.name, PathStep::Add(args.path.clone()))
            }
            PathCommand::Remove(args) => (&args.name, PathStep::Remove(leave(args)?)),
            PathCommand::Disconnect(args) => (&args.name, PathStep::Disconnect(leave(args)?)),
            PathCommand::Reconnect(args) => (&args.name, PathStep::Reconnect(leave(args)?)),
        };
        check_name("export name", name)?;
        Ok(Self { name: name.clone(), step, run_dir, output })
    }
}

/// The name of a path that was typed: as listings write it, if it is a portal.
pub(crate) fn path_name(text: &str) -> String {
    text.parse().map_or_else(|_| text.to_owned(), |portal: Portal| portal.to_string())
}
