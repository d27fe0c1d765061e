//! The limits that the server grants a session, and the failure that ends the whole session.

use std::sync::Arc;

use rtrs_core::ids::PermitId;

use super::failure::SessionFailure;
use crate::engine::session::{CONTROL, Granted, SessionConfig};

/// Limits of a session. They must not change during its lifetime.
#[derive(Debug)]
pub(super) struct Bounds {
    config: Arc<SessionConfig>,
    granted: Option<Granted>,
    failure: Option<SessionFailure>,
    /// Problem found when a path last connected.
    obstacle: Option<SessionFailure>,
}

impl Bounds {
    pub(super) fn new(config: &Arc<SessionConfig>) -> Self {
        Self { config: Arc::clone(config), granted: None, failure: None, obstacle: None }
    }

    /// Reason why every volume of the session must stop, if any.
    pub(super) fn failure(&self) -> Option<&SessionFailure> {
        self.failure.as_ref()
    }

    /// Failure or, if there is none, the problem found when a path last connected.
    pub(super) fn obstacle(&self) -> Option<&SessionFailure> {
        self.failure().or(self.obstacle.as_ref())
    }

    /// Records that the session cannot continue. The first failure is kept.
    pub(super) fn fail(&mut self, failure: SessionFailure) {
        self.failure.get_or_insert(failure);
    }

    /// Records that the server's operator ended the session.
    pub(super) fn ended(&mut self, failure: SessionFailure) {
        if self.failure.is_none() {
            tracing::error!("{failure}");
            self.failure = Some(failure);
        }
    }

    /// Adopts the limits from the server and returns whether they are new. Unusable limits end a
    /// session in which no volume `was_open`.
    pub(super) fn grant(
        &mut self,
        granted: Granted,
        was_open: bool,
    ) -> Result<bool, SessionFailure> {
        let refused = self.check(&granted).map(SessionFailure::Unusable);
        self.obstacle = refused.clone().filter(|_| was_open);
        if let Some(failure) = refused {
            if !was_open {
                self.fail(failure.clone());
            }
            return Err(failure);
        }
        let is_new = self.granted.is_none();
        self.granted.get_or_insert(granted);
        Ok(is_new)
    }

    /// Returns why these limits are unusable, if they are.
    fn check(&self, granted: &Granted) -> Option<String> {
        let shards = self.config.shards;
        let depth = granted.depth(&self.config);
        if depth <= shards {
            let fewer = (depth > 1).then(|| format!("--shards {}, or ", depth - 1));
            let fewer = fewer.unwrap_or_default();
            return Some(format!(
                "a queue depth of {depth} is too small for {shards} shards and the service \
                 connection: use {fewer}a larger queue depth"
            ));
        }
        let before = self.granted.filter(|before| before.bounds() != granted.bounds())?;
        let bounds = [
            ("queue depth", u64::from(before.queue_depth), u64::from(granted.queue_depth)),
            ("largest request", before.max_io_size.into(), granted.max_io_size.into()),
        ];
        let changed = bounds.into_iter().filter(|(_, had, has)| had != has);
        let changed = changed.map(|(what, had, has)| format!("{what} {had} to {has}"));
        let changed = changed.collect::<Vec<_>>().join(", ");
        Some(format!(
            "the server's limits have changed ({changed}); restore them on the server: a detach \
             would fail the waiting IO"
        ))
    }

    /// Queue depth granted by the server; 0 until it grants one.
    pub(super) fn queue_depth(&self) -> u16 {
        self.granted.map_or(0, |granted| granted.queue_depth)
    }

    /// Permit used for fence requests.
    pub(super) fn fence_permit(&self) -> PermitId {
        self.granted.map_or(CONTROL, |granted| granted.fence_permit(&self.config))
    }
}
