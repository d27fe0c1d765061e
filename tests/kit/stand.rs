//! Usual test setup: a scratch directory, one server and one session attached to it. Fields are
//! dropped in order: the session before the server, and the server before the directory.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nbd::client::{NbdClient, handshake};

use crate::client::{Client, ClientBuilder, Front};
use crate::scratch::Scratch;
use crate::server::{Server, ServerBuilder};

/// Maximum time for any reply from an NBD server.
const REPLY_TIME_MAX: Duration = Duration::from_secs(120);

/// A server, a session and a directory.
#[derive(Debug)]
pub struct Stand {
    /// Session with export `vol0` attached.
    pub client: Client,
    /// The server.
    pub server: Server,
    /// Directory for the test.
    pub scratch: Scratch,
}

impl Stand {
    /// Starts the server and attaches its export `vol0` over one path.
    ///
    /// # Panics
    /// Panics if either fails to start.
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

    /// Starts a stand with a memory export of this size (e.g. `256M`), and NBD on a unix socket.
    #[must_use]
    pub fn memory(size: &str) -> Self {
        Self::start(Scratch::new(), Server::builder().export(format!("vol0=mem:{size}")), |c| c)
    }

    /// Starts a stand like [`Self::memory`], but with NBD on TCP.
    #[must_use]
    pub fn memory_tcp(size: &str) -> Self {
        let server = Server::builder().export(format!("vol0=mem:{size}"));
        Self::start(Scratch::new(), server, ClientBuilder::tcp)
    }

    /// Returns the NBD URI.
    #[must_use]
    pub fn uri(&self) -> String {
        self.client.uri()
    }

    /// Detaches the session, stops the server, and checks that both end without errors.
    ///
    /// # Panics
    /// Panics if they do not.
    pub fn finish(mut self) {
        self.server.check_alive();
        self.client.detach();
        let _ = self.server.stop(crate::STOP_TIME_MAX);
    }
}

/// Stream of a unix or TCP connection.
pub trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// Opens a connection to the front end with a time limit on each read and write.
///
/// # Panics
/// Panics if that fails.
pub(crate) fn connect(front: &Front) -> Box<dyn Stream> {
    match front {
        Front::Unix(path) => {
            let stream = UnixStream::connect(path).expect("connect to the NBD socket");
            stream.set_read_timeout(Some(REPLY_TIME_MAX)).expect("set a timeout");
            stream.set_write_timeout(Some(REPLY_TIME_MAX)).expect("set a timeout");
            Box::new(stream)
        }
        Front::Tcp(port) => {
            let stream = TcpStream::connect(("127.0.0.1", *port)).expect("connect to the NBD port");
            stream.set_read_timeout(Some(REPLY_TIME_MAX)).expect("set a timeout");
            stream.set_write_timeout(Some(REPLY_TIME_MAX)).expect("set a timeout");
            stream.set_nodelay(true).expect("set nodelay");
            Box::new(stream)
        }
    }
}

/// Connects the `nbd` crate's client, a third-party implementation, to a session.
///
/// # Panics
/// Panics if the handshake fails.
pub fn nbd_client(client: &Client) -> NbdClient<Box<dyn Stream>> {
    let mut stream = connect(client.front());
    let export = handshake(&mut stream, b"vol0").expect("the nbd crate's handshake");
    NbdClient::new(stream, &export)
}
