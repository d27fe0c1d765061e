//! Tests of admission control: accepted connections, and the evictions that make room for them.

use rtrs_core::fabric::FabricEvent;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, PingHello, PingMode};

use super::fixture::{Fixture, StandOptions, client_ip};
use super::peer::{Peer, PeerOptions};
use crate::engine::message::{AdminReply, AdminRequest};
use crate::engine::session::SessionParams;

fn small(change: impl Fn(&mut SessionParams)) -> Fixture {
    let mut options = StandOptions::default();
    change(&mut options.params);
    Fixture::new(options)
}

/// Options for a new session from one of the client's addresses.
fn of(session: u8, local: u8) -> PeerOptions {
    PeerOptions { session, path: session, local, ..PeerOptions::default() }
}

/// Connects only the first connection of a session.
fn half_open(fixture: &mut Fixture, session: u8, local: u8) -> Peer {
    let mut peer = Peer::new(fixture, of(session, local));
    peer.connect(fixture, 0).unwrap();
    peer
}

fn refused(fixture: &mut Fixture, reason: &str) -> u64 {
    let answer = fixture.admin(AdminRequest::Sessions);
    match answer.lock().take() {
        Some(AdminReply::Sessions { refused, .. }) => refused.get(reason).copied().unwrap_or(0),
        other => panic!("{other:?}"),
    }
}

/// Unproven sessions from the session's own address and from others fill all slots. The session
/// has opened an export, so it can add a path, and reconnect after all its paths have ended.
#[test]
fn unproven_sessions_do_not_prevent_a_reconnect() {
    let mut fixture = small(|params| params.half_open_max = 6);
    let mut first = Peer::open(&mut fixture, of(1, 0));
    let strangers: Vec<Peer> = (0..6).map(|n| half_open(&mut fixture, 10 + n, n % 3)).collect();
    let second = PeerOptions { path: 2, first_conn: false, local: 1, ..of(1, 1) };
    let mut second = Peer::up(&mut fixture, second, "sess");
    first.leave(&mut fixture);
    second.leave(&mut fixture);
    assert_eq!(fixture.sessions().len(), strangers.len());
    let again = PeerOptions { recon_cnt: 2, ..of(1, 0) };
    let mut again = Peer::open(&mut fixture, again);
    assert_eq!(refused(&mut fixture, "strangers-ended"), 0);
    for mut stranger in strangers {
        assert_eq!(stranger.closed(&mut fixture), 0);
    }
    again.leave(&mut fixture);
}

#[test]
fn the_oldest_unproven_session_of_the_busiest_source_is_evicted() {
    let mut fixture = small(|params| params.half_open_max = 3);
    // A completed handshake counts until the session has opened an export.
    let alone = PeerOptions { cid_num: 1, ..of(10, 1) };
    let mut single = Peer::up(&mut fixture, alone, "single");
    let mut crowd: Vec<Peer> = (11..14).map(|n| half_open(&mut fixture, n, 2)).collect();
    crowd.push(half_open(&mut fixture, 14, 3));
    let closed: Vec<usize> = crowd.iter_mut().map(|peer| peer.closed(&mut fixture)).collect();
    assert_eq!((closed, single.closed(&mut fixture)), (vec![1, 1, 0, 0], 0));
    assert_eq!(refused(&mut fixture, "strangers-ended"), 2);
    // One session from each source is left; the next connection evicts the oldest.
    let mut more = half_open(&mut fixture, 15, 4);
    assert_eq!((single.closed(&mut fixture), more.closed(&mut fixture)), (1, 0));
}

/// The limit on unproven sessions has been reached, so each connection admitted evicts one.
#[test]
fn a_refused_connection_evicts_nothing() {
    let mut fixture = small(|params| params.half_open_max = 3);
    let mut crowd: Vec<Peer> = (11..14).map(|n| half_open(&mut fixture, n, n % 3)).collect();
    let newest = crowd.last_mut().unwrap();
    assert_eq!(newest.connect(&mut fixture, 0), Err(-104), "the connection already exists");
    let more = PeerOptions { cid_num: 5, ..newest.options };
    let request = more.request(1).encode();
    assert_eq!(newest.connect_raw(&mut fixture, &request), Err(-104), "a different count");
    let second = PeerOptions { path: 2, first_conn: false, ..newest.options };
    let mut second = Peer::new(&fixture, second);
    assert_eq!(second.connect(&mut fixture, 0), Err(-17), "the addresses have a path");
    assert!(crowd.iter_mut().all(|peer| peer.closed(&mut fixture) == 0));
    assert_eq!(refused(&mut fixture, "strangers-ended"), 0);
    // The missing connection evicts the oldest session.
    let newest = crowd.last_mut().unwrap();
    assert_eq!(newest.connect(&mut fixture, 1), Ok(()));
    assert_eq!(refused(&mut fixture, "strangers-ended"), 1);
}

#[test]
fn sessions_without_opens_are_evicted_for_others() {
    let mut fixture = small(|params| params.sessions_max = 3);
    let mut opened = vec![Peer::open(&mut fixture, of(1, 0))];
    let idle: Vec<Peer> =
        (2..4).map(|n| Peer::up(&mut fixture, of(n, 1), &format!("idle{n}"))).collect();
    for (n, mut oldest) in (10..).zip(idle) {
        let mut new = Peer::up(&mut fixture, of(n, 2), &format!("new{n}"));
        new.open_device(&mut fixture, "fixed", AccessMode::ReadOnly).unwrap();
        opened.push(new);
        assert_eq!(oldest.closed(&mut fixture), 3, "{n}");
    }
    let mut more = Peer::new(&fixture, of(20, 3));
    assert_eq!(more.connect(&mut fixture, 0).unwrap_err(), -87, "all have opened an export");
    let counts = ["strangers-ended", "sessions-max"].map(|reason| refused(&mut fixture, reason));
    assert_eq!(counts, [2, 1]);
    assert!(opened.iter_mut().all(|peer| peer.closed(&mut fixture) == 0));
}

#[test]
fn a_session_without_opens_times_out() {
    let second = Duration::from_secs(1);
    let mut fixture = small(|params| {
        (params.open_timeout, params.heartbeat_interval) = (second * 12, second * 5);
    });
    let mut opened = Peer::open(&mut fixture, of(1, 0));
    let mut tries = Peer::up(&mut fixture, of(2, 1), "tries");
    let mut idle = Peer::up(&mut fixture, of(3, 2), "idle");
    fixture.pass(second * 9);
    tries.open_device(&mut fixture, "nothing", AccessMode::ReadOnly).unwrap_err();
    assert_eq!(idle.closed(&mut fixture), 0);
    fixture.pass(second * 7);
    assert_eq!(idle.closed(&mut fixture), 3);
    assert_eq!((tries.closed(&mut fixture), opened.closed(&mut fixture)), (0, 0));
    assert_eq!(refused(&mut fixture, "not-opened"), 1);
    fixture.pass(second * 8);
    assert_eq!((tries.closed(&mut fixture), opened.closed(&mut fixture)), (3, 0));
}

/// When a session opens an export, the listener learns each address of its paths once. After that,
/// it learns the address of each new path.
#[test]
fn the_listener_knows_the_addresses_of_sessions() {
    let mut fixture = small(|_| ());
    let mut stranger = Peer::up(&mut fixture, of(9, 3), "stranger");
    let mut first = Peer::up(&mut fixture, of(1, 0), "sess");
    assert!(fixture.known.borrow().is_empty());
    first.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
    let second = PeerOptions { path: 2, first_conn: false, ..of(1, 1) };
    let mut second = Peer::up(&mut fixture, second, "sess");
    assert_eq!(*fixture.known.borrow(), [(client_ip(0), true), (client_ip(1), true)]);
    first.leave(&mut fixture);
    second.leave(&mut fixture);
    stranger.leave(&mut fixture);
    let again = PeerOptions { recon_cnt: 2, ..of(1, 0) };
    let _again = Peer::open(&mut fixture, again);
    assert_eq!(fixture.known.borrow().len(), 2, "they stay known");
}

/// If there is a shard besides the control shard, pings run there.
#[test]
fn pings_run_on_the_last_shard() {
    let hello = PingHello {
        mode: PingMode::PingPong,
        duplex: false,
        server_invalidate: false,
        read_invalidate: false,
        depth: 1,
        size: 64,
    };
    for (cores, max, accepted) in [(1, 64, 1), (3, 64, 1), (3, 0, 0)] {
        let mut fixture = small(|params| {
            (params.cores, params.pings.connections_max) = (cores, max);
        });
        let mut peer = Peer::new(&fixture, of(1, 0));
        let qp = peer.ask(&fixture, &hello.encode());
        fixture.settle();
        let stats = fixture.pings();
        let (last, others) = stats.split_last().unwrap();
        assert_eq!(last.map(|stats| stats.accepted), Some(accepted), "{cores} {max}");
        assert!(others.iter().all(Option::is_none), "{others:?}");
        // Pings end with the server.
        fixture.shutdown();
        fixture.settle();
        peer.drain();
        let ended = |event: &FabricEvent| match event {
            FabricEvent::Closed { qp: of, .. } => *of == qp && accepted == 1,
            FabricEvent::ConnectFailed { qp: of, .. } => *of == qp && accepted == 0,
            _ => false,
        };
        assert!(peer.events.iter().any(ended), "{:?}", peer.events);
    }
}
