//! Metrics of a daemon's nodes, for scrapes.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rtrs_base::metrics::{MetricsServer, Samples};
use rtrs_base::settings::MetricsAddress;

use super::nodes::Nodes;
use crate::error::{Error, ErrorKind, failed};
use crate::metrics as m;
use crate::node::{NodeHandle, NodeReport};
use crate::proto::{ConnectionState, Stats};

/// Serves the metrics of nodes at an address.
///
/// # Errors
/// [`ErrorKind::InUse`] if the address cannot be listened on.
pub(super) fn serve_metrics(
    nodes: &Arc<Nodes>,
    at: &MetricsAddress,
) -> Result<MetricsServer, Error> {
    let what = format!("cannot serve metrics at {at}");
    let server = MetricsServer::bind(at).map_err(failed(ErrorKind::InUse, what.clone()))?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    // The nodes may stop while the server still answers requests.
    let nodes = Arc::downgrade(nodes);
    server
        .serve(move || {
            let nodes = nodes.upgrade().ok_or("the nodes have stopped")?;
            let reports: Vec<_> = nodes.all().iter().filter_map(NodeHandle::report).collect();
            Ok(samples(&reports, started).text(&m::all()))
        })
        .map_err(failed(ErrorKind::System, what))?;
    tracing::info!(address = %server.at(), "serving metrics");
    Ok(server)
}

fn samples(reports: &[NodeReport], started: f64) -> Samples {
    let mut out = Samples::default();
    out.add(&m::BUILD_INFO, &[env!("CARGO_PKG_VERSION")], 1_u64);
    out.add(&m::START_TIME, &[], started);
    for report in reports {
        add_node(&mut out, report);
    }
    out
}

fn add_node(out: &mut Samples, report: &NodeReport) {
    let node = &*report.address.to_string();
    out.add(&m::SOCKETS, &[node], report.sockets.len() as u64);
    out.add(&m::MEMORY, &[node, "received"], report.unread_bytes as u64);
    out.add(&m::MEMORY, &[node, "sent"], report.unacked_bytes as u64);
    out.add(&m::MEMORY_MAX, &[node], report.memory_max as u64);
    for state in ConnectionState::ALL.map(ConnectionState::name) {
        let paths = report.peers.iter().flat_map(|peer| &peer.paths);
        let count = paths.filter(|path| path.state == state).count();
        out.add(&m::CONNECTIONS, &[node, state], count as u64);
    }
    let own = report.sockets.iter().filter_map(|socket| socket.congested_seconds);
    add_congested(out, [node, node], own);
    for peer in &report.peers {
        let address = &*peer.address.to_string();
        out.add(&m::QUEUED, &[node, address], peer.queued_bytes as u64);
        out.add(&m::STUCK, &[node, address], peer.stuck_seconds.unwrap_or(0));
        let seconds = peer.congested_ports.iter().map(|port| port.seconds);
        add_congested(out, [node, address], seconds);
    }
    for ((name, _), metric) in Stats::default().all().iter().zip(Stats::METRICS) {
        out.add(metric, &[node], report.counters.get(*name).copied().unwrap_or(0));
    }
}

/// Adds the number of congested ports and the longest of their times; `seconds` has one time per
/// port.
fn add_congested(out: &mut Samples, labels: [&str; 2], seconds: impl Iterator<Item = u64> + Clone) {
    out.add(&m::CONGESTED, &labels, seconds.clone().count() as u64);
    out.add(&m::CONGESTED_SECONDS, &labels, seconds.max().unwrap_or(0));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{CongestedPort, PathReport, PeerReport};

    fn peer(last: u8, state: &str, stuck_seconds: Option<u64>) -> PeerReport {
        let path =
            PathReport { path: 0, state: state.into(), next_tx: 1, next_rx: 1, queued_bytes: 0 };
        PeerReport {
            address: [10, 0, 0, last].into(),
            state: state.into(),
            next_tx: 1,
            next_rx: 1,
            queued_bytes: 7,
            unread_bytes: 0,
            stuck_seconds,
            congested_ports: [3, 9].map(|seconds| CongestedPort { port: 5, seconds }).into(),
            paths: vec![path],
        }
    }

    #[test]
    fn blocked_messages_and_states_are_shown() {
        let report = NodeReport {
            address: [10, 0, 0, 1].into(),
            unread_bytes: 0,
            unacked_bytes: 14,
            memory_max: 100,
            sockets: Vec::new(),
            peers: vec![peer(2, "up", None), peer(3, "error", Some(40))],
            counters: [("conn_reset".to_owned(), 6)].into(),
        };
        let text = samples(&[report], 0.0).text(&m::all());
        for line in [
            "rds_connections{node=\"10.0.0.1\",state=\"up\"} 1\n",
            "rds_connections{node=\"10.0.0.1\",state=\"error\"} 1\n",
            "rds_connections{node=\"10.0.0.1\",state=\"down\"} 0\n",
            "rds_peer_stuck_seconds{node=\"10.0.0.1\",peer=\"10.0.0.2\"} 0\n",
            "rds_peer_stuck_seconds{node=\"10.0.0.1\",peer=\"10.0.0.3\"} 40\n",
            "rds_congested_ports{node=\"10.0.0.1\",owner=\"10.0.0.1\"} 0\n",
            "rds_congested_ports{node=\"10.0.0.1\",owner=\"10.0.0.3\"} 2\n",
            "rds_congested_seconds{node=\"10.0.0.1\",owner=\"10.0.0.3\"} 9\n",
            "# HELP rds_conn_reset_total Established connections that were lost.\n",
            "rds_conn_reset_total{node=\"10.0.0.1\"} 6\n",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
