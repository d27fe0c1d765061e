//! The usual scene of a test: a scratch directory, one server and one session attached to it.
//! Fields drop in order, the session before the server before the directory.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nbd::client::{NbdClient, handshake};

use crate::client::{Client, ClientBuilder, Front};
use crate::scratch::Scratch;
use crate::server::{Server, ServerBuilder};

/// No single reply of an NBD server may take longer.
const REPLY_TIME_MAX: Duration = Duration::from_secs(30);

/// A server, a session, a directory.
#[derive(Debug)]
pub struct Stand {
    /// The session of export `vol0`.
    pub client: Client,
    /// The server.
    pub server: Server,
    /// A directory for the test.
    pub scratch: Scratch,
}

impl Stand {
    /// Starts the server and attaches its export `vol0` over one path.
    ///
    /// # Panics
    /// When either does not come up.
    #[must_use]
    pub fn start(
        scratch: Scratch,
        server: ServerBuilder,
        client: impl FnOnce(ClientBuilder) -> ClientBuilder,
    ) -> Self {
        let server = server.start();
        let client = client(Client::attach("vol0").path(server.portal())).start();
        Self { client, server, scratch }
    }

    /// A stand on memory of this size (`256M`), NBD on a unix socket.
    #[must_use]
    pub fn memory(size: &str) -> Self {
        Self::start(Scratch::new(), Server::builder().export(format!("vol0=mem:{size}")), |c| c)
    }

    /// As [`Self::memory`] but with NBD on TCP.
    #[must_use]
    pub fn memory_tcp(size: &str) -> Self {
        let server = Server::builder().export(format!("vol0=mem:{size}"));
        Self::start(Scratch::new(), server, ClientBuilder::tcp)
    }

    /// The NBD URI.
    #[must_use]
    pub fn uri(&self) -> String {
        self.client.uri()
    }

    /// Detaches and stops, demanding that both end well.
    ///
    /// # Panics
    /// When they do not.
    pub fn finish(mut self) {
        self.server.check_alive();
        self.client.detach();
        let _ = self.server.stop(crate::STOP_TIME_MAX);
    }
}

/// A stream either way.
pub trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A connection to the front with a bound on each read and write.
///
/// # Panics
/// When it cannot be made.
pub(crate) fn connect(front: &Front) -> Box<dyn Stream> {
    match front {
        Front::Unix(path) => {
            let stream = UnixStream::connect(path).expect("connect to the NBD socket");
            stream.set_read_timeout(Some(REPLY_TIME_MAX)).expect("set a time-out");
            stream.set_write_timeout(Some(REPLY_TIME_MAX)).expect("set a time-out");
            Box::new(stream)
        }
        Front::Tcp(port) => {
            let stream = TcpStream::connect(("127.0.0.1", *port)).expect("connect to the NBD port");
            stream.set_read_timeout(Some(REPLY_TIME_MAX)).expect("set a time-out");
            stream.set_write_timeout(Some(REPLY_TIME_MAX)).expect("set a time-out");
            stream.set_nodelay(true).expect("set nodelay");
            Box::new(stream)
        }
    }
}

/// The `nbd` crate's client on a session: an implementation that is not ours.
///
/// # Panics
/// When the handshake fails.
pub fn nbd_client(client: &Client) -> NbdClient<Box<dyn Stream>> {
    let mut stream = connect(client.front());
    let export = handshake(&mut stream, b"vol0").expect("the nbd crate's handshake");
    NbdClient::new(stream, &export)
}
