//! Messages, buffers and work request IDs used by both ends of a ping.

use std::sync::Arc;

use crate::fabric::{
    Access, Fabric, FabricError, MemoryRegistration, ProtectionDomain, QpLimits, RemoteMem, Sge,
    SgeList, WorkRequest, WrOp,
};
use crate::ids::QpNum;
use crate::mem::{MemSlice, Region};
use crate::time::Duration;
use crate::wire::PingInfo;

/// Number of receives posted at each end.
pub(super) const RECVS: u64 = 4;
/// Length of a receive: longer than a message, so that an oversized message is detected.
const RECV_LEN: usize = 64;
/// Offset of the receives in the message buffer.
const RECV_BASE: usize = 256;
/// Work request that sends a message.
pub(super) const WR_MESSAGE: u64 = 100;
/// Work request that binds a window, with the buffer in the low bits.
pub(super) const WR_BIND: u64 = 200;
/// Work request that moves data.
pub(super) const WR_DATA: u64 = 300;
/// Interval between a client's keepalives in the one-sided modes.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Values of `size` in a message without a key: the client is done, or is still alive.
pub(super) const SAYS_DONE: u32 = 0;
pub(super) const SAYS_ALIVE: u32 = 1;

/// Returns the queue limits of a ping with this depth.
pub(super) fn limits(depth: u16) -> QpLimits {
    QpLimits { send_max: u32::from(depth) + 8, recv_max: 8 }
}

fn memory(error: std::io::Error) -> FabricError {
    FabricError::system("cannot allocate memory for a ping", error)
}

/// Registered memory of a ping.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub(super) registration: Arc<dyn MemoryRegistration>,
    pub(super) len: usize,
}

impl Buffer {
    pub(super) fn new(
        pd: &Arc<dyn ProtectionDomain>,
        len: usize,
        access: Access,
    ) -> Result<Self, FabricError> {
        let region = Region::new(len.max(1)).map_err(memory)?;
        Ok(Self { registration: pd.register(&region, access)?, len })
    }

    /// Returns the range `at..at + len`, which must lie within the buffer.
    pub(super) fn slice(&self, at: usize, len: usize) -> MemSlice {
        let region = self.registration.region();
        region.slice(at, len).unwrap_or_else(|| panic!("{at}..+{len} outside a ping's buffer"))
    }

    pub(super) fn all(&self) -> MemSlice {
        self.slice(0, self.len)
    }

    pub(super) fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { slice: self.slice(at, len), lkey: self.registration.lkey() }
    }

    /// Returns the description of the buffer for the peer.
    pub(super) fn info(&self) -> PingInfo {
        PingInfo {
            addr: self.registration.base(),
            rkey: self.registration.rkey(),
            #[allow(clippy::cast_possible_truncation, reason = "at most 1 MiB")]
            size: self.len as u32,
        }
    }
}

/// Message buffers of one connection.
#[derive(Debug)]
pub(super) struct Messages {
    pub(super) buffer: Buffer,
    /// Index of the next send buffer; there is one for each message in flight.
    next: usize,
}

impl Messages {
    /// Number of send buffers.
    const PLACES: usize = 8;

    pub(super) fn new(pd: &Arc<dyn ProtectionDomain>) -> Result<Self, FabricError> {
        let buffer = Buffer::new(pd, RECV_BASE + RECVS as usize * RECV_LEN, Access::LOCAL)?;
        Ok(Self { buffer, next: 0 })
    }

    /// Returns a receive's offset in the buffer.
    fn recv_at(at: u64) -> usize {
        RECV_BASE + usize::try_from(at).unwrap_or(0) * RECV_LEN
    }

    pub(super) fn post_recv(
        &self,
        fabric: &mut dyn Fabric,
        qp: QpNum,
        at: u64,
    ) -> Result<(), FabricError> {
        fabric.post_recv(qp, at, Some(self.buffer.sge(Self::recv_at(at), RECV_LEN)))
    }

    pub(super) fn post_all(&self, fabric: &mut dyn Fabric, qp: QpNum) -> Result<(), FabricError> {
        (0..RECVS).try_for_each(|at| self.post_recv(fabric, qp, at))
    }

    /// Returns the message in a receive, or the length of an invalid one.
    pub(super) fn take(&self, at: u64, len: u32) -> Result<PingInfo, u32> {
        if len as usize != PingInfo::LEN {
            return Err(len);
        }
        let mut bytes = [0; PingInfo::LEN];
        self.buffer.slice(Self::recv_at(at), PingInfo::LEN).copy_out(0, &mut bytes);
        Ok(PingInfo::decode(&bytes))
    }

    /// Sends a message with this operation.
    pub(super) fn send(
        &mut self,
        fabric: &mut dyn Fabric,
        qp: QpNum,
        info: &PingInfo,
        op: WrOp,
    ) -> Result<(), FabricError> {
        let at = self.next * PingInfo::LEN;
        self.next = (self.next + 1) % Self::PLACES;
        self.buffer.slice(at, PingInfo::LEN).copy_in(0, &info.encode());
        let sges = SgeList::one(self.buffer.sge(at, PingInfo::LEN));
        fabric.post_send(qp, WorkRequest { wr_id: WR_MESSAGE, op, sges, signaled: true })
    }
}

/// A plain send.
pub(super) const SEND: WrOp = WrOp::Send { imm: None, invalidate: None };

pub(super) fn remote(info: &PingInfo) -> RemoteMem {
    RemoteMem { addr: info.addr, rkey: info.rkey }
}
