//! `node`: the daemon that owns this host's nodes, and requests to it.

mod change;
mod control;
mod metrics;
mod nodes;
mod serve;
mod show;

use clap::{Args, Subcommand};
use rtrs_base::settings::Output;

use self::change::{GetArgs, ResetArgs, SetArgs, get, reset, set};
use self::serve::{ServeArgs, serve};
use self::show::{AskArgs, by_address, info_text, list_text, show, stats_text};
use crate::error::Error;

/// The arguments of `node`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct NodeArgs {
    #[command(flatten)]
    serve: ServeArgs,

    #[command(subcommand)]
    command: Option<NodeCommand>,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// List the nodes that run on this host
    ///
    /// With `-o json`, list, info and stats all print the same complete report. Only root and the
    /// user of a daemon may query it.
    List(AskArgs),
    /// Show the sockets and peers of nodes
    ///
    /// With `-o json`, prints the same as `rds node list`.
    Info(AskArgs),
    /// Show the counters of nodes
    ///
    /// With `-o json`, prints the same as `rds node list`.
    Stats(AskArgs),
    /// Close a node's connections to a peer, as a fault would; the node reconnects
    ///
    /// No message is lost.
    Reset(ResetArgs),
    /// Print the settings of a running node
    ///
    /// A comment marks the settings that `rds node set` cannot change.
    Get(GetArgs),
    /// Change settings of a running node, until it stops
    ///
    /// Either all of the settings change or none. log, max-unacked-bytes, max-unacked-packets,
    /// reconnect-max, reconnect-min, tcp-rcvbuf and tcp-sndbuf can change. Only log applies to the
    /// other nodes of the daemon too. The configuration file is not changed.
    Set(SetArgs),
}

pub(super) fn run(args: &NodeArgs, output: Output) -> Result<(), Error> {
    match &args.command {
        Some(NodeCommand::List(args)) => show(args, output, list_text),
        Some(NodeCommand::Info(args)) => show(args, output, |reports| {
            by_address(reports).into_iter().map(|(_, node)| info_text(node)).collect()
        }),
        Some(NodeCommand::Stats(args)) => show(args, output, |reports| {
            by_address(reports).into_iter().map(|(_, node)| stats_text(node)).collect()
        }),
        Some(NodeCommand::Reset(args)) => reset(args, output),
        Some(NodeCommand::Get(args)) => get(args, output),
        Some(NodeCommand::Set(args)) => set(args, output),
        None => serve(&args.serve, output),
    }
}
