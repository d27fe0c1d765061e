//! `info`: shows the info options of a node's sockets.

use clap::Args;
use rtrs_base::settings::{Output, printable};
use serde_json::{Map, Value, json};

use super::table::table;
use super::via::{ViaArgs, on};
use crate::channel::{
    Counter, InfoConnection, InfoMessage, InfoOption, InfoSocket, InfoTcp, connections_of,
    counters_of, messages_of, sockets_of, tcp_of,
};
use crate::error::{Error, ErrorKind};
use crate::proto::QueueKind;
use crate::socket::{Error as SocketError, Node};

/// The arguments of `info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// Counters
    #[arg(short, long)]
    counters: bool,

    /// Sockets
    #[arg(short = 'k', long)]
    sockets: bool,

    /// Connections
    #[arg(short = 'n', long)]
    connections: bool,

    /// Messages waiting to be sent
    #[arg(short, long)]
    send_queue: bool,

    /// Messages sent but not acknowledged
    #[arg(short = 't', long)]
    retransmit_queue: bool,

    /// Messages received but not read
    #[arg(short, long)]
    receive_queue: bool,

    /// TCP connections
    #[arg(short = 'T', long)]
    tcp: bool,

    #[command(flatten)]
    via: ViaArgs,
}

pub(super) fn run(args: &InfoArgs, output: Output) -> Result<(), Error> {
    let node = args.via.running()?;
    let wanted = [
        (args.counters, "counters"),
        (args.sockets, "sockets"),
        (args.connections, "connections"),
        (args.send_queue, "send_queue"),
        (args.retransmit_queue, "retransmit_queue"),
        (args.receive_queue, "receive_queue"),
        (args.tcp, "tcp"),
    ];
    let all = wanted.iter().all(|(is_wanted, _)| !is_wanted);
    let mut parts = Map::new();
    let mut text = String::new();
    for (_, name) in wanted.into_iter().filter(|(is_wanted, _)| *is_wanted || all) {
        let (value, lines) = part(&node, name).map_err(on(&node, ErrorKind::Node))?;
        text += &lines;
        parts.insert(name.into(), value);
    }
    output.print(&parts, |_| text)
}

/// Returns one section, as JSON and as text.
fn part(node: &Node, name: &str) -> Result<(Value, String), SocketError> {
    let v6 = node.address().is_ipv6();
    let ask = |option: InfoOption| node.info(option.number());
    let (title, queue) = match name {
        "counters" => {
            let (bytes, size) = ask(InfoOption::Counters)?;
            return Ok(counters(counters_of(&bytes, size)));
        }
        "sockets" => {
            let (bytes, size) = ask(InfoOption::Sockets { v6 })?;
            return Ok(sockets(&sockets_of(&bytes, size, v6)));
        }
        "connections" => {
            let (bytes, size) = ask(InfoOption::Connections { v6 })?;
            return Ok(connections(&connections_of(&bytes, size, v6)));
        }
        "tcp" => {
            let (bytes, size) = ask(InfoOption::Tcp { v6 })?;
            return Ok(tcp(&tcp_of(&bytes, size, v6)));
        }
        "send_queue" => ("Send queue", QueueKind::Send),
        "retransmit_queue" => ("Retransmit queue", QueueKind::Retransmit),
        _ => ("Receive queue", QueueKind::Receive),
    };
    let (bytes, size) = ask(InfoOption::Messages { queue, v6 })?;
    Ok(messages(title, &messages_of(&bytes, size, v6)))
}

fn counters(counters: Vec<Counter>) -> (Value, String) {
    let cells = |counter: &Counter| vec![printable(&counter.name), counter.value.to_string()];
    let rows: Vec<_> = counters.iter().map(cells).collect();
    let values = counters.into_iter().map(|counter| (counter.name, counter.value.into()));
    let value: Map<String, Value> = values.collect();
    (value.into(), format!("Counters\n{}", table(&["NAME", ">VALUE"], &rows)))
}

fn sockets(sockets: &[InfoSocket]) -> (Value, String) {
    let (mut value, mut rows) = (Vec::new(), Vec::new());
    for socket in sockets {
        let InfoSocket { bound, connected, sndbuf, rcvbuf, inode } = socket;
        let (to, to_port) = match connected.1 {
            0 => ("-".to_owned(), "-".to_owned()),
            port => (connected.0.to_string(), port.to_string()),
        };
        let cells = [bound.1.to_string(), to, to_port, sndbuf.to_string(), rcvbuf.to_string()];
        let address = bound.0.to_string();
        rows.push([address].into_iter().chain(cells).chain([inode.to_string()]).collect());
        value.push(json!({
            "address": bound.0, "port": bound.1,
            "connected_address": connected.0, "connected_port": connected.1,
            "sndbuf": sndbuf, "rcvbuf": rcvbuf, "inode": inode,
        }));
    }
    let headings = ["ADDRESS", ">PORT", "TO", ">TO PORT", ">SNDBUF", ">RCVBUF", ">INODE"];
    (value.into(), format!("Sockets\n{}", table(&headings, &rows)))
}

fn connections(connections: &[InfoConnection]) -> (Value, String) {
    let (mut value, mut rows) = (Vec::new(), Vec::new());
    for connection in connections {
        let InfoConnection { local, peer, next_tx, next_rx, .. } = connection;
        let state = match (connection.is_connected, connection.is_connecting) {
            (true, _) if connection.is_sending => "up, sending",
            (true, _) => "up",
            (_, true) => "connecting",
            _ => "down",
        };
        let (tx, rx) = (next_tx.to_string(), next_rx.to_string());
        rows.push(vec![local.to_string(), peer.to_string(), tx, rx, state.to_owned()]);
        value.push(json!({
            "local": local, "peer": peer, "transport": printable(&connection.transport),
            "next_tx": next_tx, "next_rx": next_rx,
            "sending": connection.is_sending, "connecting": connection.is_connecting,
            "connected": connection.is_connected,
        }));
    }
    let headings = ["LOCAL", "PEER", ">NEXT TO IT", ">NEXT FROM IT", "STATE"];
    (value.into(), format!("Connections\n{}", table(&headings, &rows)))
}

fn tcp(connections: &[InfoTcp]) -> (Value, String) {
    let (mut value, mut rows) = (Vec::new(), Vec::new());
    for connection in connections {
        let InfoTcp { local, peer, header_left, payload_left, written, complete, acked } =
            connection;
        rows.push(vec![
            local.0.to_string(),
            local.1.to_string(),
            peer.0.to_string(),
            peer.1.to_string(),
            header_left.to_string(),
            payload_left.to_string(),
            written.to_string(),
            complete.to_string(),
            acked.to_string(),
        ]);
        value.push(json!({
            "local": local.0, "port": local.1, "peer": peer.0, "peer_port": peer.1,
            "header_left": header_left, "payload_left": payload_left,
            "written": written, "complete": complete, "acked": acked,
        }));
    }
    let headings = [
        "LOCAL",
        ">PORT",
        "PEER",
        ">PEER PORT",
        ">HEADER LEFT",
        ">PAYLOAD LEFT",
        ">WRITTEN",
        ">COMPLETE",
        ">ACKED",
    ];
    (value.into(), format!("TCP connections\n{}", table(&headings, &rows)))
}

fn messages(title: &str, messages: &[InfoMessage]) -> (Value, String) {
    let (mut value, mut rows) = (Vec::new(), Vec::new());
    for InfoMessage { sequence, len, local, peer } in messages {
        // A received or unstarted message has no sequence number.
        let sequence = (*sequence > 0).then_some(*sequence);
        rows.push(vec![
            local.0.to_string(),
            local.1.to_string(),
            peer.0.to_string(),
            peer.1.to_string(),
            sequence.map_or_else(|| "-".to_owned(), |number| number.to_string()),
            len.to_string(),
        ]);
        value.push(json!({
            "local": local.0, "port": local.1, "peer": peer.0, "peer_port": peer.1,
            "sequence": sequence, "bytes": len,
        }));
    }
    let headings = ["LOCAL", ">PORT", "PEER", ">PEER PORT", ">SEQUENCE", ">BYTES"];
    (value.into(), format!("{title}\n{}", table(&headings, &rows)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_without_a_number_shows_none() {
        let (local, peer) = (([10, 0, 0, 1].into(), 4000), ([10, 0, 0, 2].into(), 5));
        let message = |sequence| InfoMessage { sequence, len: 70, local, peer };
        let (value, text) = messages("Receive queue", &[message(0), message(7)]);
        assert_eq!((&value[0]["sequence"], &value[1]["sequence"]), (&Value::Null, &7.into()));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "  LOCAL     PORT  PEER      PEER PORT  SEQUENCE  BYTES");
        assert_eq!(lines[2], "  10.0.0.1  4000  10.0.0.2          5         -     70");
    }
}
