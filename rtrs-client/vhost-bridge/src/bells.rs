//! Event descriptors of a ring: kicks from the driver, and calls to it.
//!
//! The monitor may pass any kind of descriptor. So descriptors are read and written through the
//! shard's io_uring, where one that blocks does not block the shard.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rtrs_core::mem::{MemSlice, Region};
use rtrs_core::rt::{Fd, Op, Port, Ring};
use rtrs_core::time::{Duration, Instant};

use crate::fault::Fault;

/// Offset for descriptors that have no position.
const NO_POSITION: u64 = u64::MAX;
const EAGAIN: i32 = 11;

/// Number of events without a request after which a pause precedes each further event. A kick comes
/// with a request and causes up to three events.
const IDLE_MAX: u32 = 64;
/// Pause before awaiting a descriptor with useless events, such as one that is always readable.
const IDLE_PAUSE: Duration = Duration::from_millis(10);

/// Allocates the word to read from or write to an event descriptor.
fn word(value: u64) -> io::Result<MemSlice> {
    let memory = Region::new(8)?;
    memory.copy_in(0, &value.to_ne_bytes());
    memory.slice(0, 8).ok_or_else(|| io::Error::other("a region of less than 8 bytes"))
}

/// Descriptor on which the driver's kicks arrive.
#[derive(Debug)]
pub(crate) struct Kick {
    port: Port,
    fd: Fd,
    word: MemSlice,
    /// Number of events since the last request.
    idle: u32,
    /// Operation to submit after a pause, and when.
    paused: Option<(Next, Instant)>,
}

/// Operation that awaits the next kick.
#[derive(Clone, Copy, Debug)]
enum Next {
    Read,
    Poll,
}

impl Kick {
    /// Takes over a descriptor and starts to read kicks from it.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn new(ring: &Rc<Ring>, fd: OwnedFd) -> io::Result<Self> {
        let (fd, word) = (Fd::new(fd), word(0)?);
        let kick = Self { port: ring.port(), fd, word, idle: 0, paused: None };
        kick.submit(Next::Read);
        Ok(kick)
    }

    fn submit(&self, next: Next) {
        let fd = self.fd.clone();
        let op = match next {
            Next::Read => Op::Read { fd, buf: self.word.clone(), offset: NO_POSITION },
            Next::Poll => Op::readable(fd),
        };
        self.port.submit(op, 0);
    }

    /// Takes the kicks that have arrived. Returns whether there were any.
    ///
    /// # Errors
    /// [`Fault::Kick`] if the descriptor cannot be read.
    pub(crate) fn take(&mut self, now: Instant) -> Result<bool, Fault> {
        let mut any = false;
        if let Some((next, _)) = self.paused.take_if(|(_, at)| *at <= now) {
            self.submit(next);
        }
        while let Some(done) = self.port.take() {
            let next = match (&done.op, done.result) {
                (Op::Read { .. }, 8) => {
                    any = true;
                    Next::Read
                }
                // Another process has read the kick, or the kernel does not block on this
                // descriptor.
                (Op::Read { .. }, result) if result == -EAGAIN => Next::Poll,
                (Op::Poll { .. }, 1..) => Next::Read,
                _ => return Err(Fault::Kick),
            };
            self.idle = self.idle.saturating_add(1);
            if self.idle <= IDLE_MAX {
                self.submit(next);
            } else {
                self.paused = Some((next, now + IDLE_PAUSE));
            }
        }
        Ok(any)
    }

    /// Notes that the driver offered a request, so that its kicks are awaited without a pause.
    pub(crate) fn note_request(&mut self) {
        self.idle = 0;
        if let Some((next, _)) = self.paused.take() {
            self.submit(next);
        }
    }

    /// Returns when to call [`Self::take`] even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.paused.map(|(_, at)| at)
    }
}

/// Descriptor on which events are signaled. One write is in flight at a time.
#[derive(Debug)]
pub(crate) struct Bell {
    port: Port,
    fd: Fd,
    word: MemSlice,
    is_writing: bool,
    /// Whether to write again after the write in flight, which may have preceded the last event.
    is_due: bool,
}

impl Bell {
    /// Takes over a descriptor.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn new(ring: &Rc<Ring>, fd: OwnedFd) -> io::Result<Self> {
        let (port, word) = (ring.port(), word(1)?);
        Ok(Self { port, fd: Fd::new(fd), word, is_writing: false, is_due: false })
    }

    /// Signals an event.
    pub(crate) fn ring(&mut self) {
        if self.is_writing {
            self.is_due = true;
            return;
        }
        self.is_writing = true;
        let (fd, buf) = (self.fd.clone(), self.word.clone());
        self.port.submit(Op::Write { fd, buf, offset: NO_POSITION, dsync: false }, 0);
    }

    /// Handles completed writes. A failed write is not repeated: the descriptor has no reader.
    pub(crate) fn turn(&mut self) {
        while self.port.take().is_some() {
            self.is_writing = false;
        }
        if !self.is_writing && std::mem::take(&mut self.is_due) {
            self.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    const NOW: Instant = Instant::ZERO;

    fn turn(ring: &Ring) {
        ring.turn_or_sleep(Some(Duration::from_secs(20))).unwrap();
    }

    #[test]
    fn kicks_are_taken_from_any_event_descriptor() {
        for flags in [EventfdFlags::empty(), EventfdFlags::NONBLOCK] {
            let ring = Ring::new(8).unwrap();
            let fd = eventfd(0, flags).unwrap();
            let mut kick = Kick::new(&ring, fd.try_clone().unwrap()).unwrap();
            ring.turn().unwrap();
            for _ in 0..3 {
                assert_eq!(kick.take(NOW), Ok(false));
                rustix::io::write(&fd, &1_u64.to_ne_bytes()).unwrap();
                while kick.take(NOW) != Ok(true) {
                    turn(&ring);
                }
            }
        }
    }

    #[test]
    fn a_descriptor_without_events_is_a_fault() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let ring = Ring::new(8).unwrap();
        let mut kick = Kick::new(&ring, null.into()).unwrap();
        while kick.take(NOW) == Ok(false) {
            turn(&ring);
        }
        assert_eq!(kick.take(NOW), Ok(false));
    }

    /// Kicks on descriptors that are always readable do not keep a shard busy.
    #[test]
    fn events_without_requests_are_awaited_with_a_pause() {
        let many = eventfd(0, EventfdFlags::SEMAPHORE).unwrap();
        rustix::io::write(&many, &u64::from(u32::MAX).to_ne_bytes()).unwrap();
        for fd in [many, std::fs::File::open("/dev/zero").unwrap().into()] {
            let ring = Ring::new(8).unwrap();
            let mut kick = Kick::new(&ring, fd).unwrap();
            let mut now = NOW;
            let mut until_pause = |kick: &mut Kick| {
                let mut kicks = 0;
                while kick.deadline().is_none_or(|at| at <= now) {
                    turn(&ring);
                    kicks += u32::from(kick.take(now).unwrap());
                    assert!(kicks <= IDLE_MAX + 1, "no pause");
                }
                assert_eq!(kick.take(now), Ok(false), "nothing is read meanwhile");
                now = kick.deadline().unwrap();
                assert_eq!(now, kick.deadline().unwrap());
                // The pause is over.
                assert_eq!(kick.take(now), Ok(false));
                kicks
            };
            assert_eq!(until_pause(&mut kick), IDLE_MAX + 1);
            assert_eq!(until_pause(&mut kick), 1);
            kick.note_request();
            assert!(until_pause(&mut kick) > IDLE_MAX / 2, "kicks were of use");
        }
    }

    #[test]
    fn events_during_a_write_are_signaled_after_it() {
        let ring = Ring::new(8).unwrap();
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let mut bell = Bell::new(&ring, fd.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let count = || {
            let mut word = [0; 8];
            rustix::io::read(&fd, &mut word).map(|_| u64::from_ne_bytes(word)).unwrap_or(0)
        };
        (0..3).for_each(|_| bell.ring());
        let mut seen = 0;
        while bell.is_writing || bell.is_due {
            turn(&ring);
            bell.turn();
            seen += count();
        }
        assert_eq!(seen, 2, "one write for the first event, one for the others");
    }
}
