//! Bridge of one shard: its connections, its requests and its device.
//!
//! Connections are handed over as sockets and stay on this shard. Everything that they share (the
//! device, the buffers, the rows) is in [`Shared`], so that a connection and the rest of the shard
//! can be borrowed separately.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rtrs_core::block::BlockDevice;
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::rt::{Fd, Op as RingOp, Port, Ring};
use rtrs_core::time::{Duration, Instant, earliest};

use crate::buffer_pool::BufferPools;
use crate::buffers::Buffers;
use crate::config::BridgeConfig;
use crate::conn::{Conn, TOKEN_SEND, is_client_gone, may_return};
use crate::group::{RECHECK, Seat};
use crate::notices::{self, Notice};
use crate::peer::Peer;
use crate::requests::ConnId;
use crate::shared::Shared;

/// Time for which a bridge waits for memory that others hold before it switches to other memory.
/// Others hold memory for a much shorter time, unless their device hangs.
const SQUEEZED_MAX: Duration = Duration::from_secs(1);

/// Time after which a connection that is still in its handshake gives way to a new one. A handshake
/// takes a few round trips.
const SILENT_AFTER: Duration = Duration::from_secs(1);

/// One shard's bridge between NBD clients and a block device.
#[derive(Debug)]
pub struct Bridge {
    port: Port,
    shared: Shared,
    conns: Vec<Option<Conn>>,
    config: BridgeConfig,
    generation: u64,
    stopping: bool,
    /// Whether a client's connection ended without a disconnect request.
    lost_client: bool,
    /// Time of the next check: whether orphaned writes have ended, or whether other shards have
    /// checked their sockets.
    recheck: Option<Instant>,
    /// Time at which this bridge began to wait for memory that others hold.
    squeezed: Option<Instant>,
}

impl Bridge {
    /// Creates a bridge that serves `device` under `name` on this shard only.
    ///
    /// # Errors
    /// Same as [`Bridge::seated`].
    pub fn new(
        ring: &Rc<Ring>,
        device: Box<dyn BlockDevice>,
        name: &str,
        config: BridgeConfig,
    ) -> io::Result<Self> {
        Self::seated(ring, &BufferPools::default(), device, name, config, Seat::alone())
    }

    /// Creates a bridge that serves `device` under `name` as one of the device's bridges. Its
    /// memory comes from `pools`, which the bridges of a shard share. Clients see the geometry that
    /// the device has when they connect or send a request.
    ///
    /// # Errors
    /// `InvalidInput` if the export cannot be served or the bounds are too small for it; the
    /// system's error if memory is refused or cannot be registered with the device.
    pub fn seated(
        ring: &Rc<Ring>,
        pools: &BufferPools,
        mut device: Box<dyn BlockDevice>,
        name: &str,
        config: BridgeConfig,
        seat: Seat,
    ) -> io::Result<Self> {
        if config.requests_max == 0 || config.connections_max == 0 {
            let what = "a bridge needs room for a request and for a connection";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let (connections, payload) = (config.connections_max, config.max_payload as usize);
        let mut buffers = Buffers::new(pools, config.buffer_bytes, connections, payload)?;
        buffers.touch(config.touched_bytes);
        device.attach_region(buffers.region())?;
        let shared = Shared::new(name, buffers, &config, device, seat);
        shared.export().check().map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        shared.seat.group.join(shared.seat.shard);
        Ok(Self {
            port: ring.port(),
            shared,
            conns: Vec::new(),
            config,
            generation: 0,
            stopping: false,
            lost_client: false,
            recheck: None,
            squeezed: None,
        })
    }

    /// Takes over a connected client. Beyond the connection limit, it is disconnected immediately.
    pub fn adopt(&mut self, now: Instant, socket: OwnedFd) {
        self.add(now, socket, false);
    }

    /// Takes over the other end of a socket that belongs to, or will be given to, a kernel device
    /// that shows this bridge's export. The kernel has no handshake and no timeouts, and has
    /// already been sent [`FIRST_BYTES`](crate::kernel::FIRST_BYTES) of the first reply. Returns
    /// false and closes the socket if there are too many connections.
    pub fn adopt_kernel(&mut self, now: Instant, socket: OwnedFd) -> bool {
        self.add(now, socket, true)
    }

    fn add(&mut self, now: Instant, socket: OwnedFd, kernel: bool) -> bool {
        let connections = self.connections();
        let full = connections >= self.config.connections_max;
        if self.stopping || full && !self.close_silent(now) {
            if let Some(left_out) = self.shared.notices.admit(now, Notice::TooManyConnections) {
                tracing::warn!(
                    export = self.shared.terms.name(),
                    peer = notices::peer(&socket),
                    connections,
                    left_out,
                    "NBD client turned away: too many connections on this shard"
                );
            }
            return false;
        }
        let slot = self.conns.iter().position(Option::is_none).unwrap_or_else(|| {
            self.conns.push(None);
            self.conns.len() - 1
        });
        self.generation += 1;
        let id = ConnId { slot, generation: self.generation };
        self.shared.seat.group.ranges.join(self.shared.seat.shard);
        let fd = Fd::new(socket);
        match Conn::new(fd.clone(), id, now, kernel, &self.shared) {
            Ok(conn) => self.conns[slot] = Some(conn),
            Err(error) => {
                if let Some(left_out) = self.shared.notices.admit(now, Notice::NoSocket) {
                    tracing::warn!(
                        export = self.shared.terms.name(),
                        peer = notices::peer(&fd),
                        left_out,
                        %error,
                        "NBD client turned away: its connection cannot be set up"
                    );
                }
            }
        }
        self.conns[slot].is_some()
    }

    /// Closes the oldest connection that has been in its handshake for a while, or whose client is
    /// gone, so that clients that send nothing do not keep others out. [`Relays`](crate::Relays)
    /// may already have closed it to admit the new connection. Returns false if there is no such
    /// connection.
    fn close_silent(&mut self, now: Instant) -> bool {
        let conns = self.conns.iter_mut().flatten();
        let shaking = conns.filter_map(|conn| Some((conn.handshake_since()?, conn)));
        let silent = shaking
            .filter(|(since, conn)| now.since(*since) >= SILENT_AFTER || is_client_gone(conn));
        let Some((_, conn)) = silent.min_by_key(|(since, _)| *since) else { return false };
        conn.abort(&self.port, &mut self.shared);
        true
    }

    /// Stops taking requests. Requests in flight are answered, then connections close.
    pub fn stop(&mut self) {
        self.stopping = true;
        for conn in self.conns.iter_mut().flatten() {
            conn.end(&self.port, &mut self.shared);
        }
    }

    /// Closes all connections without waiting for replies.
    pub fn abort(&mut self) {
        self.stopping = true;
        for conn in self.conns.iter_mut().flatten() {
            conn.abort(&self.port, &mut self.shared);
        }
    }

    /// Number of open connections.
    pub fn connections(&self) -> usize {
        self.conns.iter().flatten().count()
    }

    /// Clients that use the export: past the handshake, and not disconnected.
    pub fn clients(&self) -> impl Iterator<Item = Peer> {
        self.conns.iter().flatten().filter_map(Conn::client)
    }

    /// Whether a client is using the export, or left without a disconnect request and so may
    /// connect again, here or to the next process.
    pub fn may_clients_return(&self) -> bool {
        self.lost_client || self.conns.iter().flatten().any(may_return)
    }

    /// Number of requests in flight.
    pub fn inflight(&self) -> usize {
        self.shared.requests.busy()
    }

    /// Counters of this shard.
    pub fn stats(&self) -> FrontEndStats {
        FrontEndStats {
            connections: self.connections() as u64,
            clients: self.clients().count() as u64,
            ..self.shared.stats
        }
    }

    /// Does all work that is possible now. Returns true if anything happened.
    pub fn turn(&mut self, now: Instant) -> bool {
        let Self { port, shared, conns, .. } = self;
        let mut any = shared.poll(now) | look(port, shared, conns);
        any |= !shared.seat.group.ranges.is_empty() && shared.turns.look(&mut shared.requests);
        any |= shared.reap();
        any |= dispatch_finished(shared, conns);
        while let Some(done) = port.take() {
            any = true;
            #[allow(clippy::cast_possible_truncation, reason = "the low half is a slot")]
            let slot = (done.token & (TOKEN_SEND - 1)) as usize;
            let result = done.count();
            let Some(conn) = conns.get_mut(slot).and_then(Option::as_mut) else { continue };
            match done.op {
                RingOp::SendMsg { iov, .. } => conn.on_sent(now, iov, &result, port, shared),
                RingOp::Poll { .. } => conn.on_hangup(port, shared),
                _ => conn.on_received(now, &result, port, shared),
            }
        }
        let mut waits = false;
        for conn in conns.iter_mut().flatten() {
            any |= conn.take_requests(now, port, shared);
            waits |= conn.waits_for_round();
        }
        any |= free_unread(now, shared, conns);
        // A round that was just requested is over immediately if no other shard has a bridge.
        any |= look(port, shared, conns);
        any |= shared.has_deferred() && shared.release_deferred() | shared.expire_deferred(now);
        // IO that the device completes immediately is answered immediately.
        any |= shared.reap();
        any |= dispatch_finished(shared, conns);
        any |= close_failed(port, shared, conns);
        for entry in &mut *conns {
            let Some(conn) = entry else { continue };
            conn.note_reported(shared);
            any |= conn.send(now, port, shared);
            any |= conn.receive(now, port, shared);
            conn.note_stall(port);
            if conn.is_gone() {
                conn.release(shared);
                self.lost_client |= may_return(conn);
                *entry = None;
                any = true;
            }
        }
        if conns.iter().all(Option::is_none) {
            shared.seat.group.ranges.leave(shared.seat.shard);
        }
        shared.notices.log_suppressed(now, shared.terms.name());
        self.recheck = (waits || shared.has_deferred()).then(|| now + RECHECK);
        let squeezed = shared.buffers.was_squeezed() | shared.first_reader.beside_unread;
        self.squeezed = squeezed.then(|| self.squeezed.unwrap_or(now));
        if self.squeezed.is_some_and(|since| now.since(since) >= SQUEEZED_MAX) {
            any |= shared.move_on();
            self.squeezed = Some(now);
        }
        any
    }

    /// Returns the time at which `turn` must be called even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let conns = self.conns.iter().flatten();
        let soonest = earliest(self.shared.queue.device().deadline(), self.recheck);
        let soonest = earliest(soonest, self.squeezed.map(|since| since + SQUEEZED_MAX));
        let soonest = earliest(soonest, self.shared.notices.deadline());
        let first = &self.shared.first_reader;
        let waits = first.slot().is_some() && !first.beside_unread;
        let stalls = self.conns.iter().flatten().filter_map(Conn::stalls_at);
        let soonest = earliest(soonest, stalls.filter(|_| waits).min());
        conns.fold(soonest, |soonest, conn| earliest(soonest, conn.deadline()))
    }

    /// Number of internal errors (states that only a bug can cause); for tests.
    #[doc(hidden)]
    pub fn internal_errors(&self) -> u64 {
        self.shared.internal_errors.count()
    }

    /// Asserts that every row and every buffer is accounted for; for tests. Writes whose payload is
    /// at the device may hold buffers beyond the count, so the check is exact only without them.
    #[doc(hidden)]
    pub fn check(&self) {
        let Shared { requests, buffers, .. } = &self.shared;
        assert_eq!(self.shared.internal_errors.count(), 0, "internal errors, see the log");
        let conns = || self.conns.iter().flatten();
        let rows: usize = conns().map(Conn::rows).sum();
        assert_eq!(rows, requests.busy(), "rows of connections against rows in use");
        let (receive, read) =
            conns().map(Conn::buffers).fold((0, 0), |sum, n| (sum.0 + n.0, sum.1 + n.1));
        assert_eq!(receive, buffers.receivers(), "connections that have a buffer to receive");
        let held = buffers.held();
        let Seat { group, shard } = &self.shared.seat;
        let orphaned = requests.orphaned();
        assert!(
            orphaned <= group.orphaned_writes(),
            "{orphaned} orphaned rows, fewer in the table"
        );
        let entered = group.orphans.any(|(own, _), _| own == shard);
        assert!(entered == (orphaned > 0), "an orphaned write in the table without a row");
        assert!(receive + read <= held, "{receive} + {read} buffers counted, {held} are out");
        if requests.busy() == 0 {
            assert_eq!((receive + read, read), (held, 0), "buffers out without a request");
            assert!(!self.shared.queue.is_congested(), "a backlog without a request");
        }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.shared.seat.group.leave(self.shared.seat.shard);
    }
}

/// Checks all sockets for disconnected clients, if a new connection on any shard is waiting for
/// this. Returns true if a check was due.
fn look(port: &Port, shared: &mut Shared, conns: &mut [Option<Conn>]) -> bool {
    let Seat { group, shard } = &shared.seat;
    let Some(due) = group.due(*shard) else { return false };
    for conn in conns.iter_mut().flatten() {
        conn.look(due, port, shared);
    }
    shared.seat.group.has_looked(shared.seat.shard, due.round);
    true
}

/// Frees memory of clients that do not read their replies, if another client is waiting for memory.
/// Returns true if that may help.
fn free_unread(now: Instant, shared: &mut Shared, conns: &mut [Option<Conn>]) -> bool {
    let first = shared.first_reader.slot();
    let before = std::mem::take(&mut shared.first_reader.beside_unread);
    let Some(first) = first else { return false };
    let mut any = false;
    for conn in conns.iter_mut().flatten().filter(|conn| conn.id.slot != first) {
        if conn.stalls_at().is_some_and(|at| at <= now) {
            shared.first_reader.beside_unread = true;
            any |= conn.drop_data(now, shared);
        }
    }
    any | (shared.first_reader.beside_unread && !before)
}

/// Closes the connections affected by internal errors. Returns true if there were any.
fn close_failed(port: &Port, shared: &mut Shared, conns: &mut [Option<Conn>]) -> bool {
    let mut any = false;
    while let Some(id) = shared.internal_errors.next_conn() {
        any = true;
        if let Some(conn) = conns.get_mut(id.slot).and_then(Option::as_mut)
            && conn.id == id
        {
            conn.abort(port, shared);
        }
    }
    any
}

/// Passes finished requests to their connections.
fn dispatch_finished(shared: &mut Shared, conns: &mut [Option<Conn>]) -> bool {
    let any = !shared.finished.is_empty();
    while let Some(row) = shared.finished.pop_front() {
        let id = shared.requests.row(row).conn;
        match conns.get_mut(id.slot).and_then(Option::as_mut) {
            Some(conn) if conn.id == id => conn.on_finished(row, shared),
            _ => shared.internal_error(row, "a row outlived its connection"),
        }
    }
    any
}
