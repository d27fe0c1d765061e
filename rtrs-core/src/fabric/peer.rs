//! Who a peer is: what an accepted connection proved, on its way to the session; or why nothing was
//! proved.

use std::fmt;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;

/// Why a proof was not made, or is not good. For people; it is not sent to the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ProofError {
    kind: &'static str,
    text: String,
}

impl ProofError {
    /// Of a kind that the peer cannot make up, with a text that may have what it sent.
    pub fn new(kind: &'static str, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// What kind of failure it is, by which it is told apart from others.
    pub fn kind(&self) -> &'static str {
        self.kind
    }
}

impl From<&'static str> for ProofError {
    fn from(text: &'static str) -> Self {
        Self::new(text, text)
    }
}

/// Who a peer has proved to be.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    /// It has proved nothing.
    #[default]
    Anonymous,
    /// It has the private key of a certificate with this name, which our CA has signed.
    Certificate(Arc<str>),
    /// It has the private key of the public key that has this name in our list.
    Key(Arc<str>),
}

impl Who {
    /// Its name; None for an anonymous one.
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

/// With what a peer proved who it is: its certificates, or its raw key.
#[derive(Clone, Debug)]
pub struct Proof {
    /// Its own first, in DER.
    pub(crate) chain: Vec<CertificateDer<'static>>,
    /// Counts the configurations of this end: which of them it was checked against.
    pub(crate) generation: u64,
}

impl Proof {
    /// Which configuration of this end, counted from 0, it was checked against.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

/// The same was shown, whenever it was checked.
impl PartialEq for Proof {
    fn eq(&self, other: &Self) -> bool {
        self.chain == other.chain
    }
}

impl Eq for Proof {}

/// Who the peer of a connection is, and what protects the connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Who.
    pub who: Who,
    /// With what it proved that; None for an anonymous one.
    pub proof: Option<Arc<Proof>>,
    /// The cipher suite; None when the connection is not encrypted.
    pub cipher: Option<&'static str>,
}
