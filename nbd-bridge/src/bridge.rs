//! A core's part of the bridge: its connections, its requests, its device.
//!
//! Connections are handed over as sockets and stay on this core. Everything they share - the
//! device, the buffers, the rows - is in [`Shared`], so that a connection and the rest of the
//! core can be borrowed apart.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::rt::{Fd, Op as RingOp, Port, Ring};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Instant, earliest};

use crate::buffers::{Buffers, PART_MAX};
use crate::conn::{Conn, TOKEN_SEND};
use crate::proto::{ExportInfo, Exports, Op};
use crate::requests::Requests;
use crate::stats::BridgeStats;

/// Bounds of one core's bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BridgeConfig {
    /// Bytes of buffers on this core; at least one request of 32 MiB and a buffer for every
    /// connection must fit.
    pub buffer_bytes: usize,
    /// Connections on this core; more are closed at once.
    pub connections_max: usize,
    /// Requests in flight on this core.
    pub requests_max: u32,
}

impl Default for BridgeConfig {
    fn default() -> Self {
        Self { buffer_bytes: 48 << 20, connections_max: 48, requests_max: 1024 }
    }
}

/// What all connections of a core use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) export: ExportInfo,
    pub(crate) buffers: Buffers,
    pub(crate) requests: Requests,
    pub(crate) rows_max: usize,
    pub(crate) stats: BridgeStats,
    device: Box<dyn BlockDevice>,
    /// IOs that the device had no room for, in order.
    backlog: VecDeque<Io>,
    /// Rows whose last part ended, for their connections.
    finished: Vec<u32>,
}

impl Shared {
    /// True when nothing more should be taken from clients for now.
    pub(crate) fn is_congested(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// A buffer for receiving.
    pub(crate) fn take_buffer(&mut self) -> Option<u32> {
        self.buffers.take()
    }

    /// Hands an IO to the device, or queues it.
    pub(crate) fn submit(&mut self, io: Io) {
        if self.backlog.is_empty() {
            if let Err(io) = self.device.submit(io) {
                self.backlog.push_back(io);
            }
        } else {
            self.backlog.push_back(io);
        }
    }

    /// Submits a read into the row's parts.
    pub(crate) fn submit_read(&mut self, row: u32) {
        let entry = self.requests.row(row);
        let count = entry.parts.len();
        entry.pending = u32::try_from(count).unwrap_or(u32::MAX);
        let mut offset = entry.offset;
        for index in 0..count {
            let buf = self.requests.row(row).parts[index].slice.clone();
            let len = u32::try_from(buf.len()).unwrap_or(u32::MAX);
            let tag = u64::from(row);
            let flags = IoFlags::default();
            self.submit(Io { tag, op: IoOp::Read, flags, offset, len, buf: Some(buf) });
            offset += u64::from(len);
        }
    }

    /// Submits an operation without data, cut to what the device takes at once.
    pub(crate) fn submit_bare(&mut self, row: u32, op: IoOp, flags: IoFlags) {
        let entry = self.requests.row(row);
        let (mut offset, mut left) = (entry.offset, entry.len);
        let tag = u64::from(row);
        if op == IoOp::Flush {
            entry.pending = 1;
            self.submit(Io { tag, op, flags, offset: 0, len: 0, buf: None });
            return;
        }
        let geometry = self.device.geometry();
        let block = geometry.logical_block.max(1);
        let most = (geometry.discard_max / block * block).max(block);
        entry.pending = left.div_ceil(most);
        while left > 0 {
            let len = left.min(most);
            self.submit(Io { tag, op, flags, offset, len, buf: None });
            offset += u64::from(len);
            left -= len;
        }
    }

    /// Reports the row to its connection if nothing of it is outstanding.
    pub(crate) fn finish_if_done(&mut self, row: u32) {
        let entry = self.requests.row(row);
        if entry.pending == 0 && entry.complete {
            self.finished.push(row);
        }
    }

    /// Gives a row and its memory back.
    pub(crate) fn free_row(&mut self, row: u32) {
        while let Some(part) = self.requests.row(row).parts.pop() {
            self.buffers.release(part.buffer);
        }
        self.requests.give(row);
    }

    fn reap(&mut self) -> bool {
        let mut any = false;
        while let Some(done) = self.device.reap() {
            any = true;
            #[allow(clippy::cast_possible_truncation, reason = "the tag is a row number")]
            let row = done.tag as u32;
            let entry = self.requests.row(row);
            entry.pending -= 1;
            if !done.status.is_ok() && entry.status.is_ok() {
                entry.status = done.status;
            }
            if entry.op == Op::Write {
                // The payload is at the device: its buffer need not wait for the reply.
                if entry.pending == 0 {
                    while let Some(part) = entry.parts.pop() {
                        self.buffers.release(part.buffer);
                    }
                }
            }
            self.stats.completed(done.status);
            self.finish_if_done(row);
        }
        any
    }

    fn drain_backlog(&mut self) -> bool {
        let mut any = false;
        while let Some(io) = self.backlog.pop_front() {
            if let Err(io) = self.device.submit(io) {
                self.backlog.push_front(io);
                break;
            }
            any = true;
        }
        any
    }
}

impl Exports for Shared {
    fn list(&self, visit: &mut dyn FnMut(&ExportInfo)) {
        visit(&self.export);
    }

    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        (name.is_empty() || name == self.export.name).then(|| self.export.clone())
    }
}

/// One core's bridge between NBD clients and a block device.
#[derive(Debug)]
pub struct Bridge {
    port: Port,
    shared: Shared,
    conns: Vec<Option<Conn>>,
    config: BridgeConfig,
    generation: u32,
    stopping: bool,
}

impl Bridge {
    /// A bridge that serves `device` on this core as `export`.
    ///
    /// # Errors
    /// The system's error when memory is refused or cannot be registered with the device.
    pub fn new(
        ring: &Rc<Ring>,
        mut device: Box<dyn BlockDevice>,
        export: ExportInfo,
        config: BridgeConfig,
    ) -> io::Result<Self> {
        export.check().map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        let buffers = Buffers::new(config.buffer_bytes)?;
        let least = (32usize << 20).div_ceil(PART_MAX) + config.connections_max + 2;
        if buffers.capacity() < least {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "buffers of {} bytes are too few for a request of 32 MiB and {} connections",
                    config.buffer_bytes, config.connections_max
                ),
            ));
        }
        device.attach_region(buffers.region())?;
        Ok(Self {
            port: ring.port(),
            shared: Shared {
                export,
                buffers,
                requests: Requests::new(config.requests_max),
                rows_max: config.requests_max as usize,
                stats: BridgeStats::default(),
                device,
                backlog: VecDeque::with_capacity(256),
                finished: Vec::with_capacity(config.requests_max as usize),
            },
            conns: Vec::new(),
            config,
            generation: 0,
            stopping: false,
        })
    }

    /// Takes a connected client over. It is closed at once when there are too many.
    pub fn adopt(&mut self, now: Instant, socket: OwnedFd) {
        if self.stopping || self.connections() >= self.config.connections_max {
            tracing::warn!(
                "NBD client turned away: {} connections on this core",
                self.connections()
            );
            return;
        }
        let slot = self.conns.iter().position(Option::is_none).unwrap_or_else(|| {
            self.conns.push(None);
            self.conns.len() - 1
        });
        self.generation = self.generation.wrapping_add(1);
        match Conn::new(Fd::new(socket), slot, self.generation, now, &self.shared) {
            Ok(conn) => self.conns[slot] = Some(conn),
            Err(error) => tracing::warn!("NBD client turned away: {error}"),
        }
    }

    /// Takes no more requests; what is in flight is answered, then connections close.
    pub fn stop(&mut self) {
        self.stopping = true;
        for conn in self.conns.iter_mut().flatten() {
            conn.end(&self.port, &mut self.shared);
        }
    }

    /// Closes all connections without waiting for answers.
    pub fn abort(&mut self) {
        self.stopping = true;
        for conn in self.conns.iter_mut().flatten() {
            conn.abort(&self.port, &mut self.shared);
        }
    }

    /// Open connections.
    pub fn connections(&self) -> usize {
        self.conns.iter().flatten().count()
    }

    /// Requests in flight.
    pub fn inflight(&self) -> usize {
        self.shared.requests.busy()
    }

    /// Counters of this core.
    pub fn stats(&self) -> BridgeStats {
        BridgeStats { connections: self.connections() as u64, ..self.shared.stats }
    }

    /// Does all that can be done now. True when anything happened.
    pub fn turn(&mut self, now: Instant) -> bool {
        let mut any = self.shared.device.poll(now);
        any |= self.shared.reap();
        any |= self.shared.drain_backlog();
        any |= self.dispatch_finished();
        while let Some(done) = self.port.take() {
            any = true;
            #[allow(clippy::cast_possible_truncation, reason = "the low half is a slot")]
            let slot = (done.token & (TOKEN_SEND - 1)) as usize;
            let result = done.count();
            let Some(conn) = self.conns.get_mut(slot).and_then(Option::as_mut) else { continue };
            match done.op {
                RingOp::SendMsg { iov, .. } => {
                    conn.on_sent(now, iov, &result, &self.port, &mut self.shared);
                }
                _ => conn.on_received(now, &result, &self.port, &mut self.shared),
            }
        }
        for slot in 0..self.conns.len() {
            let Some(conn) = self.conns[slot].as_mut() else { continue };
            any |= conn.turn(now, &self.port, &mut self.shared);
            if conn.is_gone() {
                conn.release(&mut self.shared);
                self.conns[slot] = None;
                any = true;
            }
        }
        any |= self.shared.reap();
        any |= self.dispatch_finished();
        any
    }

    fn dispatch_finished(&mut self) -> bool {
        let any = !self.shared.finished.is_empty();
        while let Some(row) = self.shared.finished.pop() {
            let entry = self.shared.requests.row(row);
            let (slot, generation) = (entry.conn, entry.generation);
            match self.conns.get_mut(slot).and_then(Option::as_mut) {
                Some(conn) if conn.generation == generation => {
                    conn.on_finished(row, &mut self.shared);
                }
                _ => panic!("row {row} outlived its connection"),
            }
        }
        any
    }

    /// When `turn` wants to be called even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let conns = self.conns.iter().flatten();
        conns
            .fold(self.shared.device.deadline(), |soonest, conn| earliest(soonest, conn.deadline()))
    }
}

/// True for statuses that say something about the device rather than the request.
pub(crate) fn is_device_fault(status: IoStatus) -> bool {
    !matches!(status, IoStatus::Ok | IoStatus::Invalid | IoStatus::ReadOnly | IoStatus::Unsupported)
}
