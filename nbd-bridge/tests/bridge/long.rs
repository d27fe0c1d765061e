//! Tests of requests longer than one chunk of a reply: they are handled in pieces, with memory for
//! one piece, and an error in the middle is reported or ends the connection.

use std::io::Read;
use std::sync::atomic::Ordering::SeqCst;

use rtrs_core::block::Geometry;

use crate::client::{Client, READ, WRITE, ZEROES, pattern, request};
use crate::fixture::{Fixture, config, geometry};

const MIB: usize = 1 << 20;
const LONG: usize = 64 * MIB;
/// Bytes that are read before the client receives the first byte.
const PIECE: usize = 32 * MIB;
const DF: u16 = 4;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const EOVERFLOW: u32 = 75;

fn long_geometry() -> Geometry {
    Geometry { size: 80 << 20, ..geometry() }
}

#[test]
fn long_requests_are_served() {
    for structured in [false, true] {
        let fixture = Fixture::with(long_geometry(), config());
        let mut client = fixture.client(structured);
        for (at, len) in [
            (0, LONG),
            (4096, LONG - 512),
            (1, LONG),
            (511, LONG - 1),
            (7, PIECE),
            (3, PIECE + 1),
            (0, PIECE + 512),
            (12_345, 50_000_001),
        ] {
            let data = pattern(at as u64, len);
            client.write(at as u64, &data);
            let got = client.read(at as u64, len as u32);
            assert!(got == data, "{len} bytes at {at} differ");
        }
        client.send(READ, 0, 9, 0, LONG as u32 + 1);
        let expect = if structured { EOVERFLOW } else { EINVAL };
        assert_eq!(client.reply(|_| 0).error, expect);
        client.disconnect();
        fixture.finish();
    }
}

#[test]
fn a_dont_fragment_read_returns_one_chunk_or_overflows() {
    let fixture = Fixture::with(long_geometry(), config());
    let mut client = fixture.client(true);
    client.send(READ, DF, 1, 1, PIECE as u32);
    let mut head = [0; 20];
    client.stream.read_exact(&mut head).unwrap();
    assert_eq!(
        (&head[4..8], &head[16..]),
        (&[0, 1, 0, 1][..], &(PIECE as u32 + 8).to_be_bytes()[..])
    );
    client.stream.read_exact(&mut vec![0; PIECE + 8]).unwrap();
    client.send(READ, DF, 2, 0, PIECE as u32 + 1);
    assert_eq!(client.reply(|_| 0).error, EOVERFLOW);
    client.disconnect();
    fixture.finish();
}

#[test]
fn long_reads_are_split_to_fit_memory_shared_with_other_devices() {
    for others in [1, 17] {
        for structured in [false, true] {
            let fixture = Fixture::beside(others, long_geometry(), config());
            let mut client = fixture.client(structured);
            let data = pattern(1, LONG);
            client.write(1, &data);
            assert!(client.read(1, LONG as u32) == data, "beside {others}");
            if structured {
                client.send(READ, DF, 1, 0, PIECE as u32);
                assert_eq!(client.reply(|_| PIECE).error, 0, "beside {others}");
            }
            client.disconnect();
            fixture.finish();
        }
    }
}

/// A simple reply cannot be interleaved with another, and with chunks no reply has to wait.
#[test]
fn other_replies_come_after_or_between_the_pieces() {
    for structured in [false, true] {
        let fixture = Fixture::with(long_geometry(), config());
        fixture.switches.delay_us.store(2000, SeqCst);
        let mut client = fixture.client(structured);
        let data = pattern(1, LONG);
        client.write(0, &data);
        client.send(READ, 0, 1, 0, LONG as u32);
        for cookie in 2..12 {
            client.send(ZEROES, 0, cookie, 72 << 20, 4096);
        }
        let mut seen = Vec::new();
        for _ in 0..11 {
            let reply = client.reply(|cookie| if cookie == 1 { LONG } else { 0 });
            assert_eq!(reply.error, 0);
            assert!(reply.cookie != 1 || reply.data == data);
            seen.push(reply.cookie);
        }
        seen.sort_unstable();
        assert_eq!(seen, (1..12).collect::<Vec<_>>());
        client.disconnect();
        fixture.finish();
    }
}

#[test]
fn a_late_failure_sends_an_error_chunk_or_closes() {
    for structured in [false, true] {
        let fixture = Fixture::with(long_geometry(), config());
        let mut client = fixture.client(structured);
        client.send(READ, 0, 1, 0, LONG as u32);
        // The first piece is being sent, and the second is not read before the first was received.
        let head = if structured { 28 } else { 16 };
        client.stream.read_exact(&mut vec![0; head + 1]).unwrap();
        fixture.switches.fail_every.store(1, SeqCst);
        client.stream.read_exact(&mut vec![0; PIECE - 1]).unwrap();
        if structured {
            assert_eq!(client.reply(|_| 0).error, EIO);
            fixture.switches.fail_every.store(0, SeqCst);
            assert_eq!(client.read(0, 512), [0; 512]);
            client.disconnect();
        } else {
            assert!(client.is_closed());
        }
        fixture.finish();
    }
}

#[test]
fn a_client_closing_midway_leaves_nothing_behind() {
    for (structured, read) in [(false, 1), (true, 1), (false, PIECE + MIB), (true, PIECE + MIB)] {
        let fixture = Fixture::with(long_geometry(), config());
        let mut client = fixture.client(structured);
        client.send(READ, 0, 1, 0, LONG as u32);
        client.stream.read_exact(&mut vec![0; read]).unwrap();
        drop(client);
        let mut client = fixture.client(structured);
        let bytes = [request(WRITE, 0, 1, 0, LONG as u32), pattern(1, PIECE)].concat();
        std::io::Write::write_all(&mut client.stream, &bytes).unwrap();
        drop(client);
        fixture.finish();
    }
}

#[test]
fn clients_that_read_nothing_hold_at_most_one_piece() {
    let fixture = Fixture::with(long_geometry(), config());
    let lazy: Vec<Client> = (0..7)
        .map(|_| {
            let mut client = fixture.client(true);
            client.send(READ, 0, 1, 0, LONG as u32);
            client
        })
        .collect();
    let mut client = fixture.client(false);
    client.write(1, &pattern(1, LONG));
    assert!(client.read(1, 4096) == pattern(1, 4096));
    drop(lazy);
    assert!(client.read(1, LONG as u32) == pattern(1, LONG));
    client.disconnect();
    fixture.finish();
}
