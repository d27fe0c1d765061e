//! Runs the conformance suite over loopback for the `tcp` provider, with and without checksums, and
//! for the `tls` provider, with certificates and with raw keys. The three shards of each harness
//! have their own rings.

use std::net::{SocketAddr, TcpStream};
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::conformance::{Harness, Side};
use rtrs_core::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use rtrs_core::rt::{Clock, Ring};
use rtrs_core::tests::certificates::{TestDir, certificates};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::tls::{Clients, PrivateKey, TlsClientConfig, TlsDir, TlsEndpoint, TlsServerConfig};

/// Harness over sockets. The order of the fields does not matter, because each fabric holds its
/// ring.
struct Tcp {
    rings: [Rc<Ring>; 3],
    a: IwarpFabric,
    b: IwarpFabric,
    second: IwarpFabric,
    idle: u32,
    /// Sockets that fill a backlog to make an address silent.
    full: Option<(socket2::Socket, Vec<TcpStream>)>,
    /// Bound socket that does not listen, which reserves an address that refuses connects.
    closed: Option<socket2::Socket>,
}

impl Tcp {
    fn new(options: &IwarpOptions) -> Self {
        Self::with(|ring, shared, _| IwarpFabric::new(ring, shared, options.clone()))
    }

    /// Creates the harness over TLS, with the endpoints of both ends.
    fn secure(server: &Arc<TlsEndpoint>, client: &Arc<TlsEndpoint>) -> Self {
        Self::with(|ring, shared, side| {
            let endpoint = if side == Side::B { client } else { server };
            let options = IwarpOptions::default();
            IwarpFabric::with_tls(ring, shared, options, Arc::clone(endpoint)).expect("a mailbox")
        })
    }

    fn with(make: impl Fn(&Rc<Ring>, Arc<IwarpShared>, Side) -> IwarpFabric) -> Self {
        Self::sharing([IwarpShared::new(), IwarpShared::new()], make)
    }

    fn sharing(
        [here, there]: [Arc<IwarpShared>; 2],
        make: impl Fn(&Rc<Ring>, Arc<IwarpShared>, Side) -> IwarpFabric,
    ) -> Self {
        let rings = [(); 3].map(|()| Ring::new(256).expect("io_uring"));
        Self {
            a: make(&rings[0], Arc::clone(&here), Side::A),
            b: make(&rings[1], there, Side::B),
            second: make(&rings[2], here, Side::SecondA),
            rings,
            idle: 0,
            full: None,
            closed: None,
        }
    }
}

impl Harness for Tcp {
    fn now(&self) -> Instant {
        Clock.now()
    }

    fn step(&mut self) {
        let mut any = false;
        for ring in &self.rings {
            any |= ring.turn().expect("io_uring");
        }
        self.idle = if any { 0 } else { self.idle + 1 };
        if self.idle > 20 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn fabric(&mut self, side: Side) -> Option<&mut dyn Fabric> {
        Some(match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
            Side::SecondA => &mut self.second,
        })
    }

    fn listen_address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    fn refusing_address(&mut self) -> SocketAddr {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let socket = self.closed.insert(socket.expect("a socket"));
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a port");
        socket.local_addr().ok().and_then(|address| address.as_socket()).expect("its address")
    }

    fn silent_address(&mut self) -> Option<SocketAddr> {
        // The listener never accepts and its backlog is full, so the next connect gets no answer.
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).ok()?;
        socket.bind(&self.listen_address().into()).ok()?;
        socket.listen(1).ok()?;
        let address = socket.local_addr().ok()?.as_socket()?;
        let brief = Duration::from_millis(100);
        let held = (0..8).map_while(|_| TcpStream::connect_timeout(&address, brief).ok());
        let held: Vec<TcpStream> = held.collect();
        self.full = Some((socket, held));
        Some(address)
    }

    /// Returns twice the connect timeout, so that a busy machine does not exceed this time.
    fn patience(&self) -> Duration {
        Duration::from_secs(120)
    }
}

mod with_checksums {
    use super::{IwarpOptions, Tcp};

    fn make() -> Tcp {
        Tcp::new(&IwarpOptions::default())
    }

    rtrs_core::fabric_conformance!(make);
}

mod without_checksums {
    use super::{IwarpOptions, Tcp};

    fn make() -> Tcp {
        Tcp::new(&IwarpOptions { crc: false, ..IwarpOptions::default() })
    }

    rtrs_core::fabric_conformance!(make);
}

/// The suite with region and protection domain numbers around 2^32.
mod with_late_numbers {
    use super::{IwarpFabric, IwarpOptions, IwarpShared, Tcp};

    fn make() -> Tcp {
        let near = u64::from(u32::MAX) - 1;
        rtrs_core::mem::skip_ids_to(near);
        let shared = [(); 2].map(|()| IwarpShared::with_domains_from(near));
        Tcp::sharing(shared, |ring, shared, _| {
            IwarpFabric::new(ring, shared, IwarpOptions::default())
        })
    }

    rtrs_core::fabric_conformance!(make);
}

mod with_certificates {
    use super::{
        Tcp, TestDir, TlsClientConfig, TlsDir, TlsEndpoint, TlsServerConfig, certificates,
    };

    fn make() -> Tcp {
        let dir = TestDir::new("conformance");
        certificates(&dir.0);
        let dir = TlsDir(dir.0.clone());
        let server = TlsServerConfig::with_certificates(&dir).expect("the server's certificate");
        let client = TlsClientConfig::with_certificates(&dir, None).expect("the client's");
        let server = TlsEndpoint::server(server).expect("threads");
        Tcp::secure(&server, &TlsEndpoint::client(client).expect("threads"))
    }

    rtrs_core::fabric_conformance!(make);
}

mod with_raw_keys {
    use super::{Clients, PrivateKey, Tcp, TestDir, TlsClientConfig, TlsEndpoint, TlsServerConfig};

    fn make() -> Tcp {
        let dir = TestDir::new("conformance");
        let [server, client] = [(); 2].map(|()| PrivateKey::generate().expect("random numbers"));
        let list = dir.0.join("clients");
        std::fs::write(&list, format!("db1 {}\n", client.public())).expect("the list");
        let clients = Clients::read(&list).expect("the list");
        let listening = TlsServerConfig::with_keys(&server, clients).expect("a key");
        let connecting = TlsClientConfig::with_keys(&client, &[server.public()]).expect("a key");
        let listening = TlsEndpoint::server(listening).expect("threads");
        Tcp::secure(&listening, &TlsEndpoint::client(connecting).expect("threads"))
    }

    rtrs_core::fabric_conformance!(make);
}
