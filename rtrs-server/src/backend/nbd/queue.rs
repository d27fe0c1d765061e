//! [`NbdDevice`]: one connection to an NBD server on a shard's ring, with the shard's IOs.
//!
//! Each part owns its state, and this file connects them: `link.rs` has the connection,
//! `outstanding.rs` unanswered requests, `sender.rs` and `receiver.rs` the two directions, and
//! `flushes.rs` flushes that wait for other connections.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;

use nbd_bridge::client::Offered;
use nbd_bridge::wire::NbdError;
use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp, WakeHandle};
use rtrs_core::extents;
use rtrs_core::rt::{Completed, Fd, Op, Port, Ring};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Instant, earliest};

use super::flushes::Flushes;
use super::last_flush;
use super::link::{Link, LinkEvent};
use super::outstanding::{Outstanding, Slot};
use super::receiver::Receiver;
use super::sender::{Sender, SentMessage};
use super::shared::{GONE_MAX, Shared};
use crate::backend::immediate::Done;
use crate::backend::target::INFLIGHT_MAX;

/// One shard's queue to an NBD server.
pub(super) struct NbdDevice {
    shared: Arc<Shared>,
    geometry: Geometry,
    port: Port,
    link: Link,
    outstanding: Outstanding,
    sender: Sender,
    receiver: Receiver,
    flushes: Flushes,
    done: Done,
}

impl NbdDevice {
    pub(super) fn new(
        shared: &Arc<Shared>,
        ring: &Rc<Ring>,
        wake: WakeHandle,
        first: Option<(Fd, Offered)>,
    ) -> io::Result<Self> {
        let mut outstanding = Outstanding::new();
        let (sender, receiver) = (Sender::new()?, Receiver::new()?);
        let first = first.map(|(fd, offered)| (fd, offered.structured));
        if let Some((_, structured)) = first {
            outstanding.reconnect(structured);
        }
        Ok(Self {
            geometry: Geometry { size: shared.size.get(), ..shared.geometry.clone() },
            shared: Arc::clone(shared),
            port: ring.port(),
            flushes: Flushes::new(shared, wake.clone()),
            link: Link::new(first, shared, wake),
            outstanding,
            sender,
            receiver,
            done: Done::new(),
        })
    }

    /// Processes received bytes. Returns why the connection must be closed, if it must.
    fn received(&mut self, count: usize) -> Option<String> {
        self.receiver.add(count);
        loop {
            match self.receiver.next(&mut self.outstanding) {
                Ok(Some(answer)) => {
                    let slot = self.outstanding.end(answer.row);
                    self.end(&slot, status(answer.error));
                }
                Ok(None) => return None,
                Err(error) => return Some(error.to_string()),
            }
        }
    }

    /// Completes a request; a successful flush completes once those on other connections have.
    fn end(&mut self, slot: &Slot, status: IoStatus) {
        let (op, mark) = (slot.op, slot.mark);
        // A change with FUA may fail with the error of an earlier write-back, whatever the errno.
        // Servers may not support other changes.
        let unsupported = op != IoOp::Write && status == IoStatus::Unsupported;
        let lost = op.changes() && slot.flags.fua && status.is_refusal() && !unsupported;
        let status = if lost { IoStatus::Io } else { status };
        if status.is_ok() && op.changes() && !slot.flags.fua {
            self.flushes.add_change(&self.shared);
        }
        if status.is_ok() && op == IoOp::Flush {
            self.flushes.settle(&self.shared, mark);
        }
        match slot.tag {
            None if status.is_ok() => {}
            None => self.flushes.lose(&self.shared, &format!("a flush failed: {status}")),
            Some(tag) if status.is_ok() && op == IoOp::Flush => {
                self.flushes.hold(&self.shared, tag, mark);
            }
            Some(tag) => self.done.push(tag, status),
        }
    }

    /// Sends a flush that another connection needs.
    fn help(&mut self) {
        let is_requested = || self.flushes.account().is_requested();
        if self.outstanding.helps() || !self.link.is_up() || !is_requested() {
            return;
        }
        if let Some(row) = self.outstanding.add_help(self.shared.changes.mark()) {
            self.sender.push(row);
        }
    }

    /// Marks the connection as failed.
    fn lose(&mut self, why: &str) {
        if !self.link.is_up() {
            return;
        }
        tracing::warn!("{}: connection ended: {why}", self.shared.text);
        self.link.lose();
        for running in [self.sender.running(), self.receiver.running()].into_iter().flatten() {
            self.port.cancel(running);
        }
    }

    /// Requests a new connection once the ring no longer uses the old one. All unanswered requests
    /// are resent.
    fn ended(&mut self) {
        let is_used = self.sender.running().is_some() || self.receiver.running().is_some();
        if !self.link.is_ending() || is_used {
            return;
        }
        self.flushes.lose(&self.shared, "the connection has ended");
        self.receiver.reset();
        self.sender.replace(self.outstanding.rows());
        self.link.reconnect(&self.shared);
    }

    /// Adopts a new connection if one is ready, or fails queued IO if the server is gone.
    fn connect(&mut self, now: Instant) -> bool {
        match self.link.poll(now) {
            None => return false,
            Some(LinkEvent::Connected(offered)) => {
                if offered.size > self.shared.size.get() {
                    let block = u64::from(self.geometry.logical_block);
                    self.shared.size.set(offered.size / block * block);
                }
                self.outstanding.reconnect(offered.structured);
            }
            Some(LinkEvent::Gone) => {
                let seconds = GONE_MAX.as_secs();
                let name = &self.shared.text;
                tracing::error!(
                    "{name}: unreachable for {seconds} s; IO fails until the server is reachable \
                     again"
                );
                self.outstanding.reconnect(false);
                while let Some(row) = self.sender.pop() {
                    let slot = self.outstanding.cancel(row);
                    self.end(&slot, IoStatus::TimedOut);
                }
            }
        }
        true
    }

    /// Processes a completed ring operation.
    fn completed(&mut self, ended: Completed) {
        let result = ended.count();
        let problem = match ended.op {
            Op::SendMsg { iov, fd } => {
                let sent = SentMessage { fd, iov, result };
                let sent = self.sender.ended(sent, self.link.is_up(), &self.port);
                sent.err().map(|error| error.to_string())
            }
            _ => {
                self.receiver.ended();
                match result {
                    Ok(0) => Some("closed by the server".to_owned()),
                    Ok(_) if !self.link.is_up() => None,
                    Ok(count) => self.received(count),
                    Err(error) => Some(error.to_string()),
                }
            }
        };
        problem.iter().for_each(|why| self.lose(why));
    }
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

impl BlockDevice for NbdDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.geometry.size = self.shared.size.get();
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.outstanding.accepted() + self.flushes.waiting() + self.done.len() >= INFLIGHT_MAX {
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
                Err(self.flushes.without_cache(&self.shared, mark))
            }
            IoStatus::Ok if self.link.is_gone() => Err(IoStatus::TimedOut),
            IoStatus::Ok => Ok(()),
            refused => Err(refused),
        };
        if let Err(status) = status {
            self.done.push(io.tag, status);
            return Ok(());
        }
        let is_flush = io.op == IoOp::Flush;
        let row = self.outstanding.add(io, mark)?;
        if is_flush {
            self.flushes.begin(&self.shared, mark);
        }
        self.sender.push(row);
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        let mut busy = self.connect(now);
        while let Some(ended) = self.port.take() {
            busy = true;
            self.completed(ended);
        }
        self.ended();
        busy |= self.flushes.end_settled(&self.shared, now, &mut self.done);
        self.help();
        if let Some(fd) = self.link.up() {
            self.sender.send(fd, &self.port, &mut self.outstanding);
            self.receiver.receive(fd, &self.port, &self.outstanding);
        }
        busy
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        let requests = self.outstanding.accepted() + usize::from(self.outstanding.helps());
        requests + self.flushes.waiting() + self.done.len()
    }

    fn rests(&self) -> bool {
        // The server may close the connection at any time.
        false
    }

    fn deadline(&self) -> Option<Instant> {
        let link = earliest(self.link.deadline(), self.flushes.deadline());
        earliest(self.done.deadline(), link)
    }
}

impl Drop for NbdDevice {
    /// Hands over an idle connection with unsettled changes to its last flush.
    fn drop(&mut self) {
        self.flushes.cancel(&self.shared);
        let account = self.flushes.account();
        let idle = self.receiver.running().is_none() && self.outstanding.is_empty();
        if idle && !self.geometry.write_cache {
            account.settle(self.shared.changes.mark());
        }
        if let Some(fd) = self.link.up()
            && idle
            && account.owes_any()
            && let Ok(fd) = fd.as_fd().try_clone_to_owned()
        {
            return last_flush::begin(&self.shared, account, fd, self.link.is_structured());
        }
        self.shared.log_loss(account, "a device is closed with requests in flight");
        self.shared.changes.leave(account);
    }
}

impl fmt::Debug for NbdDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdDevice")
            .field("server", &self.shared.text)
            .field("accepted", &self.outstanding.accepted())
            .finish_non_exhaustive()
    }
}
