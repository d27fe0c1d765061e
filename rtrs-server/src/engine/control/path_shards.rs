//! Shards that have connections of a path, and their reports on its shutdown.

use rtrs_core::ids::CoreIndex;

use crate::engine::message::{EndReport, ReplyTo};

/// A shard that has connections of the path, and its last report.
#[derive(Debug)]
struct PathShard {
    shard: CoreIndex,
    reached: Option<EndReport>,
}

/// Shards of a path, and the requests that wait for their reports.
#[derive(Debug, Default)]
pub(super) struct PathShards {
    shards: Vec<PathShard>,
    /// Fences to answer once no new work of the path can begin.
    fenced_by: Vec<ReplyTo>,
}

impl PathShards {
    /// Adds a shard, unless it is known.
    pub(super) fn add(&mut self, shard: CoreIndex) {
        if !self.iter().any(|known| known == shard) {
            self.shards.push(PathShard { shard, reached: None });
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = CoreIndex> {
        self.shards.iter().map(|known| known.shard)
    }

    /// Records a shard's report.
    pub(super) fn reported(&mut self, shard: CoreIndex, report: EndReport) {
        for known in self.shards.iter_mut().filter(|known| known.shard == shard) {
            known.reached = known.reached.max(Some(report));
        }
    }

    /// Whether all shards have reported at least this stage.
    pub(super) fn have_all(&self, report: EndReport) -> bool {
        self.shards.iter().all(|known| known.reached >= Some(report))
    }

    /// Registers a request that is answered once no new work of the path can begin.
    pub(super) fn fence(&mut self, reply_to: ReplyTo) {
        self.fenced_by.push(reply_to);
    }

    /// Takes the requests of [`Self::fence`].
    pub(super) fn take_fenced(&mut self) -> Vec<ReplyTo> {
        std::mem::take(&mut self.fenced_by)
    }
}
