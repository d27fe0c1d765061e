//! Moves bytes between a client (over TLS or in the clear) and the engine, until both have ended.
//!
//! The thread polls both sockets. Each direction has one buffer, which is filled only when it is
//! empty, so a side that does not read stops the other. A client that reads nothing for
//! [`STALL_TIMEOUT`] is disconnected.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::ServerConnection;

use crate::conn::STALL_TIMEOUT;

/// Size of a buffer: several TLS records.
const BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of buffers moved in one direction before it is the other direction's turn.
const ROUNDS_MAX: usize = 16;

/// Transport to the client.
pub(super) enum Wire {
    Plain,
    Tls(Box<ServerConnection>),
}

/// Bytes in transit.
struct Buffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Buffer {
    fn new() -> Self {
        Self { bytes: vec![0; BUFFER_BYTES].into(), start: 0, end: 0 }
    }

    fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn is_full(&self) -> bool {
        self.end == self.bytes.len()
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        if self.is_empty() {
            self.clear();
        }
    }

    fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    /// Appends bytes read from `from`.
    fn fill(&mut self, from: &mut impl Read) -> io::Result<usize> {
        let count = from.read(&mut self.bytes[self.end..])?;
        self.end += count;
        Ok(count)
    }
}

/// Result of an attempt to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    /// The socket would block.
    Blocked,
    /// Another attempt may move more bytes immediately.
    Some,
}

/// Both ends of a connection in the transmission phase.
pub(super) struct Pipe<'a> {
    client: &'a TcpStream,
    engine: &'a UnixStream,
    wire: Wire,
    /// TLS records as received.
    raw: Buffer,
    /// Bytes for the engine.
    inward: Buffer,
    /// Bytes for the client, before TLS.
    outward: Buffer,
    /// The client's stream has ended.
    client_ended: bool,
    /// The end of the client's stream was passed to the engine.
    engine_told: bool,
    /// The engine's stream has ended.
    engine_ended: bool,
    /// The end of the engine's stream was passed to the client.
    client_told: bool,
    /// Start of the period in which the client has received nothing despite pending bytes.
    stalled: Option<Instant>,
}

impl<'a> Pipe<'a> {
    pub(super) fn new(client: &'a TcpStream, engine: &'a UnixStream, wire: Wire) -> Self {
        Self {
            client,
            engine,
            wire,
            raw: Buffer::new(),
            inward: Buffer::new(),
            outward: Buffer::new(),
            client_ended: false,
            engine_told: false,
            engine_ended: false,
            client_told: false,
            stalled: None,
        }
    }

    /// Runs until both streams have ended. `begin` is called before the client's first bytes are
    /// passed to the engine.
    ///
    /// # Errors
    /// A client that disconnects, stalls, or violates TLS.
    pub(super) fn run(&mut self, begin: impl FnOnce()) -> io::Result<()> {
        self.client.set_nonblocking(true)?;
        self.engine.set_nonblocking(true)?;
        let mut begin = Some(begin);
        loop {
            let mut moved = Moved::Blocked;
            for _ in 0..ROUNDS_MAX {
                // The order matters: `wait` waits for what blocks here.
                if !self.inward.is_empty()
                    && let Some(begin) = begin.take()
                {
                    begin();
                }
                self.give_to_engine();
                moved = self.take_from_client()?;
                if moved == Moved::Blocked {
                    break;
                }
            }
            for _ in 0..ROUNDS_MAX {
                let out = self.take_from_engine()?;
                if out == Moved::Blocked {
                    break;
                }
                moved = out;
            }
            if self.client_told && !self.owes_client() {
                // Fails if the client has already disconnected.
                let _ = self.client.shutdown(Shutdown::Write);
                return Ok(());
            }
            if moved == Moved::Blocked {
                self.wait()?;
            }
        }
    }

    /// Fills the buffer for the engine, if it is empty.
    fn take_from_client(&mut self) -> io::Result<Moved> {
        if !self.inward.is_empty() || self.client_ended {
            return Ok(Moved::Blocked);
        }
        let Self { client, wire, raw, inward, .. } = self;
        let conn = match wire {
            Wire::Plain => {
                return match inward.fill(client) {
                    Ok(count) => {
                        self.client_ended = count == 0;
                        Ok(Moved::Some)
                    }
                    Err(error) => blocked(error),
                };
            }
            Wire::Tls(conn) => conn,
        };
        loop {
            match inward.fill(&mut conn.reader()) {
                // End of stream, with or without close_notify: NBD requests have lengths, so
                // truncation is noticed.
                Ok(0) => {
                    self.client_ended = true;
                    return Ok(Moved::Some);
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    self.client_ended = true;
                    return Ok(Moved::Some);
                }
                Ok(_) if inward.is_full() => return Ok(Moved::Some),
                Ok(_) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if raw.is_empty() {
                match raw.fill(client) {
                    Ok(_) => {}
                    Err(_) if !inward.is_empty() => return Ok(Moved::Some),
                    Err(error) => return blocked(error),
                }
            }
            // Reading zero bytes is how rustls learns of the end of the stream.
            let count = conn.read_tls(&mut raw.filled())?;
            raw.consume(count);
            if let Err(error) = conn.process_new_packets() {
                // Sends the alert, if there is room for it.
                let _ = conn.write_tls(client);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }

    /// Writes as much of the buffer to the engine as it accepts.
    fn give_to_engine(&mut self) {
        while !self.inward.is_empty() {
            match (&mut self.engine).write(self.inward.filled()) {
                Ok(count) => self.inward.consume(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The engine accepts no more bytes. Its last replies may still arrive.
                Err(_) => {
                    self.inward.clear();
                    (self.client_ended, self.engine_told) = (true, true);
                }
            }
        }
        if self.client_ended && !std::mem::replace(&mut self.engine_told, true) {
            // Fails if the engine has already closed its end.
            let _ = self.engine.shutdown(Shutdown::Write);
        }
    }

    /// Whether bytes are pending for the client.
    fn owes_client(&self) -> bool {
        !self.outward.is_empty() || matches!(&self.wire, Wire::Tls(conn) if conn.wants_write())
    }

    /// Sends what is pending for the client, then reads more from the engine.
    fn take_from_engine(&mut self) -> io::Result<Moved> {
        while self.owes_client() {
            let Self { client, wire, outward, .. } = self;
            let sent = match wire {
                Wire::Plain => client.write(outward.filled()).map(|count| outward.consume(count)),
                Wire::Tls(conn) if conn.wants_write() => conn.write_tls(client).map(drop),
                Wire::Tls(conn) => {
                    let count = conn.writer().write(outward.filled())?;
                    outward.consume(count);
                    continue;
                }
            };
            match sent {
                Ok(()) => self.stalled = None,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stalled.get_or_insert_with(Instant::now);
                    return Ok(Moved::Blocked);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.engine_ended {
            if !std::mem::replace(&mut self.client_told, true)
                && let Wire::Tls(conn) = &mut self.wire
            {
                conn.send_close_notify();
                return Ok(Moved::Some);
            }
            return Ok(Moved::Blocked);
        }
        match self.outward.fill(&mut self.engine) {
            Ok(count) if count > 0 => Ok(Moved::Some),
            Err(error) if retry(&error) => blocked(error),
            Ok(_) | Err(_) => {
                self.engine_ended = true;
                Ok(Moved::Some)
            }
        }
    }

    /// Waits until bytes can be moved.
    fn wait(&mut self) -> io::Result<()> {
        let owes = self.owes_client();
        let (mut client, mut engine) = (PollFlags::empty(), PollFlags::empty());
        client.set(PollFlags::IN, self.inward.is_empty() && !self.client_ended);
        client.set(PollFlags::OUT, owes);
        engine.set(PollFlags::IN, !owes && !self.engine_ended);
        engine.set(PollFlags::OUT, !self.inward.is_empty());
        // The client is always polled, so that its end is noticed. The engine is not: its end would
        // be reported repeatedly while nothing can be read from it.
        let mut fds = [PollFd::new(self.client, client), PollFd::new(self.engine, engine)];
        let fds = if engine.is_empty() { &mut fds[..1] } else { &mut fds[..] };
        let left = self
            .stalled
            .filter(|_| owes)
            .map(|since| (since + STALL_TIMEOUT).saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(fds, left.as_ref()) {
            Ok(0) if left.is_some() => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) => {
                Err(io::ErrorKind::ConnectionReset.into())
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn retry(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Interprets an error of a nonblocking socket.
fn blocked(error: io::Error) -> io::Result<Moved> {
    match error.kind() {
        io::ErrorKind::WouldBlock => Ok(Moved::Blocked),
        io::ErrorKind::Interrupted => Ok(Moved::Some),
        _ => Err(error),
    }
}
