//! Volumes that a program uses within its own process; the crate `rtrs` is their public interface.
//!
//! Each volume has its own session, with the same engine, shards and front-end trait as an attached
//! volume. Its front ends are queues (`frontend/queue.rs`). There is no control socket or signal
//! handler, and no log other than the program's.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rtrs_core::block::Geometry;
use rtrs_core::identity::Identity;
use rtrs_core::ids::CoreIndex;
use rtrs_core::mem::Region;

use crate::daemon::config::{session_config, volume_config};
use crate::daemon::driver::ClientShardReport;
use crate::daemon::events::{READY_TIMEOUT, SavedFiles, Wake, forward_events, wait_ready};
use crate::daemon::fabrics::FabricRegistry;
use crate::daemon::launch::{self, Running, ShardHandle, VolumeFronts};
use crate::daemon::notices::Event;
use crate::engine::{DeviceIndex, Reported, SessionConfig};
use crate::error::{Error, system};
use crate::frontend::MemoryChangeKind;
use crate::frontend::queue::{GeometryWatch, QueueLimits, queue, queues};
pub use crate::frontend::queue::{Outcome, Pieces, QueueUser, Submission};
pub use crate::plan::{EMBED_DEPTH_MAX, EmbedOptions, EmbedPlan, VolumeUri};
use crate::stats::{OpCount, PathCount};

/// Maximum number of unread events; beyond that, the oldest is dropped.
pub const EVENTS_MAX: usize = 256;
/// Maximum time allowed for requests in flight when a session ends.
const GRACE_MAX: Duration = Duration::from_secs(3600);
/// Time that ending a session may take in addition to the grace period for its requests.
const END_PATIENCE: Duration = Duration::from_secs(15);

/// Change to an open volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeEvent {
    /// The volume has a new size, in bytes.
    Resized(u64),
    /// The volume has become read-only (true), or writable (false).
    ReadOnly(bool),
    /// The number of connected paths has changed.
    Paths {
        /// Number of connected paths.
        connected: usize,
        /// Number of paths.
        total: usize,
    },
    /// The volume has failed for this reason. It serves no IO.
    Failed(String),
}

/// End of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All shards have ended; this number of requests did not finish in time.
    Done(usize),
    /// A shard has failed.
    ShardFailed,
}

#[derive(Debug, Default)]
struct Listed {
    events: VecDeque<VolumeEvent>,
    end: Option<End>,
}

/// Unread events.
#[derive(Debug, Default)]
struct EventList {
    listed: Mutex<Listed>,
    changed: Condvar,
}

impl EventList {
    fn add(&self, event: VolumeEvent) {
        let mut listed = self.listed.lock();
        if listed.events.len() == EVENTS_MAX {
            listed.events.pop_front();
        }
        listed.events.push_back(event);
        self.changed.notify_all();
    }

    /// Takes the next event. Returns None after `timeout`, or if the session has ended.
    fn next(&self, timeout: Duration) -> Option<VolumeEvent> {
        let mut listed = self.listed.lock();
        let waits = |listed: &mut Listed| listed.events.is_empty() && listed.end.is_none();
        self.changed.wait_while_for(&mut listed, waits, timeout);
        listed.events.pop_front()
    }

    fn end(&self, end: End) {
        self.listed.lock().end.get_or_insert(end);
        self.changed.notify_all();
    }

    fn wait_end(&self, timeout: Duration) -> Option<End> {
        let mut listed = self.listed.lock();
        self.changed.wait_while_for(&mut listed, |listed| listed.end.is_none(), timeout);
        listed.end
    }

    fn has_ended(&self) -> bool {
        self.listed.lock().end.is_some()
    }
}

/// Adds events for the geometry changes that users need to know about.
fn list_changes(events: &EventList, before: &Geometry, now: &Geometry) {
    if before.size != now.size {
        events.add(VolumeEvent::Resized(now.size));
    }
    if before.read_only != now.read_only {
        events.add(VolumeEvent::ReadOnly(now.read_only));
    }
}

/// Numbers of connected paths and of all paths, as known to shard 0.
fn count_paths(shards: &ShardHandle) -> Option<(usize, usize)> {
    let reports = shards.reports(Reported::None);
    let paths = control(&reports)?.engine.paths.as_ref()?;
    Some((paths.iter().filter(|path| path.is_connected()).count(), paths.len()))
}

fn control(reports: &[ClientShardReport]) -> Option<&ClientShardReport> {
    reports.iter().find(|report| report.engine.shard == CoreIndex(0))
}

/// Converts the events of a session until it ends.
fn follow(inbox: &mpsc::Receiver<Wake>, shards: &ShardHandle, events: &EventList) {
    shards.watch_paths();
    let mut known = count_paths(shards);
    for wake in inbox {
        let Wake::Session(event) = wake else { continue };
        match event {
            Event::PathsChanged => {
                // The paths are watched before they are counted, so that no later change is missed.
                shards.watch_paths();
                let counted = count_paths(shards);
                if counted != known
                    && let Some((connected, total)) = counted
                {
                    known = counted;
                    events.add(VolumeEvent::Paths { connected, total });
                }
            }
            Event::Failed(_, failure) => events.add(VolumeEvent::Failed(failure.to_string())),
            Event::FrontFailed(_, error) => events.add(VolumeEvent::Failed(error.to_string())),
            Event::ShardFailed(shard, error) => {
                events.add(VolumeEvent::Failed(format!("shard {shard} ended: {error}")));
                shards.end();
                return events.end(End::ShardFailed);
            }
            Event::Done { abandoned, .. } => return events.end(End::Done(abandoned)),
            _ => {}
        }
    }
    events.end(End::Done(0));
}

/// Path of a volume's session.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// Path as configured.
    pub name: String,
    /// Name of the state, as in session listings.
    pub state: String,
    /// Whether the path is connected.
    pub connected: bool,
    /// Number of reconnects.
    pub reconnects: u64,
    /// Reason why the path last went down, unless it is connected.
    pub last_error: Option<String>,
    /// Counters of all shards.
    pub counts: PathCount,
}

/// Status and counters of a volume.
#[derive(Clone, Debug)]
pub struct VolumeReport {
    /// Paths of the session.
    pub paths: Vec<PathReport>,
    /// Counters by operation: read, write, flush, discard, write zeroes, extents.
    pub ops: [OpCount; 6],
    /// Number of unfinished requests.
    pub inflight: usize,
    /// Identity that the volume is pinned to, if the server reports one.
    pub identity: Option<Identity>,
}

/// Open volume with its session. Dropping it does not end the session: see
/// [`close`](Self::close).
pub struct EmbeddedVolume {
    shards: ShardHandle,
    /// Threads of the session, until it is closed. The lock makes the handle shareable.
    running: Mutex<Option<Running>>,
    events: Arc<EventList>,
    geometry: Arc<GeometryWatch>,
}

impl EmbeddedVolume {
    /// Opens the volume of a plan. Waits at most 30 s longer than the plan retries. Returns a queue
    /// for each shard.
    ///
    /// # Errors
    /// [`ErrorKind::Path`](crate::ErrorKind::Path) if no path opens the volume, with the reasons;
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the system cannot provide threads,
    /// descriptors or rings.
    pub fn open(plan: &EmbedPlan) -> Result<(Self, Vec<QueueUser>), Error> {
        plan.session.check()?;
        plan.session.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
        let volumes = vec![volume_config(&plan.session)];
        let config = SessionConfig {
            open_patience: plan.options.retry_for,
            ..session_config(&plan.session, volumes)?
        };
        let registry = Arc::new(FabricRegistry::new(&plan.session)?);
        let limits = QueueLimits { depth: plan.options.queue_depth, io_max: plan.options.io_max };
        let made = (0..config.shards).map(|_| queue(limits)).collect::<Result<Vec<_>, _>>();
        let made = made.map_err(system("cannot create the queues"))?;
        let (users, servers) = made.into_iter().unzip::<_, _, Vec<_>, Vec<_>>();
        let events = Arc::<EventList>::default();
        let list = Arc::clone(&events);
        let geometry = Arc::new(GeometryWatch {
            now: Mutex::default(),
            changed: Box::new(move |before, now| list_changes(&list, before, now)),
        });
        let name = plan.session.name.clone();
        let fronts = vec![VolumeFronts { name, make: queues(servers, limits, &geometry) }];
        let running = launch::start(&plan.session.settings, config, fronts, &registry)?;
        let (wakes, inbox) = mpsc::channel();
        let running = forward_events(running, wakes, SavedFiles::default());
        let shards = running.shards();
        let what = format!("open {}", plan.session.export_name);
        let limit = READY_TIMEOUT + plan.options.retry_for;
        if let Err(error) = wait_ready(&inbox, &shards, &what, limit) {
            running.join();
            return Err(error);
        }
        let volume = Self { shards, running: Mutex::new(Some(running)), events, geometry };
        volume.spawn_follower(inbox)?;
        Ok((volume, users))
    }

    fn spawn_follower(&self, inbox: mpsc::Receiver<Wake>) -> Result<(), Error> {
        let (shards, events) = (self.shards.clone(), Arc::clone(&self.events));
        let builder = thread::Builder::new().name("rtrs-events".into());
        let spawned = builder.spawn(move || follow(&inbox, &shards, &events));
        if spawned.is_err() {
            self.shards.shut_down(Duration::ZERO);
        }
        spawned.map(drop).map_err(system("cannot start a thread"))
    }

    /// Current size, limits and capabilities.
    pub fn geometry(&self) -> Geometry {
        self.geometry.now.lock().clone()
    }

    /// Takes the next event; None if there is none within `timeout`, or the session has ended.
    pub fn next_event(&self, timeout: Duration) -> Option<VolumeEvent> {
        self.events.next(timeout)
    }

    /// Whether the session has ended.
    pub fn has_ended(&self) -> bool {
        self.running.lock().is_none() || self.events.has_ended()
    }

    /// Status and counters; None if a shard does not answer within two seconds.
    pub fn report(&self) -> Option<VolumeReport> {
        if self.has_ended() {
            return None;
        }
        let reports = self.shards.reports(Reported::One(DeviceIndex::FIRST));
        let control = control(&reports).filter(|_| reports.len() == self.shards.count())?;
        let mut stats = control.engine.stats.clone();
        let others = reports.iter().filter(|report| report.engine.shard != CoreIndex(0));
        others.for_each(|report| stats.add(&report.engine.stats));
        let devices = || reports.iter().filter_map(|one| one.engine.device(DeviceIndex::FIRST));
        let mut ops = [OpCount::default(); 6];
        for device in devices() {
            ops.iter_mut().zip(&device.stats.ops).for_each(|(sum, one)| sum.add(one));
        }
        let paths = control.engine.paths.iter().flatten().map(|path| PathReport {
            name: path.path.clone(),
            state: path.state_name(),
            connected: path.is_connected(),
            reconnects: path.reconnects,
            last_error: path.last_error(),
            counts: stats.paths.get(path.id.index()).copied().unwrap_or_default(),
        });
        let volume = control.engine.volume(DeviceIndex::FIRST);
        Some(VolumeReport {
            paths: paths.collect(),
            ops,
            inflight: devices().map(|device| device.inflight).sum(),
            identity: volume.and_then(|volume| volume.identity),
        })
    }

    /// Registers memory with all paths, including later connections. Requests with a single piece
    /// of this memory use it in place, even over RDMA.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the system or a device refuses, or a
    /// shard does not answer in time. The memory is then not registered.
    pub fn register_memory(&self, region: &Arc<Region>) -> Result<(), Error> {
        let device = DeviceIndex::FIRST;
        let registered = self.shards.change_memory(device, region, MemoryChangeKind::Register);
        registered.map_err(|error| {
            self.unregister_memory(region);
            system("cannot register memory")(error)
        })
    }

    /// Deregisters memory once no request in flight uses it. Returns false if that takes more than
    /// 10 s; the memory is then deregistered later.
    pub fn unregister_memory(&self, region: &Arc<Region>) -> bool {
        let device = DeviceIndex::FIRST;
        let is_done =
            || self.shards.change_memory(device, region, MemoryChangeKind::Unregister).is_ok();
        self.has_ended() || is_done() || self.has_ended()
    }

    /// Ends the session: requests in flight finish within `grace`, at most an hour, and the rest
    /// then fail. Takes at most 20 s longer than `grace`. Returns the number of requests that did
    /// not finish in time; 0 if the session was already closed.
    pub fn close(&mut self, grace: Duration) -> usize {
        let Some(running) = self.running.get_mut().take() else { return 0 };
        let (begin, grace) = (Instant::now(), grace.min(GRACE_MAX));
        self.shards.shut_down(grace);
        let end = self.events.wait_end(grace + END_PATIENCE);
        if end.is_none() {
            tracing::error!("the session did not end within {} s", begin.elapsed().as_secs());
            self.shards.end();
        }
        running.join();
        match end {
            Some(End::Done(abandoned)) => abandoned,
            Some(End::ShardFailed) | None => 0,
        }
    }

    /// Releases the handle without ending the session, whose threads belong to another process.
    pub fn forget(&mut self) {
        std::mem::forget(self.running.get_mut().take());
    }
}

impl fmt::Debug for EmbeddedVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedVolume").field("ended", &self.has_ended()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_does_not_read_loses_the_oldest_events() {
        let events = EventList::default();
        for bytes in 0..=EVENTS_MAX as u64 {
            events.add(VolumeEvent::Resized(bytes));
        }
        assert_eq!(events.next(Duration::ZERO), Some(VolumeEvent::Resized(1)));
        let left = std::iter::from_fn(|| events.next(Duration::ZERO));
        assert_eq!(left.last(), Some(VolumeEvent::Resized(EVENTS_MAX as u64)));
        assert_eq!(events.next(Duration::from_millis(1)), None);
    }

    #[test]
    fn changes_of_the_geometry_are_listed_one_by_one() {
        let events = EventList::default();
        let before = Geometry::plain(512);
        list_changes(&events, &before, &Geometry { read_only: true, ..Geometry::plain(1024) });
        list_changes(&events, &before, &Geometry { fua: false, ..before.clone() });
        assert_eq!(events.next(Duration::ZERO), Some(VolumeEvent::Resized(1024)));
        assert_eq!(events.next(Duration::ZERO), Some(VolumeEvent::ReadOnly(true)));
        assert_eq!(events.next(Duration::ZERO), None);
    }

    #[test]
    fn the_end_of_a_session_ends_all_waits() {
        let events = Arc::<EventList>::default();
        let waiting = Arc::clone(&events);
        let reader = thread::spawn(move || waiting.next(Duration::from_secs(60)));
        assert!(events.wait_end(Duration::from_millis(1)).is_none());
        events.end(End::Done(3));
        events.end(End::ShardFailed);
        assert_eq!(reader.join().unwrap(), None);
        assert_eq!(events.wait_end(Duration::from_secs(60)), Some(End::Done(3)), "the first one");
    }
}
