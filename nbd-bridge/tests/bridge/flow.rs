//! Tests of requests of every kind and size, in order and out of order, on fast and slow devices.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use nbd_bridge::BridgeConfig;
use rtrs_core::block::Geometry;

use crate::client::{
    CACHE, Client, FLUSH, FUA, NO_HOLE, READ, TRIM, WRITE, ZEROES, pattern, request,
};
use crate::fixture::{Fixture, Message, Report, config, geometry};

const SIZES: [usize; 10] = [
    512,
    4096,
    128 << 10,
    (128 << 10) + 512,
    256 << 10,
    (256 << 10) + 512,
    (260 << 10) + 512,
    1 << 20,
    (3 << 20) + 1536,
    32 << 20,
];

#[test]
fn requests_of_every_size_are_served() {
    for structured in [false, true] {
        for io_max in [32 << 20, 300_000, 4096] {
            let fixture = Fixture::with(Geometry { io_max, ..geometry() }, config());
            let mut client = fixture.client(structured);
            for (index, len) in SIZES.into_iter().enumerate() {
                let offset = 512 * (index as u64 + 1);
                let data = pattern(index as u64, len);
                client.write(offset, &data);
                assert!(client.read(offset, len as u32) == data, "{len} bytes differ");
            }
            assert!(fixture.switches.len_max.load(SeqCst) <= io_max);
            client.disconnect();
            fixture.finish();
        }
    }
}

#[test]
fn sub_blocks_are_served_if_the_device_supports_them() {
    let geometry = Geometry { logical_block: 1, physical_block: 1, io_max: 1000, ..geometry() };
    let fixture = Fixture::with(geometry, config());
    let mut client = fixture.client(true);
    for (seed, len) in
        [1usize, 3, 27, 29, 999, 4097, 266_239, 266_241, 1_000_001].iter().enumerate()
    {
        let data = pattern(seed as u64, *len);
        client.write(1 + seed as u64, &data);
        assert!(client.read(1 + seed as u64, *len as u32) == data, "{len} bytes differ");
    }
    client.disconnect();
    fixture.finish();
}

#[test]
fn flush_fua_trim_and_zeroes_reach_the_device() {
    let fixture = Fixture::new();
    let mut client = fixture.client(true);
    client.write(0, &pattern(1, 8 << 20));
    assert_eq!(client.error_of(FLUSH, 0, 0, 0), 0);
    assert_eq!(client.error_of(CACHE, 0, 0, 4096), 0);
    assert_eq!(fixture.switches.flushes.load(SeqCst), 1);
    assert_eq!(fixture.switches.durable.load(SeqCst), 0);
    client.send_write(FUA, 1, 4096, &pattern(2, 4096));
    assert_eq!(client.reply(|_| 0).error, 0);
    assert_eq!(fixture.switches.durable.load(SeqCst), 1);
    // Larger than the device's discard limit: split into several IOs.
    assert_eq!(client.error_of(ZEROES, FUA | NO_HOLE, 0, 5 << 20), 0);
    assert_eq!(fixture.switches.zeroed.load(SeqCst), 5 << 20);
    assert_eq!(fixture.switches.kept_allocated.load(SeqCst), 5);
    assert_eq!(fixture.switches.durable.load(SeqCst), 6);
    assert!(client.read(0, 5 << 20).iter().all(|b| *b == 0));
    assert_eq!(client.error_of(TRIM, 0, 0, (2 << 20) + 512), 0);
    assert_eq!(fixture.switches.discards.load(SeqCst), 3);
    client.disconnect();
    fixture.finish();
}

#[test]
fn a_multi_part_request_without_payload_waits_for_queue_space() {
    let geometry = Geometry { zeroes_max: 4096, ..geometry() };
    let fixture = Fixture::with(geometry, config());
    fixture.switches.fill.store(2, SeqCst);
    let mut clients: Vec<_> = (0..4).map(|_| fixture.client(false)).collect();
    for client in &mut clients {
        client.write(0, &pattern(1, 4096));
        client.send(ZEROES, 0, 1, 0, 64 << 20);
        client.send(READ, 0, 2, 0, 4096);
    }
    for client in &mut clients {
        for _ in 0..2 {
            let reply = client.reply(|cookie| if cookie == 2 { 4096 } else { 0 });
            assert_eq!(reply.error, 0);
        }
    }
    assert!(fixture.switches.refused.load(SeqCst) > 0);
    drop(clients);
    fixture.finish();
}

/// Sends mixed requests, many in flight, on disjoint ranges per slot, and checks data against a
/// model.
fn mixed(fixture: &Fixture, structured: bool, seed: u64, rounds: usize) {
    const SLOT: u64 = 640 << 10;
    let base = (seed % 4) * (16 << 20);
    let mut client = fixture.client(structured);
    let mut model: HashMap<u64, Vec<u8>> = HashMap::new();
    let choices = pattern(seed, rounds * 4);
    for round in 0..rounds {
        let choice = &choices[round * 4..round * 4 + 4];
        let depth = 1 + u64::from(choice[0] % 24);
        let (mut expected, mut bytes) = (HashMap::new(), Vec::new());
        for slot in 0..depth {
            let size = SIZES[(usize::from(choice[1]) + slot as usize * 3) % 7];
            let offset = base + slot * SLOT;
            let is_read = (u64::from(choice[2]) >> (slot % 8)) & 1 == 1;
            if is_read && model.contains_key(&slot) {
                let len = model[&slot].len();
                bytes.extend(request(READ, 0, slot, offset, len as u32));
                expected.insert(slot, len);
            } else {
                let data = pattern(seed ^ (round as u64) << 8 ^ slot, size);
                bytes.extend(request(WRITE, 0, slot, offset, size as u32));
                bytes.extend(&data);
                model.insert(slot, data);
                expected.insert(slot, 0);
            }
        }
        // A client that keeps sending without reading would deadlock itself.
        let mut sender = client.stream.try_clone().unwrap();
        let sent = std::thread::spawn(move || sender.write_all(&bytes));
        for _ in 0..depth {
            let reply = client.reply(|cookie| expected[&cookie]);
            assert_eq!(reply.error, 0);
            let len = expected.remove(&reply.cookie).expect("one reply per request");
            assert!(len == 0 || reply.data == model[&reply.cookie], "{} differs", reply.cookie);
        }
        sent.join().unwrap().unwrap();
    }
    client.disconnect();
}

#[test]
fn mixed_requests_work_on_all_kinds_of_devices() {
    for (delay_us, reverse, fill) in
        [(0, false, 0), (0, true, 3), (300, true, 0), (100, false, 1), (50, true, 7)]
    {
        let fixture = Fixture::with(Geometry { io_max: 200_000, ..geometry() }, config());
        fixture.switches.delay_us.store(delay_us, SeqCst);
        fixture.switches.reverse.store(reverse, SeqCst);
        fixture.switches.fill.store(fill, SeqCst);
        std::thread::scope(|scope| {
            for seed in 0..4u64 {
                let fixture = &fixture;
                scope.spawn(move || mixed(fixture, seed % 2 == 0, seed, 40));
            }
        });
        fixture.finish();
    }
}

/// Sends writes of `len` bytes, `depth` in flight. Returns the bytes moved per hundred bytes of
/// payload.
fn moved_percent(len: usize, count: u64, depth: u64, read_every: u64) -> f64 {
    let fixture = Fixture::new();
    fixture.switches.delay_us.store(200, SeqCst);
    let mut client = fixture.client(false);
    let data = pattern(1, len);
    let span = (64u64 << 20) / len as u64;
    let mut reader = client.stream.try_clone().unwrap();
    let (permits, wait) = std::sync::mpsc::sync_channel::<()>(depth as usize);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut client = Client::past_handshake(reader, false);
            for _ in 0..count {
                let reply = client.reply(|cookie| if cookie == 1 { len } else { 0 });
                assert_eq!(reply.error, 0);
                wait.recv().unwrap();
            }
            reader = client.stream;
            drop(reader);
        });
        for index in 0..count {
            permits.send(()).unwrap();
            let offset = index % span * len as u64;
            if read_every > 0 && index % read_every == 0 {
                client.send(READ, 0, 1, offset, len as u32);
            } else {
                client.send_write(0, 0, offset, &data);
            }
        }
    });
    client.disconnect();
    let stats = fixture.finish();
    stats.bytes_moved as f64 * 100.0 / (len as u64 * count) as f64
}

#[test]
fn payload_is_not_copied() {
    for (len, count, depth, read_every) in [
        (32 << 10, 4000, 16, 0),
        (64 << 10, 2000, 16, 0),
        (128 << 10, 2000, 1, 0),
        (128 << 10, 2000, 16, 0),
        (128 << 10, 2000, 16, 2),
        (256 << 10, 1000, 8, 0),
        (384 << 10, 500, 4, 3),
        (1 << 20, 300, 4, 0),
        (32 << 20, 10, 2, 0),
    ] {
        let percent = moved_percent(len, count, depth, read_every);
        println!("writes of {len} bytes, {depth} in flight: {percent:.3} % moved");
        assert!(percent < 1.0, "{percent} % of the payload of {len} byte writes was copied");
    }
}

#[test]
fn device_failures_fail_only_their_request() {
    for structured in [false, true] {
        let fixture = Fixture::with(Geometry { io_max: 128 << 10, ..geometry() }, config());
        let mut client = fixture.client(structured);
        client.write(0, &pattern(1, 1 << 20));
        // One of the eight pieces of each request fails.
        fixture.switches.fail_every.store(8, SeqCst);
        client.send(READ, 0, 1, 0, 1 << 20);
        assert_eq!(client.reply(|_| 1 << 20).error, 5);
        client.send_write(0, 2, 0, &pattern(2, 1 << 20));
        assert_eq!(client.reply(|_| 0).error, 5);
        fixture.switches.fail_every.store(1, SeqCst);
        assert_eq!(client.error_of(FLUSH, 0, 0, 0), 5);
        assert_eq!(client.error_of(TRIM, 0, 0, 4096), 5);
        fixture.switches.fail_every.store(0, SeqCst);
        client.write(0, &pattern(3, 4096));
        assert!(client.read(0, 4096) == pattern(3, 4096));
        client.disconnect();
        assert!(fixture.finish().failed >= 4);
    }
}

#[test]
fn eight_clients_share_memory_for_one_32_mib_request() {
    let fixture = Fixture::new();
    std::thread::scope(|scope| {
        for seed in 0..8u64 {
            let fixture = &fixture;
            scope.spawn(move || {
                let mut client = fixture.client(seed % 2 == 0);
                let data = pattern(seed, 4096);
                let offset = 4096 * seed;
                client.write(offset, &data);
                for _ in 0..2 {
                    let all = client.read(0, 32 << 20);
                    let at = offset as usize;
                    assert!(all[at..at + 4096] == data);
                    client.write(32 << 20, &all[..31 << 20]);
                    assert!(client.read(offset, 4096) == data);
                }
                client.disconnect();
            });
        }
    });
    fixture.finish();
}

#[test]
fn a_large_read_is_served_alongside_a_stream_of_small_ones() {
    let fixture = Fixture::new();
    fixture.switches.delay_us.store(100, SeqCst);
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let mut client = fixture.client(false);
                for cookie in 0..24 {
                    client.send(READ, 0, cookie, 0, 256 << 10);
                }
                while !over.load(SeqCst) {
                    let cookie = client.reply(|_| 256 << 10).cookie;
                    client.send(READ, 0, cookie, 0, 256 << 10);
                }
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        let mut client = fixture.client(false);
        let begun = Instant::now();
        for _ in 0..3 {
            client.read(0, 32 << 20);
        }
        over.store(true, SeqCst);
        assert!(begun.elapsed() < Duration::from_secs(60), "starved by small reads");
    });
    fixture.finish();
}

#[test]
fn clients_that_do_not_read_replies_do_not_block_others() {
    let fixture = Fixture::new();
    let mut hogs = Vec::new();
    for len in [32 << 20, 128 << 10, 4096, 256 << 10] {
        let mut hog = fixture.client(true);
        hog.stream.set_nonblocking(true).unwrap();
        let mut bytes = Vec::new();
        for cookie in 0..4000 {
            bytes.extend(request(READ, 0, cookie, 0, len));
        }
        // Sends as much as the bridge accepts.
        let _ = hog.stream.write(&bytes);
        hogs.push(hog);
    }
    std::thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    let mut client = fixture.client(true);
    for round in 0..200u64 {
        let data = pattern(round, 128 << 10);
        client.write(round << 17, &data);
        assert!(client.read(round << 17, 128 << 10) == data);
        client.read(0, 4096);
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "disturbed: {:?}", begun.elapsed());
    let report = fixture.report();
    assert!(report.inflight > 0 && report.inflight < 64, "{report:?}");
    client.disconnect();
    drop(hogs);
    fixture.finish();
}

#[test]
fn a_stop_completes_requests_in_flight_and_closes() {
    let fixture = Fixture::new();
    fixture.switches.hold.store(true, SeqCst);
    let mut idle = fixture.client(false);
    let mut busy = fixture.client(false);
    for cookie in 0..10 {
        busy.send(READ, 0, cookie, 0, 4096);
    }
    let mut writer = fixture.client(true);
    writer.send_write(0, 1, 0, &pattern(1, 8192));
    // The next write stops in the middle of its payload; the device has the part received.
    let half = pattern(2, 600 << 10);
    let mut bytes = request(WRITE, 0, 2, 1 << 20, 1 << 20);
    bytes.extend(half);
    writer.stream.write_all(&bytes).unwrap();
    let mut silent = fixture.socket();
    let is_up = |report: &Report| report.inflight == 12 && report.connections == 4;
    fixture.wait("12 requests and 4 connections", is_up);
    fixture.mail.send(Message::Stop);
    assert!(idle.is_closed());
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut silent, &mut greeting).unwrap();
    assert!(crate::client::is_closed(&mut silent));
    assert_eq!(fixture.report().connections, 2);
    fixture.switches.hold.store(false, SeqCst);
    for _ in 0..10 {
        assert_eq!(busy.reply(|_| 4096).error, 0);
    }
    assert!(busy.is_closed());
    let reply = writer.reply(|_| 0);
    assert_eq!((reply.cookie, reply.error), (1, 0));
    assert!(writer.is_closed(), "the write that did not arrive is not answered");
    assert!(crate::client::is_closed(&mut fixture.socket()), "no client is accepted after a stop");
    fixture.finish();
}

#[test]
fn an_abort_closes_at_once_and_frees_everything() {
    let fixture = Fixture::new();
    fixture.switches.hold.store(true, SeqCst);
    let mut clients: Vec<_> = (0..4).map(|_| fixture.client(true)).collect();
    for client in &mut clients {
        client.send(READ, 0, 1, 0, 1 << 20);
        client.send_write(0, 2, 0, &pattern(1, 128 << 10));
        client.send(FLUSH, 0, 3, 0, 0);
    }
    fixture.wait("12 requests", |report| report.inflight == 12);
    fixture.mail.send(Message::Abort);
    fixture.mail.send(Message::Stop);
    fixture.mail.send(Message::Abort);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(fixture.report().inflight, 12, "the device still has them");
    fixture.switches.hold.store(false, SeqCst);
    for client in &mut clients {
        assert!(client.is_closed());
    }
    fixture.finish();
}

#[test]
fn half_closed_clients_get_their_replies() {
    let fixture = Fixture::new();
    fixture.switches.delay_us.store(2000, SeqCst);
    let mut client = fixture.client(false);
    for cookie in 0..20 {
        client.send(READ, 0, cookie, 0, 4096);
    }
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    for _ in 0..20 {
        assert_eq!(client.reply(|_| 4096).error, 0);
    }
    assert!(client.is_closed());
    fixture.finish();
}

#[test]
fn connections_are_clients_once_past_their_handshake() {
    let fixture = Fixture::new();
    let counts = |report: &Report| (report.stats.connections, report.stats.clients);
    let shaking = fixture.socket();
    let client = fixture.client(true);
    fixture.wait("a client alongside a handshake", |report| counts(report) == (2, 1));
    client.disconnect();
    fixture.wait("handshake alone", |report| counts(report) == (1, 0));
    drop(shaking);
    fixture.finish();
}

#[test]
fn unusable_limits_are_refused() {
    let ring = rtrs_core::rt::Ring::new(8).unwrap();
    let try_with = |config: BridgeConfig| {
        let device = crate::device::TestDevice::new(geometry(), Default::default());
        nbd_bridge::Bridge::new(&ring, Box::new(device), "vol0", config).map(|_| ())
    };
    assert!(try_with(BridgeConfig::default()).is_ok());
    assert!(try_with(config()).is_ok());
    for bad in [
        BridgeConfig { buffer_bytes: 1 << 20, ..config() },
        BridgeConfig { connections_max: 0, ..config() },
        BridgeConfig { requests_max: 0, ..config() },
    ] {
        let error = try_with(bad).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}");
    }
}
