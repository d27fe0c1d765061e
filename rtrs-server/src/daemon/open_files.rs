//! Limit on open descriptors, raised at startup and compared with what the settings require.
//!
//! A server without free descriptors cannot accept an existing session's reconnect. The client
//! chooses the number of connections per path, so the number a session needs is an estimate, and a
//! shortage causes only a warning.

use std::fmt;

use rtrs_core::rt::raise_open_files;

use crate::settings::{SearchSpec, Settings};

/// Expected number of paths of a session.
const PATHS: u64 = 2;
/// Number of descriptors used by the process: standard streams, log, signals, control socket and
/// its requests, state directory, devices.
const PROCESS: u64 = 64;
/// Number of descriptors used by a shard: ring, mailbox, listeners, completion channels.
const SHARD: u64 = 16;
/// Number of connections that were closed to make room for others but whose descriptors are not
/// free yet, at each of the two steps of a handshake.
const ENDING: u64 = 128;
/// Maximum number of simultaneous pings.
const PINGS: u64 = 64;
/// Maximum number of open exports under the search path.
const FOUND_MAX: u64 = 64;

/// Number of descriptors that a server needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Need {
    /// For the process, shards and exports.
    base: u64,
    /// For connections without a request, those of sessions with no open export, and pings.
    half_open: u64,
    sessions: u64,
    /// For a path over TCP, one per connection. RDMA needs fewer.
    connections: u64,
}

impl Need {
    fn new(set: &Settings, shards: u16) -> Self {
        let shards = u64::from(shards);
        let pings = if set.no_ping { 0 } else { PINGS };
        let found = if set.search_path == SearchSpec::Off { 0 } else { FOUND_MAX };
        let exports = set.export.len() as u64 + found;
        Self {
            // The file, its duplicate for discards, one for syncs, the epoch's file and its lock,
            // and one for each shard.
            base: PROCESS + shards * SHARD + exports * (5 + shards),
            half_open: 2 * u64::from(set.half_open_max()) + ENDING + pings,
            sessions: u64::from(set.sessions_max.get()),
            // For a client with the same number of shards.
            connections: shards + 1,
        }
    }

    fn of_session(self) -> u64 {
        PATHS * self.connections
    }

    fn total(self) -> u64 {
        self.base + self.half_open + self.sessions * self.of_session()
    }

    /// Number of sessions for which `limit` descriptors are enough.
    fn sessions_within(self, limit: u64) -> u64 {
        limit.saturating_sub(self.base + self.half_open) / self.of_session()
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} for {} sessions ({PATHS} paths of {} connections each), {} for half-open-max \
             (twice) and pings, and {} for shards and exports",
            self.sessions * self.of_session(),
            self.sessions,
            self.connections,
            self.half_open,
            self.base
        )
    }
}

/// Explains why a limit is too low; None if it is high enough.
fn shortage(need: Need, limit: u64) -> Option<String> {
    (limit < need.total()).then(|| {
        format!(
            "the limit of open files is {limit}, enough for {} sessions, but the settings need \
             {}: {need}; raise the hard limit (LimitNOFILE= in a systemd unit), or lower \
             sessions-max or half-open-max",
            need.sessions_within(limit),
            need.total()
        )
    })
}

/// Raises the limit on open descriptors, and logs a warning if it is too low for the settings.
pub(super) fn prepare(set: &Settings, shards: u16) {
    match raise_open_files() {
        Ok(limit) => {
            tracing::debug!(limit, "open files");
            if let Some(text) = shortage(Need::new(set, shards), limit) {
                tracing::warn!("{text}");
            }
        }
        Err(error) => tracing::warn!(%error, "cannot raise the limit of open files"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(yaml: &str, shards: u16) -> Need {
        Need::new(&Settings::from_yaml(yaml, "test").unwrap(), shards)
    }

    #[test]
    fn a_shortage_of_descriptors_names_their_users() {
        let yaml = "sessions-max: 100\nhalf-open-max: 50\nexport: [mem:1M]\nlog: info";
        let need = need(yaml, 4);
        // 64 + 4 x 16 + 1 x (5 + 4), 2 x 50 + 128 + 64, 100 x 2 x 5.
        assert_eq!((need.base, need.half_open, need.of_session()), (137, 292, 10));
        assert_eq!((need.total(), shortage(need, 1429)), (1429, None));
        assert_eq!(need.sessions_within(1429), 100);
        let text = shortage(need, 1024).unwrap();
        assert_eq!(
            text,
            "the limit of open files is 1024, enough for 59 sessions, but the settings need \
             1429: 1000 for 100 sessions (2 paths of 5 connections each), 292 for half-open-max \
             (twice) and pings, and 137 for shards and exports; raise the hard limit \
             (LimitNOFILE= in a systemd unit), or lower sessions-max or half-open-max"
        );
        assert_eq!(need.sessions_within(10), 0);
    }

    #[test]
    fn the_search_path_reserves_descriptors() {
        let without = need("export: [mem:1M]", 1);
        let with = need("export: [mem:1M]\nsearch-path: /srv", 1);
        assert_eq!(with.base - without.base, 64 * 6);
    }
}
