//! Sending half of the stream machine. Work requests are encoded into frames only when the socket
//! is ready, so that one system call carries as many as fit (`batch.rs`). The queues are in
//! `sender.rs`.

use super::batch::{Batch, TX_STAGE};
use super::ddp::{self, Untagged, queue};
use super::qp::QpMachine;
use super::rdmap::opcode;
use super::state::CoreState;
use crate::mem::IoVecs;

impl QpMachine {
    /// Encodes the next batch into `iov`. Returns the batch's length in bytes, 0 if there is
    /// nothing to send. Must not be called again before `tx_done`.
    pub(super) fn tx_prepare(&mut self, iov: &mut IoVecs) -> usize {
        iov.clear();
        let Some(terms) = self.terms else { return 0 };
        let Some(stage) = self.send_stage.slice(0, TX_STAGE) else { return 0 };
        let mut batch = Batch::new(stage, iov, terms.crc);
        match &mut self.failure {
            Some(failure) => {
                if let Some(terminate) = failure.terminate.take() {
                    let (payload, len) = terminate.encode();
                    let fields = Untagged { invalidate: 0, qn: queue::TERMINATE, msn: 1, mo: 0 };
                    batch.begin(&ddp::untagged(opcode::TERMINATE, true, fields, len));
                    batch.put(&payload[..len]);
                    batch.end(ddp::UNTAGGED_LEN + len);
                }
            }
            None => self.sender.encode(&mut batch, &terms),
        }
        batch.finish()
    }

    /// Handles the completed transfer of a whole batch to TCP.
    pub(super) fn tx_done(&mut self, core: &mut CoreState) {
        self.sender.hand_over();
        self.retire(core);
    }

    /// Returns true if `tx_prepare` would return data.
    pub(super) fn has_output(&self) -> bool {
        let Some(terms) = self.terms else { return false };
        match &self.failure {
            Some(failure) => failure.terminate.is_some(),
            None => self.sender.has_output(terms.ord),
        }
    }

    /// Returns true if everything posted has been handed to TCP and no read is pending.
    pub(super) fn is_drained(&self) -> bool {
        self.sender.is_drained()
    }
}
