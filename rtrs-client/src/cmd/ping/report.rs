//! Ping output: a line per round in the style of ping(8), and a final table.

use std::net::SocketAddr;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use hdrhistogram::Histogram;
use rtrs_core::proto::ping::{PingClient, PingEvent, PingFailure};
use rtrs_core::time::Duration;
use rtrs_core::wire::PingMode;
use serde::Serialize;

use super::plan::{Mode, PingPlan};

const MIB: f64 = 1_048_576.0;

/// Empty histogram for latencies of one kind, in nanoseconds.
fn histogram() -> Histogram<u64> {
    // The bounds are constants that the library accepts.
    Histogram::new_with_bounds(1, 3_600_000_000_000, 3)
        .unwrap_or_else(|_| unreachable!("constant bounds"))
}

fn record(into: &mut Histogram<u64>, time: Duration) {
    into.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

/// Measurements of all queue pairs.
#[derive(Debug)]
pub(crate) struct Tally {
    connect: Histogram<u64>,
    read: Histogram<u64>,
    write: Histogram<u64>,
    round: Histogram<u64>,
    /// Queue pairs that failed, with their failures.
    pub(crate) failures: Vec<(usize, PingFailure)>,
}

impl Default for Tally {
    fn default() -> Self {
        let [connect, read, write, round] = [(); 4].map(|()| histogram());
        Self { connect, read, write, round, failures: Vec::new() }
    }
}

impl Tally {
    pub(crate) fn take(&mut self, at: usize, event: PingEvent) {
        match event {
            PingEvent::Connected { after } => record(&mut self.connect, after),
            PingEvent::Round { read, write, .. } => {
                if let Some(time) = read {
                    record(&mut self.read, time);
                }
                if let Some(time) = write {
                    record(&mut self.write, time);
                }
                let whole = read.unwrap_or_default() + write.unwrap_or_default();
                record(&mut self.round, whole);
            }
            PingEvent::Ended(Ok(())) => {}
            PingEvent::Ended(Err(failure)) => self.failures.push((at, failure)),
        }
    }

    /// Mean round time, if any round was measured.
    pub(crate) fn round_mean(&self) -> Option<Duration> {
        (!self.round.is_empty()).then(|| Duration::from_nanos(self.round.mean() as u64))
    }
}

/// Numbers of rounds started and answered, across all queue pairs.
pub(super) fn totals(clients: &[PingClient]) -> (u64, u64) {
    clients.iter().fold((0, 0), |(s, a), client| (s + client.sent(), a + client.answered()))
}

fn plural(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Header line that describes the run.
pub(super) fn head_text(plan: &PingPlan, remote: SocketAddr) -> String {
    let does = match plan.hello.mode {
        PingMode::PingPong if plan.args.rping => "read and written back by rping",
        PingMode::PingPong => "read and written back",
        PingMode::ReadLatency => "read, one after another",
        PingMode::WriteLatency => "written there and back",
        PingMode::ReadBandwidth => "read, many at once",
        PingMode::WriteBandwidth => "written, many at once",
    };
    let from = plan.source.map_or_else(String::new, |source| format!(" from {source}"));
    let mut more = String::new();
    if plan.hello.mode.is_bandwidth() {
        more += &format!(", {} in flight", plan.hello.depth);
    }
    for (set, what) in [
        (plan.hello.duplex, ", both ways"),
        (plan.hello.server_invalidate, ", a key per message"),
        (plan.hello.read_invalidate, ", a key per read"),
    ] {
        more += if set { what } else { "" };
    }
    let scheme = plan.portal.scheme();
    let (size, pairs) = (plan.hello.size, plural(plan.args.queue_pairs.get().into(), "queue pair"));
    format!("PING {scheme}://{remote}{from}: {size} bytes {does}, {pairs}{more}\n")
}

fn millis(time: Duration) -> String {
    format!("{:.3}", time.as_secs_f64() * 1e3)
}

/// Line for one round.
pub(super) fn round_text(
    plan: &PingPlan,
    remote: SocketAddr,
    at: usize,
    event: &PingEvent,
) -> String {
    let PingEvent::Round { seq, read, write, text } = event else { return String::new() };
    let mut line = format!("{} bytes from {remote}:", plan.hello.size);
    if plan.args.queue_pairs.get() > 1 {
        line += &format!(" qp={at}");
    }
    line += &format!(" seq={seq}");
    for (name, time) in [("read", read), ("write", write)] {
        if let Some(time) = time {
            line += &format!(" {name}={} ms", millis(*time));
        }
    }
    line.push('\n');
    if plan.args.verbose {
        line += &format!("ping data: {}\n", text.escape_ascii());
    }
    line
}

/// Progress line.
pub(super) fn progress_text(plan: &PingPlan, answered: u64, rate: f64) -> String {
    let of = match plan.count {
        0 => String::new(),
        count => format!(" of {}", count * u64::from(plan.args.queue_pairs.get())),
    };
    if plan.hello.mode.is_bandwidth() {
        let speed = rate * f64::from(plan.hello.size) / MIB;
        format!("{answered:>9}{of} done, {speed:.1} MiB/s")
    } else {
        format!("{answered:>9}{of} done, {rate:.0} a second")
    }
}

/// Times in microseconds.
#[derive(Serialize)]
pub(super) struct Latency {
    pub(super) count: u64,
    min: f64,
    pub(super) avg: f64,
    p50: f64,
    p99: f64,
    max: f64,
}

/// Summarizes a histogram; None if it is empty.
fn latency(of: &Histogram<u64>) -> Option<Latency> {
    let us = |nanos: u64| nanos as f64 / 1e3;
    (!of.is_empty()).then(|| Latency {
        count: of.len(),
        min: us(of.min()),
        avg: of.mean() / 1e3,
        p50: us(of.value_at_quantile(0.5)),
        p99: us(of.value_at_quantile(0.99)),
        max: us(of.max()),
    })
}

/// Latencies of a round.
#[derive(Serialize)]
pub(super) struct Latencies {
    pub(super) read: Option<Latency>,
    write: Option<Latency>,
    pub(super) round: Option<Latency>,
}

/// Data moved in one direction.
#[derive(Serialize)]
struct Flow {
    operations: u64,
    bytes: u64,
    mib_per_s: f64,
    operations_per_s: f64,
}

/// Data moved in both directions.
#[derive(Serialize)]
struct Bandwidth {
    here: Flow,
    there: Option<Flow>,
}

#[derive(Serialize)]
struct Failed {
    queue_pair: usize,
    error: String,
}

/// All measurements.
#[derive(Serialize)]
pub(super) struct Summary {
    path: String,
    address: String,
    mode: Mode,
    rping: bool,
    size: u32,
    queue_pairs: u32,
    depth: Option<u16>,
    sent: u64,
    answered: u64,
    lost: u64,
    loss_percent: f64,
    time_s: f64,
    connect_us: Option<Latency>,
    pub(super) latency_us: Option<Latencies>,
    bandwidth: Option<Bandwidth>,
    errors: Vec<Failed>,
}

pub(super) fn summary(
    plan: &PingPlan,
    remote: SocketAddr,
    clients: &[PingClient],
    tally: &Tally,
) -> Summary {
    let (sent, answered) = totals(clients);
    let lost = sent - answered;
    let time = clients.iter().map(PingClient::flight_time).max().unwrap_or_default();
    let back: u64 = clients.iter().map(PingClient::peer_done).sum();
    let size = f64::from(plan.hello.size);
    let seconds = time.as_secs_f64().max(1e-9);
    let flow = |count: u64| Flow {
        operations: count,
        bytes: count * u64::from(plan.hello.size),
        mib_per_s: count as f64 * size / MIB / seconds,
        operations_per_s: count as f64 / seconds,
    };
    let bandwidth = plan.hello.mode.is_bandwidth();
    let failed =
        |(at, error): &(usize, PingFailure)| Failed { queue_pair: *at, error: error.to_string() };
    Summary {
        path: plan.portal.to_string(),
        address: remote.to_string(),
        mode: plan.args.mode,
        rping: plan.args.rping,
        size: plan.hello.size,
        queue_pairs: plan.args.queue_pairs.get(),
        depth: bandwidth.then_some(plan.hello.depth),
        sent,
        answered,
        lost,
        loss_percent: if sent == 0 { 100.0 } else { lost as f64 * 100.0 / sent as f64 },
        time_s: time.as_secs_f64(),
        connect_us: latency(&tally.connect),
        latency_us: (!bandwidth).then(|| Latencies {
            read: latency(&tally.read),
            write: latency(&tally.write),
            round: latency(&tally.round),
        }),
        bandwidth: bandwidth.then(|| Bandwidth {
            here: flow(answered),
            there: plan.hello.duplex.then(|| flow(back)),
        }),
        errors: tally.failures.iter().map(failed).collect(),
    }
}

impl Summary {
    /// Final table.
    pub(super) fn text(&self) -> String {
        let unit =
            if matches!(self.mode, Mode::Ping | Mode::WriteLat) { "round" } else { "operation" };
        let mode = self.mode.to_possible_value();
        let mode = mode.as_ref().map_or("?", PossibleValue::get_name);
        let mut out = format!(
            "--- {} {mode} ---\n{} begun, {} answered, {:.0}% lost, {:.3} s\n",
            self.path,
            plural(self.sent, unit),
            self.answered,
            self.loss_percent,
            self.time_s,
        );
        let times = self.latency_us.as_ref();
        let rows: Vec<(&str, &Latency)> = [
            ("read", times.and_then(|times| times.read.as_ref())),
            ("write", times.and_then(|times| times.write.as_ref())),
            ("round", times.and_then(|times| times.round.as_ref()).filter(|_| self.is_ping())),
            ("connect", self.connect_us.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, row)| Some((name, row?)))
        .collect();
        if !rows.is_empty() {
            out += &format!(
                "{:<10}{:>10}{:>11}{:>11}{:>11}{:>11}{:>11}\n",
                "us", "count", "min", "avg", "p50", "p99", "max"
            );
        }
        for (name, Latency { count, min, avg, p50, p99, max }) in rows {
            out += &format!(
                "{name:<10}{count:>10}{min:>11.1}{avg:>11.1}{p50:>11.1}{p99:>11.1}{max:>11.1}\n"
            );
        }
        if let Some(Bandwidth { here, there }) = &self.bandwidth {
            out += &format!(
                "{:<10}{:>10}{:>14}{:>14}{:>14}\n",
                "", "count", "MiB", "MiB/s", "operations/s"
            );
            for (name, flow) in [("from here", Some(here)), ("from there", there.as_ref())] {
                out += &flow.map_or_else(String::new, |flow| flow.text(name));
            }
        }
        out
    }

    fn is_ping(&self) -> bool {
        self.mode == Mode::Ping
    }
}

impl Flow {
    fn text(&self, name: &str) -> String {
        format!(
            "{name:<10}{:>10}{:>14.1}{:>14.1}{:>14.0}\n",
            self.operations,
            self.bytes as f64 / MIB,
            self.mib_per_s,
            self.operations_per_s,
        )
    }
}
