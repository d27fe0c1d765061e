//! TLS 1.3 for connections over TCP: keys, certificates, and handshakes on their own threads.
//!
//! The cryptography comes from `rustls` with `ring`. Both ends prove their identities in one of two
//! ways: X.509 certificates from a common CA ([`TlsDir`]), or raw public keys (RFC 7250) known to
//! the other end ([`PrivateKey`], [`Clients`]). Unauthenticated TLS, resumption, early data and
//! older versions are not supported.
//!
//! A [`TlsEndpoint`] is shared by all shards of a process. A shard passes received bytes to it, and
//! one of the endpoint's threads returns the bytes to send and, at the end, a `Session` with the
//! record keys, which `fabric/iwarp/tls.rs` uses from then on. Sockets stay on the shard, so a slow
//! peer occupies no thread, and the computations of a handshake do not delay the shard.
//!
//! - `files.rs`: reading files
//! - `keys.rs`: raw keys and the list of clients
//! - `command.rs`: the commands for keys
//! - `config.rs`: rustls configurations
//! - `sources.rs`: the files behind the configurations
//! - `raw.rs`: checks of raw keys
//! - `names.rs`: the name in a certificate
//! - `own.rs`: checks of the local files
//! - `dates.rs`: dates as text
//! - `lists.rs`: revocation lists
//! - `revocation.rs`: verifiers that check whole chains against the lists
//! - `credential.rs`: the local credential
//! - `proof.rs`: proofs of paths without TLS
//! - `handshake.rs`: one handshake
//! - `workers.rs`: the threads
//! - `error.rs`: unusable files and keys
//! - `explain.rs`: readable errors

mod command;
mod config;
mod credential;
mod dates;
mod error;
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
mod sources;
#[cfg(test)]
mod tests;
mod workers;

pub use crate::fabric::peer::ProofError;
pub use command::{KeyArgs, KeyCommand};
pub use config::{ALPN, TlsClientConfig, TlsServerConfig};
pub use error::TlsConfigError;
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
pub(crate) use handshake::{Credentials, Ended, Handshake, Progress, Secrets, Session, Step};
pub use keys::{Clients, EVERYONE, KeyError, PrivateKey, PublicKey};
pub use own::{EXPIRES_SOON_DAYS, NO_LIST};
pub use proof::{Exchange, ProofFacts, nonce};
pub use workers::TlsEndpoint;
pub(crate) use workers::{Done, Job};
