//! What a running session tells of itself: the answers on its control socket, and how people
//! read them.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use hdrhistogram::Histogram;
use nbd_bridge::BridgeStats;
use rtrs_core::fabric::FabricCounters;
use rtrs_core::ids::PathId;
use serde::{Deserialize, Serialize};

use crate::config;
use crate::driver::CoreReport;
use crate::session::ANOTHER;
use crate::session::replay::Waits;
use crate::session::status::PathStatus;
use crate::stats::{OP_NAMES, ShardStats};

/// A question on the control socket: one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub(crate) enum Ask {
    /// Where the session stands.
    Status,
    /// What it did.
    Stats,
    /// End it; the answer comes when it has ended.
    Detach {
        /// Time for requests in flight, in milliseconds.
        within_ms: u64,
    },
    /// One more path.
    PathAdd {
        /// As `attach --path` takes it.
        path: String,
    },
    /// Take a path out for good.
    PathRemove(Leave),
    /// Take a path down until it is to be connected again.
    PathDisconnect(Leave),
    /// Connect a path anew.
    PathReconnect(Leave),
    /// Choose paths in another way.
    Policy {
        /// As `attach --policy` takes it.
        policy: config::Policy,
    },
}

/// A path that is to leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leave {
    /// As `attach --path` takes it, or as `status` shows it.
    pub(crate) path: String,
    /// Time for the requests in flight on it, in milliseconds; then they go to other paths.
    #[serde(default = "within_ms_default")]
    pub(crate) within_ms: u64,
    /// Also when it is the last.
    #[serde(default)]
    pub(crate) force: bool,
}

fn within_ms_default() -> u64 {
    5000
}

/// What is fixed for the life of an attached session.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) name: String,
    pub(crate) session: String,
    pub(crate) session_id: String,
    pub(crate) access: String,
    pub(crate) no_path: String,
    pub(crate) failover: String,
    /// NBD URI that clients open, if there is one.
    pub(crate) uri: Option<String>,
    /// The block device, once it is connected.
    pub(crate) device: Arc<OnceLock<String>>,
    pub(crate) pid: u32,
    pub(crate) shards: u16,
}

/// The report of core 0, which alone knows of paths. There is none when the session is ending, or
/// its machine is so busy that the core did not run.
fn home(reports: &[CoreReport]) -> Option<&CoreReport> {
    reports.iter().find(|report| report.engine.core.0 == 0)
}

/// The answer to `status`, as JSON.
pub(crate) fn status(identity: &Identity, reports: &[CoreReport]) -> serde_json::Value {
    let home = home(reports);
    let geometry = home.and_then(|r| r.geometry.as_ref());
    let inflight: usize = reports.iter().map(|r| r.engine.inflight).sum();
    let paths = home.and_then(|r| r.engine.paths.as_ref()).map(|paths| {
        let shown = paths.iter().map(|path| {
            let mut shown = serde_json::json!(path);
            shown["slow"] = is_slow(path, reports).into();
            shown
        });
        shown.collect::<Vec<_>>()
    });
    serde_json::json!({
        "name": identity.name,
        "session": identity.session,
        "session_id": identity.session_id,
        "state": match (home, geometry) {
            (None, _) => "not-answering",
            (Some(_), None) => "attaching",
            (Some(home), Some(_)) if home.engine.open => "open",
            (Some(_), Some(_)) => "waiting-for-path",
        },
        "access": identity.access,
        "policy": home.and_then(|r| r.engine.policy),
        "uri": identity.uri,
        "device": identity.device.get(),
        "pid": identity.pid,
        "shards": identity.shards,
        "size": geometry.map(|g| g.size),
        "block_size": geometry.map(|g| g.logical_block),
        "read_only": geometry.map(|g| g.read_only),
        "inflight": inflight,
        "no_path": identity.no_path,
        "failover": identity.failover,
        "identity": home.and_then(|r| r.engine.identity),
        "oldest_io": oldest(reports),
        "nbd_connections": reports.iter().map(|r| r.bridge.connections).sum::<u64>(),
        "paths": paths,
    })
}

/// What `attach` tells programs, from the answer to `status`: the export, the device or the URI,
/// and what is behind it.
pub(crate) fn attached(status: &serde_json::Value) -> serde_json::Value {
    let served = if status["device"].is_null() { "uri" } else { "device" };
    serde_json::json!({
        "export": status["name"],
        served: status[served],
        "size": status["size"],
        "block_size": status["block_size"],
        "read_only": status["read_only"],
        "identity": status["identity"],
        "pid": status["pid"],
        "paths": status["paths"],
    })
}

/// The device or the URI that `attach` tells.
pub(crate) fn served(attached: &serde_json::Value) -> String {
    text(front(attached))
}

/// True when a core leaves the path out because it is far slower than others.
fn is_slow(path: &PathStatus, reports: &[CoreReport]) -> bool {
    let at = path.id.index();
    reports.iter().any(|report| report.engine.path_slow.get(at).copied().unwrap_or_default())
}

/// The IO that waits for the longest time, and what for.
fn oldest(reports: &[CoreReport]) -> serde_json::Value {
    let Some(oldest) = reports.iter().filter_map(|r| r.engine.oldest).max_by_key(|o| o.age) else {
        return serde_json::Value::Null;
    };
    let names = home(reports).map_or(&[][..], |home| home.engine.names.as_slice());
    let name = |path: PathId| names.get(path.index()).map_or("?", String::as_str);
    let (waits_for, path) = match oldest.waits {
        Waits::Answer(path) => ("answer", Some(name(path))),
        Waits::Fence(path) => ("fence", Some(name(path))),
        Waits::Path => ("path", None),
        Waits::Permit => ("permit", None),
    };
    let age_ms = u64::try_from(oldest.age.as_millis()).unwrap_or(u64::MAX);
    serde_json::json!({ "age_ms": age_ms, "waits_for": waits_for, "path": path })
}

/// What is shown of a histogram.
fn latency(times: &Histogram<u64>) -> serde_json::Value {
    let us = |nanos: u64| nanos as f64 / 1000.0;
    serde_json::json!({
        "count": times.len(),
        "p50": us(times.value_at_quantile(0.5)),
        "p90": us(times.value_at_quantile(0.9)),
        "p99": us(times.value_at_quantile(0.99)),
        "p999": us(times.value_at_quantile(0.999)),
        "max": us(times.max()),
    })
}

/// The answer to `stats`, as JSON.
pub(crate) fn stats(identity: &Identity, reports: &[CoreReport]) -> serde_json::Value {
    let count = reports.iter().map(|r| r.engine.stats.paths.len()).max().unwrap_or(0);
    let mut total = ShardStats::new(count);
    let mut fabric = FabricCounters::default();
    let mut transports: BTreeMap<&'static str, FabricCounters> = BTreeMap::new();
    let mut bridge = BridgeStats::default();
    for report in reports {
        total.add(&report.engine.stats);
        bridge.add(&report.bridge);
        for (scheme, counters) in &report.fabrics {
            fabric.add(counters);
            transports.entry(*scheme).or_default().add(counters);
        }
    }
    let ops: serde_json::Map<String, serde_json::Value> = OP_NAMES
        .iter()
        .zip(&total.ops)
        .map(|(name, count)| ((*name).to_owned(), serde_json::json!(count)))
        .collect();
    let paths: Vec<serde_json::Value> = home(reports)
        .and_then(|r| r.engine.paths.as_ref())
        .into_iter()
        .flatten()
        .map(|path| {
            let at = path.id.index();
            let count = total.paths.get(at).copied().unwrap_or_default();
            let inflight: u32 = reports.iter().filter_map(|r| r.engine.path_inflight.get(at)).sum();
            serde_json::json!({
                "path": path.path,
                "transport": path.transport,
                "address": path.address,
                "state": path.state,
                "slow": is_slow(path, reports),
                "reconnects": path.reconnects,
                "heartbeat_us": path.heartbeat_us,
                "heartbeats": path.heartbeats,
                "inflight": inflight,
                "latency_us": total.path_latency.get(at).map(latency),
                "requests": count.requests,
                "answers": count.answers,
                "bytes": count.bytes,
                "errors": count.errors,
                "failovers": count.failovers,
            })
        })
        .collect();
    let cores: Vec<serde_json::Value> = reports
        .iter()
        .map(|r| {
            serde_json::json!({
                "core": r.engine.core.0,
                "ios": r.engine.stats.ops.iter().map(|o| o.count).sum::<u64>(),
                "inflight": r.engine.inflight,
                "nbd_connections": r.bridge.connections,
            })
        })
        .collect();
    serde_json::json!({
        "name": identity.name,
        "ops": ops,
        "latency_us": latency(&total.latency),
        "paths": paths,
        "cores": cores,
        "fabric": fabric,
        "transports": transports,
        "nbd": bridge,
    })
}

fn text(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(s) => s.clone(),
        serde_json::Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn size_text(value: &serde_json::Value) -> String {
    match value.as_u64() {
        None => "-".to_owned(),
        Some(bytes) => {
            let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
            match units.iter().find(|(_, unit)| bytes >= *unit) {
                Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
                None => format!("{bytes} B"),
            }
        }
    }
}

/// `list` for people: a line per session.
pub(crate) fn list_text(sessions: &[serde_json::Value]) -> String {
    let mut out = format!(
        "{:<16} {:<18} {:>10} {:>6} {:<8} {:>8}  {}\n",
        "NAME", "STATE", "SIZE", "PATHS", "OVER", "PID", "DEVICE"
    );
    for session in sessions {
        let paths = session["paths"].as_array().map_or(&[][..], Vec::as_slice);
        let up = paths.iter().filter(|path| path["state"] == "connected").count();
        let slow = paths.iter().filter(|path| path_state(path) == "slow").count();
        let slow = if slow > 0 { format!(", {slow} slow") } else { String::new() };
        out += &format!(
            "{:<16} {:<18} {:>10} {:>6} {:<8} {:>8}  {}\n",
            text(&session["name"]),
            text(&session["state"]),
            size_text(&session["size"]),
            format!("{up}/{}{slow}", paths.len()),
            transports(session),
            text(&session["pid"]),
            text(front(session)),
        );
        for path in session["paths"].as_array().into_iter().flatten() {
            let why = path["last_error"].as_str().filter(|_| path["state"] != "connected");
            if let Some(why) = why.filter(|why| why.contains(ANOTHER)) {
                out += &format!("  {}: {why}\n", text(&path["path"]));
            }
        }
    }
    out
}

/// What a session's paths go over, each named once: `rdma,tcp`.
fn transports(session: &serde_json::Value) -> String {
    let mut names: Vec<&str> = Vec::new();
    for path in session["paths"].as_array().into_iter().flatten() {
        let name = path["transport"].as_str().unwrap_or("-");
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() { "-".to_owned() } else { names.join(",") }
}

/// Where a session is served: its device or its URI.
fn front(status: &serde_json::Value) -> &serde_json::Value {
    if status["device"].is_null() { &status["uri"] } else { &status["device"] }
}

/// `status` for people.
pub(crate) fn status_text(status: &serde_json::Value) -> String {
    let mut out = String::new();
    for key in [
        "name", "state", "device", "uri", "access", "policy", "no_path", "failover", "session",
        "identity", "pid", "shards",
    ] {
        if !(matches!(key, "device" | "uri") && status[key].is_null()) {
            out += &format!("{:<16} {}\n", key.replace('_', " "), text(&status[key]));
        }
    }
    out += &format!(
        "{:<16} {} ({} bytes, blocks of {})\n",
        "size",
        size_text(&status["size"]),
        text(&status["size"]),
        text(&status["block_size"])
    );
    out += &format!("{:<16} {}\n", "in flight", text(&status["inflight"]));
    let oldest = &status["oldest_io"];
    if oldest["age_ms"].as_u64().is_some_and(|age| age >= 1000) {
        let age_s = oldest["age_ms"].as_u64().unwrap_or(0) / 1000;
        out += &format!(
            "{:<16} {age_s} s, waits for {}",
            "oldest IO",
            match &oldest["waits_for"] {
                what if oldest["path"].is_null() => format!("a {}", text(what)),
                what if what == "fence" => format!("the fence of {}", text(&oldest["path"])),
                what => format!("the {} of {}", text(what), text(&oldest["path"])),
            }
        );
        out += "\n";
    }
    out += &format!("{:<16} {}\n", "nbd clients", text(&status["nbd_connections"]));
    for path in status["paths"].as_array().into_iter().flatten() {
        out += &format!(
            "path {:<28} {:<12} {} connections, {} reconnects, heartbeat {}{}{}\n",
            text(&path["path"]),
            path_state(path),
            text(&path["connections"]),
            text(&path["reconnects"]),
            match path["heartbeat_us"].as_u64() {
                Some(us) => format!("{us} us"),
                None => "-".to_owned(),
            },
            // A host name does not tell which of its addresses it is.
            match path["address"].as_str() {
                Some(at) if !text(&path["path"]).ends_with(at) => format!(", at {at}"),
                _ => String::new(),
            },
            match path["last_error"].as_str() {
                Some(error) => format!(" ({error})"),
                None => String::new(),
            }
        );
    }
    out
}

/// Where a path stands, and what it is about to do.
pub(crate) fn path_state(path: &serde_json::Value) -> String {
    match path["leaving"].as_str() {
        Some("reconnect") => "reconnecting".to_owned(),
        Some(_) => "leaving".to_owned(),
        None if path["slow"] == true && path["state"] == "connected" => "slow".to_owned(),
        None => text(&path["state"]),
    }
}

/// `path list` for people.
pub(crate) fn paths_text(paths: &serde_json::Value) -> String {
    let mut out = format!(
        "{:<36} {:<14} {:<9} {:<24} {:>10}  {}\n",
        "PATH", "STATE", "OVER", "ADDRESS", "RECONNECTS", "LAST ERROR"
    );
    for path in paths.as_array().into_iter().flatten() {
        out += &format!(
            "{:<36} {:<14} {:<9} {:<24} {:>10}  {}\n",
            text(&path["path"]),
            path_state(path),
            text(&path["transport"]),
            text(&path["address"]),
            text(&path["reconnects"]),
            text(&path["last_error"])
        );
    }
    out
}

/// `stats` for people.
pub(crate) fn stats_text(stats: &serde_json::Value) -> String {
    let mut out = format!("{:<14} {:>12} {:>12} {:>8}\n", "OPERATION", "COUNT", "BYTES", "ERRORS");
    for name in OP_NAMES {
        let op = &stats["ops"][name];
        out += &format!(
            "{:<14} {:>12} {:>12} {:>8}\n",
            name,
            text(&op["count"]),
            size_text(&op["bytes"]),
            text(&op["errors"])
        );
    }
    let latency = &stats["latency_us"];
    out += &format!(
        "latency us: p50 {} p99 {} max {}\n",
        text(&latency["p50"]),
        text(&latency["p99"]),
        text(&latency["max"])
    );
    for path in stats["paths"].as_array().into_iter().flatten() {
        out += &format!(
            "path {:<28} {:<12} {} requests, {}, {} errors, {} reconnects{}\n",
            text(&path["path"]),
            text(&path["state"]),
            text(&path["requests"]),
            size_text(&path["bytes"]),
            text(&path["errors"]),
            text(&path["reconnects"]),
            match path["failovers"].as_u64() {
                Some(count) if count > 0 => format!(", {count} failovers"),
                _ => String::new(),
            }
        );
        let latency = &path["latency_us"];
        out += &format!(
            "     in flight {}, latency us: p50 {} p99 {} max {}, heartbeats: {} sent, {} missed\n",
            text(&path["inflight"]),
            text(&latency["p50"]),
            text(&latency["p99"]),
            text(&latency["max"]),
            text(&path["heartbeats"]["sent"]),
            text(&path["heartbeats"]["missed"])
        );
    }
    for core in stats["cores"].as_array().into_iter().flatten() {
        out += &format!(
            "core {:<28} {} IOs, {} in flight, {} NBD clients\n",
            text(&core["core"]),
            text(&core["ios"]),
            text(&core["inflight"]),
            text(&core["nbd_connections"])
        );
    }
    for (scheme, fabric) in stats["transports"].as_object().into_iter().flatten() {
        if scheme == "rdma" {
            // The device places what the peer writes, and counts it nowhere we see.
            out += &format!("rdma: {} sent\n", size_text(&fabric["bytes_sent"]));
            continue;
        }
        out += &format!(
            "{scheme}: {} sent, {} received ({} placed directly, {} copied), {} crc errors\n",
            size_text(&fabric["bytes_sent"]),
            size_text(&fabric["bytes_received"]),
            size_text(&fabric["bytes_direct"]),
            size_text(&fabric["bytes_copied"]),
            text(&fabric["crc_errors"])
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_shown_where_it_is_served() {
        let identity = Identity {
            name: "v".into(),
            session: "host-v".into(),
            session_id: "id".into(),
            access: "auto".into(),
            no_path: "queue".into(),
            failover: "fast".into(),
            uri: None,
            device: Arc::new(OnceLock::new()),
            pid: 7,
            shards: 2,
        };
        // Not connected yet.
        let early = status(&identity, &[]);
        assert_eq!(early["state"], "not-answering", "no core says anything");
        assert!(early["device"].is_null() && early["uri"].is_null());
        assert!(!status_text(&early).contains("device"));
        identity.device.get_or_init(|| "/dev/nbd3".into());
        let device = status(&identity, &[]);
        assert_eq!(device["device"], "/dev/nbd3");
        assert!(status_text(&device).contains("\ndevice           /dev/nbd3\n"));
        let uri = "nbd://127.0.0.1:10809/v".to_owned();
        let socket = Identity { uri: Some(uri), device: Arc::new(OnceLock::new()), ..identity };
        let socket = status(&socket, &[]);
        assert!(status_text(&socket).contains("\nuri              nbd://127.0.0.1:10809/v\n"));
        let list = list_text(&[device, socket]);
        let ends: Vec<&str> = list.lines().filter_map(|l| l.split_whitespace().last()).collect();
        assert_eq!(ends, ["DEVICE", "/dev/nbd3", "nbd://127.0.0.1:10809/v"]);
    }

    #[test]
    fn a_list_shows_slow_paths() {
        let path = |state: &str, slow| serde_json::json!({ "state": state, "slow": slow });
        let mut session = serde_json::json!({ "name": "v", "paths": [
            path("connected", false), path("connected", true), path("closing", true),
        ] });
        assert!(list_text(std::slice::from_ref(&session)).contains(" 2/3, 1 slow "));
        session["paths"][1]["slow"] = false.into();
        let list = list_text(&[session]);
        assert!(list.contains(" 2/3 ") && !list.contains("slow"), "{list}");
    }
}
