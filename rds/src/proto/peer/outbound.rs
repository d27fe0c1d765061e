//! State of the data sent to a peer: the outbox, and what must arrive before messages may be sent.

use rtrs_base::mutated;
use rtrs_base::time::Instant;

use crate::proto::amount::Amount;
use crate::proto::link::Link;
use crate::proto::outbox::{Message, Outbox, Owner, orphan};
use crate::proto::shares::UserId;
use crate::wire::{CONG_BITMAP, CongestionMap, Extensions, Header, MAP_LEN, PING_PORT, PROBE_PORT};

/// Own state that a node announces on each connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::proto) struct Greeting<'a> {
    pub(in crate::proto) generation: Option<u32>,
    /// Maximum number of connections to a peer.
    pub(in crate::proto) paths: usize,
    pub(in crate::proto) congested: &'a CongestionMap,
}

/// Number of maps and repeated messages that were queued on a link.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::proto) struct Filled {
    pub(in crate::proto) maps: u64,
    pub(in crate::proto) repeats: u64,
}

/// Messages that their socket has abandoned.
#[derive(Debug, Default)]
pub(in crate::proto) struct Abandoned {
    /// Messages that will not be sent.
    pub(in crate::proto) dropped: Vec<Message>,
    /// Messages that lost their owner; a connection may still deliver them.
    pub(in crate::proto) amount: Amount,
}

/// Data to be sent to a peer, across connections.
#[derive(Debug, Default)]
pub(in crate::proto) struct Outbound {
    outbox: Outbox,
    /// The peer has acknowledged a message of ours, and so interprets our sequence numbers
    /// correctly.
    is_synced: bool,
    /// Only maps and probes are sent until the peer's map has arrived, or until this time.
    hold_until: Option<Instant>,
    /// Number of unacknowledged answers to the peer's pings.
    pongs: usize,
}

impl Outbound {
    /// Returns the messages that are not queued on a connection, in order.
    pub(in crate::proto) fn messages(&self) -> impl Iterator<Item = &Message> {
        self.outbox.iter()
    }

    pub(super) fn next_tx(&self) -> u64 {
        self.outbox.next_tx()
    }

    /// Whether the peer interprets our sequence numbers correctly.
    pub(in crate::proto) fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// Whether users' messages are waiting to be sent to the peer.
    pub(in crate::proto) fn has_messages(&self) -> bool {
        self.outbox.iter().any(|message| message.owner != Owner::Pong)
    }

    /// Whether the unacknowledged answers to pings have reached half of their limit.
    pub(in crate::proto) fn has_many_pongs(&self, pongs_max: usize) -> bool {
        self.pongs * 2 >= pongs_max
    }

    pub(in crate::proto) fn push(&mut self, message: Message) {
        self.outbox.push(message);
    }

    /// Queues the answer to a ping or probe, unless `pongs_max` are unacknowledged. Returns whether
    /// it is queued.
    pub(super) fn push_pong(
        &mut self,
        dport: u16,
        generation: Option<u32>,
        pongs_max: usize,
    ) -> bool {
        if self.pongs >= pongs_max {
            return false;
        }
        self.pongs += 1;
        let extensions = match dport {
            PROBE_PORT => probe_extensions(generation),
            _ => [0; 16],
        };
        let (owner, sport, payload) = (Owner::Pong, PING_PORT, Vec::new());
        self.outbox.push(Message {
            owner,
            user: UserId::NODE,
            sport,
            dport,
            payload,
            extensions,
            sequence: None,
            is_begun: false,
            completion: None,
        });
        true
    }

    /// Holds messages back on a new connection until the peer's map arrives, or until this time.
    pub(in crate::proto) fn hold(&mut self, until: Option<Instant>) {
        self.hold_until = until;
    }

    /// Ends the hold on messages. Returns false if there is none.
    pub(in crate::proto) fn release_held(&mut self) -> bool {
        self.hold_until.take().is_some()
    }

    /// Ends the hold on messages if its time has passed.
    pub(in crate::proto) fn release_overdue(&mut self, now: Instant) -> bool {
        self.hold_until.is_some_and(|until| until <= now) && self.release_held()
    }

    /// Queues as many maps and messages on a link as it accepts now.
    pub(in crate::proto) fn fill(&mut self, link: &mut Link, greeting: Greeting<'_>) -> Filled {
        let Greeting { generation, paths, congested } = greeting;
        let mut filled = Filled::default();
        while link.has_room() {
            if std::mem::take(&mut link.map_is_due) {
                let header = Header {
                    len: MAP_LEN as u32,
                    flags: CONG_BITMAP,
                    extensions: map_extensions(generation, paths, link.path),
                    ..Header::default()
                };
                link.hand_map(header, congested.bytes().to_vec());
                filled.maps += 1;
                continue;
            }
            // Repeats come first: the number of a probe in front would make the repeats look old.
            let repeats = self.outbox.begins_with_a_repeat() && !mutated!(RdsProbeFirst);
            if !link.has_probed && !repeats {
                link.has_probed = true;
                let (header, probe) = self.outbox.number(probe(generation));
                link.hand(header, probe);
                continue;
            }
            // The peer may remember sequence numbers from our previous run, and consider repeated
            // messages old. The probe is never a repeat, so it makes the peer restart its count.
            let waits_for_ack = !self.is_synced && link.has_probed && !mutated!(RdsProbeNotAwaited);
            if waits_for_ack || self.hold_until.is_some() {
                break;
            }
            let Some((header, message)) = self.outbox.pop() else { break };
            filled.repeats += u64::from(message.is_begun);
            link.hand(header, message);
        }
        filled
    }

    /// Records that a message was acknowledged. Returns true for the first acknowledged message.
    pub(in crate::proto) fn acked(&mut self, message: &Message) -> bool {
        self.pongs -= usize::from(message.owner == Owner::Pong);
        !std::mem::replace(&mut self.is_synced, true)
    }

    /// Takes back the messages of a lost connection. Returns the messages that will no longer be
    /// sent.
    pub(in crate::proto) fn take_back(&mut self, lost: Vec<Message>) -> Vec<Message> {
        self.hold_until = None;
        let mut dropped = self.outbox.take_back(lost);
        // The sender of a ping sends another ping. A kernel asks only once for the number of
        // connections.
        dropped.extend(self.outbox.remove(|m| m.owner == Owner::Pong && m.dport != PROBE_PORT));
        self.forget_pongs(&dropped);
        dropped
    }

    /// Removes the messages that a previous run of the peer may have delivered.
    pub(in crate::proto) fn restart(&mut self) -> Vec<Message> {
        let dropped = self.outbox.remove(|m| m.is_begun && !mutated!(RdsRestartIgnored));
        self.forget_pongs(&dropped);
        dropped
    }

    /// Removes the messages of sockets that no connection has begun to send.
    pub(super) fn take_unsent(&mut self) -> Vec<Message> {
        let is_of_socket = |m: &Message| matches!(m.owner, Owner::Socket(_) | Owner::Nobody);
        self.outbox.remove(|m| is_of_socket(m) && !m.is_begun)
    }

    /// Abandons messages; see [`Abandoned`]. Those in the outbox are dropped if `waiting` is set,
    /// if no connection is up, or if any of them was sent before. The others lose their owner.
    pub(in crate::proto) fn abandon(
        &mut self,
        link: Option<&mut Link>,
        is_meant: impl Fn(&Message) -> bool + Copy,
        waiting: bool,
    ) -> Abandoned {
        // Messages sent before would be sent a second time, and the messages behind them would
        // leave a gap.
        let again = self.outbox.iter().any(|m| m.is_begun && is_meant(m));
        let drops = waiting || link.is_none() || again;
        let dropped = self.outbox.remove(|m| drops && is_meant(m));
        self.forget_pongs(&dropped);
        let mut amount = self.outbox.orphan(is_meant);
        if let Some(link) = link {
            amount += orphan(link.messages_mut(), is_meant);
        }
        Abandoned { dropped, amount }
    }

    fn forget_pongs(&mut self, dropped: &[Message]) {
        self.pongs -= dropped.iter().filter(|message| message.owner == Owner::Pong).count();
    }
}

/// Returns the message that asks a peer for its number of connections.
fn probe(generation: Option<u32>) -> Message {
    Message {
        owner: Owner::Probe,
        user: UserId::NODE,
        sport: PROBE_PORT,
        dport: PING_PORT,
        payload: Vec::new(),
        extensions: probe_extensions(generation),
        sequence: None,
        is_begun: false,
        completion: None,
    }
}

/// Returns the extension headers of probes and their answers. They ask for a single connection:
/// Linux 6.1 assigns multiple connections to its paths in order of arrival, so that sequence
/// numbers would not match when more than one connection is lost at a time.
fn probe_extensions(generation: Option<u32>) -> [u8; 16] {
    Extensions { npaths: Some(1), generation, path: None }.encode()
}

/// Returns the extension headers of a map on a path, which nodes of this program read.
fn map_extensions(generation: Option<u32>, paths: usize, path: usize) -> [u8; 16] {
    let has_paths = generation.is_some() && paths > 1;
    let npaths = u16::try_from(paths).ok().filter(|_| has_paths);
    let path = u8::try_from(path).ok().filter(|_| has_paths);
    Extensions { npaths, generation, path }.encode()
}
