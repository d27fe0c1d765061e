//! Tests of client requests to the control shard: each turn serves a limited number of them,
//! clients take turns, and heartbeats and commands do not wait.

use std::sync::Arc;

use rtrs_core::fabric::WrOp;
use rtrs_core::limits::Limits;
use rtrs_core::mutant::{self, Mutant};
use rtrs_core::wire::{AUTH_VERSION, AccessMode, Challenge, Fence, Imm, MemBits, Move, Page};

use super::fixture::{Fixture, StandOptions, client_ip};
use super::peer::{Peer, PeerOptions};
use crate::access_list::{AccessPolicy, AccessRule, Unlisted};
use crate::backend::NullSource;
use crate::engine::message::{AdminReply, AdminReplyTo, AdminRequest, ControlMessage, Message};
use crate::export::Export;

const DEPTH: u16 = 64;
/// Number of sessions that send as many requests as possible.
const GREEDY: u8 = 12;
/// Maximum number of the most expensive requests per turn, including one that may exceed the limit.
const ANSWERS_MAX: usize = 512 / 64 + 1;
/// Maximum number of the cheapest requests per turn, including one that may exceed the limit.
const CHEAP_MAX: usize = 512 / 16 + 1;

/// A server with many exports that only the last client may open; the others may read `vol`.
fn server() -> Fixture {
    let mut options = StandOptions::default();
    options.params.limits = Limits::new(u32::from(DEPTH), 16384).unwrap();
    options.params.cores = 1;
    let fixture = Fixture::new(options);
    let names: Vec<String> = (0..1000).map(|n| format!("tenant-{n:04}")).collect();
    for name in &names {
        let export = Export::new(name, Arc::new(NullSource::new(4096, 512)));
        fixture.exports.add(&Arc::new(export)).unwrap();
    }
    let own: Vec<AccessRule> = vec![format!("anyone@{}:rw", client_ip(20)).parse().unwrap()];
    let all: Vec<AccessRule> = vec!["anyone:ro".parse().unwrap()];
    let lists = names.iter().map(|name| (name.as_str(), &own[..]));
    fixture.exports.set_access(AccessPolicy::new(&all, lists, Unlisted::Nobody));
    fixture
}

fn client(fixture: &mut Fixture, number: u8) -> Peer {
    let options = PeerOptions {
        session: number,
        path: number,
        local: number,
        cid_num: 2,
        ..PeerOptions::default()
    };
    let mut peer = Peer::up(fixture, options, &format!("client{number}"));
    peer.open_device(fixture, "vol", AccessMode::ReadOnly).unwrap();
    peer
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Discover,
    Open,
    OpenRefused,
    Close,
    Move,
    Fence,
    Challenge,
}

fn ask(peer: &mut Peer, kind: Kind, permit: u16) {
    match kind {
        Kind::Discover => peer.send_discover((0, permit), "", Page::LEN_MAX),
        Kind::Open => peer.send_open(permit, "vol", AccessMode::ReadOnly),
        Kind::OpenRefused => peer.send_open(permit, "tenant-0001", AccessMode::ReadOnly),
        Kind::Close => peer.send_close(permit, 900),
        Kind::Move => peer.send_move(permit, Move::default()),
        Kind::Fence => {
            let mut fence = [0; Fence::LEN];
            fence[..2].copy_from_slice(&0x8001_u16.to_le_bytes());
            fence[4..20].fill(77);
            peer.send_fence(permit, Fence::decode(&fence).unwrap());
        }
        Kind::Challenge => {
            let (nonce, credential) = ([1; 32], [2; 32]);
            let challenge = Challenge { version: AUTH_VERSION, nonce, credential };
            peer.send_challenge((0, permit), &challenge, 1024);
        }
    }
}

/// Observations made in the turns under load.
#[derive(Debug, Default)]
struct Seen {
    /// Maximum number of answers in a turn.
    most: usize,
    answers: usize,
    /// Number of answers sent before the one to the quiet client.
    before_quiet: usize,
    /// Number of answers sent before the quiet client's heartbeat was acknowledged.
    before_ack: usize,
    /// Number of turns for which the operator's command waited.
    command_turns: usize,
}

fn play(kind: Kind) -> Seen {
    let mut fixture = server();
    let mut greedy: Vec<Peer> = (1..=GREEDY).map(|n| client(&mut fixture, n)).collect();
    let mut quiet = client(&mut fixture, 20);
    fixture.settle();
    let _ = fixture.posted();
    for permit in 0..DEPTH - 1 {
        greedy.iter_mut().for_each(|peer| ask(peer, kind, permit));
    }
    // The permit identifies the answer to the quiet client.
    ask(&mut quiet, Kind::Open, DEPTH - 1);
    let bits = MemBits::for_depth(DEPTH);
    quiet.send_imm(0, Imm::Heartbeat { next_ms: 0 }.encode_with(bits));
    let mut seen = Seen::default();
    let (mut answered, mut acknowledged) = (false, false);
    let command = Arc::new(parking_lot::Mutex::new(None));
    let mut asked = false;
    while fixture.step() {
        let posted = fixture.posted();
        let imms = posted.iter().filter_map(|one| match one.op {
            WrOp::Send { imm, .. } | WrOp::RdmaWrite { imm, .. } => imm,
            _ => None,
        });
        let mut answers = 0;
        for imm in imms.map(|imm| Imm::decode_with(imm, bits)) {
            answers += usize::from(matches!(imm, Imm::Response { .. }));
            answered |= matches!(imm, Imm::Response { permit, .. } if permit.0 == DEPTH - 1);
            acknowledged |= imm == Imm::HeartbeatAck;
        }
        seen.most = seen.most.max(answers);
        seen.answers += answers;
        quiet.drain();
        greedy.iter_mut().for_each(|peer| peer.drain());
        seen.before_quiet = if answered { seen.before_quiet } else { seen.answers };
        seen.before_ack = if acknowledged { seen.before_ack } else { seen.answers };
        if answers > 0 && !asked {
            asked = true;
            let place = Arc::clone(&command);
            let reply = AdminReplyTo::new(move |answer: AdminReply| *place.lock() = Some(answer));
            let request = AdminRequest::Sessions;
            fixture.send(Message::Control(ControlMessage::Admin { request, reply }));
        } else if asked && command.lock().is_none() {
            seen.command_turns += 1;
        }
    }
    assert!(answered && acknowledged && command.lock().is_some(), "{kind:?}: {seen:?}");
    seen
}

#[test]
fn a_turn_is_bounded_and_serves_clients_fairly() {
    use Kind::{Challenge, Close, Discover, Fence, Move, Open, OpenRefused};
    for kind in [Discover, Open, OpenRefused, Close, Fence, Move, Challenge] {
        let seen = play(kind);
        let all = usize::from(GREEDY) * usize::from(DEPTH - 1) + 1;
        assert_eq!(seen.answers, all, "{kind:?}: {seen:?}");
        let most =
            if matches!(kind, Discover | Open | OpenRefused) { ANSWERS_MAX } else { CHEAP_MAX };
        assert!(seen.most <= most, "{kind:?}: {seen:?}");
        assert_eq!(seen.command_turns, 0, "{kind:?}: {seen:?}");
        // Neither the quiet client nor its heartbeat waits for more than a few turns.
        assert!(seen.before_quiet <= 4 * CHEAP_MAX + all / 8, "{kind:?}: {seen:?}");
        assert!(seen.before_ack <= 4 * CHEAP_MAX + all / 8, "{kind:?}: {seen:?}");
    }
}

#[test]
fn an_unbounded_turn_is_detected() {
    mutant::choose(Some(Mutant::ControlUnbounded));
    let seen = play(Kind::Discover);
    mutant::choose(None);
    assert!(seen.most > ANSWERS_MAX || !cfg!(debug_assertions), "{seen:?}");
}

/// A list is computed once for all of a client's sessions, and again after a change.
#[test]
fn a_list_is_cached_until_exports_or_access_lists_change() {
    let mut fixture = server();
    let mut peer = client(&mut fixture, 1);
    let names = |fixture: &mut Fixture, peer: &mut Peer| -> Vec<String> {
        peer.clear_result();
        peer.send_discover((0, 0), "", Page::LEN_MAX);
        assert_eq!(peer.reply(fixture).errno, 0);
        let page = Page::decode(&peer.result(Page::LEN_MAX)).unwrap();
        page.exports.iter().map(|export| export.name.to_string()).collect()
    };
    assert_eq!(names(&mut fixture, &mut peer), ["fixed", "other", "vol"]);
    let export = Export::new("more", Arc::new(NullSource::new(4096, 512)));
    fixture.exports.add(&Arc::new(export)).unwrap();
    assert_eq!(names(&mut fixture, &mut peer), ["fixed", "more", "other", "vol"]);
    let remove = AdminRequest::ExportRemove { name: "other".into(), force: true };
    let _ = fixture.admin(remove);
    assert_eq!(names(&mut fixture, &mut peer), ["fixed", "more", "vol"]);
    let all: Vec<AccessRule> = vec!["anyone:ro".parse().unwrap()];
    let none: Vec<AccessRule> = vec![format!("anyone@{}:rw", client_ip(20)).parse().unwrap()];
    let lists = [("more", &none[..])].into_iter();
    fixture.exports.set_access(AccessPolicy::new(&all, lists, Unlisted::Nobody));
    let listed = names(&mut fixture, &mut peer);
    assert!(!listed.contains(&"more".to_owned()), "{listed:?}");
    assert!(listed.contains(&"tenant-0000".to_owned()), "{listed:?}");
}
