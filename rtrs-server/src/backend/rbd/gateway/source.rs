//! Export of an image that moves between servers.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::thread;

use parking_lot::Mutex;
use rtrs_core::block::{BlockDevice, BlockSource, Core, Geometry, Lost, SharedErrors, TargetSize};
use rtrs_core::gateway::{Gateway, GatewayBusy, GatewayNotify, Standing};
use rtrs_core::identity::ExportId;
use rtrs_core::ids::SessionId;
use rtrs_core::rt::Clock;
use rtrs_core::time::Duration;

use super::device::GatewayDevice;
use super::inner::{Inner, Job, State, open};
use super::worker::Worker;
use crate::backend::rbd::image::{NO_LOCK_FEATURE, RbdOptions, RbdSource, system};
use crate::backend::target::BackendError;

/// Interval at which the thread records that the process is running.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Maximum time to close the image.
const END_MAX: Duration = Duration::from_secs(6);

/// An image that other servers export too.
#[derive(Debug)]
pub struct GatewaySource(Arc<Inner>);

impl GatewaySource {
    /// Opens an image without taking its lock.
    ///
    /// # Errors
    /// A message for display that describes the problem.
    pub fn open(name: &str, how: RbdOptions) -> Result<Self, BackendError> {
        let (jobs, queue) = mpsc::channel();
        let image = open(name, &how, 1, &jobs)?;
        if let Err(error) = image.0.image.lock_owner() {
            if error.raw_os_error() == Some(libc::EINVAL) {
                let hint = "`rbd feature enable IMAGE exclusive-lock`";
                return Err(BackendError::new(name, NO_LOCK_FEATURE, hint));
            }
            return Err(system(name, error));
        }
        let inner = Arc::new(Inner {
            name: name.to_owned(),
            how,
            geometry: image.geometry(),
            identity: image.identity(),
            state: AtomicU8::new(State::Standby as u8),
            term: AtomicU64::new(0),
            generation: AtomicU64::new(1),
            image: Mutex::new(Some(Arc::new(image))),
            starting: AtomicU32::new(0),
            alive: AtomicU64::new(Clock.boot_millis()),
            left_until: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            writer: Mutex::new(None),
            jobs,
            notify: OnceLock::new(),
        });
        let threads = Worker::start(&inner, queue).and_then(|()| {
            let ticking = Arc::downgrade(&inner);
            thread::Builder::new().name("rbd-alive".into()).spawn(move || tick(&ticking))
        });
        threads.map_err(|error| system(name, error))?;
        Ok(Self(inner))
    }
}

/// Records periodically that the process is running, and reports a long pause.
fn tick(inner: &Weak<Inner>) {
    loop {
        thread::sleep(ALIVE_EVERY);
        let Some(inner) = inner.upgrade() else { return };
        if inner.is_stalled() {
            inner.set_state(State::Standby);
            inner.send(Job::Stalled);
        }
        inner.alive.store(Clock.boot_millis(), Ordering::SeqCst);
    }
}

impl Gateway for GatewaySource {
    fn standing(&self) -> Standing {
        let active = self.0.state() != State::Standby;
        Standing { active, term: self.0.term.load(Ordering::SeqCst) }
    }

    fn take_over(&self, session: SessionId) -> Result<(), GatewayBusy> {
        if self.standing().active {
            return Ok(());
        }
        let left = Clock.boot_millis() < self.0.left_until.load(Ordering::SeqCst);
        if left || self.0.busy.swap(true, Ordering::SeqCst) {
            return Err(GatewayBusy);
        }
        self.0.send(Job::TakeOver(session));
        Ok(())
    }

    fn opened_by(&self, session: SessionId) {
        if self.0.writer.lock().replace(session) != Some(session) {
            self.0.send(Job::Writer(session));
        }
    }

    fn begin_release(&self) {
        self.0.send(Job::Release(None));
    }

    fn release(&self, within: Duration) -> io::Result<()> {
        let (done, released) = mpsc::channel();
        self.0.send(Job::Release(Some(done)));
        let late =
            |_| io::Error::new(io::ErrorKind::TimedOut, "running requests did not finish in time");
        released.recv_timeout(within).map_err(late)?
    }

    fn on_change(&self, notify: GatewayNotify) {
        if self.0.notify.set(notify).is_err() {
            tracing::error!("internal error: {} notifies twice", self.0.name);
        }
    }
}

impl BlockSource for GatewaySource {
    fn geometry(&self) -> Geometry {
        let image = self.0.image();
        image.map_or_else(|| self.0.geometry.clone(), |image| image.geometry())
    }

    fn identity(&self) -> Option<ExportId> {
        self.0.identity
    }

    fn target_size(&self) -> io::Result<TargetSize> {
        self.open_image()?.target_size()
    }

    fn is_cut(&self) -> bool {
        self.0.image().is_some_and(|image| image.is_cut())
    }

    fn resize(&self, size: u64, lost: &Lost<'_>) -> io::Result<()> {
        if self.0.state() != State::Active {
            let text = "another server serves the image; resize it there";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
        self.open_image()?.resize(size, lost)
    }

    fn shared_errors(&self) -> SharedErrors {
        SharedErrors::None
    }

    fn gateway(&self) -> Option<&dyn Gateway> {
        Some(self)
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(GatewayDevice::open(&self.0, core)?))
    }
}

impl GatewaySource {
    fn open_image(&self) -> io::Result<Arc<RbdSource>> {
        self.0.image().ok_or_else(|| io::Error::other("the image is being closed"))
    }
}

impl Drop for GatewaySource {
    /// Closes the image, which releases its lock, and waits for a limited time.
    fn drop(&mut self) {
        let (done, ended) = mpsc::channel();
        self.0.send(Job::End(done));
        if ended.recv_timeout(END_MAX) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::warn!(
                "{}: the cluster does not respond; closing the image later",
                self.0.name
            );
        }
    }
}
