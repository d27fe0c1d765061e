//! Closes volumes, and ends a session: its volumes are closed first, then every path ends.
//!
//! An individual volume is closed once its IO has ended. A close uses the same permit as all opens,
//! so it waits for any open in progress. It is sent over one path; the server may then reuse the
//! volume's number. If that path dies, the close is therefore repeated only once the path is fenced
//! off, and no other volume is opened in the meantime. A volume that no path serves any longer may
//! still be open on the server: it is opened once more and then closed.

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

use super::path::Path;
use super::routes::Routes;
use crate::engine::device_set::DeviceIndex;
use crate::engine::session::CONTROL;

/// Time limit for closes when a session ends, including the wait for their permit.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Next step in closing a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CloseStep {
    /// The volume is not to be closed, or a path may open it first.
    Skip,
    /// No path has the volume open any longer.
    Finish,
    /// Another request or a fence is in progress; no volume can be closed now.
    Wait,
    /// Send the close over this path.
    Send(PathId),
}

/// End of a session, and the order in which volumes are closed.
#[derive(Debug, Default)]
pub(super) struct Closing {
    detaching: bool,
    /// Time until which the session's end waits for closes.
    deadline: Option<Instant>,
}

impl Closing {
    /// Starts ending the session. Returns false if it was already ending.
    pub(super) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.detaching, true)
    }

    /// Whether the session is being ended.
    pub(super) fn is_detaching(&self) -> bool {
        self.detaching
    }

    /// Starts waiting for the closes of open volumes.
    pub(super) fn await_closes(&mut self, now: Instant) {
        self.deadline = Some(now + CLOSE_TIMEOUT);
    }

    /// Stops waiting for closes.
    pub(super) fn finish(&mut self) {
        self.deadline = None;
    }

    /// Time until which the session's end waits for closes.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether the session ends without the closes that are still unanswered.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Handles the loss of a path over which a close may be unanswered.
    pub(super) fn path_lost(&mut self, routes: &mut Routes, id: PathId) {
        let Some(at) = routes.volumes.closing_over(id) else { return };
        if self.detaching {
            self.deadline = Some(Instant::ZERO);
        } else {
            routes.volumes[at].close_lost();
        }
    }

    /// Next step in closing a volume.
    pub(super) fn step(&self, routes: &Routes, at: DeviceIndex) -> CloseStep {
        if !routes.volumes[at].is_to_close() || self.may_be_opened(routes, at) {
            return CloseStep::Skip;
        }
        let paths = &routes.paths;
        if !paths.iter().any(|path| path.has(at)) {
            return CloseStep::Finish;
        }
        let awaited = paths.iter().any(|path| path.volumes.fence.is_awaited());
        if paths.is_using(CONTROL) || awaited && !self.detaching {
            // An open or a fence is in progress, and has its own timeout.
            return CloseStep::Wait;
        }
        let free = |path: &&Path| path.has(at) && path.channel.is_idle();
        let over = paths.iter().find(free).map(Path::id);
        over.map_or(CloseStep::Wait, CloseStep::Send)
    }

    /// Whether no path has the closing volume open yet, but one may open it soon.
    fn may_be_opened(&self, routes: &Routes, at: DeviceIndex) -> bool {
        let paths = &routes.paths;
        if self.detaching || paths.iter().any(|path| path.has(at)) {
            return false;
        }
        let opens =
            |path: &Path| path.volumes.terms.asked().is_some_and(|asked| asked.volume == at);
        let untried = |path: &Path| path.is_connected() && !path.volumes.terms.is_tried(at);
        let wanted = routes.volumes[at].is_wanted();
        let waits = !paths.are_connected() || paths.iter().any(untried);
        paths.iter().any(opens) || wanted && waits
    }
}
