//! The device that a session opens, and why it cannot.
//!
//! Every path opens the device before it carries IO, so that a path which joins a session the
//! server made anew finds the device there; a repeated open returns the same device.

use std::sync::Arc;

use rtrs_core::block::Geometry;
use rtrs_core::ids::{PathId, PermitId};
use rtrs_core::time::Instant;
use rtrs_core::wire::{AccessMode, OpenRefusal, errno, errno_name};

use crate::engine::device_table::OpenDevice;
use crate::engine::session::{CONTROL, Granted, SessionConfig};

/// Why a session cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionFailure {
    /// The server refused to open the export.
    #[error("the server refused to open {export:?}: {errno}{hint}")]
    OpenRefused {
        /// The export asked for.
        export: String,
        /// The server's errno by name.
        errno: String,
        /// What would do.
        hint: String,
    },
    /// No path came up; what each of them met.
    #[error("no path to the server: {0}")]
    Unreachable(String),
    /// The server's operator ended the session for good.
    #[error(
        "evicted by the server's operator: IO ends with errors; detach, and attach again for a \
         new session"
    )]
    Evicted,
    /// The server's operator removed the export.
    #[error(
        "the server's operator removed the export: IO ends with errors; detach, and attach again \
         if it is exported again"
    )]
    Removed,
    /// What the server grants cannot be worked with.
    #[error("{0}")]
    Unusable(String),
}

/// How far the device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open,
    /// The close was sent on this path; none: it waits for the permit.
    Closing {
        path: Option<PathId>,
        deadline: Instant,
    },
    /// Closed in order, or given up.
    Ended,
}

/// The session's device at the server, and what the server grants.
#[derive(Debug)]
pub(super) struct Device {
    config: Arc<SessionConfig>,
    state: State,
    /// As it was opened last.
    last: Option<Arc<OpenDevice>>,
    granted: Option<Granted>,
    /// What is asked for; lowered once where the export is read-only.
    access: AccessMode,
    /// Until then nothing that is in the way of the first open ends the session.
    patient_until: Instant,
    failure: Option<SessionFailure>,
    /// What the last open that failed had in its way, while the device is not open.
    obstacle: Option<SessionFailure>,
}

impl Device {
    pub(super) fn new(now: Instant, config: &Arc<SessionConfig>) -> Self {
        Self {
            config: Arc::clone(config),
            state: State::Closed,
            last: None,
            granted: None,
            access: config.access,
            patient_until: now + config.open_patience,
            failure: None,
            obstacle: None,
        }
    }

    /// The device while it is open at the server.
    pub(super) fn get(&self) -> Option<&Arc<OpenDevice>> {
        self.last.as_ref().filter(|_| self.state == State::Open)
    }

    /// The device as it was opened last.
    pub(super) fn last(&self) -> Option<&OpenDevice> {
        self.last.as_deref()
    }

    /// True when it was open once.
    pub(super) fn was_open(&self) -> bool {
        self.last.is_some()
    }

    /// Why the session cannot go on.
    pub(super) fn failure(&self) -> Option<&SessionFailure> {
        self.failure.as_ref()
    }

    /// Why the session cannot go on, or what was in the way when it was last tried.
    pub(super) fn obstacle(&self) -> Option<&SessionFailure> {
        self.failure().or(self.obstacle.as_ref())
    }

    /// Something is in the way of an open. Before the first that ends the session. Returns the
    /// reason.
    pub(super) fn fail(&mut self, failure: SessionFailure) -> String {
        let why = failure.to_string();
        if self.was_open() {
            self.obstacle = Some(failure);
        } else {
            self.failure = Some(failure);
        }
        why
    }

    /// The server's operator ended the session or its device.
    pub(super) fn ended(&mut self, failure: SessionFailure) {
        if self.failure.is_none() {
            tracing::error!("{failure}");
            self.failure = Some(failure);
        }
    }

    /// True while a refusal to open may still pass.
    pub(super) fn is_patient(&self, now: Instant) -> bool {
        !self.was_open() && now < self.patient_until
    }

    /// Takes the server's bounds, which may not change over the life of the session. True when
    /// they are new.
    pub(super) fn grant(&mut self, granted: Granted) -> Result<bool, String> {
        let shards = self.config.shards;
        let depth = granted.depth(&self.config);
        if depth <= shards {
            let fewer = (depth > 1).then(|| format!("--shards {}, or ", depth - 1));
            let fewer = fewer.unwrap_or_default();
            return Err(self.fail(SessionFailure::Unusable(format!(
                "a queue depth of {depth} is too small for {shards} shards and the service \
                 connection: use {fewer}a larger queue depth"
            ))));
        }
        match self.granted {
            Some(before) if before.bounds() != granted.bounds() => {
                let bounds = [
                    ("queue depth", u64::from(before.queue_depth), u64::from(granted.queue_depth)),
                    ("largest request", before.max_io_size.into(), granted.max_io_size.into()),
                ];
                let changed = bounds.into_iter().filter(|(_, had, has)| had != has);
                let changed = changed.map(|(what, had, has)| format!("{what} {had} to {has}"));
                let changed = changed.collect::<Vec<_>>().join(", ");
                Err(self.fail(SessionFailure::Unusable(format!(
                    "the server changed its bounds ({changed}): detach and attach again"
                ))))
            }
            Some(_) => Ok(false),
            None => {
                self.granted = Some(granted);
                Ok(true)
            }
        }
    }

    /// The queue depth that the server granted; 0 before it did.
    pub(super) fn queue_depth(&self) -> u16 {
        self.granted.map_or(0, |granted| granted.queue_depth)
    }

    /// The permit of fences.
    pub(super) fn fence_permit(&self) -> PermitId {
        self.granted.map_or(CONTROL, |granted| granted.fence_permit(&self.config))
    }

    /// The access to ask for.
    pub(super) fn access(&self) -> AccessMode {
        self.access
    }

    /// The server refused an open that asked for this access. True when it is to be repeated with
    /// the access of now; else the reason for the path's end.
    pub(super) fn refused(
        &mut self,
        now: Instant,
        (errno, why): (u16, Option<OpenRefusal>),
        asked: AccessMode,
    ) -> Result<(), String> {
        if errno == errno::EACCES
            && self.config.read_only_fallback
            && asked == AccessMode::ReadWrite
            && (!self.was_open() || self.access == AccessMode::ReadOnly)
        {
            let why = why.as_ref().map_or("the export is read-only", OpenRefusal::text);
            tracing::info!("{why}: opening it read-only, as access is auto");
            self.access = AccessMode::ReadOnly;
            return Ok(());
        }
        let fell_back = asked == AccessMode::ReadOnly && self.config.read_only_fallback;
        let before = if fell_back { ", and rw was refused before (access: auto)" } else { "" };
        let failure = SessionFailure::OpenRefused {
            export: self.config.export.clone(),
            errno: errno_name(errno).to_owned(),
            hint: match why {
                Some(why) => format!(": {}{before} (see the server's setting access)", why.text()),
                None => open_hint(errno, asked).to_owned(),
            },
        };
        let may_pass = matches!(errno, errno::EPERM | errno::EBUSY) && self.is_patient(now);
        Err(if may_pass { failure.to_string() } else { self.fail(failure) })
    }

    /// What the session's users see of a device that a path opened. Paths open one after the other,
    /// so its size is the newest; that it is the same device is certain
    /// ([`Pinned::refuses`](super::identity::Pinned::refuses)).
    pub(super) fn fit(&mut self, device: &OpenDevice) -> Result<Arc<OpenDevice>, String> {
        if let Some(why) = refusal(self.last(), device) {
            return Err(self.fail(SessionFailure::Unusable(why)));
        }
        let (size, had) = (device.geometry.size, self.last().map(|last| last.geometry.size));
        match had {
            Some(had) if size > had => tracing::info!(size, had, "the device has grown"),
            Some(had) if size < had => {
                tracing::error!(size, had, "the device was made smaller; IO beyond its end fails");
            }
            _ => {}
        }
        let read_only = self.access == AccessMode::ReadOnly;
        let geometry = Geometry { read_only, ..device.geometry.clone() };
        Ok(Arc::new(OpenDevice { geometry, ..device.clone() }))
    }

    /// A path opened the device, which fits. True when the shards do not know it so.
    pub(super) fn opened(&mut self, device: &Arc<OpenDevice>) -> bool {
        self.obstacle = None;
        let is_new = self.get() != Some(device);
        self.last = Some(Arc::clone(device));
        if is_new {
            let (export, size) = (&self.config.export, device.geometry.size);
            tracing::info!(%export, size, id = device.device_id, "device open");
            self.state = State::Open;
        }
        is_new
    }

    /// The last path that had it open is gone.
    pub(super) fn lost(&mut self) {
        self.state = State::Closed;
    }

    /// It is to be closed until then.
    pub(super) fn close(&mut self, deadline: Instant) {
        self.state = State::Closing { path: None, deadline };
    }

    /// The device whose close is still to be sent.
    pub(super) fn to_close(&self) -> Option<u32> {
        let waits = matches!(self.state, State::Closing { path: None, .. });
        self.last().filter(|_| waits).map(|last| last.device_id)
    }

    /// The close was sent on this path.
    pub(super) fn close_sent(&mut self, over: PathId) {
        if let State::Closing { path, .. } = &mut self.state {
            *path = Some(over);
        }
    }

    /// True while this path is to answer the close.
    pub(super) fn is_closing_over(&self, over: PathId) -> bool {
        matches!(self.state, State::Closing { path, .. } if path == Some(over))
    }

    /// The path that was to answer the close is gone.
    pub(super) fn close_lost(&mut self) {
        if let State::Closing { deadline, .. } = &mut self.state {
            *deadline = Instant::ZERO;
        }
    }

    /// When the close is waited for no longer.
    pub(super) fn close_deadline(&self) -> Option<Instant> {
        match self.state {
            State::Closing { deadline, .. } => Some(deadline),
            _ => None,
        }
    }

    /// Closed in order, or given up.
    pub(super) fn end(&mut self) {
        self.state = State::Ended;
    }
}

/// Why a device cannot be used in place of the one opened last. The session's users know that one:
/// a write cache that it lacked would never be flushed.
fn refusal(last: Option<&OpenDevice>, device: &OpenDevice) -> Option<String> {
    let now = &device.geometry;
    if now.size == 0 {
        return Some("the server's device has 0 bytes".to_owned());
    }
    let OpenDevice { geometry: before, .. } = last?;
    let block = now.logical_block;
    if block > before.logical_block {
        let had = before.logical_block;
        return Some(format!(
            "the server's device has blocks of {block} bytes and had {had} before: attach again"
        ));
    }
    (now.write_cache && !before.write_cache).then(|| {
        "the server's device has a write cache and had none before: attach again".to_owned()
    })
}

fn open_hint(errno: u16, asked: AccessMode) -> &'static str {
    match errno {
        13 if asked == AccessMode::ReadOnly => {
            ": no access list lets this client open it, the server itself may not open it, or it \
             leads out of its search path (the server's log says which)"
        }
        2 => ": the server has no export of that name (rtrs-client discover lists them)",
        1 => ": another session has it open for writing (end that session, or use --access ro)",
        13 => ": the export is read-only (use --access ro)",
        15 => ": that is not a block device, and a kernel's server exports nothing else",
        16 => ": it is in use",
        22 => ": the server does not accept this name",
        30 => ": the export is read-only (use --access ro)",
        36 => ": the name is too long for the server",
        _ => "",
    }
}
