//! Transport for the hand-driven peers and their servers: TCP loopback, or an RDMA device when
//! `RTRS_TEST_RDMA` names the server's address on one (`10.0.0.2`). Source addresses are then `.100
//! + n` in the same network, which the machine must have; the lab's scenario assigns them.

use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;

use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
#[cfg(feature = "verbs")]
use rtrs_core::fabric::verbs::{VerbsFabric, VerbsOptions, VerbsShared};
use rtrs_core::rt::Ring;

/// Transport between peers and the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The user-space iWARP endpoint over TCP loopback.
    Tcp,
    /// Verbs, with the server at this address.
    Rdma(Ipv4Addr),
}

impl Transport {
    /// Returns the transport selected by the environment.
    ///
    /// # Panics
    /// Panics if the variable holds no IPv4 address.
    #[must_use]
    pub fn of_environment() -> Self {
        match std::env::var("RTRS_TEST_RDMA") {
            Ok(text) => Self::Rdma(text.parse().expect("RTRS_TEST_RDMA: an IPv4 address")),
            Err(_) => Self::Tcp,
        }
    }

    /// Returns the portal for a server to listen on: a free port.
    #[must_use]
    pub fn listen(self) -> String {
        match self {
            Self::Tcp => "tcp://127.0.0.1:0".to_owned(),
            Self::Rdma(address) => format!("rdma://{address}:0"),
        }
    }

    /// Returns source address number `n`, counted from 1.
    #[must_use]
    pub fn source(self, n: u8) -> IpAddr {
        IpAddr::V4(match self {
            Self::Tcp => Ipv4Addr::new(127, 0, 0, n),
            Self::Rdma(address) => {
                let [a, b, c, _] = address.octets();
                Ipv4Addr::new(a, b, c, 100 + n)
            }
        })
    }

    /// Whether raw bytes can be sent in place of a peer's machine.
    #[must_use]
    pub fn is_tcp(self) -> bool {
        self == Self::Tcp
    }

    /// Creates a provider on this ring.
    ///
    /// # Panics
    /// Panics if there is none.
    #[must_use]
    pub fn fabric(self, ring: &Rc<Ring>) -> Box<dyn Fabric> {
        match self {
            Self::Tcp => {
                let options = IwarpOptions::default();
                Box::new(IwarpFabric::new(ring, IwarpShared::new(), options))
            }
            Self::Rdma(_) => verbs(ring),
        }
    }
}

#[cfg(feature = "verbs")]
fn verbs(ring: &Rc<Ring>) -> Box<dyn Fabric> {
    let shared = VerbsShared::open().expect("verbs");
    Box::new(VerbsFabric::new(ring, shared, VerbsOptions::default()).expect("a verbs fabric"))
}

#[cfg(not(feature = "verbs"))]
fn verbs(_ring: &Rc<Ring>) -> Box<dyn Fabric> {
    panic!("RTRS_TEST_RDMA is set, but the tests were built without the feature verbs")
}
