//! Open volumes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rtrs_client::OpCount;
use rtrs_client::embed::{EmbedOptions, EmbeddedVolume, QueueUser, VolumeEvent};
use rtrs_core::block::Geometry as DeviceGeometry;

use crate::error::{Error, ErrorKind};
use crate::memory::Memory;
use crate::process::Process;
use crate::queue::{Queue, Shared};

/// Size, limits and capabilities of a volume. Sizes and limits are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// Size of the volume.
    pub size: u64,
    /// Logical block size: offsets and lengths of requests are multiples of it.
    pub logical_block: u32,
    /// Block size that the server prefers, a power of two.
    pub physical_block: u32,
    /// Longest read or write, unless the builder's limit is lower.
    pub io_max: u32,
    /// Longest discard.
    pub discard_max: u32,
    /// Longest write zeroes.
    pub zeroes_max: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether completed writes need a flush to be durable.
    pub write_cache: bool,
    /// Whether [`Request::fua`](crate::Request::fua) is honored.
    pub fua: bool,
    /// Whether discards have an effect.
    pub discard: bool,
    /// Whether write zeroes is accepted.
    pub write_zeroes: bool,
    /// Whether the server reports extents.
    pub extents: bool,
}

impl From<DeviceGeometry> for Geometry {
    fn from(device: DeviceGeometry) -> Self {
        let DeviceGeometry { size, logical_block, physical_block, io_max, .. } = device;
        let DeviceGeometry { discard_max, zeroes_max, read_only, write_cache, .. } = device;
        let DeviceGeometry { fua, discard, write_zeroes, extents, .. } = device;
        Self {
            size,
            logical_block,
            physical_block,
            io_max,
            discard_max,
            zeroes_max,
            read_only,
            write_cache,
            fua,
            discard,
            write_zeroes,
            extents,
        }
    }
}

/// Change to an open volume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The size of the volume has changed.
    Resized {
        /// New size in bytes.
        bytes: u64,
    },
    /// The volume has become read-only, or writable again.
    ReadOnly {
        /// Whether the volume is read-only now.
        read_only: bool,
    },
    /// The number of connected paths has changed. With fewer than all, the volume is degraded.
    Paths {
        /// Number of connected paths.
        connected: usize,
        /// Number of paths.
        total: usize,
    },
    /// The volume has failed and no longer serves IO.
    Failed {
        /// Reason.
        why: String,
    },
}

impl From<VolumeEvent> for Event {
    fn from(event: VolumeEvent) -> Self {
        match event {
            VolumeEvent::Resized(bytes) => Self::Resized { bytes },
            VolumeEvent::ReadOnly(read_only) => Self::ReadOnly { read_only },
            VolumeEvent::Paths { connected, total } => Self::Paths { connected, total },
            VolumeEvent::Failed(why) => Self::Failed { why },
        }
    }
}

/// Counters for one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpStats {
    /// Number of requests that have ended.
    pub count: u64,
    /// Total size of the successful requests, in bytes.
    pub bytes: u64,
    /// Number of requests that failed.
    pub errors: u64,
}

impl From<OpCount> for OpStats {
    fn from(OpCount { count, bytes, errors }: OpCount) -> Self {
        Self { count, bytes, errors }
    }
}

/// A path's status and counters.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathStats {
    /// Path as configured.
    pub name: String,
    /// State, such as `connected`.
    pub state: String,
    /// Whether the path is connected.
    pub connected: bool,
    /// Number of reconnects.
    pub reconnects: u64,
    /// Reason for the path's last failure, unless it is connected.
    pub last_error: Option<String>,
    /// Number of requests sent over the path.
    pub requests: u64,
    /// Number of requests that moved to another path, or were repeated, because this one failed.
    pub failovers: u64,
    /// Number of requests whose data was copied through registered memory: requests over RDMA whose
    /// memory is not one piece of registered [`Memory`].
    pub bounced: u64,
}

/// Counters of a volume since it was opened, over all queues.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Reads.
    pub read: OpStats,
    /// Writes.
    pub write: OpStats,
    /// Flushes.
    pub flush: OpStats,
    /// Discards.
    pub discard: OpStats,
    /// Write zeroes.
    pub write_zeroes: OpStats,
    /// Requests for extents.
    pub extents: OpStats,
    /// Number of requests that have not ended.
    pub inflight: usize,
    /// Paths, in the order of the settings.
    pub paths: Vec<PathStats>,
}

/// Open volume. Its [`Queue`]s carry the requests; this handle provides everything else.
///
/// Dropping it ends the session immediately: requests in flight fail, and may still take effect if
/// they have reached the server. [`close`](Self::close) lets them finish.
///
/// ```no_run
/// use std::time::Duration;
///
/// # fn main() -> Result<(), rtrs::Error> {
/// let (volume, _queues) = rtrs::Builder::from_uri("tcp://10.0.0.2/vol0")?.open()?;
/// println!("{} bytes, identity {:?}", volume.geometry().size, volume.identity()?);
/// while let Some(event) = volume.next_event(Duration::from_secs(60))? {
///     match event {
///         rtrs::Event::Resized { bytes } => println!("{bytes} bytes now"),
///         rtrs::Event::Paths { connected, total } => println!("{connected} of {total} paths"),
///         other => println!("{other:?}"),
///     }
/// }
/// println!("{} reads", volume.stats()?.read.count);
/// volume.close(Duration::from_secs(10))?;
/// # Ok(())
/// # }
/// ```
pub struct Volume {
    shared: Arc<Shared>,
    volume: EmbeddedVolume,
}

impl Volume {
    /// Creates the handle of an open volume, and its queues.
    pub(crate) fn new(
        volume: EmbeddedVolume,
        users: Vec<QueueUser>,
        options: &EmbedOptions,
    ) -> (Self, Vec<Queue>) {
        let (process, closing) = (Process::current(), AtomicBool::new(false));
        let shared = Arc::new(Shared { process, closing });
        let io_max = options.io_max.min(volume.geometry().io_max);
        let queue = |user| Queue::new(&shared, user, options.queue_depth, io_max);
        let queues = users.into_iter().map(queue).collect();
        (Self { shared, volume }, queues)
    }

    /// Returns the current size, limits and capabilities.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.volume.geometry().into()
    }

    /// Returns the identity of the server and export, `SERVER/EXPORT`, as in the `identity`
    /// setting; None if the server reports none.
    ///
    /// # Errors
    /// See [`stats`](Self::stats).
    pub fn identity(&self) -> Result<Option<String>, Error> {
        Ok(self.report()?.identity.map(|identity| identity.to_string()))
    }

    /// Returns counters and the status of the paths.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] after the session has ended; [`ErrorKind::Busy`] if an IO thread does
    /// not answer within two seconds; [`ErrorKind::Forked`].
    pub fn stats(&self) -> Result<Stats, Error> {
        let report = self.report()?;
        let [read, write, flush, discard, write_zeroes, extents] = report.ops.map(OpStats::from);
        let paths = report.paths.into_iter().map(|path| PathStats {
            name: path.name,
            state: path.state,
            connected: path.connected,
            reconnects: path.reconnects,
            last_error: path.last_error,
            requests: path.counts.requests,
            failovers: path.counts.failovers,
            bounced: path.counts.bounced,
        });
        let (inflight, paths) = (report.inflight, paths.collect());
        Ok(Stats { read, write, flush, discard, write_zeroes, extents, inflight, paths })
    }

    fn report(&self) -> Result<rtrs_client::embed::VolumeReport, Error> {
        self.shared.process.check()?;
        self.volume.report().ok_or_else(|| {
            if self.volume.has_ended() {
                return Error::new(ErrorKind::Closed, "the session has ended");
            }
            Error::new(ErrorKind::Busy, "an IO thread did not answer within 2 s; try again")
        })
    }

    /// Registers memory. A request for one [`Part`](crate::Part) uses registered memory in place,
    /// even over RDMA, where the data of other requests is copied. The system pins the memory for
    /// each path over RDMA and counts it as locked memory; requests wait until that is done. This
    /// has no effect over TCP and TLS. Memory can be registered with several volumes.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the system or a device refuses; [`ErrorKind::Closed`] after the
    /// session has ended; [`ErrorKind::Forked`].
    pub fn register(&self, memory: &Memory) -> Result<(), Error> {
        self.shared.process.check()?;
        if self.volume.has_ended() {
            return Err(Error::new(ErrorKind::Closed, "the session has ended"));
        }
        Ok(self.volume.register_memory(memory.region())?)
    }

    /// Unregisters memory. Requests in flight finish first, and the memory stays usable.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if requests in flight do not finish within 10 s, or an IO thread does
    /// not answer: the registration ends later. [`ErrorKind::Forked`].
    pub fn unregister(&self, memory: &Memory) -> Result<(), Error> {
        self.shared.process.check()?;
        if self.volume.unregister_memory(memory.region()) {
            return Ok(());
        }
        let text = "cannot unregister memory: requests in flight use it; wait for them";
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Waits for the next event. Returns None if there is none within `timeout`, or immediately
    /// once the session has ended. While 256 events are pending, each new one replaces the oldest.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn next_event(&self, timeout: Duration) -> Result<Option<Event>, Error> {
        self.shared.process.check()?;
        Ok(self.volume.next_event(timeout).map(Event::from))
    }

    /// Returns whether the volume's session has ended because of a failure.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.volume.has_ended()
    }

    /// Ends the session. Submitted requests have `grace`, at most an hour, to finish; the rest then
    /// fail. Returns the number of requests that did not finish. Queues accept no more requests,
    /// but still return completions. Takes at most 20 s longer than `grace`.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn close(mut self, grace: Duration) -> Result<usize, Error> {
        self.shared.process.check()?;
        self.shared.closing.store(true, Ordering::Release);
        Ok(self.volume.close(grace))
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        if self.shared.process.check().is_ok() {
            self.volume.close(Duration::ZERO);
        } else {
            self.volume.forget();
        }
    }
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume").field("session", &self.volume).finish()
    }
}
