//! The command `export`, with one file per subcommand.

mod add;
mod drain;
mod list;
mod remove;
mod resize;
mod save;
mod set;
mod store;

use clap::Subcommand;

use super::server::ServerArgs;
use crate::error::Error;

use self::add::AddArgs;
use self::drain::DrainArgs;
use self::remove::RemoveArgs;
use self::resize::ResizeArgs;
use self::set::SetArgs;

/// The commands below `export`.
#[derive(Debug, Clone, Subcommand)]
pub enum ExportCommand {
    /// List exports with size, mode, identity, state and the sessions that have them open
    ///
    /// -o json prints more, such as the number of requests that the disk or file has failed.
    List(ServerArgs),
    /// Print the exports of the running server as YAML
    ///
    /// The output is a file for exports-dir, without defaults. It includes changes made by export
    /// add, set, resize and remove. Exports under the search path are left out.
    Save(ServerArgs),
    /// Add an export to the running server
    ///
    /// Without --save, the export does not survive a restart unless the configuration defines it
    /// too.
    Add(Box<AddArgs>),
    /// Remove an export and close its file or disk
    ///
    /// Refused while a session has it open, unless you use --force.
    Remove(RemoveArgs),
    /// Hand an export over to another gateway
    ///
    /// For exports with the option gateway: running requests are answered, then the lock of the
    /// image is released, and clients with a path to another gateway continue there.
    Drain(DrainArgs),
    /// Change options of an export
    ///
    /// While a session has it open, only access, rate limits, ro and rw can change. An access list
    /// that closes other exports or ends sessions is refused, unless you use --force.
    Set(SetArgs),
    /// Adopt the current size of a file or disk, or set another size
    ///
    /// An export grows with its file or disk within two seconds; this command does it immediately.
    /// Clients that have the export open notice. A smaller size is refused, unless you use --force.
    Resize(ResizeArgs),
}

impl ExportCommand {
    /// Arguments that select the server.
    pub(super) fn server(&self) -> &ServerArgs {
        match self {
            Self::List(args) | Self::Save(args) => args,
            Self::Add(args) => &args.server,
            Self::Remove(args) => &args.server,
            Self::Drain(args) => &args.server,
            Self::Set(args) => &args.server,
            Self::Resize(args) => &args.server,
        }
    }
}

pub(super) fn run(command: &ExportCommand) -> Result<(), Error> {
    match command {
        ExportCommand::List(args) => list::run(args),
        ExportCommand::Save(args) => save::run(args),
        ExportCommand::Add(args) => add::run(args),
        ExportCommand::Remove(args) => remove::run(args),
        ExportCommand::Drain(args) => drain::run(args),
        ExportCommand::Set(args) => set::run(args),
        ExportCommand::Resize(args) => resize::run(args),
    }
}
