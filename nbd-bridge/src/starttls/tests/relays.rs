//! Tests with real sockets and real TLS, in which the test plays the engine.

use std::net::TcpListener;
use std::path::Path;

use rtrs_core::tests::certificates::{Authority, TestDir, Wanted, certificates};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use socket2::{Domain, Socket, Type};

use super::*;
use crate::proto::wire::{Greeting, OptionHeader, OptionReplyHeader, magic, opt, rep};

const PATIENCE: Duration = Duration::from_secs(60);

struct Place {
    dir: TestDir,
    authority: Authority,
    listener: TcpListener,
    relays: Arc<Relays>,
}

impl Place {
    fn new(mode: TlsMode, max: usize, times: (Duration, Duration)) -> Self {
        let dir = TestDir::new("starttls");
        let authority = certificates(&dir.0);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relays = Relays::timed(mode, TlsDir(dir.0.clone()), max, times).unwrap();
        Self { dir, authority, listener, relays }
    }

    fn patient(mode: TlsMode) -> Self {
        Self::new(mode, 4, (PATIENCE, PATIENCE))
    }

    /// Connects a client. Also returns the engine's end of the connection, if there is one.
    fn connect(&self) -> (TcpStream, Option<UnixStream>) {
        self.connect_from(1, Clock.now())
    }

    /// Connects a client from 127.0.0.`host` at this time.
    fn connect_from(&self, host: u8, now: Instant) -> (TcpStream, Option<UnixStream>) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, host], 0)).into()).unwrap();
        socket.connect(&self.listener.local_addr().unwrap().into()).unwrap();
        let client = TcpStream::from(socket);
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let (accepted, _) = self.listener.accept().unwrap();
        let engine = self.relays.start(now, accepted.into()).map(UnixStream::from);
        if let Some(engine) = &engine {
            engine.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        (client, engine)
    }

    /// Connects a client and exchanges flags.
    fn greeted(&self) -> (TcpStream, UnixStream) {
        let (mut client, engine) = self.connect();
        let mut engine = engine.unwrap();
        let greeting = Greeting { version: magic::OPTION, flags: 3 }.encode();
        engine.write_all(&greeting).unwrap();
        assert_eq!(take::<{ Greeting::LEN }>(&mut client), greeting);
        client.write_all(&[0, 0, 0, 3]).unwrap();
        assert_eq!(take::<4>(&mut engine), [0, 0, 0, 3]);
        (client, engine)
    }

    /// Connects a client and enters the transmission phase without TLS.
    fn plain(&self) -> (TcpStream, UnixStream) {
        let (mut client, mut engine) = self.greeted();
        export_name(&mut client, &mut engine);
        (client, engine)
    }

    /// Connects a client and enters the transmission phase over TLS.
    fn secure(&self) -> (Secure, UnixStream) {
        let (mut client, mut engine) = self.greeted();
        starttls(&mut client);
        let mut client = secure(&self.dir.0, client);
        export_name(&mut client, &mut engine);
        (client, engine)
    }

    fn wait_gone(&self) {
        self.wait_until("all are gone", |open| open.ends.is_empty());
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&Open) -> bool) {
        let until = std::time::Instant::now() + PATIENCE;
        while !is_so(&lock(&self.relays.open)) {
            assert!(std::time::Instant::now() < until, "{what}: {:?}", self.relays);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

type Secure = StreamOwned<ClientConnection, TcpStream>;

fn take<const N: usize>(from: &mut impl Read) -> [u8; N] {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes).unwrap();
    bytes
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    [&OptionHeader { option, len }.encode()[..], data].concat()
}

fn starttls(client: &mut TcpStream) {
    client.write_all(&option(opt::STARTTLS, &[])).unwrap();
    let ack = OptionReplyHeader { option: opt::STARTTLS, reply: rep::ACK, len: 0 };
    assert_eq!(take::<{ OptionReplyHeader::LEN }>(client), ack.encode());
}

fn export_name(client: &mut impl Write, engine: &mut UnixStream) {
    let name = option(opt::EXPORT_NAME, b"disk");
    client.write_all(&name).unwrap();
    client.flush().unwrap();
    assert_eq!(take::<20>(engine)[..], name);
}

/// Creates the client's end of TLS; the handshake takes place with the first bytes.
fn secure(dir: &Path, socket: TcpStream) -> Secure {
    let certificates = |name| -> Vec<_> {
        CertificateDer::pem_file_iter(dir.join(name)).unwrap().map(Result::unwrap).collect()
    };
    let mut roots = RootCertStore::empty();
    for ca in certificates("ca-cert.pem") {
        roots.add(ca).unwrap();
    }
    let key = PrivateKeyDer::from_pem_file(dir.join("client-key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates("client-cert.pem"), key)
        .unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), socket)
}

/// Reads until the other side ends the connection, cleanly or not.
fn is_closed(from: &mut impl Read) -> bool {
    match from.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
    }
}

/// Reads everything until the other side ends the connection, cleanly or not.
fn closes(from: &mut impl Read) -> bool {
    match io::copy(from, &mut io::sink()) {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
    }
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
        .collect()
}

/// Sends and receives at both ends concurrently.
fn exchange(client: &mut Secure, engine: &UnixStream, bytes: usize) {
    let (to, fro) = (pattern(bytes, 1), pattern(bytes, 2));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut got = vec![0; bytes];
            (&mut &*engine).read_exact(&mut got).unwrap();
            got
        });
        scope.spawn(|| (&mut &*engine).write_all(&fro).unwrap());
        client.write_all(&to).unwrap();
        client.flush().unwrap();
        let mut got = vec![0; bytes];
        client.read_exact(&mut got).unwrap();
        assert!(got == fro, "other bytes at the client");
        assert!(reader.join().unwrap() == to, "other bytes at the engine");
    });
}

#[test]
fn data_passes_both_ways_over_tls_and_both_ends_close_cleanly() {
    let place = Place::patient(TlsMode::Require);
    let (mut client, mut engine) = place.secure();
    exchange(&mut client, &engine, 5 << 20);
    // The client ends first, and still receives the engine's remaining replies.
    client.write_all(b"last").unwrap();
    client.conn.send_close_notify();
    client.flush().unwrap();
    assert_eq!(&take::<4>(&mut engine), b"last");
    assert!(is_closed(&mut engine));
    engine.write_all(&pattern(1 << 20, 3)).unwrap();
    drop(engine);
    let mut got = Vec::new();
    client.read_to_end(&mut got).expect("close_notify");
    assert!(got == pattern(1 << 20, 3));
    place.wait_gone();
    // The engine ends first, with bytes in transit.
    let (mut client, mut engine) = place.secure();
    engine.write_all(&pattern(1 << 20, 4)).unwrap();
    drop(engine);
    let mut got = Vec::new();
    client.read_to_end(&mut got).expect("close_notify");
    assert!(got == pattern(1 << 20, 4));
    place.wait_gone();
}

#[test]
fn a_plain_client_is_relayed_with_on_and_refused_with_require() {
    let place = Place::patient(TlsMode::On);
    let (mut client, mut engine) = place.plain();
    client.write_all(b"request").unwrap();
    assert_eq!(&take::<7>(&mut engine), b"request");
    engine.write_all(b"reply").unwrap();
    assert_eq!(&take::<5>(&mut client), b"reply");
    drop(client);
    assert!(is_closed(&mut engine));
    drop(engine);
    place.wait_gone();
    let place = Place::patient(TlsMode::Require);
    let (mut client, mut engine) = place.greeted();
    client.write_all(&option(opt::EXPORT_NAME, b"disk")).unwrap();
    assert!(is_closed(&mut client) && is_closed(&mut engine));
    place.wait_gone();
}

#[test]
fn plain_text_after_starttls_is_discarded() {
    for mode in [TlsMode::On, TlsMode::Require] {
        let place = Place::patient(mode);
        let (mut client, mut engine) = place.greeted();
        let go = option(opt::GO, b"\0\0\0\x04disk\0\0");
        client.write_all(&[option(opt::STARTTLS, &[]), go].concat()).unwrap();
        let _ = take::<{ OptionReplyHeader::LEN }>(&mut client);
        assert!(is_closed(&mut engine), "the engine has it");
        // The client receives an alert.
        let mut got = Vec::new();
        let _ = client.read_to_end(&mut got);
        assert!(got.is_empty() || got[0] == 21, "{got:?}");
        drop(client);
        place.wait_gone();
    }
}

#[test]
fn only_unrevoked_certificates_of_the_ca_are_accepted() {
    let place = Place::patient(TlsMode::Require);
    let dir = &place.dir.0;
    let is_admitted = || {
        let (mut client, mut engine) = place.greeted();
        starttls(&mut client);
        let mut client = secure(dir, client);
        let _ = client.write_all(&option(opt::EXPORT_NAME, b"disk"));
        let _ = client.flush();
        let is_admitted = engine.read_exact(&mut [0; 20]).is_ok();
        drop(engine);
        is_admitted
    };
    assert!(is_admitted());
    Authority::new().issue(dir, &Wanted::CLIENT);
    assert!(!is_admitted(), "another CA");
    place.authority.issue(dir, &Wanted { years: (2020, 2021), ..Wanted::CLIENT });
    assert!(!is_admitted(), "it has expired");
    place.authority.issue(dir, &Wanted::CLIENT);
    assert!(is_admitted());
    // The files are reread shortly afterwards.
    place.authority.revoke(dir, &[Wanted::CLIENT.serial]);
    std::thread::sleep(REREAD);
    assert!(!is_admitted(), "it is revoked");
    // An unusable directory changes nothing.
    place.authority.revoke(dir, &[]);
    std::thread::sleep(REREAD);
    assert!(is_admitted());
    // Neither does an expired certificate, which would also be refused at startup.
    place.authority.issue(dir, &Wanted { years: (2020, 2021), ..Wanted::SERVER });
    std::thread::sleep(REREAD);
    assert!(is_admitted());
    let error = Relays::new(TlsMode::Require, TlsDir(dir.clone()), 1).unwrap_err();
    assert!(error.to_string().contains("expired on 2021-01-01"), "{error}");
    std::fs::remove_file(dir.join("server-key.pem")).unwrap();
    std::thread::sleep(REREAD);
    assert!(is_admitted());
    place.wait_gone();
}

#[test]
fn refusals_are_rate_limited_by_reason() {
    let place = Place::patient(TlsMode::Require);
    let peer = "127.0.0.1:7".parse().unwrap();
    let left_out = |why: &'static str| {
        place.relays.refuse(Some(&peer), &why.into());
        lock(&place.relays.lines).deadline().is_some()
    };
    let expired = "the TLS handshake failed: the peer's certificate has expired";
    assert!(!left_out("no TLS, but nbd-tls is require"));
    assert!(!left_out(expired));
    // Further lines are admitted only after a few seconds.
    assert!((0..5).any(|_| left_out(expired)));
    place.wait_gone();
}

#[test]
fn a_revoked_client_is_refused_even_if_our_certificate_has_expired() {
    let place = Place::patient(TlsMode::Require);
    let dir = TlsDir(place.dir.0.clone());
    place.authority.issue(&dir.0, &Wanted { years: (2020, 2021), ..Wanted::SERVER });
    // The certificate was valid at startup.
    lock(&place.relays.loaded).config = TlsServerConfig::for_nbd(&dir).unwrap();
    place.authority.revoke(&dir.0, &[Wanted::CLIENT.serial]);
    std::thread::sleep(REREAD);
    let now = TlsServerConfig::for_nbd(&dir).unwrap();
    assert_eq!(now.changes_since(&lock(&place.relays.loaded).config), ["ca-crl.pem"]);
    assert_eq!(now.changes_since(&place.relays.config()), [""; 0], "the list counts");
    // A different invalid certificate is not accepted, nor is any file read along with it.
    place.authority.issue(&dir.0, &Wanted { years: (2020, 2021), ..Wanted::SERVER });
    place.authority.revoke(&dir.0, &[]);
    std::thread::sleep(REREAD);
    assert_eq!(now.changes_since(&place.relays.config()), [""; 0]);
}

#[test]
fn a_stalled_client_is_closed_in_time() {
    let short = Duration::from_millis(200);
    // Timeouts in the flags, in an option, and in the TLS handshake, which has its own timeout.
    let place = Place::new(TlsMode::Require, 4, (short, PATIENCE));
    let greeting = Greeting { version: magic::OPTION, flags: 3 }.encode();
    let half = [&[0, 0, 0, 3][..], &option(opt::LIST, &[])[..9]].concat();
    for says in [&half[..0], &half[..]] {
        let (mut client, engine) = place.connect();
        // The timeout may expire before the relay has passed these bytes on.
        let _ = engine.as_ref().unwrap().write_all(&greeting);
        let _ = client.write_all(says);
        assert!(closes(&mut client));
    }
    place.wait_gone();
    let place = Place::new(TlsMode::Require, 4, (PATIENCE, short));
    let (mut client, mut engine) = place.greeted();
    starttls(&mut client);
    assert!(is_closed(&mut engine));
    assert!(is_closed(&mut client));
    drop(client);
    place.wait_gone();
}

#[test]
fn connections_are_bounded_and_close_on_request() {
    let place = Place::new(TlsMode::On, 2, (PATIENCE, PATIENCE));
    let begin = Clock.now();
    let (mut served, engine) = place.plain();
    // The relay may already have passed on the last option.
    place.wait_until("a client is served", |open| open.served == 1);
    let (mut waiting, _other) = place.greeted();
    // At this time, no client has been silent for long.
    let (mut third, none) = place.connect_from(1, begin);
    assert!(none.is_none() && is_closed(&mut third));
    place.relays.stop();
    assert!(is_closed(&mut waiting), "it was not served yet");
    assert!(place.connect().1.is_none());
    (&engine).write_all(b"answer").unwrap();
    drop(engine);
    assert_eq!(&take::<6>(&mut served), b"answer");
    assert!(is_closed(&mut served));
    place.wait_gone();
    let place = Place::patient(TlsMode::On);
    let (mut served, mut engine) = place.plain();
    place.relays.abort();
    assert!(is_closed(&mut served) && is_closed(&mut engine));
    place.wait_gone();
}

#[test]
fn silent_clients_do_not_keep_others_out() {
    let place = Place::new(TlsMode::Require, 4, (PATIENCE, PATIENCE));
    let (_served, _engine) = place.secure();
    place.wait_until("a client is served", |open| open.served == 1);
    let begin = Clock.now();
    let (mut silent, _engines): (Vec<_>, Vec<_>) =
        (0..3).map(|_| place.connect_from(1, begin)).unzip();
    // A different source is admitted immediately, in place of the oldest client from the source
    // with the most clients.
    let (mut other, other_engine) = place.connect_from(2, begin);
    let mut other_engine = other_engine.unwrap();
    assert!(is_closed(&mut silent[0]));
    // The same source is admitted once a client has been silent for a while.
    let (mut refused, none) = place.connect_from(1, begin);
    assert!(none.is_none() && is_closed(&mut refused));
    let later = begin + SILENT_AFTER;
    let (mut client, engine) = place.connect_from(1, later);
    assert!(engine.is_some() && is_closed(&mut silent[1]));
    let (_newest, newest_engine) = place.connect_from(1, later);
    assert!(newest_engine.is_some() && is_closed(&mut silent[2]));
    // A source with one client keeps that client, although it is the oldest, while another source
    // has two clients.
    let (_third, third_engine) = place.connect_from(3, later);
    assert!(third_engine.is_some() && is_closed(&mut client));
    let greeting = Greeting { version: magic::OPTION, flags: 3 }.encode();
    other_engine.write_all(&greeting).unwrap();
    assert_eq!(take::<{ Greeting::LEN }>(&mut other), greeting);
    assert_eq!(lock(&place.relays.open).served, 1, "it does not give way");
    place.relays.abort();
    place.wait_gone();
}

#[test]
fn evicted_clients_count_until_their_threads_have_ended() {
    let mut open = Open::default();
    let now = Clock.now();
    let source = Source::V4;
    let add = |open: &mut Open, host, now| {
        let ends = ends(open, source(host), now);
        open.negotiating.add(ends.number, ends.source);
        open.ends.push(ends);
    };
    for _ in 0..2 {
        assert!(open.make_room(source(1), 2, now));
        add(&mut open, 1, now);
    }
    for host in 2..4 {
        assert!(open.make_room(source(host), 2, now + SILENT_AFTER));
        add(&mut open, host, now);
    }
    assert_eq!((open.negotiating.total(), open.ends.len()), (2, 4));
    assert!(!open.make_room(source(4), 2, now + SILENT_AFTER));
    let first = Arc::clone(&open.ends[0]);
    open.remove(&first);
    assert!(open.make_room(source(4), 2, now + SILENT_AFTER));
    // An evicted client is not served, even if its negotiation has just ended.
    let evicted = Arc::clone(&open.ends[0]);
    assert!(!open.served(&evicted));
}

/// Creates a connection of this source that no thread serves.
fn ends(open: &mut Open, source: Source, since: Instant) -> Arc<Ends> {
    open.last_number += 1;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (engine, _) = UnixStream::pair().unwrap();
    let serving = AtomicBool::new(false);
    Arc::new(Ends { number: open.last_number, source, since, client, engine, serving })
}

/// Whether the only connection's socket to the engine accepts no more bytes.
fn is_full(open: &Open) -> bool {
    let socket = &open.ends[0].engine;
    let queued = rtrs_core::rt::unacknowledged_bytes(socket).unwrap();
    queued >= socket2::SockRef::from(socket).send_buffer_size().unwrap()
}

/// Writes until the engine, which reads nothing, accepts no more bytes. Leaves room for the
/// client's end of stream.
fn fill(place: &Place, client: &mut impl Write, engine: &UnixStream) {
    const PART: usize = 8 << 10;
    let mut passed = 0;
    loop {
        let was_full = is_full(&lock(&place.relays.open));
        client.write_all(&[7; PART]).unwrap();
        client.flush().unwrap();
        if was_full {
            // These bytes stay with the relay.
            break;
        }
        passed += PART;
        place.wait_until("the engine has the bytes or is full", |open| {
            is_full(open) || rtrs_core::rt::unread(engine).unwrap() == passed
        });
    }
}

#[test]
fn unread_requests_end_before_the_next_connection_starts() {
    for tls in [false, true] {
        let place = Place::patient(TlsMode::On);
        let (old, stalled) = if tls {
            let (mut client, engine) = place.secure();
            fill(&place, &mut client, &engine);
            (client.sock, engine)
        } else {
            let (mut client, engine) = place.plain();
            fill(&place, &mut client, &engine);
            (client, engine)
        };
        assert_eq!(peer_end(&stalled), PeerEnd::Open);
        old.shutdown(Shutdown::Write).unwrap();
        let (mut new, mut engine) = place.plain();
        assert_eq!(peer_end(&stalled), PeerEnd::Open, "the new one has sent no request yet");
        new.write_all(b"request").unwrap();
        assert_eq!(&take::<7>(&mut engine), b"request");
        // The engine now checks its sockets, and drops what it has not read.
        assert_eq!(peer_end(&stalled), PeerEnd::Gone);
        drop((old, stalled, new, engine));
        place.wait_gone();
    }
}

#[test]
fn a_corrupt_record_closes_the_connection() {
    let place = Place::patient(TlsMode::Require);
    let (client, mut engine) = place.secure();
    (&client.sock).write_all(&[23, 3, 3, 0, 32]).unwrap();
    (&client.sock).write_all(&[7; 32]).unwrap();
    assert!(is_closed(&mut engine));
    place.wait_gone();
}
