//! State shared by all queue pairs of a shard: the key table, the event queue, the counters.
//!
//! Passed by `&mut` to each machine call, so that machines need no shared ownership.

use std::collections::VecDeque;
use std::sync::Arc;

use super::stag::{RegionCache, StagTable};
use crate::fabric::{FabricCounters, FabricEvent, WorkCompletion};

/// Shared state of one shard.
#[derive(Debug)]
pub(super) struct CoreState {
    pub(super) stags: Arc<StagTable>,
    pub(super) regions: RegionCache,
    pub(super) events: VecDeque<FabricEvent>,
    pub(super) counters: FabricCounters,
}

impl CoreState {
    pub(super) fn new(stags: Arc<StagTable>) -> Self {
        Self {
            stags,
            regions: RegionCache::new(),
            events: VecDeque::with_capacity(1024),
            counters: FabricCounters::default(),
        }
    }

    pub(super) fn complete(&mut self, completion: WorkCompletion) {
        self.events.push_back(FabricEvent::Completion(completion));
    }

    pub(super) fn report(&mut self, event: FabricEvent) {
        self.events.push_back(event);
    }
}
