//! Conversion of a session's plan into the configuration of its engine.

use std::io::{self, Read};

use rtrs_core::ids::SessionId;
use rtrs_core::settings::Scheme;
use rtrs_core::time::Duration;
use rtrs_core::wire::AccessMode;

use super::fabrics::{path_target, provider_of, schemes};
use crate::engine::{PATH_RUN, SessionConfig, Tuning, VolumeConfig};
use crate::error::{Error, ErrorKind, system};
use crate::plan::{SessionPlan, resolve_all};
use crate::settings::{Access, SlowIo};

/// Configuration of the plan's volume.
pub(crate) fn volume_config(plan: &SessionPlan) -> VolumeConfig {
    VolumeConfig {
        export: plan.export_name.clone(),
        access: match plan.access {
            Access::Ro => AccessMode::ReadOnly,
            Access::Auto | Access::Rw => AccessMode::ReadWrite,
            Access::Migration => AccessMode::Migration,
        },
        read_only_fallback: plan.access == Access::Auto,
        promotes: false,
        inherited_epoch: None,
        inherited_export: None,
        identity: plan.settings.identity,
    }
}

/// Configuration of the plan's session with these volumes. Waits for the system's resolver, within
/// a limit, if the host of a path is a name.
pub(crate) fn session_config(
    plan: &SessionPlan,
    volumes: Vec<VolumeConfig>,
) -> Result<SessionConfig, Error> {
    let id = random_uuid().map_err(system("cannot get random numbers"))?;
    let mut seed = [0; 8];
    seed.copy_from_slice(&id[8..]);
    let (schemes, set) = (schemes(plan), &plan.settings);
    Ok(SessionConfig {
        name: plan.session_name.clone(),
        volumes,
        open_patience: Duration::ZERO,
        resent_for: Duration::ZERO,
        id: SessionId(id),
        paths: set
            .path
            .iter()
            .zip(resolve_all(&set.path))
            .map(|(path, found)| {
                let provider = provider_of(&schemes, path.scheme());
                let provider = provider
                    .ok_or_else(|| Error::new(ErrorKind::System, format!("{path}: no fabric")))?;
                let heartbeat = plan.own_heartbeat(path.scheme());
                Ok(path_target(path, found, provider, set.invalidate_reads, heartbeat))
            })
            .collect::<Result<_, Error>>()?,
        shards: plan.shards(),
        policy: set.policy,
        path_run: PATH_RUN,
        heartbeat: plan.heartbeat(),
        connect_timeout: set.connect_timeout.get(),
        reconnect_min: set.reconnect_min.get(),
        reconnect_max: set.reconnect_max.get(),
        io_timeout: set.io_timeout.get(),
        // A benchmark waits; `attach` has a setting.
        slow_io: SlowIo::Wait,
        no_path: set.no_path,
        failover: set.failover,
        queue_depth_limit: set.queue_depth_limit.get(),
        prover: plan.tls_sources().prover()?,
        seed: u64::from_le_bytes(seed),
    })
}

/// Settings that may change while the session is attached.
pub(crate) fn tuning(plan: &SessionPlan) -> Tuning {
    let set = &plan.settings;
    let own = |scheme: Scheme| (scheme.name(), plan.own_heartbeat(scheme));
    Tuning {
        policy: set.policy,
        no_path: set.no_path,
        io_timeout: set.io_timeout.get(),
        connect_timeout: set.connect_timeout.get(),
        reconnect_min: set.reconnect_min.get(),
        reconnect_max: set.reconnect_max.get(),
        heartbeat: plan.heartbeat(),
        own_heartbeats: [Scheme::Tcp, Scheme::Tls, Scheme::Rdma].map(own).into(),
    }
}

/// Random bytes for the session's identity.
pub(crate) fn random_uuid() -> io::Result<[u8; 16]> {
    let mut uuid = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut uuid)?;
    // Version 4, variant 1, as tools that print the UUID expect.
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}
