//! What a path carries, and what it may still deliver of what it carried before it died.

use std::sync::Arc;

use rtrs_core::fabric::RemoteMem;
use rtrs_core::identity::{ServerId, ServerProcess};
use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;

use crate::engine::device_set::{DeviceIndex, DeviceSet};

/// What a path carried, and to which server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Carried {
    pub(super) server: Option<ServerId>,
    pub(super) process: ServerProcess,
    /// Volumes that the path served.
    pub(super) volumes: DeviceSet,
}

/// A path's last epoch that carried IO, while that may still be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lost {
    epoch: u32,
    recon_cnt: u16,
    carried: Carried,
    /// The other process of that server that cannot answer for `process`, if one was asked.
    refused_by: Option<ServerProcess>,
    /// The path over which the server was asked to fence it off, and until when that may take.
    asked: Option<(PathId, Instant)>,
    /// The server begins nothing more of it; connections of it are still open at this end.
    answered: bool,
}

/// Whether a path carries IO, waits for the fences of others, or awaits its own.
#[derive(Debug, Default)]
pub(super) struct PathFence {
    /// Its chunks while it is connected and waits for the fences of other paths.
    held: Option<Arc<[RemoteMem]>>,
    /// The shards were notified that they may use it.
    carries: bool,
    /// Volumes that the path has opened since, and that shards were not notified of.
    unreported: DeviceSet,
    lost: Option<Lost>,
}

impl PathFence {
    /// The path is connected, and carries IO once no other path awaits its fence.
    pub(super) fn connected(&mut self, chunks: Arc<[RemoteMem]>) {
        self.held = Some(chunks);
    }

    /// True while the path waits for the fences of others.
    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// The path carries IO from now on, over these chunks. None when it does already, or must not.
    pub(super) fn release(&mut self) -> Option<Arc<[RemoteMem]>> {
        let chunks = self.held.take()?;
        (self.carries, self.unreported) = (true, DeviceSet::default());
        Some(chunks)
    }

    /// True while shards may use the path.
    pub(super) fn carries(&self) -> bool {
        self.carries
    }

    /// The path has opened a volume. One that opens before the path carries IO is among those that
    /// shards are notified of then.
    pub(super) fn opened(&mut self, volume: DeviceIndex) {
        if self.carries {
            self.unreported.insert(volume);
        }
    }

    /// Volumes that the path has open, and that shards must not use over it yet.
    pub(super) fn unreported(&self) -> DeviceSet {
        self.unreported
    }

    /// Shards are notified of a volume, or the path does not serve it any more. True if they knew.
    pub(super) fn told(&mut self, volume: DeviceIndex) -> bool {
        let known = !self.unreported.contains(volume);
        self.unreported.remove(volume);
        known
    }

    /// The path leaves: it is given no IO any more.
    pub(super) fn withhold(&mut self) {
        self.held = None;
    }

    /// All that the path carried was answered: nothing has to be fenced off.
    pub(super) fn drained(&mut self) {
        self.carries = false;
    }

    /// The path dies after its connect number `recon_cnt`: what it carried awaits a fence.
    pub(super) fn died(&mut self, epoch: u32, recon_cnt: u16, carried: Carried) {
        (self.held, self.unreported) = (None, DeviceSet::default());
        if std::mem::take(&mut self.carries) && !rtrs_core::mutated!(LostUnnoted) {
            let (refused_by, asked, answered) = (None, None, false);
            self.lost = Some(Lost { epoch, recon_cnt, carried, refused_by, asked, answered });
        }
    }

    /// True while what the path carried may still be delivered.
    pub(super) fn is_awaited(&self) -> bool {
        self.lost.is_some()
    }

    /// While that is so: the server to which the path led, and the volumes that it served.
    pub(super) fn lost_at(&self) -> Option<(Option<ServerId>, DeviceSet)> {
        self.lost.map(|lost| (lost.carried.server, lost.carried.volumes))
    }

    /// The process of that server to which the path led.
    pub(super) fn process(&self) -> ServerProcess {
        self.lost.map_or(ServerProcess::NONE, |lost| lost.carried.process)
    }

    /// Whether a process of the server has refused to answer for the one to which the path led.
    pub(super) fn is_refused_by(&self, process: ServerProcess) -> bool {
        self.lost.is_some_and(|lost| lost.refused_by == Some(process))
    }

    /// A process of the server cannot answer for the one to which the path led.
    pub(super) fn refuse(&mut self, by: ServerProcess) {
        if let Some(lost) = &mut self.lost {
            (lost.refused_by, lost.asked) = (Some(by), None);
        }
    }

    /// A volume is gone: what was sent for it was answered, or is not wanted any more.
    pub(super) fn forget(&mut self, volume: DeviceIndex) {
        self.unreported.remove(volume);
        if let Some(lost) = &mut self.lost {
            lost.carried.volumes.remove(volume);
            lost.refused_by = None;
        }
    }

    /// The connect of the path up to which it has to be fenced off, while it has to.
    pub(super) fn recon_cnt(&self) -> Option<u16> {
        self.lost.filter(|lost| !lost.answered).map(|lost| lost.recon_cnt)
    }

    /// The server begins nothing more of the path, whose connections are still open at this end.
    pub(super) fn answered(&mut self) {
        if let Some(lost) = &mut self.lost {
            (lost.asked, lost.answered) = (None, true);
        }
    }

    /// True while only connections at this end are in the way.
    pub(super) fn is_answered(&self) -> bool {
        self.lost.is_some_and(|lost| lost.answered)
    }

    /// Over which path its fence was asked for, and until when the answer may take.
    pub(super) fn asked(&self) -> Option<(PathId, Instant)> {
        self.lost?.asked
    }

    /// Its fence is asked for over another path, or none will answer any more.
    pub(super) fn set_asked(&mut self, asked: Option<(PathId, Instant)>) {
        if let Some(lost) = &mut self.lost {
            lost.asked = asked;
        }
    }

    /// Nothing of it can be delivered any more. Returns the epoch that awaited its fence.
    pub(super) fn fenced(&mut self) -> Option<u32> {
        Some(self.lost.take()?.epoch)
    }
}
