//! Volumes of an attached session, each from attach to detach, and the end of the session.
//!
//! A volume is first opened, then waits for the paths it requires, and is then served by its front
//! end: NBD clients may connect, or the device is set up in the kernel. A detach proceeds in
//! reverse order, each step with a time limit, while the other volumes keep running; detaching the
//! last volume ends the session. This code runs on the process's main thread, which the kernel
//! treats as the owner of the devices.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rtrs_core::block::Geometry;
use rtrs_core::local::ServiceManager;

use super::control_socket::{self, serve};
use super::device;
use super::events::{BY_SIGNAL, SavedFiles, Wake, not_open};
use super::fabrics::FabricRegistry;
use super::launch::{Running, ShardHandle};
use super::notices::Event;
use super::report;
use super::roster::Roster;
use super::saved::Saved;
use super::volume::{Step, Volume};
use super::waiting::Detach;
use crate::control_protocol::{Detached, Status};
use crate::engine::{Change, DeviceIndex, Reported};
use crate::error::{Error, ErrorKind, system};
use crate::plan::{AttachPlan, Front};

/// Time allowed for requests in flight when a signal ends the session.
const SIGNAL_GRACE: Duration = Duration::from_secs(10);
/// Time limit for a detach step, in addition to the time allowed for requests in flight.
const STEP_PATIENCE: Duration = Duration::from_secs(15);
/// Time for the server to close a volume, including the wait for a path to it.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum wait when nothing is due.
const IDLE: Duration = Duration::from_secs(3600);

pub(crate) struct AttachedSession {
    pub(crate) shards: ShardHandle,
    pub(crate) registry: Arc<FabricRegistry>,
    pub(crate) roster: Arc<Roster>,
    pub(crate) wakes: mpsc::Sender<Wake>,
    /// Service manager of a foreground process.
    manager: ServiceManager,
    pub(crate) files: SavedFiles,
    pub(crate) volumes: Vec<Volume>,
    /// Volumes that could not be attached, with the errors.
    pub(crate) failures: Vec<(String, Error)>,
    /// Time by which the session must have ended, set when it starts to end.
    over: Option<Instant>,
    /// Set when there is nothing left to wait for.
    done: bool,
    /// Reason for the end of the session.
    failed: Option<String>,
    /// Number of IOs still unfinished when the session's time limit expired.
    abandoned: usize,
}

impl AttachedSession {
    pub(crate) fn new(
        shards: ShardHandle,
        registry: Arc<FabricRegistry>,
        roster: Arc<Roster>,
        wakes: mpsc::Sender<Wake>,
        manager: ServiceManager,
    ) -> Self {
        Self {
            shards,
            registry,
            roster,
            wakes,
            manager,
            files: SavedFiles::default(),
            volumes: Vec::new(),
            failures: Vec::new(),
            over: None,
            done: false,
            failed: None,
            abandoned: 0,
        }
    }

    /// Adds a volume, visible to `list` and `detach`.
    ///
    /// # Errors
    /// Fails with the system's error if no thread can be started for its control socket.
    pub(crate) fn add(&mut self, volume: Volume, plan: AttachPlan) -> Result<(), Error> {
        let identity = &volume.identity;
        self.roster.add(identity.clone(), plan);
        if let Some(saved) = &volume.saved {
            self.files.add(identity.index, saved.clone());
        }
        let session = control_socket::Session {
            identity: identity.clone(),
            shards: self.shards.clone(),
            registry: Arc::clone(&self.registry),
            roster: Arc::clone(&self.roster),
            wakes: self.wakes.clone(),
        };
        let served = serve(&volume.control, session);
        self.volumes.push(volume);
        served.map_err(system("cannot serve the control socket"))
    }

    /// Whether the session has ended, or is ending.
    pub(super) fn is_over(&self) -> bool {
        self.done || self.is_ending()
    }

    /// Whether the session is ending.
    pub(crate) fn is_ending(&self) -> bool {
        self.over.is_some()
    }

    /// Whether a shard has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Runs until each volume is attached or has failed and its name is free, or until the session
    /// is ending.
    pub(crate) fn open(&mut self, inbox: &mpsc::Receiver<Wake>) {
        let waits = |volume: &Volume| volume.step != Step::Attached;
        while !self.is_over() && self.volumes.iter().any(waits) {
            self.step(inbox, None);
        }
    }

    /// Runs until the session has ended, then frees its resources.
    ///
    /// # Errors
    /// Fails with the reason if the session ended without being asked to.
    pub(crate) fn wait_end(
        mut self,
        inbox: &mpsc::Receiver<Wake>,
        running: Running,
    ) -> Result<(), Error> {
        while !self.done {
            self.step(inbox, None);
        }
        if self.volumes.iter().any(|volume| volume.held.lock().is_some()) {
            self.stop(Duration::ZERO);
        }
        self.volumes.iter().for_each(Volume::forget);
        if self.abandoned > 0 {
            tracing::warn!(self.abandoned, "IO requests did not end in time");
        }
        running.join();
        self.free(inbox);
        match self.failed {
            Some(text) => Err(Error::new(ErrorKind::System, text)),
            None => Ok(()),
        }
    }

    /// Frees the names, and only then replies to the waiting commands.
    fn free(&mut self, inbox: &mpsc::Receiver<Wake>) {
        let mut ended = Vec::new();
        for volume in self.volumes.drain(..) {
            let Volume { identity, control, detaches, add, refused, warning, .. } = volume;
            drop(control);
            ended.push((identity.name, detaches, warning));
            if let Some(add) = add {
                add.reply(Err(refused.unwrap_or_else(|| "the session has ended".into())));
            }
        }
        for wake in inbox.try_iter() {
            match wake {
                Wake::Detach(detach) => {
                    let volume = ended.iter_mut().find(|(name, ..)| *name == detach.name);
                    match volume {
                        Some((_, detaches, _)) => detaches.push(detach),
                        None => ended.push((detach.name.clone(), vec![detach], None)),
                    }
                }
                Wake::Add(add) => add.reply(Err("the session has ended".into())),
                _ => {}
            }
        }
        for (_, detaches, warning) in ended {
            let detached = Detached { detached: true, abandoned: self.abandoned, warning };
            detaches.into_iter().for_each(|detach| detach.reply(&detached));
        }
    }

    /// Handles the next event or expired time limit; waits no longer than `until`.
    pub(super) fn step(&mut self, inbox: &mpsc::Receiver<Wake>, until: Option<Instant>) {
        let due = self.over.or_else(|| self.volumes.iter().filter_map(Volume::due).min());
        let due = due.into_iter().chain(until).min();
        let left = due.map_or(IDLE, |at| at.saturating_duration_since(Instant::now()));
        // Only the latest of several sizes matters, so a size is applied once no event is pending.
        let resized = self
            .volumes
            .iter()
            .any(|volume| volume.resized.is_some() && !matches!(volume.step, Step::Opening(_)));
        match inbox.recv_timeout(if resized { Duration::ZERO } else { left }) {
            Ok(wake) => self.on_wake(wake),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                self.resize();
                self.check_time_limits(Instant::now());
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => self.done = true,
        }
    }

    /// Index of a device's volume.
    fn at(&self, device: DeviceIndex) -> Option<usize> {
        self.volumes.iter().position(|volume| volume.identity.index == device)
    }

    fn end_by_signal(&mut self) {
        tracing::info!("signal: finishing requests in flight");
        for at in 0..self.volumes.len() {
            self.note_failure(at, BY_SIGNAL);
        }
        let serve = self.volumes.iter().any(|volume| volume.step == Step::Attached);
        self.stop(if serve { SIGNAL_GRACE } else { Duration::ZERO });
    }

    fn on_wake(&mut self, wake: Wake) {
        match wake {
            Wake::Signal => self.end_by_signal(),
            Wake::Reload => {
                self.volumes.iter().for_each(|volume| volume.control.renewal().renew());
            }
            Wake::Detach(detach) => self.on_detach(detach),
            Wake::Add(add) => self.on_add(add),
            Wake::Disconnected(device, warning) => {
                if let Some(at) = self.at(device)
                    && self.volumes[at].step == Step::Disconnecting
                {
                    self.volumes[at].warning = warning;
                    if !self.is_ending() {
                        self.stop_front(at);
                    }
                }
            }
            Wake::Session(Event::ShardFailed(shard, error)) => {
                let text = format!("shard {shard}: {error}");
                for at in 0..self.volumes.len() {
                    self.note_failure(at, &text);
                }
                self.failed = Some(format!("shard {shard} ended: {error}"));
                self.done = true;
                // End all shards here: the control shard normally ends the others, but may be the
                // failed shard.
                if !self.volumes.iter().any(|volume| volume.was_attached) {
                    self.shards.end();
                }
            }
            Wake::Session(Event::Done { abandoned, left }) => {
                for (device, left) in left {
                    if let Some(at) = self.at(device) {
                        self.volumes[at].left.get_or_insert(left);
                    }
                }
                self.abandoned = abandoned;
                self.done = true;
            }
            Wake::Session(Event::VolumeGone(export)) => {
                let gone = |volume: &Volume| {
                    volume.identity.export == export && matches!(volume.step, Step::Closing(_))
                };
                if let Some(at) = self.volumes.iter().position(gone) {
                    self.finish(at);
                }
            }
            Wake::Session(Event::PathsChanged) => self.on_paths_changed(),
            Wake::Session(
                Event::Ready(device, _)
                | Event::Failed(device, _)
                | Event::Resized(device, _)
                | Event::FrontFailed(device, _)
                | Event::KernelGone(device, _)
                | Event::FrontStopped { device, .. },
            ) if self.at(device).is_none() => {}
            Wake::Session(event) => self.on_event(event),
        }
    }

    /// Handles an event of a volume.
    fn on_event(&mut self, event: Event) {
        match event {
            Event::Ready(device, geometry) => self.on_open(device, &geometry),
            Event::Failed(device, failure) => self.on_failure(device, &failure.to_string()),
            Event::FrontFailed(device, error) => self.on_front_failed(device, &error),
            Event::Resized(device, size) => {
                if let Some(at) = self.at(device) {
                    self.volumes[at].resized = Some(size);
                }
            }
            Event::KernelGone(device, shard) => {
                let Some(at) = self.at(device) else { return };
                let volume = &mut self.volumes[at];
                if volume.step == Step::Attached && self.over.is_none() {
                    volume.kernel_gone += 1;
                    let path = volume.identity.device.get();
                    let path = path.map(String::as_str).unwrap_or_default();
                    tracing::warn!("shard {shard}: the kernel has closed its connection to {path}");
                    if volume.kernel_gone == self.shards.count() {
                        self.on_kernel_gone(at);
                    }
                }
            }
            Event::FrontStopped { device, abandoned, left } => {
                let Some(at) = self.at(device) else { return };
                self.volumes[at].left = left;
                if matches!(self.volumes[at].step, Step::Stopping(_)) && !self.is_ending() {
                    self.volumes[at].abandoned = abandoned;
                    self.close(at);
                }
            }
            _ => {}
        }
    }

    /// Handles a front end that cannot use its device. Another shard may already serve the device.
    fn on_front_failed(&mut self, device: DeviceIndex, error: &io::Error) {
        let Some(at) = self.at(device) else { return };
        if self.volumes[at].step != Step::Attached {
            return self.on_failure(device, &error.to_string());
        }
        let text = format!("{}: cannot be served: {error}", self.volumes[at].identity.name);
        tracing::error!("{text}");
        self.note_error(at, Error::new(ErrorKind::System, text.clone()));
        self.leave(at, Duration::ZERO);
        if self.is_ending() {
            self.failed.get_or_insert(text);
        }
    }

    fn on_kernel_gone(&mut self, at: usize) {
        let text = device::KERNEL_GONE;
        tracing::error!("{}: {text}", self.volumes[at].identity.name);
        self.leave(at, Duration::ZERO);
        if self.is_ending() {
            self.failed.get_or_insert_with(|| text.to_owned());
        }
    }

    /// Serves the device of a volume that is now open.
    pub(super) fn on_open(&mut self, device: DeviceIndex, geometry: &Geometry) {
        let Some(at) = self.at(device) else { return };
        let is_opening = matches!(self.volumes[at].step, Step::Opening(_)) && self.over.is_none();
        if !is_opening || !self.has_required_paths(at, geometry) {
            return;
        }
        let volume = &mut self.volumes[at];
        volume.saved.iter().for_each(Saved::begin);
        if let Front::Device(options) = &volume.front {
            let (reached, name) = (volume.reached.take(), &volume.identity.name);
            if reached.is_none() {
                // The device may be connected more than once; udev should see only the last
                // connection.
                volume.saved.iter().for_each(|saved| saved.save_device(""));
            }
            match device::connect(reached, options, name, device, geometry, &self.shards) {
                Ok(connected) => {
                    let path = connected.path().display().to_string();
                    volume.saved.iter().for_each(|saved| saved.save_device(&path));
                    volume.identity.device.get_or_init(|| path);
                    volume.was_attached = true;
                    self.save_session();
                    device::announce(&connected);
                    *self.volumes[at].held.lock() = Some(connected);
                }
                Err(error) => {
                    volume.saved.iter().for_each(Saved::put_back);
                    self.fail(at, error);
                    return;
                }
            }
        }
        self.shards.serve_fronts(device);
        let volume = &mut self.volumes[at];
        (volume.step, volume.was_attached) = (Step::Attached, true);
        if let Some(add) = volume.add.take() {
            tracing::info!("{} is attached", add.name);
            let status = self.status(&add.name);
            let gone = || "the volume is already detached".to_owned();
            add.reply(status.map(report::attached).ok_or_else(gone));
        }
    }

    /// Saves the list of volumes that share the session, for a process that takes over all volumes.
    fn save_session(&mut self) {
        let several = self.volumes.len() > 1;
        let is_device = |volume: &&mut Volume| matches!(volume.front, Front::Device(_));
        let attached = self.volumes.iter_mut().filter(|volume| volume.was_attached);
        for volume in attached.filter(is_device) {
            let Some(saved) = &volume.saved else { continue };
            if !several {
                // Remove the list that an earlier process may have left.
                saved.forget_volume();
            } else if !volume.is_session_saved
                && let Some(shared) = self.roster.saved(&volume.identity.name)
            {
                saved.save_volume(&shared);
                volume.is_session_saved = true;
            }
        }
    }

    /// Handles the failure of a volume.
    pub(super) fn on_failure(&mut self, device: DeviceIndex, why: &str) {
        if let Some(at) = self.at(device)
            && matches!(self.volumes[at].step, Step::Opening(_))
        {
            let name = &self.volumes[at].identity.name;
            let error = Error::new(ErrorKind::Path, format!("cannot attach {name}: {why}"));
            self.fail(at, error);
        }
    }

    /// Fails the attach of a volume.
    fn fail(&mut self, at: usize, error: Error) {
        self.note_error(at, error);
        self.leave(at, Duration::ZERO);
    }

    /// Records the reason why a volume that is being opened cannot be attached. The caller must end
    /// the volume.
    fn note_failure(&mut self, at: usize, why: &str) {
        let volume = &self.volumes[at];
        if matches!(volume.step, Step::Opening(_)) {
            let text = format!("cannot attach {}: {why}", volume.identity.name);
            self.note_error(at, Error::new(ErrorKind::Path, text));
        }
    }

    fn note_error(&mut self, at: usize, error: Error) {
        let volume = &mut self.volumes[at];
        match volume.add {
            Some(_) => {
                tracing::warn!("{}", error.chain());
                volume.refused = Some(error.chain().to_string());
            }
            None => self.failures.push((volume.identity.name.clone(), error)),
        }
    }

    fn on_detach(&mut self, detach: Detach) {
        let found = self.volumes.iter().position(|volume| volume.identity.name == detach.name);
        let Some(at) = found else {
            // The volume was already ending when its socket received this request.
            return detach.reply(&Detached { detached: true, abandoned: 0, warning: None });
        };
        let within = detach.within;
        self.note_failure(at, "detached before it was open");
        self.volumes[at].detaches.push(detach);
        self.leave(at, within);
    }

    /// Begins to detach a volume, or shortens the time limit of a detach in progress: requests in
    /// flight must finish within this time. Detaching the last volume ends the session.
    pub(super) fn leave(&mut self, at: usize, within: Duration) {
        if self.volumes[at].waits_for_paths.is_some() {
            self.stop_waiting(at);
        }
        let others = || self.volumes.iter().enumerate().filter(|(other, _)| *other != at);
        if self.is_ending() || !others().any(|(_, volume)| volume.is_wanted()) {
            return self.stop(within);
        }
        let by = Instant::now() + within;
        let volume = &mut self.volumes[at];
        volume.show_end();
        volume.resized = None;
        let by = volume.detached_by.map_or(by, |before| before.min(by));
        volume.detached_by = Some(by);
        match volume.step {
            Step::Opening(_) | Step::Attached => {
                volume.step = Step::Disconnecting;
                // This also waits for the requests in flight, while IO can still be served.
                let (held, device) = (Arc::clone(&volume.held), volume.identity.index);
                let wakes = self.wakes.clone();
                let disconnect = move || {
                    let warning = device::disconnect(&held, within);
                    // No receiver is left once the session has ended.
                    drop(wakes.send(Wake::Disconnected(device, warning)));
                };
                let builder = std::thread::Builder::new().name("rtrs-detach".into());
                if let Err(error) = builder.spawn(disconnect) {
                    tracing::warn!("cannot start a thread for a detach: {error}");
                    let warning = device::disconnect(&self.volumes[at].held, within);
                    self.volumes[at].warning = warning;
                    self.stop_front(at);
                }
            }
            Step::Stopping(_) => self.stop_front(at),
            Step::Disconnecting | Step::Closing(_) => {}
        }
    }

    /// Lets the front ends of a volume finish the requests in flight.
    fn stop_front(&mut self, at: usize) {
        let now = Instant::now();
        let volume = &mut self.volumes[at];
        let left = volume.detached_by.map(|by| by.saturating_duration_since(now));
        let left = left.unwrap_or_default();
        volume.step = Step::Stopping(now + left + STEP_PATIENCE);
        self.shards.stop_fronts(volume.identity.index, left);
    }

    /// Begins to close a volume in the session.
    fn close(&mut self, at: usize) {
        let volume = &mut self.volumes[at];
        volume.step = Step::Closing(Instant::now() + CLOSE_PATIENCE);
        self.shards.remove_fronts(volume.identity.index);
        let export = volume.identity.export.clone();
        if let Err(error) = self.shards.change(Change::CloseVolume { export }) {
            tracing::warn!("{}: {error}", self.volumes[at].identity.name);
            self.finish(at);
        }
    }

    /// Removes a volume and frees its name.
    fn finish(&mut self, at: usize) {
        let volume = self.volumes.swap_remove(at);
        volume.forget();
        self.files.remove(volume.identity.index);
        self.roster.remove(&volume.identity.name);
        let Volume { identity, control, detaches, add, refused, warning, abandoned, .. } = volume;
        drop(control);
        if let Some((add, why)) = add.zip(refused) {
            add.reply(Err(why));
        }
        tracing::info!("{} is detached", identity.name);
        if abandoned > 0 {
            tracing::warn!(abandoned, "{}: IO requests did not end in time", identity.name);
        }
        let detached = Detached { detached: true, abandoned, warning };
        detaches.into_iter().for_each(|detach| detach.reply(&detached));
    }

    /// Passes new sizes to the kernel.
    fn resize(&mut self) {
        for volume in &mut self.volumes {
            let Some(size) = volume.step.take_size(&mut volume.resized) else { continue };
            if self.over.is_none()
                && let Some(held) = &*volume.held.lock()
            {
                device::resize(held, volume.identity.index, size, &self.shards);
            }
        }
    }

    /// Handles time limits that have expired.
    fn check_time_limits(&mut self, now: Instant) {
        if let Some(over) = self.over {
            self.done |= over <= now;
            return;
        }
        let is_due = |volume: &Volume| volume.due().is_some_and(|at| at <= now);
        // The failure of the last volume ends the session.
        while self.over.is_none()
            && let Some(at) = self.volumes.iter().position(is_due)
        {
            match self.volumes[at].step {
                Step::Opening(_) => {
                    if self.fail_without_paths(at) {
                        continue;
                    }
                    let device = self.volumes[at].identity.index;
                    let limit = self.volumes[at].patience;
                    self.on_failure(device, &not_open(limit, &self.shards));
                }
                // A shard is stuck.
                Step::Stopping(_) => self.close(at),
                _ => self.finish(at),
            }
        }
    }

    /// Ends the session, or shortens its time limit if it is already ending. The devices end first,
    /// while their IO can still be served.
    pub(crate) fn stop(&mut self, within: Duration) {
        self.volumes.iter().for_each(Volume::show_end);
        self.manager.stopping();
        let begin = Instant::now();
        let held: Vec<_> = self.volumes.iter().map(|volume| Arc::clone(&volume.held)).collect();
        let warnings = device::disconnect_all(&held, within);
        for (volume, warning) in self.volumes.iter_mut().zip(warnings) {
            volume.warning = warning.or_else(|| volume.warning.take());
        }
        let left = within.saturating_sub(begin.elapsed());
        self.shards.shut_down(left);
        let over = Instant::now() + left + STEP_PATIENCE;
        self.over = Some(self.over.map_or(over, |before| before.min(over)));
    }

    /// Status of a volume.
    pub(crate) fn status(&self, name: &str) -> Option<Status> {
        let volume = self.volumes.iter().find(|volume| volume.identity.name == name)?;
        let reports = self.shards.reports(Reported::One(volume.identity.index));
        let names = self.roster.names();
        Some(report::status(&volume.identity, &names, &reports))
    }
}
