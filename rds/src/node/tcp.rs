//! Connections to peers: accepts, connects, reads and writes as instructed by the node.
//!
//! The ring reports readiness; nonblocking calls move the data. A write sends the messages straight
//! from their memory. A read takes everything that has arrived, often many messages, into one
//! buffer of the shard, from which payloads are copied. An idle connection has no buffer.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::rc::Rc;

use rtrs_base::log_limit::LogLimit;
use rtrs_base::rt::{Completed, Fd, Op, Port, Ring, unacknowledged_bytes};
use rtrs_base::time::{Duration, Instant, earliest};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use socket2::{SockAddr, SockRef};

use super::conn::{BuffersError, Conn, outgoing, prepare, set_all_buffers};
use crate::proto::{Config, LinkId, Node, Order, PeerLog, TcpEvent, Tuning};

/// Length of the buffer for reads.
const BUFFER_LEN: usize = 256 << 10;
/// Maximum number of reads per connection and turn: the results of one read are written before the
/// next, so that both ends stay busy.
const READS_MAX: usize = 1;
/// Maximum number of reads when everything that has arrived must be read: enough for the largest
/// receive buffer of a system, so that a peer that keeps sending cannot hold up the node.
const READS_ALL: usize = 256;
/// Maximum number of slices per write; the system accepts 1024.
const SLICES_MAX: usize = 256;
/// Pause after an accept that failed for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Purpose of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Accept,
    Connect(LinkId),
    Read(LinkId),
    Write(LinkId),
}

impl Task {
    fn token(self) -> u64 {
        match self {
            Self::Accept => 0,
            Self::Connect(link) => link.number() << 2 | 1,
            Self::Read(link) => link.number() << 2 | 2,
            Self::Write(link) => link.number() << 2 | 3,
        }
    }

    fn of(token: u64) -> Self {
        let link = LinkId::of(token >> 2);
        match token & 3 {
            0 => Self::Accept,
            1 => Self::Connect(link),
            2 => Self::Read(link),
            _ => Self::Write(link),
        }
    }
}

/// All connections to peers.
#[derive(Debug)]
pub(super) struct Tcp {
    port: Port,
    listener: Option<Fd>,
    accept_at: Option<Instant>,
    conns: BTreeMap<LinkId, Conn>,
    /// Connections whose acknowledged bytes must be checked.
    touched: BTreeSet<LinkId>,
    /// Users are waiting for room.
    is_awaited: bool,
    buffer: Vec<u8>,
    peer_port: u16,
    dead_after: Duration,
    refused: PeerLog,
    accepts: LogLimit,
}

impl Tcp {
    /// Creates the connections of a node that accepts from `listener` and connects to peers at
    /// `peer_port`.
    pub(super) fn new(
        ring: &Rc<Ring>,
        listener: Option<Fd>,
        peer_port: u16,
        dead_after: Duration,
    ) -> Self {
        let tcp = Self {
            port: ring.port(),
            listener,
            accept_at: None,
            conns: BTreeMap::new(),
            touched: BTreeSet::new(),
            is_awaited: false,
            buffer: vec![0; BUFFER_LEN],
            peer_port,
            dead_after,
            refused: PeerLog::default(),
            accepts: LogLimit::default(),
        };
        tcp.accept();
        tcp
    }

    fn accept(&self) {
        if let Some(fd) = &self.listener {
            self.port.submit(Op::Accept { fd: fd.clone() }, Task::Accept.token());
        }
    }

    /// Does pending work. Returns true if there was any.
    pub(super) fn turn(&mut self, now: Instant, node: &mut Node) -> bool {
        let mut busy = node.tick(now);
        if self.accept_at.is_some_and(|at| at <= now) {
            self.accept_at = None;
            self.accept();
        }
        self.obey(now, node);
        while let Some(done) = self.port.take() {
            busy = true;
            match Task::of(done.token) {
                Task::Accept => self.accepted(now, node, done),
                Task::Connect(link) => self.connected(now, node, link, &done),
                Task::Read(link) => {
                    if let Some(conn) = self.conns.get_mut(&link) {
                        conn.reading = None;
                        node.tcp_event(link, TcpEvent::Input);
                        self.read(now, node, link, READS_MAX);
                    }
                }
                Task::Write(link) => {
                    if let Some(conn) = self.conns.get_mut(&link) {
                        conn.writing = None;
                        node.tcp_event(link, TcpEvent::Room);
                        self.write(now, node, link);
                    }
                }
            }
            self.obey(now, node);
        }
        busy
    }

    /// Writes pending output, and checks acknowledged bytes. Returns true if anything was done.
    pub(super) fn flush(&mut self, now: Instant, node: &mut Node) -> bool {
        self.obey(now, node);
        let mut busy = false;
        while let Some(link) = node.next_ready() {
            let waits = self.conns.get(&link).is_none_or(|conn| conn.writing.is_some());
            if !waits {
                self.write(now, node, link);
                busy = true;
            }
        }
        self.obey(now, node);
        // A user that starts waiting does not touch any connection, so all are checked.
        let was_awaited = std::mem::replace(&mut self.is_awaited, node.ports().has_refused());
        if self.is_awaited && !was_awaited {
            self.touched.extend(self.conns.keys());
        }
        for link in std::mem::take(&mut self.touched) {
            self.look(now, node, link);
        }
        let is_awaited = self.is_awaited;
        let is_due = |conn: &Conn| conn.poll_at.is_some_and(|at| is_awaited || at <= now);
        let due = self.conns.iter().filter(|(_, conn)| is_due(conn));
        let due: Vec<LinkId> = due.map(|(link, _)| *link).collect();
        for link in due {
            self.look(now, node, link);
        }
        busy
    }

    /// Whether the peers' systems have acknowledged bytes for which users are waiting.
    pub(super) fn has_acks(&self, node: &Node) -> bool {
        let mut polled = self.conns.iter().filter(|(_, conn)| conn.poll_at.is_some());
        self.is_awaited
            && polled.any(|(link, conn)| {
                let Some(progress) = node.awaits_ack(*link) else { return false };
                unacknowledged_bytes(&conn.fd).is_ok_and(|unacked| {
                    progress.written.saturating_sub(unacked as u64) > progress.acked
                })
            })
    }

    /// Returns the time at which to call `turn` even if nothing happens.
    pub(super) fn deadline(&self, node: &Node) -> Option<Instant> {
        let looks = self.conns.values().filter_map(|conn| conn.poll_at).min();
        earliest(earliest(node.deadline(), looks), self.accept_at)
    }

    /// Resets the established connections to a peer, as faults would, and returns their number. The
    /// connections are reestablished.
    pub(super) fn reset(&mut self, now: Instant, node: &mut Node, peer: IpAddr) -> usize {
        let links = node.peers().established(peer);
        for link in &links {
            let Some(conn) = self.conns.get(link) else { continue };
            // After this, the system acknowledges nothing more. The bytes that it has already
            // acknowledged are read completely, since the peer does not resend them.
            let _ = SockRef::from(&conn.fd).shutdown(Shutdown::Both);
            self.read(now, node, *link, READS_ALL);
        }
        links.len()
    }

    /// Applies the current buffer settings to all connections.
    ///
    /// # Errors
    /// See [`BuffersError`].
    pub(super) fn set_buffers(&self, tuning: &Tuning) -> Result<(), BuffersError> {
        set_all_buffers(self.conns.values().map(|conn| &conn.fd), tuning)
    }

    /// Closes all connections.
    pub(super) fn close_all(&mut self) {
        for link in self.conns.keys().copied().collect::<Vec<_>>() {
            self.close(link);
        }
        if let Some(listener) = self.listener.take() {
            // An accept in progress keeps the socket alive; shutting it down releases the port
            // immediately.
            let _ = SockRef::from(&listener).shutdown(Shutdown::Both);
        }
    }

    fn accepted(&mut self, now: Instant, node: &mut Node, done: Completed) {
        match done.into_fd() {
            Ok(fd) => {
                self.accept();
                let fd = Fd::new(fd);
                let socket = SockRef::from(&fd);
                let peer = socket.peer_addr().ok().and_then(|address| address.as_socket());
                let Some(peer) = peer.map(|peer| peer.ip().to_canonical()) else { return };
                let tuning = &node.config().tuning;
                if let Err(error) = prepare(&socket, self.dead_after, tuning) {
                    if let Some(left_out) = self.accepts.admit(now) {
                        tracing::warn!(%peer, %error, left_out, "cannot set up a connection");
                    }
                    return;
                }
                for former in node.peers().candidates(peer) {
                    self.read(now, node, former, READS_ALL);
                }
                if let Some(link) = node.accepted(now, peer) {
                    note_ports(node, link, &fd);
                    self.conns.insert(link, Conn::new(fd));
                    self.poll_read(link);
                }
            }
            Err(error) => match error.raw_os_error() {
                _ if self.listener.is_none() => {}
                Some(code)
                    if [Errno::CONNABORTED, Errno::INTR]
                        .map(Errno::raw_os_error)
                        .contains(&code) =>
                {
                    self.accept();
                }
                _ => {
                    if let Some(left_out) = self.accepts.admit(now) {
                        tracing::warn!(%error, left_out, "cannot accept a peer; trying again soon");
                    }
                    self.accept_at = Some(now + ACCEPT_PAUSE);
                }
            },
        }
    }

    fn obey(&mut self, now: Instant, node: &mut Node) {
        while let Some(order) = node.take_order() {
            match order {
                Order::Connect { link, to } => {
                    if let Err(error) = self.connect(node.config(), link, to) {
                        self.log_refused(now, to, &error);
                        node.lost(now, link);
                    }
                }
                Order::Close(link) => self.close(link),
            }
        }
    }

    fn connect(&mut self, config: &Config, link: LinkId, to: IpAddr) -> io::Result<()> {
        let fd = Fd::new(outgoing(config.address, self.dead_after, &config.tuning)?);
        let address = SocketAddr::new(to, self.peer_port);
        let op = Op::Connect { fd: fd.clone(), address };
        let mut conn = Conn::new(fd);
        conn.connecting = Some(self.port.submit(op, Task::Connect(link).token()));
        self.conns.insert(link, conn);
        Ok(())
    }

    fn connected(&mut self, now: Instant, node: &mut Node, link: LinkId, done: &Completed) {
        let Some(conn) = self.conns.get_mut(&link) else { return };
        conn.connecting = None;
        match done.count() {
            Ok(_) => {
                note_ports(node, link, &conn.fd);
                node.connected(now, link);
                self.obey(now, node);
                self.poll_read(link);
            }
            Err(error) => {
                if let Op::Connect { address, .. } = &done.op {
                    self.log_refused(now, address.ip(), &error);
                }
                self.close(link);
                node.lost(now, link);
            }
        }
    }

    fn log_refused(&mut self, now: Instant, peer: IpAddr, error: &io::Error) {
        if let Some(left_out) = self.refused.admit(now, peer) {
            tracing::info!(%peer, %error, left_out, "cannot connect");
        }
    }

    /// Polls the connection for input.
    fn poll_read(&mut self, link: LinkId) {
        let Some(conn) = self.conns.get_mut(&link).filter(|conn| conn.reading.is_none()) else {
            return;
        };
        let op = Op::readable(conn.fd.clone());
        conn.reading = Some(self.port.submit(op, Task::Read(link).token()));
    }

    /// Reads what has arrived, at most `times` times.
    fn read(&mut self, now: Instant, node: &mut Node, link: LinkId, times: usize) {
        let is_fresh = self.conns.get(&link).is_some_and(|conn| conn.is_fresh);
        let former = if is_fresh { node.peers().predecessors(link) } else { Vec::new() };
        for former in former {
            // Drain the predecessor completely: its data must be read before its successor's.
            self.read(now, node, former, READS_ALL);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..times {
            let Some(conn) = self.conns.get_mut(&link) else { break };
            match recv(&conn.fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((_, count)) if count > 0 => {
                    conn.is_fresh = false;
                    self.touched.insert(link);
                    node.received(now, link, &buffer[..count]);
                    self.obey(now, node);
                    if count < buffer.len() {
                        break;
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => break,
                end => {
                    if let Err(error) = end {
                        tracing::debug!(%error, "connection lost");
                    }
                    self.close(link);
                    node.lost(now, link);
                    self.obey(now, node);
                    break;
                }
            }
        }
        self.buffer = buffer;
        self.poll_read(link);
    }

    /// Writes as much as the system accepts.
    fn write(&mut self, now: Instant, node: &mut Node, link: LinkId) {
        let Some(conn) = self.conns.get_mut(&link) else { return };
        loop {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let count = node.output(link, &mut slices);
            if count == 0 {
                break;
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let mut none = SendAncillaryBuffer::default();
            match sendmsg(&conn.fd, &slices[..count], &mut none, flags) {
                Ok(count) => node.wrote(link, count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    node.tcp_event(link, TcpEvent::NoRoom);
                    let op = Op::writable(conn.fd.clone());
                    conn.writing = Some(self.port.submit(op, Task::Write(link).token()));
                    break;
                }
                Err(error) => {
                    // Read what arrived before the failure, which the poll then reports.
                    tracing::debug!(%error, "cannot write");
                    self.read(now, node, link, READS_ALL);
                    return;
                }
            }
        }
        self.touched.insert(link);
    }

    /// Checks how much the peer's system has acknowledged, if that matters now.
    fn look(&mut self, now: Instant, node: &mut Node, link: LinkId) {
        let Some(conn) = self.conns.get_mut(&link) else { return };
        let Some(progress) = node.awaits_ack(link) else {
            conn.poll_at = None;
            return;
        };
        let is_due = conn.poll_at.is_some_and(|at| at <= now);
        if !is_due && !progress.is_awaited && !progress.is_much {
            if conn.poll_at.is_none() {
                conn.plan_poll(now, progress.acked, false);
            }
            return;
        }
        // Fails only if the descriptor is not a socket.
        let Ok(unacked) = unacknowledged_bytes(&conn.fd) else { return };
        let acked = progress.written.saturating_sub(unacked as u64);
        node.acked(link, acked);
        match node.awaits_ack(link) {
            Some(progress) => conn.plan_poll(now, acked, progress.is_awaited),
            None => conn.poll_at = None,
        }
    }

    fn close(&mut self, link: LinkId) {
        let Some(conn) = self.conns.remove(&link) else { return };
        self.touched.remove(&link);
        for op in [conn.connecting, conn.reading, conn.writing].into_iter().flatten() {
            self.port.cancel(op);
        }
        // Operations in progress keep the descriptor open.
        let _ = SockRef::from(&conn.fd).shutdown(Shutdown::Both);
    }
}

/// Reports the TCP ports of a connection to the node.
fn note_ports(node: &mut Node, link: LinkId, fd: &Fd) {
    let socket = SockRef::from(fd);
    let port = |address: io::Result<SockAddr>| Some(address.ok()?.as_socket()?.port());
    // Fails only if the peer has closed the connection, which the next read notices.
    if let (Some(own), Some(peer)) = (port(socket.local_addr()), port(socket.peer_addr())) {
        node.tcp_event(link, TcpEvent::Ports { own, peer });
    }
}
