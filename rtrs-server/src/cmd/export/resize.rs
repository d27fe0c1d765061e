//! The command `export resize`.

use clap::Args;
use rtrs_core::settings::{ByteSize, printable};

use super::store::{Store, saved_text};
use crate::access_list::AccessRule;
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

    /// Shrink the export even if this loses data beyond the new end
    ///
    /// Also accepts a file or disk that was truncated while sessions have it open.
    #[arg(long)]
    pub force: bool,

    /// Also write the export with its size to exports-dir, so that the size survives a restart
    ///
    /// For exports in memory and null devices, whose size is part of their settings. The size of a
    /// file or disk persists without this flag. See --save of `export set`.
    #[arg(long)]
    pub save: bool,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &ResizeArgs) -> Result<(), Error> {
    let ResizeArgs { export, size, force, save, server: selected } = args;
    let size = size.map(ByteSize::bytes);
    let request = Request::ExportResize { name: export.clone(), size, force: *force };
    let server = Server::find(selected)?;
    let has_list = |access: Vec<AccessRule>| !access.is_empty();
    let store = save.then(|| Store::open(&server, export, has_list)).transpose()?;
    let (mut resized, _) = server.request_within::<Resized>(&request, CHANGE_TIMEOUT)?;
    let saved = store.map(|store| store.save(&server, "resized"));
    let saved = saved.transpose().map(|file| resized.saved = file);
    selected.output.print(&resized, text)?;
    saved
}

fn text(resized: &Resized) -> String {
    let Resized { export, size, size_before, was_cut, saved } = resized;
    let (export, saved) = (printable(export), saved_text(saved.as_deref()));
    match (size == size_before, was_cut) {
        (true, None) => format!("{export} has {size} bytes already\n{saved}"),
        (true, Some(end)) => {
            format!("{export} has {size} bytes again; its target was truncated to {end}\n{saved}")
        }
        (false, _) => format!("{export} resized from {size_before} to {size} bytes\n{saved}"),
    }
}
