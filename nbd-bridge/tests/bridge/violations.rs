//! Tests of clients that violate the protocol, stop anywhere, or arrive in large numbers.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::Ordering::SeqCst;

use nbd_bridge::BridgeConfig;
use rtrs_core::block::Geometry;

use crate::client::{
    Client, DISC, FLUSH, READ, WRITE, ZEROES, go, is_closed, option, pattern, request,
};
use crate::fixture::{Fixture, config, geometry};

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

/// Runs `violation` while a well-behaved client is connected, which must not be affected.
fn beside_a_good_client(violation: impl FnOnce(&Fixture)) {
    let fixture = Fixture::new();
    let mut good = fixture.client(true);
    good.write(0, &pattern(5, 4096));
    violation(&fixture);
    assert!(good.read(0, 4096) == pattern(5, 4096), "the good client's data changed");
    good.disconnect();
    fixture.finish();
}

#[test]
fn a_wrong_magic_closes_the_connection() {
    beside_a_good_client(|fixture| {
        let mut client = fixture.client(false);
        client.stream.write_all(&[0x55; 28]).unwrap();
        assert!(client.is_closed());
        // Requests are in flight.
        fixture.switches.hold.store(true, SeqCst);
        let mut client = fixture.client(true);
        client.send(READ, 0, 1, 0, 1 << 20);
        client.send_write(0, 2, 1 << 20, &pattern(1, 64 << 10));
        client.stream.write_all(&[0; 28]).unwrap();
        fixture.wait("two requests", |report| report.inflight == 2);
        // Once a later handshake is complete, the bytes after the requests have been read.
        fixture.client(false).disconnect();
        fixture.switches.hold.store(false, SeqCst);
        assert!(client.is_closed());
    });
}

#[test]
fn garbage_in_the_handshake_closes_the_connection() {
    beside_a_good_client(|fixture| {
        for garbage in [vec![0xff; 4], [&[0, 0, 0, 3][..], &[7; 64]].concat(), vec![0; 5000]] {
            let mut socket = fixture.socket();
            socket.write_all(&garbage).unwrap();
            let mut greeting = [0; 18];
            socket.read_exact(&mut greeting).unwrap();
            assert!(is_closed(&mut socket));
        }
    });
}

#[test]
fn an_oversize_write_is_refused_and_skipped() {
    beside_a_good_client(|fixture| {
        for structured in [false, true] {
            let mut client = fixture.client(structured);
            client.send_write(0, 1, 0, &vec![1; (64 << 20) + 512]);
            assert_eq!(client.reply(|_| 0).error, ENOSPC);
            client.write(1 << 20, &pattern(1, 512));
            // Past the end of the export.
            client.send_write(0, 2, 64 << 20, &[1; 4096]);
            assert_eq!(client.reply(|_| 0).error, ENOSPC);
            assert!(client.read(1 << 20, 512) == pattern(1, 512));
            // Too long to be skipped.
            client.send(WRITE, 0, 4, 0, u32::MAX);
            assert_eq!(client.reply(|_| 0).error, ENOSPC);
            assert!(client.is_closed());
        }
    });
}

#[test]
fn invalid_requests_are_refused() {
    beside_a_good_client(|fixture| {
        let mut client = fixture.client(false);
        assert_eq!(client.error_of(99, 0, 0, 4096), EINVAL);
        assert_eq!(client.error_of(READ, 0, 0, 0), EINVAL);
        assert_eq!(client.error_of(READ, 0, u64::MAX - 511, 512), EINVAL);
        assert_eq!(client.error_of(FLUSH, 0, 0, 1), EINVAL);
        assert_eq!(client.error_of(ZEROES, 0x8000, 0, 4096), EINVAL);
        // More simultaneous requests than there are rows.
        let flood: Vec<u8> = (0..300).flat_map(|cookie| request(99, 0, cookie, 0, 0)).collect();
        client.stream.write_all(&flood).unwrap();
        for cookie in 0..300 {
            let reply = client.reply(|_| 0);
            assert_eq!((reply.cookie, reply.error), (cookie, EINVAL));
        }
        client.disconnect();
    });
}

#[test]
fn writes_to_a_read_only_export_are_refused() {
    let fixture = Fixture::with(Geometry { read_only: true, ..geometry() }, config());
    let mut client = fixture.client(true);
    client.send_write(0, 1, 0, &[1; 4096]);
    assert_eq!(client.reply(|_| 0).error, 1);
    assert!(client.read(0, 4096) == [0; 4096]);
    client.disconnect();
    fixture.finish();
}

/// A short session with all kinds of messages: the bytes of a client from first to last.
fn session(structured: bool) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(option(3, &[]));
    if structured {
        bytes.extend(option(8, &[]));
    }
    bytes.extend(go("vol0"));
    bytes.extend(request(WRITE, 1, 1, 0, 1024));
    bytes.extend(pattern(1, 1024));
    bytes.extend(request(READ, 0, 2, 0, 512));
    bytes.extend(request(WRITE, 0, 3, 1, 600));
    bytes.extend(pattern(2, 600));
    bytes.extend(request(FLUSH, 0, 4, 0, 0));
    bytes.extend(request(ZEROES, 0, 5, 0, 4096));
    bytes.extend(request(DISC, 0, 0, 0, 0));
    bytes
}

#[test]
fn the_stream_may_end_at_any_byte() {
    for structured in [false, true] {
        let fixture = Fixture::new();
        let bytes = session(structured);
        for end in 0..=bytes.len() {
            let mut socket = fixture.socket();
            socket.write_all(&bytes[..end]).unwrap();
            if end % 2 == 0 {
                // Only the sending side is closed: the bridge answers, then closes.
                socket.shutdown(Shutdown::Write).unwrap();
                let mut rest = Vec::new();
                socket.read_to_end(&mut rest).unwrap();
                assert!(rest.len() >= 18, "the greeting at least");
            }
            drop(socket);
            if end % 4 == 3 {
                fixture.wait("gone clients", |report| report.connections < 4);
            }
        }
        fixture.finish();
    }
}

#[test]
fn a_session_works_byte_by_byte() {
    for structured in [false, true] {
        let fixture = Fixture::new();
        let mut whole = Vec::new();
        let mut one = fixture.socket();
        one.write_all(&session(structured)).unwrap();
        one.read_to_end(&mut whole).unwrap();
        let mut socket = fixture.socket();
        let mut sender = socket.try_clone().unwrap();
        let bytes = session(structured);
        let thread = std::thread::spawn(move || {
            for byte in bytes {
                sender.write_all(&[byte]).unwrap();
                std::thread::yield_now();
            }
        });
        let mut split = Vec::new();
        socket.read_to_end(&mut split).unwrap();
        thread.join().unwrap();
        assert_eq!(whole.len(), split.len());
        fixture.finish();
    }
}

#[test]
fn a_long_payload_may_stop_anywhere() {
    let config = BridgeConfig { connections_max: 16, buffer_bytes: 48 << 20, ..config() };
    let fixture = Fixture::with(geometry(), config);
    for held in [false, true] {
        fixture.switches.hold.store(held, SeqCst);
        for sent in [0, 1, 511, 512, 262_143, 262_144, 266_212, 266_240, 300_000, 1_048_575] {
            let mut client = fixture.client(true);
            client.send(READ, 0, 1, 0, 300_000 / 512 * 512);
            client.send(WRITE, 0, 2, 0, 1 << 20);
            client.stream.write_all(&vec![7; sent]).unwrap();
            drop(client);
        }
        std::thread::sleep(std::time::Duration::from_millis(30));
        fixture.switches.hold.store(false, SeqCst);
        fixture.wait("rest", |report| report.connections == 0 && report.inflight == 0);
    }
    fixture.finish();
}

#[test]
fn endless_options_are_bounded_and_harmless() {
    beside_a_good_client(|fixture| {
        let mut socket = fixture.socket();
        let mut bytes = 3u32.to_be_bytes().to_vec();
        // Each option causes a reply longer than itself, and the replies are not read for now.
        let info = {
            let mut data = 4u32.to_be_bytes().to_vec();
            data.extend(b"vol0");
            data.extend(3u16.to_be_bytes());
            for kind in 1u16..=3 {
                data.extend(kind.to_be_bytes());
            }
            option(6, &data)
        };
        for _ in 0..1023 {
            bytes.extend(&info);
        }
        bytes.extend(option(2, &[]));
        socket.write_all(&bytes).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        let mut rest = Vec::new();
        socket.read_to_end(&mut rest).unwrap();
        assert!(rest.len() > 100_000, "all options were answered: {}", rest.len());
    });
}

#[test]
fn many_clients_connect_and_disconnect() {
    let fixture = Fixture::new();
    for round in 0..100 {
        let socket = fixture.socket();
        match round % 4 {
            0 => drop(socket),
            1 => {
                let _ = (&socket).write_all(&3u32.to_be_bytes());
            }
            _ => {
                let mut client = Client::go(socket, round % 8 == 3);
                client.send(READ, 0, 1, 0, 128 << 10);
                client.send_write(0, 2, 0, &[1; 4096]);
                if round % 4 == 2 {
                    client.reply(|_| 128 << 10);
                }
            }
        }
        fixture.wait("room", |report| report.connections < 8);
    }
    fixture.finish();
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let fixture = Fixture::new();
    let mut clients: Vec<_> = (0..8).map(|_| fixture.client(true)).collect();
    assert!(is_closed(&mut fixture.socket()));
    assert_eq!(fixture.report().connections, 8);
    for client in &mut clients {
        client.write(0, &[1; 4096]);
    }
    clients.pop().unwrap().disconnect();
    fixture.wait("room", |report| report.connections == 7);
    fixture.client(false).disconnect();
    drop(clients);
    fixture.finish();
}
