//! What all queue pairs of one shard share: the key table, the event queue, the counters.
//!
//! Handed by `&mut` to each machine call, so that machines stay free of shared ownership.

use std::collections::VecDeque;
use std::sync::Arc;

use super::stag::{RegionCache, StagTable};
use crate::fabric::{FabricCounters, FabricEvent, WorkCompletion};

/// An event on its way out. Completions are the many; the rest is boxed to keep them small.
#[derive(Debug)]
pub(super) enum Event {
    Completion(WorkCompletion),
    Rare(Box<FabricEvent>),
}

/// One shard's shared state.
#[derive(Debug)]
pub(super) struct CoreState {
    pub(super) stags: Arc<StagTable>,
    pub(super) regions: RegionCache,
    pub(super) events: VecDeque<Event>,
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
        self.events.push_back(Event::Completion(completion));
    }

    pub(super) fn report(&mut self, event: FabricEvent) {
        self.events.push_back(Event::Rare(Box::new(event)));
    }
}
