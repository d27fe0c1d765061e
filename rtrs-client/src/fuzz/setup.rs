//! Setup of a program's client.

use std::net::SocketAddr;

use rtrs_core::ids::{ProviderIndex, SessionId};
use rtrs_core::time::Duration;
use rtrs_core::wire::AccessMode;

use super::answers::{prover, proves};
use super::{PORT, client_ip, server_ip};
use crate::engine::{
    Failover, HeartbeatSettings, NoPath, PATH_RUN, PathTarget, Policy, SessionConfig, SlowIo,
    Tuning, VolumeConfig,
};

/// Session configuration for the first byte of a program.
pub(super) fn config(setup: u8) -> SessionConfig {
    let heartbeat = HeartbeatSettings {
        interval: Duration::from_millis(200),
        missed_max: 3,
        confirmed_missed_max: 2,
        idle_max: Duration::from_secs(1),
    };
    let path = |path| PathTarget {
        peer_name: None,
        name: format!("path{path}"),
        local: Some(client_ip(path)),
        remotes: vec![SocketAddr::new(server_ip(path), PORT)],
        unresolved: None,
        transport: "sim",
        provider: ProviderIndex(0),
        invalidate_reads: setup & 1 == 0,
        heartbeat,
        proves: true,
    };
    SessionConfig {
        name: "fuzz".into(),
        volumes: vec![VolumeConfig {
            export: "vol".into(),
            access: AccessMode::ReadWrite,
            read_only_fallback: setup & 2 != 0,
            promotes: false,
            identity: None,
            inherited_epoch: (setup & 4 != 0).then_some(1),
            inherited_export: None,
        }],
        open_patience: Duration::ZERO,
        resent_for: Duration::ZERO,
        id: SessionId([7; 16]),
        paths: (0..1 + usize::from(setup >> 3 & 1)).map(path).collect(),
        shards: 1 + u16::from(setup >> 4 & 1),
        policy: Policy::RoundRobin,
        path_run: PATH_RUN,
        heartbeat,
        connect_timeout: Duration::from_millis(500),
        reconnect_min: Duration::from_millis(20),
        reconnect_max: Duration::from_millis(500),
        io_timeout: Duration::from_secs(2),
        slow_io: SlowIo::Wait,
        no_path: NoPath::QueueFor(Duration::from_secs(3)),
        failover: if setup & 32 == 0 { Failover::Fast } else { Failover::Strict },
        queue_depth_limit: u16::MAX,
        prover: proves(setup).then(prover),
        seed: 7,
    }
}

/// Other settings for a running session.
pub(super) fn tuning(setup: u8, fields: u8) -> Tuning {
    let some = Duration::from_millis(20 << (fields & 7));
    // All IO has to complete by the end of the program, so it never waits without a limit.
    let no_path = if fields & 8 == 0 { NoPath::Fail } else { NoPath::QueueFor(some) };
    let policy = if fields & 32 == 0 { Policy::MinLatency } else { Policy::RoundRobin };
    let heartbeat = HeartbeatSettings {
        interval: some,
        missed_max: 3,
        confirmed_missed_max: 2,
        idle_max: some * 8,
    };
    Tuning {
        policy,
        no_path,
        io_timeout: some * 2,
        own_heartbeats: vec![("sim", heartbeat)],
        ..config(setup).tuning()
    }
}
