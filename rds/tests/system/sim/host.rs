//! Node with its users: a sender, and a reader for each socket.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::net::Ipv4Addr;

use rds::proto::{Config, Event, LinkId, Node, Outgoing, SendError, SocketId};
use rtrs_core::prng::Prng;
use rtrs_core::time::Duration;
use rtrs_core::time::Instant;

use super::checker::Checker;
use super::plan::Plan;

/// First port of each node.
const FIRST_PORT: u16 = 4000;

pub(super) fn address(host: usize) -> IpAddr {
    Ipv4Addr::new(10, 9, 0, u8::try_from(host + 1).unwrap_or(255)).into()
}

pub(super) fn host_of(address: IpAddr) -> usize {
    match address {
        IpAddr::V4(v4) => usize::from(v4.octets()[3]) - 1,
        IpAddr::V6(_) => usize::MAX,
    }
}

/// Message that a user has not been able to send yet.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    from: usize,
    to: usize,
    port: u16,
    len: usize,
}

/// Errors that users have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) congested: u64,
    pub(super) full: u64,
}

/// Node with its users, in one run of its process.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) index: usize,
    pub(super) life: u32,
    pub(super) announces: bool,
    pub(super) node: Node,
    sockets: Vec<SocketId>,
    /// Messages that are waiting for buffer space, in order of submission. The user waits for an
    /// event before trying again.
    wanted: VecDeque<Wanted>,
    may_try: bool,
    /// Sockets whose readers have work.
    readable: BTreeSet<SocketId>,
    /// Payload passed to readers that take it later and have not taken it yet.
    untaken: BTreeMap<SocketId, usize>,
    takes_late: bool,
    /// Time until which the readers pause.
    pub(super) rests_until: Instant,
    /// Links whose buffers were full.
    pub(super) blocked: BTreeSet<LinkId>,
    pub(super) refused: Refused,
}

impl Host {
    pub(super) fn start(plan: &Plan, index: usize, life: u32, prng: &mut Prng) -> Self {
        let announces = plan.announces[index];
        // Peers cannot tell apart the runs of a node that does not announce them.
        let generation = if announces { prng.next_u32() | 1 } else { 0 };
        let mut config = Config::new(address(index), generation, prng.next_u64());
        (config.sndbuf, config.rcvbuf) = (plan.sndbuf, plan.rcvbuf);
        config.connect_timeout = Duration::from_secs(3);
        config.paths = plan.paths[index];
        let mut node = Node::new(config);
        let ports = FIRST_PORT..FIRST_PORT + plan.sockets[index];
        let sockets = ports.map(|port| node.bind(port).expect("a free port")).collect();
        Self {
            index,
            life,
            announces,
            node,
            sockets,
            wanted: VecDeque::new(),
            may_try: true,
            readable: BTreeSet::new(),
            untaken: BTreeMap::new(),
            takes_late: plan.takes_late[index],
            rests_until: Instant::ZERO,
            blocked: BTreeSet::new(),
            refused: Refused::default(),
        }
    }

    /// Queues a message from a user to another node.
    pub(super) fn want(&mut self, plan: &Plan, to: usize, prng: &mut Prng) {
        self.wanted.push_back(Wanted {
            from: prng.index(self.sockets.len()),
            to,
            port: FIRST_PORT + u16::try_from(prng.index(plan.sockets[to].into())).unwrap_or(0),
            len: usize::try_from(prng.range(0..=plan.len_max)).unwrap_or(0),
        });
        self.may_try = true;
    }

    /// Whether messages are waiting for buffer space.
    pub(super) fn is_waiting(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Whether readers have been passed messages that they have not taken.
    pub(super) fn has_untaken(&self) -> bool {
        !self.untaken.is_empty()
    }

    /// Lets users read and send as much as they can. `lives` are the runs of all nodes.
    pub(super) fn users(
        &mut self,
        now: Instant,
        lives: &[u32],
        checker: &mut Checker,
    ) -> Result<(), String> {
        loop {
            self.take_events();
            if self.rests_until <= now {
                self.read(checker)?;
            }
            if !std::mem::take(&mut self.may_try) {
                return Ok(());
            }
            self.send(now, lives, checker)?;
        }
    }

    /// Takes events. Users retry only after an event.
    fn take_events(&mut self) {
        while let Some(event) = self.node.ports_mut().take_event() {
            match event {
                Event::Readable(id) => {
                    self.readable.insert(id);
                }
                Event::Writable(_) | Event::Congestion(_) => self.may_try = true,
            }
        }
    }

    fn read(&mut self, checker: &mut Checker) -> Result<(), String> {
        let own = (self.index, self.life);
        for (id, payload) in std::mem::take(&mut self.untaken) {
            self.node.taken(id, payload);
        }
        for id in std::mem::take(&mut self.readable) {
            while let Some(received) = self.node.pass(id) {
                match self.takes_late {
                    true => *self.untaken.entry(id).or_default() += received.payload.len(),
                    false => self.node.taken(id, received.payload.len()),
                }
                let from = (host_of(received.from), received.port);
                checker.read(from, (own, id.port), &received.payload, self.announces)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, now: Instant, lives: &[u32], checker: &mut Checker) -> Result<(), String> {
        for wanted in std::mem::take(&mut self.wanted) {
            let id = self.sockets[wanted.from];
            let (to, port) = (address(wanted.to), wanted.port);
            let payload = checker.payload(wanted.len);
            match self.node.may_send(id, to, port, payload.len()) {
                Ok(()) => {
                    let sent = self.node.send(now, id, Outgoing::new(to, port, payload));
                    sent.map_err(|why| format!("send: {why}"))?;
                    let (from, to) = ((self.index, self.life), (wanted.to, lives[wanted.to]));
                    checker.sent(from, to, (id.port, wanted.port), wanted.len);
                }
                Err(why) => {
                    match why {
                        SendError::Congested => self.refused.congested += 1,
                        SendError::Full => self.refused.full += 1,
                        _ => return Err(format!("send: {why}")),
                    }
                    self.wanted.push_back(wanted);
                }
            }
        }
        Ok(())
    }
}
