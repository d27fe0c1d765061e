//! A shard's providers: one for each scheme that the session's paths use.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::fabric::{Fabric, FabricCounters, FabricEvent};
use rtrs_core::ids::ProviderIndex;
use rtrs_core::rt::Ring;
use rtrs_core::settings::Scheme;
use rtrs_core::time::{Instant, earliest};

use super::fabrics::{FabricRegistry, provider_of};

/// Providers of a shard, in the order of `PathTarget::provider`, and the registry for creating
/// more.
pub(crate) struct Providers {
    registry: Arc<FabricRegistry>,
    ring: Rc<Ring>,
    fabrics: Vec<Box<dyn Fabric>>,
    /// Schemes of `fabrics`.
    schemes: Vec<Scheme>,
}

impl Providers {
    /// Creates the providers that the session's initial paths need.
    ///
    /// # Errors
    /// The system's error if resources for a provider are lacking.
    pub(crate) fn new(registry: Arc<FabricRegistry>, ring: &Rc<Ring>) -> io::Result<Self> {
        let (schemes, fabrics) = registry.first(ring)?.into_iter().unzip();
        Ok(Self { registry, ring: Rc::clone(ring), fabrics, schemes })
    }

    /// Returns the provider for this scheme, creating one if necessary.
    ///
    /// # Errors
    /// Returns the reason why the provider cannot be created.
    pub(crate) fn provide(&mut self, scheme: Scheme) -> Result<ProviderIndex, String> {
        if let Some(provider) = provider_of(&self.schemes, scheme) {
            return Ok(provider);
        }
        let fabric = self.registry.make(scheme, &self.ring).map_err(|e| e.to_string())?;
        self.fabrics.push(fabric);
        self.schemes.push(scheme);
        provider_of(&self.schemes, scheme).ok_or_else(|| "too many providers".to_owned())
    }

    /// Providers in order, for the engine.
    pub(crate) fn fabrics(&mut self) -> &mut [Box<dyn Fabric>] {
        &mut self.fabrics
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = ProviderIndex> + use<> {
        ProviderIndex::all(self.fabrics.len())
    }

    /// Lets a provider process its completions and sockets.
    pub(crate) fn poll(&mut self, provider: ProviderIndex, now: Instant) -> bool {
        self.fabrics[provider.index()].poll(now)
    }

    pub(crate) fn next_event(&mut self, provider: ProviderIndex) -> Option<FabricEvent> {
        self.fabrics[provider.index()].next_event()
    }

    /// Sends everything that was posted during this turn.
    pub(crate) fn flush(&mut self, now: Instant) {
        self.fabrics.iter_mut().for_each(|fabric| fabric.flush(now));
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.fabrics.iter().fold(None, |soonest, fabric| earliest(soonest, fabric.deadline()))
    }

    /// Counters of each provider, by scheme.
    pub(crate) fn counters(&self) -> Vec<(&'static str, FabricCounters)> {
        self.fabrics.iter().map(|one| (one.capabilities().scheme, one.counters())).collect()
    }
}
