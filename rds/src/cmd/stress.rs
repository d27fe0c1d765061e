//! `stress`: load between two nodes, with verification.

use std::net::{IpAddr, SocketAddr, TcpListener};

use clap::Args;
use hdrhistogram::Histogram;
use rtrs_base::rt::random_number;
use rtrs_base::settings::{HOUR, Int, MILLISECOND, Output, Switch, Time, print_text};
use serde::Serialize;

use super::args::{Bytes, Seconds};
use super::stop::Stop;
use super::via::{Via, ViaArgs, on, resolve};
use crate::error::{Error, ErrorKind, as_kind, failed};
use crate::node::run_with;
use crate::socket::{Node, RdsSocket};
use crate::stress::{
    ClientPlan, HEAD_LEN, LEN_MAX, Machine, OnNode, StressClient, StressServer, Tally, TcpResult,
    over_sockets, serve_tcp, tcp_round_trips, tcp_stream,
};

/// Number of consecutive ports on which a server listens.
const SERVER_PORTS: u16 = 16;
/// Buffer size for all sockets in bytes, if the node or the system allows it.
const BUFFER: usize = 4 << 20;

/// The arguments of `stress`.
#[derive(Debug, Args)]
pub struct StressArgs {
    /// Host on which `rds stress --listen` runs: name or address
    #[arg(value_name = "HOST", required_unless_present = "listen", conflicts_with = "listen")]
    host: Option<String>,

    /// Run as the server, until a signal
    ///
    /// Needs --local, the address to listen at.
    #[arg(long, requires = "local")]
    listen: bool,

    /// First of the 16 ports of the server, 2 to 65520; also its TCP port for --tcp
    #[arg(short, long, value_name = "PORT", default_value = "18000")]
    port: Int<u16, 2, { 65536 - SERVER_PORTS as u64 }>,

    /// Sockets of the client: 1 to 4096
    #[arg(short, long, value_name = "COUNT", default_value = "1")]
    sockets: Int<u16, 1, 4096>,

    /// Requests in flight on each socket: 1 to 65536
    #[arg(short, long, value_name = "COUNT", default_value = "1")]
    depth: Int<u32, 1, 65536>,

    /// Size of a request: 40 to 1M
    #[arg(short = 'q', long, value_name = "SIZE", default_value = "1k")]
    request: Size,

    /// Size of an answer: 40 to 1M
    #[arg(short, long, value_name = "SIZE", default_value = "64")]
    answer: Size,

    /// How long to send requests: 1ms to 24h
    #[arg(short, long, value_name = "TIME", default_value = "10s")]
    time: Time<MILLISECOND, { 24 * HOUR }>,

    /// Time to wait for the last answers: 1ms to 1h
    ///
    /// Requests not answered by then count as lost. If nothing is answered for 3 s, or for 3 tenths
    /// of this time if that is longer, the command exits.
    #[arg(short = 'W', long, value_name = "TIME", default_value = "10s")]
    timeout: Seconds,

    /// Stop each socket after this many requests
    #[arg(short = 'n', long, value_name = "COUNT")]
    count: Option<Int<u32, 1, 4294967295>>,

    /// Check every byte; without it only headers, lengths and order are checked
    #[arg(long, value_name = "on|off", default_value = "on")]
    verify: Switch,

    /// Load plain TCP connections instead, for comparison
    ///
    /// With depth 1, measures round trips of echoed requests; otherwise, a stream of requests.
    #[arg(long, conflicts_with = "listen")]
    tcp: bool,

    #[command(flatten)]
    via: ViaArgs,
}

type Size = Bytes<{ HEAD_LEN as u32 }, { LEN_MAX as u32 }>;

/// Times in microseconds.
#[derive(Debug, Serialize)]
struct Times {
    min: f64,
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

impl Times {
    fn of(times: &Histogram<u64>) -> Self {
        let micros = |nanos: u64| nanos as f64 / 1000.0;
        let at = |quantile| micros(times.value_at_quantile(quantile));
        Self {
            min: micros(times.min()),
            mean: times.mean() / 1000.0,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: micros(times.max()),
        }
    }
}

#[derive(Debug, Serialize)]
struct Summary {
    sent: u64,
    answered: u64,
    lost: u64,
    wrong: u64,
    /// Portion of `wrong` that are requests, as reported by the server.
    wrong_at_server: u64,
    congested: u64,
    send_buffer_full: u64,
    seconds: f64,
    requests_per_second: f64,
    megabytes_per_second: f64,
    round_trip_us: Option<Times>,
}

pub(super) fn run(args: &StressArgs, output: Output) -> Result<(), Error> {
    let Some(host) = &args.host else { return serve(args) };
    let like = args.via.local.map(|local| local.0);
    let address = resolve(host, like)?;
    let first = args.port.get();
    let at = SocketAddr::new(address, first);
    if args.tcp {
        return over_tcp(args, output, at);
    }
    let stop = Stop::take()?;
    let port = |socket: u16| first.saturating_add(socket % SERVER_PORTS);
    let plan = ClientPlan {
        to: (0..args.sockets.get()).map(|at| SocketAddr::new(address, port(at))).collect(),
        depth: args.depth.get().into(),
        request_len: args.request.get() as usize,
        answer_len: args.answer.get() as usize,
        time: args.time.get(),
        grace: args.timeout.get(),
        count: args.count.map(|count| count.get().into()),
        is_checked: args.verify.is_on(),
        #[allow(clippy::cast_possible_truncation, reason = "half of the bits are random as well")]
        session: random_number() as u32 | 1,
        stop: stop.count(),
    };
    let ports = vec![0; args.sockets.get().into()];
    let client = drive(args, Some(address), StressClient::new(plan), ports, || Ok(()))?;
    report(args, output, at, client.tally())
}

/// Runs a state machine on a node of its own, or over sockets of a running node. Calls `bound` once
/// the running node has the sockets, or before the machine's own node starts.
fn drive<M: Machine + std::fmt::Debug>(
    args: &StressArgs,
    to: Option<IpAddr>,
    machine: M,
    ports: Vec<u16>,
    bound: impl FnOnce() -> Result<(), Error>,
) -> Result<M, Error> {
    match args.via.find(to)? {
        Via::Own(options) => {
            bound()?;
            let app = OnNode::new(machine, ports, BUFFER);
            let app = run_with(&options, app).map_err(as_kind(ErrorKind::Node))?;
            app.finish().map_err(|why| Error::new(ErrorKind::Node, why))
        }
        Via::Running(node) => {
            let sockets = bind_all(&node, ports)?;
            bound()?;
            over_sockets(machine, &sockets).map_err(on(&node, ErrorKind::Node))
        }
    }
}

fn bind_all(node: &Node, ports: Vec<u16>) -> Result<Vec<RdsSocket>, Error> {
    let wrong = on(node, ErrorKind::Node);
    let mut sockets = Vec::new();
    for port in ports {
        let socket = RdsSocket::bind(node, port).map_err(&wrong)?;
        socket.set_send_buffer(BUFFER).map_err(&wrong)?;
        socket.set_receive_buffer(BUFFER).map_err(&wrong)?;
        sockets.push(socket);
    }
    Ok(sockets)
}

fn serve(args: &StressArgs) -> Result<(), Error> {
    // The command line requires an address.
    let local = args.via.local.map_or_else(|| [127, 0, 0, 1].into(), |local| local.0);
    let first = args.port.get();
    let at = SocketAddr::new(local, first);
    let what = format!("cannot listen for TCP clients at {at}");
    let listener = TcpListener::bind(at).map_err(failed(ErrorKind::Node, what))?;
    serve_tcp(listener).map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    let ports: Vec<u16> = (0..SERVER_PORTS).map(|offset| first.saturating_add(offset)).collect();
    let last = first.saturating_add(SERVER_PORTS - 1);
    let listening = format!("listening at {local}, ports {first} to {last}\n");
    drive(args, None, StressServer::default(), ports, || print_text(&listening)).map(drop)
}

fn report(args: &StressArgs, output: Output, to: SocketAddr, tally: &Tally) -> Result<(), Error> {
    if let Some(why) = &tally.failed {
        return Err(Error::new(ErrorKind::Node, format!("cannot send: {why}")));
    }
    let seconds = tally.took.as_secs_f64().max(1e-9);
    let (lost, wrong) = (tally.sent - tally.answered, tally.wrong + tally.wrong_there);
    let bytes = u64::from(args.request.get()) + u64::from(args.answer.get());
    let summary = Summary {
        sent: tally.sent,
        answered: tally.answered,
        lost,
        wrong,
        wrong_at_server: tally.wrong_there,
        congested: tally.congested,
        send_buffer_full: tally.full,
        seconds,
        requests_per_second: tally.answered as f64 / seconds,
        megabytes_per_second: (tally.answered * bytes) as f64 / seconds / 1e6,
        round_trip_us: (!tally.times.is_empty()).then(|| Times::of(&tally.times)),
    };
    output.print(&summary, text)?;
    if lost + wrong > 0 || tally.sent == 0 {
        let text = match tally.answered {
            0 => format!(
                "cannot reach {} port {}: no answer; check that `rds stress --listen` runs there",
                to.ip(),
                to.port()
            ),
            _ => format!("requests not answered: {lost}; incorrect messages: {wrong}"),
        };
        return Err(Error::new(ErrorKind::Messages, text));
    }
    Ok(())
}

fn text(summary: &Summary) -> String {
    let mut text = format!(
        "{} requests in {:.2} s: {:.0} a second, {:.1} MB/s; {} lost, {} wrong\n",
        summary.answered,
        summary.seconds,
        summary.requests_per_second,
        summary.megabytes_per_second,
        summary.lost,
        summary.wrong
    );
    if let Some(times) = &summary.round_trip_us {
        text += &format!(
            "round trip in us: min {:.1}, mean {:.1}, p50 {:.1}, p90 {:.1}, p99 {:.1}, \
             p99.9 {:.1}, max {:.1}\n",
            times.min, times.mean, times.p50, times.p90, times.p99, times.p999, times.max
        );
    }
    text
}

/// Runs the same load over TCP.
fn over_tcp(args: &StressArgs, output: Output, to: SocketAddr) -> Result<(), Error> {
    let len = args.request.get() as usize;
    let time = args.time.get();
    let measured = match args.depth.get() {
        1 => tcp_round_trips(to, len, time),
        _ => tcp_stream(to, len, time),
    };
    let what = format!("cannot load TCP to {to}; check that `rds stress --listen` runs there");
    let TcpResult { messages, took, times } = measured.map_err(failed(ErrorKind::Node, what))?;
    let seconds = took.as_secs_f64().max(1e-9);
    let summary = Summary {
        sent: messages,
        answered: messages,
        lost: 0,
        wrong: 0,
        wrong_at_server: 0,
        congested: 0,
        send_buffer_full: 0,
        seconds,
        requests_per_second: messages as f64 / seconds,
        megabytes_per_second: (messages * len as u64) as f64 / seconds / 1e6,
        round_trip_us: (!times.is_empty()).then(|| Times::of(&times)),
    };
    output.print(&summary, text)
}
