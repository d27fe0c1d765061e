//! Refusals of connection requests, and the responses sent to peers.
//!
//! The errors follow the checks of docs/PROTOCOL.md "what the kernel server checks" (rtrs-srv.c,
//! rtrs_rdma_connect), each with its errno; the control shard performs the checks with its tables.
//! A refusal carries all 56 bytes of CON_RSP with a negative errno, because a kernel client accepts
//! no other answer.

use std::collections::BTreeMap;

use rtrs_core::fabric::{FabricError, PrivateData, ProofError, RegisterError, Who};
use rtrs_core::identity::EvictionSecret;
use rtrs_core::limits::Limits;
use rtrs_core::wire::{ConnRsp, Extensions, WireError, errno};

use crate::path::handshake::JoinError;

/// Names under which refused connections and evicted sessions are counted; `silent` is for
/// connections that the listeners close.
pub(crate) const REASONS: [&str; 20] = [
    "access",
    "authenticate",
    "evicted",
    "half-open-max",
    "identity",
    "invalid",
    "memory",
    "memory-max",
    "no-session",
    "not-opened",
    "path-exists",
    "path-limits",
    "ping-only",
    "queue-depth",
    "session-name",
    "sessions-max",
    "silent",
    "stopping",
    "strangers-ended",
    "turnover",
];

/// Numbers of refused connections and opens, and of evicted sessions, by reason.
#[derive(Debug, Default)]
pub(super) struct RefusedCounts(BTreeMap<&'static str, u64>);

impl RefusedCounts {
    /// Counts one refusal.
    pub(super) fn count(&mut self, reason: &'static str) {
        debug_assert!(REASONS.contains(&reason), "{reason} is not in the list");
        *self.0.entry(reason).or_insert(0) += 1;
    }

    /// Sum of all counts.
    pub(super) fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Nonzero counts by reason, including `silent` connections closed by the listeners.
    pub(super) fn all(&self, silent: u64) -> BTreeMap<String, u64> {
        let silent = ("silent", silent);
        let counts = self.0.iter().map(|(reason, count)| (*reason, *count)).chain([silent]);
        let counts = counts.filter(|(_, count)| *count > 0);
        counts.map(|(reason, count)| (reason.to_owned(), count)).collect()
    }
}

/// Reason for refusing a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Refusal {
    /// The private data is not a valid CON_REQ.
    #[error("{0}")]
    Wire(WireError),
    /// The server is stopping.
    #[error("the server is stopping")]
    Stopping,
    /// The server answers only pings.
    #[error("the server answers pings only (--ping-only)")]
    PingOnly,
    /// The operator evicted the session.
    #[error("the session was evicted by the operator")]
    Evicted(EvictionSecret),
    /// The access lists do not allow the client.
    #[error("{0} (access)")]
    NotAllowed(String),
    /// The access lists do not allow a client without a name that could authenticate.
    #[error("{0} (access)")]
    Nameless(String),
    /// The client has not authenticated.
    #[error("{0} (authenticate)")]
    Unproved(ProofError),
    /// Too many paths of the session have unauthenticated clients.
    #[error("the session already has {0} unauthenticated paths")]
    UnprovedPaths(usize),
    /// Paths with unauthenticated clients use all memory that they may use.
    #[error(
        "unauthenticated paths already use {} of their limit, a quarter of memory-max", mib(*.0)
    )]
    UnprovedMemory(u64),
    /// Too many connections are in their handshake or belong to sessions without an OPEN, and no
    /// other connection can be closed for this one.
    #[error("{0} connections are in their handshake, or have opened no export yet (half-open-max)")]
    HalfOpen(u32),
    /// The limits have been reached, and the eviction budget is used up.
    #[error(
        "the server is full, and too many sessions without an open export were just evicted; try \
         again"
    )]
    Turnover,
    /// The session does not exist and the peer does not ask to create it.
    #[error("no such session")]
    NoSession,
    /// The limit on the number of sessions has been reached.
    #[error("there are already {0} sessions (sessions-max)")]
    Sessions(u32),
    /// The path already exists and accepts no further connections.
    #[error("the path already exists")]
    PathExists,
    /// The connection does not fit its path.
    #[error("{0}")]
    Join(JoinError),
    /// The limit on the number of paths per session has been reached.
    #[error("the session already has {0} paths")]
    Paths(usize),
    /// Too many dead paths of the session still have block IO running or connections closing.
    #[error("{0} dead paths of the session still have running IO or open connections")]
    Draining(usize),
    /// The session has a path between the same two addresses.
    #[error("the session already has a path between these addresses")]
    SameAddresses,
    /// The path's connections would use more memory than a path may.
    #[error("{connections} connections would use {bytes} bytes, but a path may use only {max}")]
    Connections {
        /// Number of connections that the peer announces.
        connections: u16,
        /// Bytes that the connections could use.
        bytes: u64,
        /// Bytes that the connections may use.
        max: u64,
    },
    /// The chunks of a new session do not fit in the remaining memory.
    #[error(
        "the chunks of a new session need {}, but memory-max ({}) has only {} left; raise \
         memory-max, or lower queue-depth or chunk-size", mib(*needs), mib(*max), mib(*room)
    )]
    MemoryMax {
        /// Bytes for the smallest depth that the client accepts.
        needs: u64,
        /// Bytes left.
        room: u64,
        /// Limit in bytes.
        max: u64,
    },
    /// The client sent a queue depth that differs from the depth of its session.
    #[error("the session has queue depth {has}, but its client assumes {asked}")]
    Depth {
        /// Depth of the session.
        has: u16,
        /// Depth according to the client.
        asked: u16,
    },
    /// Another session has the name.
    #[error("another session has the name {0:?} (session-name)")]
    NameTaken(String),
    /// The session belongs to another client.
    #[error("the session belongs to a client other than {0}")]
    Identity(Who),
    /// Memory or a protection domain could not be allocated.
    #[error("{0}")]
    Memory(String),
    /// The device has no memory windows, or too few.
    #[error(
        "the device lacks a memory window for each chunk ({0}); start the server with \
         --always-invalidate auto or off, with a smaller --queue-depth, or use another device"
    )]
    Windows(String),
}

/// Formats a size for display.
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

impl From<RegisterError> for Refusal {
    fn from(error: RegisterError) -> Self {
        match error {
            RegisterError::Memory(error) => Self::memory(error),
            RegisterError::Windows(error) => Self::Windows(error.to_string()),
            RegisterError::Unwanted => Self::Memory(error.to_string()),
        }
    }
}

impl Refusal {
    /// Refusal for memory that could not be allocated.
    #[allow(clippy::needless_pass_by_value, reason = "made for map_err")]
    pub(crate) fn memory(error: FabricError) -> Self {
        Self::Memory(error.to_string())
    }

    /// Positive errno that the peer receives.
    pub(crate) const fn errno(&self) -> u16 {
        match self {
            Self::NoSession => errno::ENXIO,
            Self::Sessions(_) => errno::EUSERS,
            Self::HalfOpen(_)
            | Self::Turnover
            | Self::UnprovedPaths(_)
            | Self::UnprovedMemory(_)
            | Self::Paths(_)
            | Self::Connections { .. } => errno::EDQUOT,
            Self::MemoryMax { .. } | Self::Memory(_) => errno::ENOMEM,
            Self::Windows(_) | Self::PingOnly => errno::EOPNOTSUPP,
            Self::SameAddresses | Self::NameTaken(_) => errno::EEXIST,
            Self::Identity(_) => errno::EACCES,
            Self::Evicted(_) => errno::ESTALE,
            Self::NotAllowed(_) | Self::Nameless(_) | Self::Unproved(_) => errno::EACCES,
            _ => errno::ECONNRESET,
        }
    }

    /// Adds the hint to authenticate, if the server offers it, to a refusal by an access list.
    pub(super) fn with_hint(self, can_authenticate: bool) -> Self {
        match self {
            Self::NotAllowed(why) if can_authenticate => Self::Nameless(why),
            refusal => refusal,
        }
    }

    /// Whether the operator of this server must act.
    pub(crate) const fn is_ours(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::MemoryMax { .. } | Self::Windows(_))
    }

    /// Whether the client may not connect or has not authenticated: it may be guessing credentials.
    pub(crate) const fn is_denied(&self) -> bool {
        matches!(self, Self::NotAllowed(_) | Self::Nameless(_) | Self::Unproved(_))
    }

    /// Name under which the refusal is counted.
    pub(crate) const fn reason(&self) -> &'static str {
        match self {
            Self::Wire(_) => "invalid",
            Self::Stopping => "stopping",
            Self::PingOnly => "ping-only",
            Self::Evicted(_) => "evicted",
            Self::NotAllowed(_) | Self::Nameless(_) => "access",
            Self::Unproved(_) => "authenticate",
            Self::UnprovedPaths(_) | Self::UnprovedMemory(_) => "path-limits",
            Self::HalfOpen(_) => "half-open-max",
            Self::Turnover => "turnover",
            Self::NoSession => "no-session",
            Self::Sessions(_) => "sessions-max",
            Self::PathExists | Self::Join(_) | Self::SameAddresses => "path-exists",
            Self::Paths(_) | Self::Draining(_) | Self::Connections { .. } => "path-limits",
            Self::Identity(_) => "identity",
            Self::NameTaken(_) => "session-name",
            Self::Depth { .. } => "queue-depth",
            Self::MemoryMax { .. } => "memory-max",
            Self::Memory(_) | Self::Windows(_) => "memory",
        }
    }

    /// Response to the peer.
    pub(crate) fn response(&self) -> PrivateData {
        let mut reject = ConnRsp::reject(self.errno());
        let none = Extensions::default();
        let says = match self {
            // Proves to the client that this is the server that knows the session.
            Self::Evicted(secret) => Extensions { identity: Some(secret.0), ..none },
            Self::Nameless(_) => Extensions { authenticate: true, ..none },
            _ => none,
        };
        reject.ext = says.encode();
        PrivateData::new(&reject.encode())
    }
}

/// Response to an accepted peer, with these extensions of the server.
pub(crate) fn acceptance(limits: Limits, fresh_keys: bool, server: Extensions) -> PrivateData {
    let accept = ConnRsp { ext: server.encode(), ..ConnRsp::accept(limits, fresh_keys) };
    PrivateData::new(&accept.encode())
}

#[cfg(test)]
mod tests {
    use rtrs_core::identity::ServerProcess;

    use super::*;

    #[test]
    fn refusals_are_56_bytes_with_a_negative_errno() {
        for (refusal, low, high) in [
            (Refusal::PathExists, 0x98, 0xff),
            (Refusal::NoSession, 0xfa, 0xff),
            (Refusal::SameAddresses, 0xef, 0xff),
            (Refusal::Sessions(1), 0xa9, 0xff),
            (Refusal::HalfOpen(1), 0x86, 0xff),
            (Refusal::Paths(128), 0x86, 0xff),
            (Refusal::MemoryMax { needs: 3, room: 2, max: 5 }, 0xf4, 0xff),
            (Refusal::Depth { has: 5, asked: 6 }, 0x98, 0xff),
            (Refusal::Identity(Who::Anonymous), 0xf3, 0xff),
        ] {
            let response = refusal.response();
            let bytes = response.as_bytes();
            assert_eq!(bytes.len(), 56);
            assert_eq!(bytes[..6], [0xbd, 0x1b, 0x00, 0x02, low, high]);
            assert!(bytes[20..].iter().all(|b| *b == 0));
        }
        let evicted = Refusal::Evicted(EvictionSecret([9; 16])).response();
        let bytes = evicted.as_bytes();
        assert_eq!((&bytes[4..6], &bytes[20..28]), (&[0x8c, 0xff][..], &b"RTRX\x08\0\0\0"[..]));
        assert_eq!((&bytes[28..44], &bytes[44..56]), (&[9; 16][..], &[0; 12][..]));
    }

    #[test]
    fn an_accept_matches_the_capture_plus_our_extensions() {
        let says = |discover, gateways| Extensions {
            identity: Some([5; 16]),
            discover,
            gateways,
            ..Extensions::OURS
        };
        let bytes = acceptance(Limits::DEFAULT, true, says(true, false));
        let mut expected = [0u8; 56];
        expected[..17]
            .copy_from_slice(&[0xbd, 0x1b, 0, 2, 0, 0, 0, 2, 0, 0xf0, 1, 0, 0, 0x10, 0, 0, 2]);
        // The kernel's server sends zeroes here, which its client ignores.
        expected[20..25].copy_from_slice(b"RTRX\x5f");
        expected[28..44].fill(5);
        assert_eq!(bytes.as_bytes(), expected);
        let silent = acceptance(Limits::DEFAULT, true, says(false, false));
        expected[24] = 0x1f;
        assert_eq!(silent.as_bytes(), expected);
        // For an rtrs client that accepts times.
        expected[24] = 0x7f;
        let timed = Extensions { times: true, ..says(true, false) };
        let bytes = acceptance(Limits::DEFAULT, true, timed);
        assert_eq!(bytes.as_bytes(), expected);
        // For a client that must authenticate.
        expected[24] = 0xff;
        let asking =
            |gateways| Extensions { times: true, authenticate: true, ..says(true, gateways) };
        let bytes = acceptance(Limits::DEFAULT, true, asking(false));
        assert_eq!(bytes.as_bytes(), expected);
        // For exports that move between servers.
        expected[25] = 1;
        let bytes = acceptance(Limits::DEFAULT, true, asking(true));
        assert_eq!(bytes.as_bytes(), expected);
        // Heartbeats of idle paths at least every 30 s.
        (expected[25], expected[44], expected[45]) = (6, 0x30, 0x75);
        // Process number of the server.
        expected[48..54].fill(9);
        let idle = Extensions {
            idle_ms: Some(30_000),
            process: Some(ServerProcess([9; 6])),
            ..asking(false)
        };
        let bytes = acceptance(Limits::DEFAULT, true, idle);
        assert_eq!(bytes.as_bytes(), expected);
    }
}
