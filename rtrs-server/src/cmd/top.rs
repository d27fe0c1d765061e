//! The command `top`.

use std::time::Instant;

use clap::Args;
use rtrs_core::top::{self, Counters, Entry, Group, IntervalArgs, ReadsWrites};

use super::server::{Server, ServerArgs};
use crate::control_protocol::{ExportList, Request};
use crate::error::Error;
use crate::stats::{ExportSnapshot, IoTotals, PathSnapshot, PathStage, SessionSnapshot};

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct TopArgs {
    /// Interval and number of samples.
    #[command(flatten)]
    pub interval: IntervalArgs,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &TopArgs) -> Result<(), Error> {
    let server = args.server.clone();
    top::run("rtrs-server top", &args.interval, args.server.output, move || groups(&server))
}

/// Groups to show. Finds the server again each time, because it may have been replaced.
fn groups(args: &ServerArgs) -> Result<Vec<Group>, Error> {
    let server = Server::find(args)?.without_notices();
    let sessions = server.sessions()?.sessions;
    let sessions_at = Instant::now();
    let exports: ExportList = server.request(&Request::ExportList)?;
    // Taken after the reply, because the server examines the targets before it reads the counters.
    let exports_at = Instant::now();
    let sessions = sessions.iter().map(session).collect();
    let exports = exports.exports.iter().map(export).collect();
    Ok(vec![
        Group { name: "sessions", at: sessions_at, entries: sessions },
        Group { name: "exports", at: exports_at, entries: exports },
    ])
}

fn session(session: &SessionSnapshot) -> Entry {
    let paths = &session.paths;
    let up = paths.iter().filter(|path| path.state == PathStage::Connected).count();
    Entry {
        name: session.name.clone().unwrap_or_else(|| session.id.clone()),
        instance: session.id.clone(),
        state: session.state.to_string(),
        paths_up: Some((up, paths.len())),
        inflight: Some(session.io.inflight),
        counters: Some(counters(&session.io)),
        paths: paths.iter().map(path).collect(),
    }
}

fn path(path: &PathSnapshot) -> Entry {
    Entry {
        name: format!("{} {} {}", path.path, path.transport, path.peer),
        state: path.state.to_string(),
        inflight: Some(path.io.inflight),
        counters: Some(counters(&path.io)),
        ..Entry::default()
    }
}

fn counters(io: &IoTotals) -> Counters {
    Counters {
        // Opens and closes contribute to the time too.
        ios: io.reads + io.writes + io.flushes + io.discards + io.write_zeroes + io.controls,
        bytes: io.read_bytes + io.write_bytes,
        errors: io.errors,
        nanos: io.busy_ns,
        by_direction: Some(ReadsWrites {
            reads: io.reads,
            read_bytes: io.read_bytes,
            writes: io.writes,
            write_bytes: io.write_bytes,
        }),
        ..Counters::default()
    }
}

fn export(export: &ExportSnapshot) -> Entry {
    let io = &export.io;
    Entry {
        name: export.name.clone(),
        // A different disk under the same name starts from zero.
        instance: format!("{} {}", export.backing, export.id.as_deref().unwrap_or_default()),
        state: export.state.to_string(),
        counters: Some(Counters {
            ios: io.reads + io.writes + io.others,
            bytes: io.read_bytes + io.write_bytes,
            errors: io.errors,
            nanos: io.busy_ns,
            by_direction: Some(ReadsWrites {
                reads: io.reads,
                read_bytes: io.read_bytes,
                writes: io.writes,
                write_bytes: io.write_bytes,
            }),
            times: io.times.clone(),
            ..Counters::default()
        }),
        ..Entry::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{ExportIo, ExportTotals, OpTotals, ServerTimes};
    use rtrs_core::block::IoOp;
    use rtrs_core::ids::CoreIndex;
    use rtrs_core::metrics::Bucket;

    #[test]
    fn counters_of_an_export_are_sums_of_its_operations() {
        let counters = crate::stats::ExportCounters::default();
        for shard in [0, 1] {
            let shard = counters.shard(CoreIndex(shard));
            let took = |backend_ns| ServerTimes { queue_ns: 0, backend_ns };
            shard.answered(IoOp::Read, true, 4096, took(9000));
            shard.answered(IoOp::Write, false, 512, took(20_000));
            shard.answered(IoOp::Flush, true, 0, took(9000));
        }
        let io = ExportIo::from(&counters.totals());
        let bucket = |from, to, count| Bucket { from, to, count };
        let expected = ExportIo {
            reads: 2,
            read_bytes: 8192,
            writes: 2,
            write_bytes: 0,
            others: 2,
            errors: 2,
            busy_ns: 76_000,
            throttled: 0,
            throttled_ns: 0,
            times: vec![bucket(0, 10_000, 4), bucket(10_000, 25_000, 2)],
        };
        assert_eq!(io, expected);
        let unused = ExportTotals { ops: [OpTotals::default(); 6], ..ExportTotals::default() };
        assert_eq!(ExportIo::from(&unused), ExportIo::default());
    }

    #[test]
    fn opens_count_as_ios_and_in_busy_time() {
        let io = IoTotals { reads: 3, flushes: 2, controls: 1, busy_ns: 60, ..IoTotals::default() };
        let counters = counters(&io);
        assert_eq!((counters.ios, counters.nanos), (6, 60));
    }
}
