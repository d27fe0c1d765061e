//! Reading from and writing to a socket, with a time limit for the whole operation.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::Instant;

use socket2::SockRef;

use crate::settings::Time;
use crate::time::Duration;

/// Deadline of an operation, with the operation's name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    what: &'static str,
    limit: Duration,
    deadline: Instant,
}

impl Limit {
    /// Starts the time limit.
    pub(crate) fn new(what: &'static str, limit: Duration) -> Self {
        Self { what, limit, deadline: Instant::now() + limit }
    }

    /// Returns the remaining time as a system timeout: never zero, which would mean no timeout.
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(timed_out(self.what, self.limit)) } else { Ok(left) }
    }

    fn judge(&self, error: io::Error) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Err(timed_out(self.what, self.limit))
            }
            _ => Err(error),
        }
    }

    /// Reads the available data; returns 0 at the end of the stream.
    pub(crate) fn read(&self, from: &impl AsFd, room: &mut [u8]) -> io::Result<usize> {
        let socket = SockRef::from(from);
        loop {
            socket.set_read_timeout(Some(self.left()?))?;
            match (&*socket).read(room) {
                Ok(count) => return Ok(count),
                Err(error) => self.judge(error)?,
            }
        }
    }

    /// Writes all bytes.
    pub(crate) fn write(&self, to: &impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
        let socket = SockRef::from(to);
        while !bytes.is_empty() {
            socket.set_write_timeout(Some(self.left()?))?;
            match (&*socket).write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(error) => self.judge(error)?,
            }
        }
        Ok(())
    }
}

/// Returns the error for an operation that took too long.
pub(crate) fn timed_out(what: &str, limit: Duration) -> io::Error {
    let limit = Time::<0, { u64::MAX }>::new(limit);
    io::Error::new(io::ErrorKind::TimedOut, format!("{what} took longer than {limit}"))
}
