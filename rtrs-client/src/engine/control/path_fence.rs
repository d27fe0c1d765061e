//! IO state of a path, and the requests that a dead path may still deliver.

use std::sync::Arc;

use rtrs_core::fabric::RemoteMem;
use rtrs_core::identity::{ServerId, ServerProcess};
use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;

use crate::engine::device_set::{DeviceIndex, DeviceSet};

/// Server and volumes of a path that carried IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Carried {
    pub(super) server: Option<ServerId>,
    pub(super) process: ServerProcess,
    pub(super) volumes: DeviceSet,
}

/// Last epoch in which a path carried IO; kept while its requests may still be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lost {
    epoch: u32,
    recon_cnt: u16,
    carried: Carried,
    /// Another process on that server that refused to answer for `process`.
    refused_by: Option<ServerProcess>,
    /// Path over which the fence was requested, and the deadline for the answer.
    asked: Option<(PathId, Instant)>,
    /// Whether the server has confirmed the fence while connections are still open on this side.
    answered: bool,
}

/// Tracks whether a path carries IO, waits for other paths' fences, or awaits its own.
#[derive(Debug, Default)]
pub(super) struct PathFence {
    /// Chunks of the path while it is connected and waits for other paths' fences.
    held: Option<Arc<[RemoteMem]>>,
    /// Whether the shards were notified that they may use the path.
    carries: bool,
    /// Volumes opened since then that the shards have not been notified of yet.
    unreported: DeviceSet,
    lost: Option<Lost>,
}

impl PathFence {
    /// Records that the path is connected. It carries IO once no other path awaits its fence.
    pub(super) fn connected(&mut self, chunks: Arc<[RemoteMem]>) {
        self.held = Some(chunks);
    }

    /// Whether the path waits for other paths' fences.
    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Lets the path carry IO over the returned chunks. Returns None if it already carries IO or
    /// must not.
    pub(super) fn release(&mut self) -> Option<Arc<[RemoteMem]>> {
        let chunks = self.held.take()?;
        (self.carries, self.unreported) = (true, DeviceSet::default());
        Some(chunks)
    }

    /// Whether shards may use the path.
    pub(super) fn carries(&self) -> bool {
        self.carries
    }

    /// Records an opened volume. Shards are notified of volumes opened earlier when the path starts
    /// to carry IO.
    pub(super) fn opened(&mut self, volume: DeviceIndex) {
        if self.carries {
            self.unreported.insert(volume);
        }
    }

    /// Open volumes that shards must not use over the path yet.
    pub(super) fn unreported(&self) -> DeviceSet {
        self.unreported
    }

    /// Records that shards were notified of a volume, or that the path stopped serving it. Returns
    /// whether they had been notified before.
    pub(super) fn notified(&mut self, volume: DeviceIndex) -> bool {
        let known = !self.unreported.contains(volume);
        self.unreported.remove(volume);
        known
    }

    /// Keeps a leaving path from carrying IO.
    pub(super) fn withhold(&mut self) {
        self.held = None;
    }

    /// Records that all requests on the path were answered, so no fence is needed.
    pub(super) fn drained(&mut self) {
        self.carries = false;
    }

    /// Records that the path died. If it carried IO, it awaits a fence; `recon_cnt` is the number
    /// of its last connect.
    pub(super) fn died(&mut self, epoch: u32, recon_cnt: u16, carried: Carried) {
        (self.held, self.unreported) = (None, DeviceSet::default());
        if std::mem::take(&mut self.carries) && !rtrs_core::mutated!(LostUnnoted) {
            let (refused_by, asked, answered) = (None, None, false);
            self.lost = Some(Lost { epoch, recon_cnt, carried, refused_by, asked, answered });
        }
    }

    /// Whether requests from the dead path may still be delivered.
    pub(super) fn is_awaited(&self) -> bool {
        self.lost.is_some()
    }

    /// Server and volumes of the dead path, while it awaits its fence.
    pub(super) fn lost_at(&self) -> Option<(Option<ServerId>, DeviceSet)> {
        self.lost.map(|lost| (lost.carried.server, lost.carried.volumes))
    }

    /// Server process of the dead path.
    pub(super) fn process(&self) -> ServerProcess {
        self.lost.map_or(ServerProcess::NONE, |lost| lost.carried.process)
    }

    /// Whether this process has refused to answer for the process of the dead path.
    pub(super) fn is_refused_by(&self, process: ServerProcess) -> bool {
        self.lost.is_some_and(|lost| lost.refused_by == Some(process))
    }

    /// Records that a process cannot answer for the process of the dead path.
    pub(super) fn refuse(&mut self, by: ServerProcess) {
        if let Some(lost) = &mut self.lost {
            (lost.refused_by, lost.asked) = (Some(by), None);
        }
    }

    /// Forgets a volume that has ended: its requests were answered or are no longer needed.
    pub(super) fn forget(&mut self, volume: DeviceIndex) {
        self.unreported.remove(volume);
        if let Some(lost) = &mut self.lost {
            lost.carried.volumes.remove(volume);
            lost.refused_by = None;
        }
    }

    /// Number of the connect up to which the path must be fenced off, if any.
    pub(super) fn recon_cnt(&self) -> Option<u16> {
        self.lost.filter(|lost| !lost.answered).map(|lost| lost.recon_cnt)
    }

    /// Records the server's confirmation while connections are still open on this side.
    pub(super) fn answered(&mut self) {
        if let Some(lost) = &mut self.lost {
            (lost.asked, lost.answered) = (None, true);
        }
    }

    /// Whether only open connections on this side delay the fence.
    pub(super) fn is_answered(&self) -> bool {
        self.lost.is_some_and(|lost| lost.answered)
    }

    /// Path over which the fence was requested, and the deadline for the answer.
    pub(super) fn asked(&self) -> Option<(PathId, Instant)> {
        self.lost?.asked
    }

    /// Records the path and deadline of a fence request, or that none is outstanding.
    pub(super) fn set_asked(&mut self, asked: Option<(PathId, Instant)>) {
        if let Some(lost) = &mut self.lost {
            lost.asked = asked;
        }
    }

    /// Ends the wait for the fence. Returns the epoch that awaited it.
    pub(super) fn fenced(&mut self) -> Option<u32> {
        Some(self.lost.take()?.epoch)
    }
}
