//! A queue pair and everything that is posted on it.
//!
//! Send requests live in a ring of slots in posting order, receives in another. A slot owns the
//! memory its request names, from `push` until the device has completed it or the queue pair is
//! destroyed: nothing else frees it, so the device never reaches memory that is gone. The work
//! requests the device reads are written into arrays beside the slots when they are pushed, and
//! handed over as one linked list.
//!
//! A completed send request frees all before it: of those nobody asked to hear unless they failed,
//! and failures complete on their own.

use std::fmt;
use std::io;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use rdma_sys::{
    ibv_access_flags, ibv_bind_mw, ibv_create_qp, ibv_destroy_qp, ibv_modify_qp, ibv_mw,
    ibv_mw_bind, ibv_mw_bind_info, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr,
    ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_query_qp, ibv_recv_wr,
    ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode,
};

use super::cm::CmId;
use super::cq::Cq;
use super::device::{Mw, Pd, access_flags};
use super::outcome;
use crate::fabric::{Access, FabricError, QpLimits, Sge, WcOp, WcStatus, WorkRequest, WrOp};
use crate::ids::QpNum;
use crate::mem::MemSlice;

/// Sequence numbers are 31 bits long; the 32nd tells receives from sends.
const SEQ_MASK: u32 = 0x7fff_ffff;

/// What a completion carries back: whose it is and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fabric::verbs) struct WrTag {
    pub(in crate::fabric::verbs) qp: QpNum,
    pub(in crate::fabric::verbs) recv: bool,
    pub(in crate::fabric::verbs) seq: u32,
}

impl WrTag {
    pub(super) fn to_raw(self) -> u64 {
        let low = u32::from(self.recv) << 31 | (self.seq & SEQ_MASK);
        u64::from(self.qp.0) << 32 | u64::from(low)
    }

    #[allow(clippy::cast_possible_truncation, reason = "two halves")]
    pub(super) fn from_raw(raw: u64) -> Self {
        let low = raw as u32;
        Self { qp: QpNum((raw >> 32) as u32), recv: low >> 31 == 1, seq: low & SEQ_MASK }
    }
}

/// A request or receive that ended, in its poster's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fabric::verbs) struct Posted {
    pub(in crate::fabric::verbs) wr_id: u64,
    pub(in crate::fabric::verbs) op: WcOp,
    pub(in crate::fabric::verbs) status: WcStatus,
}

/// Sequence numbers of a ring: `head` is the oldest that has not completed, `posted` the first
/// that the device does not have yet, `tail` the next to be pushed.
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    head: u32,
    posted: u32,
    tail: u32,
    mask: u32,
}

impl Ring {
    fn new(entries: u32) -> Self {
        Self { mask: entries.next_power_of_two() - 1, ..Self::default() }
    }

    fn slots(self) -> usize {
        self.mask as usize + 1
    }

    fn index(self, seq: u32) -> usize {
        (seq & self.mask) as usize
    }

    fn len(self) -> u32 {
        self.tail.wrapping_sub(self.head) & SEQ_MASK
    }

    fn staged(self) -> u32 {
        self.tail.wrapping_sub(self.posted) & SEQ_MASK
    }

    /// True for a number the device has and has not completed.
    fn is_posted(self, seq: u32) -> bool {
        seq.wrapping_sub(self.head) & SEQ_MASK < self.posted.wrapping_sub(self.head) & SEQ_MASK
    }

    fn push(&mut self) -> u32 {
        let seq = self.tail;
        self.tail = seq.wrapping_add(1) & SEQ_MASK;
        seq
    }

    fn pop(&mut self) -> u32 {
        let seq = self.head;
        self.head = seq.wrapping_add(1) & SEQ_MASK;
        seq
    }
}

/// What a slot owns while its request runs.
#[derive(Debug, Default)]
struct SendSlot {
    wr_id: u64,
    op: Option<WcOp>,
    /// The poster wants to hear of success.
    signaled: bool,
    pieces: [Option<MemSlice>; 2],
    window: Option<Arc<Mw>>,
}

struct Sends {
    ring: Ring,
    limit: u32,
    /// Requests since the last one that makes a completion.
    silent: u32,
    slots: Box<[SendSlot]>,
    wrs: Box<[ibv_send_wr]>,
    sges: Box<[[ibv_sge; 2]]>,
    /// For binds in a batch: the window's handle as it was before that bind.
    windows: Box<[ibv_mw]>,
}

#[derive(Debug, Default)]
struct RecvSlot {
    wr_id: u64,
    piece: Option<MemSlice>,
    done: bool,
}

struct Recvs {
    ring: Ring,
    limit: u32,
    slots: Box<[RecvSlot]>,
    wrs: Box<[ibv_recv_wr]>,
    sges: Box<[ibv_sge]>,
}

fn zeroed<T>(count: usize) -> Box<[T]> {
    // SAFETY: used for verbs' own structures only, plain data for which all zeroes is valid.
    (0..count).map(|_| unsafe { std::mem::zeroed() }).collect()
}

#[allow(clippy::cast_possible_truncation, reason = "lengths were checked when it was pushed")]
fn to_sge(sge: &Sge) -> ibv_sge {
    ibv_sge { addr: sge.slice.address() as u64, length: sge.slice.len() as u32, lkey: sge.lkey }
}

/// A reliable queue pair.
pub(in crate::fabric::verbs) struct Qp {
    /// None once it is destroyed.
    raw: Option<NonNull<ibv_qp>>,
    number: u32,
    name: QpNum,
    sends: Sends,
    recvs: Recvs,
    reads: bool,
    soft_roce: bool,
    iwarp: bool,
    /// Both after the queue pair itself.
    cq: Rc<Cq>,
    pd: Arc<Pd>,
}

/// A message may be this long at most (IBA 9.7.8 and every device).
const MESSAGE_MAX: usize = 1 << 31;

impl Qp {
    /// A queue pair in its first state. `name` is its owner's name for it.
    pub(in crate::fabric::verbs) fn new(
        pd: &Arc<Pd>,
        cq: &Rc<Cq>,
        name: QpNum,
        limits: QpLimits,
    ) -> io::Result<Self> {
        let device = *pd.context().limits();
        // SAFETY: plain data, for which all zeroes is valid.
        let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        init.send_cq = cq.raw();
        init.recv_cq = cq.raw();
        init.qp_type = ibv_qp_type::IBV_QPT_RC;
        // One more than the poster may use, for the request that marks the end.
        init.cap.max_send_wr = limits.send_max + 1;
        init.cap.max_recv_wr = limits.recv_max.max(1);
        init.cap.max_send_sge = 2;
        init.cap.max_recv_sge = 1;
        // SAFETY: a living domain and queue of one device; the attributes live through the call.
        let raw = NonNull::new(unsafe { ibv_create_qp(pd.raw(), &raw mut init) })
            .ok_or_else(io::Error::last_os_error)?;
        // SAFETY: just made.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let sends = Ring::new(limits.send_max + 1);
        let recvs = Ring::new(limits.recv_max.max(1));
        Ok(Self {
            raw: Some(raw),
            number,
            name,
            sends: Sends {
                ring: sends,
                limit: limits.send_max,
                silent: 0,
                slots: (0..sends.slots()).map(|_| SendSlot::default()).collect(),
                wrs: zeroed(sends.slots()),
                sges: zeroed(sends.slots()),
                windows: zeroed(if device.soft_roce { sends.slots() } else { 0 }),
            },
            recvs: Recvs {
                ring: recvs,
                limit: limits.recv_max,
                slots: (0..recvs.slots()).map(|_| RecvSlot::default()).collect(),
                wrs: zeroed(recvs.slots()),
                sges: zeroed(recvs.slots()),
            },
            reads: false,
            soft_roce: device.soft_roce,
            iwarp: device.iwarp,
            cq: Rc::clone(cq),
            pd: Arc::clone(pd),
        })
    }

    /// The device's number of it.
    pub(in crate::fabric::verbs) fn number(&self) -> u32 {
        self.number
    }

    pub(in crate::fabric::verbs) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub(in crate::fabric::verbs) fn cq(&self) -> &Rc<Cq> {
        &self.cq
    }

    /// Send requests that have not completed.
    pub(in crate::fabric::verbs) fn sends_open(&self) -> u32 {
        self.sends.ring.len()
    }

    fn alive(&self) -> io::Result<NonNull<ibv_qp>> {
        self.raw.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))
    }

    fn modify(&mut self, mut attributes: ibv_qp_attr, mask: libc::c_int) -> io::Result<()> {
        let raw = self.alive()?;
        // SAFETY: the queue pair is alive; the attributes live through the call.
        outcome(unsafe { ibv_modify_qp(raw.as_ptr(), &raw mut attributes, mask) })
    }

    /// To INIT: receives may be posted. `reads` lets the peer read.
    pub(in crate::fabric::verbs) fn enter_init(
        &mut self,
        id: &CmId,
        reads: bool,
    ) -> io::Result<()> {
        let (mut attributes, mask) = id.qp_attributes(ibv_qp_state::IBV_QPS_INIT)?;
        attributes.qp_access_flags =
            access_flags(Access { local_write: false, remote_write: true, remote_read: reads });
        self.modify(attributes, mask | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0.cast_signed())
    }

    /// To RTR: the peer's messages are taken.
    pub(in crate::fabric::verbs) fn enter_rtr(
        &mut self,
        id: &CmId,
        min_rnr_timer: u8,
        reads: Option<u8>,
    ) -> io::Result<()> {
        let (mut attributes, mask) = id.qp_attributes(ibv_qp_state::IBV_QPS_RTR)?;
        attributes.min_rnr_timer = min_rnr_timer;
        if let Some(reads) = reads {
            attributes.max_dest_rd_atomic = reads;
        }
        self.modify(attributes, mask)
    }

    /// To RTS: requests may be posted.
    pub(in crate::fabric::verbs) fn enter_rts(
        &mut self,
        id: &CmId,
        retry_count: u8,
        ack_timeout: u8,
        reads: Option<u8>,
    ) -> io::Result<()> {
        let (mut attributes, mask) = id.qp_attributes(ibv_qp_state::IBV_QPS_RTS)?;
        attributes.retry_cnt = retry_count;
        attributes.timeout = ack_timeout;
        if let Some(reads) = reads {
            attributes.max_rd_atomic = reads;
        }
        self.modify(attributes, mask)
    }

    /// Whether reads of ours may be posted; the connection manager has negotiated it.
    pub(in crate::fabric::verbs) fn set_reads(&mut self, reads: bool) {
        self.reads = reads;
    }

    /// To ERR: nothing is sent or taken any more, what is posted is flushed.
    pub(in crate::fabric::verbs) fn enter_error(&mut self) -> io::Result<()> {
        // SAFETY: plain data, for which all zeroes is valid.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.modify(attributes, ibv_qp_attr_mask::IBV_QP_STATE.0.cast_signed())
    }

    /// True when the device has put it into ERR.
    pub(in crate::fabric::verbs) fn is_in_error(&self) -> bool {
        let Ok(raw) = self.alive() else { return true };
        // SAFETY: plain data, for which all zeroes is valid.
        let (mut attributes, mut init): (ibv_qp_attr, ibv_qp_init_attr) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE.0.cast_signed();
        // SAFETY: the queue pair is alive; both structures are written during the call.
        let code = unsafe { ibv_query_qp(raw.as_ptr(), &raw mut attributes, mask, &raw mut init) };
        code == 0 && attributes.qp_state == ibv_qp_state::IBV_QPS_ERR
    }

    /// Adds a request to the batch. The caller has checked that its memory is registered.
    pub(in crate::fabric::verbs) fn push_send(
        &mut self,
        wr: &WorkRequest,
    ) -> Result<(), FabricError> {
        if self.sends.ring.len() >= self.sends.limit {
            return Err(FabricError::QueueFull);
        }
        if wr.sges.len() > MESSAGE_MAX {
            return Err(FabricError::Unsupported("messages of more than 2 GiB"));
        }
        let (opcode, op) = self.judge(wr)?;
        let (seq, at) = self.open_send(wr.wr_id, op, wr.signaled);
        let sends = &mut self.sends;
        let mut count = 0;
        for sge in wr.sges.iter().filter(|sge| !sge.slice.is_empty()) {
            sends.sges[at][count] = to_sge(sge);
            sends.slots[at].pieces[count] = Some(sge.slice.clone());
            count += 1;
        }
        let signal = sends.signal(wr.signaled);
        let sg_list = sends.sges[at].as_mut_ptr();
        let raw = &mut sends.wrs[at];
        raw.wr_id = WrTag { qp: self.name, recv: false, seq }.to_raw();
        raw.sg_list = sg_list;
        #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "0 to 2")]
        {
            raw.num_sge = count as libc::c_int;
        }
        raw.opcode = opcode;
        raw.send_flags = if signal { ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
        raw.imm_data_invalidated_rkey_union.imm_data = 0;
        let (mut remote_addr, mut rkey) = (0, 0);
        match wr.op {
            WrOp::Send { imm: Some(imm), .. } => {
                raw.imm_data_invalidated_rkey_union.imm_data = imm.to_be();
            }
            WrOp::Send { invalidate: Some(key), .. } => {
                raw.imm_data_invalidated_rkey_union.invalidated_rkey = key.0;
            }
            WrOp::Send { .. } => {}
            WrOp::RdmaWrite { remote, imm } => {
                if let Some(imm) = imm {
                    raw.imm_data_invalidated_rkey_union.imm_data = imm.to_be();
                }
                if count > 0 {
                    (remote_addr, rkey) = (remote.addr, remote.rkey.0);
                }
            }
            WrOp::RdmaRead { remote } => {
                if count > 0 {
                    (remote_addr, rkey) = (remote.addr, remote.rkey.0);
                }
            }
        }
        raw.wr.rdma = rdma_sys::rdma_t { remote_addr, rkey };
        Ok(())
    }

    fn judge(&self, wr: &WorkRequest) -> Result<(ibv_wr_opcode::Type, WcOp), FabricError> {
        Ok(match wr.op {
            WrOp::Send { imm: Some(_), invalidate: Some(_) } => {
                return Err(FabricError::Unsupported("send with immediate and invalidate"));
            }
            WrOp::Send { imm: Some(_), .. } | WrOp::RdmaWrite { imm: Some(_), .. }
                if self.iwarp =>
            {
                return Err(FabricError::Unsupported("immediates over an iWARP device"));
            }
            WrOp::Send { imm: Some(_), .. } => (ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, WcOp::Send),
            WrOp::Send { invalidate: Some(_), .. } => {
                (ibv_wr_opcode::IBV_WR_SEND_WITH_INV, WcOp::Send)
            }
            WrOp::Send { .. } => (ibv_wr_opcode::IBV_WR_SEND, WcOp::Send),
            WrOp::RdmaWrite { imm: Some(_), .. } => {
                (ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, WcOp::RdmaWrite)
            }
            WrOp::RdmaWrite { .. } => (ibv_wr_opcode::IBV_WR_RDMA_WRITE, WcOp::RdmaWrite),
            WrOp::RdmaRead { .. } if !self.reads => {
                return Err(FabricError::Unsupported(
                    "RDMA reads on a connection that was made without",
                ));
            }
            WrOp::RdmaRead { .. } if wr.sges.second.is_some() => {
                return Err(FabricError::Unsupported("a read into two pieces of memory"));
            }
            WrOp::RdmaRead { .. } => (ibv_wr_opcode::IBV_WR_RDMA_READ, WcOp::RdmaRead),
        })
    }

    fn open_send(&mut self, wr_id: u64, op: WcOp, signaled: bool) -> (u32, usize) {
        let seq = self.sends.ring.push();
        let at = self.sends.ring.index(seq);
        self.sends.slots[at] =
            SendSlot { wr_id, op: Some(op), signaled, pieces: [None, None], window: None };
        (seq, at)
    }

    /// Binds a window to a part of its registration, or takes its key away (None). The new key
    /// comes out; it is in force when the request completes.
    pub(in crate::fabric::verbs) fn push_bind(
        &mut self,
        window: &Arc<Mw>,
        slice: Option<&MemSlice>,
        access: Access,
        wr_id: u64,
    ) -> Result<u32, FabricError> {
        if self.sends.ring.len() >= self.sends.limit {
            return Err(FabricError::QueueFull);
        }
        let info = ibv_mw_bind_info {
            // Also for a bind of no bytes: the provider of rdma_rxe looks at it.
            mr: window.mr().raw(),
            addr: slice.map_or_else(|| window.mr().base(), |slice| slice.address() as u64),
            length: slice.map_or(0, |slice| slice.len() as u64),
            mw_access_flags: slice
                .map_or(0, |_| access_flags(access) & !ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0),
        };
        if self.soft_roce {
            self.stage_bind(window, info, wr_id)
        } else {
            self.bind_now(window, info, wr_id)
        }
    }

    /// In the batch, where a post is a system call. `ibv_bind_mw` would make one of its own; what
    /// it does for rdma_rxe is this.
    fn stage_bind(
        &mut self,
        window: &Arc<Mw>,
        info: ibv_mw_bind_info,
        wr_id: u64,
    ) -> Result<u32, FabricError> {
        let changed = window.change(|raw, before| {
            let after = next_key(before);
            let (seq, at) = self.open_send(wr_id, WcOp::Bind, true);
            let sends = &mut self.sends;
            sends.silent = 0;
            // SAFETY: the window lives, and its handle never changes but for the key, which is
            // ours to count here.
            let mut handle = unsafe { *raw.as_ptr() };
            handle.rkey = before;
            sends.windows[at] = handle;
            let mw = &raw mut sends.windows[at];
            let wr = &mut sends.wrs[at];
            wr.wr_id = WrTag { qp: self.name, recv: false, seq }.to_raw();
            wr.sg_list = ptr::null_mut();
            wr.num_sge = 0;
            wr.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
            wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
            wr.imm_data_invalidated_rkey_union.imm_data = 0;
            wr.bind_mw_tso_union.bind_mw = rdma_sys::bind_mw_t { mw, rkey: after, bind_info: info };
            sends.slots[at].window = Some(Arc::clone(window));
            Ok::<u32, FabricError>(after)
        });
        changed.unwrap_or(Err(FabricError::QpState))
    }

    /// At once, behind what is in the batch.
    fn bind_now(
        &mut self,
        window: &Arc<Mw>,
        info: ibv_mw_bind_info,
        wr_id: u64,
    ) -> Result<u32, FabricError> {
        let raw = self.raw.ok_or(FabricError::QpState)?;
        self.post().map_err(|_| FabricError::QpState)?;
        let changed = window.change(|mw, _| {
            let (seq, at) = self.open_send(wr_id, WcOp::Bind, true);
            let mut bind = ibv_mw_bind {
                wr_id: WrTag { qp: self.name, recv: false, seq }.to_raw(),
                send_flags: ibv_send_flags::IBV_SEND_SIGNALED.0,
                bind_info: info,
            };
            // SAFETY: queue pair, window and registration live and are of one domain, which the
            // caller has checked; the structure lives through the call.
            let code = unsafe { ibv_bind_mw(raw.as_ptr(), mw.as_ptr(), &raw mut bind) };
            if code != 0 {
                // Nothing was posted: the slot is taken back.
                self.sends.ring.tail = seq;
                self.sends.slots[at] = SendSlot::default();
                return Err(FabricError::QpState);
            }
            self.sends.silent = 0;
            self.sends.slots[at].window = Some(Arc::clone(window));
            self.sends.ring.posted = self.sends.ring.tail;
            // SAFETY: the window lives; `ibv_bind_mw` has written its new key.
            Ok(unsafe { (*mw.as_ptr()).rkey })
        });
        changed.unwrap_or(Err(FabricError::QpState))
    }

    /// Adds a receive to the batch. The caller has checked that its memory is registered.
    pub(in crate::fabric::verbs) fn push_recv(
        &mut self,
        wr_id: u64,
        buf: Option<Sge>,
    ) -> Result<(), FabricError> {
        let recvs = &mut self.recvs;
        if recvs.ring.len() >= recvs.limit {
            return Err(FabricError::QueueFull);
        }
        let buf = buf.filter(|sge| !sge.slice.is_empty());
        if buf.as_ref().is_some_and(|sge| sge.slice.len() > MESSAGE_MAX) {
            return Err(FabricError::Unsupported("receives of more than 2 GiB"));
        }
        let seq = recvs.ring.push();
        let at = recvs.ring.index(seq);
        if let Some(sge) = &buf {
            recvs.sges[at] = to_sge(sge);
        }
        let raw = &mut recvs.wrs[at];
        raw.wr_id = WrTag { qp: self.name, recv: true, seq }.to_raw();
        raw.sg_list = &raw mut recvs.sges[at];
        raw.num_sge = libc::c_int::from(buf.is_some());
        recvs.slots[at] = RecvSlot { wr_id, piece: buf.map(|sge| sge.slice), done: false };
        Ok(())
    }

    /// Hands staged receives to the device. The state must be INIT or later.
    pub(in crate::fabric::verbs) fn post_recvs(&mut self) -> io::Result<()> {
        let raw = self.alive()?;
        let recvs = &mut self.recvs;
        let staged = recvs.ring.staged();
        if staged == 0 {
            return Ok(());
        }
        let first = recvs.ring.posted;
        for i in 0..staged {
            let at = recvs.ring.index(first.wrapping_add(i) & SEQ_MASK);
            let next = recvs.ring.index(first.wrapping_add(i + 1) & SEQ_MASK);
            recvs.wrs[at].next =
                if i + 1 == staged { ptr::null_mut() } else { &raw mut recvs.wrs[next] };
        }
        let mut bad = ptr::null_mut();
        let at = recvs.ring.index(first);
        // From here on the device may have them, whatever the call says: none is freed before
        // the queue pair is destroyed or they completed.
        recvs.ring.posted = recvs.ring.tail;
        // SAFETY: a list of requests in our arrays, read during the call; the memory they name is
        // owned by their slots.
        outcome(unsafe { ibv_post_recv(raw.as_ptr(), &raw mut recvs.wrs[at], &raw mut bad) })
    }

    /// Hands everything staged to the device, receives first; true when requests were among it.
    pub(in crate::fabric::verbs) fn post(&mut self) -> io::Result<bool> {
        self.post_recvs()?;
        let raw = self.alive()?;
        let sends = &mut self.sends;
        let staged = sends.ring.staged();
        if staged == 0 {
            return Ok(false);
        }
        let first = sends.ring.posted;
        for i in 0..staged {
            let at = sends.ring.index(first.wrapping_add(i) & SEQ_MASK);
            let next = sends.ring.index(first.wrapping_add(i + 1) & SEQ_MASK);
            sends.wrs[at].next =
                if i + 1 == staged { ptr::null_mut() } else { &raw mut sends.wrs[next] };
        }
        let mut bad = ptr::null_mut();
        let at = sends.ring.index(first);
        sends.ring.posted = sends.ring.tail;
        // SAFETY: as in `post_recvs`.
        outcome(unsafe { ibv_post_send(raw.as_ptr(), &raw mut sends.wrs[at], &raw mut bad) })?;
        Ok(true)
    }

    /// Makes sure that the last request makes a completion, so that the end of all is seen: by
    /// its flag when it is still staged, else by one more request that does nothing.
    pub(in crate::fabric::verbs) fn seal(&mut self) {
        let sends = &mut self.sends;
        if sends.silent == 0 || sends.ring.len() == 0 {
            return;
        }
        sends.silent = 0;
        if sends.ring.staged() > 0 {
            let at = sends.ring.index(sends.ring.tail.wrapping_sub(1) & SEQ_MASK);
            sends.wrs[at].send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
            return;
        }
        let (seq, at) = self.open_send(0, WcOp::RdmaWrite, false);
        self.sends.slots[at].op = None;
        let raw = &mut self.sends.wrs[at];
        raw.wr_id = WrTag { qp: self.name, recv: false, seq }.to_raw();
        raw.num_sge = 0;
        raw.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        raw.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        raw.imm_data_invalidated_rkey_union.imm_data = 0;
        raw.wr.rdma = rdma_sys::rdma_t { remote_addr: 0, rkey: 0 };
    }

    /// A request ended: frees it and all before it, and reports what its poster wants to know.
    pub(in crate::fabric::verbs) fn send_done(
        &mut self,
        seq: u32,
        status: WcStatus,
        mut report: impl FnMut(Posted),
    ) {
        if !self.sends.ring.is_posted(seq) {
            return;
        }
        while self.sends.ring.len() > 0 {
            let popped = self.sends.ring.pop();
            let last = popped == seq;
            self.sends.close(popped, if last { status } else { WcStatus::Success }, &mut report);
            if last {
                break;
            }
        }
    }

    /// A receive ended: frees it and says whose it was.
    pub(in crate::fabric::verbs) fn recv_done(&mut self, seq: u32) -> Option<u64> {
        let recvs = &mut self.recvs;
        if !recvs.ring.is_posted(seq) {
            return None;
        }
        let at = recvs.ring.index(seq);
        let slot = &mut recvs.slots[at];
        if std::mem::replace(&mut slot.done, true) {
            return None;
        }
        slot.piece = None;
        let wr_id = slot.wr_id;
        while recvs.ring.len() > 0 && recvs.slots[recvs.ring.index(recvs.ring.head)].done {
            let popped = recvs.ring.pop();
            let at = recvs.ring.index(popped);
            recvs.slots[at].done = false;
        }
        Some(wr_id)
    }

    /// Destroys the queue pair; from then on nobody reaches memory through it.
    pub(in crate::fabric::verbs) fn destroy(&mut self) -> io::Result<()> {
        let Some(raw) = self.raw.take() else { return Ok(()) };
        // SAFETY: ours, and taken: it is destroyed once.
        outcome(unsafe { ibv_destroy_qp(raw.as_ptr()) }).inspect_err(|error| {
            // What is posted may still run, so its memory stays for good.
            tracing::error!(%error, qp = self.number, "cannot destroy a queue pair");
            for slot in &mut self.sends.slots {
                std::mem::forget((std::mem::take(&mut slot.pieces), slot.window.take()));
            }
            for slot in &mut self.recvs.slots {
                std::mem::forget(slot.piece.take());
            }
            std::mem::forget((Rc::clone(&self.cq), Arc::clone(&self.pd)));
        })
    }

    /// Everything that has not completed, as flushed. Only after `destroy`.
    pub(in crate::fabric::verbs) fn flush_rest(&mut self, mut report: impl FnMut(Posted)) {
        assert!(self.raw.is_none(), "the device may still use what is posted");
        while self.sends.ring.len() > 0 {
            let popped = self.sends.ring.pop();
            self.sends.close(popped, WcStatus::Flushed, &mut report);
        }
        while self.recvs.ring.len() > 0 {
            let popped = self.recvs.ring.pop();
            let at = self.recvs.ring.index(popped);
            let slot = std::mem::take(&mut self.recvs.slots[at]);
            if !slot.done {
                report(Posted { wr_id: slot.wr_id, op: WcOp::Recv, status: WcStatus::Flushed });
            }
        }
    }
}

impl Sends {
    /// Whether the request just opened makes a completion: when its poster wants it, and at least
    /// one in half a queue, or nothing would free the places of silent ones.
    fn signal(&mut self, wanted: bool) -> bool {
        self.silent += 1;
        let signal = wanted || self.silent >= (self.limit / 2).max(1);
        if signal {
            self.silent = 0;
        }
        signal
    }

    fn close(&mut self, seq: u32, status: WcStatus, report: &mut impl FnMut(Posted)) {
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

/// The next key of a window: the low eight bits are its owner's to count (IBA 10.6.2.2).
fn next_key(key: u32) -> u32 {
    key & !0xff | key.wrapping_add(1) & 0xff
}

impl Drop for Qp {
    fn drop(&mut self) {
        // What is posted is freed with the slots, after the queue pair is gone.
        let _ = self.destroy();
    }
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp")
            .field("number", &self.number)
            .field("sends", &self.sends.ring.len())
            .field("receives", &self.recvs.ring.len())
            .finish_non_exhaustive()
    }
}
