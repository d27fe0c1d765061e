//! Open volumes.

use std::ops::Range;
use std::sync::{Arc, RwLock, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use rtrs::{Builder, Event, Volume};

use crate::entry::{Failure, Health};
use crate::layout::{CEvent, CGeometry, CStats};
use crate::memory::Span;
use crate::queue::CQueue;
use crate::registry::Registry;

/// Maximum time by which a wait for an event delays the closing of the volume.
const EVENT_WAIT_MAX: Duration = Duration::from_millis(50);
/// All addresses.
const EVERYWHERE: Range<usize> = 0..usize::MAX;
/// Maximum time for the system to release request memory after the session has ended.
const RELEASE_MAX: Duration = Duration::from_secs(5);

/// Object behind the header's `rtrs_volume`.
#[derive(Debug)]
pub(crate) struct CVolume {
    health: Arc<Health>,
    /// None once closed. Locked for writing while the volume is being closed.
    volume: RwLock<Option<Volume>>,
    queues: Vec<CQueue>,
    memory: Arc<Registry>,
}

fn closed() -> Failure {
    Failure::new(libc::ESHUTDOWN, "cannot use the volume: it is closed")
}

impl CVolume {
    pub(crate) fn open(builder: &Builder) -> Result<Self, Failure> {
        let (volume, queues) = builder.open()?;
        let (health, block) = (Arc::new(Health::new()), volume.geometry().logical_block);
        let memory = Arc::default();
        let queues = queues.into_iter().map(|queue| CQueue::new(queue, &health, &memory, block));
        let queues = queues.collect::<Result<_, _>>()?;
        Ok(Self { health, volume: RwLock::new(Some(volume)), queues, memory })
    }

    pub(crate) fn health(&self) -> &Health {
        &self.health
    }

    pub(crate) fn queues(&self) -> &[CQueue] {
        &self.queues
    }

    /// Runs a call on the volume unless it is closed or being closed.
    fn with<T>(&self, call: impl FnOnce(&Volume) -> Result<T, Failure>) -> Result<T, Failure> {
        let guard = match self.volume.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(closed()),
        };
        call(guard.as_ref().ok_or_else(closed)?)
    }

    pub(crate) fn geometry(&self) -> Result<CGeometry, Failure> {
        self.with(|volume| Ok((&volume.geometry()).into()))
    }

    pub(crate) fn identity(&self) -> Result<Option<String>, Failure> {
        self.with(|volume| Ok(volume.identity()?))
    }

    pub(crate) fn stats(&self) -> Result<CStats, Failure> {
        self.with(|volume| Ok((&volume.stats()?).into()))
    }

    /// Registers the program's memory with the volume.
    pub(crate) fn register(&self, span: Span) -> Result<(), Failure> {
        if span.len() == 0 {
            return Err(Failure::invalid("memory of 0 bytes cannot be registered"));
        }
        self.with(|volume| {
            let (addresses, memory) = (span.addresses(), self.memory.add(span)?);
            let Err(error) = volume.register(&memory) else { return Ok(()) };
            drop(memory);
            match self.await_memory(&addresses) {
                Ok(()) => Err(error.into()),
                Err(still_used) => Err(still_used),
            }
        })
    }

    /// Waits until nothing in the library or the system uses memory whose registration has ended. A
    /// receive can outlast its request, because a server may stop in the middle of an answer.
    fn await_memory(&self, addresses: &Range<usize>) -> Result<(), Failure> {
        self.memory.release(addresses);
        await_release("unregister the memory", || self.memory.unreleased(addresses))
    }

    /// Ends the registration of memory, which then belongs to the program again.
    pub(crate) fn unregister(&self, span: &Span) -> Result<(), Failure> {
        let addresses = span.addresses();
        let memory = self.memory.begin_removal(&addresses)?;
        let ended = self
            .with(|volume| memory.as_ref().map_or(Ok(()), |memory| Ok(volume.unregister(memory)?)));
        drop(memory);
        match ended {
            Err(failure) if failure.errno != libc::ESHUTDOWN => Err(failure),
            _ => self.await_memory(&addresses),
        }
    }

    /// Returns the next event; None if there is none within `timeout`.
    pub(crate) fn next_event(&self, timeout: Duration) -> Result<Option<CEvent>, Failure> {
        await_event(timeout, |wait| {
            self.with(|volume| Ok((volume.next_event(wait)?, volume.has_ended())))
        })
    }

    /// Ends the session. Returns the number of requests that did not finish in time.
    pub(crate) fn close(&self, grace: Duration) -> Result<usize, Failure> {
        let mut guard = self.volume.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        match guard.take() {
            Some(volume) => Ok(volume.close(grace)?),
            None => Ok(0),
        }
    }

    /// Makes the volume ready to be dropped: no call is running, the session has ended, and nothing
    /// uses the memory of requests. Does not wait in a child process, which has its own copy of the
    /// memory.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let mut guard = match self.volume.try_write() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if self.health.is_forked() => return Ok(()),
            Err(TryLockError::WouldBlock) => {
                let text = "cannot free the volume: another call on it is running";
                return Err(Failure::new(libc::EBUSY, text));
            }
        };
        self.queues.iter().try_for_each(CQueue::check_idle)?;
        // Ends the session, except in a child.
        drop(guard.take());
        if self.health.is_forked() {
            return Ok(());
        }
        self.queues.iter().try_for_each(CQueue::end)?;
        self.memory.release(&EVERYWHERE);
        await_release("free the volume", || {
            let held: usize = self.queues.iter().map(CQueue::held).sum();
            held + self.memory.unreleased(&EVERYWHERE)
        })
    }
}

/// Waits until nothing holds any of the program's memory; `held` returns the number of pieces held.
fn await_release(what: &str, held: impl Fn() -> usize) -> Result<(), Failure> {
    let begin = Instant::now();
    loop {
        let pieces = held();
        if pieces == 0 {
            return Ok(());
        }
        if begin.elapsed() > RELEASE_MAX {
            let text = format!(
                "cannot {what}: the system still uses {pieces} pieces of memory; try again"
            );
            return Err(Failure::new(libc::EBUSY, text));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Calls `next` with short timeouts until it returns an event that the header declares, `timeout`
/// has passed, or the session has ended. `next` also returns whether the session has ended; from
/// then on it returns without waiting.
fn await_event(
    timeout: Duration,
    mut next: impl FnMut(Duration) -> Result<(Option<Event>, bool), Failure>,
) -> Result<Option<CEvent>, Failure> {
    let begin = Instant::now();
    loop {
        let left = timeout.saturating_sub(begin.elapsed());
        let (event, ended) = next(left.min(EVENT_WAIT_MAX))?;
        match event.map(|event| CEvent::new(&event)) {
            Some(Some(event)) => return Ok(Some(event)),
            // An event that the header does not declare is skipped.
            Some(None) => {}
            None if ended || left <= EVENT_WAIT_MAX => return Ok(None),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_session_ends_the_wait_for_an_event() {
        let mut calls = 0;
        let begin = Instant::now();
        let hour = Duration::from_secs(3600);
        let waited = await_event(hour, |_| {
            calls += 1;
            assert!(begin.elapsed() < hour / 60, "it still waits after {calls} calls");
            Ok((None, calls == 2))
        });
        assert!(matches!(waited, Ok(None)));
        assert_eq!(calls, 2);
    }
}
