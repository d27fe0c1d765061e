//! TLS for NBD clients over TCP (NBD_OPT_STARTTLS), in front of the engine rather than within it.
//!
//! A connection whose client uses TLS, or may start it, is handled by a thread of its own. The
//! engine is given the other end of a pair of unix sockets and is not aware of TLS. The thread
//! first relays the option negotiation (`negotiate.rs`), then performs the TLS handshake, and
//! finally moves bytes (`pipe.rs`). Threads, bytes and times are bounded; see [`Relays`].
//!
//! The engine may serve a client that reconnects only when it knows that the client's earlier
//! connections have ended (`group`). To find out, the engine checks its own sockets, but here these
//! are not the client's. Therefore, before a connection's first request is passed to the engine,
//! the thread checks the clients of all other connections. For those that have disconnected, it
//! shuts down the engine's end: requests that the engine has not read are not carried out.

mod negotiate;
mod pipe;

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rtrs_core::log_limit::{LogLimit, LogLimits};
use rtrs_core::proto::quota::{Quota, Source};
use rtrs_core::rt::{Clock, PeerEnd, peer_end};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::tls::{ProofError, TlsConfigError, TlsDir, TlsServerConfig, cipher_name};
use rustls::ServerConnection;

pub use negotiate::TlsMode;

use crate::conn::HANDSHAKE_TIMEOUT;
use crate::notices::peer;
use negotiate::{Negotiation, Next, Stop};
use pipe::{Pipe, Wire};

/// Maximum number of connections, each with a thread and some 200 KiB.
pub const RELAYS_MAX: usize = 128;
/// Timeout of the TLS handshake. The engine enforces the timeout of the whole negotiation.
const TLS_TIMEOUT: Duration = Duration::from_secs(10);
/// Limits on the time and bytes spent on reading from a refused client.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: u64 = 64 << 10;
/// Time for which loaded certificate files are used for new connections without being reread.
const REREAD: Duration = Duration::from_secs(1);
/// Time after which a connection that is still negotiating gives way to a new one from the same
/// source. A negotiation takes a few round trips.
const SILENT_AFTER: Duration = Duration::from_secs(1);

/// The two sockets of a connection.
#[derive(Debug)]
struct Ends {
    /// Number of the connection; later connections have higher numbers.
    number: u64,
    source: Source,
    since: Instant,
    client: TcpStream,
    engine: UnixStream,
    /// Whether negotiation is complete and requests are passed to the engine.
    serving: AtomicBool,
}

impl Ends {
    fn close(&self) {
        // Fails if the engine's end is already closed.
        let _ = self.engine.shutdown(Shutdown::Both);
        let _ = self.client.shutdown(Shutdown::Both);
    }
}

#[derive(Default)]
struct Open {
    ends: Vec<Arc<Ends>>,
    /// Connections that are still negotiating, by source.
    negotiating: Quota<u64>,
    /// Connections whose negotiation is complete.
    served: usize,
    last_number: u64,
    stopping: bool,
    full: LogLimit,
}

impl Open {
    /// Makes room for a connection from this source, if necessary by evicting the oldest
    /// negotiating connection of the source that has the most, so that silent clients do not keep
    /// others out. Returns false if there is no room.
    fn make_room(&mut self, source: Source, max: usize, now: Instant) -> bool {
        let negotiating = usize::try_from(self.negotiating.total()).unwrap_or(usize::MAX);
        if self.served + negotiating < max {
            return true;
        }
        // Evicted connections count until their threads have ended.
        let victim = self.negotiating.victim().filter(|_| self.ends.len() < 2 * max);
        let victim = victim.and_then(|number| self.ends.iter().find(|ends| ends.number == number));
        let Some(ends) = victim else { return false };
        let has_more = self.negotiating.peers_of(ends.source) > self.negotiating.peers_of(source);
        if !has_more && now.since(ends.since) < SILENT_AFTER {
            return false;
        }
        self.negotiating.remove(ends.number);
        ends.close();
        true
    }

    /// Records that the negotiation of a connection is complete. Returns false if the connection
    /// was evicted or must end.
    fn served(&mut self, ends: &Ends) -> bool {
        if self.stopping || !self.negotiating.remove(ends.number) {
            return false;
        }
        self.served += 1;
        ends.serving.store(true, Ordering::SeqCst);
        true
    }

    /// Removes a connection that has ended.
    fn remove(&mut self, ends: &Arc<Ends>) {
        self.negotiating.remove(ends.number);
        self.served -= usize::from(ends.serving.load(Ordering::SeqCst));
        self.ends.retain(|other| !Arc::ptr_eq(other, ends));
    }
}

/// The certificates, and the time when they were loaded.
struct Loaded {
    config: TlsServerConfig,
    at: Instant,
    failing: LogLimit,
}

/// Connections on a listener whose clients use TLS or may use it.
pub struct Relays {
    mode: TlsMode,
    dir: TlsDir,
    max: usize,
    /// Timeouts of the whole negotiation and of the TLS handshake within it.
    times: (Duration, Duration),
    open: Mutex<Open>,
    loaded: Mutex<Loaded>,
    /// Rate limits for log lines that clients can trigger, by source and kind.
    lines: Mutex<LogLimits<(IpAddr, &'static str)>>,
}

/// Locks a mutex, ignoring poison: no code under these locks can leave inconsistent state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Relays {
    /// Creates relays for at most `max` connections, capped at [`RELAYS_MAX`], with the
    /// certificates in `dir`.
    ///
    /// # Errors
    /// Returns the error for the file that cannot be used.
    pub fn new(mode: TlsMode, dir: TlsDir, max: usize) -> Result<Arc<Self>, TlsConfigError> {
        Self::timed(mode, dir, max, (HANDSHAKE_TIMEOUT, TLS_TIMEOUT))
    }

    fn timed(
        mode: TlsMode,
        dir: TlsDir,
        max: usize,
        times: (Duration, Duration),
    ) -> Result<Arc<Self>, TlsConfigError> {
        let config = TlsServerConfig::for_nbd(&dir)?;
        if let Some(warning) = config.check_own()? {
            tracing::warn!("{warning}");
        }
        for warning in config.file_warnings() {
            tracing::warn!("{warning}");
        }
        let loaded = Loaded { config, at: Clock.now(), failing: LogLimit::default() };
        Ok(Arc::new(Self {
            mode,
            dir,
            max: max.min(RELAYS_MAX),
            times,
            open: Mutex::default(),
            loaded: Mutex::new(loaded),
            lines: Mutex::default(),
        }))
    }

    /// Takes over a client. Returns the engine's end, or None if there are too many clients.
    pub(crate) fn start(self: &Arc<Self>, now: Instant, client: OwnedFd) -> Option<OwnedFd> {
        let (peer, client) = (peer(&client), TcpStream::from(client));
        let source = Source::of(client.peer_addr().ok()?.ip());
        let mut open = lock(&self.open);
        if open.stopping || !open.make_room(source, self.max, now) {
            let count = open.ends.len();
            if let Some(left_out) = open.full.admit(now) {
                let why = format!("{count} TLS connections are already open");
                tracing::warn!(%peer, left_out, "NBD client turned away: {why}");
            }
            return None;
        }
        open.last_number += 1;
        let number = open.last_number;
        let started = UnixStream::pair().and_then(|(engine, other)| {
            let serving = AtomicBool::new(false);
            let ends = Arc::new(Ends { number, source, since: now, client, engine, serving });
            let (relays, own) = (Arc::clone(self), Arc::clone(&ends));
            let thread = std::thread::Builder::new().name("nbd-tls".into());
            // The thread removes itself from the list when it ends.
            drop(thread.spawn(move || relays.serve(&own))?);
            open.negotiating.add(number, source);
            open.ends.push(ends);
            Ok(other)
        });
        match started {
            Ok(other) => Some(other.into()),
            Err(error) => {
                if let Some(left_out) = open.full.admit(now) {
                    tracing::warn!(%peer, left_out, "NBD client turned away: {error}");
                }
                None
            }
        }
    }

    /// Number of open connections.
    pub fn count(&self) -> usize {
        lock(&self.open).ends.len()
    }

    /// Stops accepting clients, and closes connections that are not being served yet. The others
    /// end when the engine closes its end and the client has received the last replies.
    pub fn stop(&self) {
        let mut open = lock(&self.open);
        open.stopping = true;
        for ends in &open.ends {
            if !ends.serving.load(Ordering::SeqCst) {
                ends.close();
            }
        }
    }

    /// Closes all connections.
    pub fn abort(&self) {
        let mut open = lock(&self.open);
        open.stopping = true;
        open.ends.iter().for_each(|ends| ends.close());
    }

    /// Shuts down the other connections whose clients have disconnected, or appear to have.
    fn look(&self, own: &Arc<Ends>) {
        for ends in &lock(&self.open).ends {
            if !Arc::ptr_eq(ends, own) && peer_end(&ends.client) != PeerEnd::Open {
                // The connection's own thread may have closed it just now.
                let _ = ends.engine.shutdown(Shutdown::Both);
            }
        }
    }

    /// Serves one connection on its own thread.
    fn serve(&self, ends: &Arc<Ends>) {
        let _gone = Gone(self, ends);
        let peer = ends.client.peer_addr();
        match self.connect(ends, peer.as_ref().ok()) {
            Ok(Some(wire)) => {
                if !lock(&self.open).served(ends) {
                    return;
                }
                let ended = Pipe::new(&ends.client, &ends.engine, wire).run(|| self.look(ends));
                if let Err(error) = ended {
                    tracing::debug!(?peer, "connection of an NBD client ended: {error}");
                }
            }
            Ok(None) => {}
            Err(why) => tracing::debug!(?peer, "negotiation of an NBD client ended: {why}"),
        }
    }

    /// Negotiates with a client. Returns None when the client ended the handshake.
    fn connect(&self, ends: &Ends, peer: Option<&SocketAddr>) -> Result<Option<Wire>, Stop> {
        let begin = std::time::Instant::now();
        let (whole, handshake) = (begin + self.times.0, self.times.1);
        let mut client = Timed { socket: &ends.client, until: whole };
        let mut engine = Timed { socket: &ends.engine, until: whole };
        let mut negotiation = Negotiation::new(self.mode);
        let next = negotiation
            .greet(&mut client, &mut engine)
            .and_then(|()| negotiation.options(&mut client, &mut engine));
        if negotiation.refused && !matches!(next, Ok(Next::Handshake)) {
            self.refuse(peer, &"no TLS, but nbd-tls is require".into());
        }
        match next? {
            Next::Pipe => return Ok(Some(Wire::Plain)),
            Next::Over => return Ok(None),
            Next::Handshake => {}
        }
        client.until = whole.min(std::time::Instant::now() + handshake);
        let config = self.config();
        let mut conn = shake_hands(&config, &mut client).inspect_err(|error| {
            let rustls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
            let why = match rustls {
                Some(error) => ProofError::with_certificates(error),
                None if error.kind() == io::ErrorKind::UnexpectedEof => {
                    "the client closed the connection".into()
                }
                None => ProofError::new("the connection failed", error.to_string()),
            };
            let text = format!("the TLS handshake failed: {why}");
            self.refuse(peer, &ProofError::new(why.kind(), text));
            linger(&ends.client);
        })?;
        let name = conn.peer_certificates().and_then(|chain| config.name_of(chain));
        let cipher = conn.negotiated_cipher_suite().and_then(|suite| cipher_name(suite.suite()));
        if let Some(left_out) = self.admits_line(peer, "connected") {
            tracing::info!(
                peer = peer.map(tracing::field::display),
                certificate = name.as_deref().unwrap_or("without a name"),
                cipher = cipher.unwrap_or("unknown"),
                left_out,
                "NBD client over TLS"
            );
        }
        negotiation.secured();
        client.until = whole;
        let mut secure = rustls::Stream::new(&mut *conn, &mut client);
        match negotiation.options(&mut secure, &mut engine)? {
            Next::Pipe => Ok(Some(Wire::Tls(conn))),
            Next::Over | Next::Handshake => {
                conn.send_close_notify();
                // The connection ends even if the client does not receive the refusal.
                let _ = conn.complete_io(&mut client);
                Ok(None)
            }
        }
    }

    /// Returns the certificates for a new connection. The files are reread, so that renewals and
    /// revocations take effect without a restart; if a file is invalid, the old contents remain in
    /// use. Our own certificate may expire while in use: revocations take effect even then.
    fn config(&self) -> TlsServerConfig {
        let mut loaded = lock(&self.loaded);
        let now = Clock.now();
        if now.since(loaded.at) >= REREAD {
            loaded.at = now;
            let read = TlsServerConfig::for_nbd(&self.dir);
            let checked = read.and_then(|config| {
                config.check_renewed(&loaded.config).map(|expired| (config, expired))
            });
            let wrong = match checked {
                Ok((config, expired)) => {
                    loaded.config = config;
                    expired
                }
                Err(error) => {
                    let why = error.chain();
                    Some(format!("cannot read nbd-tls-dir again: {why}; the old files stay in use"))
                }
            };
            if let Some(wrong) = wrong
                && let Some(left_out) = loaded.failing.admit(now)
            {
                tracing::warn!(left_out, "{wrong}");
            }
        }
        loaded.config.clone()
    }

    fn refuse(&self, peer: Option<&SocketAddr>, why: &ProofError) {
        if let Some(left_out) = self.admits_line(peer, why.kind()) {
            let peer = peer.map(tracing::field::display);
            tracing::warn!(peer, left_out, "NBD client refused: {why}");
        }
    }

    /// Decides whether to log a line of this kind about a client now. Returns the number of
    /// suppressed lines, or None to suppress this one.
    fn admits_line(&self, peer: Option<&SocketAddr>, kind: &'static str) -> Option<u64> {
        let source = peer.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| source(peer.ip()));
        lock(&self.lines).admit(Clock.now(), (source, kind))
    }
}

/// Returns the address range that counts as one client: an IPv4 address, or an IPv6 /64, which one
/// host may own.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

fn shake_hands(
    config: &TlsServerConfig,
    client: &mut (impl Read + Write),
) -> io::Result<Box<ServerConnection>> {
    let connection = config.connection();
    let mut conn = Box::new(connection.map_err(|e| io::Error::other(e.to_string()))?);
    while conn.is_handshaking() {
        conn.complete_io(client)?;
    }
    Ok(conn)
}

/// Waits briefly for the client to receive the alert and close. If unread data were pending when we
/// close, the system would drop the alert.
fn linger(client: &TcpStream) {
    // Fails if the client has already disconnected.
    let _ = client.shutdown(Shutdown::Write);
    let until = std::time::Instant::now() + LINGER;
    let rest = Timed { socket: client, until }.take(LINGER_BYTES);
    // The result does not matter.
    let _ = io::copy(&mut { rest }, &mut io::sink());
}

impl fmt::Debug for Relays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relays")
            .field("mode", &self.mode)
            .field("dir", &self.dir)
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}

/// Guard that closes a connection and removes it from the list when its thread ends for any reason.
struct Gone<'a>(&'a Relays, &'a Arc<Ends>);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        let Self(relays, own) = self;
        // Requests that the engine has not read are not carried out, unless the client disconnected
        // properly.
        let _ = own.engine.shutdown(Shutdown::Both);
        lock(&relays.open).remove(own);
    }
}

/// A blocking socket with a deadline.
struct Timed<'a, S> {
    socket: &'a S,
    until: std::time::Instant,
}

impl<S: AsFd> Timed<'_, S> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the time limit has expired"));
        }
        Ok(Some(left))
    }
}

fn too_long(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "the time limit has expired")
        }
        _ => error,
    }
}

impl<'a, S: AsFd> Read for Timed<'a, S>
where
    &'a S: Read,
{
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        socket2::SockRef::from(self.socket).set_read_timeout(self.left()?)?;
        let mut socket = self.socket;
        socket.read(bytes).map_err(too_long)
    }
}

impl<'a, S: AsFd> Write for Timed<'a, S>
where
    &'a S: Write,
{
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        socket2::SockRef::from(self.socket).set_write_timeout(self.left()?)?;
        let mut socket = self.socket;
        socket.write(bytes).map_err(too_long)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "tests/relays.rs"]
mod tests;
