//! Reports of the nodes that run on this host.

use std::path::PathBuf;

use clap::Args;
use rtrs_base::local::{RequestError, request};
use rtrs_base::settings::{ByteSize, Output};

use super::super::table::table;
use super::super::via::not_running;
use super::control::{ANSWER_TIME_MAX, Report, Request, daemons, dir_of, no_answer};
use crate::error::{Error, ErrorKind};
use crate::node::{CongestedPort, NodeReport};
use crate::settings::NodeAddress;

/// The arguments of `list`, `info` and `stats`.
#[derive(Debug, Args)]
pub(super) struct AskArgs {
    /// The node; without it, all nodes
    #[arg(value_name = "ADDRESS")]
    address: Option<NodeAddress>,

    /// Directory of the nodes' sockets
    ///
    /// The default is RDS_DIR, or /run/rds.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
}

/// Prints the reports of a directory's daemons about the named node, or about all nodes. Daemons
/// that do not answer are listed in the error, after the other reports have been printed.
pub(super) fn show(
    args: &AskArgs,
    output: Output,
    text: impl FnOnce(&[Report]) -> String,
) -> Result<(), Error> {
    let dir = dir_of(args.socket_dir.as_deref());
    let (mut found, mut silent) = (Vec::new(), Vec::new());
    for path in daemons(&dir)? {
        match request::<Report>(&path, &Request::Report, ANSWER_TIME_MAX) {
            Ok((mut report, _)) => {
                report.nodes.retain(|node| args.address.is_none_or(|ask| ask.0 == node.address));
                found.push(report);
            }
            // Left over from a daemon that was killed.
            Err(RequestError::NotRunning) => {}
            Err(error) => silent.push(no_answer(&path, &error)),
        }
    }
    found.retain(|report| !report.nodes.is_empty());
    if silent.is_empty()
        && found.is_empty()
        && let Some(address) = args.address
    {
        return Err(not_running(address.0));
    }
    output.print(&found, |found| match found.is_empty() && silent.is_empty() {
        true => format!("no running node found in {}\n", dir.display()),
        false => text(found),
    })?;
    match silent.is_empty() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Node, silent.join("; "))),
    }
}

/// Returns all nodes ordered by address, with the process ID of each.
pub(super) fn by_address(reports: &[Report]) -> Vec<(u32, &NodeReport)> {
    let mut all = Vec::new();
    for report in reports {
        all.extend(report.nodes.iter().map(|node| (report.pid, node)));
    }
    all.sort_by_key(|(_, node)| node.address);
    all
}

pub(super) fn list_text(reports: &[Report]) -> String {
    let rows: Vec<_> = by_address(reports)
        .into_iter()
        .map(|(pid, node)| {
            let up = node.peers.iter().filter(|peer| peer.state == "up").count();
            let (sockets, peers) = (node.sockets.len(), node.peers.len());
            let address = node.address.to_string();
            vec![address, pid.to_string(), sockets.to_string(), peers.to_string(), up.to_string()]
        })
        .collect();
    table(&["NODE", ">PID", ">SOCKETS", ">PEERS", ">PEERS UP"], &rows)
}

pub(super) fn info_text(node: &NodeReport) -> String {
    let size = |bytes: usize| ByteSize::new(bytes as u64);
    let max = size(node.memory_max);
    let (received, sent) = (size(node.unread_bytes), size(node.unacked_bytes));
    let mut text = format!(
        "node {}\n  memory: received {received} of {max}, sent {sent} of {max}\n",
        node.address
    );
    for socket in &node.sockets {
        let process = match socket.pid {
            0 => "unknown".to_owned(),
            pid => pid.to_string(),
        };
        text += &format!("  port {}: process {process}, user {}", socket.port, socket.uid);
        if let Some(seconds) = socket.congested_seconds {
            let unread = socket.unread_bytes;
            text += &format!(", congested for {seconds} s, {unread} bytes unread");
        }
        text += "\n";
    }
    for peer in &node.peers {
        text += &format!(
            "  peer {}: {}, {} bytes queued, {} unread, next sequence {} to it, {} from it\n",
            peer.address,
            peer.state,
            peer.queued_bytes,
            peer.unread_bytes,
            peer.next_tx,
            peer.next_rx
        );
        for path in peer.paths.iter().filter(|_| peer.paths.len() > 1) {
            text += &format!(
                "    path {}: {}, {} bytes queued, next sequence {} to it, {} from it\n",
                path.path, path.state, path.queued_bytes, path.next_tx, path.next_rx
            );
        }
        if let Some(seconds) = peer.stuck_seconds {
            text += &format!("    nothing acknowledged for {seconds} s\n");
        }
        if !peer.congested_ports.is_empty() {
            let port = |at: &CongestedPort| format!("{} for {} s", at.port, at.seconds);
            let ports: Vec<String> = peer.congested_ports.iter().map(port).collect();
            text += &format!("    congested ports: {}\n", ports.join(", "));
        }
    }
    text
}

pub(super) fn stats_text(node: &NodeReport) -> String {
    let mut text = format!("node {}\n", node.address);
    for (name, value) in &node.counters {
        text += &format!("  {name:<28} {value:>16}\n");
    }
    text
}
