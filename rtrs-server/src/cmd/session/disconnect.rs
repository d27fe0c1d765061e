//! The command `session disconnect`.

use clap::Args;

use crate::cmd::server::{Server, ServerArgs};
use crate::control_protocol::{Ended, Request};
use crate::error::Error;

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct DisconnectArgs {
    /// Name or ID of the session, as in `session list`
    pub session: String,

    /// End only this path, a number from `session list`
    #[arg(long, value_name = "N")]
    pub path: Option<u64>,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &DisconnectArgs) -> Result<(), Error> {
    let DisconnectArgs { session, path, server } = args;
    let request = Request::SessionDisconnect { session: session.clone(), path: *path };
    let ended: Ended = Server::find(server)?.request(&request)?;
    server.output.print(&ended, |ended| {
        let paths: Vec<String> = ended.paths.iter().map(u64::to_string).collect();
        match &paths[..] {
            [] => format!("{session} has no connected path\n"),
            paths => format!("{session}: ended path {}\n", paths.join(", ")),
        }
    })
}
