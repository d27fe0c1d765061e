//! `reset`, `get` and `set`: changes to running nodes.

use std::path::PathBuf;

use clap::Args;
use rtrs_base::settings::{self, Output, SettingValues, changes};

use super::control::{Request, ask_node, dir_of};
use crate::error::{Error, ErrorKind};
use crate::settings::NodeAddress;

/// Hint on how to list the settings.
const HINT: &str = "`rds node get ADDRESS` prints all";

/// The arguments of `reset`.
#[derive(Debug, Args)]
pub(super) struct ResetArgs {
    /// The node
    #[arg(value_name = "ADDRESS")]
    address: NodeAddress,

    /// The peer
    #[arg(value_name = "PEER")]
    peer: NodeAddress,

    /// Directory of the nodes' sockets
    ///
    /// The default is RDS_DIR, or /run/rds.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
}

/// The arguments of `get`.
#[derive(Debug, Args)]
pub(super) struct GetArgs {
    /// The node
    #[arg(value_name = "ADDRESS")]
    address: NodeAddress,

    /// Settings to print instead of all
    #[arg(value_name = "KEY")]
    keys: Vec<String>,

    /// Directory of the nodes' sockets
    ///
    /// The default is RDS_DIR, or /run/rds.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
}

/// The arguments of `set`.
#[derive(Debug, Args)]
pub(super) struct SetArgs {
    /// The node
    #[arg(value_name = "ADDRESS")]
    address: NodeAddress,

    /// Settings and their new values, as in the configuration file, for example reconnect-max=5s
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = key_value)]
    settings: Vec<(String, String)>,

    /// Directory of the nodes' sockets
    ///
    /// The default is RDS_DIR, or /run/rds.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    settings::key_value(text, "reconnect-max=5s")
}

pub(super) fn reset(args: &ResetArgs, output: Output) -> Result<(), Error> {
    let (address, peer) = (args.address.0, args.peer.0);
    let dir = dir_of(args.socket_dir.as_deref());
    match ask_node::<usize>(&dir, address, &Request::Reset { address, peer })? {
        0 => {
            let why = format!("node {address} has no connection to {peer}");
            Err(Error::new(ErrorKind::Node, format!("cannot reset the connection: {why}")))
        }
        count => {
            let done = serde_json::json!({ "ok": true, "connections": count });
            output.print(&done, |_| match count {
                1 => "connection reset\n".to_owned(),
                count => format!("{count} connections reset\n"),
            })
        }
    }
}

pub(super) fn get(args: &GetArgs, output: Output) -> Result<(), Error> {
    let (dir, address) = (dir_of(args.socket_dir.as_deref()), args.address.0);
    let values: SettingValues = ask_node(&dir, address, &Request::Get { address })?;
    output.print(&values.select(&args.keys, HINT)?, text)
}

pub(super) fn set(args: &SetArgs, output: Output) -> Result<(), Error> {
    let (dir, address) = (dir_of(args.socket_dir.as_deref()), args.address.0);
    let settings = changes(&args.settings)?;
    let known: SettingValues = ask_node(&dir, address, &Request::Get { address })?;
    known.check_known(settings.keys(), HINT)?;
    let changed: SettingValues = ask_node(&dir, address, &Request::Set { address, settings })?;
    output.print(&changed, text)
}

/// Formats settings as in the configuration file, with comments on those that `set` cannot change.
fn text(values: &SettingValues) -> String {
    values.text(|setting| if setting.changeable { "" } else { "  # needs a restart" })
}
