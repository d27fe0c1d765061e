//! Queue pairs; on soft RoCE, each has a second one that binds windows.
//!
//! Send requests occupy a ring of slots in posting order; receives have their own ring (queue.rs).
//! A completed send request frees all requests before it: those are unsignaled, and a failed one
//! would have had its own completion.
//!
//! rdma_rxe in Linux 6.1 repeats local operations (BIND_MW, REG_MR, LOCAL_INV) when it retransmits
//! packets posted before them (rxe_req.c, `req_retry` starts over at the oldest unacknowledged
//! request, and `rxe_do_local_ops` does not check whether one has already run). A repeated bind
//! finds the window's key changed, fails, and puts the queue pair into error. So on soft RoCE binds
//! go to a second queue pair of the connection, the bind QP, which never sends a packet and so
//! never retransmits. Work posted after a bind is held back until the bind QP has completed the
//! bind. There is no ordering in the other direction: a bind may overtake work posted before it.

use std::fmt;
use std::io;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use rdma_sys::{
    ibv_access_flags, ibv_bind_mw, ibv_create_qp, ibv_destroy_qp, ibv_modify_qp, ibv_mw_bind,
    ibv_mw_bind_info, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask,
    ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_query_qp, ibv_send_flags, ibv_wr_opcode,
};

use super::cm::CmId;
use super::cq::Cq;
use super::device::{Mw, Pd, access_flags};
use super::outcome::outcome;
use super::queue::{Posted, RecvSlot, Recvs, SendSlot, Sends, WrTag, next_key, to_sge};
use crate::fabric::{Access, FabricError, QpLimits, Sge, WcOp, WcStatus, WorkRequest, WrOp};
use crate::ids::QpNum;
use crate::mem::MemSlice;

/// Reliable queue pair.
pub(crate) struct Qp {
    /// None once destroyed.
    raw: Option<NonNull<ibv_qp>>,
    number: u32,
    name: QpNum,
    sends: Sends,
    recvs: Recvs,
    /// Maximum size in bytes of request data that is copied to the device, so that the device need
    /// not read it from memory.
    inline_max: usize,
    reads: bool,
    bind_qp: Option<BindQp>,
    iwarp: bool,
    /// The queue pairs are being destroyed elsewhere and may still use posted memory.
    detached: bool,
    /// Both are dropped after the queue pairs.
    cq: Rc<Cq>,
    pd: Arc<Pd>,
}

/// Queue pair that binds windows.
struct BindQp {
    /// None once destroyed.
    raw: Option<NonNull<ibv_qp>>,
    number: u32,
    binds: Sends,
}

/// Maximum amount of data included in a request, so that the device need not read it from memory: a
/// read request and an answer fit, and a queue entry stays small.
const INLINE_MAX: u32 = 64;

/// Maximum length of a message (IBA 9.7.8 and every device).
const MESSAGE_MAX: usize = 1 << 31;

impl Qp {
    /// Returns the number of completion queue entries that a queue pair with these limits needs.
    pub(crate) fn cq_entries(pd: &Pd, limits: QpLimits) -> u32 {
        let sends = limits.send_max.saturating_add(1);
        let binds = if Self::needs_bind_qp(pd) { sends } else { 0 };
        sends.saturating_add(binds).saturating_add(limits.recv_max)
    }

    fn needs_bind_qp(pd: &Pd) -> bool {
        pd.context().limits().soft_roce && pd.context().has_windows()
    }

    /// Creates a queue pair in its initial state. `name` is the owner's name for it.
    pub(crate) fn new(
        pd: &Arc<Pd>,
        cq: &Rc<Cq>,
        name: QpNum,
        limits: QpLimits,
    ) -> io::Result<Self> {
        let (send, recv) = (limits.send_max, limits.recv_max);
        // Some devices do not support inline data, or do not support it with queues of this length.
        let (raw, number, inline_max) =
            create(pd, cq, send, recv, INLINE_MAX).or_else(|_| create(pd, cq, send, recv, 0))?;
        let mut qp = Self {
            raw: Some(raw),
            number,
            name,
            sends: Sends::new(limits.send_max, true, false),
            recvs: Recvs::new(limits.recv_max),
            inline_max,
            reads: false,
            bind_qp: None,
            iwarp: pd.context().limits().iwarp,
            detached: false,
            cq: Rc::clone(cq),
            pd: Arc::clone(pd),
        };
        if Self::needs_bind_qp(pd) {
            let (raw, number, _) = create(pd, cq, limits.send_max, 0, 0)?;
            let binds = Sends::new(limits.send_max, false, true);
            qp.bind_qp = Some(BindQp { raw: Some(raw), number, binds });
        }
        Ok(qp)
    }

    /// Returns the device's number of the queue pair.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns true if this queue pair, or its bind QP, has this number.
    pub(crate) fn has_number(&self, number: u32) -> bool {
        self.number == number || self.bind_qp.as_ref().is_some_and(|b| b.number == number)
    }

    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub(crate) fn cq(&self) -> &Rc<Cq> {
        &self.cq
    }

    /// Returns the number of send requests and binds that have not completed.
    pub(crate) fn sends_open(&self) -> u32 {
        self.sends.ring.len() + self.binds().map_or(0, |binds| binds.ring.len())
    }

    /// Returns true if work is waiting to be posted and may be posted.
    pub(crate) fn has_ready(&self) -> bool {
        self.sends.ready(self.binds()) > 0
    }

    fn binds(&self) -> Option<&Sends> {
        self.bind_qp.as_ref().map(|bind_qp| &bind_qp.binds)
    }

    fn alive(&self) -> io::Result<NonNull<ibv_qp>> {
        self.raw.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))
    }

    /// Modifies the queue pair and its bind QP.
    pub(super) fn modify(
        &mut self,
        attributes: &mut ibv_qp_attr,
        mask: libc::c_int,
    ) -> io::Result<()> {
        modify(self.alive()?, attributes, mask)?;
        let bind_qp = self.bind_qp.as_ref().and_then(|bind_qp| bind_qp.raw);
        bind_qp.map_or(Ok(()), |raw| modify(raw, attributes, mask))
    }

    /// Transitions to INIT: receives may be posted. `reads` permits the peer's reads.
    pub(crate) fn enter_init(&mut self, id: &CmId, reads: bool) -> io::Result<()> {
        let (mut attributes, mask) = id.qp_attributes(ibv_qp_state::IBV_QPS_INIT)?;
        attributes.qp_access_flags =
            access_flags(Access { local_write: false, remote_write: true, remote_read: reads });
        self.modify(&mut attributes, mask | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0.cast_signed())
    }

    /// Transitions to RTR: the peer's messages are accepted.
    pub(crate) fn enter_rtr(
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
        self.modify(&mut attributes, mask)
    }

    /// Transitions to RTS: requests may be posted.
    pub(crate) fn enter_rts(
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
        self.modify(&mut attributes, mask)
    }

    /// Sets whether reads may be posted, as negotiated by the connection manager.
    pub(crate) fn set_reads(&mut self, reads: bool) {
        self.reads = reads;
    }

    /// Returns attributes with no field set.
    pub(super) fn no_attributes() -> ibv_qp_attr {
        // SAFETY: plain data, for which all zeroes is valid.
        unsafe { std::mem::zeroed() }
    }

    /// Adds a request to the batch. The caller has checked that its memory is registered.
    pub(crate) fn push_send(&mut self, wr: &WorkRequest) -> Result<(), FabricError> {
        if self.sends_open() >= self.sends.limit {
            return Err(FabricError::QueueFull);
        }
        if wr.sges.len() > MESSAGE_MAX {
            return Err(FabricError::Unsupported("messages of more than 2 GiB"));
        }
        let (opcode, op) = self.validate(wr)?;
        let (seq, at) = self.open_send(wr.wr_id, op, wr.signaled);
        let sends = &mut self.sends;
        let mut count = 0;
        for sge in wr.sges.iter().filter(|sge| !sge.slice.is_empty()) {
            if op != WcOp::RdmaRead {
                sge.slice.fill_bounce();
            }
            sends.sges[at][count] = to_sge(sge);
            sends.slots[at].pieces[count] = Some(sge.slice.clone());
            count += 1;
        }
        let signal = sends.signal(wr.signaled);
        let sg_list = sends.sges[at].as_mut_ptr();
        let raw = &mut sends.wrs[at];
        raw.wr_id = WrTag { qp: self.name, recv: false, bind: false, seq }.to_raw();
        raw.sg_list = sg_list;
        #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "0 to 2")]
        {
            raw.num_sge = count as libc::c_int;
        }
        raw.opcode = opcode;
        raw.send_flags = if signal { ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
        if count == 1 && op != WcOp::RdmaRead && wr.sges.len() <= self.inline_max {
            raw.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
        }
        let imm = match wr.op {
            WrOp::Send { imm, .. } | WrOp::RdmaWrite { imm, .. } => imm,
            WrOp::RdmaRead { .. } => None,
        };
        raw.imm_data_invalidated_rkey_union.imm_data = imm.map_or(0, u32::to_be);
        if let WrOp::Send { invalidate: Some(key), .. } = wr.op {
            raw.imm_data_invalidated_rkey_union.invalidated_rkey = key.0;
        }
        let (remote_addr, rkey) = match wr.op {
            WrOp::RdmaWrite { remote, .. } | WrOp::RdmaRead { remote } if count > 0 => {
                (remote.addr, remote.rkey.0)
            }
            _ => (0, 0),
        };
        raw.wr.rdma = rdma_sys::rdma_t { remote_addr, rkey };
        Ok(())
    }

    fn validate(&self, wr: &WorkRequest) -> Result<(ibv_wr_opcode::Type, WcOp), FabricError> {
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
                    "RDMA reads on a connection that was opened without RDMA reads",
                ));
            }
            WrOp::RdmaRead { .. } if wr.sges.second.is_some() => {
                return Err(FabricError::Unsupported("a read into two pieces of memory"));
            }
            WrOp::RdmaRead { .. } => (ibv_wr_opcode::IBV_WR_RDMA_READ, WcOp::RdmaRead),
        })
    }

    fn open_send(&mut self, wr_id: u64, op: WcOp, signaled: bool) -> (u32, usize) {
        let after = self.binds().and_then(|binds| binds.ring.last_open());
        self.sends.open(SendSlot { wr_id, op: Some(op), signaled, after, ..SendSlot::default() })
    }

    /// Binds a window to part of its registration, or revokes its key (None). Returns the new key,
    /// which takes effect when the request completes.
    pub(crate) fn push_bind(
        &mut self,
        window: &Arc<Mw>,
        slice: Option<&MemSlice>,
        access: Access,
        wr_id: u64,
    ) -> Result<u32, FabricError> {
        if self.sends_open() >= self.sends.limit {
            return Err(FabricError::QueueFull);
        }
        let info = ibv_mw_bind_info {
            // Required for a bind of zero bytes as well: rdma_rxe's provider library accesses it.
            mr: window.mr().raw(),
            addr: slice.map_or_else(|| window.mr().base(), |slice| slice.device_address() as u64),
            length: slice.map_or(0, |slice| slice.len() as u64),
            mw_access_flags: slice
                .map_or(0, |_| access_flags(access) & !ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0),
        };
        match &mut self.bind_qp {
            Some(bind_qp) => bind_qp.stage(self.name, window, info, wr_id),
            None => self.bind_now(window, info, wr_id),
        }
    }

    /// Binds a window immediately, after the requests in the batch, so that the device receives
    /// everything in the order in which callers posted it. Makes one call per bind: `ibv_bind_mw`
    /// takes one bind and is the only call that is documented for windows of type 1;
    /// `ibv_post_send` binds windows of type 2 (ibv_post_send(3)).
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
                wr_id: WrTag { qp: self.name, recv: false, bind: false, seq }.to_raw(),
                send_flags: ibv_send_flags::IBV_SEND_SIGNALED.0,
                bind_info: info,
            };
            // SAFETY: queue pair, window and registration are alive and belong to one domain, which
            // the caller has checked; the structure outlives the call.
            let code = unsafe { ibv_bind_mw(raw.as_ptr(), mw.as_ptr(), &raw mut bind) };
            if let Err(error) = outcome(code) {
                // Nothing was posted, so the slot is released.
                self.sends.ring.tail = seq;
                self.sends.slots[at] = SendSlot::default();
                let device = self.pd.context().name();
                return Err(FabricError::system(
                    format!("cannot bind a memory window of {device}"),
                    error,
                ));
            }
            self.sends.silent = 0;
            self.sends.slots[at].window = Some(Arc::clone(window));
            self.sends.ring.posted = self.sends.ring.tail;
            // SAFETY: the window is alive; `ibv_bind_mw` has written its new key.
            Ok(unsafe { (*mw.as_ptr()).rkey })
        });
        changed.unwrap_or(Err(FabricError::QpState))
    }

    /// Adds a receive to the batch. The caller has checked that its memory is registered.
    pub(crate) fn push_recv(&mut self, wr_id: u64, buf: Option<Sge>) -> Result<(), FabricError> {
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
        raw.wr_id = WrTag { qp: self.name, recv: true, bind: false, seq }.to_raw();
        raw.sg_list = &raw mut recvs.sges[at];
        raw.num_sge = libc::c_int::from(buf.is_some());
        recvs.slots[at] = RecvSlot { wr_id, piece: buf.map(|sge| sge.slice), done: false };
        Ok(())
    }

    /// Passes staged receives to the device. The state must be INIT or later.
    pub(crate) fn post_recvs(&mut self) -> io::Result<()> {
        let raw = self.alive()?;
        if self.recvs.ring.staged() == 0 {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        // SAFETY: a list of requests in this queue's arrays, read during the call; the memory that
        // they reference is owned by their slots.
        outcome(unsafe { ibv_post_recv(raw.as_ptr(), self.recvs.link(), &raw mut bad) })
    }

    /// Passes staged work to the device: receives, binds, then requests, except those that wait for
    /// a bind. Returns the number of calls that posted requests.
    pub(crate) fn post(&mut self) -> io::Result<u64> {
        self.post_recvs()?;
        let raw = self.alive()?;
        let bound = self.bind_qp.as_mut().map_or(Ok(0), BindQp::post)?;
        let ready = self.sends.ready(self.binds());
        if ready == 0 {
            return Ok(bound);
        }
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post_recvs`.
        outcome(unsafe { ibv_post_send(raw.as_ptr(), self.sends.link(ready), &raw mut bad) })?;
        Ok(bound + 1)
    }

    /// Ensures that the last request creates a completion, so that the end of all work is detected:
    /// by its flag if it is still staged, otherwise by an additional request that does nothing.
    pub(crate) fn seal(&mut self) {
        let sends = &mut self.sends;
        if sends.silent == 0 || sends.ring.len() == 0 {
            return;
        }
        sends.silent = 0;
        if sends.ring.staged() > 0 {
            sends.signal_last();
            return;
        }
        let (seq, at) = self.open_send(0, WcOp::RdmaWrite, false);
        self.sends.slots[at].op = None;
        let raw = &mut self.sends.wrs[at];
        raw.wr_id = WrTag { qp: self.name, recv: false, bind: false, seq }.to_raw();
        raw.num_sge = 0;
        raw.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        raw.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        raw.imm_data_invalidated_rkey_union.imm_data = 0;
        raw.wr.rdma = rdma_sys::rdma_t { remote_addr: 0, rkey: 0 };
    }

    /// Handles the completion of a request or bind: frees it and all before it, and reports the
    /// outcomes that the poster requested.
    pub(crate) fn send_done(
        &mut self,
        tag: WrTag,
        status: WcStatus,
        mut report: impl FnMut(Posted),
    ) {
        match &mut self.bind_qp {
            Some(bind_qp) if tag.bind => bind_qp.binds.done(tag.seq, status, &mut report),
            _ => self.sends.done(tag.seq, status, &mut report),
        }
    }

    /// Handles the completion of a receive: frees it and returns its ID.
    pub(crate) fn recv_done(&mut self, seq: u32) -> Option<u64> {
        self.recvs.done(seq)
    }

    /// Destroys the queue pair; from then on no peer can access memory through it.
    pub(crate) fn destroy(&mut self) -> io::Result<()> {
        let Some(mut ending) = self.detach() else { return Ok(()) };
        let result = ending.destroy();
        self.destroyed(result.is_err());
        result
    }

    /// Leaks the memory of posted work, which may still be in use.
    fn abandon(&mut self) {
        self.sends.abandon();
        self.recvs.abandon();
        if let Some(bind_qp) = &mut self.bind_qp {
            bind_qp.binds.abandon();
        }
        std::mem::forget((Rc::clone(&self.cq), Arc::clone(&self.pd)));
    }

    /// Takes the device's queue pairs out, to be destroyed elsewhere; [`Self::destroyed`] then
    /// records the result. Returns None if they were destroyed or taken already.
    pub(crate) fn detach(&mut self) -> Option<Ending> {
        let main = self.raw.take()?;
        let bind_qp = self.bind_qp.as_mut().and_then(|bind_qp| bind_qp.raw.take());
        self.detached = true;
        let number = self.number;
        Some(Ending { bind_qp, main: Some(main), number, pd: Arc::clone(&self.pd) })
    }

    /// Records whether the queue pairs from [`Self::detach`] could be destroyed.
    pub(crate) fn destroyed(&mut self, failed: bool) {
        if std::mem::take(&mut self.detached) && failed {
            self.abandon();
        }
    }

    /// Reports everything that has not completed as flushed. Must not be called before `destroy`.
    pub(crate) fn flush_rest(&mut self, mut report: impl FnMut(Posted)) {
        assert!(self.raw.is_none() && !self.detached, "the device may still use what is posted");
        if let Some(bind_qp) = &mut self.bind_qp {
            bind_qp.binds.flush(&mut report);
        }
        self.sends.flush(&mut report);
        self.recvs.flush(&mut report);
    }
}

/// The device's part of a [`Qp`] that is being destroyed. Dropping it destroys it too.
pub(crate) struct Ending {
    bind_qp: Option<NonNull<ibv_qp>>,
    main: Option<NonNull<ibv_qp>>,
    number: u32,
    /// Dropped after the queue pairs.
    pd: Arc<Pd>,
}

// SAFETY: these are the only handles to their queue pairs, and libibverbs is thread-safe: a queue
// pair may be destroyed on a thread other than its creator's (ibv_destroy_qp(3), verbs(7)).
unsafe impl Send for Ending {}

impl Ending {
    /// Returns true if the device has put the queue pair into ERR.
    pub(crate) fn is_in_error(&self) -> bool {
        let Some(raw) = self.main else { return true };
        // SAFETY: plain data, for which all zeroes is valid.
        let (mut attributes, mut init): (ibv_qp_attr, ibv_qp_init_attr) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE.0.cast_signed();
        // SAFETY: the queue pair is alive; both structures are written during the call.
        let code = unsafe { ibv_query_qp(raw.as_ptr(), &raw mut attributes, mask, &raw mut init) };
        code == 0 && attributes.qp_state == ibv_qp_state::IBV_QPS_ERR
    }

    /// Transitions to ERR: nothing is sent or received anymore, and posted work is flushed.
    pub(crate) fn enter_error(&self) -> io::Result<()> {
        let mut attributes = Qp::no_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_ERR;
        let mask = ibv_qp_attr_mask::IBV_QP_STATE.0.cast_signed();
        let mut raws = self.main.into_iter().chain(self.bind_qp);
        raws.try_for_each(|raw| modify(raw, &mut attributes, mask))
    }

    /// Returns the name of the device.
    pub(crate) fn device(&self) -> &str {
        self.pd.context().name()
    }

    /// Destroys the queue pairs, however long the driver takes.
    pub(crate) fn destroy(&mut self) -> io::Result<()> {
        let bound = self.bind_qp.take().map_or(Ok(()), |raw| destroy(&self.pd, raw));
        let sent = self.main.take().map_or(Ok(()), |raw| destroy(&self.pd, raw));
        bound.and(sent).inspect_err(|error| {
            tracing::error!(%error, qp = self.number, "cannot destroy a queue pair");
        })
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // A failure is logged, and the memory stays with the `Qp`, which waits for the result.
        let _ = self.destroy();
    }
}

impl BindQp {
    /// Adds a bind to the batch. Prepares the bind as `ibv_bind_mw` does for rdma_rxe, but without
    /// a system call for each bind.
    fn stage(
        &mut self,
        name: QpNum,
        window: &Arc<Mw>,
        info: ibv_mw_bind_info,
        wr_id: u64,
    ) -> Result<u32, FabricError> {
        let changed = window.change(|raw, before| {
            let after = next_key(before);
            let binds = &mut self.binds;
            let (seq, at) = binds.open(SendSlot {
                wr_id,
                op: Some(WcOp::Bind),
                signaled: true,
                window: Some(Arc::clone(window)),
                ..SendSlot::default()
            });
            // SAFETY: the window is alive, and its handle never changes except for the key, which
            // is maintained here.
            let mut handle = unsafe { *raw.as_ptr() };
            handle.rkey = before;
            binds.windows[at] = handle;
            let mw = &raw mut binds.windows[at];
            let wr = &mut binds.wrs[at];
            wr.wr_id = WrTag { qp: name, recv: false, bind: true, seq }.to_raw();
            wr.sg_list = ptr::null_mut();
            wr.num_sge = 0;
            wr.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
            wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
            wr.imm_data_invalidated_rkey_union.imm_data = 0;
            wr.bind_mw_tso_union.bind_mw = rdma_sys::bind_mw_t { mw, rkey: after, bind_info: info };
            Ok::<u32, FabricError>(after)
        });
        changed.unwrap_or(Err(FabricError::QpState))
    }

    /// Passes staged binds to the device; returns the number of calls.
    fn post(&mut self) -> io::Result<u64> {
        let staged = self.binds.ring.staged();
        if staged == 0 {
            return Ok(0);
        }
        let raw = self.raw.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
        let mut bad = ptr::null_mut();
        // SAFETY: a list of requests in this queue's arrays, read during the call; the windows that
        // they reference are owned by their slots.
        outcome(unsafe { ibv_post_send(raw.as_ptr(), self.binds.link(staged), &raw mut bad) })?;
        Ok(1)
    }
}

/// Creates a queue pair in its initial state. Returns its handle, its number, and the maximum
/// inline data, at most `inline_max` bytes.
fn create(
    pd: &Pd,
    cq: &Cq,
    sends: u32,
    recvs: u32,
    inline_max: u32,
) -> io::Result<(NonNull<ibv_qp>, u32, usize)> {
    // SAFETY: plain data, for which all zeroes is valid.
    let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
    init.send_cq = cq.raw();
    init.recv_cq = cq.raw();
    init.qp_type = ibv_qp_type::IBV_QPT_RC;
    // One more than the poster may use, for the request that marks the end.
    init.cap.max_send_wr = sends + 1;
    init.cap.max_recv_wr = recvs.max(1);
    init.cap.max_send_sge = 2;
    init.cap.max_recv_sge = 1;
    init.cap.max_inline_data = inline_max;
    // SAFETY: a live domain and queue of one device; the attributes outlive the call.
    let raw = NonNull::new(unsafe { ibv_create_qp(pd.raw(), &raw mut init) })
        .ok_or_else(io::Error::last_os_error)?;
    pd.add_queue_pair();
    // SAFETY: just created.
    let number = unsafe { (*raw.as_ptr()).qp_num };
    // A driver may grant less, and refuse requests beyond that.
    Ok((raw, number, init.cap.max_inline_data.min(inline_max) as usize))
}

/// Modifies a queue pair that its owner has not destroyed.
fn modify(raw: NonNull<ibv_qp>, to: &mut ibv_qp_attr, mask: libc::c_int) -> io::Result<()> {
    // SAFETY: the queue pair is alive; the attributes outlive the call.
    outcome(unsafe { ibv_modify_qp(raw.as_ptr(), ptr::from_mut(to), mask) })
}

/// Destroys a queue pair of the domain through its only handle.
fn destroy(pd: &Pd, raw: NonNull<ibv_qp>) -> io::Result<()> {
    // SAFETY: the only handle to a queue pair that `create` returned; destroyed once.
    outcome(unsafe { ibv_destroy_qp(raw.as_ptr()) })?;
    pd.remove_queue_pair();
    Ok(())
}

impl Drop for Qp {
    fn drop(&mut self) {
        if self.detached {
            // The shard stops before the result arrives.
            self.abandon();
        }
        // The memory of posted work is freed with the slots, after the queue pair is destroyed.
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
