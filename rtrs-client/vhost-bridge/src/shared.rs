//! State that the shards of a device share with the thread that serves its socket.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use parking_lot::Mutex;
use rtrs_core::block::Geometry;
use rtrs_core::log_limit::LogLimits;
use rtrs_core::mem::RegionShare;
use rtrs_core::rt::Clock;
use rtrs_core::time::Duration;
use rustix::event::{EventfdFlags, eventfd};

use crate::config::RINGS_MAX;
use crate::lines::Line;
use crate::memory::MappedRegions;

/// Default time limit for requests in flight when a ring is stopped.
const DRAIN: Duration = Duration::from_secs(30);

/// Number of changes that were answered before their IO ended. They may still be executed, so no
/// shard begins a later request meanwhile.
#[derive(Clone, Debug, Default)]
pub(crate) struct GivenUp(Arc<AtomicUsize>);

impl GivenUp {
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Number of rings of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rings {
    /// Number that a monitor may use.
    pub(crate) max: u16,
    /// Number that is reported to the guest.
    pub(crate) told: u16,
}

/// Use of the rings since a guest began to use the device.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    is_kicked: AtomicBool,
    has_requests: AtomicBool,
}

impl Activity {
    /// Records a kick.
    pub(crate) fn kicked(&self) {
        self.is_kicked.store(true, Ordering::Relaxed);
    }

    /// Records a request.
    pub(crate) fn requested(&self) {
        // The flag is usually set already, and a needless write would slow down shards that read
        // it.
        if !self.has_requests.load(Ordering::Relaxed) {
            self.has_requests.store(true, Ordering::Relaxed);
        }
    }

    fn reset(&self) {
        self.is_kicked.store(false, Ordering::Relaxed);
        self.has_requests.store(false, Ordering::Relaxed);
    }
}

/// Device as its monitor sees it.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Name of the volume, which the guest can read.
    pub(crate) name: String,
    /// Number of shards.
    pub(crate) shards: u16,
    pub(crate) rings: Rings,
    /// Time limit for requests in flight when a monitor stops a ring. The monitor, and often the
    /// whole guest, is blocked meanwhile.
    pub(crate) drain: Duration,
    /// Geometry last seen by shard 0, so that a monitor never waits for the session.
    pub(crate) geometry: Mutex<Geometry>,
    /// Eventfd that is readable while a notification of changed geometry is pending.
    pub(crate) changed: OwnedFd,
    /// Whether the driver has enabled the cache (write-back mode).
    has_cache: AtomicBool,
    /// Whether the driver can flush.
    has_flush: AtomicBool,
    /// Process of the monitor, 0 if unknown.
    monitor: AtomicU32,
    is_connected: AtomicBool,
    /// Whether the guest that starts here first may have run on another host before.
    is_arriving: AtomicBool,
    pub(crate) given_up: GivenUp,
    /// Whether the last monitor has disconnected without stopping its rings.
    may_return: AtomicBool,
    pub(crate) regions: Mutex<MappedRegions>,
    /// Share of the regions that the process may map from files of others.
    pub(crate) share: Arc<RegionShare>,
    pub(crate) activity: Activity,
    lines: Mutex<LogLimits<Line>>,
}

impl Shared {
    /// # Errors
    /// The system's error if there is no descriptor left.
    pub(crate) fn new(name: &str, shards: u16) -> io::Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            shards,
            rings: Rings { max: RINGS_MAX, told: shards },
            drain: DRAIN,
            geometry: Mutex::new(Geometry::default()),
            has_cache: AtomicBool::new(true),
            has_flush: AtomicBool::new(true),
            monitor: AtomicU32::new(0),
            is_connected: AtomicBool::new(false),
            is_arriving: AtomicBool::new(false),
            given_up: GivenUp::default(),
            may_return: AtomicBool::new(false),
            regions: Mutex::default(),
            share: RegionShare::new(),
            activity: Activity::default(),
            lines: Mutex::default(),
            changed: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Sets the number of rings.
    pub(crate) fn with_queues(mut self, queues: Option<u16>) -> Self {
        if let Some(queues) = queues {
            let queues = queues.clamp(1, RINGS_MAX);
            self.rings = Rings { max: queues, told: queues };
        }
        self
    }

    /// Sets whether the guest may have run on another host before.
    pub(crate) fn with_arrival(self, is_arriving: bool) -> Self {
        self.is_arriving.store(is_arriving, Ordering::Relaxed);
        self
    }

    /// Whether the guest that starts here first may have run on another host before.
    pub(crate) fn is_arriving(&self) -> bool {
        self.is_arriving.load(Ordering::Relaxed)
    }

    /// Records that a guest can use the device. A guest that waits for it may still go back to its
    /// old host, and change its cache mode there.
    pub(crate) fn arrived(&self) {
        // A needless write would slow down shards that read the flag.
        if self.is_arriving() {
            self.is_arriving.store(false, Ordering::Relaxed);
        }
    }

    /// Decides whether a log line is written. Returns None if not; otherwise the number of lines of
    /// its kind that were left out since the last one.
    pub(crate) fn admit(&self, line: impl Into<Line>) -> Option<u64> {
        self.lines.lock().admit(Clock.now(), line.into())
    }

    /// Stores a changed geometry and signals the change.
    pub(crate) fn set_geometry(&self, geometry: &Geometry) {
        *self.geometry.lock() = geometry.clone();
        // A full counter is readable already.
        let _ = rustix::io::write(&self.changed, &1_u64.to_ne_bytes());
    }

    /// Whether the geometry has changed since the last call.
    pub(crate) fn take_change(&self) -> bool {
        rustix::io::read(&self.changed, &mut [0; 8]).is_ok()
    }

    /// Sets the time limit for requests in flight.
    #[cfg(test)]
    pub(crate) fn with_drain(mut self, drain: Duration) -> Self {
        self.drain = drain;
        self
    }

    /// Whether the driver flushes; otherwise each write is durable when it is answered.
    pub(crate) fn is_writeback(&self) -> bool {
        self.has_cache() && self.has_flush.load(Ordering::Relaxed)
    }

    /// Whether the driver has enabled the cache (write-back mode).
    pub(crate) fn has_cache(&self) -> bool {
        self.has_cache.load(Ordering::Relaxed)
    }

    pub(crate) fn set_cache(&self, has_cache: bool) {
        self.has_cache.store(has_cache, Ordering::Relaxed);
    }

    /// Sets whether the driver can flush. A driver that cannot flush expects answered writes to be
    /// durable.
    pub(crate) fn set_flush(&self, has_flush: bool) {
        self.has_flush.store(has_flush, Ordering::Relaxed);
    }

    /// Records that a monitor has connected, and its process if known.
    pub(crate) fn connected(&self, monitor: Option<u32>) {
        if !self.is_in_use() {
            self.activity.reset();
        }
        self.monitor.store(monitor.unwrap_or(0), Ordering::Relaxed);
        self.is_connected.store(true, Ordering::Relaxed);
    }

    /// Records that the monitor has disconnected, and whether its guest still uses the device.
    pub(crate) fn disconnected(&self, may_return: bool) {
        self.may_return.store(may_return, Ordering::Relaxed);
        self.is_connected.store(false, Ordering::Relaxed);
    }

    /// Whether a connected guest kicks its rings, and no request appears in them: its memory is not
    /// shared.
    pub(crate) fn has_only_kicks(&self) -> bool {
        let Activity { is_kicked, has_requests } = &self.activity;
        let [connected, kicked, requested] =
            [&self.is_connected, is_kicked, has_requests].map(|flag| flag.load(Ordering::Relaxed));
        connected && kicked && !requested
    }

    /// Whether a guest uses the device, with or without a connection.
    pub(crate) fn is_in_use(&self) -> bool {
        let flags = [&self.is_connected, &self.may_return];
        flags.iter().any(|flag| flag.load(Ordering::Relaxed))
    }

    /// Process of the connected monitor, if there is a monitor: 0 if the process is unknown.
    pub(crate) fn monitor(&self) -> Option<u32> {
        let is_connected = self.is_connected.load(Ordering::Relaxed);
        is_connected.then(|| self.monitor.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Fault;

    #[test]
    fn each_kind_of_line_has_its_own_limit() {
        let shared = Shared::new("volume", 1).unwrap();
        let now = Clock.now();
        let admit = |line: Line| shared.lines.lock().admit(now, line);
        assert_eq!(admit(Fault::Index(1, 8).into()), Some(0));
        for index in 2..100 {
            assert_eq!(admit(Fault::Index(index, 8).into()), None, "the same kind");
        }
        assert_eq!(admit(Fault::Order.into()), Some(0), "another fault");
        assert_eq!(admit(Line::Message("a".into())), Some(0));
        assert_eq!((admit(Line::Message("b".into())), admit(Line::Connected)), (Some(0), Some(0)));
        assert_eq!(admit(Line::Message("a".into())), None);
    }
}
