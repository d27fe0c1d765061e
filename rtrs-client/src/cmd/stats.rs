//! `stats`.

use super::global::GlobalArgs;
use super::session::{NameArgs, Session};
use super::text::size_text;
use crate::control_protocol::{Latency, PartTimes, PathStats, Request, Stats};
use crate::error::Error;
use crate::stats::OP_NAMES;

pub(super) fn run(args: &NameArgs, global: &GlobalArgs) -> Result<(), Error> {
    let stats: Stats =
        Session::find(&args.name, global)?.request(&Request::Stats { times: false })?;
    global.output.print(&stats, text)
}

fn text(stats: &Stats) -> String {
    let mut out = format!("{:<14} {:>12} {:>12} {:>8}\n", "OPERATION", "COUNT", "BYTES", "ERRORS");
    for name in OP_NAMES {
        let op = stats.ops.get(name).copied().unwrap_or_default();
        let bytes = size_text(op.bytes);
        out += &format!("{name:<14} {:>12} {bytes:>12} {:>8}\n", op.count, op.errors);
    }
    out += &format!("{}\n", latency_text(Some(&stats.latency_us)));
    out += &parts_text(stats);
    out.extend(stats.paths.iter().map(path_text));
    for shard in &stats.cores {
        out += &format!(
            "shard {:<27} {} IOs, {} in flight, {} NBD clients\n",
            shard.core, shard.ios, shard.inflight, shard.nbd_connections
        );
    }
    for (scheme, fabric) in &stats.transports {
        let sent = size_text(fabric.bytes_sent);
        if scheme == "rdma" {
            // The device places the peer's writes in memory without counting them.
            out += &format!("rdma: {sent} sent\n");
            continue;
        }
        out += &format!(
            "{scheme}: {sent} sent, {} received ({} placed directly, {} copied), {} crc errors\n",
            size_text(fabric.bytes_received),
            size_text(fabric.bytes_direct),
            size_text(fabric.bytes_copied),
            fabric.crc_errors
        );
    }
    out
}

/// Breakdown of request time, for the device and, if there are several paths, for each path.
fn parts_text(stats: &Stats) -> String {
    let paths: &[PathStats] = if stats.paths.len() > 1 { &stats.paths } else { &[] };
    let of_paths = paths.iter().map(|path| (&*path.status.path, &path.parts_us));
    let mut out = format!(
        "{:<14} {:>12} {:>10} {:>10} {:>10}  PATH\n",
        "PART", "COUNT", "P50 US", "P99 US", "MAX US"
    );
    for (path, parts) in std::iter::once(("all", &stats.parts_us)).chain(of_paths) {
        for PartTimes { part, count, p50, p99, max, .. } in parts {
            out += &format!("{part:<14} {count:>12} {p50:>10} {p99:>10} {max:>10}  {path}\n");
        }
    }
    out
}

fn path_text(stats: &PathStats) -> String {
    let path = &stats.status;
    let failovers = match stats.failovers {
        0 => String::new(),
        count => format!(", {count} failovers"),
    };
    let slow = match stats.slow_requests {
        0 => String::new(),
        count => format!(", {count} slow requests"),
    };
    format!(
        "path {:<28} {:<12} {} requests, {}, {} errors, {} reconnects{failovers}{slow}\n     \
         in flight {}, {}, heartbeats: {} sent, {} missed\n",
        path.path,
        path.state.to_string(),
        stats.requests,
        size_text(stats.bytes),
        stats.errors,
        path.reconnects,
        stats.inflight,
        latency_text(stats.latency_us.as_ref()),
        path.heartbeats.sent,
        path.heartbeats.missed
    )
}

fn latency_text(times: Option<&Latency>) -> String {
    match times {
        Some(Latency { p50, p99, max, .. }) => {
            format!("latency us: p50 {p50:?} p99 {p99:?} max {max:?}")
        }
        None => "latency us: p50 - p99 - max -".to_owned(),
    }
}
