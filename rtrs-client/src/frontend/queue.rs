//! Front end for a program that uses the volume within its own process, through queues.
//!
//! Each shard has one queue. Its user submits requests through a mailbox, which wakes the shard,
//! and receives the outcomes through an event queue. The memory of a request is in the user's
//! regions; a scattered pool presents it to the session as one range. Memory that is one piece of a
//! registered region is used in place.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{BlockDevice, Geometry, Io, IoFlags, IoOp};
use rtrs_core::ids::CoreIndex;
use rtrs_core::mem::{MemSlice, Pool, Region, ScatterError};
use rtrs_core::rt::{EventReceiver, EventSender, Inbox, Mailbox, Sender, event_queue, mailbox};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::front_end::{
    FrontEnd, FrontRequest, FrontSocket, MakeFrontEnds, MemoryChange, MemoryChangeKind, Place,
};
use crate::engine::SessionDevice;

/// Limits of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    /// Maximum number of requests in flight.
    pub(crate) depth: u16,
    /// Maximum memory per request, in bytes.
    pub(crate) io_max: u32,
}

/// Memory of a request.
#[derive(Debug)]
pub enum Pieces {
    /// No memory.
    None,
    /// Memory in one piece.
    One(MemSlice),
    /// Memory in several pieces, at most [`PIECES_MAX`](rtrs_core::mem::PIECES_MAX).
    Several(Vec<MemSlice>),
}

/// Request of a queue's user.
#[derive(Debug)]
pub struct Submission {
    /// Number of the request, unique among those in flight on its queue.
    pub slot: u32,
    /// Operation.
    pub op: IoOp,
    /// Modifiers.
    pub flags: IoFlags,
    /// Offset of the first byte on the volume; 0 for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u32,
    /// Memory for a read, a write, or an extent list.
    pub memory: Pieces,
}

/// Outcome of a [`Submission`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Number of the request.
    pub slot: u32,
    /// Status of the IO.
    pub status: IoStatus,
}

/// User's end of a queue.
#[derive(Debug)]
pub struct QueueUser {
    /// Submits requests. At most the queue depth may be in flight.
    pub submissions: Sender<Submission>,
    /// Outcomes of requests; closed once the session has ended.
    pub outcomes: EventReceiver<Outcome>,
}

/// Session's end of a queue.
#[derive(Debug)]
pub(crate) struct QueueServer {
    submissions: Mailbox<Submission>,
    outcomes: EventSender<Outcome>,
}

/// Creates a queue.
///
/// # Errors
/// Returns the system's error if no descriptors are left.
pub(crate) fn queue(limits: QueueLimits) -> io::Result<(QueueUser, QueueServer)> {
    let (submissions, inbox) = mailbox()?;
    let (sender, outcomes) = event_queue(limits.depth.into())?;
    let server = QueueServer { submissions: inbox, outcomes: sender };
    Ok((QueueUser { submissions, outcomes }, server))
}

/// Callback for a change, with the old and the new geometry.
type OnChange = dyn Fn(&Geometry, &Geometry) + Send + Sync;

/// Geometry of the volume, and the callback for its changes.
pub(crate) struct GeometryWatch {
    pub(crate) now: Mutex<Geometry>,
    /// Called by the control shard.
    pub(crate) changed: Box<OnChange>,
}

impl GeometryWatch {
    /// Adopts the control shard's current geometry.
    fn look(&self, geometry: &Geometry) {
        let mut now = self.now.lock();
        if *now != *geometry {
            let before = std::mem::replace(&mut *now, geometry.clone());
            drop(now);
            (self.changed)(&before, geometry);
        }
    }
}

/// Returns front ends that serve these queues, one on each shard.
pub(crate) fn queues(
    servers: Vec<QueueServer>,
    limits: QueueLimits,
    geometry: &Arc<GeometryWatch>,
) -> MakeFrontEnds {
    let geometry = Arc::clone(geometry);
    Box::new(move |shards| {
        let mut servers = servers.into_iter();
        shards.each(|_| {
            let (server, geometry) = (servers.next(), Arc::clone(&geometry));
            Box::new(move || {
                let early = Vec::new();
                Box::new(QueueFront { limits, geometry, server, running: None, early })
            })
        })
    })
}

struct QueueFront {
    limits: QueueLimits,
    geometry: Arc<GeometryWatch>,
    /// Session's end of the queue, until the device is open on this shard.
    server: Option<QueueServer>,
    running: Option<Running>,
    /// Memory changes that arrived before the device was open on this shard. The user may register
    /// memory once the device is open on the control shard.
    early: Vec<MemoryChange>,
}

/// Queue with an open device.
struct Running {
    shard: CoreIndex,
    device: SessionDevice,
    submissions: Inbox<Submission>,
    outcomes: EventSender<Outcome>,
    /// One buffer for each request in flight; the buffer's number is the tag of the IO.
    pool: Pool,
    /// Slot of the request that uses each buffer.
    slots: Vec<u32>,
    /// ID of the registered region that holds the memory of each buffer's request.
    lies_in: Vec<Option<u64>>,
    registered: Vec<Registered>,
    /// IO that the device refused because its queue was full.
    refused: Option<Io>,
}

/// Memory that the user has registered.
struct Registered {
    region: Arc<Region>,
    /// Number of requests in flight that use the memory.
    inflight: u32,
    /// Deregistration that waits for these requests. New requests treat the memory as unregistered.
    leaving: Option<MemoryChange>,
}

impl Running {
    fn new(
        place: &Place<'_>,
        mut device: SessionDevice,
        server: QueueServer,
        limits: QueueLimits,
    ) -> io::Result<Self> {
        let pool = Pool::scattered(limits.depth.into(), limits.io_max as usize)?;
        device.attach_region(pool.region())?;
        Ok(Self {
            shard: place.shard,
            device,
            submissions: server.submissions.arm(place.ring)?,
            outcomes: server.outcomes,
            pool,
            slots: vec![0; limits.depth.into()],
            lies_in: vec![None; limits.depth.into()],
            registered: Vec::new(),
            refused: None,
        })
    }

    fn change_memory(&mut self, change: MemoryChange) {
        let id = change.region.id();
        let known = self.registered.iter_mut().find(|known| known.region.id() == id);
        match (change.kind, known) {
            (MemoryChangeKind::Register, None) => {
                let attached = self.device.attach_region(&change.region);
                if attached.is_ok() {
                    let region = Arc::clone(&change.region);
                    self.registered.push(Registered { region, inflight: 0, leaving: None });
                }
                change.reply(attached);
            }
            (MemoryChangeKind::Register, Some(known)) => {
                known.leaving = None;
                change.reply(Ok(()));
            }
            (MemoryChangeKind::Unregister, None) => change.reply(Ok(())),
            (MemoryChangeKind::Unregister, Some(known)) => {
                known.leaving = Some(change);
                self.drop_memory();
            }
        }
    }

    /// Deregisters leaving memory that no request in flight uses.
    fn drop_memory(&mut self) {
        let is_due = |known: &mut Registered| known.inflight == 0 && known.leaving.is_some();
        for Registered { region, leaving, .. } in self.registered.extract_if(.., is_due) {
            self.device.detach_region(&region);
            leaving.into_iter().for_each(|change| change.reply(Ok(())));
        }
    }

    /// Takes back a buffer whose request has ended.
    fn give(&mut self, buffer: u32) {
        // The memory returns to the user only if nothing else holds it.
        self.pool.give(buffer);
        let Some(id) = self.lies_in[buffer as usize].take() else { return };
        let known = self.registered.iter_mut().find(|known| known.region.id() == id);
        if let Some(known) = known {
            known.inflight -= 1;
            if known.leaving.is_some() {
                self.drop_memory();
            }
        }
    }

    /// Returns memory for an IO in one piece: in place if it is registered.
    fn place(&mut self, buffer: u32, piece: MemSlice) -> Result<MemSlice, ScatterError> {
        let id = piece.region().id();
        let fits = |known: &&mut Registered| known.region.id() == id && known.leaving.is_none();
        let Some(known) = self.registered.iter_mut().find(fits) else {
            return self.pool.assign(buffer, [piece]);
        };
        known.inflight += 1;
        self.lies_in[buffer as usize] = Some(id);
        Ok(piece)
    }

    /// Reports the outcomes of completed IOs. Returns whether there were any.
    fn reap(&mut self) -> bool {
        let mut any = false;
        while let Some(done) = self.device.reap() {
            any = true;
            let Ok(buffer) = u32::try_from(done.tag) else { continue };
            self.give(buffer);
            self.end(self.slots[buffer as usize], done.status);
        }
        any
    }

    fn end(&self, slot: u32, status: IoStatus) {
        if self.outcomes.send(Outcome { slot, status }).is_err() {
            tracing::error!("outcome dropped: more requests are in flight than the queue depth");
        }
    }

    /// Submits the IO that the device refused, then new requests until the device's queue is full.
    /// Returns whether there were new requests.
    fn submit(&mut self) -> bool {
        let mut any = false;
        loop {
            let io = match self.refused.take() {
                Some(io) => io,
                None => {
                    // The next request wakes the shard only if all earlier ones have been taken.
                    let Some(submission) = self.submissions.take_or_watch() else { return any };
                    any = true;
                    let Some(io) = self.io(submission) else { continue };
                    io
                }
            };
            if let Err(io) = self.device.submit(io) {
                self.refused = Some(io);
                return any;
            }
        }
    }

    /// Converts a request to an IO. Returns None if the request's memory cannot be used.
    fn io(&mut self, submission: Submission) -> Option<Io> {
        let Submission { slot, op, flags, offset, len, memory } = submission;
        let Some(buffer) = self.pool.take() else {
            self.end(slot, IoStatus::NoMemory);
            return None;
        };
        self.slots[buffer as usize] = slot;
        let assigned = match memory {
            Pieces::None => Ok(None),
            Pieces::One(piece) => self.place(buffer, piece).map(Some),
            Pieces::Several(pieces) => self.pool.assign(buffer, pieces).map(Some),
        };
        let Ok(buf) = assigned else {
            self.pool.give(buffer);
            self.end(slot, IoStatus::Invalid);
            return None;
        };
        Some(Io { tag: buffer.into(), op, flags, offset, len, buf })
    }
}

impl FrontEnd for QueueFront {
    fn open(&mut self, _now: Instant, place: &Place<'_>, device: SessionDevice) -> io::Result<()> {
        let Some(server) = self.server.take() else { return Ok(()) };
        let mut running = Running::new(place, device, server, self.limits)?;
        if place.shard.0 == 0 {
            *self.geometry.now.lock() = running.device.geometry().clone();
        }
        self.early.drain(..).for_each(|change| running.change_memory(change));
        self.running = Some(running);
        Ok(())
    }

    /// Does nothing: a queue has no clients.
    fn take_socket(&mut self, _now: Instant, _socket: FrontSocket) {}

    fn change_memory(&mut self, change: MemoryChange) {
        match &mut self.running {
            Some(running) => running.change_memory(change),
            None => self.early.push(change),
        }
    }

    fn turn(&mut self, now: Instant) -> bool {
        let Some(running) = &mut self.running else { return false };
        let any = running.device.poll(now);
        if running.shard.0 == 0 {
            self.geometry.look(running.device.geometry());
        }
        let any = any | running.reap();
        any | running.submit()
    }

    fn next_request(&mut self) -> Option<FrontRequest> {
        None
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Does nothing: requests submitted before the stop count as IO in flight, and the user submits
    /// none afterwards.
    fn stop(&mut self) {}

    fn abort(&mut self) {
        if let Some(running) = &mut self.running {
            running.device.close();
        }
    }

    fn is_idle(&self) -> bool {
        self.running.as_ref().is_none_or(|running| {
            let unsent = running.refused.is_some() || !running.submissions.is_empty();
            !unsent && running.device.inflight() == 0
        })
    }
}
