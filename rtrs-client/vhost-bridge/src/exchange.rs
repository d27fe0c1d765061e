//! Waits until a connection is ready for one message and its answer.
//!
//! The crate `vhost` reads a message and writes the answer without a time limit. So a message is
//! handled only once all of its bytes have arrived and the socket has room for any answer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rtrs_core::rt::{PeerEnd, peer_end, unread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// Interval at which to check for the rest of a message. Monitors send whole messages.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

const HEADER_LEN: usize = 12;
/// Offset in the header of the length of the body.
const LEN_AT: usize = 8;
/// Maximum length of a body. A longer body ends the connection before it is read.
const BODY_MAX: usize = 4096;

/// Outcome of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Ready,
    /// The service has to stop.
    Stop,
    /// The message did not arrive in time.
    NoMessage,
    /// The monitor did not read its answers in time.
    NoRoom,
}

/// Connection with a message that has begun.
#[derive(Clone, Copy)]
pub(crate) struct Exchange<'a> {
    pub(crate) stream: &'a UnixStream,
    /// Descriptor that is readable when the service has to stop.
    pub(crate) stop: BorrowedFd<'a>,
}

impl Exchange<'_> {
    /// Waits until the message can be handled, at most for `time`.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn wait(self, time: Duration) -> io::Result<Wait> {
        let by = Instant::now() + time;
        while !self.has_message()? {
            if Instant::now() >= by {
                return Ok(Wait::NoMessage);
            }
            if self.is_ready(PollFlags::empty(), LOOK_AGAIN)? == Some(Wait::Stop) {
                return Ok(Wait::Stop);
            }
        }
        // The socket is writable if most of its buffer is free, which is room for any answer.
        let ready = self.is_ready(PollFlags::OUT, by.saturating_duration_since(Instant::now()))?;
        Ok(ready.unwrap_or(Wait::NoRoom))
    }

    /// Whether the message has arrived completely or never will. Its header has the length.
    fn has_message(self) -> io::Result<bool> {
        let mut header = [0; HEADER_LEN];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let arrived = unread(self.stream)?;
        // Counted before the check for the end: more bytes may arrive together with the end.
        if peer_end(self.stream) != PeerEnd::Open {
            return Ok(true);
        }
        if arrived < HEADER_LEN {
            return Ok(false);
        }
        match recv(self.stream, &mut header, flags) {
            // The header came in pieces with descriptors of their own, which no monitor sends.
            Ok((count, _)) if count < HEADER_LEN => return Ok(false),
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let len = header[LEN_AT..].first_chunk().map_or(0, |len| u32::from_le_bytes(*len));
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        Ok(len > BODY_MAX || arrived >= HEADER_LEN + len)
    }

    /// Waits for events on the connection. Returns None if `time` has passed.
    fn is_ready(self, flags: PollFlags, time: Duration) -> io::Result<Option<Wait>> {
        let mut events = [
            PollFd::from_borrowed_fd(self.stop, PollFlags::IN),
            PollFd::from_borrowed_fd(self.stream.as_fd(), flags),
        ];
        let time = Timespec::try_from(time).map_err(io::Error::other)?;
        match poll(&mut events, Some(&time)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [stop, stream] = events.map(|event| !event.revents().is_empty());
        Ok(if stop { Some(Wait::Stop) } else { stream.then_some(Wait::Ready) })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    fn wait(stream: &UnixStream, stop: &OwnedFd, time: Duration) -> Wait {
        Exchange { stream, stop: stop.as_fd() }.wait(time).unwrap()
    }

    fn ends() -> (UnixStream, UnixStream, OwnedFd) {
        let (mine, theirs) = UnixStream::pair().unwrap();
        (mine, theirs, eventfd(0, EventfdFlags::NONBLOCK).unwrap())
    }

    #[test]
    fn a_message_is_awaited_as_a_whole() {
        let (mine, mut theirs, stop) = ends();
        let message = [1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 7, 8, 9];
        for part in message.chunks(4).take(3) {
            theirs.write_all(part).unwrap();
            assert_eq!(wait(&mine, &stop, SHORT), Wait::NoMessage);
        }
        theirs.write_all(&message[12..]).unwrap();
        assert_eq!(wait(&mine, &stop, LONG), Wait::Ready);
        // The end of a body that is too long is not awaited.
        let (mine, mut theirs, stop) = ends();
        theirs.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 1, 16, 0, 0]).unwrap();
        assert_eq!(wait(&mine, &stop, LONG), Wait::Ready);
    }

    #[test]
    fn the_end_of_a_connection_or_of_the_service_ends_the_wait() {
        let (mine, mut theirs, stop) = ends();
        theirs.write_all(&[1]).unwrap();
        rustix::io::write(&stop, &1_u64.to_ne_bytes()).unwrap();
        assert_eq!(wait(&mine, &stop, LONG), Wait::Stop);
        rustix::io::read(&stop, &mut [0; 8]).unwrap();
        drop(theirs);
        assert_eq!(wait(&mine, &stop, LONG), Wait::Ready);
    }

    #[test]
    fn a_monitor_has_to_read_answers() {
        let (mut mine, mut theirs, stop) = ends();
        theirs.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        mine.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(count) = mine.write(&[0; 20]) {
            sent += count;
        }
        assert_eq!(wait(&mine, &stop, SHORT), Wait::NoRoom);
        theirs.read_exact(&mut vec![0; sent]).unwrap();
        assert_eq!(wait(&mine, &stop, LONG), Wait::Ready);
    }
}
