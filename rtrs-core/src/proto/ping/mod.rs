//! Both ends of the ping, as state machines over any provider: [`PingClient`], one queue pair of a
//! tool that pings, and [`PingServer`], all pings of a server.
//!
//! Inputs are events of the provider and the time; outputs are work requests to the [`Fabric`]. The
//! machines use no sockets or clocks. Each connection has a protection domain of its own that
//! contains only its buffers, so neither end can access other memory of the peer's process. Any
//! misbehavior or silence of the peer ends in an error within a limited time. Messages:
//! `wire/ping.rs`.

mod client;
mod conn;
mod event;
mod server;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use client::{PingClient, PingClientConfig};
pub use event::{PingEvent, PingFailure};
pub use server::{PingServer, PingServerConfig, PingServerStats};

use crate::fabric::{
    Access, Fabric, FabricError, MemoryRegistration, ProtectionDomain, QpLimits, RemoteMem, Sge,
    SgeList, WorkRequest, WrOp,
};
use crate::ids::QpNum;
use crate::mem::{MemSlice, Region};
use crate::time::Duration;
use crate::wire::PingInfo;

/// Number of receives posted on either end.
const RECVS: u64 = 4;
/// Length of a receive: more than a message, so that a longer one is detected.
const RECV_LEN: usize = 64;
/// Offset of the receives in the message buffer.
const RECV_BASE: usize = 256;
/// Work request that sends a message.
const WR_MESSAGE: u64 = 100;
/// Work request that binds a window, with the buffer in the low bits.
const WR_BIND: u64 = 200;
/// Work request that moves data.
const WR_DATA: u64 = 300;
/// Interval of a client's signs of life in the one-sided modes.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Value of `size` in a message without a key: the client is done, or is still alive.
const SAYS_DONE: u32 = 0;
const SAYS_ALIVE: u32 = 1;

/// Returns the queue limits of a ping with this depth.
fn limits(depth: u16) -> QpLimits {
    QpLimits { send_max: u32::from(depth) + 8, recv_max: 8 }
}

fn memory(error: std::io::Error) -> FabricError {
    FabricError::system("cannot get memory for a ping", error)
}

/// Registered memory of a ping.
#[derive(Clone, Debug)]
struct Buffer {
    registration: Arc<dyn MemoryRegistration>,
    len: usize,
}

impl Buffer {
    fn new(
        pd: &Arc<dyn ProtectionDomain>,
        len: usize,
        access: Access,
    ) -> Result<Self, FabricError> {
        let region = Region::new(len.max(1)).map_err(memory)?;
        Ok(Self { registration: pd.register(&region, access)?, len })
    }

    /// Returns the part `at..at + len`, which must lie inside.
    fn slice(&self, at: usize, len: usize) -> MemSlice {
        let region = self.registration.region();
        region.slice(at, len).unwrap_or_else(|| panic!("{at}..+{len} outside a ping's buffer"))
    }

    fn all(&self) -> MemSlice {
        self.slice(0, self.len)
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { slice: self.slice(at, len), lkey: self.registration.lkey() }
    }

    /// Returns the buffer's description for the peer.
    fn info(&self) -> PingInfo {
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
struct Messages {
    buffer: Buffer,
    /// Index of the next send buffer; there are as many as messages in flight.
    next: usize,
}

impl Messages {
    /// Number of send buffers.
    const PLACES: usize = 8;

    fn new(pd: &Arc<dyn ProtectionDomain>) -> Result<Self, FabricError> {
        let buffer = Buffer::new(pd, RECV_BASE + RECVS as usize * RECV_LEN, Access::LOCAL)?;
        Ok(Self { buffer, next: 0 })
    }

    /// Returns the offset of a receive in the buffer.
    fn recv_at(at: u64) -> usize {
        RECV_BASE + usize::try_from(at).unwrap_or(0) * RECV_LEN
    }

    fn post_recv(&self, fabric: &mut dyn Fabric, qp: QpNum, at: u64) -> Result<(), FabricError> {
        fabric.post_recv(qp, at, Some(self.buffer.sge(Self::recv_at(at), RECV_LEN)))
    }

    fn post_all(&self, fabric: &mut dyn Fabric, qp: QpNum) -> Result<(), FabricError> {
        (0..RECVS).try_for_each(|at| self.post_recv(fabric, qp, at))
    }

    /// Returns the message in a receive, or its length if it is invalid.
    fn take(&self, at: u64, len: u32) -> Result<PingInfo, u32> {
        if len as usize != PingInfo::LEN {
            return Err(len);
        }
        let mut bytes = [0; PingInfo::LEN];
        self.buffer.slice(Self::recv_at(at), PingInfo::LEN).copy_out(0, &mut bytes);
        Ok(PingInfo::decode(&bytes))
    }

    /// Sends a message with this operation.
    fn send(
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
const SEND: WrOp = WrOp::Send { imm: None, invalidate: None };

fn remote(info: &PingInfo) -> RemoteMem {
    RemoteMem { addr: info.addr, rkey: info.rkey }
}
