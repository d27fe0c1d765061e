//! The `session` command, with one file per subcommand.

mod disconnect;
mod evict;
mod list;

use clap::Subcommand;

use super::server::ServerArgs;
use crate::error::Error;

use self::disconnect::DisconnectArgs;
use self::evict::EvictArgs;

/// The commands below `session`.
#[derive(Debug, Clone, Subcommand)]
pub enum SessionCommand {
    /// List sessions with their paths, exports and requests
    ///
    /// -o json prints every counter.
    List(ServerArgs),
    /// End paths of a session; the client reconnects them
    ///
    /// No request is lost: the client resends those without an answer.
    Disconnect(DisconnectArgs),
    /// Forcibly end a session, release its exports and refuse reconnects until the server restarts
    ///
    /// Use it when a dead client still holds an export that another client needs. The session's
    /// name is free immediately, its exports when its last request has left the backend.
    /// The server refuses the session's ID until it restarts; a client that is still alive gets
    /// errors and must attach again.
    Evict(EvictArgs),
}

impl SessionCommand {
    /// Arguments that select the server.
    pub(super) fn server(&self) -> &ServerArgs {
        match self {
            Self::List(args) => args,
            Self::Disconnect(args) => &args.server,
            Self::Evict(args) => &args.server,
        }
    }
}

pub(super) fn run(command: &SessionCommand) -> Result<(), Error> {
    match command {
        SessionCommand::List(args) => list::run(args),
        SessionCommand::Disconnect(args) => disconnect::run(args),
        SessionCommand::Evict(args) => evict::run(args),
    }
}
