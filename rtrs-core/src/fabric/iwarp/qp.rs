//! Sans-IO stream machine of one queue pair, from the end of the start-up to the last byte.
//!
//! Bytes come in through `rx_prepare` (destination) and `rx_done` (number received); bytes go out
//! through `tx_prepare` (data to send) and `tx_done` (data was accepted). The machine owns the
//! staging memory and all posted work, validates every frame from the peer, and never touches a
//! socket or a clock. Sending is in `tx.rs` and `sender.rs`, receiving in `rx.rs` and its state in
//! `progress.rs`; this file contains the posting of work and the end of the stream.
//!
//! Nothing a peer sends makes it panic: a fault ends the stream with a Terminate.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::batch::TX_STAGE;
use super::mpa::{FPDU_MAX, Features, Terms};
use super::progress::Rx;
use super::rdmap::{TermCode, Terminate};
use super::recv_queue::{PostedRecv, RecvQueue};
use super::sender::Sender;
use super::state::CoreState;
use crate::fabric::{
    CloseReason, FabricError, QpLimits, Sge, WcOp, WcStatus, WorkCompletion, WorkRequest, WrOp,
};
use crate::ids::QpNum;
use crate::limits::TCP_CONNECTION_BUFFERS;
use crate::mem::{MemSlice, Region};

/// Size of receive staging in bytes: one whole frame of maximum size and part of the next.
pub(super) const RX_STAGE: usize = 80 << 10;

const _: () = assert!(RX_STAGE >= FPDU_MAX + 4096);
const _: () = assert!((RX_STAGE + TX_STAGE) as u64 == TCP_CONNECTION_BUFFERS);

/// Protocol violation by the peer.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) terminate: Terminate,
    pub(super) text: &'static str,
}

/// Reason for the end of the stream.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) reason: CloseReason,
    /// Terminate that must still be sent.
    pub(super) terminate: Option<Terminate>,
}

/// Stream machine of one queue pair.
pub(super) struct QpMachine {
    pub(super) qp: QpNum,
    pub(super) pd: u64,
    pub(super) limits: QpLimits,
    pub(super) terms: Option<Terms>,
    /// Receive staging.
    pub(super) stage: Arc<Region>,
    /// Send staging.
    pub(super) send_stage: Arc<Region>,
    pub(super) sender: Sender,
    pub(super) recv_queue: RecvQueue,
    pub(super) rx: Rx,
    pub(super) failure: Option<Failure>,
}

impl QpMachine {
    /// Creates a machine that accepts work; it neither sends nor receives before `open`. Its
    /// receive staging is `stage` bytes long.
    ///
    /// # Errors
    /// Returns the system's error if the staging memory cannot be allocated.
    pub(super) fn new(qp: QpNum, pd: u64, limits: QpLimits, stage: usize) -> io::Result<Self> {
        Ok(Self {
            qp,
            pd,
            limits,
            terms: None,
            stage: Region::new(stage)?,
            send_stage: Region::new(TX_STAGE)?,
            sender: Sender::new(limits.send_max as usize),
            recv_queue: RecvQueue::default(),
            rx: Rx::default(),
            failure: None,
        })
    }

    /// Begins full operation under these terms.
    pub(super) fn open(&mut self, terms: Terms) {
        self.sender.open(terms);
        self.rx.swallow_send = terms.rtr_is_send;
        self.terms = Some(terms);
    }

    /// Returns true once the peer has sent a valid frame (RFC 5044 section 7.1.2: a responder stays
    /// silent until then).
    pub(super) fn has_heard(&self) -> bool {
        self.rx.heard
    }

    pub(super) fn features(&self) -> Features {
        self.terms.map(|t| t.features).unwrap_or_default()
    }

    /// Returns the first `len` bytes of the send or receive staging, for start-up frames.
    pub(super) fn start_buffer(&self, send: bool, len: usize) -> Option<MemSlice> {
        if send { self.send_stage.slice(0, len) } else { self.stage.slice(0, len) }
    }

    /// Queues a work request.
    ///
    /// # Errors
    /// See `Fabric::post_send`.
    pub(super) fn post_send(
        &mut self,
        core: &CoreState,
        wr: WorkRequest,
    ) -> Result<(), FabricError> {
        let Some(terms) = self.terms else { return Err(FabricError::QpState) };
        if self.failure.is_some() {
            return Err(FabricError::QpState);
        }
        if self.sender.len() >= self.limits.send_max as usize {
            return Err(FabricError::QueueFull);
        }
        let features = terms.features;
        let mut sink = 0;
        let mut len = 0;
        let is_read = matches!(wr.op, WrOp::RdmaRead { .. });
        let mut takes_parts = !matches!(wr.op, WrOp::Send { .. });
        for sge in wr.sges.iter() {
            sink = core.stags.check_local(self.pd, sge, is_read).ok_or(FabricError::LocalMemory)?;
            len += sge.slice.len();
            if !takes_parts && sge.slice.region().is_scattered() {
                return Err(FabricError::Unsupported("scattered memory except RDMA payload"));
            }
            takes_parts = false;
        }
        if len > u32::MAX as usize - 64 {
            return Err(FabricError::Unsupported("messages of 4 GiB"));
        }
        match wr.op {
            WrOp::Send { imm, invalidate } => {
                if imm.is_some() && (!features.send_prefix || invalidate.is_some()) {
                    return Err(FabricError::Unsupported("send with immediate to this peer"));
                }
                if features.send_prefix {
                    len += Features::PREFIX_LEN;
                }
            }
            WrOp::RdmaWrite { imm, .. } => {
                if imm.is_some() && !features.immediate {
                    return Err(FabricError::Unsupported("write with immediate to this peer"));
                }
            }
            WrOp::RdmaRead { .. } => {
                if wr.sges.second.is_some() {
                    return Err(FabricError::Unsupported("reads into two pieces"));
                }
                if terms.ord == 0 {
                    return Err(FabricError::Unsupported("reads from this peer"));
                }
            }
        }
        self.sender.push(wr, len, sink);
        Ok(())
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// See `Fabric::post_recv`.
    pub(super) fn post_recv(
        &mut self,
        core: &CoreState,
        wr_id: u64,
        buf: Option<Sge>,
    ) -> Result<(), FabricError> {
        if self.failure.is_some() {
            return Err(FabricError::QpState);
        }
        if self.recv_queue.len() >= self.limits.recv_max as usize {
            return Err(FabricError::QueueFull);
        }
        if let Some(sge) = &buf
            && core.stags.check_local(self.pd, sge, true).is_none()
        {
            return Err(FabricError::LocalMemory);
        }
        self.recv_queue.push(PostedRecv { wr_id, buf: buf.map(|sge| sge.slice) });
        Ok(())
    }

    /// Ends the stream after a protocol violation by the peer, and sends a Terminate.
    pub(super) fn fail(&mut self, fault: &Fault) {
        if self.failure.is_none() {
            let code = fault.terminate.code;
            let reason = CloseReason::Protocol(format!("{}: {code}", fault.text));
            self.end(reason, Some(fault.terminate));
        }
    }

    /// Ends the stream.
    pub(super) fn end(&mut self, reason: CloseReason, terminate: Option<Terminate>) {
        if self.failure.is_none() {
            self.failure = Some(Failure { reason, terminate });
            self.rx.drop_direct();
        }
    }

    /// Ends the stream after a Terminate from the peer.
    pub(super) fn peer_terminated(&mut self, payload: &[u8]) {
        if let Some((TermCode { layer: 0, etype: 1, .. }, _)) = Terminate::decode(payload) {
            self.sender.refuse_read();
        }
        self.end(CloseReason::PeerTerminated(Terminate::describe(payload)), None);
    }

    /// Flushes all posted work. Called once, when no operation of this queue pair is running.
    pub(super) fn flush_all(&mut self, core: &mut CoreState) {
        let qp = self.qp;
        self.sender.flush(|item, status| {
            let op = item.wr.op.completes_as();
            core.complete(WorkCompletion::new(qp, item.wr.wr_id, op, status));
        });
        while let Some(recv) = self.recv_queue.pop() {
            core.complete(self.completion(recv.wr_id, WcOp::Recv, WcStatus::Flushed));
        }
        self.rx.drop_direct();
    }

    pub(super) fn completion(&self, wr_id: u64, op: WcOp, status: WcStatus) -> WorkCompletion {
        WorkCompletion::new(self.qp, wr_id, op, status)
    }

    /// Reports finished entries at the head of the send queue, in posting order.
    pub(super) fn retire(&mut self, core: &mut CoreState) {
        while let Some(item) = self.sender.pop_done() {
            if item.wr.signaled {
                let op = item.wr.op.completes_as();
                let mut done = self.completion(item.wr.wr_id, op, WcStatus::Success);
                if op == WcOp::RdmaRead {
                    done.byte_len = item.len as u32;
                }
                core.complete(done);
            }
        }
    }
}

impl fmt::Debug for QpMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QpMachine")
            .field("qp", &self.qp)
            .field("send_queue", &self.sender.len())
            .field("recv_queue", &self.recv_queue.len())
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}
