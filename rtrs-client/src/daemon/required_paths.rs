//! Waits during an attach: for the required paths, and for the first result of the others.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use rtrs_core::block::Geometry;

use super::attached::AttachedSession;
use super::events::{READY_TIMEOUT, Wake};
use super::volume::{Step, Volume};
use crate::control_protocol::{PathInfo, Status};
use crate::path::state::PathState;
use crate::settings::RequirePaths;

/// Minimum time allowed for the required paths, counted from when the volume opens.
const REQUIRED_PATIENCE: Duration = Duration::from_secs(10);
/// Time allowed for the first result of each other path before the attach is reported.
const SETTLE_PATIENCE: Duration = Duration::from_secs(1);

/// If fewer paths than required are connected, returns which are missing and why.
fn lacking(status: &Status, required: RequirePaths) -> Option<String> {
    let (connected, all) = status.path_counts();
    let required = required.of(all);
    if connected >= required {
        return None;
    }
    let missing = status.paths().iter().filter(|path| !path.is_connected());
    let missing: Vec<String> = missing.map(PathInfo::not_connected).collect();
    let missing = missing.join("; ");
    Some(format!("{connected} of {required} required paths are connected; {missing}"))
}

/// Whether a path is connected, has failed once, or is not being tried.
fn is_settled(path: &PathInfo) -> bool {
    path.is_connected() || path.ends > 0 || path.state == PathState::Disconnected
}

impl AttachedSession {
    /// Whether an open volume has the paths that it requires. If not, the volume waits for
    /// [`Event::PathsChanged`](super::notices::Event::PathsChanged).
    pub(super) fn has_required_paths(&mut self, at: usize, geometry: &Geometry) -> bool {
        let volume = &self.volumes[at];
        let required = volume.require_paths;
        if required.of(usize::MAX) == 1 {
            return true;
        }
        self.shards.watch_paths();
        let status = self.status(&volume.identity.name);
        if status.is_none_or(|status| lacking(&status, required).is_none()) {
            self.stop_waiting(at);
            return true;
        }
        let volume = &mut self.volumes[at];
        if volume.waits_for_paths.is_none() {
            let patience = volume.patience.saturating_sub(READY_TIMEOUT).max(REQUIRED_PATIENCE);
            volume.step = Step::Opening(Instant::now() + patience);
        }
        volume.waits_for_paths = Some(geometry.clone());
        false
    }

    /// Records that a volume no longer waits for paths, and stops watching them if no other volume
    /// does.
    pub(super) fn stop_waiting(&mut self, at: usize) {
        self.volumes[at].waits_for_paths = None;
        self.end_watch();
    }

    /// Stops watching the paths, unless a volume waits for them.
    fn end_watch(&self) {
        if self.volumes.iter().all(|volume| volume.waits_for_paths.is_none()) {
            self.shards.ignore_paths();
        }
    }

    /// Serves the volumes that have been waiting for paths and now have enough.
    pub(super) fn on_paths_changed(&mut self) {
        let waits = |volume: &Volume| {
            let is_opening = matches!(volume.step, Step::Opening(_));
            Some((volume.identity.index, volume.waits_for_paths.clone()?)).filter(|_| is_opening)
        };
        let waiting: Vec<_> = self.volumes.iter().filter_map(waits).collect();
        for (device, geometry) in waiting {
            self.on_open(device, &geometry);
        }
    }

    /// Fails a volume whose paths have taken too long. Returns false if it does not wait for paths.
    pub(super) fn fail_without_paths(&mut self, at: usize) -> bool {
        let volume = &self.volumes[at];
        let (device, required) = (volume.identity.index, volume.require_paths);
        if volume.waits_for_paths.is_none() {
            return false;
        }
        let status = self.status(&volume.identity.name);
        let why = status.and_then(|status| lacking(&status, required));
        let why = why.unwrap_or_else(|| "its paths are not known".to_owned());
        self.on_failure(device, &format!("{why}; check each path with `rtrs-client doctor`"));
        true
    }

    /// Runs until each path of the attached session is connected or has failed once, within a time
    /// limit, so that the command can report paths that do not work.
    pub(super) fn settle_paths(&mut self, inbox: &mpsc::Receiver<Wake>) {
        let deadline = Instant::now() + SETTLE_PATIENCE;
        while !self.is_over() && Instant::now() < deadline {
            let attached = self.volumes.iter().find(|volume| volume.step == Step::Attached);
            let Some(name) = attached.map(|volume| &volume.identity.name) else { break };
            self.shards.watch_paths();
            let status = self.status(name);
            if status.is_none_or(|status| status.paths().iter().all(is_settled)) {
                break;
            }
            self.step(inbox, Some(deadline));
        }
        self.end_watch();
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::daemon::report::{self, Identity};

    #[test]
    fn missing_paths_are_named_with_their_reasons() {
        let path = |is_connected: bool| {
            serde_json::json!({
                "path": "p", "transport": "tcp", "address": "10.0.0.2:1234", "connections": 3,
                "state": if is_connected { "connected" } else { "waiting" }, "reconnects": 0,
                "ends": u8::from(!is_connected), "heartbeats": { "sent": 0, "missed": 0 },
                "internal_errors": 0, "last_error": (!is_connected).then_some("why"),
                "slow": false,
            })
        };
        let of = |connected: usize, required| {
            let mut status = report::status(&Identity::example(), &[], &[]);
            let paths = (0..2).map(|at| path(at < connected)).collect();
            status.paths = serde_json::from_value(paths).unwrap();
            lacking(&status, required)
        };
        let count = |count| RequirePaths::Count(NonZeroUsize::new(count).unwrap());
        assert_eq!(of(1, count(1)), None);
        assert_eq!(of(2, RequirePaths::All), None);
        let text = "1 of 2 required paths are connected; path p is not connected: why";
        assert_eq!(of(1, RequirePaths::All).as_deref(), Some(text));
        assert_eq!(of(1, count(2)).as_deref(), Some(text));
    }
}
