//! Peer identities: the proof given by an accepted connection, as passed to the session, or the
//! reason why it failed.

use std::fmt;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;

/// Reason why a proof is missing or invalid. Meant for people; never sent to the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ProofError {
    kind: &'static str,
    text: String,
}

impl ProofError {
    /// Creates an error. The peer has no influence on `kind`; `text` may contain data that the peer
    /// sent.
    pub fn new(kind: &'static str, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// Returns the kind of failure.
    pub fn kind(&self) -> &'static str {
        self.kind
    }
}

impl From<&'static str> for ProofError {
    fn from(text: &'static str) -> Self {
        Self::new(text, text)
    }
}

/// Proven identity of a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    /// The peer has proved nothing.
    #[default]
    Anonymous,
    /// The peer has the private key of a certificate with this name, signed by the local CA.
    Certificate(Arc<str>),
    /// The peer has the private key of the public key that has this name in the local list.
    Key(Arc<str>),
}

impl Who {
    /// Returns the name; None for an anonymous peer.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Anonymous => None,
            Self::Certificate(name) | Self::Key(name) => Some(name),
        }
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("anonymous"),
            Self::Certificate(name) => write!(f, "certificate:{name}"),
            Self::Key(name) => write!(f, "key:{name}"),
        }
    }
}

/// Evidence with which a peer proved its identity: its certificates or raw key.
#[derive(Clone, Debug)]
pub struct Proof {
    /// Certificate chain in DER, starting with the peer's own certificate.
    pub(crate) chain: Vec<CertificateDer<'static>>,
    /// Number of the local configuration against which the proof was checked.
    pub(crate) generation: u64,
}

impl Proof {
    /// Returns the number of the local configuration, counted from 0, against which the proof was
    /// checked.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

/// Compares only the evidence, regardless of when it was checked.
impl PartialEq for Proof {
    fn eq(&self, other: &Self) -> bool {
        self.chain == other.chain
    }
}

impl Eq for Proof {}

/// Identity of a connection's peer, and the protection of the connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Proven identity.
    pub who: Who,
    /// Evidence for it; None for an anonymous peer.
    pub proof: Option<Arc<Proof>>,
    /// Cipher suite; None if the connection is not encrypted.
    pub cipher: Option<&'static str>,
}
