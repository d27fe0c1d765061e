//! What is logged of clients: who opens what, and who is refused and why.
//!
//! A client that is refused may try again for ever. Its lines are limited by address and reason
//! ([`LogLimits`]), so that the log keeps room for others.

use std::net::{IpAddr, SocketAddr};

use rtrs_core::identity::ExportId;
use rtrs_core::ids::SessionId;
use rtrs_core::log_limit::LogLimits;
use rtrs_core::time::Instant;
use rtrs_core::wire::{AccessMode, Name, errno, errno_name};

use super::refusal::Refusal;

/// What is told apart: who it is about, and what; of an open also the export.
type Kind = (IpAddr, &'static str, Option<Name>);

/// Limits the lines about clients.
#[derive(Debug, Default)]
pub(super) struct ClientLog {
    limits: LogLimits<Kind>,
}

/// A client, as far as it is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client {
    /// What it calls its session.
    pub(super) name: Option<Name>,
    pub(super) session: SessionId,
    pub(super) peer: SocketAddr,
}

/// What a client asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) export: Name,
    pub(super) access: AccessMode,
}

impl ClientLog {
    /// Whether a line about a client that has opened nothing is to be logged, and how many were
    /// left out since the last.
    pub(super) fn admit(
        &mut self,
        now: Instant,
        peer: SocketAddr,
        what: &'static str,
    ) -> Option<u64> {
        self.limits.admit(now, (peer.ip(), what, None))
    }

    /// A connection is refused.
    pub(super) fn refused(&mut self, now: Instant, peer: SocketAddr, refusal: &Refusal) {
        let Some(left_out) = self.admit(now, peer, refusal.reason()) else { return };
        let errno = refusal.errno();
        if refusal.is_ours() {
            tracing::warn!(%peer, %refusal, errno, left_out, "refused a connection");
        } else {
            tracing::info!(%peer, %refusal, errno, left_out, "refused a connection");
        }
    }

    /// A client has opened an export.
    pub(super) fn opened(&self, client: Client, asked: Asked, identity: Option<ExportId>) {
        let Client { name, session, peer } = client;
        let (client, identity) = (shown(name), shown(identity));
        let Asked { export, access } = asked;
        if access == AccessMode::Migration {
            // Two clients may write now.
            tracing::warn!(%export, %client, %peer, %session, %identity, ?access, "opened");
        } else {
            tracing::info!(%export, %client, %peer, %session, %identity, ?access, "opened");
        }
    }

    /// A client is not let open an export.
    pub(super) fn open_refused(
        &mut self,
        now: Instant,
        client: Client,
        asked: Asked,
        (errno, deny_migration): (u16, bool),
    ) {
        let Client { name, session, peer } = client;
        let Asked { export, access } = asked;
        let what = errno_name(errno);
        let Some(left_out) = self.limits.admit(now, (peer.ip(), what, Some(export))) else {
            return;
        };
        let reason = match errno {
            errno::EPERM if deny_migration => "the export does not allow migration",
            errno::EPERM => "another session has it open for writing",
            errno::EACCES => "it is read-only, or not accessible below the search path",
            errno::ENOENT => "there is no export of that name",
            errno::EBUSY => "requests of its last open are still running",
            errno::ESTALE => "the session was evicted",
            errno::EINVAL => "the name is not valid",
            errno::ENOMEM => "too many exports are open",
            _ => "see the lines before",
        };
        let client = shown(name);
        tracing::info!(
            %export, %client, %peer, %session, ?access, errno = what, reason, left_out,
            "refused an open"
        );
    }
}

fn shown<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
