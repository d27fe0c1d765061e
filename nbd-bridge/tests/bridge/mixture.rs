//! Tests of all kinds of fragmented requests, with devices that hang, fill up, time out or fail,
//! and clients that disconnect. In every combination, the bridge must release all request slots and
//! buffers and answer each request once.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use nbd_bridge::BridgeConfig;
use proptest::prelude::*;
use rtrs_core::block::Geometry;

use crate::client::{Client, FLUSH, FUA, READ, TRIM, WRITE, ZEROES, request};
use crate::fixture::{config, geometry};
use crate::ghosts::Two;

const SECOND: Duration = Duration::from_secs(1);
/// Number of clients per shard.
const CLIENTS: usize = 2;
/// Number of turns in which every possible event happens.
const TURNS: usize = 8;
/// Approximate offset of all requests.
const PLACE: u64 = 1 << 20;

#[derive(Clone, Copy, Debug)]
enum Step {
    Ask {
        client: usize,
        command: u16,
        flags: u16,
        at: u64,
        len: u32,
        percent: usize,
    },
    /// The rest of a message that a client has started to send.
    Rest {
        client: usize,
    },
    Leave {
        client: usize,
    },
    Hold {
        shard: usize,
        hold: bool,
    },
    GiveUp {
        shard: usize,
    },
    Fill {
        shard: usize,
        room: u32,
    },
    Fail {
        shard: usize,
        every: u32,
    },
    Reverse {
        shard: usize,
        reverse: bool,
    },
    /// A wait of 20 s; two waits exceed the time for which requests may be deferred.
    Wait,
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..2 * CLIENTS;
    let command = prop_oneof![
        6 => Just(WRITE), 1 => Just(READ), 1 => Just(FLUSH), 1 => Just(ZEROES), 1 => Just(TRIM)
    ];
    let flags = prop_oneof![4 => Just(0), 1 => Just(FUA)];
    // Lengths: within a block, across several blocks, and longer than a buffer.
    let len = prop_oneof![3 => 1..1000u32, 1 => Just(512u32), 2 => 270_000..700_000u32];
    let percent = prop_oneof![1 => Just(100usize), 2 => 1..100usize];
    let place = prop_oneof![0..1500u64, Just(0u64)];
    let ask = (client.clone(), command, flags, place, len, percent, any::<bool>());
    let ask = ask.prop_map(|(client, command, flags, place, len, percent, ends_there)| {
        let flags = if matches!(command, READ | FLUSH) { 0 } else { flags };
        let from = if ends_there { u64::from(len) } else { 0 };
        let (at, len) = if command == FLUSH { (0, 0) } else { (PLACE + place - from, len) };
        Step::Ask { client, command, flags, at, len, percent }
    });
    let shard = 0..2usize;
    prop_oneof![
        8 => ask,
        6 => client.clone().prop_map(|client| Step::Rest { client }),
        1 => client.prop_map(|client| Step::Leave { client }),
        4 => (shard.clone(), any::<bool>()).prop_map(|(shard, hold)| Step::Hold { shard, hold }),
        3 => shard.clone().prop_map(|shard| Step::GiveUp { shard }),
        1 => (shard.clone(), 0..4u32).prop_map(|(shard, room)| Step::Fill { shard, room }),
        1 => (shard.clone(), 0..6u32).prop_map(|(shard, every)| Step::Fail { shard, every }),
        1 => (shard, any::<bool>()).prop_map(|(shard, reverse)| Step::Reverse { shard, reverse }),
        1 => Just(Step::Wait),
    ]
}

/// A client with its unsent bytes and pending requests.
struct User {
    client: Client,
    out: Vec<u8>,
    input: Vec<u8>,
    /// Requests that have no reply yet, with the data length of a successful reply.
    asked: BTreeMap<u64, usize>,
}

impl User {
    fn new(client: Client) -> Self {
        client.stream.set_nonblocking(true).unwrap();
        Self { client, out: Vec::new(), input: Vec::new(), asked: BTreeMap::new() }
    }

    fn send(&mut self, most: usize) {
        let most = most.min(self.out.len());
        match self.client.stream.write(&self.out[..most]) {
            Ok(count) => drop(self.out.drain(..count)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }

    /// Receives replies that have arrived.
    fn receive(&mut self) {
        let mut bytes = vec![0; 64 << 10];
        loop {
            match self.client.stream.read(&mut bytes) {
                Ok(count) => {
                    assert!(count > 0, "the bridge closed the connection");
                    self.input.extend(&bytes[..count]);
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                    break;
                }
            }
        }
        while let Some(head) = self.input.get(..16) {
            assert_eq!(head[..4], 0x6744_6698u32.to_be_bytes(), "expected a simple reply");
            let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
            let cookie = u64::from_be_bytes(head[8..].try_into().unwrap());
            let len = *self.asked.get(&cookie).expect("reply without a pending request");
            let len = 16 + if error == 0 { len } else { 0 };
            if self.input.len() < len {
                break;
            }
            self.asked.remove(&cookie);
            self.input.drain(..len);
        }
    }
}

struct Scene {
    two: Two,
    users: Vec<User>,
    cookie: u64,
}

impl Scene {
    fn new() -> Self {
        let config = BridgeConfig { deferred_max: Some(30 * SECOND), ..config() };
        let mut two = Two::of(&Geometry { size: 4 << 20, ..geometry() }, config);
        let users = (0..2 * CLIENTS).map(|at| User::new(two.shards[at % 2].client())).collect();
        Self { two, users, cookie: 0 }
    }

    fn turn(&mut self) {
        for _ in 0..TURNS {
            self.two.shards.iter_mut().for_each(crate::ghosts::Shard::turn_once);
            self.users.iter_mut().for_each(User::receive);
        }
    }

    fn go(&mut self, step: Step) {
        let switches = |shard: usize| &self.two.shards[shard].switches;
        match step {
            Step::Ask { client, command, flags, at, len, percent } => {
                self.cookie += 1;
                let user = &mut self.users[client];
                let mut bytes = request(command, flags, self.cookie, at, len);
                if command == WRITE {
                    bytes.resize(bytes.len() + len as usize, self.cookie as u8);
                }
                user.asked.insert(self.cookie, if command == READ { len as usize } else { 0 });
                let most = user.out.len() + bytes.len() * percent / 100;
                user.out.extend(bytes);
                user.send(most);
            }
            Step::Rest { client } => self.users[client].send(usize::MAX),
            Step::Leave { client } => {
                // A new client is served once every shard has checked its connections. No shard is
                // stalled here.
                let fresh = self.two.shards[client % 2].client();
                self.users[client] = User::new(fresh);
            }
            Step::Hold { shard, hold } => switches(shard).hold.store(hold, SeqCst),
            Step::GiveUp { shard } => switches(shard).give_up.store(true, SeqCst),
            Step::Fill { shard, room } => switches(shard).fill.store(room, SeqCst),
            Step::Fail { shard, every } => switches(shard).fail_every.store(every, SeqCst),
            Step::Reverse { shard, reverse } => switches(shard).reverse.store(reverse, SeqCst),
            Step::Wait => {
                // Finish partial messages first, or the bridge would disconnect their clients.
                for _ in 0..20 {
                    self.users.iter_mut().for_each(|user| user.send(usize::MAX));
                    self.turn();
                }
                self.two.shards.iter_mut().for_each(|shard| shard.now = shard.now + 20 * SECOND);
            }
        }
        self.turn();
    }

    /// Asserts that every request is answered once the devices have recovered.
    fn end(mut self) {
        for shard in &self.two.shards {
            shard.switches.hold.store(false, SeqCst);
            shard.switches.fill.store(0, SeqCst);
        }
        let waits = |user: &User| !user.asked.is_empty() || !user.out.is_empty();
        for _ in 0..5000 {
            self.users.iter_mut().for_each(|user| user.send(usize::MAX));
            self.turn();
            if !self.users.iter().any(waits) {
                break;
            }
        }
        for (at, user) in self.users.iter().enumerate() {
            assert!(!waits(user), "client {at}: {:?}, {} bytes", user.asked, user.out.len());
        }
        self.users.clear();
        self.two.end();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn each_request_is_answered_once(steps in proptest::collection::vec(step(), 10..80)) {
        let mut scene = Scene::new();
        steps.into_iter().for_each(|step| scene.go(step));
        scene.end();
    }
}
