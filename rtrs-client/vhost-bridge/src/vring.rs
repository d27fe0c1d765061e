//! Request ring in guest memory: available requests and their answers.
//!
//! The indices and notifications are those of `virtio-queue`. This module adds the record of
//! requests in flight, and checks that a driver does not offer a request again before it is
//! answered.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rtrs_core::mem::{MemSlice, TruncationAlarm};
use rtrs_core::mutated;
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::chain::{Chain, Table};
use crate::dirty_log::RingLog;
use crate::fault::Fault;
use crate::inflight::{Left, Record};
use crate::memory::GuestMemory;

/// Maximum number of descriptors of a ring.
const SIZE_MAX: u16 = 32_768;

/// Length of the flags and the index of a used ring.
const USED_HEAD: u64 = 4;
/// Length of an entry of a used ring.
const USED_ENTRY: u64 = 8;
/// Length of the event index at the end of a used ring.
const USED_EVENT: u64 = 2;

/// Returns the length of a used ring with this number of descriptors.
pub(crate) fn used_len(size: u16) -> u64 {
    USED_HEAD + USED_ENTRY * u64::from(size) + USED_EVENT
}

/// Location and initial state of a ring.
#[derive(Debug)]
pub(crate) struct RingSetup {
    /// Number of descriptors.
    pub(crate) size: u32,
    pub(crate) descriptors: GuestAddress,
    pub(crate) available: GuestAddress,
    pub(crate) used: GuestAddress,
    /// Index of the next available request, unless the record says otherwise.
    pub(crate) base: u16,
    pub(crate) event_idx: bool,
    pub(crate) memory: Arc<GuestMemory>,
    /// Set when files of the memory or the record have become shorter.
    pub(crate) alarm: Arc<TruncationAlarm>,
    pub(crate) record: Option<Record>,
    pub(crate) log: Option<RingLog>,
}

/// Running ring.
#[derive(Debug)]
pub(crate) struct Vring {
    queue: Queue,
    memory: Arc<GuestMemory>,
    alarm: Arc<TruncationAlarm>,
    record: Option<Record>,
    /// Dirty log, while a migration is in progress.
    log: Option<RingLog>,
    /// Requests of an earlier process that are to be repeated, in reverse order.
    repeated: Vec<u16>,
    /// Number of requests of an earlier process that could not be read.
    refused: usize,
    /// Whether an earlier process has served the ring.
    is_continued: bool,
    /// Whether the device has the request, by head descriptor.
    busy: Box<[bool]>,
    inflight: usize,
    /// Whether the driver was asked for kicks.
    asks_kicks: bool,
    /// Whether there are answers since the last call.
    has_answers: bool,
    /// Whether the driver has to be called even if it did not ask for calls.
    must_call: bool,
}

impl Vring {
    /// Starts a ring at the position where its last use ended.
    ///
    /// # Errors
    /// The fault of a ring that cannot be used.
    pub(crate) fn start(setup: RingSetup) -> Result<Self, Fault> {
        let RingSetup { descriptors, available, used, memory, alarm, mut record, .. } = setup;
        let wrong_size = Fault::Size(setup.size);
        let size = u16::try_from(setup.size).map_err(|_| wrong_size)?;
        let mut queue = Queue::new(SIZE_MAX).map_err(|_| wrong_size)?;
        queue.try_set_size(size).map_err(|_| wrong_size)?;
        queue.try_set_desc_table_address(descriptors).map_err(|_| Fault::Ring)?;
        queue.try_set_avail_ring_address(available).map_err(|_| Fault::Ring)?;
        queue.try_set_used_ring_address(used).map_err(|_| Fault::Ring)?;
        queue.set_event_idx(setup.event_idx);
        queue.set_ready(true);
        if available.0 == 0 || !queue.is_valid(&*memory) {
            return Err(Fault::Ring);
        }
        // The ring itself holds the count of answers, even after a restart of the guest's kernel.
        let answers = queue.used_idx(&*memory, Ordering::Acquire).map_err(|_| Fault::Ring)?.0;
        queue.set_next_used(answers);
        let left = record.as_mut().map(|record| record.begin(answers, size)).transpose()?;
        let left = left.flatten();
        let is_continued = left.is_some();
        // Requests are answered in any order but taken in ring order, so counts give the next
        // index.
        let known = left.as_ref().filter(|_| !mutated!(VhostBaseTrusted));
        let next = known.map_or(Ok(setup.base), |left| {
            let count = left.repeated.len() + left.refused.len();
            u16::try_from(count).map(|count| answers.wrapping_add(count))
        });
        queue.set_next_avail(next.map_err(|_| Fault::Inflight)?);
        let Left { mut repeated, refused } = left.unwrap_or_default();
        repeated.reverse();
        if mutated!(VhostLeftForgotten) {
            repeated.clear();
        }
        let mut busy: Box<[bool]> = vec![false; size.into()].into();
        refused.iter().for_each(|head| busy[usize::from(*head)] = true);
        let refused = refused.len();
        // An earlier process may have died between an answer and its call.
        let must_call = record.is_some() && !mutated!(VhostCallForgotten);
        let (inflight, asks_kicks, has_answers) = (0, true, false);
        let mut vring = Self {
            queue,
            memory,
            alarm,
            record,
            log: None,
            repeated,
            refused,
            is_continued,
            busy,
            inflight,
            asks_kicks,
            has_answers,
            must_call,
        };
        vring.set_log(setup.log);
        Ok(vring)
    }

    /// Changes the dirty log. A new log begins with a mark of the whole used ring: an earlier
    /// process may have died between a write to the ring and its mark.
    pub(crate) fn set_log(&mut self, log: Option<RingLog>) {
        self.log = log;
        self.mark_used(0, used_len(self.queue.size()));
    }

    fn mark_used(&self, offset: u64, len: u64) {
        self.log.iter().for_each(|log| log.mark_used(offset, len));
    }

    /// Marks memory that was written for a request. `memory` is the guest's memory from which the
    /// request was taken.
    pub(crate) fn mark(&self, memory: &GuestMemory, pieces: &[MemSlice]) {
        self.log.iter().for_each(|log| log.log.mark_pieces(memory, pieces));
    }

    /// Memory of the guest from which requests are taken.
    pub(crate) fn memory(&self) -> Arc<GuestMemory> {
        Arc::clone(&self.memory)
    }

    /// Switches to a changed memory.
    ///
    /// # Errors
    /// A fault if the memory no longer contains the ring.
    pub(crate) fn set_memory(&mut self, memory: Arc<GuestMemory>) -> Result<(), Fault> {
        self.memory = memory;
        self.queue.is_valid(&*self.memory).then_some(()).ok_or(Fault::Ring)
    }

    /// Takes the next request and reads its memory into `chain`. Returns the request's head.
    ///
    /// # Errors
    /// The driver's fault. The ring cannot be used further.
    pub(crate) fn take(&mut self, chain: &mut Chain) -> Result<Option<u16>, Fault> {
        if self.alarm.is_set() {
            return Err(Fault::Truncated);
        }
        let head = match self.repeated.pop() {
            Some(head) => head,
            None => {
                if !self.has_input() {
                    return Ok(None);
                }
                let mut available =
                    self.queue.iter(&*self.memory).map_err(|_| Fault::AvailableIndex)?;
                // A request is available, so `None` means that its entry cannot be read.
                let next = available.next().ok_or(Fault::Ring)?;
                let head = next.head_index();
                let size = u32::from(self.queue.size());
                let is_busy = self.busy.get(usize::from(head)).ok_or(Fault::Index(head, size))?;
                if *is_busy {
                    return Err(Fault::TooMany);
                }
                if let Some(record) = &mut self.record
                    && !mutated!(VhostUnrecorded)
                {
                    record.take(head)?;
                }
                self.ignore_kicks()?;
                head
            }
        };
        let table =
            Table { address: GuestAddress(self.queue.desc_table()), len: self.queue.size().into() };
        if let Err(fault) = chain.read(&self.memory, table, head) {
            self.refuse(head);
            return Err(fault);
        }
        self.busy[usize::from(head)] = true;
        self.inflight += 1;
        Ok(Some(head))
    }

    /// Answers a request, with the number of bytes written to the request's memory.
    ///
    /// # Errors
    /// The fault of a ring that is no longer in the guest's memory.
    pub(crate) fn answer(&mut self, head: u16, written: u32) -> Result<(), Fault> {
        self.drop_request(head);
        if let Some(record) = &self.record {
            record.answering(head)?;
            if mutated!(VhostClearedEarly) {
                record.answered(head, self.queue.next_used())?;
            }
        }
        let slot = u64::from(self.queue.next_used() % self.queue.size());
        self.queue.add_used(&*self.memory, head, written).map_err(|_| Fault::Ring)?;
        self.mark_used(USED_HEAD + USED_ENTRY * slot, USED_ENTRY);
        self.mark_used(0, USED_HEAD);
        self.has_answers = true;
        match &self.record {
            Some(record) => record.answered(head, self.queue.next_used()),
            None => Ok(()),
        }
    }

    /// Ends a request that cannot be read, without an answer. No process repeats it.
    pub(crate) fn refuse(&mut self, head: u16) {
        self.drop_request(head);
        if let Some(Err(fault)) = self.record.as_ref().map(|record| record.refuse(head)) {
            tracing::debug!("a request that cannot be read will be repeated: {fault}");
        }
    }

    /// Ends a request without an answer. The record keeps the request for the next process.
    pub(crate) fn drop_request(&mut self, head: u16) {
        if std::mem::take(&mut self.busy[usize::from(head)]) {
            self.inflight -= 1;
        }
    }

    /// Whether the driver has to be called because of answers since the last check.
    ///
    /// # Errors
    /// The fault of a ring that is no longer in the guest's memory.
    pub(crate) fn needs_call(&mut self) -> Result<bool, Fault> {
        let must_call = std::mem::take(&mut self.must_call);
        if !std::mem::take(&mut self.has_answers) {
            return Ok(must_call);
        }
        // This call orders the answers before the read of what the driver asks for.
        let wanted = self.queue.needs_notification(&*self.memory).map_err(|_| Fault::Ring)?;
        if must_call {
            return Ok(true);
        }
        if self.queue.event_idx_enabled() {
            return Ok(wanted);
        }
        let flags: u16 = self
            .memory
            .load(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed)
            .map_err(|_| Fault::Ring)?;
        Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }

    /// Whether a request is available.
    pub(crate) fn has_input(&self) -> bool {
        let index = self.queue.avail_idx(&*self.memory, Ordering::Relaxed);
        !self.repeated.is_empty() || index.is_ok_and(|index| index.0 != self.queue.next_avail())
    }

    /// Asks the driver for a kick with its next request. Returns whether a request is already
    /// available.
    ///
    /// # Errors
    /// The fault of a ring that is no longer in the guest's memory.
    pub(crate) fn ask_kicks(&mut self) -> Result<bool, Fault> {
        self.asks_kicks = true;
        let more = self.queue.enable_notification(&*self.memory).map_err(|_| Fault::Ring)?;
        self.mark_wish();
        Ok(more || !self.repeated.is_empty())
    }

    /// Notifies the driver that kicks are not needed, because the ring is polled.
    fn ignore_kicks(&mut self) -> Result<(), Fault> {
        if !std::mem::take(&mut self.asks_kicks) {
            return Ok(());
        }
        self.queue.disable_notification(&*self.memory).map_err(|_| Fault::Ring)?;
        self.mark_wish();
        Ok(())
    }

    /// Marks the parts of the used ring that tell the driver whether to kick.
    fn mark_wish(&self) {
        self.mark_used(0, USED_HEAD);
        self.mark_used(used_len(self.queue.size()) - USED_EVENT, USED_EVENT);
    }

    /// Whether requests are recorded, so that the next process finds those left unanswered.
    pub(crate) fn is_recorded(&self) -> bool {
        self.record.is_some()
    }

    /// Number of requests that were taken and not answered.
    pub(crate) fn inflight(&self) -> usize {
        self.inflight
    }

    /// Whether requests of an earlier process are still to be taken.
    pub(crate) fn has_repeated(&self) -> bool {
        !self.repeated.is_empty()
    }

    /// Whether an earlier process has served the ring, with the same guest.
    pub(crate) fn is_continued(&self) -> bool {
        self.is_continued
    }

    /// Number of requests of an earlier process that could not be read.
    pub(crate) fn refused(&self) -> usize {
        self.refused
    }

    /// Index after the newest available request. None if the ring is no longer in the guest's
    /// memory.
    pub(crate) fn available(&self) -> Option<u16> {
        Some(self.queue.avail_idx(&*self.memory, Ordering::Acquire).ok()?.0)
    }

    /// Index of the next available request.
    pub(crate) fn next_available(&self) -> u16 {
        self.queue.next_avail()
    }
}

#[cfg(test)]
mod tests;
