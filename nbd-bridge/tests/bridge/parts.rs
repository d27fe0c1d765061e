//! Tests of requests that are not aligned to the device's blocks: which bytes they read and change,
//! and that no adjacent change is lost.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier};

use nbd_bridge::BridgeConfig;
use proptest::prelude::*;
use rtrs_core::block::Geometry;

use crate::client::{
    Client, DISC, FUA, NO_HOLE, READ, TRIM, WRITE, ZEROES, go_asking, pattern, request,
};
use crate::fixture::{Fixture, config, geometry};
use crate::ghosts::{Two, is_answered};

const EIO: u32 = 5;
const EINVAL: u32 = 22;
const SECOND: std::time::Duration = std::time::Duration::from_secs(1);

/// Runs the shards until the other shard has answered both checks for a first request: one for the
/// connection, then one for the request's blocks.
fn settle(two: &mut Two) {
    two.settle();
    two.settle();
}

fn blocks_of(logical_block: u32) -> Geometry {
    Geometry { logical_block, physical_block: 65_536.max(logical_block), ..geometry() }
}

#[test]
fn any_byte_range_is_read_and_written() {
    for (block, io_max) in [(512, 32 << 20), (4096, 4096), (65_536, 300_000)] {
        let fixture = Fixture::with(Geometry { io_max, ..blocks_of(block) }, config());
        let mut client = fixture.client(block == 512);
        let mut model = pattern(1, 8 << 20);
        client.write(0, &model);
        let mut write = |client: &mut Client, at: usize, len: usize| {
            let data = pattern((at + len) as u64, len);
            client.write(at as u64, &data);
            model[at..at + len].copy_from_slice(&data);
            let (from, to) = (at.saturating_sub(77), (at + len + 99).min(model.len()));
            let got = client.read(from as u64, (to - from) as u32);
            assert!(got == model[from..to], "{len} bytes at {at} in blocks of {block}");
        };
        let block = block as usize;
        for at in [0, 1, block - 1, block, block + 1, 5 * block - 3] {
            for len in [1, 2, block - 1, block, block + 1, 2 * block, 5 * block + 2] {
                write(&mut client, at, len);
            }
        }
        // Longer than a buffer, so that the payload arrives in several pieces.
        for len in [262_143, 262_145, 266_239, 1_000_003, (3 << 20) + 1537] {
            write(&mut client, 3 * block + 7, len);
        }
        let end = (8 << 20) - 3;
        write(&mut client, end, 3);
        assert!(client.read(0, 8 << 20) == model, "something else was changed");
        assert!(fixture.switches.len_max.load(SeqCst) <= io_max);
        client.disconnect();
        fixture.finish();
    }
}

#[test]
fn zeroes_cover_their_bytes_and_trims_only_whole_blocks() {
    let fixture = Fixture::new();
    let mut client = fixture.client(true);
    let mut model = pattern(1, 64 << 10);
    client.write(0, &model);
    for (at, len) in [(1, 2), (511, 2), (100, 512), (700, 5000), (512, 513), (2047, 1)] {
        assert_eq!(client.error_of(ZEROES, NO_HOLE, at as u64, len as u32), 0);
        model[at..at + len].fill(0);
    }
    assert!(client.read(0, 64 << 10) == model);
    let discards = || fixture.switches.discards.load(SeqCst);
    for (at, len) in [(1, 1022), (1, 1), (512, 511)] {
        assert_eq!(client.error_of(TRIM, 0, at, len), 0);
    }
    assert_eq!(discards(), 0, "these hold no whole block");
    assert_eq!(client.error_of(TRIM, FUA, 1, 1023), 0);
    assert_eq!((discards(), fixture.switches.durable.load(SeqCst)), (1, 1));
    client.disconnect();
    assert_eq!(fixture.finish().fragments, 9);
}

#[test]
fn each_part_of_a_durable_write_is_durable() {
    let fixture = Fixture::new();
    let mut client = fixture.client(false);
    client.send_write(FUA, 1, 100, &pattern(1, 2000));
    assert_eq!(client.reply(|_| 0).error, 0);
    assert_eq!(fixture.switches.durable.load(SeqCst), 3);
    client.disconnect();
    fixture.finish();
}

#[test]
fn clients_with_block_sizes_and_shared_writers_keep_to_blocks() {
    let fixture = Fixture::new();
    let mut asking = Client::with(fixture.socket(), false, &go_asking("vol0"));
    for command in [READ, TRIM, ZEROES] {
        assert_eq!(asking.error_of(command, 0, 1, 512), EINVAL);
    }
    asking.send_write(0, 9, 512, &[1; 100]);
    assert_eq!(asking.reply(|_| 0).error, EINVAL);
    asking.disconnect();
    fixture.finish();

    let fixture = Fixture::with(geometry(), BridgeConfig { shared_writes: true, ..config() });
    let mut client = fixture.client(false);
    client.send_write(0, 9, 512, &[1; 100]);
    assert_eq!(client.reply(|_| 0).error, EINVAL);
    assert_eq!(client.error_of(ZEROES, 0, 1, 512), EINVAL);
    assert_eq!(client.error_of(TRIM, 0, 1, 512), 0);
    client.write(512, &[7; 512]);
    assert_eq!(client.read(1000, 48), [[7; 24], [0; 24]].concat());
    client.disconnect();
    fixture.finish();
}

#[test]
fn a_device_with_partial_writes_gets_only_the_bytes() {
    for shared_writes in [false, true] {
        let geometry = Geometry { partial_writes: true, ..geometry() };
        let fixture = Fixture::with(geometry, BridgeConfig { shared_writes, ..config() });
        let mut client = fixture.client(false);
        let submitted = || fixture.switches.submitted.load(SeqCst);
        client.send_write(FUA, 1, 500, &[7; 100]);
        assert_eq!(client.reply(|_| 0).error, 0);
        assert_eq!((submitted(), fixture.switches.durable.load(SeqCst)), (2, 2), "no read");
        assert_eq!(client.error_of(ZEROES, 0, 590, 4), 0);
        assert_eq!(submitted(), 3);
        let found = [499, 500, 589, 590, 593, 594, 599, 600].map(|at| client.read(at, 1)[0]);
        assert_eq!(found, [0, 7, 7, 0, 0, 7, 7, 0]);
        // A server that does not support partial writes replaced the previous one.
        fixture.switches.no_partial.store(true, SeqCst);
        client.send_write(0, 1, 505, &[9; 2]);
        let error = client.reply(|_| 0).error;
        assert_eq!(error, if shared_writes { EINVAL } else { 0 });
        let new = if shared_writes { 7 } else { 9 };
        assert_eq!(client.read(504, 4), [7, new, new, 7]);
        client.disconnect();
        fixture.finish();
    }
}

#[test]
fn a_partial_write_waits_for_older_changes_of_its_block() {
    for other in [0, 1] {
        let mut two = Two::new();
        let mut first = two.shards[0].client();
        let mut second = two.shards[other].client();
        two.shards[0].hold(true);
        first.send_write(0, 1, 0, &[1; 1024]);
        settle(&mut two);
        second.send_write(0, 2, 500, &[2; 100]);
        settle(&mut two);
        let submitted = two.shards[other].switches.submitted.load(SeqCst);
        assert_eq!(submitted, u64::from(other == 0), "nothing is read before that has ended");
        two.shards[0].hold(false);
        settle(&mut two);
        assert!(is_answered(&mut first, 0) && is_answered(&mut second, 0));
        assert_eq!([499, 500, 599, 600].map(|at| two.disk(at)), [1, 2, 2, 1]);
        drop((first, second));
        two.end();
    }
}

#[test]
fn a_partial_write_waits_for_older_queued_changes() {
    for other in [0, 1] {
        let mut two = Two::new();
        let mut first = two.shards[0].client();
        let mut second = two.shards[other].client();
        two.shards[0].switches.fill.store(1, SeqCst);
        two.shards[0].hold(true);
        first.send_write(0, 1, 8192, &[1; 512]);
        first.send_write(0, 2, 0, &[2; 1024]);
        settle(&mut two);
        assert!(two.shards[0].switches.refused.load(SeqCst) > 0, "the second has no room");
        second.send_write(0, 3, 500, &[3; 100]);
        settle(&mut two);
        let submitted = two.shards[other].switches.submitted.load(SeqCst);
        assert_eq!(submitted, u64::from(other == 0), "nothing is read before that has ended");
        two.shards[0].hold(false);
        settle(&mut two);
        assert!(is_answered(&mut first, 0) && is_answered(&mut first, 0));
        assert!(is_answered(&mut second, 0));
        assert_eq!([499, 500, 599, 600].map(|at| two.disk(at)), [2, 3, 3, 2]);
        drop((first, second));
        two.end();
    }
}

#[test]
fn newer_changes_of_a_block_wait_for_a_partial_write() {
    for other in [0, 1] {
        let mut two = Two::new();
        let mut first = two.shards[0].client();
        let mut second = two.shards[other].client();
        two.shards[0].hold(true);
        first.send_write(0, 1, 500, &[1; 100]);
        settle(&mut two);
        let submitted = |two: &Two| {
            let of = |shard: usize| two.shards[shard].switches.submitted.load(SeqCst);
            of(0) + of(1)
        };
        assert_eq!(submitted(&two), 2, "both blocks are being read");
        second.send_write(0, 2, 512, &[2; 512]);
        second.send(ZEROES, 0, 3, 590, 4);
        second.send(TRIM, 0, 4, 0, 512);
        settle(&mut two);
        assert_eq!(submitted(&two), 2);
        // Neither reads nor requests to other blocks wait.
        second.send_write(0, 5, 2048, &[5; 512]);
        second.send(READ, 0, 6, 0, 600);
        settle(&mut two);
        assert_eq!(submitted(&two), 4);
        two.shards[0].hold(false);
        settle(&mut two);
        assert!(is_answered(&mut first, 0));
        let mut answers: Vec<_> = (0..5)
            .map(|_| second.reply(|cookie| if cookie == 6 { 600 } else { 0 }))
            .map(|reply| (reply.cookie, reply.error))
            .collect();
        answers.sort_unstable();
        assert_eq!(answers, [(2, 0), (3, 0), (4, 0), (5, 0), (6, 0)]);
        assert_eq!([499, 500, 511, 512, 1023].map(|at| two.disk(at)), [0, 1, 1, 2, 2]);
        let zeroes = [589, 590, 593, 594].map(|at| two.disk(at));
        assert_eq!(zeroes, [2, 0, 0, 2], "in the order in which they came");
        assert_eq!(two.shards[other].bridge.stats().deferred, 2);
        drop((first, second));
        two.end();
    }
}

#[test]
fn a_failing_device_fails_the_request_and_blocks_nothing() {
    // The failing IO is the read of a block, the write of a block, or one of several parts.
    for (every, data) in [(1, 100), (2, 100), (3, 2000), (4, 2000), (5, 2000)] {
        let fixture = Fixture::new();
        let mut client = fixture.client(true);
        fixture.switches.fail_every.store(every, SeqCst);
        client.send_write(0, 1, 100, &pattern(1, data));
        assert_eq!(client.reply(|_| 0).error, EIO, "every {every}th IO fails");
        let changed = fixture.switches.disk.lock().unwrap().iter().any(|byte| *byte != 0);
        assert_eq!(changed, data == 2000);
        fixture.switches.fail_every.store(0, SeqCst);
        client.write(100, &pattern(2, data));
        client.write(0, &pattern(3, 4096));
        assert!(client.read(0, 4096) == pattern(3, 4096));
        client.disconnect();
        fixture.finish();
    }
}

#[test]
fn no_further_io_starts_for_a_closed_client() {
    let mut two = Two::new();
    let mut gone = two.shards[0].client();
    two.shards[0].hold(true);
    gone.send_write(0, 1, 100, &[1; 100]);
    gone.send_write(0, 2, 150, &[2; 100]);
    settle(&mut two);
    assert_eq!(two.shards[0].bridge.inflight(), 2);
    gone.leave();
    let mut other = two.shards[1].client();
    other.send_write(0, 3, 200, &[3; 100]);
    settle(&mut two);
    assert!(!is_answered(&mut other, 0), "the device still reads for the closed connection");
    two.shards[0].hold(false);
    settle(&mut two);
    assert!(is_answered(&mut other, 0));
    assert_eq!([100, 199, 200, 299].map(|at| two.disk(at)), [0, 0, 3, 3]);
    // If the client has sent everything before it disconnects, the request is still executed.
    other.send_write(0, 4, 300, &[4; 100]);
    other.send(DISC, 0, 0, 0, 0);
    settle(&mut two);
    assert_eq!([299, 300, 399, 400].map(|at| two.disk(at)), [3, 4, 4, 0]);
    two.end();
}

/// The first block of the orphaned write is done; its last block is still waiting.
#[test]
fn a_partial_write_completes_alongside_an_orphaned_write() {
    let mut two = Two::new();
    let mut blocker = two.shards[1].client();
    let mut gone = two.shards[0].client();
    let mut client = two.shards[0].client();
    two.shards[1].hold(true);
    blocker.send_write(0, 1, 5 * 512 + 100, &[1; 3]);
    settle(&mut two);
    gone.send_write(0, 2, 5 * 512 - 15, &[2; 30]);
    gone.send(DISC, 0, 0, 0, 0);
    settle(&mut two);
    assert_eq!(two.group.orphaned_writes(), 1);
    client.send_write(0, 3, 5 * 512 - 2, &[3; 2]);
    client.send(ZEROES, 0, 4, 5 * 512 - 15, 1);
    settle(&mut two);
    assert!(is_answered(&mut client, 0) && is_answered(&mut client, 0));
    client.send(READ, 0, 5, 4 * 512, 512);
    settle(&mut two);
    assert!(!is_answered(&mut client, 512), "the rest of the orphaned write is not done");
    two.shards[1].hold(false);
    settle(&mut two);
    assert!(is_answered(&mut client, 512) && is_answered(&mut blocker, 0));
    let places = [-15, -14, -3, -2, -1, 0, 14, 15].map(|at: isize| (5 * 512 + at) as usize);
    assert_eq!(places.map(|at| two.disk(at)), [0, 2, 2, 3, 3, 2, 2, 0]);
    drop((blocker, client));
    two.end();
}

#[test]
fn the_maximum_number_of_partial_writes_loses_no_row() {
    let mut two = Two::with(BridgeConfig { requests_max: 400, ..config() });
    let mut client = two.shards[0].client();
    let mut other = two.shards[0].client();
    two.shards[0].hold(true);
    for part in 0..150 {
        client.send_write(0, part, 512 * part + 1, &[1; 3]);
    }
    settle(&mut two);
    assert_eq!(two.shards[0].bridge.inflight(), 128);
    for cookie in 0..20 {
        other.send(READ, 0, cookie, 1 << 20, 512);
        settle(&mut two);
    }
    assert_eq!(two.shards[0].bridge.inflight(), 148, "a waiting request has no row");
    two.shards[0].hold(false);
    for _ in 0..150 {
        settle(&mut two);
        assert!(is_answered(&mut client, 0));
    }
    for _ in 0..20 {
        assert!(is_answered(&mut other, 512));
    }
    drop((client, other));
    two.end();
}

#[test]
fn block_sizes_are_those_at_connection_time() {
    let fixture = Fixture::with(blocks_of(4096), config());
    let mut older = fixture.client(false);
    older.write(0, &[1; 8192]);
    fixture.switches.reblock.store(512, SeqCst);
    let mut client = fixture.client(false);
    client.write(4000, &[2; 1000]);
    older.write(100, &[3; 5000]);
    let model = [vec![1; 100], vec![3; 5000], vec![1; 3092]].concat();
    assert!(client.read(0, 8192) == model && older.read(0, 8192) == model);
    older.disconnect();
    client.disconnect();
    fixture.finish();
}

#[test]
fn a_truncated_payload_changes_only_received_bytes() {
    let mut two = Two::new();
    let mut client = two.shards[0].client();
    let data = pattern(1, 1 << 20);
    let bytes = [request(WRITE, 0, 1, 100, 1 << 20), data[..600_000].to_vec()].concat();
    two.feed(&mut client, &bytes);
    client.leave();
    settle(&mut two);
    let disk = two.shards[0].switches.disk.lock().unwrap();
    assert!(disk[..100].iter().all(|byte| *byte == 0));
    assert!(disk[100..262_144] == data[..262_044]);
    assert!(disk[600_100..].iter().all(|byte| *byte == 0));
    drop(disk);
    two.end();
}

#[test]
fn overdue_partial_writes_fail_and_blocked_ones_time_out() {
    let mut two = Two::with(BridgeConfig { deferred_max: Some(30 * SECOND), ..config() });
    let (mut client, mut other) = (two.shards[0].client(), two.shards[1].client());
    two.shards[0].hold(true);
    client.send_write(0, 1, 100, &[1; 100]);
    settle(&mut two);
    two.shards[0].switches.give_up.store(true, SeqCst);
    settle(&mut two);
    let reply = client.reply(|_| 0);
    assert_eq!((reply.cookie, reply.error), (1, EIO));
    other.send_write(0, 2, 120, &[2; 100]);
    other.send_write(0, 3, 0, &[3; 512]);
    settle(&mut two);
    assert!(!is_answered(&mut other, 0));
    two.shards.iter_mut().for_each(|shard| shard.now = shard.now + 31 * SECOND);
    settle(&mut two);
    let mut answers = [other.reply(|_| 0), other.reply(|_| 0)].map(|r| (r.cookie, r.error));
    answers.sort_unstable();
    assert_eq!(answers, [(2, EIO), (3, EIO)]);
    two.shards[0].hold(false);
    settle(&mut two);
    assert_eq!([0, 100, 120].map(|at| two.disk(at)), [0; 3], "only the block was read");
    other.send_write(0, 4, 120, &[4; 1]);
    settle(&mut two);
    assert!(is_answered(&mut other, 0));
    drop((client, other));
    two.end();
}

/// A request in a round.
#[derive(Clone, Copy, Debug)]
struct Ask {
    command: u16,
    at: usize,
    len: usize,
    /// Index of the client that sends the request.
    client: usize,
}

fn ask() -> impl Strategy<Value = Ask> {
    let command = prop_oneof![
        4 => Just(WRITE), 2 => Just(READ), 1 => Just(ZEROES), 1 => Just(TRIM)
    ];
    // Requests are close together, so that most overlap; some are whole blocks.
    (command, 0..3000usize, 1..1500usize, 0..4u8, 0..4usize).prop_map(
        |(command, at, len, whole, client)| match whole {
            0 => Ask { command, at: at / 512 * 512, len: len.next_multiple_of(512), client },
            _ => Ask { command, at, len, client },
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Clients on two shards change and read overlapping bytes simultaneously. Afterwards, each
    /// byte has a value that one of its writers wrote in this round, or its previous value if it
    /// had no writer.
    #[test]
    fn every_byte_comes_from_one_of_its_writers(
        rounds in proptest::collection::vec(proptest::collection::vec(ask(), 1..24), 1..12),
        (block, delay_us, reverse, fill) in
            (prop_oneof![Just(512), Just(4096)], 0..3u64, any::<bool>(), 0..4u32),
    ) {
        const LEN: usize = 8192;
        let two = Fixture::two(&Geometry { size: 64 << 10, ..blocks_of(block) }, config());
        for fixture in &two {
            fixture.switches.delay_us.store(delay_us * 40, SeqCst);
            fixture.switches.reverse.store(reverse, SeqCst);
            fixture.switches.fill.store(fill, SeqCst);
        }
        let mut clients: Vec<_> = (0..4).map(|n| two[n % 2].client(n < 2)).collect();
        let mut disk = vec![0u8; LEN];
        let mut value = 0u8;
        for asks in rounds {
            // Possible values of each byte.
            let mut may: Vec<Vec<u8>> = vec![Vec::new(); LEN];
            let mut kept = vec![true; LEN];
            let mut sends: Vec<Vec<(Ask, u8)>> = vec![Vec::new(); 4];
            for ask in asks {
                value = value % 250 + 1;
                let put = if ask.command == ZEROES { 0 } else { value };
                sends[ask.client].push((ask, put));
                if [WRITE, ZEROES].contains(&ask.command) {
                    for at in ask.at..ask.at + ask.len {
                        may[at].push(put);
                        kept[at] = false;
                    }
                }
            }
            for (at, kept) in kept.iter().enumerate() {
                // A trim does not change the contents of this device.
                if *kept { may[at].push(disk[at]); }
            }
            let start = Arc::new(Barrier::new(clients.len()));
            let seen: Vec<_> = std::thread::scope(|scope| {
                let all: Vec<_> = clients.iter_mut().zip(&sends).map(|(client, sends)| {
                    let start = Arc::clone(&start);
                    scope.spawn(move || run(client, sends, &start))
                }).collect();
                all.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            let now = two[0].switches.disk.lock().unwrap()[..LEN].to_vec();
            for (at, byte) in now.iter().enumerate() {
                prop_assert!(may[at].contains(byte), "byte {at} is {byte}, not of {:?}", may[at]);
            }
            for (at, data) in seen {
                for (at, byte) in (at..).zip(data) {
                    let good = may[at].contains(&byte) || disk[at] == byte;
                    prop_assert!(good, "byte {at} read as {byte}, not of {:?}", may[at]);
                }
            }
            disk = now;
        }
        clients.into_iter().for_each(Client::disconnect);
        for fixture in two {
            fixture.finish();
        }
    }
}

/// Sends all requests without waiting. Returns the data read, with its position.
fn run(client: &mut Client, sends: &[(Ask, u8)], start: &Barrier) -> Vec<(usize, Vec<u8>)> {
    let mut bytes = Vec::new();
    for (cookie, (ask, put)) in sends.iter().enumerate() {
        let Ask { command, at, len, .. } = *ask;
        bytes.extend(request(command, 0, cookie as u64, at as u64, len as u32));
        if command == WRITE {
            bytes.extend(std::iter::repeat_n(*put, len));
        }
    }
    start.wait();
    std::io::Write::write_all(&mut client.stream, &bytes).unwrap();
    let reads = |cookie: u64| sends[cookie as usize].0;
    let mut seen = Vec::new();
    for _ in sends {
        let len = |cookie| if reads(cookie).command == READ { reads(cookie).len } else { 0 };
        let reply = client.reply(len);
        assert_eq!(reply.error, 0);
        if !reply.data.is_empty() {
            seen.push((reads(reply.cookie).at, reply.data));
        }
    }
    seen
}
