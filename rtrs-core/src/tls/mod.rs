//! TLS 1.3 for connections over TCP: keys, certificates, and handshakes on threads of their own.
//!
//! The cryptography is that of `rustls` with `ring`. Both ends prove who they are, in one of two
//! ways: X.509 certificates of a common CA ([`TlsDir`]), or raw public keys (RFC 7250) that each
//! end knows of the other ([`PrivateKey`], [`Clients`]). There is no TLS without that, no
//! resumption, no early data, and no older version.
//!
//! A [`TlsEndpoint`] is what all shards of a process share. A shard gives it the bytes that a peer
//! has sent, and a thread of the endpoint answers with the bytes to send and, at the end, with a
//! `Session`: the keys of the records, which `fabric/iwarp/tls.rs` uses from then on. Sockets
//! stay on the shard, so a peer that is slow keeps no thread, and a handshake that computes stops
//! no shard.
//!
//! `files.rs` reading files · `keys.rs` raw keys and the list of clients · `command.rs` the
//! commands for keys · `config.rs` what rustls needs · `raw.rs` checks of raw keys · `names.rs` the
//! name in a certificate · `own.rs` checks of our own files · `lists.rs` revocation lists ·
//! `revocation.rs` verifiers that look for whole chains in them ·
//! `proof.rs` proofs of paths without TLS · `handshake.rs` one handshake · `workers.rs` the threads
//! · `explain.rs` errors for people.

mod command;
mod config;
mod explain;
mod files;
#[cfg(any(test, feature = "test-util"))]
mod fuzz;
#[cfg(any(test, feature = "test-util"))]
mod fuzz_auth;
mod handshake;
mod keys;
mod lists;
mod names;
mod own;
mod proof;
mod raw;
mod revocation;
#[cfg(test)]
mod tests;
mod workers;

pub use crate::fabric::peer::ProofError;
pub use command::{KeyArgs, KeyCommand};
pub use config::{TlsClientConfig, TlsConfigError, TlsServerConfig};
pub(crate) use explain::alert_text;
pub use explain::hint;
pub use files::{TlsDir, writable_by_others};
#[cfg(any(test, feature = "test-util"))]
#[doc(hidden)]
pub use fuzz::fuzz_tls;
#[cfg(any(test, feature = "test-util"))]
pub(crate) use fuzz::sessions;
#[cfg(any(test, feature = "test-util"))]
#[doc(hidden)]
pub use fuzz_auth::fuzz_auth;
pub use handshake::cipher_name;
pub(crate) use handshake::{Ended, Handshake, Progress, Secrets, Session, Step};
pub use keys::{Clients, EVERYONE, KeyError, PrivateKey, PublicKey};
pub use own::{EXPIRES_SOON_DAYS, NO_LIST};
pub use proof::{Exchange, ProofFacts, nonce};
pub use workers::TlsEndpoint;
pub(crate) use workers::{Done, Job};

/// The protocol that both ends name (ALPN, RFC 7301).
pub const ALPN: &[u8] = b"rtrs/1";
