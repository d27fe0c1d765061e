//! What a ping tells: a line a round in the manner of ping(8), and the table at the end.

use std::net::SocketAddr;

use hdrhistogram::Histogram;
use rtrs_core::proto::ping::{PingClient, PingEvent, PingFailure};
use rtrs_core::time::Duration;
use rtrs_core::wire::PingMode;

use crate::plan::PingPlan;

const MIB: f64 = 1_048_576.0;

/// Latencies of one kind, in nanoseconds.
fn histogram() -> Histogram<u64> {
    // The bounds are constants that the library takes.
    Histogram::new_with_bounds(1, 3_600_000_000_000, 3)
        .unwrap_or_else(|_| unreachable!("constant bounds"))
}

fn record(into: &mut Histogram<u64>, time: Duration) {
    into.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

/// What was told by all queue pairs.
#[derive(Debug)]
pub(crate) struct Tally {
    connect: Histogram<u64>,
    read: Histogram<u64>,
    write: Histogram<u64>,
    round: Histogram<u64>,
    /// Queue pairs that failed, and how.
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

    /// Mean time of a round, if there was one.
    pub(crate) fn round_mean(&self) -> Option<Duration> {
        (!self.round.is_empty()).then(|| Duration::from_nanos(self.round.mean() as u64))
    }
}

/// Begun and answered, over all.
pub(super) fn totals(clients: &[PingClient]) -> (u64, u64) {
    clients.iter().fold((0, 0), |(s, a), client| (s + client.sent(), a + client.answered()))
}

fn plural(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// What is going to happen.
pub(super) fn head_text(plan: &PingPlan, remote: SocketAddr) -> String {
    let does = match plan.hello.mode {
        PingMode::PingPong if plan.rping => "read and written back by rping",
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
        (plan.hello.server_invalidate, ", a key a message"),
        (plan.hello.read_invalidate, ", a key a read"),
    ] {
        more += if set { what } else { "" };
    }
    let scheme = plan.portal.scheme();
    let (size, pairs) = (plan.hello.size, plural(plan.queue_pairs.into(), "queue pair"));
    format!("PING {scheme}://{remote}{from}: {size} bytes {does}, {pairs}{more}\n")
}

fn millis(time: Duration) -> String {
    format!("{:.3}", time.as_secs_f64() * 1e3)
}

/// One round.
pub(super) fn round_text(
    plan: &PingPlan,
    remote: SocketAddr,
    at: usize,
    event: &PingEvent,
) -> String {
    let PingEvent::Round { seq, read, write, text } = event else { return String::new() };
    let mut line = format!("{} bytes from {remote}:", plan.hello.size);
    if plan.queue_pairs > 1 {
        line += &format!(" qp={at}");
    }
    line += &format!(" seq={seq}");
    for (name, time) in [("read", read), ("write", write)] {
        if let Some(time) = time {
            line += &format!(" {name}={} ms", millis(*time));
        }
    }
    line.push('\n');
    if plan.verbose {
        line += &format!("ping data: {}\n", text.escape_ascii());
    }
    line
}

/// How far it is.
pub(super) fn progress_text(plan: &PingPlan, answered: u64, rate: f64) -> String {
    let of = match plan.count {
        0 => String::new(),
        count => format!(" of {}", count * u64::from(plan.queue_pairs)),
    };
    if plan.hello.mode.is_bandwidth() {
        let speed = rate * f64::from(plan.hello.size) / MIB;
        format!("{answered:>9}{of} done, {speed:.1} MiB/s")
    } else {
        format!("{answered:>9}{of} done, {rate:.0} a second")
    }
}

fn latency(of: &Histogram<u64>) -> serde_json::Value {
    if of.is_empty() {
        return serde_json::Value::Null;
    }
    let us = |nanos: u64| nanos as f64 / 1e3;
    serde_json::json!({
        "count": of.len(),
        "min": us(of.min()),
        "avg": of.mean() / 1e3,
        "p50": us(of.value_at_quantile(0.5)),
        "p99": us(of.value_at_quantile(0.99)),
        "max": us(of.max()),
    })
}

/// Everything, as JSON; the table is made of it.
pub(super) fn summary(
    plan: &PingPlan,
    remote: SocketAddr,
    clients: &[PingClient],
    tally: &Tally,
) -> serde_json::Value {
    let (sent, answered) = totals(clients);
    let lost = sent - answered;
    let time = clients.iter().map(PingClient::flight_time).max().unwrap_or_default();
    let back: u64 = clients.iter().map(PingClient::peer_done).sum();
    let size = f64::from(plan.hello.size);
    let seconds = time.as_secs_f64().max(1e-9);
    let flow = |count: u64| {
        serde_json::json!({
            "operations": count,
            "bytes": count * u64::from(plan.hello.size),
            "mib_per_s": count as f64 * size / MIB / seconds,
            "operations_per_s": count as f64 / seconds,
        })
    };
    let bandwidth = plan.hello.mode.is_bandwidth();
    let errors: Vec<serde_json::Value> = tally
        .failures
        .iter()
        .map(|(at, error)| serde_json::json!({"queue_pair": at, "error": error.to_string()}))
        .collect();
    serde_json::json!({
        "path": plan.portal.to_string(),
        "address": remote.to_string(),
        "mode": plan.mode,
        "rping": plan.rping,
        "size": plan.hello.size,
        "queue_pairs": plan.queue_pairs,
        "depth": bandwidth.then_some(plan.hello.depth),
        "sent": sent,
        "answered": answered,
        "lost": lost,
        "loss_percent": if sent == 0 { 100.0 } else { lost as f64 * 100.0 / sent as f64 },
        "time_s": time.as_secs_f64(),
        "connect_us": latency(&tally.connect),
        "latency_us": (!bandwidth).then(|| serde_json::json!({
            "read": latency(&tally.read),
            "write": latency(&tally.write),
            "round": latency(&tally.round),
        })),
        "bandwidth": bandwidth.then(|| serde_json::json!({
            "here": flow(answered),
            "there": plan.hello.duplex.then(|| flow(back)),
        })),
        "errors": errors,
    })
}

/// The table for people.
pub(super) fn summary_text(summary: &serde_json::Value) -> String {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or("?").to_owned();
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(0.0);
    let mode = text(&summary["mode"]);
    let unit = if matches!(mode.as_str(), "ping" | "write-lat") { "round" } else { "operation" };
    let mut out = format!("--- {} {mode} ---\n", text(&summary["path"]));
    out += &format!(
        "{} begun, {} answered, {:.0}% lost, {:.3} s\n",
        plural(summary["sent"].as_u64().unwrap_or(0), unit),
        summary["answered"],
        number(&summary["loss_percent"]),
        number(&summary["time_s"]),
    );
    let rows: Vec<(&str, &serde_json::Value)> = ["read", "write", "round"]
        .into_iter()
        .map(|name| (name, &summary["latency_us"][name]))
        .chain([("connect", &summary["connect_us"])])
        .filter(|(name, row)| row.is_object() && (*name != "round" || mode == "ping"))
        .collect();
    if !rows.is_empty() {
        out += &format!(
            "{:<10}{:>10}{:>11}{:>11}{:>11}{:>11}{:>11}\n",
            "us", "count", "min", "avg", "p50", "p99", "max"
        );
    }
    for (name, row) in rows {
        out += &format!("{name:<10}{:>10}", row["count"].as_u64().unwrap_or(0));
        for column in ["min", "avg", "p50", "p99", "max"] {
            out += &format!("{:>11.1}", number(&row[column]));
        }
        out.push('\n');
    }
    let bandwidth = &summary["bandwidth"];
    if bandwidth.is_object() {
        out += &format!(
            "{:<10}{:>10}{:>14}{:>14}{:>14}\n",
            "", "count", "MiB", "MiB/s", "operations/s"
        );
    }
    for (name, key) in [("from here", "here"), ("from there", "there")] {
        let row = &bandwidth[key];
        if row.is_object() {
            out += &format!(
                "{name:<10}{:>10}{:>14.1}{:>14.1}{:>14.0}\n",
                row["operations"].as_u64().unwrap_or(0),
                number(&row["bytes"]) / MIB,
                number(&row["mib_per_s"]),
                number(&row["operations_per_s"]),
            );
        }
    }
    out
}
