//! Who a peer is: what an accepted connection proved, on its way to the session.

use std::fmt;
use std::sync::Arc;

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

/// Who the peer of a connection is, and what protects the connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Who.
    pub who: Who,
    /// The cipher suite; None when the connection is not encrypted.
    pub cipher: Option<&'static str>,
}
