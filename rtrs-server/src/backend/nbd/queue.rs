//! [`NbdDevice`]: one connection to an NBD server on a shard's ring, with the IOs of the shard.
//!
//! Many requests are sent at once, and data directly from the memory of its IO. Replies are
//! received into a buffer, and the remainder of large data directly into its destination.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use nbd_bridge::client::{Offered, Reply, Requests};
use nbd_bridge::wire::{NbdError, RequestHeader, cmd, cmd_flags};
use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoFlags, IoOp, WakeHandle};
use rtrs_core::extents;
use rtrs_core::mem::{IoVecs, MemSlice, Region};
use rtrs_core::rt::{Fd, Op, OpId, Port, Ring};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

use super::changes::{Account, Peers};
use super::last_flush;
use super::shared::{GONE_MAX, Shared, Wanted};
use crate::backend::immediate::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Number of request rows, of which one is for a flush that another connection needs.
const ROWS: usize = INFLIGHT_MAX + 1;
/// Maximum number of slices of one send: a head and data for each of 128 requests.
const SLICES: usize = 256;
/// Number of bytes after which a send is long enough.
const SEND_BYTES: usize = 1 << 20;
/// Size of the buffer for replies.
const BUFFER: usize = 64 << 10;
/// Number of bytes examined to determine what follows.
const HEAD: usize = 32;
/// Interval between checks of a flush that waits for other connections.
const WAIT_STEP: Duration = Duration::from_millis(500);

const SEND: u64 = 0;
const RECEIVE: u64 = 1;

/// An unanswered request.
struct Slot {
    /// Tag of an accepted IO; None for a flush that another connection needs.
    tag: Option<u64>,
    op: IoOp,
    flags: IoFlags,
    buf: Option<MemSlice>,
    /// Changes that a flush has to cover; unused by other operations.
    mark: u64,
}

/// A flush that was answered, and waits for the flushes of other connections.
struct WaitingFlush {
    tag: u64,
    mark: u64,
    /// Time that the shard has waited. A pause of the process counts as one step: the shards of
    /// the other connections were paused too.
    waited: Duration,
    /// Time of the last check.
    seen: Option<Instant>,
}

/// Data of a read that is being received.
#[derive(Clone, Copy)]
struct Incoming {
    row: u32,
    at: usize,
    left: usize,
}

enum Link {
    /// Requests and replies use it.
    Up(Fd),
    /// Ended, but operations of the ring still use it.
    Ending,
    /// A new one is being established, since the given time.
    Down(mpsc::Receiver<(OwnedFd, Offered)>, Option<Instant>),
}

/// One shard's queue of an NBD server.
pub(super) struct NbdDevice {
    shared: Arc<Shared>,
    geometry: Geometry,
    port: Port,
    wake: WakeHandle,
    link: Link,
    requests: Requests,
    /// Slots by row of `requests`.
    slots: Box<[Option<Slot>]>,
    /// Whether one of the slots is a flush that another connection needs.
    helps: bool,
    account: Arc<Account>,
    peers: Peers,
    waiting: VecDeque<WaitingFlush>,
    structured: bool,
    /// Rows whose requests must be sent, in this order.
    to_send: VecDeque<u32>,
    /// Heads of requests, by row.
    heads: Arc<Region>,
    vecs: Option<Box<IoVecs>>,
    sending: Option<OpId>,
    receiving: Option<OpId>,
    buffer: MemSlice,
    /// Range of received data in the buffer that was not processed.
    filled: (usize, usize),
    incoming: Option<Incoming>,
    accepted: usize,
    done: Done,
    /// Whether the server has been unavailable too long: IOs fail until it is back.
    gone: bool,
    alive: Arc<()>,
}

impl NbdDevice {
    pub(super) fn new(
        shared: &Arc<Shared>,
        ring: &Rc<Ring>,
        wake: WakeHandle,
        first: Option<(Fd, Offered)>,
    ) -> io::Result<Self> {
        let mut requests = Requests::new(ROWS as u32);
        let alive = Arc::default();
        let (heads, buffer) = (Region::new(ROWS * RequestHeader::LEN)?, Region::new(BUFFER)?);
        let structured = first.as_ref().is_some_and(|(_, offered)| offered.structured);
        let link = match first {
            Some((fd, _)) => {
                requests.reconnect(structured);
                Link::Up(fd)
            }
            None => ask(shared, &alive, &wake),
        };
        let account = shared.changes.join(wake.clone());
        Ok(Self {
            geometry: Geometry { size: shared.size.get(), ..shared.geometry.clone() },
            shared: Arc::clone(shared),
            port: ring.port(),
            wake,
            link,
            requests,
            slots: (0..ROWS).map(|_| None).collect(),
            helps: false,
            account,
            peers: Peers::default(),
            waiting: VecDeque::with_capacity(INFLIGHT_MAX),
            structured,
            to_send: VecDeque::with_capacity(ROWS),
            heads,
            vecs: Some(IoVecs::new(SLICES)),
            sending: None,
            receiving: None,
            buffer: buffer.whole(),
            filled: (0, 0),
            incoming: None,
            accepted: 0,
            done: Done::new(),
            gone: false,
            alive,
        })
    }

    fn slot(&self, row: u32) -> &Slot {
        let slot = self.slots.get(row as usize).and_then(Option::as_ref);
        slot.unwrap_or_else(|| unreachable!("a row of `requests` has its slot"))
    }

    /// Submits queued requests to the ring.
    fn send(&mut self) {
        let Link::Up(fd) = &self.link else { return };
        let fd = fd.clone();
        if self.sending.is_some() || self.to_send.is_empty() {
            return;
        }
        let Some(mut iov) = self.vecs.take() else { return };
        let mut bytes = 0;
        while iov.room() >= 2
            && bytes < SEND_BYTES
            && let Some(row) = self.to_send.pop_front()
        {
            let at = row as usize * RequestHeader::LEN;
            self.heads.copy_in(at, &self.requests.send(row));
            let head = self.heads.slice(at, RequestHeader::LEN);
            iov.push(head.unwrap_or_else(|| unreachable!("room for all rows")));
            bytes += RequestHeader::LEN;
            let slot = self.slot(row);
            if let (IoOp::Write, Some(buf)) = (slot.op, &slot.buf) {
                bytes += buf.len();
                iov.push(buf.clone());
            }
        }
        self.sending = Some(self.port.submit(Op::SendMsg { fd, iov }, SEND));
    }

    /// Submits a receive to the ring. Nothing is received while no request is outstanding, so that
    /// an idle connection can be handed over (`last_flush.rs`).
    fn receive(&mut self) {
        let Link::Up(fd) = &self.link else { return };
        if self.receiving.is_some() || self.accepted == 0 && !self.helps {
            return;
        }
        let (start, end) = self.filled;
        let buf = match self.incoming {
            // All received data was processed.
            Some(Incoming { row, at, left }) => {
                self.slot(row).buf.as_ref().and_then(|buf| buf.slice(at, left))
            }
            None => {
                // At most a part of a head.
                if start > 0 {
                    let mut part = [0; HEAD];
                    let part = &mut part[..end - start];
                    self.buffer.copy_out(start, part);
                    self.buffer.copy_in(0, part);
                    self.filled = (0, end - start);
                }
                self.buffer.slice(self.filled.1, BUFFER - self.filled.1)
            }
        };
        let buf = buf.unwrap_or_else(|| unreachable!("within the buffer"));
        let fd = fd.clone();
        self.receiving = Some(self.port.submit(Op::Recv { fd, buf }, RECEIVE));
    }

    /// Processes received bytes.
    fn received(&mut self, count: usize) -> Result<(), String> {
        match &mut self.incoming {
            Some(incoming) => {
                incoming.at += count;
                incoming.left -= count;
                self.incoming = Some(*incoming).filter(|incoming| incoming.left > 0);
            }
            None => self.filled.1 += count,
        }
        loop {
            let (start, end) = self.filled;
            if let Some(Incoming { row, at, left }) = self.incoming {
                let count = left.min(end - start);
                let from = self.buffer.slice(start, count);
                let to = self.slot(row).buf.as_ref().and_then(|buf| buf.slice(at, count));
                let (Some(from), Some(to)) = (from, to) else {
                    unreachable!("data within its request")
                };
                to.copy_from(&from);
                self.filled.0 += count;
                if count < left {
                    self.incoming = Some(Incoming { row, at: at + count, left: left - count });
                    return Ok(());
                }
                self.incoming = None;
                continue;
            }
            let mut head = [0; HEAD];
            let head = &mut head[..HEAD.min(end - start)];
            self.buffer.copy_out(start, head);
            let Some((count, reply)) =
                self.requests.next(head).map_err(|error| error.to_string())?
            else {
                return Ok(());
            };
            self.filled.0 += count;
            match reply {
                Reply::Nothing => {}
                Reply::Data { row, at, len } => {
                    self.incoming = Some(Incoming { row, at: at as usize, left: len as usize });
                }
                Reply::Hole { row, at, len } => {
                    let hole = self.slot(row).buf.as_ref();
                    let hole = hole.and_then(|buf| buf.slice(at as usize, len as usize));
                    hole.unwrap_or_else(|| unreachable!("data within its request")).fill(0);
                }
                Reply::End { row, error } => self.end(row, status(error)),
            }
        }
    }

    /// Ends a request. A successful flush continues to wait for other connections.
    fn end(&mut self, row: u32, status: IoStatus) {
        let Some(slot) = self.slots[row as usize].take() else {
            unreachable!("a row of `requests` has its slot")
        };
        let Slot { op, mark, .. } = slot;
        // A change with FUA may fail with the error of an earlier write-back, whatever its number.
        // Servers may lack support for other changes.
        let unsupported = op != IoOp::Write && status == IoStatus::Unsupported;
        let lost = op.changes() && slot.flags.fua && status.is_refusal() && !unsupported;
        let status = if lost { IoStatus::Io } else { status };
        if status.is_ok() && op.changes() && !slot.flags.fua {
            self.shared.changes.add(&self.account);
        }
        if status.is_ok() && op == IoOp::Flush {
            self.account.settle(mark);
            self.shared.changes.wake_waiting();
        }
        let Some(tag) = slot.tag else {
            self.helps = false;
            if !status.is_ok() {
                self.shared.log_loss(&self.account, &format!("a flush failed: {status}"));
                self.shared.changes.wake_waiting();
            }
            return;
        };
        self.accepted -= 1;
        if status.is_ok() && op == IoOp::Flush {
            self.shared.changes.count_waiting(true);
            self.waiting.push_back(WaitingFlush { tag, mark, waited: Duration::ZERO, seen: None });
        } else {
            self.done.push(tag, status);
        }
    }

    /// Ends flushes whose changes are settled on all connections.
    fn end_flushes(&mut self, now: Instant) -> bool {
        let changes = &self.shared.changes;
        let before = self.done.len();
        while let Some(flush) = self.waiting.front_mut() {
            let step = now.since(flush.seen.unwrap_or(now)).min(WAIT_STEP);
            (flush.waited, flush.seen) = (flush.waited + step, Some(now));
            if !self.peers.are_settled(changes, flush.mark) {
                if flush.waited < changes.answer_max {
                    break;
                }
                let silent = self.peers.give_up(changes, flush.mark);
                tracing::error!(
                    "{}: {silent} connections do not answer a flush that another one has answered; \
                     writes that were not flushed may be lost, and the flush fails",
                    self.shared.text
                );
            }
            let status = if changes.report() { IoStatus::Ok } else { IoStatus::Io };
            self.done.push(flush.tag, status);
            self.waiting.pop_front();
            changes.count_waiting(false);
        }
        self.done.len() > before
    }

    /// Sends a flush that another connection needs.
    fn help(&mut self) {
        if self.helps || !matches!(self.link, Link::Up(_)) || !self.account.is_requested() {
            return;
        }
        let Some(row) = self.requests.add(cmd::FLUSH, 0, 0, 0) else { return };
        let (op, flags, mark) = (IoOp::Flush, IoFlags::default(), self.shared.changes.mark());
        self.slots[row as usize] = Some(Slot { tag: None, op, flags, buf: None, mark });
        self.helps = true;
        self.to_send.push_back(row);
    }

    /// Marks the connection as failed.
    fn lose(&mut self, why: &str) {
        if !matches!(self.link, Link::Up(_)) {
            return;
        }
        tracing::warn!("{}: connection ended: {why}", self.shared.text);
        self.link = Link::Ending;
        for running in [self.sending, self.receiving].into_iter().flatten() {
            self.port.cancel(running);
        }
    }

    /// Requests a new connection when the ring no longer uses the old one. All unanswered requests
    /// are sent again.
    fn ended(&mut self) {
        if !matches!(self.link, Link::Ending) || self.sending.is_some() || self.receiving.is_some()
        {
            return;
        }
        self.shared.log_loss(&self.account, "the connection has ended");
        self.shared.changes.wake_waiting();
        (self.filled, self.incoming) = ((0, 0), None);
        self.to_send.clear();
        let rows = (0u32..).zip(&self.slots);
        self.to_send.extend(rows.filter(|(_, slot)| slot.is_some()).map(|(row, _)| row));
        self.link = ask(&self.shared, &self.alive, &self.wake);
    }

    /// Adopts a new connection if there is one.
    fn connect(&mut self, now: Instant) -> bool {
        let Link::Down(made, since) = &mut self.link else { return false };
        let since = *since.get_or_insert(now);
        if let Ok((fd, offered)) = made.try_recv() {
            if offered.size > self.shared.size.get() {
                let block = u64::from(self.geometry.logical_block);
                self.shared.size.set(offered.size / block * block);
            }
            self.structured = offered.structured;
            self.requests.reconnect(offered.structured);
            self.link = Link::Up(Fd::new(fd));
            self.gone = false;
            return true;
        }
        if self.gone || now < since + GONE_MAX {
            return false;
        }
        self.gone = true;
        let seconds = GONE_MAX.as_secs();
        let name = &self.shared.text;
        tracing::error!("{name}: unreachable for {seconds} s; IO fails until it is back");
        self.requests.reconnect(false);
        while let Some(row) = self.to_send.pop_front() {
            self.requests.remove(row);
            self.end(row, IoStatus::TimedOut);
        }
        true
    }
}

/// Requests a connection from the dialer.
fn ask(shared: &Shared, alive: &Arc<()>, wake: &WakeHandle) -> Link {
    let (made, wait) = mpsc::channel();
    let (asker, wake) = (Arc::downgrade(alive), wake.clone());
    // The thread ends only with the export.
    let _ = shared.dialer.send(Wanted { made, asker, wake });
    Link::Down(wait, None)
}

/// Converts an NBD error to a status.
fn status(error: u32) -> IoStatus {
    match NbdError::from_code(error) {
        None if error == 0 => IoStatus::Ok,
        Some(NbdError::Perm) => IoStatus::ReadOnly,
        Some(NbdError::NoMem) => IoStatus::NoMemory,
        Some(NbdError::Inval | NbdError::Overflow) => IoStatus::Invalid,
        Some(NbdError::NoSpc) => IoStatus::NoSpace,
        Some(NbdError::NotSup) => IoStatus::Unsupported,
        None | Some(NbdError::Io | NbdError::Shutdown) => IoStatus::Io,
    }
}

/// Command and flags of an IO.
fn command(io: &Io) -> (u16, u16) {
    let command = match io.op {
        IoOp::Read | IoOp::Extents => cmd::READ,
        IoOp::Write => cmd::WRITE,
        IoOp::Flush => cmd::FLUSH,
        IoOp::Discard => cmd::TRIM,
        IoOp::WriteZeroes => cmd::WRITE_ZEROES,
    };
    let zeroes = io.op == IoOp::WriteZeroes;
    let all = [
        (io.op.changes() && io.flags.fua, cmd_flags::FUA),
        (zeroes && io.flags.no_unmap, cmd_flags::NO_HOLE),
    ];
    (command, all.iter().filter(|(on, _)| *on).fold(0, |flags, (_, flag)| flags | flag))
}

impl BlockDevice for NbdDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.geometry.size = self.shared.size.get();
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.accepted + self.waiting.len() + self.done.len() >= INFLIGHT_MAX {
            return Err(io);
        }
        self.refresh();
        let mark = self.shared.changes.mark();
        let status = match self.geometry.check(&io) {
            IoStatus::Ok if io.op == IoOp::Extents => {
                let len = self.geometry.size - io.offset;
                io.buf.iter().for_each(|room| extents::all_data(room, len));
                Err(IoStatus::Ok)
            }
            IoStatus::Ok if io.op == IoOp::Flush && !self.geometry.write_cache => {
                self.peers.settle(&self.shared.changes, mark);
                Err(if self.shared.changes.report() { IoStatus::Ok } else { IoStatus::Io })
            }
            IoStatus::Ok if self.gone => Err(IoStatus::TimedOut),
            IoStatus::Ok => Ok(()),
            refused => Err(refused),
        };
        if let Err(status) = status {
            self.done.push(io.tag, status);
            return Ok(());
        }
        let (command, flags) = command(&io);
        let Some(row) = self.requests.add(command, flags, io.offset, io.len) else {
            return Err(io);
        };
        if io.op == IoOp::Flush {
            self.peers.request(&self.shared.changes, &self.account, mark);
        }
        let Io { tag, op, flags, buf, .. } = io;
        self.slots[row as usize] = Some(Slot { tag: Some(tag), op, flags, buf, mark });
        self.accepted += 1;
        self.to_send.push_back(row);
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        let mut busy = self.connect(now);
        while let Some(ended) = self.port.take() {
            busy = true;
            let count = ended.count();
            let problem = match ended.op {
                Op::SendMsg { mut iov, fd } => {
                    self.sending = None;
                    let problem = match count {
                        Ok(count) => {
                            iov.advance(count);
                            None
                        }
                        Err(error) => Some(error.to_string()),
                    };
                    if problem.is_none() && !iov.is_empty() && matches!(self.link, Link::Up(_)) {
                        self.sending = Some(self.port.submit(Op::SendMsg { fd, iov }, SEND));
                    } else {
                        iov.clear();
                        self.vecs = Some(iov);
                    }
                    problem
                }
                _ => {
                    self.receiving = None;
                    match count {
                        Ok(0) => Some("the server has closed it".to_owned()),
                        Ok(_) if !matches!(self.link, Link::Up(_)) => None,
                        Ok(count) => self.received(count).err(),
                        Err(error) => Some(error.to_string()),
                    }
                }
            };
            problem.iter().for_each(|why| self.lose(why));
        }
        self.ended();
        busy |= self.end_flushes(now);
        self.help();
        self.send();
        self.receive();
        busy
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        self.accepted + self.waiting.len() + self.done.len() + usize::from(self.helps)
    }

    fn rests(&self) -> bool {
        // The server may close the connection at any time.
        false
    }

    fn deadline(&self) -> Option<Instant> {
        let gone = match self.link {
            Link::Down(_, Some(since)) if !self.gone => Some(since + GONE_MAX),
            _ => None,
        };
        let waits = self.waiting.front().and_then(|flush| flush.seen);
        let waits = waits.map(|seen| seen + WAIT_STEP);
        earliest(self.done.deadline(), earliest(gone, waits))
    }
}

impl Drop for NbdDevice {
    /// Hands over an idle connection with unsettled changes to its last flush.
    fn drop(&mut self) {
        (0..self.waiting.len()).for_each(|_| self.shared.changes.count_waiting(false));
        let idle = self.receiving.is_none() && self.slots.iter().all(Option::is_none);
        if idle && !self.geometry.write_cache {
            self.account.settle(self.shared.changes.mark());
        }
        if let Link::Up(fd) = &self.link
            && idle
            && self.account.owes_any()
            && let Ok(fd) = fd.as_fd().try_clone_to_owned()
        {
            return last_flush::begin(&self.shared, &self.account, fd, self.structured);
        }
        self.shared.log_loss(&self.account, "a device is closed with requests in flight");
        self.shared.changes.leave(&self.account);
    }
}

impl fmt::Debug for NbdDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdDevice")
            .field("server", &self.shared.text)
            .field("accepted", &self.accepted)
            .finish_non_exhaustive()
    }
}
