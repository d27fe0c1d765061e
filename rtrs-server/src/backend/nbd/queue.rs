//! [`NbdDevice`]: one connection to an NBD server on a shard's ring, with the IOs of the shard.
//!
//! Requests go out many at a time, with data from where it lies. Replies are received into a
//! buffer, and the rest of large data directly to where it belongs.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use nbd_bridge::client::{Offered, Reply, Requests};
use nbd_bridge::wire::{NbdError, RequestHeader, cmd, cmd_flags};
use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoFlags, IoOp, WakeHandle};
use rtrs_core::extents;
use rtrs_core::mem::{IoVecs, MemSlice, Region};
use rtrs_core::rt::{Fd, Op, OpId, Port, Ring};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Instant, earliest};

use super::shared::{GONE_MAX, Shared, Wanted};
use crate::backend::immediate::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Slices of one send: a head and data for each of 128 requests.
const SLICES: usize = 256;
/// Bytes after which a send is long enough.
const SEND_BYTES: usize = 1 << 20;
/// Room for replies.
const BUFFER: usize = 64 << 10;
/// What is looked at to find what follows.
const HEAD: usize = 32;

const SEND: u64 = 0;
const RECEIVE: u64 = 1;

/// An accepted IO.
struct Slot {
    tag: u64,
    op: IoOp,
    flags: IoFlags,
    buf: Option<MemSlice>,
    /// Of a flush: all changes that were answered before it.
    mark: u64,
}

/// Data of a read that is on its way.
#[derive(Clone, Copy)]
struct Incoming {
    row: u32,
    at: usize,
    left: usize,
}

enum Link {
    /// Requests and replies go over it.
    Up(Fd),
    /// It has ended; operations of the ring still have it.
    Ending,
    /// A new one is being made, since then.
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
    /// By row of `requests`.
    slots: Box<[Option<Slot>]>,
    /// Rows whose requests are to be sent, in that order.
    to_send: VecDeque<u32>,
    /// The heads of requests, by row.
    heads: Arc<Region>,
    vecs: Option<Box<IoVecs>>,
    sending: Option<OpId>,
    receiving: Option<OpId>,
    buffer: MemSlice,
    /// What was received there, and not looked at.
    filled: (usize, usize),
    incoming: Option<Incoming>,
    accepted: usize,
    done: Done,
    /// The server is gone for too long: IOs fail until it is back.
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
        let mut requests = Requests::new(INFLIGHT_MAX as u32);
        let alive = Arc::default();
        let link = match first {
            Some((fd, offered)) => {
                requests.reconnect(offered.structured);
                Link::Up(fd)
            }
            None => ask(shared, &alive, &wake),
        };
        Ok(Self {
            geometry: Geometry { size: shared.size.get(), ..shared.geometry.clone() },
            shared: Arc::clone(shared),
            port: ring.port(),
            wake,
            link,
            requests,
            slots: (0..INFLIGHT_MAX).map(|_| None).collect(),
            to_send: VecDeque::with_capacity(INFLIGHT_MAX),
            heads: Region::new(INFLIGHT_MAX * RequestHeader::LEN)?,
            vecs: Some(IoVecs::new(SLICES)),
            sending: None,
            receiving: None,
            buffer: Region::new(BUFFER)?.whole(),
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

    /// Gives the ring what there is to send.
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

    /// Gives the ring room for what comes.
    fn receive(&mut self) {
        let Link::Up(fd) = &self.link else { return };
        if self.receiving.is_some() {
            return;
        }
        let (start, end) = self.filled;
        let buf = match self.incoming {
            // Everything that was received is taken.
            Some(Incoming { row, at, left }) => {
                self.slot(row).buf.as_ref().and_then(|buf| buf.slice(at, left))
            }
            None => {
                // A part of a head at most.
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

    /// So many bytes were received.
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

    /// An IO has ended.
    fn end(&mut self, row: u32, mut status: IoStatus) {
        let Some(slot) = self.slots[row as usize].take() else {
            unreachable!("a row of `requests` has its slot")
        };
        if status.is_ok() && slot.op.changes() && !slot.flags.fua {
            self.shared.changed();
        }
        if status.is_ok() && slot.op == IoOp::Flush && !self.shared.flushed(slot.mark) {
            status = IoStatus::Io;
        }
        self.accepted -= 1;
        self.done.push(slot.tag, status);
    }

    /// The connection cannot be used any more.
    fn lose(&mut self, why: &str) {
        if !matches!(self.link, Link::Up(_)) {
            return;
        }
        tracing::warn!("{}: the connection has ended: {why}", self.shared.text);
        self.link = Link::Ending;
        for running in [self.sending, self.receiving].into_iter().flatten() {
            self.port.cancel(running);
        }
    }

    /// The ring has nothing of the old connection any more: asks for a new one. All that is not
    /// answered is sent again.
    fn ended(&mut self) {
        if !matches!(self.link, Link::Ending) || self.sending.is_some() || self.receiving.is_some()
        {
            return;
        }
        self.shared.lost_connection();
        (self.filled, self.incoming) = ((0, 0), None);
        self.to_send.clear();
        let rows = (0u32..).zip(&self.slots);
        self.to_send.extend(rows.filter(|(_, slot)| slot.is_some()).map(|(row, _)| row));
        self.link = ask(&self.shared, &self.alive, &self.wake);
    }

    /// Takes a new connection if there is one.
    fn connect(&mut self, now: Instant) -> bool {
        let Link::Down(made, since) = &mut self.link else { return false };
        let since = *since.get_or_insert(now);
        if let Ok((fd, offered)) = made.try_recv() {
            if offered.size > self.shared.size.get() {
                let block = u64::from(self.geometry.logical_block);
                self.shared.size.set(offered.size / block * block);
            }
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
        tracing::error!("{}: gone for {seconds} s; IO fails until it is back", self.shared.text);
        self.requests.reconnect(false);
        while let Some(row) = self.to_send.pop_front() {
            self.requests.remove(row);
            self.end(row, IoStatus::TimedOut);
        }
        true
    }
}

/// Asks for a connection.
fn ask(shared: &Shared, alive: &Arc<()>, wake: &WakeHandle) -> Link {
    let (made, wait) = mpsc::channel();
    let (asker, wake) = (Arc::downgrade(alive), wake.clone());
    // The thread ends with the export only.
    let _ = shared.dialer.send(Wanted { made, asker, wake });
    Link::Down(wait, None)
}

/// The status of an NBD error.
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
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        self.refresh();
        let mark = self.shared.mark();
        let status = match self.geometry.check(&io) {
            IoStatus::Ok if io.op == IoOp::Extents => {
                io.buf.iter().for_each(|room| extents::all_data(room, io.len));
                Err(IoStatus::Ok)
            }
            IoStatus::Ok if io.op == IoOp::Flush && !self.geometry.write_cache => {
                let known = self.shared.flushed(mark);
                Err(if known { IoStatus::Ok } else { IoStatus::Io })
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
        let Io { tag, op, flags, buf, .. } = io;
        self.slots[row as usize] = Some(Slot { tag, op, flags, buf, mark });
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
        self.send();
        self.receive();
        busy
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        self.accepted + self.done.len()
    }

    fn rests(&self) -> bool {
        // The server may end the connection at any time.
        false
    }

    fn deadline(&self) -> Option<Instant> {
        let gone = match self.link {
            Link::Down(_, Some(since)) if !self.gone => Some(since + GONE_MAX),
            _ => None,
        };
        earliest(self.done.deadline(), gone)
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
