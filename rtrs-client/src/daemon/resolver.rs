//! Resolution of the hosts of unreached paths, on separate threads because the system's resolver
//! may block for a long time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rtrs_core::settings::{Host, Portal};

use super::launch::ShardHandle;
use crate::plan::resolve;

/// Minimum time between two lookups of a path's host. Unreached paths keep requesting lookups, so
/// requests that arrive earlier are dropped.
const SPACING: Duration = Duration::from_secs(1);

/// Resolver of a session; at most one lookup for each path is in progress.
pub(super) struct Resolver {
    shards: ShardHandle,
    in_progress: Arc<Mutex<BTreeSet<String>>>,
}

impl Resolver {
    pub(super) fn new(shards: ShardHandle) -> Self {
        Self { shards, in_progress: Arc::default() }
    }

    /// Looks up the host of this path if the host is a name, and passes the result to the session.
    pub(super) fn resolve(&self, path: &str) {
        // A path is named after its portal.
        let Ok(portal) = path.parse::<Portal>() else { return };
        let name = path.to_owned();
        if matches!(portal.host(), Host::Ip(_)) || !self.in_progress.lock().insert(name.clone()) {
            return;
        }
        let (shards, in_progress) = (self.shards.clone(), Arc::clone(&self.in_progress));
        let thread = thread::Builder::new().name("rtrs-resolve".into());
        let spawned = thread.spawn(move || {
            let found = resolve(&portal);
            if let Err(why) = &found {
                tracing::debug!(path = %name, "{why}");
            }
            shards.resolved(name.clone(), found);
            thread::sleep(SPACING);
            in_progress.lock().remove(&name);
        });
        if let Err(error) = spawned {
            tracing::debug!(%path, "host not resolved: {error}");
            self.in_progress.lock().remove(path);
        }
    }
}
