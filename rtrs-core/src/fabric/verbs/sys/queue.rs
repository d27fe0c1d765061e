//! Work that is posted on a queue pair and has not completed, in rings of slots.
//!
//! A slot owns the memory that its request references, from `push` until the device has completed
//! it or the queue pair is destroyed: nothing else frees it, so the device never accesses freed
//! memory. The work requests that the device reads are written into arrays next to the slots when
//! they are pushed, and handed over as one linked list.

use std::ptr;
use std::sync::Arc;

use rdma_sys::{ibv_mw, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge};

use super::device::Mw;
use crate::fabric::{Sge, WcOp, WcStatus};
use crate::ids::QpNum;
use crate::mem::MemSlice;

/// Sequence numbers are 30 bits long; the upper two bits select the ring.
pub(super) const SEQ_MASK: u32 = 0x3fff_ffff;
const RECV_BIT: u32 = 1 << 31;
const BIND_BIT: u32 = 1 << 30;

/// Decoded `wr_id` of a completion: the queue pair, the ring and the sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrTag {
    pub(crate) qp: QpNum,
    pub(crate) recv: bool,
    /// The completion belongs to the bind QP.
    pub(crate) bind: bool,
    pub(crate) seq: u32,
}

impl WrTag {
    pub(super) fn to_raw(self) -> u64 {
        let recv = if self.recv { RECV_BIT } else { 0 };
        let bind = if self.bind { BIND_BIT } else { 0 };
        let low = recv | bind | (self.seq & SEQ_MASK);
        u64::from(self.qp.0) << 32 | u64::from(low)
    }

    #[allow(clippy::cast_possible_truncation, reason = "two halves")]
    pub(super) fn from_raw(raw: u64) -> Self {
        let low = raw as u32;
        Self {
            qp: QpNum((raw >> 32) as u32),
            recv: low & RECV_BIT != 0,
            bind: low & BIND_BIT != 0,
            seq: low & SEQ_MASK,
        }
    }
}

/// Outcome of a request or receive, for its poster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    pub(crate) op: WcOp,
    pub(crate) status: WcStatus,
}

/// Sequence numbers of a ring: `head` is the oldest entry that has not completed, `posted` the
/// first not yet handed to the device, and `tail` the next to be pushed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ring {
    pub(super) head: u32,
    pub(super) posted: u32,
    pub(super) tail: u32,
    pub(super) mask: u32,
}

impl Ring {
    pub(super) fn new(entries: u32) -> Self {
        Self { mask: entries.next_power_of_two() - 1, ..Self::default() }
    }

    pub(super) fn slots(self) -> usize {
        self.mask as usize + 1
    }

    pub(super) fn index(self, seq: u32) -> usize {
        (seq & self.mask) as usize
    }

    pub(super) fn len(self) -> u32 {
        self.tail.wrapping_sub(self.head) & SEQ_MASK
    }

    pub(super) fn staged(self) -> u32 {
        self.tail.wrapping_sub(self.posted) & SEQ_MASK
    }

    /// Returns true if this entry has been pushed but has not completed.
    pub(super) fn is_open(self, seq: u32) -> bool {
        seq.wrapping_sub(self.head) & SEQ_MASK < self.len()
    }

    /// Returns the most recent entry if it has not completed.
    pub(super) fn last_open(self) -> Option<u32> {
        (self.len() > 0).then(|| self.tail.wrapping_sub(1) & SEQ_MASK)
    }

    /// Returns true if this entry has been handed to the device but has not completed.
    pub(super) fn is_posted(self, seq: u32) -> bool {
        seq.wrapping_sub(self.head) & SEQ_MASK < self.posted.wrapping_sub(self.head) & SEQ_MASK
    }

    pub(super) fn push(&mut self) -> u32 {
        let seq = self.tail;
        self.tail = seq.wrapping_add(1) & SEQ_MASK;
        seq
    }

    pub(super) fn pop(&mut self) -> u32 {
        let seq = self.head;
        self.head = seq.wrapping_add(1) & SEQ_MASK;
        seq
    }
}

/// Resources that a slot owns while its request runs.
#[derive(Debug, Default)]
pub(super) struct SendSlot {
    pub(super) wr_id: u64,
    pub(super) op: Option<WcOp>,
    /// The poster requested a completion on success.
    pub(super) signaled: bool,
    pub(super) pieces: [Option<MemSlice>; 2],
    pub(super) window: Option<Arc<Mw>>,
    /// Bind on the bind QP that must complete before this request may be posted.
    pub(super) after: Option<u32>,
}

pub(super) struct Sends {
    pub(super) ring: Ring,
    pub(super) limit: u32,
    /// Number of requests since the last one that creates a completion.
    pub(super) silent: u32,
    pub(super) slots: Box<[SendSlot]>,
    pub(super) wrs: Box<[ibv_send_wr]>,
    pub(super) sges: Box<[[ibv_sge; 2]]>,
    /// For a batch of binds: the window's handle as it was before each bind.
    pub(super) windows: Box<[ibv_mw]>,
}

#[derive(Debug, Default)]
pub(super) struct RecvSlot {
    pub(super) wr_id: u64,
    pub(super) piece: Option<MemSlice>,
    pub(super) done: bool,
}

pub(super) struct Recvs {
    pub(super) ring: Ring,
    pub(super) limit: u32,
    pub(super) slots: Box<[RecvSlot]>,
    pub(super) wrs: Box<[ibv_recv_wr]>,
    pub(super) sges: Box<[ibv_sge]>,
}

pub(super) fn zeroed<T>(count: usize) -> Box<[T]> {
    // SAFETY: used only for plain verbs structures, for which all zeroes is valid.
    (0..count).map(|_| unsafe { std::mem::zeroed() }).collect()
}

#[allow(clippy::cast_possible_truncation, reason = "lengths were checked when it was pushed")]
pub(super) fn to_sge(sge: &Sge) -> ibv_sge {
    let addr = sge.slice.device_address() as u64;
    ibv_sge { addr, length: sge.slice.len() as u32, lkey: sge.lkey }
}

impl Sends {
    /// Creates a ring for `limit` requests from the poster and one internal request.
    pub(super) fn new(limit: u32, pieces: bool, windows: bool) -> Self {
        let ring = Ring::new(limit + 1);
        let count = |wanted| if wanted { ring.slots() } else { 0 };
        Self {
            ring,
            limit,
            silent: 0,
            slots: (0..ring.slots()).map(|_| SendSlot::default()).collect(),
            wrs: zeroed(ring.slots()),
            sges: zeroed(count(pieces)),
            windows: zeroed(count(windows)),
        }
    }

    /// Opens the next slot.
    pub(super) fn open(&mut self, slot: SendSlot) -> (u32, usize) {
        let seq = self.ring.push();
        let at = self.ring.index(seq);
        self.slots[at] = slot;
        (seq, at)
    }

    /// Returns how many of the staged requests may be posted: those before the first that is
    /// waiting for a bind.
    pub(super) fn ready(&self, binds: Option<&Self>) -> u32 {
        let staged = self.ring.staged();
        let Some(binds) = binds else { return staged };
        let mut ready = 0;
        while ready < staged {
            let at = self.ring.index(self.ring.posted.wrapping_add(ready) & SEQ_MASK);
            if self.slots[at].after.is_some_and(|bind| binds.ring.is_open(bind)) {
                break;
            }
            ready += 1;
        }
        ready
    }

    /// Links the first `count` (at least one) staged requests into a list for the device. From here
    /// on the device may own them, whatever the posting call returns: none is freed before it has
    /// completed or the queue pair is destroyed.
    pub(super) fn link(&mut self, count: u32) -> *mut ibv_send_wr {
        link(&mut self.ring, &mut self.wrs, count, |wr, next| wr.next = next)
    }

    /// Handles the completion of a request: frees it and all before it, and reports the outcomes
    /// that the poster requested.
    pub(super) fn done(&mut self, seq: u32, status: WcStatus, report: &mut impl FnMut(Posted)) {
        if !self.ring.is_posted(seq) {
            return;
        }
        while self.ring.len() > 0 {
            let popped = self.ring.pop();
            let last = popped == seq;
            self.close(popped, if last { status } else { WcStatus::Success }, report);
            if last {
                break;
            }
        }
    }

    /// Reports everything that has not completed as flushed.
    pub(super) fn flush(&mut self, report: &mut impl FnMut(Posted)) {
        while self.ring.len() > 0 {
            let popped = self.ring.pop();
            self.close(popped, WcStatus::Flushed, report);
        }
    }

    /// Leaks the memory of posted work, which may still be in use.
    pub(super) fn abandon(&mut self) {
        for slot in &mut self.slots {
            std::mem::forget((std::mem::take(&mut slot.pieces), slot.window.take()));
        }
    }

    /// Makes the most recent request create its own completion.
    pub(super) fn signal_last(&mut self) {
        let at = self.ring.index(self.ring.tail.wrapping_sub(1) & SEQ_MASK);
        self.wrs[at].send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
    }

    /// Decides whether the new request creates a completion: if its poster requested one, and at
    /// least once per half a queue, because otherwise the slots of unsignaled requests would never
    /// be freed.
    pub(super) fn signal(&mut self, wanted: bool) -> bool {
        self.silent += 1;
        let signal = wanted || self.silent >= (self.limit / 2).max(1);
        if signal {
            self.silent = 0;
        }
        signal
    }

    pub(super) fn close(&mut self, seq: u32, status: WcStatus, report: &mut impl FnMut(Posted)) {
        let at = self.ring.index(seq);
        let slot = std::mem::take(&mut self.slots[at]);
        if status != WcStatus::Success
            && let Some(window) = &slot.window
        {
            window.set_broken();
        }
        if let Some(op) = slot.op
            && (slot.signaled || status != WcStatus::Success)
        {
            report(Posted { wr_id: slot.wr_id, op, status });
        }
    }
}

/// Links the first `count` staged requests and counts them as posted.
fn link<W>(ring: &mut Ring, wrs: &mut [W], count: u32, set: impl Fn(&mut W, *mut W)) -> *mut W {
    let first = ring.posted;
    // Backwards, so that no entry is borrowed again after a pointer to it has been created.
    for i in (0..count).rev() {
        let at = ring.index(first.wrapping_add(i) & SEQ_MASK);
        let next = ring.index(first.wrapping_add(i + 1) & SEQ_MASK);
        let next = if i + 1 == count { ptr::null_mut() } else { &raw mut wrs[next] };
        set(&mut wrs[at], next);
    }
    ring.posted = first.wrapping_add(count) & SEQ_MASK;
    &raw mut wrs[ring.index(first)]
}

impl Recvs {
    pub(super) fn new(limit: u32) -> Self {
        let ring = Ring::new(limit.max(1));
        Self {
            ring,
            limit,
            slots: (0..ring.slots()).map(|_| RecvSlot::default()).collect(),
            wrs: zeroed(ring.slots()),
            sges: zeroed(ring.slots()),
        }
    }

    /// Links all staged receives (at least one) into a list for the device; see [`Sends::link`].
    pub(super) fn link(&mut self) -> *mut ibv_recv_wr {
        let staged = self.ring.staged();
        link(&mut self.ring, &mut self.wrs, staged, |wr, next| wr.next = next)
    }

    /// Handles the completion of a receive: frees it and returns its ID.
    pub(super) fn done(&mut self, seq: u32) -> Option<u64> {
        if !self.ring.is_posted(seq) {
            return None;
        }
        let at = self.ring.index(seq);
        let slot = &mut self.slots[at];
        if std::mem::replace(&mut slot.done, true) {
            return None;
        }
        slot.piece = None;
        let wr_id = slot.wr_id;
        while self.ring.len() > 0 && self.slots[self.ring.index(self.ring.head)].done {
            let popped = self.ring.pop();
            let at = self.ring.index(popped);
            self.slots[at].done = false;
        }
        Some(wr_id)
    }

    /// Reports everything that has not completed as flushed.
    pub(super) fn flush(&mut self, report: &mut impl FnMut(Posted)) {
        while self.ring.len() > 0 {
            let popped = self.ring.pop();
            let at = self.ring.index(popped);
            let slot = std::mem::take(&mut self.slots[at]);
            if !slot.done {
                report(Posted { wr_id: slot.wr_id, op: WcOp::Recv, status: WcStatus::Flushed });
            }
        }
    }

    /// See [`Sends::abandon`].
    pub(super) fn abandon(&mut self) {
        for slot in &mut self.slots {
            std::mem::forget(slot.piece.take());
        }
    }
}

/// Returns the next key of a window: its owner increments the low eight bits (IBA 10.6.2.2).
pub(super) fn next_key(key: u32) -> u32 {
    key & !0xff | key.wrapping_add(1) & 0xff
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(sends: &mut Sends, binds: &Sends) {
        let after = binds.ring.last_open();
        sends.open(SendSlot { op: Some(WcOp::Send), signaled: true, after, ..SendSlot::default() });
    }

    fn bind(binds: &mut Sends) -> u32 {
        let op = Some(WcOp::Bind);
        binds.open(SendSlot { op, signaled: true, ..SendSlot::default() }).0
    }

    #[test]
    fn tags_round_trip() {
        for recv in [false, true] {
            for bind in [false, true] {
                for seq in [0, 1, SEQ_MASK] {
                    let tag = WrTag { qp: QpNum(0xfedc_ba98), recv, bind, seq };
                    assert_eq!(WrTag::from_raw(tag.to_raw()), tag);
                }
            }
        }
    }

    #[test]
    fn requests_wait_only_for_the_binds_before_them() {
        let (mut sends, mut binds) = (Sends::new(8, true, false), Sends::new(8, false, true));
        for ring in [&mut sends.ring, &mut binds.ring] {
            // Start near the wraparound of the sequence numbers.
            (ring.head, ring.posted, ring.tail) = (SEQ_MASK - 1, SEQ_MASK - 1, SEQ_MASK - 1);
        }
        stage(&mut sends, &binds);
        let first = bind(&mut binds);
        stage(&mut sends, &binds);
        stage(&mut sends, &binds);
        let second = bind(&mut binds);
        stage(&mut sends, &binds);
        assert_eq!(sends.ready(Some(&binds)), 1);
        assert_eq!(sends.ready(None), 4);
        binds.link(2);
        sends.link(1);
        assert_eq!(sends.ready(Some(&binds)), 0);
        let mut reported = 0;
        binds.done(first, WcStatus::Success, &mut |_| reported += 1);
        assert_eq!((sends.ready(Some(&binds)), reported), (2, 1));
        sends.link(2);
        assert_eq!(sends.ready(Some(&binds)), 0);
        binds.done(second, WcStatus::Success, &mut |_| reported += 1);
        assert_eq!((sends.ready(Some(&binds)), reported), (1, 2));
        stage(&mut sends, &binds);
        assert_eq!(sends.ready(Some(&binds)), 2);
    }

    #[test]
    fn lists_are_linked_in_order_and_terminated() {
        let (mut sends, binds) = (Sends::new(5, true, false), Sends::new(5, false, true));
        for round in 0..20_u32 {
            for _ in 0..3 {
                stage(&mut sends, &binds);
            }
            let mut at = sends.link(2);
            let mut found = Vec::new();
            while !at.is_null() {
                let first = (&raw mut sends.wrs[0]).addr();
                let index = (at.addr() - first) / size_of::<ibv_send_wr>();
                found.push(index);
                at = sends.wrs[index].next;
            }
            let index = |nth| sends.ring.index(round * 3 + nth);
            assert_eq!(found, [index(0), index(1)]);
            assert_eq!(sends.ring.staged(), 1);
            let last = sends.link(1);
            assert_eq!(last, &raw mut sends.wrs[sends.ring.index(round * 3 + 2)]);
            let mut reported = 0;
            sends.done(round * 3 + 2, WcStatus::Success, &mut |_| reported += 1);
            assert_eq!((reported, sends.ring.len()), (3, 0));
        }
    }

    #[test]
    fn open_requests_are_flushed_once_at_the_end() {
        let (mut sends, binds) = (Sends::new(8, true, false), Sends::new(8, false, true));
        for _ in 0..3 {
            stage(&mut sends, &binds);
        }
        sends.link(2);
        sends.done(0, WcStatus::Success, &mut |_| {});
        let mut reported = Vec::new();
        sends.flush(&mut |posted| reported.push(posted.status));
        assert_eq!(reported, [WcStatus::Flushed; 2]);
        // A late completion belongs to no open request.
        sends.done(1, WcStatus::Success, &mut |_| panic!("reported twice"));
        sends.flush(&mut |_| panic!("flushed twice"));
    }
}
