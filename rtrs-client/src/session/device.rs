//! What the service connection of a path tells, and the device that it opens.
//!
//! Every path opens the device before it carries IO, so that a path which joins a session the
//! server made anew finds the device there; a repeated open returns the same device. Called by
//! `control.rs` with each completion of a service connection.

use std::sync::Arc;

use rtrs_core::block::Geometry;
use rtrs_core::fabric::{CloseReason, Fabric, FabricError};
use rtrs_core::identity::EvictionSecret;
use rtrs_core::ids::PermitId;
use rtrs_core::time::Instant;
use rtrs_core::wire::{AccessMode, errno, errno_name};

use super::control::{DeviceState, Path, STEP_TIMEOUT, SessionControl};
use super::permits::CONTROL;
use super::{Granted, OpenDevice, ToShard};
use crate::path::handshake::{ServiceConnection, ServiceEvent};
use crate::path::state::PathState;

/// Why a session cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionFailure {
    /// The server refused to open the export.
    #[error("the server refused to open '{export}': {errno}{hint}")]
    OpenRefused {
        /// The export asked for.
        export: String,
        /// The server's errno by name.
        errno: String,
        /// What would do.
        hint: &'static str,
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
    /// What the server grants cannot be worked with.
    #[error("{0}")]
    Unusable(String),
}

impl SessionControl {
    /// True while a refusal to open may still pass.
    pub(super) fn is_patient(&self, now: Instant) -> bool {
        !self.opened_once && now < self.patient_until
    }

    /// A session whose every path failed, on each of its addresses, before the device was ever
    /// open gives up: whoever attaches is told why at once instead of waiting for a server that
    /// may never come.
    pub(super) fn judge_start(&mut self, now: Instant) {
        let hopeless = self
            .paths
            .iter()
            .all(|path| path.reconnect.has_tried_all() && path.state == PathState::Waiting);
        let decided = self.opened_once || self.failure.is_some() || self.detaching;
        // Another disk does not turn into the right one by waiting.
        let elsewhere = self.paths.iter().all(Path::leads_elsewhere);
        if decided || !hopeless || (self.is_patient(now) && !elsewhere) {
            return;
        }
        let told: Vec<String> = self
            .paths
            .iter()
            .map(|path| {
                let why = path.last_error.as_deref().unwrap_or("no answer");
                format!("{}: {why}", path.target.name)
            })
            .collect();
        self.failure = Some(SessionFailure::Unreachable(told.join("; ")));
    }

    /// Takes the server's bounds, which may not change over the life of the session.
    pub(super) fn accept_grant(&mut self, granted: Granted) -> Result<(), SessionFailure> {
        let cores = self.config.cores;
        let depth = granted.depth(&self.config);
        if depth <= cores {
            let fewer = (depth > 1).then(|| format!("--shards {}, or ", depth - 1));
            let fewer = fewer.unwrap_or_default();
            return Err(SessionFailure::Unusable(format!(
                "a queue depth of {depth} is too small for {cores} shards and the service \
                 connection: use {fewer}a larger queue depth"
            )));
        }
        match self.granted {
            Some(before) if before.bounds() != granted.bounds() => {
                Err(SessionFailure::Unusable(format!(
                    "the server changed its bounds (queue depth {} to {}, largest request {} \
                     to {}): detach and attach again",
                    before.queue_depth,
                    granted.queue_depth,
                    before.max_io_size,
                    granted.max_io_size
                )))
            }
            Some(_) => Ok(()),
            None => {
                self.granted = Some(granted);
                self.tell_all(ToShard::Granted(granted));
                Ok(())
            }
        }
    }

    /// Why a connection ended; with what is likely, if that was the answer to the introduction.
    pub(super) fn describe_end(&self, index: usize, reason: &CloseReason) -> String {
        if self.paths[index].state != PathState::Introducing {
            return reason.to_string();
        }
        let name = &self.config.name;
        format!(
            "{reason}: perhaps another session there has the name {name} (--session-name); the \
             server's log says why"
        )
    }

    /// What a completion of the path's service connection meant.
    pub(super) fn on_service_event(
        &mut self,
        now: Instant,
        index: usize,
        event: Result<ServiceEvent, String>,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        let provider = self.paths[index].target.provider;
        let id = self.paths[index].id;
        match event {
            Err(misdeed) => self.end_path(now, index, Some(misdeed), fabrics),
            Ok(ServiceEvent::Nothing) => {}
            Ok(ServiceEvent::HeartbeatAsked) => {
                let path = &mut self.paths[index];
                let answered = path
                    .service
                    .as_mut()
                    .map(|service| service.post_heartbeat(true, fabrics[provider].as_mut()));
                if let Some(Err(error)) = answered {
                    self.end_path(now, index, Some(error.to_string()), fabrics);
                }
            }
            Ok(ServiceEvent::HeartbeatAnswered) => {
                let path = &mut self.paths[index];
                if let Some(latency) = path.heartbeat.on_answer(now) {
                    path.shared.set_latency(latency);
                }
            }
            Ok(ServiceEvent::Introduced { chunks }) => {
                let count = self.paths.len() as u32;
                let path = &mut self.paths[index];
                if path.state != PathState::Introducing {
                    return;
                }
                path.state.advance(PathState::Opening);
                path.chunks = Some(chunks);
                // Counts from its turn to open the device; all before it have their own bound.
                path.until = now + STEP_TIMEOUT * count;
                if path.service.as_ref().is_some_and(ServiceConnection::fences) {
                    self.start_heartbeat(now, index);
                }
                self.open_next(now, fabrics);
            }
            Ok(ServiceEvent::Opened { device, secret }) => {
                self.on_opened(now, index, (&device, secret), fabrics);
            }
            Ok(ServiceEvent::OpenRefused(errno)) => {
                if self.paths[index].state != PathState::Opening {
                    return;
                }
                if errno == errno::EACCES
                    && self.config.read_only_fallback
                    && self.paths[index].asked == AccessMode::ReadWrite
                    && (!self.opened_once || self.access == AccessMode::ReadOnly)
                {
                    tracing::info!("the export is read-only: opening it so");
                    self.access = AccessMode::ReadOnly;
                    self.open_device(now, index, fabrics);
                    return;
                }
                let failure = SessionFailure::OpenRefused {
                    export: self.config.export.clone(),
                    errno: errno_name(errno).to_owned(),
                    hint: open_hint(errno),
                };
                let why = failure.to_string();
                let may_pass = matches!(errno, errno::EPERM | errno::EBUSY) && self.is_patient(now);
                if !self.opened_once && !may_pass {
                    self.failure = Some(failure);
                }
                self.end_path(now, index, Some(why), fabrics);
            }
            Ok(ServiceEvent::Fenced) => self.on_fence_answer(now, id, fabrics),
            Ok(ServiceEvent::Closed) => {
                if matches!(self.device, DeviceState::Closing { path, .. } if path == id) {
                    self.end_all(now, fabrics);
                }
            }
        }
    }

    /// The server says to path `index` that it will not let this session in again. Nobody waits
    /// for that, and nobody tries again.
    pub(super) fn on_evicted(
        &mut self,
        now: Instant,
        index: usize,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        if self.failure.is_none() {
            tracing::error!("{}", SessionFailure::Evicted);
            self.failure = Some(SessionFailure::Evicted);
        }
        self.tell_all(ToShard::GiveUp);
        for other in (0..self.paths.len()).filter(|other| *other != index) {
            self.end_path(now, other, Some("the session was evicted".to_owned()), fabrics);
        }
    }

    /// Lets the next path open the device, one after the other: all use the same permit, and to a
    /// kernel server that is the same memory, whichever path a request comes over (6.1,
    /// rtrs-srv.c:get_or_create_srv). True when one began.
    pub(super) fn open_next(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        let opening = |path: &Path| path.state == PathState::Opening;
        if self.detaching || self.failure.is_some() || self.is_using(CONTROL) {
            return false;
        }
        let Some(index) = self.paths.iter().position(opening) else { return false };
        self.paths[index].until = now + STEP_TIMEOUT;
        self.open_device(now, index, fabrics);
        true
    }

    /// True while a path has this permit of the home core's in use.
    pub(super) fn is_using(&self, permit: PermitId) -> bool {
        self.paths.iter().any(|path| {
            matches!(path.state, PathState::Opening | PathState::Connected)
                && path.service.as_ref().is_some_and(|service| service.is_using(permit))
        })
    }

    fn start_heartbeat(&mut self, now: Instant, index: usize) {
        let path = &mut self.paths[index];
        let rhythm = path.rhythm(&self.config);
        path.heartbeat.start(now, rhythm);
    }

    fn open_device(&mut self, now: Instant, index: usize, fabrics: &mut [Box<dyn Fabric>]) {
        let provider = self.paths[index].target.provider;
        let path = &mut self.paths[index];
        let Some(service) = path.service.as_mut() else { return };
        let (export, access) = (&self.config.export, self.access);
        path.asked = access;
        if let Err(error) = service.post_open(export, access, fabrics[provider].as_mut()) {
            self.end_path(now, index, Some(error.to_string()), fabrics);
        }
    }

    fn on_opened(
        &mut self,
        now: Instant,
        index: usize,
        (device, secret): (&OpenDevice, Option<EvictionSecret>),
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        let path = &mut self.paths[index];
        if path.state != PathState::Opening || self.detaching {
            return;
        }
        let Some(chunks) = path.chunks.take() else { return };
        let server = path.server_id;
        let others = self.paths.iter().any(|path| path.state == PathState::Connected);
        let why = self
            .pinned
            .refuses(server, self.last.as_deref(), device)
            .or_else(|| self.pinned.refuses_beside(server, device.export_id).filter(|_| others));
        if let Some(why) = why {
            self.end_path(now, index, Some(why), fabrics);
            return;
        }
        let mut size = device.geometry.size;
        if let Some(why) = refusal(self.last.as_deref(), device) {
            let failure = SessionFailure::Unusable(why);
            let text = failure.to_string();
            if !self.opened_once {
                self.failure = Some(failure);
            }
            self.end_path(now, index, Some(text), fabrics);
            return;
        }
        if let Some(last) = &self.last
            && size > last.geometry.size
        {
            tracing::warn!("the server's device grew to {size} bytes: attach again to use them");
            size = last.geometry.size;
        }
        let device = Arc::new(OpenDevice {
            geometry: Geometry {
                size,
                read_only: self.access == AccessMode::ReadOnly,
                ..device.geometry.clone()
            },
            ..device.clone()
        });
        self.pinned.meet((server, device.export_id), secret);
        self.meet_cache(now, index, &device);
        self.opened_once = true;
        self.last = Some(Arc::clone(&device));
        if self.device() != Some(&device) {
            let (export, size) = (&self.config.export, device.geometry.size);
            tracing::info!(%export, size, id = device.device_id, "device open");
            self.device = DeviceState::Open { device: Arc::clone(&device) };
            self.tell_all(ToShard::Open(device));
        }
        tracing::info!(path = %self.paths[index].target.name, "path connected");
        if self.paths[index].leave.is_some() {
            // It only had to come back as proof that nothing of it is left.
            self.paths[index].state.advance(PathState::Connected);
            self.readmitted(index);
            return self.end_path(now, index, None, fabrics);
        }
        let path = &mut self.paths[index];
        path.state.advance(PathState::Connected);
        path.reconnect.connected();
        path.last_error = None;
        self.start_heartbeat(now, index);
        let path = &mut self.paths[index];
        path.fence.connected(chunks);
        self.readmitted(index);
        self.advance_fences(now, fabrics);
    }
}

/// Why a device cannot be used in place of the one opened last. Who uses the session was told of
/// that one, once: a write cache that it lacked would never be flushed.
fn refusal(last: Option<&OpenDevice>, device: &OpenDevice) -> Option<String> {
    let now = &device.geometry;
    let Some(OpenDevice { geometry: before, .. }) = last else {
        return (now.size == 0).then(|| "the server's device has 0 bytes".to_owned());
    };
    let (size, block) = (now.size, now.logical_block);
    if size < before.size {
        let had = before.size;
        return Some(format!(
            "the server's device has {size} bytes and had {had} before: attach again"
        ));
    }
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

fn open_hint(errno: u16) -> &'static str {
    match errno {
        2 => ": the server has no export of that name",
        1 => ": another session has it open for writing (wait for its end, or try --access ro)",
        13 => ": the export is read-only (try --access ro)",
        15 => ": that is no block device, and a kernel's server exports nothing else",
        16 => ": it is in use",
        22 => ": the server takes no such name",
        30 => ": the export is read-only (try --access ro)",
        36 => ": the name is too long for the server",
        _ => "",
    }
}

impl From<&FabricError> for SessionFailure {
    fn from(error: &FabricError) -> Self {
        Self::Unusable(error.to_string())
    }
}
