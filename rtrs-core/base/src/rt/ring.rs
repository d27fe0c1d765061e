//! Safe, ownership-based wrapper around a shard's io_uring.
//!
//! An [`Op`] owns everything the kernel may access while it runs (descriptor, memory, address); it
//! moves into the ring and is returned in its [`Completed`]. Every component of a shard has a
//! [`Port`] of its own, so completions reach their owner without a table of callbacks. One system
//! call per turn submits and collects everything.
//!
//! Layout of `user_data`: generation (32 bits) and slot (32 bits) of the operation; all ones for
//! cancellations, whose own completions are dropped.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};
use socket2::SockAddr;

use super::fixed::{Fixed, SLOTS};
use super::op::Op;
use super::ring_error::explained;
use crate::mem::Region;
use crate::time::Duration;

const CANCEL: u64 = u64::MAX;
/// Port index of operations whose port was dropped.
const NOBODY: u32 = u32::MAX;
/// Maximum number of registered pieces released per turn.
const RELEASES: usize = 4;

/// ID of a running operation, for [`Port::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpId(u64);

/// Completed operation.
#[derive(Debug)]
pub struct Completed {
    /// The submitter's token.
    pub token: u64,
    /// The operation, with everything it owned.
    pub op: Op,
    /// Result as returned by the kernel: a negative errno or a count.
    pub result: i32,
}

impl Completed {
    /// Returns the count or the error.
    ///
    /// # Errors
    /// The operation's error.
    #[allow(clippy::cast_sign_loss, reason = "the negative case is the error")]
    pub fn count(&self) -> io::Result<usize> {
        if self.result < 0 {
            Err(io::Error::from_raw_os_error(-self.result))
        } else {
            Ok(self.result as usize)
        }
    }

    /// Returns the descriptor of a successful accept.
    ///
    /// # Errors
    /// The operation's error; `InvalidInput` if it was not an accept.
    pub fn into_fd(self) -> io::Result<OwnedFd> {
        if !matches!(self.op, Op::Accept { .. }) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not an accept"));
        }
        self.count()?;
        // SAFETY: the kernel has just returned this descriptor as the result of an accept, and
        // `self` is consumed, so only this `OwnedFd` owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(self.result) })
    }
}

struct Running {
    op: Op,
    port: u32,
    token: u64,
    address: Option<Box<SockAddr>>,
}

struct Slot {
    generation: u32,
    running: Option<Running>,
}

struct Inner {
    uring: IoUring,
    slots: Vec<Slot>,
    free: Vec<u32>,
    ports: Vec<Option<VecDeque<Completed>>>,
    backlog: VecDeque<squeue::Entry>,
    fixed: Fixed,
    running: usize,
    enters: u64,
    /// Number of threads for operations that block on files, as requested by [`Ring::add_workers`].
    workers: u32,
}

/// A shard's io_uring. Created and used on one thread.
pub struct Ring {
    inner: RefCell<Inner>,
}

/// A component's own access to the ring: its submissions complete here.
#[derive(Debug)]
pub struct Port {
    ring: Rc<Ring>,
    index: u32,
}

impl Ring {
    /// Creates a ring with room for `entries` submissions per turn.
    ///
    /// # Errors
    /// The system's error, with its cause and remedy if known; `PermissionDenied` if io_uring is
    /// disabled.
    pub fn new(entries: u32) -> io::Result<Rc<Self>> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(entries.saturating_mul(4)).setup_clamp();
        let modern = builder
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(entries);
        let uring = match modern {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                IoUring::builder().setup_cqsize(entries.saturating_mul(4)).build(entries)
            }
            modern => modern,
        };
        let uring = uring.map_err(explained)?;
        Ok(Rc::new(Self {
            inner: RefCell::new(Inner {
                uring,
                slots: Vec::with_capacity(1024),
                free: Vec::with_capacity(1024),
                ports: Vec::new(),
                backlog: VecDeque::new(),
                fixed: Fixed::default(),
                running: 0,
                enters: 0,
                workers: 0,
            }),
        }))
    }

    /// Creates a port for a component.
    pub fn port(self: &Rc<Self>) -> Port {
        let mut inner = self.inner.borrow_mut();
        let queue = Some(VecDeque::with_capacity(64));
        let free = inner.ports.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            inner.ports.push(None);
            inner.ports.len() - 1
        });
        inner.ports[index] = queue;
        #[allow(clippy::cast_possible_truncation, reason = "a shard has few components")]
        Port { ring: Rc::clone(self), index: index as u32 }
    }

    /// Lets reads and writes use a region's memory as registered buffers, so the kernel need not
    /// pin pages for each IO. This call registers nothing: a piece is queued when it is used, and
    /// each turn registers one (`fixed.rs`). If the system refuses (RLIMIT_MEMLOCK), IO still
    /// works. Must be balanced by a [`Ring::detach_region`].
    pub fn attach_region(&self, region: &Arc<Region>) {
        let mut inner = self.inner.borrow_mut();
        if inner.fixed.needs_room()
            && inner.uring.submitter().register_buffers_sparse(u32::from(SLOTS)).is_ok()
        {
            inner.fixed.add_room();
        }
        inner.fixed.attach(region);
    }

    /// Reverts one [`Ring::attach_region`], even if the region was dropped: the kernel keeps its
    /// pages pinned until later turns release them, so a late call is safe and only costs memory.
    /// IDs are never reused.
    pub fn detach_region(&self, id: u64) {
        self.inner.borrow_mut().fixed.detach(id);
    }

    /// Changes the number of worker threads for operations that block on a file or device. The
    /// kernel starts them when they are needed. Returns the new number.
    ///
    /// # Errors
    /// The system's error.
    pub fn add_workers(&self, count: i32) -> io::Result<u32> {
        let mut inner = self.inner.borrow_mut();
        inner.workers = inner.workers.saturating_add_signed(count);
        // The second number is for sockets and pipes; 0 leaves it unchanged.
        let mut max = [inner.workers.max(1), 0];
        inner.uring.submitter().register_iowq_max_workers(&mut max)?;
        Ok(inner.workers)
    }

    /// Returns the number of operations that the kernel still holds.
    pub fn running(&self) -> usize {
        self.inner.borrow().running
    }

    /// Returns the number of system calls made to submit or wait.
    pub fn enters(&self) -> u64 {
        self.inner.borrow().enters
    }

    /// Returns true if completions are waiting, without a system call.
    pub fn has_work(&self) -> bool {
        let mut inner = self.inner.borrow_mut();
        if !inner.uring.completion().is_empty() {
            return true;
        }
        inner.uring.submission().taskrun()
    }

    /// Returns true if operations are waiting to be handed to the kernel.
    pub fn has_submissions(&self) -> bool {
        let mut inner = self.inner.borrow_mut();
        !inner.backlog.is_empty() || !inner.uring.submission().is_empty()
    }

    /// Returns true if more operations are waiting than one call can hand to the kernel.
    pub fn has_backlog(&self) -> bool {
        !self.inner.borrow().backlog.is_empty()
    }

    /// Collects available completions without a system call. Returns true if anything completed.
    pub fn collect(&self) -> bool {
        self.inner.borrow_mut().reap()
    }

    /// Hands everything to the kernel and collects available completions, without waiting. Returns
    /// true if anything completed.
    ///
    /// # Errors
    /// The system's error; EINTR and EBUSY count as nothing collected.
    pub fn turn(&self) -> io::Result<bool> {
        let mut inner = self.inner.borrow_mut();
        let pending = inner.refill();
        let work = {
            let sq = inner.uring.submission();
            sq.taskrun() || sq.cq_overflow()
        };
        if pending > 0 || work {
            inner.enter(pending, 0, None)?;
        }
        inner.tend_memory();
        Ok(inner.reap())
    }

    /// Like [`Ring::turn`], but sleeps until something completes or `timeout` expires.
    ///
    /// # Errors
    /// See [`Ring::turn`].
    pub fn turn_or_sleep(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let mut inner = self.inner.borrow_mut();
        let pending = inner.refill();
        // Do not sleep while there are submissions that did not fit in one call: the next turn
        // hands them over.
        let want = u32::from(inner.backlog.is_empty() && inner.fixed.is_settled());
        inner.enter(pending, want, timeout)?;
        inner.tend_memory();
        Ok(inner.reap())
    }
}

impl Inner {
    /// Moves the backlog into the submission queue; returns how many entries it holds.
    fn refill(&mut self) -> u32 {
        let mut sq = self.uring.submission();
        while let Some(entry) = self.backlog.front() {
            // SAFETY: the entry's memory is owned by its slot until it completes.
            if unsafe { sq.push(entry) }.is_err() {
                break;
            }
            self.backlog.pop_front();
        }
        sq.sync();
        #[allow(clippy::cast_possible_truncation, reason = "bounded by the ring's size")]
        let len = sq.len() as u32;
        len
    }

    fn enter(&mut self, submit: u32, want: u32, timeout: Option<Duration>) -> io::Result<()> {
        const GETEVENTS: u32 = 1;
        self.enters += 1;
        let result = match timeout {
            Some(limit) if want > 0 => {
                let ts = types::Timespec::from(limit);
                let args = types::SubmitArgs::new().timespec(&ts);
                self.uring.submitter().submit_with_args(want as usize, &args).map(|_| ())
            }
            // SAFETY: no signal mask is passed; the counts refer to this ring's own queue.
            _ => unsafe {
                self.uring.submitter().enter::<libc::sigset_t>(submit, want, GETEVENTS, None)
            }
            .map(|_| ()),
        };
        match result {
            Ok(()) => Ok(()),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(e),
            },
        }
    }

    fn reap(&mut self) -> bool {
        let mut any = false;
        let mut cq = self.uring.completion();
        cq.sync();
        for cqe in &mut cq {
            let data = cqe.user_data();
            if data == CANCEL {
                continue;
            }
            #[allow(clippy::cast_possible_truncation, reason = "two halves of the key")]
            let (generation, index) = ((data >> 32) as u32, data as u32);
            let slot = &mut self.slots[index as usize];
            assert_eq!(slot.generation, generation, "completion of an operation long gone");
            let Some(running) = slot.running.take() else {
                panic!("two completions of one operation");
            };
            slot.generation = slot.generation.wrapping_add(1) & 0x7fff_ffff;
            self.free.push(index);
            self.running -= 1;
            any = true;
            let done = Completed { token: running.token, op: running.op, result: cqe.result() };
            match self.ports.get_mut(running.port as usize).and_then(Option::as_mut) {
                Some(queue) => queue.push_back(done),
                None => drop(close_orphan(done)),
            }
        }
        any
    }

    fn push(&mut self, entry: squeue::Entry) {
        if self.backlog.is_empty() {
            // SAFETY: the entry's memory is owned by its slot until it completes.
            if unsafe { self.uring.submission().push(&entry) }.is_ok() {
                return;
            }
        }
        self.backlog.push_back(entry);
    }

    /// Registers one requested piece of memory and releases a few, if any.
    fn tend_memory(&mut self) {
        if self.fixed.is_settled() {
            return;
        }
        for _ in 0..RELEASES {
            let Some(slot) = self.fixed.next_leaving() else { break };
            let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            if self.update_slot(slot, none) {
                self.fixed.cleared(slot);
            }
        }
        if let Some(order) = self.fixed.next_order() {
            let base = order.region.address(order.start).cast();
            let done =
                self.update_slot(order.slot, libc::iovec { iov_base: base, iov_len: order.len });
            self.fixed.registered(&order, done);
        }
    }

    /// Replaces the memory registered in a slot; an empty vector clears it.
    fn update_slot(&self, slot: u16, memory: libc::iovec) -> bool {
        let submitter = self.uring.submitter();
        // SAFETY: the memory is mapped now, and the kernel holds the pages themselves until the
        // slot is cleared and the operations that use it have ended. Pages that outlive their
        // region cannot be reached: slots are looked up by the region's ID, which is never reused.
        unsafe { submitter.register_buffers_update(u32::from(slot), &[memory], None) }.is_ok()
    }
}

/// Returns the descriptor from an accept whose port was dropped, so that it is closed.
fn close_orphan(done: Completed) -> Option<OwnedFd> {
    match done.op {
        Op::Accept { .. } => done.into_fd().ok(),
        _ => None,
    }
}

/// Thread that an operation may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocks {
    /// A worker thread, as a rule; see [`Port::submit_to_worker`].
    Anywhere,
    Worker,
    Never,
}

impl Port {
    /// Submits an operation with the next turn. [`Port::take`] returns its completion with the
    /// token.
    pub fn submit(&self, op: Op, token: u64) -> OpId {
        self.start(op, token, Blocks::Anywhere)
    }

    /// Like [`Port::submit`], but a read or write never uses a worker thread: it fails with EAGAIN
    /// if it would block, or EOPNOTSUPP if that cannot be determined.
    pub fn submit_nowait(&self, op: Op, token: u64) -> OpId {
        self.start(op, token, Blocks::Never)
    }

    /// Like [`Port::submit`], but the operation always runs in a worker thread. Other operations
    /// are first tried during submission, where some file systems (FUSE) block although they must
    /// not.
    pub fn submit_to_worker(&self, op: Op, token: u64) -> OpId {
        self.start(op, token, Blocks::Worker)
    }

    #[allow(clippy::cast_possible_truncation, reason = "far fewer than 2^32 operations")]
    fn start(&self, op: Op, token: u64, blocks: Blocks) -> OpId {
        let mut inner = self.ring.inner.borrow_mut();
        let index = inner.free.pop().unwrap_or_else(|| {
            inner.slots.push(Slot { generation: 0, running: None });
            inner.slots.len() as u32 - 1
        });
        let mut running = Running { op, port: self.index, token, address: None };
        let nowait = blocks == Blocks::Never;
        let mut entry = running.op.entry(&mut inner.fixed, &mut running.address, nowait);
        if blocks == Blocks::Worker {
            entry = entry.flags(squeue::Flags::ASYNC);
        }
        let slot = &mut inner.slots[index as usize];
        let key = u64::from(slot.generation) << 32 | u64::from(index);
        slot.running = Some(running);
        inner.running += 1;
        inner.push(entry.user_data(key));
        OpId(key)
    }

    /// Runs a read or write immediately on the calling thread, for files held in memory, where
    /// io_uring would only move the copy to a worker thread. Completes through [`Port::take`] like
    /// any other operation. Operations other than reads and writes are submitted.
    pub fn run_inline(&self, op: Op, token: u64) {
        let result = match &op {
            // SAFETY: the slice is valid memory of that length, owned by `op`.
            Op::Read { fd, buf, offset } => unsafe {
                libc::pread(fd.as_raw_fd(), buf.address().cast(), buf.len(), offset.cast_signed())
            },
            // SAFETY: as above.
            Op::Write { fd, buf, offset, dsync: false } => unsafe {
                libc::pwrite(fd.as_raw_fd(), buf.address().cast(), buf.len(), offset.cast_signed())
            },
            _ => {
                self.submit(op, token);
                return;
            }
        };
        let result = if result < 0 {
            -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
        } else {
            i32::try_from(result).unwrap_or(i32::MAX)
        };
        let mut inner = self.ring.inner.borrow_mut();
        if let Some(queue) = inner.ports[self.index as usize].as_mut() {
            queue.push_back(Completed { token, op, result });
        }
    }

    /// Requests that an operation be canceled. Its completion still arrives.
    pub fn cancel(&self, id: OpId) {
        let mut inner = self.ring.inner.borrow_mut();
        let index = (id.0 & u64::from(u32::MAX)) as usize;
        let alive = inner
            .slots
            .get(index)
            .is_some_and(|slot| slot.running.is_some() && u64::from(slot.generation) == id.0 >> 32);
        if alive {
            inner.push(opcode::AsyncCancel::new(id.0).build().user_data(CANCEL));
        }
    }

    /// Returns the next completed operation of this port.
    pub fn take(&mut self) -> Option<Completed> {
        self.ring.inner.borrow_mut().ports[self.index as usize].as_mut()?.pop_front()
    }

    /// Returns the ring of this port.
    pub fn ring(&self) -> &Rc<Ring> {
        &self.ring
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let mut inner = self.ring.inner.borrow_mut();
        let mine: Vec<u64> = inner
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.running.as_ref().is_some_and(|r| r.port == self.index))
            .map(|(index, slot)| u64::from(slot.generation) << 32 | index as u64)
            .collect();
        let busy = !mine.is_empty();
        for key in mine {
            inner.push(opcode::AsyncCancel::new(key).build().user_data(CANCEL));
        }
        let queue = inner.ports[self.index as usize].take();
        if busy {
            // The index may be reused by another port, which must not receive these operations'
            // completions.
            retire(&mut inner, self.index);
        }
        drop(inner);
        for done in queue.into_iter().flatten() {
            drop(close_orphan(done));
        }
    }
}

/// Detaches all running operations of a dropped port from its index.
fn retire(inner: &mut Inner, port: u32) {
    for slot in &mut inner.slots {
        if let Some(running) = slot.running.as_mut()
            && running.port == port
        {
            running.port = NOBODY;
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Closing the ring cancels running operations, but asynchronously: wait for them within a
        // time limit, and leak the rest rather than free memory that the kernel may still write to.
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if slot.running.is_some() {
                let key = u64::from(slot.generation) << 32 | index as u64;
                self.push(opcode::AsyncCancel::new(key).build().user_data(CANCEL));
            }
        }
        for port in &mut self.ports {
            *port = None;
        }
        for _ in 0..100 {
            if self.running == 0 {
                break;
            }
            let pending = self.refill();
            if self.enter(pending, 1, Some(Duration::from_millis(20))).is_err() {
                break;
            }
            self.reap();
        }
        for slot in &mut self.slots {
            std::mem::forget(slot.running.take());
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("running", &self.running()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
