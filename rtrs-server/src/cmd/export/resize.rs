//! The command `export resize`.

use clap::Args;
use rtrs_core::settings::{ByteSize, printable};

use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs};
use crate::control_protocol::{Request, Resized};
use crate::error::Error;

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct ResizeArgs {
    /// Name of the export, as in `export list`
    pub export: String,

    /// New size, for example 20G; the file gets this length. Default: the current size of the file
    /// or disk
    ///
    /// Grow a disk, such as a logical volume, with its own tools.
    #[arg(long, value_name = "SIZE")]
    pub size: Option<ByteSize>,

    /// Make it smaller even if sessions have it open: what lies beyond the new end is lost
    #[arg(long)]
    pub force: bool,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &ResizeArgs) -> Result<(), Error> {
    let ResizeArgs { export, size, force, server } = args;
    let size = size.map(ByteSize::bytes);
    let request = Request::ExportResize { name: export.clone(), size, force: *force };
    let (resized, _) = Server::find(server)?.request_within::<Resized>(&request, CHANGE_TIMEOUT)?;
    server.output.print(&resized, |resized| {
        let Resized { export, size, size_before } = resized;
        let export = printable(export);
        match size == size_before {
            true => format!("{export} has {size} bytes already\n"),
            false => format!("{export} has {size} bytes now, and had {size_before}\n"),
        }
    })
}
