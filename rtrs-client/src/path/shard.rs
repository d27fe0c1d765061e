//! One shard's connection on a path: its queue pair, receives, windows and chunk keys.
//!
//! All receives have the same size, 8 bytes (16 if answers carry times), because the server's
//! answers (with a fresh key) and bare immediates use the same queue. Every request is one RDMA
//! write with immediate; payload and header are gathered without copying.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rtrs_core::block::IoOp;
use rtrs_core::fabric::{
    Access, BindResult, CloseReason, ConnectParams, Fabric, FabricError, MemoryRegistration,
    ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, WcOp, Window, WorkCompletion, WorkRequest,
    WrOp,
};
use rtrs_core::ids::{ConnIndex, PathId, PermitId, ProviderIndex, QpNum};
use rtrs_core::mem::{MemSlice, Region};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{Close, Imm, MemBits, WriteMsg};

use super::fault::ConnectionFault;
use super::io::{ANSWER_SLOT, Answer, HEADER_SLOT, Request, WrId, answer_len};
use crate::engine::ctx::Ctx;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::device_table::NO_DEVICE;
use crate::engine::message::{Connect, Served};
use crate::engine::session::{Granted, PathShared, PathTarget};

/// Region of IO buffers as registered for this connection.
#[derive(Debug)]
struct DataRegion {
    registration: Arc<dyn MemoryRegistration>,
    /// One window per permit of this shard; without windows, the region's own key serves all reads.
    windows: Vec<Arc<dyn Window>>,
}

#[derive(Debug)]
struct Connection {
    qp: QpNum,
    pd: Arc<dyn ProtectionDomain>,
    headers: Arc<dyn MemoryRegistration>,
    receives: Arc<dyn MemoryRegistration>,
    /// Regions of IO buffers; None for regions that were detached.
    data: Vec<Option<DataRegion>>,
    /// Chunk addresses and keys, indexed by this shard's permits; empty until the path is up.
    chunks: Vec<RemoteMem>,
    /// Data region of each permit's open window.
    open_window: Vec<Option<usize>>,
    shared: Arc<PathShared>,
    /// Whether answers carry the server's times.
    timed: bool,
    ending: bool,
    /// Reason for ending the connection, if this shard ended it.
    why: Option<CloseReason>,
    /// Time of the latest receipt reported to the path's other shards.
    heard: Instant,
    unsignaled: u32,
    signal_every: u32,
}

/// Progress of taking the path out of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retiring {
    No,
    /// Requested in this epoch.
    Requested(u32),
    Reported,
}

/// Meaning of a completion.
#[derive(Debug)]
pub(crate) enum PathEvent {
    /// Nothing for the session.
    Nothing,
    /// A request was answered.
    Answer(Answer),
    /// This permit's window is closed.
    Revoked(PermitId),
}

/// One shard's part of one path.
pub(crate) struct PathShard {
    id: PathId,
    target: PathTarget,
    epoch: u32,
    /// Current or last device number and epoch of each device.
    served: Vec<Option<Served>>,
    /// Devices that the path serves.
    serves: DeviceSet,
    cid: ConnIndex,
    connection: Option<Connection>,
    range: Range<u16>,
    /// Number of this shard's requests in flight on this path.
    inflight: u32,
    /// Set once the path takes no new requests and the control shard waits until none is in flight.
    retiring: Retiring,
    header_region: Option<Arc<Region>>,
    recv_region: Option<Arc<Region>>,
}

impl PathShard {
    pub(crate) fn new(id: PathId, target: PathTarget) -> Self {
        Self {
            id,
            target,
            epoch: 0,
            served: Vec::new(),
            serves: DeviceSet::default(),
            cid: ConnIndex(0),
            connection: None,
            range: 0..0,
            inflight: 0,
            retiring: Retiring::No,
            header_region: None,
            recv_region: None,
        }
    }

    pub(crate) fn id(&self) -> PathId {
        self.id
    }

    /// Current or last device number and epoch for a device.
    fn served(&self, device: DeviceIndex) -> Option<&Served> {
        self.served.get(device.index())?.as_ref()
    }

    /// Cache epoch in which the path opened a device; 0 if the server does not report one.
    pub(crate) fn cache_id(&self, device: DeviceIndex) -> u64 {
        self.served(device).map_or(0, |served| served.cache_id)
    }

    /// The server's number for a device, on this path.
    pub(crate) fn device_id(&self, device: DeviceIndex) -> u32 {
        self.served(device).map_or(NO_DEVICE, |served| served.device_id)
    }

    /// Number of this shard's requests in flight on this path.
    pub(crate) fn inflight(&self) -> u32 {
        self.inflight
    }

    /// Records the end of a request or of its connection.
    pub(crate) fn request_left(&mut self) {
        self.inflight -= 1;
    }

    /// Records a request. Returns true if the path was idle, but only once.
    pub(crate) fn ends_idle(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.shared.ends_idle())
    }

    /// Records that requests of this shard are waiting for answers. Returns the same as
    /// [`Self::ends_idle`].
    pub(crate) fn waits(&self, now: Instant) -> bool {
        if let Some(connection) = &self.connection {
            connection.shared.waits(now);
        }
        self.ends_idle()
    }

    /// Name of the path, as in listings.
    pub(crate) fn name(&self) -> &str {
        &self.target.name
    }

    pub(crate) fn provider(&self) -> ProviderIndex {
        self.target.provider
    }

    /// Whether this is the path's queue pair on this shard.
    pub(crate) fn is(&self, provider: ProviderIndex, qp: QpNum) -> bool {
        self.target.provider == provider && self.connection.as_ref().is_some_and(|c| c.qp == qp)
    }

    /// Whether requests may be posted.
    pub(crate) fn is_up(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| !c.chunks.is_empty() && !c.ending)
    }

    /// Whether new requests for a device may be posted.
    pub(crate) fn takes_io_of(&self, device: DeviceIndex) -> bool {
        self.is_up() && self.retiring == Retiring::No && self.serves.contains(device)
    }

    /// Stops giving the path requests.
    pub(crate) fn retire(&mut self, epoch: u32) {
        self.retiring = Retiring::Requested(epoch);
    }

    /// Takes the epoch to report as retired.
    pub(crate) fn take_retiring(&mut self) -> Option<u32> {
        let Retiring::Requested(epoch) = self.retiring else { return None };
        self.retiring = Retiring::Reported;
        Some(epoch)
    }

    /// Last heartbeat round trip in nanoseconds; 0 if unknown.
    pub(crate) fn latency_ns(&self) -> u64 {
        self.connection.as_ref().map_or(0, |c| c.shared.latency_ns())
    }

    pub(crate) fn connect<'a>(
        &mut self,
        start: &Connect,
        range: Range<u16>,
        regions: impl Iterator<Item = &'a Arc<Region>>,
        timeout: Duration,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), FabricError> {
        debug_assert!(self.connection.is_none(), "the old connection has ended");
        self.range = range.clone();
        let permits = usize::from(range.end - range.start);
        let pd = Arc::clone(&start.pd);
        let windows = if self.target.invalidate_reads { permits } else { 0 };
        // A request is one write; each window also needs a bind and a revoke if they are requests.
        let depth = u32::from(range.end - range.start);
        let limits = QpLimits { send_max: depth * 4 + 8, recv_max: depth * 2 + 8 };
        let headers = region(&mut self.header_region, permits * HEADER_SLOT)?;
        let receives = region(&mut self.recv_region, limits.recv_max as usize * ANSWER_SLOT)?;
        let (now, fabric) = (ctx.now, ctx.fabrics[self.target.provider.index()].as_mut());
        let mut connection = Connection {
            qp: QpNum(0),
            headers: pd.register(&headers, Access::LOCAL_READ)?,
            receives: pd.register(&receives, Access::LOCAL)?,
            data: Vec::new(),
            chunks: Vec::new(),
            open_window: vec![None; permits],
            shared: Arc::clone(&start.shared),
            timed: start.timed,
            ending: false,
            why: None,
            heard: Instant::ZERO,
            unsignaled: 0,
            signal_every: (limits.send_max / 4).clamp(1, 64),
            pd,
        };
        for region in regions {
            connection.add_region(region, windows)?;
        }
        connection.qp = fabric.connect(
            now,
            &connection.pd,
            &ConnectParams {
                local: self.target.local,
                remote: start.remote,
                private_data: start.private_data,
                limits,
                timeout,
                peer_name: self.target.peer_name.clone(),
            },
        )?;
        for slot in 0..limits.recv_max {
            if let Err(error) = connection.post_receive(slot, self.id, fabric) {
                tracing::error!(path = %self.target.name, "receives not posted: {error}");
                fabric.abort(now, connection.qp);
                break;
            }
        }
        self.epoch = start.epoch;
        self.retiring = Retiring::No;
        self.cid = start.cid;
        self.connection = Some(connection);
        Ok(())
    }

    /// Returns the notification for the control shard when the connection is ready.
    pub(crate) fn established(&self) -> (PathId, u32, ConnIndex) {
        (self.id, self.epoch, self.cid)
    }

    /// Ends the connection, which can no longer reach memory. Returns the notification for the
    /// control shard, and the reason if this shard ended it.
    pub(crate) fn closed(&mut self) -> (PathId, u32, ConnIndex, Option<CloseReason>) {
        let why = self.connection.take().and_then(|connection| connection.why);
        (self.id, self.epoch, self.cid, why)
    }

    /// Completes the handshake with the path's chunks, indexed by the whole session's permits, and
    /// the devices that it serves.
    pub(crate) fn up(
        &mut self,
        epoch: u32,
        chunks: &[RemoteMem],
        range: Range<u16>,
        served: &[Served],
    ) {
        let Some(connection) = self.connection.as_mut() else { return };
        if self.epoch != epoch {
            return;
        }
        let (from, to) = (usize::from(range.start), usize::from(range.end));
        connection.chunks = chunks.get(from..to).map(<[RemoteMem]>::to_vec).unwrap_or_default();
        self.serves = DeviceSet::default();
        served.iter().for_each(|served| self.serve(epoch, *served));
    }

    /// Whether the path's connection belongs to this epoch.
    pub(crate) fn is_of(&self, epoch: u32) -> bool {
        self.epoch == epoch
    }

    /// Starts serving this device, if the connection belongs to this epoch.
    pub(crate) fn serve(&mut self, epoch: u32, served: Served) {
        if self.epoch != epoch {
            return;
        }
        let at = served.device.index();
        self.served.resize(self.served.len().max(at + 1), None);
        self.served[at] = Some(served);
        self.serves.insert(served.device);
    }

    /// Stops serving this device; requests in flight are still answered.
    pub(crate) fn leave(&mut self, device: DeviceIndex) {
        self.serves.remove(device);
    }

    /// Ends the connection if it belongs to this epoch.
    pub(crate) fn disconnect(&mut self, epoch: u32, in_order: bool, ctx: &mut Ctx<'_>) {
        if self.epoch != epoch {
            return;
        }
        let (now, fabric) = (ctx.now, ctx.fabrics[self.target.provider.index()].as_mut());
        if let Some(connection) = self.connection.as_mut() {
            connection.ending = true;
            if in_order {
                fabric.disconnect(now, connection.qp);
            } else {
                fabric.abort(now, connection.qp);
            }
        }
    }

    /// Ends the connection immediately, for this reason.
    pub(crate) fn abort(&mut self, now: Instant, why: CloseReason, fabric: &mut dyn Fabric) {
        if let Some(connection) = self.connection.as_mut()
            && !std::mem::replace(&mut connection.ending, true)
        {
            tracing::warn!(path = %self.target.name, "ending connection {}: {why}", self.cid);
            connection.why = Some(why);
            fabric.abort(now, connection.qp);
        }
    }

    /// Registers another region of IO buffers.
    pub(crate) fn attach_region(
        &mut self,
        region: &Arc<Region>,
        range: Range<u16>,
    ) -> Result<(), FabricError> {
        match self.connection.as_mut() {
            Some(connection) => {
                let permits = usize::from(range.end - range.start);
                let windows = if self.target.invalidate_reads { permits } else { 0 };
                connection.add_region(region, windows)
            }
            None => Ok(()),
        }
    }

    /// Forgets a region of IO buffers that nothing in flight uses.
    pub(crate) fn detach_region(&mut self, region: &Region) {
        let Some(connection) = self.connection.as_mut() else { return };
        for data in &mut connection.data {
            data.take_if(|data| data.registration.region().id() == region.id());
        }
    }

    pub(crate) fn post(
        &mut self,
        request: Request,
        granted: &Granted,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let row = usize::from(request.permit.0 - self.range.start);
        let Some(connection) = self.connection.as_mut().filter(|c| !c.ending) else {
            return Err(FabricError::QpState);
        };
        let chunk = *connection.chunks.get(row).ok_or(FabricError::QpState)?;
        let data = match &request.buf {
            Some(buf) => Some(find_data(&connection.data, buf)?),
            None => None,
        };
        let mut target = None;
        let answered = matches!(request.op, IoOp::Read | IoOp::Extents);
        if let (true, Some(buf), Some((at, region))) = (answered, &request.buf, data) {
            let addr = region.registration.base() + buf.offset() as u64;
            if region.windows.is_empty() {
                target = Some(RemoteMem { addr, rkey: region.registration.rkey() });
            } else {
                let bound = fabric.bind(
                    connection.qp,
                    &region.windows[row],
                    buf,
                    Access::REMOTE_WRITE,
                    WrId::Bind(request.permit).encode(self.id),
                )?;
                let (BindResult::Done(rkey) | BindResult::Pending(rkey)) = bound;
                target = Some(RemoteMem { addr, rkey });
                connection.open_window[row] = Some(at);
            }
        }
        let mut bytes = [0; HEADER_SLOT];
        let layout = request.encode(target, granted, &mut bytes);
        let slot = connection
            .headers
            .region()
            .slice(row * HEADER_SLOT, layout.header_len)
            .ok_or(FabricError::LocalMemory)?;
        slot.copy_in(0, &bytes[..layout.header_len]);
        let header = Sge { slice: slot, lkey: connection.headers.lkey() };
        let sges = match (request.op, request.buf, data) {
            (IoOp::Write, Some(buf), Some((_, region))) => {
                let lkey = region.registration.lkey();
                SgeList::two(Sge { slice: buf, lkey }, header)
            }
            _ => SgeList::one(header),
        };
        connection.unsignaled += 1;
        let signaled = connection.unsignaled >= connection.signal_every;
        if signaled {
            connection.unsignaled = 0;
        }
        let remote = RemoteMem { addr: chunk.addr + layout.chunk_offset, rkey: chunk.rkey };
        let op = WrOp::RdmaWrite { remote, imm: Some(layout.imm) };
        let wr_id = WrId::Request.encode(self.id);
        fabric.post_send(connection.qp, WorkRequest { wr_id, op, sges, signaled })?;
        self.inflight += 1;
        Ok(())
    }

    /// Time of the last receipt over this shard's connection.
    pub(crate) fn heard(&self) -> Instant {
        self.connection.as_ref().map_or(Instant::ZERO, |c| c.heard)
    }

    /// Posts a request that is answered without a device: the close of a device that was never
    /// opened.
    pub(crate) fn post_probe(
        &mut self,
        permit: PermitId,
        granted: &Granted,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let row = usize::from(permit.0 - self.range.start);
        let Some(connection) = self.connection.as_mut().filter(|c| !c.ending) else {
            return Err(FabricError::QpState);
        };
        let chunk = *connection.chunks.get(row).ok_or(FabricError::QpState)?;
        let user = Close { device_id: NO_DEVICE }.encode();
        let message = WriteMsg { usr_len: Close::LEN as u16 }.encode();
        let slot = connection
            .headers
            .region()
            .slice(row * HEADER_SLOT, user.len() + message.len())
            .ok_or(FabricError::LocalMemory)?;
        slot.copy_in(0, &user);
        slot.copy_in(user.len(), &message);
        let imm = Imm::Request { permit, offset: Close::LEN as u32 };
        let imm = imm.encode_with(MemBits::for_depth(granted.queue_depth));
        let sges = SgeList::one(Sge { slice: slot, lkey: connection.headers.lkey() });
        let op = WrOp::RdmaWrite { remote: chunk, imm: Some(imm) };
        let wr_id = WrId::Request.encode(self.id);
        fabric.post_send(connection.qp, WorkRequest { wr_id, op, sges, signaled: true })
    }

    /// Moves the data of an answered read to its pieces, if the provider cannot place it there.
    pub(crate) fn collect(&self, memory: &MemSlice) {
        let data = self.connection.as_ref().map(|connection| find_data(&connection.data, memory));
        if let Some(Ok((_, region))) = data
            && !rtrs_core::mutated!(ReadNotCollected)
        {
            region.registration.collect(memory);
        }
    }

    /// Revokes the server's key for the permit's read target. Returns true if the key is now
    /// invalid, false if a [`PathEvent::Revoked`] will follow.
    pub(crate) fn close_window(
        &mut self,
        permit: PermitId,
        fabric: &mut dyn Fabric,
    ) -> Result<bool, FabricError> {
        let row = usize::from(permit.0 - self.range.start);
        if rtrs_core::mutated!(ReadWindowKept) {
            return Ok(true);
        }
        let Some(connection) = self.connection.as_mut() else { return Ok(true) };
        let Some(data) = connection.open_window[row].take() else { return Ok(true) };
        let Some(data) = connection.data[data].as_ref() else { return Ok(true) };
        let window = &data.windows[row];
        let wr_id = WrId::Revoke(permit).encode(self.id);
        match fabric.revoke(connection.qp, window, wr_id)? {
            BindResult::Done(_) => Ok(true),
            BindResult::Pending(_) => Ok(rtrs_core::mutated!(RevokeNotAwaited)),
        }
    }

    /// Handles the successful completion of a work request on this path's queue pair.
    pub(crate) fn on_completion(
        &mut self,
        now: Instant,
        work: WrId,
        wc: &WorkCompletion,
        fabric: &mut dyn Fabric,
    ) -> Result<PathEvent, ConnectionFault> {
        let Some(connection) = self.connection.as_mut() else { return Ok(PathEvent::Nothing) };
        match work {
            WrId::Receive(slot) => {
                // Once per turn: all completions in a turn carry the same time.
                if now > connection.heard {
                    connection.heard = now;
                    connection.shared.received(now);
                }
                let mut bytes = [0; ANSWER_SLOT];
                let len = if wc.op == WcOp::Recv { wc.byte_len as usize } else { 0 };
                if len > ANSWER_SLOT {
                    return Err(ConnectionFault::AnswerSize(len));
                }
                connection.receives.region().copy_out(slot as usize * ANSWER_SLOT, &mut bytes);
                // An ending connection takes no more receives, but earlier answers still count.
                if !connection.ending
                    && let Err(error) = connection.post_receive(slot, self.id, fabric)
                {
                    return Err(ConnectionFault::receive(&error));
                }
                let Some(imm) = wc.imm else {
                    // A standalone send with invalidate, which this client never requests.
                    return Ok(PathEvent::Nothing);
                };
                let Some(answer) = Answer::decode(imm, &bytes[..len], connection.timed)? else {
                    return Ok(PathEvent::Nothing);
                };
                let row = usize::from(answer.permit.0.wrapping_sub(self.range.start));
                if let (Some(rkey), Some(chunk)) = (answer.rkey, connection.chunks.get_mut(row)) {
                    chunk.rkey =
                        if rtrs_core::mutated!(FreshKeyDropped) { chunk.rkey } else { rkey };
                }
                Ok(PathEvent::Answer(answer))
            }
            WrId::Revoke(permit) => Ok(PathEvent::Revoked(permit)),
            WrId::Request | WrId::Bind(_) => Ok(PathEvent::Nothing),
        }
    }
}

impl Connection {
    /// Registers a region of IO buffers and allocates `windows` windows on it. Without windows, the
    /// whole region is open to the server for the lifetime of the path.
    fn add_region(&mut self, region: &Arc<Region>, windows: usize) -> Result<(), FabricError> {
        let access = if windows == 0 { Access::REMOTE_WRITE } else { Access::LOCAL };
        let registration = self.pd.register(region, access)?;
        let windows =
            (0..windows).map(|_| self.pd.window(&registration)).collect::<Result<_, _>>()?;
        let data = Some(DataRegion { registration, windows });
        match self.data.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = data,
            None => self.data.push(data),
        }
        Ok(())
    }

    fn post_receive(
        &self,
        slot: u32,
        path: PathId,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let slice = self
            .receives
            .region()
            .slice(slot as usize * ANSWER_SLOT, answer_len(self.timed))
            .ok_or(FabricError::LocalMemory)?;
        let sge = Sge { slice, lkey: self.receives.lkey() };
        fabric.post_recv(self.qp, WrId::Receive(slot).encode(path), Some(sge))
    }
}

/// Finds the registered region that contains a buffer, with its index.
fn find_data<'a>(
    data: &'a [Option<DataRegion>],
    buf: &MemSlice,
) -> Result<(usize, &'a DataRegion), FabricError> {
    let id = buf.region().id();
    let mut known = data.iter().enumerate().filter_map(|(at, data)| Some((at, data.as_ref()?)));
    let found = known.find(|(_, data)| data.registration.region().id() == id);
    found.ok_or(FabricError::LocalMemory)
}

/// Returns the region in `slot`, which is allocated on first use and kept across reconnects.
fn region(slot: &mut Option<Arc<Region>>, len: usize) -> Result<Arc<Region>, FabricError> {
    if let Some(region) = slot.as_ref().filter(|r| r.len() >= len) {
        return Ok(Arc::clone(region));
    }
    let made =
        Region::new(len.max(1)).map_err(|e| FabricError::system("memory for a connection", e))?;
    *slot = Some(Arc::clone(&made));
    Ok(made)
}

impl fmt::Debug for PathShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PathShard")
            .field("id", &self.id)
            .field("epoch", &self.epoch)
            .field("up", &self.is_up())
            .field("inflight", &self.inflight)
            .finish_non_exhaustive()
    }
}
