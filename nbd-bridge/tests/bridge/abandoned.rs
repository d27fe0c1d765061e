//! Tests of requests that time out at the device: their clients receive an error immediately, and
//! later completions of the requests are harmless.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use nbd_bridge::BridgeConfig;

use crate::client::{Client, FLUSH, READ, TRIM, ZEROES};
use crate::fixture::config;
use crate::ghosts::Two;

const OLD: [u8; 4096] = [1; 4096];
const NEW: [u8; 4096] = [2; 4096];
const EIO: u32 = 5;
const SECOND: Duration = Duration::from_secs(1);

/// Creates two shards of a device, the first of which holds its IO.
fn held(config: BridgeConfig) -> (Two, Client) {
    let mut two = Two::with(config);
    let client = two.shards[0].client();
    two.shards[0].hold(true);
    (two, client)
}

/// Makes everything in flight on shard 0 time out at the device.
fn give_up(two: &mut Two) {
    two.shards[0].switches.give_up.store(true, SeqCst);
    two.settle();
}

/// Returns the cookie and error of the next reply; None if everything is idle without a reply.
fn next(two: &mut Two, client: &mut Client) -> Option<(u64, u32)> {
    two.settle();
    let reply = client.try_reply(|_| 0).ok()?;
    Some((reply.cookie, reply.error))
}

/// Ends the test: disconnects all clients and checks that nothing is left.
fn end(mut two: Two, clients: Vec<Client>) {
    two.shards[0].hold(false);
    two.settle();
    drop(clients);
    two.end();
}

#[test]
fn an_overdue_request_fails_once_and_the_connection_stays() {
    let (mut two, mut client) = held(config());
    client.send(READ, 0, 1, 0, 4096);
    client.send(FLUSH, 0, 2, 0, 0);
    client.send_write(0, 3, 0, &OLD);
    assert_eq!(next(&mut two, &mut client), None);
    give_up(&mut two);
    let mut answers: Vec<_> = (0..3).filter_map(|_| next(&mut two, &mut client)).collect();
    answers.sort_unstable();
    assert_eq!(answers, [(1, EIO), (2, EIO), (3, EIO)]);
    assert_eq!(two.shards[0].bridge.stats().given_up, 3);
    // The device still has every request, and the memory of the read.
    assert_eq!((two.shards[0].bridge.inflight(), two.group.orphaned_writes()), (3, 1));
    two.shards[0].hold(false);
    assert_eq!(next(&mut two, &mut client), None, "each request is reported once");
    assert_eq!((two.shards[0].bridge.inflight(), two.group.orphaned_writes()), (0, 0));
    assert_eq!(two.disk(0), 1, "the write took effect late");
    client.send_write(0, 4, 0, &NEW);
    assert_eq!(next(&mut two, &mut client), Some((4, 0)));
    end(two, vec![client]);
}

#[test]
fn an_overdue_request_that_completes_during_its_reply_is_answered_once() {
    let (mut two, mut client) = held(config());
    client.send(READ, 0, 1, 0, 4096);
    client.send_write(0, 2, 4096, &OLD);
    two.settle();
    // The requests time out at the device and complete in the same turn.
    two.shards[0].hold(false);
    give_up(&mut two);
    let mut answers: Vec<_> = (0..3).filter_map(|_| next(&mut two, &mut client)).collect();
    answers.sort_unstable();
    assert_eq!(answers, [(1, EIO), (2, EIO)]);
    assert_eq!((two.shards[0].bridge.inflight(), two.group.orphaned_writes()), (0, 0));
    client.send_write(0, 3, 4096, &NEW);
    assert_eq!(next(&mut two, &mut client), Some((3, 0)));
    assert_eq!(two.disk(4096), 2);
    end(two, vec![client]);
}

#[test]
fn an_overdue_request_completing_with_its_reply_unread_is_answered_once() {
    const LEN: u32 = 4 << 20;
    let (mut two, mut client) = held(config());
    two.shards[0].hold(false);
    // The reply exceeds a socket buffer, so that later replies wait behind it.
    client.send(READ, 0, 1, 0, LEN);
    two.settle();
    two.shards[0].hold(true);
    client.send_write(0, 2, 0, &OLD);
    two.settle();
    give_up(&mut two);
    assert_eq!((two.shards[0].bridge.inflight(), two.group.orphaned_writes()), (2, 1));
    two.shards[0].hold(false);
    two.settle();
    assert_eq!((two.disk(0), two.group.orphaned_writes()), (1, 0), "the orphaned write has ended");
    assert_eq!(two.shards[0].bridge.inflight(), 2, "the client has no reply yet");
    let reading = std::thread::spawn(move || {
        client.stream.set_read_timeout(Some(20 * SECOND)).unwrap();
        let replies = [client.reply(|_| LEN as usize), client.reply(|_| 0)];
        client.stream.set_read_timeout(Some(SECOND / 10)).unwrap();
        (replies.map(|reply| (reply.cookie, reply.error)), client)
    });
    while !reading.is_finished() {
        two.settle();
    }
    let (answers, mut client) = reading.join().unwrap();
    assert_eq!(answers, [(1, 0), (2, EIO)]);
    assert_eq!(next(&mut two, &mut client), None);
    assert_eq!(two.shards[0].bridge.inflight(), 0);
    end(two, vec![client]);
}

#[test]
fn an_overdue_change_does_not_overwrite_a_newer_one() {
    for command in [None, Some(TRIM), Some(ZEROES)] {
        let (mut two, mut client) = held(config());
        match command {
            None => client.send_write(0, 1, 0, &OLD),
            Some(command) => client.send(command, 0, 1, 0, 4096),
        }
        two.settle();
        give_up(&mut two);
        assert_eq!(next(&mut two, &mut client), Some((1, EIO)));
        // Use another shard, whose device still works.
        let mut other = two.shards[1].client();
        other.send_write(0, 2, 0, &NEW);
        assert_eq!(next(&mut two, &mut other), None, "the older write may still take effect");
        other.send_write(0, 3, 4096, &NEW);
        assert_eq!(next(&mut two, &mut other), Some((3, 0)), "a write elsewhere does not wait");
        two.shards[0].hold(false);
        assert_eq!(next(&mut two, &mut other), Some((2, 0)));
        assert_eq!(two.disk(0), 2, "the newer write stays");
        end(two, vec![client, other]);
    }
}

#[test]
fn a_request_blocked_by_an_overdue_change_times_out() {
    let (mut two, mut client) = held(BridgeConfig { deferred_max: Some(30 * SECOND), ..config() });
    client.send_write(0, 1, 0, &OLD);
    two.settle();
    give_up(&mut two);
    assert_eq!(next(&mut two, &mut client), Some((1, EIO)));
    let mut other = two.shards[1].client();
    other.send_write(0, 2, 0, &NEW);
    assert_eq!(next(&mut two, &mut other), None);
    two.shards[1].now = two.shards[1].now + 29 * SECOND;
    assert_eq!(next(&mut two, &mut other), None);
    two.shards[1].now = two.shards[1].now + 2 * SECOND;
    assert_eq!(next(&mut two, &mut other), Some((2, EIO)));
    two.shards[0].hold(false);
    two.settle();
    assert_eq!(two.disk(0), 1, "the blocked write never began");
    end(two, vec![client, other]);
}

#[test]
fn a_client_closing_around_an_error_reply_leaves_nothing() {
    for is_answered in [false, true] {
        let (mut two, mut client) = held(config());
        client.send(READ, 0, 1, 0, 4096);
        client.send_write(0, 2, 0, &OLD);
        two.settle();
        if is_answered {
            give_up(&mut two);
            client.leave();
            two.settle();
        } else {
            client.leave();
            two.settle();
            give_up(&mut two);
        }
        assert_eq!(two.shards[0].bridge.inflight(), 2);
        assert_eq!(two.group.orphaned_writes(), 1, "the write must be counted once");
        end(two, Vec::new());
    }
}

#[test]
fn an_overdue_write_is_answered_once_its_payload_arrived() {
    let (mut two, mut client) = held(config());
    // The write is longer than a buffer, so the device receives its start before the rest arrives.
    let data = vec![7; 1 << 20];
    let mut bytes = crate::client::request(crate::client::WRITE, 0, 1, 0, 1 << 20);
    bytes.extend(&data);
    let (first, rest) = bytes.split_at(700 << 10);
    two.feed(&mut client, first);
    give_up(&mut two);
    assert_eq!(next(&mut two, &mut client), None);
    two.feed(&mut client, rest);
    assert_eq!(next(&mut two, &mut client), Some((1, EIO)));
    client.send(READ, 0, 2, 2 << 20, 512);
    two.shards[0].hold(false);
    two.settle();
    let reply = client.reply(|_| 512);
    assert_eq!((reply.cookie, reply.error), (2, 0), "the connection is still in sync");
    end(two, vec![client]);
}

/// Tests a write whose payload has partly arrived when its first IO times out. The rest of the
/// payload arrives after that IO has ended, while the partial block at the start or end of the
/// write is still waiting.
#[test]
fn an_overdue_write_with_only_a_blocked_part_completes() {
    for last in [false, true] {
        let (mut two, mut first) = held(config());
        let mut second = two.shards[0].client();
        let mut third = two.shards[1].client();
        let block = 4 << 20;
        // A partial block is being read on another shard.
        two.shards[1].hold(true);
        third.send_write(0, 1, block + 10, &[1; 20]);
        two.settle();
        two.settle();
        // The first part is at the device; the partial block waits.
        let len = 1 << 20;
        let at = if last { block + 100 - u64::from(len) } else { block + 100 };
        let mut bytes = crate::client::request(crate::client::WRITE, 0, 2, at, len);
        bytes.extend(vec![2; len as usize]);
        let (head, rest) = bytes.split_at(700 << 10);
        two.feed(&mut second, head);
        give_up(&mut two);
        assert_eq!(next(&mut two, &mut second), None, "the payload is still arriving");
        two.shards[0].hold(false);
        two.settle();
        two.feed(&mut second, rest);
        assert_eq!(next(&mut two, &mut second), None, "the partial block must wait for its turn");
        two.shards[1].hold(false);
        two.settle();
        assert_eq!(next(&mut two, &mut second), Some((2, 0)));
        assert_eq!(next(&mut two, &mut third), Some((1, 0)));
        let at = usize::try_from(at).unwrap();
        assert_eq!([at, at + len as usize - 1].map(|at| two.disk(at)), [2, 2]);
        first.send_write(0, 3, 0, &NEW);
        assert_eq!(next(&mut two, &mut first), Some((3, 0)));
        end(two, vec![first, second, third]);
    }
}

#[test]
fn a_bogus_device_completion_ends_one_connection() {
    let mut two = Two::new();
    let (mut client, mut other) = (two.shards[0].client(), two.shards[0].client());
    // The first requests wait until both shards have checked their connections.
    other.send_write(0, 1, 8192, &NEW);
    client.send(READ, 0, 1, 0, 4096);
    two.settle();
    assert_eq!(client.reply(|_| 4096).error, 0);
    let shard = &mut two.shards[0];
    assert_eq!((other.reply(|_| 0).error, shard.bridge.internal_errors()), (0, 0));
    shard.switches.lie.store(true, SeqCst);
    client.send_write(0, 2, 0, &OLD);
    shard.turn_unchecked();
    assert!(shard.bridge.internal_errors() > 0);
    shard.switches.lie.store(false, SeqCst);
    other.send_write(0, 3, 8192, &OLD);
    shard.turn_unchecked();
    assert_eq!(other.reply(|_| 0).error, 0, "the other connection continues");
    drop((client, other));
    shard.turn_unchecked();
    assert_eq!((shard.bridge.connections(), shard.bridge.inflight()), (0, 0));
}
