//! `ping`: round trips to another node, using eight sockets in turn.

use std::io;
use std::net::SocketAddr;

use clap::Args;
use rtrs_base::rt::Clock;
use rtrs_base::settings::{Int, Output, write_text};
use rtrs_base::time::{Duration, Instant};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

use super::args::Seconds;
use super::stop::Stop;
use super::via::{ViaArgs, on, resolve};
use crate::error::{Error, ErrorKind, failed};
use crate::socket::{Error as SocketError, RdsSocket};
use crate::wire::PING_PORT;

/// Number of sockets used in turn; the socket on which an answer arrives identifies its ping.
const SOCKETS: usize = 8;
/// Interval between checks for signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The arguments of `ping`.
#[derive(Debug, Args)]
pub struct PingArgs {
    /// Node to ping: name or address
    #[arg(value_name = "HOST")]
    host: String,

    /// Pings to send, 1 or more; without it, pings until a signal
    #[arg(short, long, value_name = "COUNT")]
    count: Option<Int<u32, 1, 4294967295>>,

    /// Time between two pings: 1ms to 1h; without a unit in seconds
    #[arg(short, long, value_name = "TIME", default_value = "1s")]
    interval: Seconds,

    /// Time to wait for the last answer: 1ms to 1h; without a unit in seconds
    #[arg(short = 'W', long, value_name = "TIME", default_value = "5s")]
    timeout: Seconds,

    #[command(flatten)]
    via: ViaArgs,
}

/// Summary of all pings.
#[derive(Debug, Serialize)]
struct Summary {
    host: String,
    address: std::net::IpAddr,
    sent: u32,
    received: u32,
    lost: u32,
    /// Shortest round trip, in microseconds.
    min_us: Option<f64>,
    avg_us: Option<f64>,
    max_us: Option<f64>,
}

struct Slot {
    socket: RdsSocket,
    /// Number and send time of the outstanding ping.
    sent: Option<(u32, Instant)>,
}

pub(super) fn run(args: &PingArgs, output: Output) -> Result<(), Error> {
    let like = args.via.local.map(|local| local.0);
    let address = resolve(&args.host, like)?;
    let node = args.via.open(Some(address))?;
    let to = SocketAddr::new(address, PING_PORT);
    let wrong = on(&node, ErrorKind::Node);
    let mut slots = Vec::new();
    for _ in 0..SOCKETS {
        let socket = RdsSocket::bind(&node, 0).map_err(&wrong)?;
        slots.push(Slot { socket, sent: None });
    }
    let mut times = Vec::new();
    let mut sent = 0;
    let mut next = Clock.now();
    let count = args.count.map(Int::get);
    let mut until = None;
    let stop = Stop::take()?;
    while !stop.is_asked() {
        let now = Clock.now();
        let is_last = count.is_some_and(|count| sent >= count);
        if is_last && until.is_none() {
            until = Some(now + args.timeout.get());
        }
        if is_last && (slots.iter().all(|slot| slot.sent.is_none()) || until <= Some(now)) {
            break;
        }
        if now >= next && !is_last {
            next = now + args.interval.get();
            sent += 1;
            let slot = &mut slots[(sent as usize - 1) % SOCKETS];
            // A previous ping that is still outstanding counts as lost.
            slot.sent = Some((sent, now));
            if let Err(error) = slot.socket.try_send_to(&[], to) {
                if !error.is_temporary() {
                    return Err(wrong(error));
                }
                if !say(output, &format!("{sent:>4}: {error}\n"))? {
                    return Ok(());
                }
                slot.sent = None;
            }
        }
        let wake = if is_last { until.unwrap_or(next) } else { next };
        wait(&slots, wake.since(Clock.now()).min(POLL_INTERVAL))?;
        if !receive(&mut slots, to, &mut times, output, &wrong)? {
            return Ok(());
        }
    }
    finish(args, output, address, sent, &times)
}

/// Receives and prints the answers that have arrived. Returns false if standard output was closed.
fn receive(
    slots: &mut [Slot],
    to: SocketAddr,
    times: &mut Vec<Duration>,
    output: Output,
    wrong: &impl Fn(SocketError) -> Error,
) -> Result<bool, Error> {
    let now = Clock.now();
    for slot in slots {
        loop {
            let from = match slot.socket.try_recv_from(&mut []) {
                Ok((_, from)) => from,
                Err(error) if error.is_gone() => return Err(wrong(error)),
                Err(_) => break,
            };
            let Some((number, at)) = slot.sent.filter(|_| from == to) else { continue };
            slot.sent = None;
            let time = now.since(at);
            times.push(time);
            if !say(output, &format!("{number:>4}: {:.1} usec\n", micros(time)))? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn finish(
    args: &PingArgs,
    output: Output,
    address: std::net::IpAddr,
    sent: u32,
    times: &[Duration],
) -> Result<(), Error> {
    let received = u32::try_from(times.len()).unwrap_or(u32::MAX);
    let sum: Duration = times.iter().sum();
    let summary = Summary {
        host: args.host.clone(),
        address,
        sent,
        received,
        lost: sent.saturating_sub(received),
        min_us: times.iter().min().copied().map(micros),
        avg_us: (received > 0).then(|| micros(sum) / f64::from(received)),
        max_us: times.iter().max().copied().map(micros),
    };
    output.print(&summary, |summary| {
        let Summary { sent, received, lost, .. } = summary;
        let percent = f64::from(*lost) * 100.0 / f64::from((*sent).max(1));
        let times = match (summary.min_us, summary.avg_us, summary.max_us) {
            (Some(min), Some(avg), Some(max)) => {
                format!(", round trip min/avg/max {min:.1}/{avg:.1}/{max:.1} usec")
            }
            _ => String::new(),
        };
        format!("{sent} sent, {received} received, {percent:.0} % lost{times}\n")
    })?;
    if received == 0 {
        let text = format!("{} does not answer; check that a node runs there", args.host);
        return Err(Error::new(ErrorKind::Messages, text));
    }
    Ok(())
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn wait(slots: &[Slot], limit: Duration) -> Result<(), Error> {
    let mut fds: Vec<PollFd<'_>> =
        slots.iter().map(|slot| PollFd::new(&slot.socket, PollFlags::IN)).collect();
    match poll(&mut fds, Timespec::try_from(limit).ok().as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(failed(ErrorKind::System, "cannot wait")(io::Error::from(error))),
    }
}

/// Prints a line of text immediately. Returns false if stdout was closed, for example by `head`.
fn say(output: Output, text: &str) -> Result<bool, Error> {
    match output {
        Output::Text => match write_text(text) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            written => written.map_err(failed(ErrorKind::System, "cannot print")).map(|()| true),
        },
        Output::Json => Ok(true),
    }
}
