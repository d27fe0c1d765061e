//! Tests of the provider over TLS: refused peers and the alerts they receive, and peers that misuse
//! records.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use super::{BOUND, LIMITS, Node, either, request};
use crate::fabric::iwarp::mpa::StartFrame;
use crate::fabric::iwarp::tls::KEY_RECORDS;
use crate::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use crate::fabric::{
    Access, CloseReason, ConnectFailure, Fabric, FabricEvent, Listener, PrivateData, SgeList, WcOp,
    WcStatus, Who, WrOp,
};
use crate::ids::QpNum;
use crate::mem::Region;
use crate::rt::Ring;
use crate::tests::certificates::{Authority, TestDir, Wanted, certificates};
use crate::time::Duration;
use crate::tls::{TlsClientConfig, TlsDir, TlsEndpoint, TlsServerConfig};

impl Node {
    fn secure(options: IwarpOptions, endpoint: Arc<TlsEndpoint>) -> Self {
        let ring = Ring::new(256).unwrap();
        let fabric = IwarpFabric::with_tls(&ring, IwarpShared::new(), options, endpoint);
        let mut fabric = fabric.unwrap();
        let pd = fabric.alloc_pd(super::ANY).unwrap();
        let region = Region::new(8 << 20).unwrap();
        let access = Access { local_write: true, remote_write: true, remote_read: true };
        let mr = pd.register(&region, access).unwrap();
        Self { ring, fabric, pd, mr }
    }
}

struct Place {
    dir: TestDir,
    authority: Authority,
}

impl Place {
    fn new() -> Self {
        let dir = TestDir::new("secure");
        let authority = certificates(&dir.0);
        Self { dir, authority }
    }

    fn tls_dir(&self) -> TlsDir {
        TlsDir(self.dir.0.clone())
    }

    fn server(&self, options: IwarpOptions) -> Node {
        let config = TlsServerConfig::with_certificates(&self.tls_dir()).unwrap();
        Node::secure(options, TlsEndpoint::server(config).unwrap())
    }

    fn client(&self) -> Node {
        let config = TlsClientConfig::with_certificates(&self.tls_dir(), None).unwrap();
        Node::secure(IwarpOptions::default(), TlsEndpoint::client(config).unwrap())
    }

    /// Returns the rustls configuration of a client.
    fn config(&self) -> Arc<ClientConfig> {
        TlsClientConfig::with_certificates(&self.tls_dir(), None).unwrap().rustls
    }
}

/// Runs client and server, and returns the reason why the connection attempt failed.
fn attempt(client: &mut Node, server: &mut Node) -> String {
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    client.connect(address, BOUND);
    match either(client, server) {
        (true, FabricEvent::ConnectFailed { failure, .. }) => match failure {
            ConnectFailure::Failed(reason) => reason.to_string(),
            ConnectFailure::Rejected(_) => panic!("refused by RTRS"),
        },
        (_, event) => panic!("{event:?}"),
    }
}

#[test]
fn a_refused_client_gets_the_reason() {
    let place = Place::new();
    let mut server = place.server(IwarpOptions::default());
    let expired = Wanted { years: (2020, 2021), ..Wanted::CLIENT };
    place.authority.issue(&place.dir.0, &expired);
    let text = attempt(&mut place.client(), &mut server);
    assert!(text.contains("our certificate has expired"), "{text}");
    assert!(crate::tls::hint(&text).is_some());
    Authority::new().issue(&place.dir.0, &Wanted::CLIENT);
    let text = attempt(&mut place.client(), &mut server);
    assert!(text.contains("not signed by the CA that the peer trusts"), "{text}");
    place.authority.issue(&place.dir.0, &Wanted::CLIENT);
    place.authority.revoke(&place.dir.0, &[Wanted::CLIENT.serial]);
    let text = attempt(&mut place.client(), &mut place.server(IwarpOptions::default()));
    assert!(text.contains("our certificate is revoked"), "{text}");
}

#[test]
fn plain_and_tls_ends_do_not_connect() {
    let place = Place::new();
    let plain = || Node::new(IwarpOptions::default());
    let text = attempt(&mut plain(), &mut place.server(IwarpOptions::default()));
    assert!(text.contains("the server accepts only TLS on this port; use tls://"), "{text}");
    let text = attempt(&mut place.client(), &mut plain());
    assert!(text.contains("during the TLS handshake"), "{text}");
}

#[test]
fn slow_handshakes_are_bounded_in_number_and_time() {
    let options = IwarpOptions {
        half_open_max: 4,
        startup_timeout: Duration::from_millis(400),
        ..IwarpOptions::default()
    };
    let mut server = Place::new().server(options);
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut peers: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    let hello = [22, 3, 1, 1, 0, 1, 0, 0, 0xfc, 3, 3];
    let end = server.now() + BOUND;
    let mut at = 0;
    let mut seen = 0;
    loop {
        // An occasional byte does not extend the timeout.
        for peer in &mut peers {
            let _ = peer.write_all(&hello[at % hello.len()..][..1]);
        }
        at += 1;
        for _ in 0..20 {
            assert!(server.turn().is_none());
            seen = seen.max(server.fabric.half_open());
        }
        let _ = server.ring.turn_or_sleep(Some(Duration::from_millis(20)));
        assert!(server.fabric.half_open() <= 4);
        assert!(server.now() < end, "the connections stay");
        if seen == 4 && server.fabric.half_open() == 0 && at > 20 {
            break;
        }
    }
}

/// Client that uses rustls directly and can misuse records.
struct Rogue {
    socket: TcpStream,
    tls: ClientConnection,
}

impl Rogue {
    /// Connects and receives the server's answer.
    fn connect(place: &Place, server: &mut Node) -> (Self, QpNum) {
        let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nonblocking(true).unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let tls = ClientConnection::new(place.config(), name).unwrap();
        let mut rogue = Self { socket, tls };
        let ask = StartFrame::request(false, false, PrivateData::new(b"rogue")).encode();
        rogue.tls.writer().write_all(&ask).unwrap();
        let end = server.now() + BOUND;
        let asked = loop {
            assert!(server.now() < end, "no request");
            rogue.turn();
            if let Some(event) = server.turn() {
                break request(event);
            }
        };
        assert_eq!(asked.identity.who, Who::Certificate("db1".into()));
        let now = server.now();
        let pd = Arc::clone(&server.pd);
        let qp = server.fabric.accept(now, &pd, asked, LIMITS, &PrivateData::EMPTY).unwrap();
        let mut answer = [0; 20];
        let mut established = false;
        while answer[0] == 0 || !established {
            assert!(server.now() < end, "no answer");
            rogue.turn();
            established |= matches!(server.turn(), Some(FabricEvent::Established { .. }));
            let _ = rogue.tls.reader().read(&mut answer);
        }
        assert_eq!(&answer[..16], b"MPA ID Rep Frame");
        (rogue, qp)
    }

    /// Moves records in both directions.
    fn turn(&mut self) {
        while self.tls.wants_write() && self.tls.write_tls(&mut self.socket).is_ok() {}
        while self.tls.wants_read() {
            match self.tls.read_tls(&mut self.socket) {
                Ok(count) if count > 0 => {
                    let _ = self.tls.process_new_packets();
                }
                _ => break,
            }
        }
    }

    /// Sends an empty Send with message number `msn`.
    fn send(&mut self, msn: u32) {
        let mut frame = vec![0, 26, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0];
        frame.extend(msn.to_be_bytes());
        // Offset, then the prefix of RTRS sends, padding and an unused checksum.
        frame.extend([0; 4 + 8 + 4]);
        self.tls.writer().write_all(&frame).unwrap();
        self.turn();
    }
}

/// Returns the server's close reason and the alert that the peer receives.
fn ends(rogue: &mut Rogue, server: &mut Node) -> (CloseReason, String) {
    let mut reason = None;
    let mut heard = String::new();
    let end = server.now() + BOUND;
    // The alert may arrive after the server has reported the close.
    while reason.is_none() || heard.is_empty() {
        assert!(server.now() < end, "the connection stays, or there is no alert: {reason:?}");
        match server.turn() {
            Some(FabricEvent::Closed { reason: why, .. }) => reason = Some(why),
            Some(FabricEvent::Completion(_)) | None => {}
            Some(event) => panic!("{event:?}"),
        }
        match rogue.tls.read_tls(&mut rogue.socket) {
            Ok(0) => rogue.socket.shutdown(std::net::Shutdown::Both).unwrap_or_default(),
            Ok(_) => {
                if let Err(error) = rogue.tls.process_new_packets() {
                    heard = format!("{error:?}");
                }
            }
            Err(_) => {}
        }
    }
    (reason.unwrap(), heard)
}

#[test]
fn a_peer_may_update_its_keys_at_a_limited_rate() {
    let place = Place::new();
    let mut server = place.server(IwarpOptions::default());
    let (mut rogue, qp) = Rogue::connect(&place, &mut server);
    server.fabric.post_recv(qp, 7, None).unwrap();
    for _ in 0..3 {
        rogue.tls.refresh_traffic_keys().unwrap();
        rogue.turn();
    }
    rogue.send(1);
    let done = server.completion();
    assert_eq!((done.wr_id, done.status), (7, WcStatus::Success));
    for _ in 0..2 {
        rogue.tls.refresh_traffic_keys().unwrap();
        rogue.turn();
    }
    let (reason, heard) = ends(&mut rogue, &mut server);
    assert_eq!(reason, CloseReason::Protocol("too many KeyUpdates".into()));
    assert!(heard.contains("UnexpectedMessage"), "{heard}");
}

#[test]
fn invalid_records_end_the_connection() {
    let long = [&[23, 3, 3, 0x41, 1][..], &[0; 64]].concat();
    let damaged = [&[23, 3, 3, 0, 64][..], &[9; 64]].concat();
    for (bytes, text, alert) in [
        (&long[..], "a record that is too long", "RecordOverflow"),
        (&damaged, "a record that cannot be decrypted", "BadRecordMac"),
        (&[22, 3, 3, 0, 1, 0], "a record in clear text", "UnexpectedMessage"),
        (b"MPA ID", "bytes that are not a TLS record", "DecodeError"),
    ] {
        let place = Place::new();
        let mut server = place.server(IwarpOptions::default());
        let (mut rogue, _) = Rogue::connect(&place, &mut server);
        rogue.socket.write_all(bytes).unwrap();
        let (reason, heard) = ends(&mut rogue, &mut server);
        assert_eq!(reason, CloseReason::Protocol(text.into()));
        assert!(heard.contains(alert), "{heard}");
    }
}

#[test]
fn a_close_without_close_notify_is_a_loss() {
    for part in [&b""[..], &[23, 3, 3, 0, 64, 1, 2, 3]] {
        let place = Place::new();
        let mut server = place.server(IwarpOptions::default());
        let (rogue, _) = Rogue::connect(&place, &mut server);
        (&rogue.socket).write_all(part).unwrap();
        rogue.socket.shutdown(std::net::Shutdown::Write).unwrap();
        let CloseReason::Lost(text) = server.closed() else { panic!("an orderly end") };
        assert!(text.contains("without the peer's close_notify"), "{text}");
    }
    let place = Place::new();
    let mut server = place.server(IwarpOptions::default());
    let (mut rogue, _) = Rogue::connect(&place, &mut server);
    rogue.tls.send_close_notify();
    rogue.turn();
    assert_eq!(server.closed(), CloseReason::Peer);
}

#[test]
fn keys_are_replaced_before_their_limit() {
    let place = Place::new();
    let (mut client, mut server) = (place.client(), place.server(IwarpOptions::default()));
    let address = server.fabric.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let cq = client.connect(address, BOUND);
    let asked = request(either(&mut client, &mut server).1);
    let now = server.now();
    let answer = PrivateData::EMPTY;
    let sq = server.fabric.accept(now, &server.pd, asked, LIMITS, &answer).unwrap();
    let mut up = 0;
    while up < 2 {
        let event = either(&mut client, &mut server).1;
        up += u32::from(matches!(event, FabricEvent::Established { .. }));
    }
    // Each send is one record, and each side changes its key twice.
    for number in 0..KEY_RECORDS * 2 + 100 {
        exchange(&mut client, cq, &mut server, sq, number);
        exchange(&mut server, sq, &mut client, cq, number);
    }
}

/// Sends a message from one node to the other.
fn exchange(from: &mut Node, qp: QpNum, to: &mut Node, peer: QpNum, number: u64) {
    to.fabric.post_recv(peer, number, None).unwrap();
    let op = WrOp::Send { imm: Some(9), invalidate: None };
    from.send(qp, number, op, SgeList::EMPTY);
    let mut done = 0;
    while done < 2 {
        match either(from, to).1 {
            FabricEvent::Completion(wc) => {
                assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, number));
                assert!(matches!(wc.op, WcOp::Send | WcOp::Recv), "{wc:?}");
                done += 1;
            }
            event => panic!("{event:?}"),
        }
    }
}
