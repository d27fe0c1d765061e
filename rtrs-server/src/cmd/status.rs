//! The command `status`.

use std::collections::BTreeMap;

use rtrs_core::settings::printable;

use super::server::{Server, ServerArgs};
use super::text::{age, bytes};
use crate::control_protocol::{Listener, Load, Request, Status};
use crate::error::Error;

pub(super) fn run(args: &ServerArgs) -> Result<(), Error> {
    let status: Status = Server::find(args)?.request(&Request::Status { load: true })?;
    args.output.print(&status, text)
}

/// Formats one property per line.
fn text(status: &Status) -> String {
    let Status { name, pid, build, uptime_ms, draining, metrics, load, .. } = status;
    let state = if *draining { "draining" } else { "serving" };
    let mut out = String::new();
    let mut add = |key: &str, value: &str| out += &format!("{key:<10} {}\n", printable(value));
    add("server", name);
    add("state", state);
    add("version", build);
    add("process", &pid.to_string());
    add("uptime", &age(*uptime_ms));
    if let Some(Load { listeners, exports, sessions, paths, memory }) = load {
        add("exports", &counts(exports));
        add("sessions", &counts(sessions));
        add("paths", &counts(paths));
        let (used, max) = (bytes(memory.used_bytes), bytes(memory.max_bytes));
        add("memory", &format!("{used} of {max} in chunks (memory-max)"));
        for (at, listener) in listeners.iter().enumerate() {
            add(if at == 0 { "listening" } else { "" }, &listener_text(listener));
        }
    }
    add("metrics", metrics.as_deref().unwrap_or("off"));
    out
}

/// Formats a total, followed by the counts of each state.
fn counts(counts: &BTreeMap<String, usize>) -> String {
    let total: usize = counts.values().sum();
    let states: Vec<String> =
        counts.iter().map(|(state, count)| format!("{count} {state}")).collect();
    match states.is_empty() {
        true => total.to_string(),
        false => format!("{total}: {}", states.join(", ")),
    }
}

fn listener_text(listener: &Listener) -> String {
    let Listener { portal, transport, tls, serving, activated } = listener;
    let transport = transport.to_uppercase();
    let tls = if *tls { "with TLS" } else { "without TLS" };
    let lost = if *serving { "" } else { "; not served: no RDMA device has this address" };
    let activated = if *activated { ", activated" } else { "" };
    format!("{portal} ({transport} {tls}{activated}){lost}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::MemorySnapshot;

    #[test]
    fn each_property_has_a_line() {
        let listener = |portal: &str, transport: &str, tls, serving| Listener {
            portal: portal.into(),
            transport: transport.into(),
            tls,
            serving,
            activated: tls,
        };
        let counts = |all: &[(&str, usize)]| {
            all.iter().map(|(state, count)| ((*state).to_owned(), *count)).collect()
        };
        let status = Status {
            name: "1234".into(),
            pid: 7,
            version: "0.1.0".into(),
            build: "0.1.0 (abc)".into(),
            uptime_ms: 93_600_000,
            portals: Vec::new(),
            draining: false,
            metrics: Some("http://127.0.0.1:9823/metrics".into()),
            load: Some(Load {
                listeners: vec![
                    listener("tls://[::]:1234", "tcp", true, true),
                    listener("rdma://10.0.0.2:1234", "rdma", false, false),
                ],
                exports: counts(&[("failed", 1), ("open", 2)]),
                sessions: counts(&[]),
                paths: counts(&[]),
                memory: MemorySnapshot { used_bytes: 0, max_bytes: 1 << 30 },
            }),
        };
        assert_eq!(
            text(&status),
            "server     1234\nstate      serving\nversion    0.1.0 (abc)\nprocess    7\n\
             uptime     1d02h\nexports    3: 1 failed, 2 open\nsessions   0\npaths      0\n\
             memory     0 B of 1.0 GiB in chunks (memory-max)\n\
             listening  tls://[::]:1234 (TCP with TLS, activated)\n           \
             rdma://10.0.0.2:1234 (RDMA \
             without TLS); not served: no RDMA device has this address\n\
             metrics    http://127.0.0.1:9823/metrics\n"
        );
    }
}
