//! Environment in which connections and listeners of a shard run, and the tokens of their
//! operations.

use super::options::IwarpOptions;
use super::secure::Tls;
use super::state::CoreState;
use crate::rt::Port;
use crate::time::Instant;

/// Low byte of a token: the kind of operation of a connection (or of the listener).
pub(super) mod token {
    pub(crate) const CONNECT: u64 = 1;
    pub(crate) const SEND: u64 = 2;
    pub(crate) const RECV: u64 = 3;
    pub(crate) const ACCEPT: u64 = 4;
    pub(crate) const HALF_OPEN: u64 = 5;
    /// Send on a half-open connection.
    pub(crate) const GREETING: u64 = 6;
    /// Step of the TLS handshake of an outgoing connection.
    pub(crate) const SECURE: u64 = 7;

    pub(crate) fn of(id: u64, kind: u64) -> u64 {
        id << 8 | kind
    }

    pub(crate) fn split(token: u64) -> (u64, u64) {
        (token >> 8, token & 0xff)
    }
}

/// Environment of a step of a connection or listener.
pub(super) struct Env<'a> {
    pub(super) core: &'a mut CoreState,
    pub(super) port: &'a Port,
    pub(super) options: &'a IwarpOptions,
    pub(super) tls: Option<&'a Tls>,
    pub(super) now: Instant,
}
