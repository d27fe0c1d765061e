//! `send`: sends messages from standard input.

use std::io::{self, BufRead, Read};
use std::net::{IpAddr, SocketAddr};

use clap::Args;
use rtrs_base::settings::Output;
use rtrs_base::time::Duration;
use serde::Serialize;

use super::args::{Bytes, Port, PortOrAny, Seconds};
use super::via::{ViaArgs, on, resolve};
use crate::channel::{InfoOption, connections_of, messages_of};
use crate::error::{Error, ErrorKind, failed};
use crate::proto::QueueKind;
use crate::socket::{Error as SocketError, Node, RdsSocket};
use crate::wire::PAYLOAD_MAX;

/// Interval between checks of whether everything has arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The arguments of `send`.
#[derive(Debug, Args)]
pub struct SendArgs {
    /// Node to send to: name or address
    #[arg(value_name = "HOST")]
    host: String,

    /// Port to send to: 2 to 65535
    #[arg(value_name = "PORT")]
    port: Port,

    /// Send this text instead of standard input
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["whole", "size"])]
    message: Option<String>,

    /// Send all of standard input as one message, of at most 1 MiB
    ///
    /// The default is a message for each line.
    #[arg(long, conflicts_with = "size")]
    whole: bool,

    /// Send standard input in messages of this size: 1 to 1M
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes<1, { PAYLOAD_MAX as u32 }>>,

    /// Port to send from; 0 for any
    #[arg(long, value_name = "PORT", default_value = "0")]
    from: PortOrAny,

    /// Time limit for the delivery of all messages: 1ms to 1h
    #[arg(short = 'W', long, value_name = "TIME", default_value = "30s")]
    timeout: Seconds,

    #[command(flatten)]
    via: ViaArgs,
}

#[derive(Debug, Serialize)]
struct Summary {
    messages: u64,
    bytes: u64,
    from_port: u16,
}

pub(super) fn run(args: &SendArgs, output: Output) -> Result<(), Error> {
    let like = args.via.local.map(|local| local.0);
    let to = SocketAddr::new(resolve(&args.host, like)?, args.port.get());
    let node = args.via.open(Some(to.ip()))?;
    let wrong = on(&node, ErrorKind::Node);
    let socket = RdsSocket::bind(&node, args.from.get()).map_err(&wrong)?;
    socket.set_send_buffer(2 * PAYLOAD_MAX).map_err(&wrong)?;
    socket.set_send_timeout(Some(args.timeout.get())).map_err(&wrong)?;
    let mut summary = Summary { messages: 0, bytes: 0, from_port: socket.port() };
    let mut send = |payload: &[u8]| -> Result<(), Error> {
        if payload.len() > PAYLOAD_MAX {
            let text = format!(
                "cannot send: the message is longer than 1 MiB ({PAYLOAD_MAX} bytes); use --size \
                 to split it"
            );
            return Err(Error::new(ErrorKind::Node, text));
        }
        socket.send_to(payload, to).map_err(&wrong)?;
        (summary.messages, summary.bytes) =
            (summary.messages + 1, summary.bytes + payload.len() as u64);
        Ok(())
    };
    let input = |error| failed(ErrorKind::System, "cannot read standard input")(error);
    let mut stdin = io::stdin().lock();
    if let Some(text) = &args.message {
        send(text.as_bytes())?;
    } else if args.whole {
        let mut all = Vec::new();
        stdin.by_ref().take(PAYLOAD_MAX as u64 + 1).read_to_end(&mut all).map_err(input)?;
        send(&all)?;
    } else if let Some(size) = args.size {
        let mut part = Vec::new();
        while stdin.by_ref().take(size.get().into()).read_to_end(&mut part).map_err(input)? > 0 {
            send(&part)?;
            part.clear();
        }
    } else {
        let mut line = Vec::new();
        // A line longer than the maximum message is refused as a single message.
        while stdin
            .by_ref()
            .take(PAYLOAD_MAX as u64 + 2)
            .read_until(b'\n', &mut line)
            .map_err(input)?
            > 0
        {
            send(line.strip_suffix(b"\n").unwrap_or(&line))?;
            line.clear();
        }
    }
    drop(stdin);
    wait_arrived(&node, &socket, to, args.timeout.get(), summary.messages)?;
    output.print(&summary, |_| String::new())
}

/// Waits until the peer's system has received everything sent from a socket, at most `sent`
/// messages.
fn wait_arrived(
    node: &Node,
    socket: &RdsSocket,
    to: SocketAddr,
    limit: Duration,
    sent: u64,
) -> Result<(), Error> {
    let deadline = std::time::Instant::now() + limit;
    let mut left = sent;
    loop {
        left = match undelivered(node, socket.port()) {
            Ok(left) => left,
            // A node fails to answer only if it has stopped or was never running.
            Err(_) => return Err(Error::new(ErrorKind::Messages, ended(left))),
        };
        if left == 0 {
            return Ok(());
        }
        if std::time::Instant::now() >= deadline {
            let why = match is_connected(node, to.ip()) {
                Ok(true) => "the peer does not acknowledge; wait longer with --timeout",
                _ => {
                    "no connection to the peer; check that a node runs there, or wait longer with \
                     --timeout"
                }
            };
            let (ip, limit) = (to.ip(), limit.as_secs_f64());
            let text = format!("{} not delivered to {ip} within {limit} s: {why}", were(left));
            return Err(Error::new(ErrorKind::Messages, text));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the number of messages sent from a port that no peer has acknowledged.
fn undelivered(node: &Node, port: u16) -> Result<u64, SocketError> {
    let v6 = node.address().is_ipv6();
    let mut left = 0;
    for queue in [QueueKind::Send, QueueKind::Retransmit] {
        let (bytes, size) = node.info(InfoOption::Messages { queue, v6 }.number())?;
        let messages = messages_of(&bytes, size, v6);
        left += messages.iter().filter(|message| message.local.1 == port).count() as u64;
    }
    Ok(left)
}

fn is_connected(node: &Node, peer: IpAddr) -> Result<bool, SocketError> {
    let v6 = node.address().is_ipv6();
    let (bytes, size) = node.info(InfoOption::Connections { v6 }.number())?;
    let found = connections_of(&bytes, size, v6);
    Ok(found.iter().any(|connection| connection.peer == peer && connection.is_connected))
}

/// Returns the error text for a node that ended before this many messages were delivered.
fn ended(left: u64) -> String {
    let s = if left == 1 { "" } else { "s" };
    format!("the node has ended; {left} message{s} may not have arrived")
}

fn were(count: u64) -> String {
    if count == 1 { "1 message was".to_owned() } else { format!("{count} messages were") }
}

#[cfg(test)]
mod tests {
    use super::{ended, were};

    #[test]
    fn error_texts_agree_with_message_counts() {
        assert_eq!(ended(1), "the node has ended; 1 message may not have arrived");
        assert_eq!(ended(2), "the node has ended; 2 messages may not have arrived");
        assert_eq!((were(1), were(3)), ("1 message was".into(), "3 messages were".into()));
    }
}
