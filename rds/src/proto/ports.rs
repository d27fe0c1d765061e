//! Sockets of a node's users: receive queues, messages in flight, congestion, and events for the
//! users.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use rtrs_base::mutated;
use rtrs_base::prng::Prng;

use super::amount::Amount;
use super::event::{BindError, Event, SocketId};
use super::info::SocketInfo;
use super::outbox::{Completion, Message, Owner};
use super::shares::{Shares, Use, UserId};
use super::stats::{Refused, Stats};
use crate::wire::{ArrivalTimes, CongestionMap, PROBE_PORT};

/// Number of unread completions at which a socket may no longer send.
const COMPLETED_MAX: usize = 16 << 10;

/// First ephemeral port.
const EPHEMERAL_MIN: u16 = 1024;

/// A message for a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Node that sent the message.
    pub from: IpAddr,
    /// Port of the sender; 0 for a ping reply.
    pub port: u16,
    /// Payload of the message.
    pub payload: Vec<u8>,
    /// Times at which the message arrived; the last time is when the message was queued for its
    /// reader.
    pub times: ArrivalTimes,
}

impl Received {
    /// Returns the message's cost against the memory limits.
    pub(super) fn cost(&self) -> usize {
        Amount::one(self.payload.len()).cost()
    }
}

/// Next input for a socket's user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// Groups with a port that is no longer congested; see [`Ports::take_updates`].
    Updates(u64),
    /// A message sent by the socket is complete; holds the message's cookie.
    Completion(u32),
    /// A message; see [`Ports::peek`].
    Message,
}

/// State of a socket's buffers, in bytes of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferUse {
    /// Bytes sent but not yet acknowledged.
    pub in_flight: usize,
    /// Bytes received that the user has not taken.
    pub waiting: usize,
    /// Receive buffer size.
    pub rcvbuf: usize,
    /// The receive buffer is full: peers must not send.
    pub is_congested: bool,
}

/// Sizes of a socket's buffers in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    pub(super) sndbuf: usize,
    pub(super) rcvbuf: usize,
}

/// A bound socket.
#[derive(Debug)]
pub(super) struct Socket {
    serial: u64,
    pub(super) user: UserId,
    inbox: VecDeque<Received>,
    /// Cost of the messages in the inbox.
    held: usize,
    /// Payload of the messages in the inbox, and of the passed messages that the user has not taken
    /// yet.
    waiting: usize,
    /// Messages that were sent but are not acknowledged.
    in_flight: Amount,
    pub(super) sndbuf: usize,
    pub(super) rcvbuf: usize,
    /// Groups of ports that the user is waiting for, and groups that are no longer congested.
    watched: u64,
    pub(super) updates: u64,
    /// Cookies of messages that are complete, oldest first.
    completed: VecDeque<u32>,
    /// The socket was reported as readable, but has not been read since.
    is_reported: bool,
}

impl Socket {
    /// Whether the socket may not send more. `memory` limits messages without a payload.
    fn is_full(&self, memory: usize) -> bool {
        self.in_flight.payload >= self.sndbuf
            || self.in_flight.cost() >= memory
            || self.completed.len() >= COMPLETED_MAX
    }

    /// Returns the messages that are waiting for the reader, oldest first.
    pub(super) fn inbox(&self) -> impl Iterator<Item = &Received> {
        self.inbox.iter()
    }

    fn has_input(&self) -> bool {
        !self.inbox.is_empty() || self.updates != 0 || !self.completed.is_empty()
    }
}

/// State left by a closed socket.
#[derive(Debug)]
pub(super) struct Closed {
    /// Messages that were waiting for the reader.
    pub(super) inbox: VecDeque<Received>,
    /// The congestion map has changed.
    pub(super) map_changed: bool,
    /// Some messages sent by the socket are not acknowledged.
    pub(super) has_sent: bool,
}

/// Bytes of memory that count against the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// Bytes that peers have sent but users have not read, including unfinished messages.
    pub(super) received: usize,
    /// Bytes that users have sent but peers have not acknowledged.
    pub(super) sent: usize,
}

/// Received and sent bytes of each user, as in [`Memory`].
#[derive(Debug, Default)]
struct UserMemory {
    received: Shares,
    sent: Shares,
    /// Users that were refused because their share of sent messages was used up.
    held_up: BTreeSet<UserId>,
}

/// Limits for all sockets.
#[derive(Clone, Copy, Debug)]
pub(super) struct PortLimits {
    pub(super) sockets: usize,
    /// Limit on the bytes waiting for one socket, and on the bytes that the socket has sent.
    pub(super) port_memory: usize,
    /// Limit on each of the two values of [`Memory`]; the sent message that first exceeds it is
    /// still accepted.
    pub(super) memory: usize,
}

/// All sockets of a node, by port.
#[derive(Debug)]
pub struct Ports {
    sockets: BTreeMap<u16, Socket>,
    congested: CongestionMap,
    pub(super) memory: Memory,
    users: UserMemory,
    limits: PortLimits,
    /// Ports of sockets whose users were refused because the send buffer was full.
    refused: BTreeSet<u16>,
    /// Counters of send buffers, and of refused sends.
    stats: Stats,
    events: VecDeque<Event>,
    /// Sockets with messages that were acknowledged, canceled or dropped.
    freed: BTreeSet<SocketId>,
    /// Number of unacknowledged messages whose senders are waiting for their completion.
    incomplete: usize,
    next_serial: u64,
    prng: Prng,
}

impl Ports {
    pub(super) fn new(limits: PortLimits, prng: Prng) -> Self {
        Self {
            sockets: BTreeMap::new(),
            congested: CongestionMap::default(),
            memory: Memory::default(),
            users: UserMemory::default(),
            limits,
            refused: BTreeSet::new(),
            stats: Stats::default(),
            events: VecDeque::new(),
            freed: BTreeSet::new(),
            incomplete: 0,
            next_serial: 0,
            prng,
        }
    }

    /// Binds a port; 0 selects a free port.
    pub(super) fn bind(
        &mut self,
        user: UserId,
        port: u16,
        buffers: Buffers,
    ) -> Result<SocketId, BindError> {
        if port == PROBE_PORT {
            return Err(BindError::Reserved);
        }
        if self.sockets.len() >= self.limits.sockets {
            return Err(BindError::TooMany(self.limits.sockets));
        }
        let port = if port == 0 { self.ephemeral()? } else { port };
        if self.sockets.contains_key(&port) {
            return Err(BindError::InUse(port));
        }
        self.next_serial += 1;
        let socket = Socket {
            serial: self.next_serial,
            user,
            inbox: VecDeque::new(),
            held: 0,
            waiting: 0,
            in_flight: Amount::default(),
            sndbuf: buffers.sndbuf,
            rcvbuf: buffers.rcvbuf,
            watched: 0,
            updates: 0,
            completed: VecDeque::new(),
            is_reported: false,
        };
        let id = SocketId { port, serial: socket.serial };
        self.sockets.insert(port, socket);
        Ok(id)
    }

    /// Finds a free port, starting from a random port.
    fn ephemeral(&mut self) -> Result<u16, BindError> {
        let count = u64::from(u16::MAX - EPHEMERAL_MIN) + 1;
        let start = self.prng.below(count);
        let port = |at: u64| {
            let offset = u16::try_from((start + at) % count).unwrap_or_default();
            EPHEMERAL_MIN + offset
        };
        let free = (0..count).map(port).find(|port| !self.sockets.contains_key(port));
        free.ok_or(BindError::TooMany(self.sockets.len()))
    }

    pub(super) fn stats(&self) -> Stats {
        self.stats
    }

    /// Replaces the counters of sends that were refused before the message reached the node.
    pub fn set_refused(&mut self, refused: Refused) {
        let Refused { queue_full, congested, congested_waits } = refused;
        self.stats.send_queue_full = queue_full;
        self.stats.cong_send_error = congested;
        self.stats.cong_send_blocked = congested_waits;
    }

    pub(super) fn get(&self, id: SocketId) -> Option<&Socket> {
        self.sockets.get(&id.port).filter(|socket| socket.serial == id.serial)
    }

    pub(super) fn get_mut(&mut self, id: SocketId) -> Option<&mut Socket> {
        self.sockets.get_mut(&id.port).filter(|socket| socket.serial == id.serial)
    }

    /// Whether a port is bound.
    pub(super) fn is_bound(&self, port: u16) -> bool {
        self.sockets.contains_key(&port)
    }

    /// Whether a port is bound and a message of this length fits within the limits of the port, its
    /// user and the node.
    pub(super) fn fits(&self, port: u16, len: usize) -> bool {
        let cost = Amount::one(len).cost();
        let whole = Use { limit: self.limits.memory, total: self.memory.received };
        self.sockets.get(&port).is_some_and(|socket| {
            socket.held + cost <= self.limits.port_memory
                && whole.total + cost <= whole.limit
                && self.users.received.has_room(socket.user, whole, cost)
        })
    }

    /// Returns the state of all sockets.
    pub fn sockets(&self) -> impl Iterator<Item = SocketInfo> {
        self.sockets.iter().map(|(port, socket)| SocketInfo {
            port: *port,
            sndbuf: socket.sndbuf,
            rcvbuf: socket.rcvbuf,
            in_flight: socket.in_flight.payload,
            in_flight_messages: socket.in_flight.messages,
            waiting: socket.waiting,
        })
    }

    /// Returns the state of a socket's buffers.
    pub fn buffer_use(&self, id: SocketId) -> Option<BufferUse> {
        self.get(id).map(|socket| BufferUse {
            in_flight: socket.in_flight.payload,
            waiting: socket.waiting,
            rcvbuf: socket.rcvbuf,
            is_congested: self.congested.get(id.port),
        })
    }

    /// Returns the sockets with messages that were acknowledged, canceled or dropped since the last
    /// call.
    pub fn take_freed(&mut self) -> BTreeSet<SocketId> {
        std::mem::take(&mut self.freed)
    }

    /// Returns the next input for a socket's user: notifications come before messages.
    pub fn pending(&mut self, id: SocketId) -> Option<Pending> {
        let socket = self.get_mut(id)?;
        socket.is_reported = socket.has_input();
        if socket.updates != 0 {
            return Some(Pending::Updates(socket.updates));
        }
        if let Some(cookie) = socket.completed.front() {
            return Some(Pending::Completion(*cookie));
        }
        (!socket.inbox.is_empty()).then_some(Pending::Message)
    }

    /// Returns all sockets.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SocketId, &Socket)> {
        self.sockets.iter().map(|(port, s)| (SocketId { port: *port, serial: s.serial }, s))
    }

    /// Returns the map of congested ports.
    pub(super) fn congested(&self) -> &CongestionMap {
        &self.congested
    }

    /// Returns the next event for users.
    pub fn take_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Handles a congestion map update from a peer that cleared these groups of ports.
    pub(super) fn congestion_changed(&mut self, peer: IpAddr, cleared: u64) {
        if !mutated!(RdsClearUnannounced) {
            self.events.push_back(Event::Congestion(peer));
        }
        for (port, socket) in &mut self.sockets {
            let updates = socket.watched & cleared;
            if updates != 0 {
                socket.watched &= !updates;
                socket.updates |= updates;
                report(&mut self.events, *port, socket);
            }
        }
    }

    /// Watches groups of ports on behalf of a socket until they are not congested.
    pub(super) fn watch(&mut self, id: SocketId, groups: u64) {
        if let Some(socket) = self.get_mut(id) {
            socket.watched |= groups;
        }
    }

    /// Notifies a socket's user that ports in these groups are not congested.
    pub(super) fn notify(&mut self, id: SocketId, groups: u64) {
        if let Some(socket) = self.sockets.get_mut(&id.port).filter(|s| s.serial == id.serial) {
            socket.updates |= groups;
            report(&mut self.events, id.port, socket);
        }
    }

    /// Returns the watched groups with a port that is no longer congested: bit N covers the ports
    /// whose number modulo 64 is N.
    pub fn take_updates(&mut self, id: SocketId) -> u64 {
        let Some(socket) = self.get_mut(id) else { return 0 };
        let updates = std::mem::take(&mut socket.updates);
        socket.is_reported = socket.has_input();
        updates
    }

    /// Notifies the sender of a message that the message is complete.
    pub(super) fn complete(&mut self, completion: Completion) {
        let Completion { socket: id, cookie } = completion;
        if let Some(socket) = self.sockets.get_mut(&id.port).filter(|s| s.serial == id.serial) {
            socket.completed.push_back(cookie);
            report(&mut self.events, id.port, socket);
        }
    }

    /// Removes the oldest completion of a socket.
    pub fn take_completion(&mut self, id: SocketId) -> Option<u32> {
        let socket = self.get_mut(id)?;
        let cookie = socket.completed.pop_front();
        socket.is_reported = socket.has_input();
        self.notify_refused(id.port);
        cookie
    }

    /// Queues a message for the reader of a port. Returns whether the map has changed, or None if
    /// the port is not bound.
    pub(super) fn deliver(&mut self, port: u16, received: Received) -> Option<bool> {
        let socket = self.sockets.get_mut(&port)?;
        self.memory.received += received.cost();
        self.users.received.charge(socket.user, received.cost());
        socket.held += received.cost();
        socket.waiting += received.payload.len();
        socket.inbox.push_back(received);
        report(&mut self.events, port, socket);
        Some(socket.waiting > socket.rcvbuf && self.congested.set(port, true))
    }

    /// Returns the next message for a reader. The message counts against the receive buffer until
    /// [`taken`](Self::taken).
    pub(super) fn pass(&mut self, id: SocketId) -> Option<Received> {
        let socket = self.get_mut(id)?;
        let received = socket.inbox.pop_front();
        socket.is_reported = socket.has_input();
        let received = received?;
        let cost = received.cost();
        socket.held -= cost;
        let user = socket.user;
        self.memory.received -= cost;
        self.users.received.discharge(user, cost);
        Some(received)
    }

    /// Records that the user has taken messages with this many bytes of payload. Returns true if
    /// the map has changed.
    pub(super) fn taken(&mut self, id: SocketId, payload: usize) -> bool {
        let Some(socket) = self.get_mut(id) else { return false };
        socket.waiting -= payload;
        self.relieve(id)
    }

    /// Returns the oldest message for a reader without removing it.
    pub fn peek(&self, id: SocketId) -> Option<&Received> {
        self.get(id)?.inbox.front()
    }

    /// Clears the congestion bit of a socket that has room again. Returns true if the map has
    /// changed.
    pub(super) fn relieve(&mut self, id: SocketId) -> bool {
        let Some(socket) = self.get(id) else { return false };
        let has_room = socket.waiting < socket.rcvbuf / 2;
        has_room && self.congested.set(id.port, false)
    }

    /// Frees a port.
    pub(super) fn close(&mut self, id: SocketId) -> Option<Closed> {
        self.get(id)?;
        let Socket { inbox, held, in_flight, user, .. } = self.sockets.remove(&id.port)?;
        self.refused.remove(&id.port);
        self.freed.remove(&id);
        self.memory.received -= held;
        self.users.received.discharge(user, held);
        let map_changed = self.congested.set(id.port, false);
        Some(Closed { inbox, map_changed, has_sent: in_flight.messages > 0 })
    }

    /// Sets a socket's buffer sizes. Returns true if the map has changed.
    pub(super) fn set_buffers(&mut self, id: SocketId, buffers: Buffers) -> bool {
        let Some(socket) = self.get_mut(id) else { return false };
        (socket.sndbuf, socket.rcvbuf) = (buffers.sndbuf, buffers.rcvbuf);
        if socket.waiting > buffers.rcvbuf {
            return self.congested.set(id.port, true);
        }
        self.notify_refused(id.port);
        self.relieve(id)
    }

    /// Whether a socket may send more; if not, [`Event::Writable`] is reported when the socket may
    /// send again.
    pub fn has_room(&mut self, id: SocketId) -> bool {
        let Some(socket) = self.get(id) else { return false };
        let user = socket.user;
        let is_held_up = !self.has_share(user);
        let has_room = !is_held_up && !self.is_full() && !socket.is_full(self.limits.port_memory);
        if !has_room {
            self.refused.insert(id.port);
        }
        if is_held_up {
            self.users.held_up.insert(user);
        }
        has_room
    }

    /// Whether a socket may exceed its send buffer, for messages that must be read now. The limits
    /// of the node and of the socket's user still apply, so that other users keep their shares.
    pub fn may_exceed(&self, id: SocketId) -> bool {
        self.get(id).is_some_and(|socket| {
            !self.is_full()
                && self.has_share(socket.user)
                && socket.completed.len() < 2 * COMPLETED_MAX
        })
    }

    fn has_share(&self, user: UserId) -> bool {
        let whole = Use { limit: self.limits.memory, total: self.memory.sent };
        self.users.sent.has_room(user, whole, 1)
    }

    /// Charges a sent message to a socket.
    pub(super) fn charge(&mut self, id: SocketId, message: &Message) {
        self.memory.sent += message.cost();
        self.users.sent.charge(message.user, message.cost());
        self.incomplete += usize::from(message.completion.is_some());
        if let Some(socket) = self.get_mut(id) {
            socket.in_flight += message.amount();
        }
    }

    /// Removes messages from a socket's buffer; they still count against the node's memory.
    pub(super) fn discharge(&mut self, id: SocketId, amount: Amount) {
        self.reduce(id, amount);
        self.notify_refused(id.port);
    }

    fn reduce(&mut self, id: SocketId, amount: Amount) {
        let Some(socket) = self.get_mut(id) else { return };
        socket.in_flight -= amount;
        let is_emptied = amount.messages > 0 && socket.in_flight.messages == 0;
        self.stats.send_queue_empty += u64::from(is_emptied);
        self.freed.insert(id);
    }

    /// Releases the cost of a message that was acknowledged or dropped.
    pub(super) fn release(&mut self, message: &Message) {
        if let Some(completion) = message.completion {
            self.incomplete -= 1;
            self.complete(completion);
        }
        let owner = match message.owner {
            Owner::Pong | Owner::Probe => return,
            Owner::Nobody => None,
            Owner::Socket(id) => Some(id),
        };
        if let Some(id) = owner {
            self.reduce(id, message.amount());
        }
        let was_full = self.is_full();
        self.memory.sent -= message.cost();
        self.users.sent.discharge(message.user, message.cost());
        let whole = Use { limit: self.limits.memory, total: self.memory.sent };
        let UserMemory { sent, held_up, .. } = &mut self.users;
        let held = held_up.len();
        held_up.retain(|user| !sent.has_relaxed(*user, whole));
        let has_relaxed = held_up.len() < held;
        if (was_full && !self.is_full()) || has_relaxed {
            for port in self.refused.clone() {
                self.notify_refused(port);
            }
        } else if let Some(id) = owner {
            self.notify_refused(id.port);
        }
    }

    /// Whether the node's memory for sent messages is used up.
    fn is_full(&self) -> bool {
        self.memory.sent >= self.limits.memory
    }

    /// Whether any socket was refused and is waiting for room.
    pub fn has_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Whether users are waiting for acknowledgments, either for room or for completions.
    pub(super) fn awaits_acks(&self) -> bool {
        self.has_refused() || self.incomplete > 0
    }

    /// Notifies the socket of a port if it was refused and now has room.
    fn notify_refused(&mut self, port: u16) {
        let Some(socket) = self.sockets.get(&port) else { return };
        let has_room = !self.is_full()
            && !socket.is_full(self.limits.port_memory)
            && self.has_share(socket.user);
        if has_room && !mutated!(RdsSpaceUnannounced) && self.refused.remove(&port) {
            let id = SocketId { port, serial: socket.serial };
            self.events.push_back(Event::Writable(id));
        }
    }
}

/// Reports a socket as readable, unless it has been reported since the last read.
fn report(events: &mut VecDeque<Event>, port: u16, socket: &mut Socket) {
    if !std::mem::replace(&mut socket.is_reported, true) {
        events.push_back(Event::Readable(SocketId { port, serial: socket.serial }));
    }
}

#[cfg(test)]
mod tests;
