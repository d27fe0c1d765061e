//! `top`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use rtrs_core::local::{RunDir, request};
use rtrs_core::metrics::Bucket;
use rtrs_core::time::Duration;
use rtrs_core::top::{self, Counters, Entry, Group, ReadsWrites};

use super::global::GlobalArgs;
use super::session::Session;
use super::sessions::{Answer, ask, each};
use crate::control_protocol::{PartTimes, PathInfo, PathStats, Request, Stats, Status};
use crate::error::Error;

/// The arguments.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Names of volumes on this host, as list shows them; default: all sessions
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,

    /// Interval and number of samples.
    #[command(flatten)]
    pub top: top::IntervalArgs,
}

pub(super) fn run(args: &TopArgs, global: &GlobalArgs) -> Result<(), Error> {
    let run_dir = global.run_dir()?;
    run_dir.check()?;
    // A directory given by the user must exist, because its name may have been mistyped.
    if global.run_dir.is_some() {
        run_dir.files()?;
    }
    for name in &args.names {
        let _: Status = Session::find(name, global)?.status()?;
    }
    // Keep the given order; a repeated name means one session.
    let mut names: Vec<String> = Vec::new();
    for name in &args.names {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    let source = move || {
        let at = Instant::now();
        Ok(vec![Group { name: "sessions", at, entries: entries(&names, &run_dir)? }])
    };
    top::run("rtrs-client top", &args.top, global.output, source)
}

fn entries(names: &[String], run_dir: &RunDir) -> Result<Vec<Entry>, Error> {
    let sockets: Vec<(String, PathBuf)> = if names.is_empty() {
        run_dir.session_sockets()?
    } else {
        names.iter().map(|name| (name.clone(), run_dir.control_socket(name))).collect()
    };
    let entries = each(&sockets, |(name, path), timeout| entry(name, path, timeout));
    // A named session stays in the list when it is detached.
    let detached = |name: &str| Entry {
        name: name.to_owned(),
        state: "detached".to_owned(),
        ..Entry::default()
    };
    let named = |((name, _), entry): (&(String, PathBuf), Option<Entry>)| match entry {
        None if names.is_empty() => None,
        None => Some(detached(name)),
        entry => entry,
    };
    Ok(sockets.iter().zip(entries).filter_map(named).collect())
}

/// Status of a session; None if it does not exist.
fn entry(name: &str, path: &Path, timeout: Duration) -> Option<Entry> {
    match ask(name, path, timeout)? {
        Answer::Status(status) => {
            let stats = request(path, &Request::Stats { times: true }, timeout);
            // The session may have ended in between.
            Some(session(&status, stats.ok().map(|(stats, _)| stats).as_ref()))
        }
        Answer::Silent(silent) => {
            Some(Entry { name: silent.name, state: silent.state.to_string(), ..Entry::default() })
        }
    }
}

fn session(status: &Status, stats: Option<&Stats>) -> Entry {
    let of_path = |path: &PathInfo| {
        let all = stats.map_or(&[][..], |stats| stats.paths.as_slice());
        path_entry(path, all.iter().find(|stats| stats.status.path == path.path))
    };
    Entry {
        name: status.name.clone(),
        instance: status.pid.to_string(),
        state: status.state.to_string(),
        paths_up: Some(status.path_counts()),
        inflight: u64::try_from(status.inflight).ok(),
        counters: stats.map(session_counters),
        paths: status.paths().iter().map(of_path).collect(),
    }
}

fn path_entry(path: &PathInfo, stats: Option<&PathStats>) -> Entry {
    Entry {
        name: path.path.clone(),
        state: path.state_text(),
        inflight: stats.map(|stats| stats.inflight.into()),
        counters: stats.map(|stats| Counters {
            ios: stats.answers,
            bytes: stats.bytes,
            errors: stats.errors,
            nanos: nanos(stats.times.as_deref()),
            by_direction: None,
            times: stats.times.clone().unwrap_or_default(),
            parts: parts(&stats.parts_us),
        }),
        ..Entry::default()
    }
}

fn session_counters(stats: &Stats) -> Counters {
    let op = |name| stats.ops.get(name).copied().unwrap_or_default();
    let (reads, writes) = (op("read"), op("write"));
    Counters {
        ios: stats.ops.values().map(|op| op.count).sum(),
        bytes: reads.bytes + writes.bytes,
        errors: stats.ops.values().map(|op| op.errors).sum(),
        nanos: nanos(stats.times.as_deref()),
        by_direction: Some(ReadsWrites {
            reads: reads.count,
            read_bytes: reads.bytes,
            writes: writes.count,
            write_bytes: writes.bytes,
        }),
        times: stats.times.clone().unwrap_or_default(),
        parts: parts(&stats.parts_us),
    }
}

/// Time histograms of the parts, by part name.
fn parts(all: &[PartTimes]) -> BTreeMap<String, Vec<Bucket>> {
    all.iter().filter_map(|one| Some((one.part.to_string(), one.times.clone()?))).collect()
}

/// Sum of all times, as precise as the histogram, which records each to within a hundredth.
fn nanos(times: Option<&[Bucket]>) -> u64 {
    let sum = |one: &Bucket| (one.from + (one.to - one.from) / 2).saturating_mul(one.count);
    times.unwrap_or_default().iter().map(sum).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{path, status};
    use super::*;

    fn stats() -> Stats {
        serde_json::from_value(json!({
            "name": "v",
            "ops": {
                "read": { "count": 10, "bytes": 40_960, "errors": 1 },
                "write": { "count": 5, "bytes": 2560, "errors": 0 },
                "flush": { "count": 3, "bytes": 0, "errors": 2 },
                "discard": { "count": 1, "bytes": 1 << 30, "errors": 0 },
            },
            "latency_us": {
                "count": 19, "p50": 1.0, "p90": 1.0, "p99": 1.0, "p999": 1.0, "max": 1.0,
            },
            "times": [{ "from": 1000, "to": 1006, "count": 19 }],
            "paths": [{
                "path": "p", "transport": "tcp", "address": "a", "state": "connected",
                "slow": false, "reconnects": 0, "heartbeats": { "sent": 0, "missed": 0 },
                "inflight": 3, "requests": 22, "answers": 19, "bytes": 43_520, "errors": 3,
                "failovers": 0, "times": [{ "from": 500, "to": 500, "count": 2 }],
            }],
            "cores": [], "fabric": {}, "transports": {}, "nbd": {},
        }))
        .unwrap()
    }

    #[test]
    fn counters_of_a_session_and_its_paths_are_read() {
        let status = Status { paths: Some(vec![path("connected", 0, 0)]), ..status() };
        let entry = session(&status, Some(&stats()));
        assert_eq!((&*entry.name, &*entry.instance, entry.paths_up), ("v", "7", Some((1, 1))));
        let counters = entry.counters.unwrap();
        // A discard moves no data.
        assert_eq!((counters.ios, counters.bytes, counters.errors), (19, 43_520, 3));
        assert_eq!(counters.nanos, 19 * 1003);
        let by_direction =
            ReadsWrites { reads: 10, read_bytes: 40_960, writes: 5, write_bytes: 2560 };
        assert_eq!(counters.by_direction, Some(by_direction));
        let [path] = entry.paths.as_slice() else { panic!("one path") };
        let of_path = path.counters.as_ref().unwrap();
        assert_eq!((of_path.ios, of_path.nanos, path.inflight), (19, 1000, Some(3)));
        assert_eq!((&*path.name, &*path.state), ("p", "connected"));
        // The state is known even without an answer to the second request.
        let silent = session(&status, None);
        assert_eq!((silent.counters, silent.state), (None, status.state.to_string()));
        assert_eq!(silent.paths[0].counters, None);
    }
}
