//! Blocking operations of a gateway: the lock, and reopening the image.

use std::ffi::CStr;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak, mpsc};
use std::thread;
use std::time::Instant;

use rtrs_core::gateway::GatewayEvent;
use rtrs_core::identity::SessionTag;
use rtrs_core::ids::SessionId;
use rtrs_core::rbd::Image;
use rtrs_core::rt::Clock;
use rtrs_core::time::Duration;

use super::inner::{Inner, Job, State, open};
use crate::backend::rbd::image::Shared;

/// Time after releasing the lock during which a gateway does not take it again.
const LEFT_FOR: Duration = Duration::from_secs(2);
/// Interval between checks of whether the lock is still held, and whether the image can be opened.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Minimum interval between lock breaks, shorter than that between a client's requests.
const BREAK_EVERY: Duration = Duration::from_secs(9);
/// Maximum time that releasing the lock waits for a shard that is beginning an IO.
const START_MAX: Duration = Duration::from_secs(2);
/// Key in the image's metadata for the term and the session for which the lock was taken.
const NOTE: &CStr = c"rtrs.gateway";

const REFUSED: &str = "the cluster has blocklisted this server: another server has taken over";

/// A gateway's thread.
pub(super) struct Worker {
    inner: Weak<Inner>,
    /// Owner ID of the lock while this server holds it.
    own: Option<String>,
    /// Time when the lock was last broken.
    broken: Option<Instant>,
    /// Whether the image can be used.
    usable: bool,
    /// Whether a failure to open the image has been logged.
    logged: bool,
    /// Previously open images on which shards may still have IO in flight.
    former: Vec<Arc<Shared>>,
}

impl Worker {
    pub(super) fn start(inner: &Arc<Inner>, jobs: mpsc::Receiver<Job>) -> io::Result<()> {
        let worker = Self {
            inner: Arc::downgrade(inner),
            own: None,
            broken: None,
            usable: true,
            logged: false,
            former: Vec::new(),
        };
        let thread = thread::Builder::new().name("rbd-gateway".into());
        thread.spawn(move || worker.run(&jobs)).map(drop)
    }

    fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        loop {
            let job = jobs.recv_timeout(CHECK_INTERVAL);
            let Some(inner) = self.inner.upgrade() else { return };
            match job {
                Ok(Job::End(done)) => {
                    inner.set_state(State::Standby);
                    let image = inner.image.lock().take();
                    // Closing releases the lock.
                    drop((image, inner));
                    // The requester may have timed out.
                    let _ = done.send(());
                    return;
                }
                Ok(job) => self.act(&inner, job),
                Err(mpsc::RecvTimeoutError::Timeout) => self.look(&inner),
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
            if !self.usable {
                self.reopen(&inner);
            }
            self.former.retain(|image| Arc::strong_count(image) > 1);
        }
    }

    fn act(&mut self, inner: &Inner, job: Job) {
        let name = &inner.name;
        match job {
            Job::TakeOver(session) => {
                if let Err(error) = self.take_over(inner, session) {
                    tracing::warn!("{name}: cannot take over: {error}");
                    if error.raw_os_error() == Some(libc::ESHUTDOWN) {
                        self.lost(inner, REFUSED);
                    }
                }
                inner.busy.store(false, Ordering::SeqCst);
            }
            Job::Writer(session) => {
                let image = inner.image().filter(|_| inner.state() == State::Active);
                let (Some(image), Some(own)) = (image, &self.own) else { return };
                let term = inner.term.load(Ordering::SeqCst);
                if let Err(error) = image.0.image.set_note(NOTE, &note(term, session, own)) {
                    tracing::warn!("{name}: cannot record the writing session: {error}");
                }
            }
            Job::Release(done) => {
                let released = self.release(inner);
                if let Err(error) = &released {
                    tracing::error!("{name}: cannot release the image: {error}");
                }
                // The requester may have timed out.
                done.into_iter().for_each(|done| drop(done.send(released_again(&released))));
            }
            Job::Refused(generation) => {
                if generation == inner.generation.load(Ordering::SeqCst) {
                    self.lost(inner, REFUSED);
                }
            }
            Job::Stalled => self.lost(inner, "this server was paused for more than 30 s"),
            Job::End(_) => {}
        }
    }

    /// Checks whether this server still holds the lock.
    fn look(&mut self, inner: &Inner) {
        let (Some(own), Some(image)) = (&self.own, inner.image()) else { return };
        match image.0.image.lock_owner() {
            Ok(Some(owner)) if owner == *own => {}
            Ok(_) => self.lost(inner, "another server has taken over"),
            Err(error) if error.raw_os_error() == Some(libc::ESHUTDOWN) => {
                self.lost(inner, REFUSED);
            }
            // A slow cluster does not mean that the lock is lost.
            Err(error) => tracing::debug!("{}: {error}", inner.name),
        }
    }

    /// Becomes standby, because the current cluster client can no longer be used.
    fn lost(&mut self, inner: &Inner, why: &str) {
        let was_active = self.own.take().is_some();
        leave(inner);
        if was_active {
            tracing::error!(
                "{}: {why}; ending its sessions and reopening the image as standby",
                inner.name
            );
            inner.notify(GatewayEvent::Standby);
        } else {
            tracing::warn!("{}: {why}; reopening the image", inner.name);
        }
        self.usable = false;
    }

    /// Opens the image with a new client.
    fn reopen(&mut self, inner: &Inner) {
        let generation = inner.generation.load(Ordering::SeqCst) + 1;
        match open(&inner.name, &inner.how, generation, &inner.jobs) {
            Ok(image) => {
                let mut place = inner.image.lock();
                if let Some(former) = place.replace(Arc::new(image)) {
                    self.former.push(Arc::clone(&former.0));
                }
                inner.generation.store(generation, Ordering::SeqCst);
                (self.usable, self.logged) = (true, false);
                tracing::info!("{}: reopened as standby", inner.name);
            }
            Err(error) if !self.logged => {
                self.logged = true;
                tracing::error!("{error}; trying again");
            }
            Err(_) => {}
        }
    }

    /// Takes the lock for a session.
    fn take_over(&mut self, inner: &Inner, session: SessionId) -> io::Result<()> {
        if inner.state() == State::Active {
            return Ok(());
        }
        if !self.usable {
            self.reopen(inner);
        }
        let source = inner.image().filter(|_| self.usable);
        let source = source.ok_or_else(|| io::Error::other("the image is not open"))?;
        let (image, name) = (&source.0.image, &inner.name);
        // Breaks only the lock of a gateway that holds it for the same session.
        if let Some(owner) = image.lock_owner()?
            && noted(image)?.1.is_some_and(|holder| holder == holder_of(session, &owner))
        {
            self.break_lock(name, image, &owner)?;
        }
        image.lock().map_err(|error| match error.raw_os_error() {
            Some(libc::EROFS) => io::Error::other("another server still holds the lock"),
            _ => error,
        })?;
        let term = noted(image).and_then(|(term, _)| {
            let gone = || io::Error::other("the lock was lost again");
            let own = image.lock_owner()?.ok_or_else(gone)?;
            image.set_note(NOTE, &note(term + 1, session, &own))?;
            self.own = Some(own);
            Ok(term + 1)
        });
        let term = term.inspect_err(|_| {
            self.own = None;
            if let Err(error) = image.unlock() {
                tracing::warn!("{name}: cannot release the lock: {error}");
            }
        })?;
        source.0.examine();
        *inner.writer.lock() = Some(session);
        inner.term.store(term, Ordering::SeqCst);
        inner.set_state(State::Active);
        let session = SessionTag::of(session);
        tracing::info!(%session, term, "{name}: taken over; this server is now active");
        inner.notify(GatewayEvent::Active);
        Ok(())
    }

    /// Breaks the owner's lock, at a limited rate.
    fn break_lock(&mut self, name: &str, image: &Image, owner: &str) -> io::Result<()> {
        if self.broken.is_some_and(|at| at.elapsed() < BREAK_EVERY) {
            let text = format!("the lock was broken less than {} s ago", BREAK_EVERY.as_secs());
            return Err(io::Error::other(text));
        }
        self.broken = Some(Instant::now());
        tracing::warn!("{name}: taking the lock from {owner}, which the cluster now blocklists");
        match image.break_lock(owner) {
            // The owner has released the lock in the meantime.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            broken => broken,
        }
    }

    /// Releases the lock once all IO has completed.
    fn release(&mut self, inner: &Inner) -> io::Result<()> {
        let Some(image) = inner.image().filter(|_| inner.state() == State::Active) else {
            return Ok(());
        };
        inner.set_state(State::Leaving);
        let until = Instant::now() + START_MAX;
        while inner.starting.load(Ordering::SeqCst) > 0 {
            if Instant::now() > until {
                inner.set_state(State::Active);
                return Err(io::Error::new(io::ErrorKind::TimedOut, "a shard does not respond"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        if let Err(error) = image.0.image.unlock() {
            inner.set_state(State::Active);
            return Err(error);
        }
        self.own = None;
        leave(inner);
        tracing::info!("{}: released; this server is now standby", inner.name);
        inner.notify(GatewayEvent::Standby);
        Ok(())
    }
}

/// Makes the gateway standby. It does not take over again until its sessions' paths have had time
/// to close.
fn leave(inner: &Inner) {
    let left_for = u64::try_from(LEFT_FOR.as_millis()).unwrap_or(u64::MAX);
    inner.left_until.store(Clock.boot_millis() + left_for, Ordering::SeqCst);
    inner.set_state(State::Standby);
}

/// Duplicates a result for another requester.
fn released_again(released: &io::Result<()>) -> io::Result<()> {
    match released {
        Ok(()) => Ok(()),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    }
}

/// Formats the session and the owner of the lock for the image's metadata.
fn holder_of(session: SessionId, owner: &str) -> String {
    format!("{} {owner}", SessionTag::of(session))
}

fn note(term: u64, session: SessionId, owner: &str) -> String {
    format!("{term} {}", holder_of(session, owner))
}

/// Reads the term and its [holder](holder_of) from the image's metadata.
fn noted(image: &Image) -> io::Result<(u64, Option<String>)> {
    let Some(text) = image.note(NOTE)? else { return Ok((0, None)) };
    let (term, holder) = text.split_once(' ').unwrap_or((&text, ""));
    let term = term.parse().map_err(|_| {
        let text = format!("its metadata rtrs.gateway is {text:?}; remove it (rbd image-meta)");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })?;
    Ok((term, Some(holder.to_owned())))
}
