//! `path`: lists the paths of an attached session, or changes one and waits for the change to
//! complete.

pub(super) mod change;

use clap::{Args, Subcommand};
use rtrs_core::settings::Portal;

use self::change::{Goal, Step};
use super::global::GlobalArgs;
use super::session::{NameArgs, Session, Within};
use super::text::{or_dash, path_errors_text};
use crate::control_protocol::{Changed, Leave, PathInfo, Request};
use crate::error::{Error, usage};
use crate::plan::{check_path, path_name};

/// The arguments.
#[derive(Debug, Args)]
pub struct PathArgs {
    /// Command to run.
    #[command(subcommand)]
    pub command: PathCommand,
}

/// The commands below `path`.
#[derive(Debug, Subcommand)]
pub enum PathCommand {
    /// List the paths of a session
    ///
    /// The first column is the name that the other commands take.
    List(NameArgs),
    /// Add a path; it stays even if it cannot connect yet, and the client keeps retrying
    ///
    /// Waits until the path is connected or its first attempt has failed.
    Add(PathAddArgs),
    /// Remove a path permanently
    ///
    /// The path receives no new requests. Those in flight finish, or go to the other paths after
    /// --within. No IO fails. Refuses to remove the last or the only connected path unless --force
    /// is given.
    Remove(PathLeaveArgs),
    /// Disconnect a path until `path reconnect`
    ///
    /// Requests in flight are handled as by remove, and the last or the only connected path is
    /// refused in the same way.
    Disconnect(PathLeaveArgs),
    /// Connect a path now, or again if it is connected
    ///
    /// A connected path receives no new requests and is closed first, as with disconnect. This
    /// needs no --force for the only connected path: IO waits until it is back.
    Reconnect(PathLeaveArgs),
    /// Have another gateway serve the volume
    ///
    /// Applies to an export that several gateways share. The active gateway releases the export,
    /// and another gateway, whose path is in the state standby, takes over. IO waits meanwhile.
    Switch(NameArgs),
}

/// `path add`.
#[derive(Debug, Args)]
pub struct PathAddArgs {
    /// Name of the volume on this host, as list shows it.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The path, as in attach --path.
    #[arg(value_name = "PATH")]
    pub path: Portal,
}

/// A path that is to be closed.
#[derive(Debug, Args)]
pub struct PathLeaveArgs {
    /// Name of the volume on this host, as list shows it.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The path, as in attach --path or path list.
    #[arg(value_name = "PATH")]
    pub path: String,

    /// Wait at most TIME (unit required, e.g. 5s) for running IO of the path [default: 5s]
    ///
    /// At most 10m. Requests that are not answered in time go to the other paths, as when a path
    /// dies.
    #[arg(long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub within: Within,

    /// Allow this for the last or only connected path
    ///
    /// IO then waits for a path, as set by no-path.
    #[arg(long)]
    pub force: bool,
}

impl PathLeaveArgs {
    fn leave(&self) -> Result<Leave, Error> {
        let path = path_name(&self.path);
        if path.is_empty() {
            return Err(usage("the path is empty; write it as path list shows it"));
        }
        Ok(Leave { path, within_ms: self.within.millis(), force: self.force })
    }
}

impl PathCommand {
    fn name(&self) -> &str {
        match self {
            Self::List(args) | Self::Switch(args) => &args.name,
            Self::Add(args) => &args.name,
            Self::Remove(args) | Self::Disconnect(args) | Self::Reconnect(args) => &args.name,
        }
    }

    /// Returns the requested change; None for a command that changes nothing.
    fn step(&self) -> Result<Option<Step>, Error> {
        let (goal, args) = match self {
            Self::List(_) | Self::Switch(_) => return Ok(None),
            Self::Add(args) => {
                check_path(&args.path)?;
                let path = args.path.to_string();
                let request = Request::PathAdd { path: path.clone(), replaces: Vec::new() };
                return Ok(Some(Step { goal: Goal::Added, path, request, within_ms: 0 }));
            }
            Self::Remove(args) => (Goal::Removed, args),
            Self::Disconnect(args) => (Goal::Disconnected, args),
            Self::Reconnect(args) => (Goal::Reconnected, args),
        };
        let leave = args.leave()?;
        let (path, within_ms) = (leave.path.clone(), leave.within_ms);
        let request = match goal {
            Goal::Removed => Request::PathRemove(leave),
            Goal::Disconnected => Request::PathDisconnect(leave),
            Goal::Added | Goal::Reconnected => Request::PathReconnect(leave),
        };
        Ok(Some(Step { goal, path, request, within_ms }))
    }
}

pub(super) fn run(args: &PathArgs, global: &GlobalArgs) -> Result<(), Error> {
    let step = args.command.step()?;
    let session = Session::find(args.command.name(), global)?;
    if let PathCommand::Switch(args) = &args.command {
        let changed: Changed = session.request(&Request::PathSwitch)?;
        return session.output.print(&changed, |_| format!("{}: switching\n", args.name));
    }
    match step {
        Some(step) => change::run(&session, &step),
        None => session
            .output
            .print(&session.status()?.paths, |paths| text(paths.as_deref().unwrap_or_default())),
    }
}

/// Formats the output of `path list`.
fn text(paths: &[PathInfo]) -> String {
    let mut out = format!(
        "{:<36} {:<14} {:<9} {:<24} {:>10}  {}\n",
        "PATH", "STATE", "VIA", "ADDRESS", "RECONNECTS", "LAST ERROR"
    );
    for path in paths {
        out += &format!(
            "{:<36} {:<14} {:<9} {:<24} {:>10}  {}\n",
            path.path,
            path.state_text(),
            path.transport,
            or_dash(Some(&path.address).filter(|at| !at.is_empty())),
            path.reconnects,
            or_dash(path.why().map(str::to_owned).or_else(|| path_errors_text(path)))
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::path;
    use super::*;

    #[test]
    fn a_list_shows_path_events() {
        let leaving = |why: &str| PathInfo { leaving: Some(why.into()), ..path("connected", 0, 0) };
        let slow = PathInfo { slow: true, ..path("connected", 0, 0) };
        for (path, state) in [
            (leaving("reconnect"), "reconnecting"),
            (leaving("remove"), "leaving"),
            (slow.clone(), "slow"),
            (PathInfo { slow: true, ..path("closing", 0, 0) }, "closing"),
            (path("waiting", 0, 1), "waiting"),
        ] {
            let shown = text(&[path]);
            assert!(shown.contains(&format!("\np{:35} {state} ", "")), "{shown}");
        }
        assert!(text(&[path("waiting", 0, 1)]).ends_with("  why\n"));
    }

    #[test]
    fn a_path_is_selected_by_the_name_that_listings_show() {
        let args = |path: &str| PathLeaveArgs {
            name: "v".into(),
            path: path.into(),
            within: "1s".parse().unwrap(),
            force: false,
        };
        let step = PathCommand::Remove(args("ip:10.0.0.1@ip:10.0.0.2")).step().unwrap().unwrap();
        let path = "rdma://10.0.0.1@10.0.0.2:1234".to_owned();
        let leave = Leave { path: path.clone(), within_ms: 1000, force: false };
        assert_eq!((step.path, step.request), (path, Request::PathRemove(leave)));
        let error = PathCommand::Disconnect(args("")).step().unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().contains("path is empty")), (2, true));
        let add = |path: &str| PathAddArgs { name: "v".into(), path: path.parse().unwrap() };
        let error = PathCommand::Add(add("tcp://h:0")).step().unwrap_err();
        assert!(error.chain().to_string().contains("port 0"), "{error}");
    }
}
