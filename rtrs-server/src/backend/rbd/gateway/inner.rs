//! State shared by a gateway's shards, thread and source.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};

use parking_lot::Mutex;
use rtrs_core::block::Geometry;
use rtrs_core::gateway::{GatewayEvent, GatewayNotify};
use rtrs_core::identity::ExportId;
use rtrs_core::ids::SessionId;
use rtrs_core::rt::Clock;
use rtrs_core::time::Duration;

use crate::backend::rbd::image::{RbdOptions, RbdSource, Refused, open_image};
use crate::backend::target::BackendError;

/// Time for which the lock's owner may be silent before the cluster gives the lock to others.
const WATCH_MAX: Duration = Duration::from_secs(30);

/// Message to a gateway's thread.
#[derive(Debug)]
pub(super) enum Job {
    /// Take the lock for this session.
    TakeOver(SessionId),
    /// Record that this session is now writing.
    Writer(SessionId),
    /// Release the lock.
    Release(Option<mpsc::Sender<io::Result<()>>>),
    /// The cluster refuses the client of this generation.
    Refused(u64),
    /// The process was paused for a long time.
    Stalled,
    /// Close the image.
    End(mpsc::Sender<()>),
}

/// Whether IO is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    Standby,
    Active,
    /// The lock is being released: IO in progress completes, and new IO waits.
    Leaving,
}

pub(super) struct Inner {
    /// Name for display.
    pub(super) name: String,
    pub(super) how: RbdOptions,
    /// Geometry when the image was first opened.
    pub(super) geometry: Geometry,
    pub(super) identity: Option<ExportId>,
    pub(super) state: AtomicU8,
    pub(super) term: AtomicU64,
    /// Number of times that the image has been opened.
    pub(super) generation: AtomicU64,
    /// The open image; None once the gateway has stopped.
    pub(super) image: Mutex<Option<Arc<RbdSource>>>,
    /// Number of shards that are about to begin an IO.
    pub(super) starting: AtomicU32,
    /// Time when the process was last seen running, in milliseconds since the host booted.
    pub(super) alive: AtomicU64,
    /// Time until which the gateway does not take the lock, on the same clock.
    pub(super) left_until: AtomicU64,
    /// Whether a takeover was requested or is in progress.
    pub(super) busy: AtomicBool,
    /// Session that last opened the export while it was active.
    pub(super) writer: Mutex<Option<SessionId>>,
    pub(super) jobs: mpsc::Sender<Job>,
    pub(super) notify: OnceLock<GatewayNotify>,
}

/// Opens the image with a new cluster client.
pub(super) fn open(
    name: &str,
    how: &RbdOptions,
    generation: u64,
    jobs: &mpsc::Sender<Job>,
) -> Result<RbdSource, BackendError> {
    let image = open_image(name, &how.address)?;
    let jobs = jobs.clone();
    let report = move || {
        // If there is no worker, the source is ending.
        let _ = jobs.send(Job::Refused(generation));
    };
    RbdSource::of(name, image, how, Some(Refused(Box::new(report))))
}

impl Inner {
    /// Whether IO may begin.
    pub(super) fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            state if state == State::Standby as u8 || self.is_stalled() => State::Standby,
            state if state == State::Active as u8 => State::Active,
            _ => State::Leaving,
        }
    }

    pub(super) fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::SeqCst);
    }

    /// Whether the process was paused for long enough that the cluster may have given the lock to
    /// another server.
    pub(super) fn is_stalled(&self) -> bool {
        let since = Clock.boot_millis().saturating_sub(self.alive.load(Ordering::SeqCst));
        Duration::from_millis(since) > WATCH_MAX
    }

    pub(super) fn image(&self) -> Option<Arc<RbdSource>> {
        self.image.lock().clone()
    }

    pub(super) fn send(&self, job: Job) {
        // If there is no worker, the source is ending.
        let _ = self.jobs.send(job);
    }

    pub(super) fn notify(&self, event: GatewayEvent) {
        if let Some(notify) = self.notify.get() {
            notify(event);
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("name", &self.name).finish_non_exhaustive()
    }
}
