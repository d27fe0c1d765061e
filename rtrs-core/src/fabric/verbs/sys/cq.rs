//! Completion channels and completion queues.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use rdma_sys::{
    ibv_ack_cq_events, ibv_comp_channel, ibv_cq, ibv_create_comp_channel, ibv_create_cq,
    ibv_destroy_comp_channel, ibv_destroy_cq, ibv_get_cq_event, ibv_poll_cq, ibv_req_notify_cq,
    ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status,
};

use super::cm::{duplicate, set_nonblocking};
use super::device::Context;
use super::outcome::{outcome, taken};
use super::queue::WrTag;
use crate::fabric::{WcOp, WcStatus};

/// Maximum number of completions taken from the device in one call.
const POLL_BATCH: usize = 32;

/// Descriptor on which completion queues report.
#[derive(Debug)]
pub(crate) struct CompChannel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

impl CompChannel {
    /// Creates a non-blocking channel.
    pub(crate) fn new(context: &Arc<Context>) -> io::Result<Rc<Self>> {
        // SAFETY: an open context; null means an error.
        let raw = NonNull::new(unsafe { ibv_create_comp_channel(context.raw()) })
            .ok_or_else(io::Error::last_os_error)?;
        let channel = Self { raw, context: Arc::clone(context) };
        set_nonblocking(channel.fd())?;
        Ok(Rc::new(channel))
    }

    fn fd(&self) -> libc::c_int {
        // SAFETY: the channel exists until it is dropped.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns a duplicate descriptor of the channel for polling.
    pub(crate) fn pollable(&self) -> io::Result<OwnedFd> {
        duplicate(self.fd())
    }

    /// Takes one notification and returns the index of the queue that has completions, or None if
    /// no notification is pending.
    pub(crate) fn next(&self) -> io::Result<Option<usize>> {
        let mut cq: *mut ibv_cq = ptr::null_mut();
        let mut index = ptr::null_mut();
        // SAFETY: the channel is alive; both pointers are written on success.
        let got = unsafe { ibv_get_cq_event(self.raw.as_ptr(), &raw mut cq, &raw mut index) };
        if !taken(got)? {
            return Ok(None);
        }
        // SAFETY: the queue cannot be destroyed while one of its notifications is unacknowledged.
        unsafe { ibv_ack_cq_events(cq, 1) };
        Ok(Some(index as usize))
    }
}

impl Drop for CompChannel {
    fn drop(&mut self) {
        // SAFETY: every queue holds its channel, so none is left.
        unsafe { ibv_destroy_comp_channel(self.raw.as_ptr()) };
    }
}

/// Decoded completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wc {
    pub(crate) tag: WrTag,
    pub(crate) status: WcStatus,
    /// Kind of message that completed a successful receive.
    pub(crate) arrived: WcOp,
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidated: Option<u32>,
}

impl Wc {
    fn from_raw(raw: &ibv_wc, soft_roce: bool) -> Self {
        let tag = WrTag::from_raw(raw.wr_id);
        let status = status_of(raw.status, tag.recv);
        let good = status == WcStatus::Success;
        let has = |flag: ibv_wc_flags| good && tag.recv && raw.wc_flags & flag.0 != 0;
        let imm = has(ibv_wc_flags::IBV_WC_WITH_IMM);
        // rdma_rxe reports the kernel's own value of the flag, which libibverbs defines as "IP
        // checksum is correct"; on a reliable connection no other device sets that flag.
        let invalidated = has(ibv_wc_flags::IBV_WC_WITH_INV)
            || (soft_roce && has(ibv_wc_flags::IBV_WC_IP_CSUM_OK));
        // SAFETY: both views of the union are plain 32-bit numbers.
        let value = unsafe { raw.imm_data_invalidated_rkey_union.invalidated_rkey };
        let with_imm = raw.opcode == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        Self {
            tag,
            status,
            arrived: if good && with_imm { WcOp::RecvRdmaWithImm } else { WcOp::Recv },
            byte_len: if good { raw.byte_len } else { 0 },
            imm: imm.then(|| u32::from_be(value)),
            invalidated: (invalidated && !imm && !with_imm).then_some(value),
        }
    }
}

fn status_of(raw: ibv_wc_status::Type, recv: bool) -> WcStatus {
    match raw {
        ibv_wc_status::IBV_WC_SUCCESS => WcStatus::Success,
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        ibv_wc_status::IBV_WC_RETRY_EXC_ERR | ibv_wc_status::IBV_WC_RESP_TIMEOUT_ERR => {
            WcStatus::RetryExceeded
        }
        // On a receive, these statuses mean that the local end refused the peer's message.
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR if !recv => WcStatus::RemoteAccess,
        ibv_wc_status::IBV_WC_REM_INV_REQ_ERR
        | ibv_wc_status::IBV_WC_REM_OP_ERR
        | ibv_wc_status::IBV_WC_REM_ABORT_ERR
        | ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR
            if !recv =>
        {
            WcStatus::RemoteOperation
        }
        _ => WcStatus::LocalError,
    }
}

/// Completion queue, used by one shard.
pub(crate) struct Cq {
    raw: NonNull<ibv_cq>,
    buffer: RefCell<Box<[ibv_wc]>>,
    soft_roce: bool,
    channel: Rc<CompChannel>,
}

impl Cq {
    /// Creates a queue for `entries` completions, which reports on the channel under `index`. Uses
    /// completion vector `vector`, modulo the device's number of vectors.
    pub(crate) fn new(
        channel: &Rc<CompChannel>,
        entries: u32,
        index: usize,
        vector: u32,
    ) -> io::Result<Rc<Self>> {
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: an open context.
        let vectors = unsafe { (*channel.context.raw()).num_comp_vectors };
        let vector = i32::try_from(vector % vectors.max(1).cast_unsigned()).unwrap_or(0);
        // SAFETY: an open context and one of its channels; only this module interprets the index,
        // which is not a real pointer; null means an error.
        let raw = NonNull::new(unsafe {
            ibv_create_cq(
                channel.context.raw(),
                entries,
                ptr::without_provenance_mut(index),
                channel.raw.as_ptr(),
                vector,
            )
        })
        .ok_or_else(io::Error::last_os_error)?;
        // SAFETY: plain data, for which all zeroes is valid.
        let buffer = (0..POLL_BATCH).map(|_| unsafe { std::mem::zeroed() }).collect();
        Ok(Rc::new(Self {
            raw,
            buffer: RefCell::new(buffer),
            soft_roce: channel.context.limits().soft_roce,
            channel: Rc::clone(channel),
        }))
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    /// Appends some of the available completions; returns 0 if none are left.
    pub(crate) fn poll(&self, into: &mut Vec<Wc>) -> io::Result<usize> {
        let mut buffer = self.buffer.borrow_mut();
        // SAFETY: the buffer has space for that many completions.
        let got = unsafe { ibv_poll_cq(self.raw.as_ptr(), POLL_BATCH as i32, buffer.as_mut_ptr()) };
        let Ok(got) = usize::try_from(got) else {
            return Err(io::Error::other("the completion queue cannot be read"));
        };
        into.extend(buffer[..got].iter().map(|raw| Wc::from_raw(raw, self.soft_roce)));
        Ok(got)
    }

    /// Requests a notification on the channel for the next completion. Earlier completions cause
    /// none, so the queue must be polled once more afterwards.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue is alive.
        outcome(unsafe { ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: every queue pair holds its queue, so none is left; all notifications are
        // acknowledged.
        let code = unsafe { ibv_destroy_cq(self.raw.as_ptr()) };
        if code != 0 {
            let device = self.channel.context.name();
            tracing::error!(code, device, "cannot destroy a completion queue");
        }
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::QpNum;

    fn raw(recv: bool) -> ibv_wc {
        // SAFETY: plain data, for which all zeroes is valid.
        let mut raw: ibv_wc = unsafe { std::mem::zeroed() };
        raw.wr_id = WrTag { qp: QpNum(7), recv, bind: false, seq: 3 }.to_raw();
        raw.opcode = ibv_wc_opcode::IBV_WC_RECV;
        raw.byte_len = 10;
        raw.imm_data_invalidated_rkey_union.invalidated_rkey = 0x1234_5678_u32.to_be();
        raw
    }

    #[test]
    fn immediates_and_invalidations_are_distinguished() {
        let plain = Wc::from_raw(&raw(true), true);
        assert_eq!((plain.imm, plain.invalidated, plain.byte_len), (None, None, 10));
        let mut imm = raw(true);
        imm.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
        imm.opcode = ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        let imm = Wc::from_raw(&imm, true);
        assert_eq!((imm.imm, imm.invalidated), (Some(0x1234_5678), None));
        assert_eq!(imm.arrived, WcOp::RecvRdmaWithImm);
        let mut kernel_flag = raw(true);
        // GRH and the kernel's WITH_INVALIDATE flag.
        kernel_flag.wc_flags = 0x5;
        let key = Some(0x1234_5678_u32.to_be());
        assert_eq!(Wc::from_raw(&kernel_flag, true).invalidated, key);
        assert_eq!(Wc::from_raw(&kernel_flag, false).invalidated, None);
        kernel_flag.wc_flags = ibv_wc_flags::IBV_WC_WITH_INV.0;
        assert_eq!(Wc::from_raw(&kernel_flag, false).invalidated, key);
    }

    #[test]
    fn a_refused_message_is_a_local_error_at_the_receiver() {
        let mut bad = raw(true);
        bad.status = ibv_wc_status::IBV_WC_REM_INV_REQ_ERR;
        assert_eq!(Wc::from_raw(&bad, true).status, WcStatus::LocalError);
        let mut bad = raw(false);
        bad.status = ibv_wc_status::IBV_WC_REM_INV_REQ_ERR;
        assert_eq!(Wc::from_raw(&bad, true).status, WcStatus::RemoteOperation);
        bad.status = ibv_wc_status::IBV_WC_REM_ACCESS_ERR;
        assert_eq!(Wc::from_raw(&bad, true).status, WcStatus::RemoteAccess);
        bad.status = ibv_wc_status::IBV_WC_RETRY_EXC_ERR;
        assert_eq!(Wc::from_raw(&bad, true).status, WcStatus::RetryExceeded);
        bad.status = ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
        assert_eq!(Wc::from_raw(&bad, true).status, WcStatus::Flushed);
    }
}
