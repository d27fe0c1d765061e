//! All users of a node: sockets of this process and of others, and connections for requests.

mod buffers;
mod delivery;
mod requests;
mod rings;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::SystemTime;

use rtrs_base::rt::{Completed, Fd, Op, PeerCredentials, Port, Ring};
use rtrs_base::time::{Duration, Instant, earliest};

use super::answers::Answers;
use super::client::{Asker, Bound, Client, ClientId, Input};
use super::controls::Controls;
use super::shortage::{PAUSE, Reserve, Starved};
use super::unbound::UnboundClients;
use super::untaken::Untaken;
use crate::channel::{BoardWriter, INLINE_MAX, Packet, PacketKind};
use crate::proto::{Event, Node, Outgoing, Refused, SocketId};

/// Maximum number of packets read from one user, or messages passed on to one user, per turn.
const PACKETS_MAX: usize = 128;
/// Maximum number of packets read if everything sent so far must be read. It exceeds what a unix
/// socket and a ring hold; the limit keeps a user that never stops sending from holding up the
/// node.
const PACKETS_ALL: usize = 8192;
/// Maximum time for which a disconnected user's messages wait for room.
const LINGER: Duration = Duration::from_secs(5);

/// Purpose of an operation.
#[derive(Clone, Copy, Debug)]
enum Task {
    Accept,
    Read(ClientId),
    Write(ClientId),
    /// The user of a full socket has hung up.
    End(ClientId),
}

impl Task {
    fn token(self) -> u64 {
        match self {
            Self::Accept => 0,
            Self::Read(id) => id << 2 | 1,
            Self::Write(id) => id << 2 | 2,
            Self::End(id) => id << 2 | 3,
        }
    }

    fn of(token: u64) -> Self {
        match token & 3 {
            0 => Self::Accept,
            1 => Self::Read(token >> 2),
            2 => Self::Write(token >> 2),
            _ => Self::End(token >> 2),
        }
    }
}

/// A packet from a user, with the bytes and the descriptors that came with it.
#[derive(Debug)]
struct Request {
    packet: Packet,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// Descriptors of a [`PacketKind::Control`].
#[derive(Debug)]
struct Passed {
    connection: OwnedFd,
    /// Counters of the process's refused sends.
    tally: Option<OwnedFd>,
}

/// The socket on which users connect.
#[derive(Debug)]
struct Accepting {
    listener: Option<Fd>,
    /// Time of the next accept after a failed one.
    at: Option<Instant>,
}

impl Accepting {
    fn submit(&self, port: &Port) {
        if let Some(fd) = &self.listener {
            port.submit(Op::Accept { fd: fd.clone() }, Task::Accept.token());
        }
    }
}

/// All users of a node.
#[derive(Debug)]
pub(super) struct Clients {
    port: Port,
    accepting: Accepting,
    clients: BTreeMap<ClientId, Client>,
    by_socket: BTreeMap<SocketId, ClientId>,
    /// Users whose rings the node checks every turn; the others wake the node.
    rings: BTreeSet<ClientId>,
    unbound: UnboundClients,
    controls: Controls,
    /// Users that have disconnected but whose messages are still waiting, by deadline.
    lingering: BTreeSet<(Instant, ClientId)>,
    starved: Starved,
    untaken: Untaken,
    answers: Answers,
    reserve: Reserve,
    board: BoardWriter,
    buffer: Vec<u8>,
    next: ClientId,
}

impl Clients {
    /// Creates the set of users that connect to `listener`.
    ///
    /// # Errors
    /// The system's error if the board cannot be created.
    pub(super) fn new(ring: &Rc<Ring>, node: &Node, listener: Option<Fd>) -> io::Result<Self> {
        let config = node.config();
        let clients = Self {
            port: ring.port(),
            accepting: Accepting { listener, at: None },
            clients: BTreeMap::new(),
            by_socket: BTreeMap::new(),
            rings: BTreeSet::new(),
            unbound: UnboundClients::default(),
            controls: Controls::new(config.sockets_max),
            lingering: BTreeSet::new(),
            starved: Starved::default(),
            untaken: Untaken::default(),
            answers: Answers::new(),
            reserve: Reserve::new(),
            board: BoardWriter::create(config.address, config.sockets_max, config.peers_max + 1)?,
            buffer: vec![0; INLINE_MAX],
            next: 0,
        };
        clients.accepting.submit(&clients.port);
        Ok(clients)
    }

    /// Takes over a user's connection. Returns the user's ID, or None on failure.
    pub(super) fn adopt(&mut self, node: &mut Node, fd: OwnedFd) -> Option<ClientId> {
        match Client::new(fd) {
            Ok(client) => Some(self.add(node, client)),
            Err(error) => {
                tracing::debug!(%error, "user disconnected");
                None
            }
        }
    }

    /// Adds a connection without a socket.
    fn add(&mut self, node: &mut Node, client: Client) -> ClientId {
        self.next += 1;
        let id = self.next;
        self.clients.insert(id, client);
        self.is_unbound(node, id);
        self.poll_read(id);
        id
    }

    /// Records a connection that has no socket and may not change one. Such a connection may be
    /// closed to make room for others.
    fn is_unbound(&mut self, node: &mut Node, id: ClientId) {
        let Some(client) = self.clients.get(&id).filter(|client| client.bound.is_none()) else {
            return;
        };
        if let Some(oldest) = self.unbound.add(id, client.user()) {
            self.end(node, oldest);
        }
    }

    /// Handles the users' requests. Returns true if anything was done.
    pub(super) fn turn(&mut self, now: Instant, node: &mut Node) -> bool {
        let mut busy = false;
        if self.accepting.at.is_some_and(|at| at <= now) {
            self.accepting.at = None;
            self.accepting.submit(&self.port);
        }
        for id in self.starved.take_due(now) {
            self.deliver(now, node, id);
        }
        self.check_untaken(now, node);
        while let Some((at, id)) = self.lingering.first().copied().filter(|(at, _)| *at <= now) {
            self.lingering.remove(&(at, id));
            self.end(node, id);
        }
        busy |= self.read_rings(now, node);
        while let Some(done) = self.port.take() {
            busy = true;
            match Task::of(done.token) {
                Task::Accept => self.accepted(now, node, done),
                Task::Read(id) => {
                    if let Some(client) = self.clients.get_mut(&id) {
                        client.reading = None;
                        self.read(now, node, id, false);
                    }
                }
                Task::End(id) => self.user_ended(now, node, id),
                Task::Write(id) => {
                    if let Some(client) = self.clients.get_mut(&id) {
                        client.writing = None;
                        self.deliver(now, node, id);
                    }
                }
            }
        }
        busy
    }

    /// Passes a node event on to its user. Returns false if the event is not for any of these
    /// users.
    pub(super) fn event(&mut self, now: Instant, node: &mut Node, event: Event) -> bool {
        match event {
            Event::Congestion(peer) => {
                self.board.set_map(peer, node.congestion(peer));
                false
            }
            Event::Readable(socket) => {
                let Some(id) = self.by_socket.get(&socket).copied() else { return false };
                self.deliver(now, node, id);
                true
            }
            Event::Writable(socket) => {
                let Some(id) = self.by_socket.get(&socket).copied() else { return false };
                self.settle(node, id);
                self.read(now, node, id, false);
                true
            }
        }
    }

    /// Ends a turn by publishing whether messages to new peers may be refused.
    pub(super) fn end_turn(&mut self, now: Instant, node: &Node) {
        self.board.set_crowded(node.peers().is_crowded());
        self.untaken.plan_check(now);
    }

    /// Returns the time at which to call `turn` even if nothing happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let lingering = self.lingering.first().map(|(at, _)| *at);
        let parts =
            [self.accepting.at, self.starved.deadline(), self.untaken.deadline(), lingering];
        parts.into_iter().fold(None, earliest)
    }

    /// Reads the remaining messages of users, then closes all connections.
    pub(super) fn close_all(&mut self, now: Instant, node: &mut Node) {
        for id in self.by_socket.values().copied().collect::<Vec<_>>() {
            self.read(now, node, id, true);
        }
        for (_, client) in std::mem::take(&mut self.clients) {
            for op in client.polls() {
                self.port.cancel(op);
            }
            if let Some(mut bound) = client.bound {
                bound.flow.ring.close();
                node.close_socket(bound.id);
            }
        }
        if let Some(listener) = self.accepting.listener.take() {
            // An accept in progress keeps the socket alive.
            let _ = socket2::SockRef::from(&listener).shutdown(std::net::Shutdown::Both);
        }
    }

    /// Returns the number of refused sends, by reason.
    pub(super) fn refused(&self) -> Refused {
        self.controls.refused()
    }

    /// Returns the process that created each socket, by port.
    pub(super) fn owners(&self) -> BTreeMap<u16, PeerCredentials> {
        let bound = self
            .clients
            .values()
            .filter_map(|client| Some((client.bound.as_ref()?.id.port, client.credentials)));
        bound.collect()
    }

    fn accepted(&mut self, now: Instant, node: &mut Node, done: Completed) {
        match done.into_fd() {
            Ok(fd) => {
                self.accepting.submit(&self.port);
                if let Some(id) = self.adopt(node, fd) {
                    self.reserve.accepted(id);
                }
            }
            Err(_) if self.accepting.listener.is_none() => {}
            Err(error) => {
                self.reserve.warn(now, &error);
                // The next connection gets the released descriptor.
                match self.reserve.release() {
                    true => self.accepting.submit(&self.port),
                    false => self.accepting.at = Some(now + PAUSE),
                }
            }
        }
    }

    fn poll_read(&mut self, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id).filter(|client| client.reading.is_none())
        else {
            return;
        };
        let fd = client.fd.clone();
        match client.bound.as_ref().filter(|bound| bound.is_full) {
            None => {
                let token = Task::Read(id).token();
                client.reading = Some(self.port.submit(Op::readable(fd), token));
            }
            // A full socket is not read from, but a hangup must be noticed.
            Some(bound) if client.watching.is_none() && bound.ends_at.is_none() => {
                client.watching = Some(self.port.submit(Op::hangup(fd), Task::End(id).token()));
            }
            Some(_) => {}
        }
    }

    /// Handles the hangup of a user whose socket was full. The user's remaining messages are read
    /// for a while, as room becomes available.
    fn user_ended(&mut self, now: Instant, node: &mut Node, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.watching = None;
        let Some(bound) = &mut client.bound else { return };
        bound.ends_at = Some(now + LINGER);
        self.lingering.insert((now + LINGER, id));
        self.read(now, node, id, false);
    }

    /// Reads a user's messages: as many as its socket accepts or, with `all`, everything sent so
    /// far for which there is memory.
    fn read(&mut self, now: Instant, node: &mut Node, id: ClientId, all: bool) {
        // Called recursively when a request concerns another user's messages.
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(INLINE_MAX, 0);
        let most = if all { PACKETS_ALL } else { PACKETS_MAX };
        for _ in 0..most {
            let Some(client) = self.clients.get_mut(&id) else { break };
            if let Some(bound) = &mut client.bound {
                // A full socket is reported as writable later.
                bound.is_full = !node.ports_mut().has_room(bound.id);
                if bound.is_full && !(all && node.ports().may_exceed(bound.id)) {
                    break;
                }
            }
            match client.read(&mut buffer, all) {
                Input::Nothing => break,
                Input::End => self.end(node, id),
                Input::Packet(packet, body, fds) => {
                    let request = Request { packet, body, fds };
                    self.packet(now, node, id, request);
                }
            }
        }
        self.buffer = buffer;
        self.plan_ring(id);
        self.settle(node, id);
        self.poll_read(id);
    }

    /// Removes a user that has disconnected or sent invalid data.
    fn end(&mut self, node: &mut Node, id: ClientId) {
        if let Some(bound) = self.remove(node, id) {
            if let Some(at) = bound.ends_at {
                self.lingering.remove(&(at, id));
            }
            self.by_socket.remove(&bound.id);
            self.board.free_slot(bound.slot);
            node.close_socket(bound.id);
        }
    }

    fn remove(&mut self, node: &mut Node, id: ClientId) -> Option<Bound> {
        let mut client = self.clients.remove(&id)?;
        self.answers.ended(id);
        self.unbound.remove(id);
        self.starved.remove(id);
        self.untaken.remove(id);
        self.rings.remove(&id);
        self.reserve.ended(id);
        for control in self.controls.ended(id) {
            self.is_unbound(node, control);
        }
        if let Some(bound) = &mut client.bound {
            bound.flow.ring.close();
        }
        for op in client.polls() {
            self.port.cancel(op);
        }
        // A poll in progress keeps the descriptor open.
        let _ = socket2::SockRef::from(&client.fd).shutdown(std::net::Shutdown::Both);
        client.bound
    }

    fn packet(&mut self, now: Instant, node: &mut Node, id: ClientId, request: Request) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Request { packet, body, fds } = request;
        let mut fds = fds.into_iter();
        if let Some(bound) = client.bound.as_mut().filter(|_| packet.kind == PacketKind::Send) {
            bound.flow.received(body.len());
        }
        let socket = client.bound.as_ref().map(|bound| bound.id);
        match (packet.kind, socket, fds.next()) {
            (PacketKind::Send, Some(socket), _) => {
                // The user checked the board before sending, so it has already seen any error.
                let (to, port, cookie) = (packet.address, packet.port, packet.cookie());
                let message = Outgoing { to, port, payload: body, cookie };
                let sent = node.send(now, socket, message);
                if let Err(error) = sent {
                    tracing::debug!(port = socket.port, %error, "dropped a message of a user");
                }
            }
            (PacketKind::Watch, Some(socket), _) => {
                // The congestion may have cleared since the user checked.
                node.watch(socket, packet.address, packet.port);
            }
            // There is room now; otherwise the packet would not have been read.
            (PacketKind::Full, Some(_), _) | (PacketKind::Wake, Some(_), _) => {}
            (PacketKind::Taken | PacketKind::Token, _, None) => {
                // Without a control connection, users report on the socket itself. A socket named
                // on another connection may have been closed.
                let named = if socket.is_some() { Ok(id) } else { self.meant(id, &packet) };
                match named {
                    Ok(named) if packet.kind == PacketKind::Token => {
                        let sent = self.clients.get_mut(&named).map(Client::renew_token);
                        self.starved.retry_token(now, named, sent.unwrap_or(Ok(())));
                    }
                    Ok(named) => {
                        self.settle(node, named);
                        self.deliver(now, node, named);
                    }
                    Err(_) => {}
                }
            }
            (PacketKind::Bind, None, None) if !client.is_passed => {
                self.bind(now, node, id, &packet);
            }
            (PacketKind::Control, Some(_), Some(fd)) => {
                let passed = Passed { connection: fd, tally: fds.next() };
                self.control(now, node, id, &packet, passed);
            }
            (_, None, Some(fd)) => self.request_apart(now, node, id, &packet, fd),
            (_, None, None) => {
                let asker = Asker { control: id, answering: id };
                self.request(now, node, asker, &packet);
            }
            _ => self.end(node, id),
        }
    }
}

/// Returns the wall-clock time in nanoseconds since 1970.
fn wall_clock() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
