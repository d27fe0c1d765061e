//! The part of a plan that `attach` and `bench` share: the session.
//!
//! This module owns [`SessionPlan`], its validation, and its checks of the system (host names,
//! RDMA).

use std::fs;
use std::time::Duration;

use rtrs_core::fabric::rdma::{NoRdma, Rdma};
use rtrs_core::limits::{TCP_CONNS_PER_PATH_MAX, TLS_CONNS_PER_PATH_MAX};
use rtrs_core::paths::make_absolute;
use rtrs_core::settings::{Auto, Int, Portal, Scheme, Shards, Time};

use super::hosts::resolve_all;
use crate::engine::{HeartbeatSettings, PATHS_MAX};
use crate::error::{Error, ErrorKind, usage};
use crate::settings::{Access, SessionSettings};
use crate::tls::TlsSources;

/// Maximum length of a name on the wire: 255 bytes including the NUL (kernel rtrs-pri.h,
/// `NAME_MAX`).
pub(super) const NAME_BYTES_MAX: usize = 254;
/// Maximum number of shards per path: its connections, not counting the service connection.
const fn shards_max(scheme: Scheme) -> u16 {
    match scheme {
        Scheme::Tcp => TCP_CONNS_PER_PATH_MAX - 1,
        Scheme::Tls => TLS_CONNS_PER_PATH_MAX - 1,
        Scheme::Rdma => u16::MAX,
    }
}

/// Validated settings of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionPlan {
    /// Name of the volume on this host, by default that of the export: 1 to 254 bytes, without NUL.
    pub name: String,
    /// Export to open: 1 to 254 bytes, without NUL.
    pub export_name: String,
    /// Session name on the server: 1 to 254 bytes, without slash, dot or NUL.
    pub session_name: String,
    /// Access mode in which to open the export.
    pub access: Access,
    /// Threads that carry IO, and connections on each path besides the service connection.
    pub shards: Shards,
    /// Settings, including the name and access above. No path appears twice; the check made before
    /// starting rejects an empty list.
    pub settings: SessionSettings,
}

impl SessionPlan {
    /// Validates the session's settings. The export has the volume's name; see
    /// [`with_export`](Self::with_export). `access_default` applies if no access was set.
    pub(super) fn new(
        name: &str,
        mut settings: SessionSettings,
        shards: Shards,
        access_default: Access,
    ) -> Result<Self, Error> {
        check_name("export name", name)?;
        let SessionSettings { tls_dir, key_file, .. } = &mut settings;
        make_absolute([tls_dir, key_file]).map_err(|e| {
            Error::with_source(ErrorKind::Usage, "cannot use tls-dir or key-file", e)
        })?;
        let access = match (settings.read_only, settings.access) {
            (true, Some(Access::Rw | Access::Migration)) => {
                return Err(usage("read-only contradicts access rw or migration; drop one"));
            }
            (true, _) => Access::Ro,
            (_, access) => access.unwrap_or(access_default),
        };
        let session_name = match settings.session_name.take() {
            Some(name) => check_session_name(name)?,
            None => default_session_name(name),
        };
        check_paths(&settings.path)?;
        if settings.reconnect_min > settings.reconnect_max {
            return Err(usage(format!(
                "reconnect-min {} is more than reconnect-max {}; lower reconnect-min or \
                 raise reconnect-max",
                settings.reconnect_min, settings.reconnect_max
            )));
        }
        (settings.access, settings.session_name) = (Some(access), Some(session_name.clone()));
        let (name, export_name) = (name.to_owned(), name.to_owned());
        let plan = Self { name, export_name, session_name, access, shards, settings };
        let most = plan.shards_max();
        if matches!(shards, Shards::Is(n) if n.get() > most) {
            return Err(usage(format!(
                "{shards} shards are too many for a path over TCP; use at most {most}"
            )));
        }
        plan.tls_sources().check(&plan.settings.path)?;
        Ok(plan)
    }

    /// Sets an export whose name differs from the volume's.
    pub(super) fn with_export(self, export: Option<&str>) -> Result<Self, Error> {
        let Some(export) = export else { return Ok(self) };
        check_name("export name", export)?;
        Ok(Self { export_name: export.to_owned(), ..self })
    }

    /// Heartbeats for a kernel server, slow enough for any server.
    pub(crate) fn heartbeat(&self) -> HeartbeatSettings {
        let missed_max = self.missed_max(5);
        HeartbeatSettings {
            interval: self.settings.heartbeat.get().map_or(Duration::from_millis(500), Time::get),
            missed_max,
            confirmed_missed_max: missed_max,
            idle_max: self.settings.heartbeat_idle_max.get(),
        }
    }

    /// Heartbeats for `rtrs-server`: over TCP a silent path is noticed within 400 ms. An RDMA
    /// device may take half a second to retransmit a lost packet, and the timeout must cover that:
    /// 700 ms if the server answers on a different path, otherwise 900 ms. In the lab, 600 ms was
    /// too short: a starved server was mistaken for a dead path.
    pub(crate) fn own_heartbeat(&self, scheme: Scheme) -> HeartbeatSettings {
        if self.settings.heartbeat != Auto::Auto {
            return self.heartbeat();
        }
        let (missed_max, confirmed_missed_max) = match scheme {
            Scheme::Tcp | Scheme::Tls => (3, 3),
            Scheme::Rdma => (8, 6),
        };
        HeartbeatSettings {
            interval: Duration::from_millis(100),
            missed_max: self.missed_max(missed_max),
            confirmed_missed_max: self.missed_max(confirmed_missed_max),
            idle_max: self.settings.heartbeat_idle_max.get(),
        }
    }

    fn missed_max(&self, usual: u32) -> u32 {
        self.settings.heartbeat_missed_max.get().map_or(usual, Int::get)
    }

    /// Time for which the transport retransmits unacknowledged data before it closes a connection.
    /// Longer than the heartbeat limit, so that heartbeats detect a dead path first, but bounded.
    fn transport_timeout(&self) -> Duration {
        let silence = self.heartbeat().silence_max();
        (silence * 4 / 3).clamp(Duration::from_secs(1), Duration::from_secs(4))
    }

    /// [`transport_timeout`](Self::transport_timeout) of the paths of a scheme. Over TCP it also
    /// applies while connecting, which has its own time limit.
    pub(crate) fn transport_timeout_of(&self, scheme: Scheme) -> Duration {
        match scheme {
            Scheme::Tcp | Scheme::Tls => {
                self.transport_timeout().max(self.settings.connect_timeout.get())
            }
            Scheme::Rdma => self.transport_timeout(),
        }
    }

    /// Certificates or keys for tls:// paths.
    pub(crate) fn tls_sources(&self) -> TlsSources {
        TlsSources::of(&self.settings)
    }

    fn shards_max(&self) -> u16 {
        let schemes = self.settings.path.iter().map(Portal::scheme);
        schemes.map(shards_max).min().unwrap_or(u16::MAX)
    }

    /// Number of shards to run: at least one, and no more than any of the paths can carry.
    pub(crate) fn shards(&self) -> u16 {
        self.shards.count().min(self.shards_max())
    }

    /// Runs [`check_local`](Self::check_local), and checks that some path's host has an address.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.check_local()?;
        let unresolved = self.unresolved();
        if unresolved.len() < self.settings.path.len() {
            return Ok(());
        }
        let text = format!("cannot use a path: {}", unresolved.join("; "));
        Err(Error::new(ErrorKind::Path, text))
    }

    /// Reasons why paths cannot be used now, because their hosts have no address.
    pub(crate) fn unresolved(&self) -> Vec<String> {
        let all = resolve_all(&self.settings.path).into_iter();
        all.filter_map(|found| found.err().map(|why| why.to_string())).collect()
    }

    /// Checks that there is a path, and that TLS and RDMA can be used if a path needs them.
    pub(crate) fn check_local(&self) -> Result<(), Error> {
        if self.settings.path.is_empty() {
            return Err(usage(
                "no path to the server; use --path tcp://HOST, or path: in the file",
            ));
        }
        // The settings that tls:// needs have already been checked.
        self.tls_sources().check_now()?;
        self.open_rdma().map(drop)
    }

    /// Warnings for the operator.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let tls = self.tls_sources();
        // Errors in the files are reported elsewhere.
        let mut all = tls.check_now().unwrap_or_default();
        all.extend(self.settings.path.iter().filter_map(|path| tls.unused_by(path)));
        all
    }

    /// Opens RDMA, if a path needs it.
    ///
    /// # Errors
    /// Returns [`ErrorKind::Path`], with what is missing on this host.
    pub(crate) fn open_rdma(&self) -> Result<Option<Rdma>, Error> {
        match self.settings.path.iter().find(|path| path.scheme() == Scheme::Rdma) {
            None => Ok(None),
            Some(path) => Rdma::open().map(Some).map_err(|missing| {
                let text = format!("cannot use the path {path}");
                Error::with_source(ErrorKind::Path, text, missing)
            }),
        }
    }
}

/// Rejects names that the wire format cannot carry.
pub(crate) fn check_name(what: &str, name: &str) -> Result<(), Error> {
    let problem = match name.len() {
        0 => "is empty".to_owned(),
        len if len > NAME_BYTES_MAX => format!("is {len} bytes long"),
        _ if name.contains('\0') => "contains a NUL".to_owned(),
        _ => return Ok(()),
    };
    let shown: String = name.chars().take(40).collect();
    Err(usage(format!("{what} {shown:?} {problem}; use 1 to 254 bytes without NUL")))
}

/// Rejects session names for which a server drops the path (kernel rtrs-srv.c, `process_info_req`).
fn check_session_name(name: String) -> Result<String, Error> {
    check_name("session-name", &name)?;
    if name.contains(['/', '.']) {
        return Err(usage(format!(
            "session-name {name:?} contains a slash or a dot, which servers refuse; use - or _"
        )));
    }
    Ok(name)
}

/// Host and volume name, with forbidden characters replaced, truncated to the maximum length.
pub(crate) fn default_session_name(name: &str) -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "localhost",
        host => host,
    };
    let mut name = format!("{host}-{name}").replace(['/', '.', '\0'], "_");
    name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    name
}

/// Rejects a path that cannot be connected by this build, or by any build.
pub(crate) fn check_path(path: &Portal) -> Result<(), Error> {
    if path.scheme() == Scheme::Rdma && !Rdma::BUILT_IN {
        return Err(usage(format!("cannot use the path {path}: {}", NoRdma::Feature)));
    }
    path.check_connect().map_err(|e| Error::with_source(ErrorKind::Usage, "cannot use a path", e))
}

fn check_paths(paths: &[Portal]) -> Result<(), Error> {
    if paths.len() > PATHS_MAX {
        let count = paths.len();
        return Err(usage(format!("{count} paths are too many; use at most {PATHS_MAX}")));
    }
    for (at, path) in paths.iter().enumerate() {
        check_path(path)?;
        if paths[..at].contains(path) {
            return Err(usage(format!("path {path} is listed twice; drop one")));
        }
    }
    Ok(())
}

/// Converts a path name from the user to the form shown in lists, if it is a portal.
pub(crate) fn path_name(text: &str) -> String {
    text.parse().map_or_else(|_| text.to_owned(), |portal: Portal| portal.to_string())
}
