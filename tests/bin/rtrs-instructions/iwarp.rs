//! Writes with immediate data between two iWARP connections on one thread.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use rtrs_core::fabric::{
    Access, ConnectParams, Fabric, FabricEvent, Listener, MemoryRegistration, PdUse, PrivateData,
    ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, WcOp, WorkRequest, WrOp,
};
use rtrs_core::ids::QpNum;
use rtrs_core::mem::Region;
use rtrs_core::rt::{Clock, Ring};
use rtrs_core::time::Duration;

/// Bytes of a write.
const SIZE: usize = 4096;
/// Writes in flight.
const DEPTH: u64 = 8;
/// Maximum time for a scene; valgrind is slow.
const TIME_MAX: Duration = Duration::from_secs(120);

struct End {
    ring: Rc<Ring>,
    fabric: IwarpFabric,
    pd: Arc<dyn ProtectionDomain>,
    memory: Arc<dyn MemoryRegistration>,
    qp: Option<QpNum>,
    /// Number of the peer's writes that have arrived.
    arrived: u64,
    /// Number of own writes that have completed.
    ended: u64,
}

impl End {
    fn new(local: Option<SocketAddr>) -> io::Result<Self> {
        let ring = Ring::new(256)?;
        let shared = IwarpShared::new();
        let mut fabric = IwarpFabric::new(&ring, shared, IwarpOptions::default());
        let remote = SocketAddr::from(([127, 0, 0, 1], 0));
        let local = local.map(|address| address.ip());
        let pd = fabric.alloc_pd(PdUse::Connect { local, remote }).map_err(io::Error::other)?;
        let region = Region::new(SIZE * DEPTH as usize)?;
        region.fill(0, region.len(), 1);
        let memory = pd.register(&region, Access::REMOTE_WRITE).map_err(io::Error::other)?;
        Ok(Self { ring, fabric, pd, memory, qp: None, arrived: 0, ended: 0 })
    }

    fn limits() -> QpLimits {
        QpLimits { send_max: 2 * DEPTH as u32, recv_max: 2 * DEPTH as u32 }
    }

    /// Does what is possible now, or waits up to a millisecond for something to do. Returns whether
    /// anything happened.
    fn turn(&mut self, waits: bool) -> io::Result<bool> {
        let now = Clock.now();
        if waits {
            self.ring.turn_or_sleep(Some(Duration::from_millis(1)))?;
        } else {
            self.ring.turn()?;
        }
        let busy = self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            match event {
                FabricEvent::Request(request) => {
                    let (limits, data) = (Self::limits(), PrivateData::EMPTY);
                    let accepted = self.fabric.accept(now, &self.pd, *request, limits, &data);
                    self.established(accepted.map_err(io::Error::other)?)?;
                }
                FabricEvent::Established { qp, .. } => {
                    if self.qp.is_none() {
                        self.established(qp)?;
                    }
                }
                FabricEvent::Completion(wc) if wc.op == WcOp::RecvRdmaWithImm => {
                    self.arrived += 1;
                    self.fabric.post_recv(wc.qp, 0, None).map_err(io::Error::other)?;
                }
                FabricEvent::Completion(_) => self.ended += 1,
                FabricEvent::ConnectFailed { failure, .. } => {
                    return Err(io::Error::other(format!("{failure:?}")));
                }
                FabricEvent::Closed { reason, .. } => {
                    return Err(io::Error::other(format!("{reason:?}")));
                }
            }
        }
        self.fabric.flush(now);
        Ok(busy)
    }

    fn established(&mut self, qp: QpNum) -> io::Result<()> {
        self.qp = Some(qp);
        for _ in 0..2 * DEPTH {
            self.fabric.post_recv(qp, 0, None).map_err(io::Error::other)?;
        }
        Ok(())
    }

    fn write(&mut self, number: u64, to: RemoteMem) -> io::Result<()> {
        let at = (number % DEPTH) as usize * SIZE;
        let slice = self.memory.region().slice(at, SIZE).expect("inside the region");
        let sges = SgeList::one(Sge { slice, lkey: self.memory.lkey() });
        let remote = RemoteMem { addr: to.addr + at as u64, rkey: to.rkey };
        let op = WrOp::RdmaWrite { remote, imm: Some(number as u32) };
        let wr = WorkRequest { wr_id: number, op, sges, signaled: true };
        let qp = self.qp.ok_or_else(|| io::Error::other("not connected"))?;
        self.fabric.post_send(qp, wr).map_err(io::Error::other)
    }
}

/// Writes 4 KiB with immediate data `count` times over a connection, `DEPTH` at a time.
pub(crate) fn run(count: u64) -> io::Result<()> {
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut ends = [End::new(Some(listen))?, End::new(None)?];
    let [server, client] = &mut ends;
    let address = server.fabric.listen(listen).map_err(io::Error::other)?;
    let params = ConnectParams {
        local: None,
        remote: address,
        private_data: PrivateData::EMPTY,
        limits: End::limits(),
        timeout: Duration::from_secs(30),
        peer_name: None,
    };
    let pd = Arc::clone(&client.pd);
    client.fabric.connect(Clock.now(), &pd, &params).map_err(io::Error::other)?;
    let start = Clock.now();
    let overdue = || Clock.now().since(start) > TIME_MAX;
    while client.qp.is_none() || server.qp.is_none() {
        if overdue() {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        server.turn(true)?;
        client.turn(true)?;
    }
    let to = RemoteMem { addr: server.memory.base(), rkey: server.memory.rkey() };
    let (mut sent, mut idle) = (0, false);
    while server.arrived < count || client.ended < count {
        while sent < count && sent < server.arrived + DEPTH && sent < client.ended + DEPTH {
            client.write(sent, to)?;
            sent += 1;
        }
        // A turn that finds nothing costs instructions too, so idle ends wait.
        idle = !(client.turn(idle)? | server.turn(idle)?);
        if overdue() {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
    }
    Ok(())
}
