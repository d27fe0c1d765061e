//! Room in a socket's connection to its node.
//!
//! Programs poll the descriptor, so it must not be writable while the socket's send buffer is full.
//! The system, however, reports it writable while less than a quarter of its own buffer is used. So
//! the user of a full socket sends a packet that the node does not read until there is room, and
//! gives the connection the smallest buffer, so that the packet takes more than a quarter of it.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_send_buffer_size, socket_timeout};
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::request::gone;
use crate::channel::{PACKET_LEN, Packet, PacketKind};

/// Usual send buffer: half of the system's default, because the system doubles the value.
const CHANNEL_LEN: usize = 212_992 / 2;
/// Smallest send buffer; the system raises it to 4,608 bytes.
const CHANNEL_MIN: usize = 1;
/// Length of a packet that takes more than a quarter of the smallest buffer.
const FULL_LEN: usize = 1200;

/// Snapshot of the room in a send buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) in_flight: usize,
    pub(super) sndbuf: usize,
    /// Total payload released.
    pub(super) released: u32,
}

impl Room {
    /// Whether a message may be sent. As in the kernel, it may exceed the buffer.
    pub(super) fn is_any(self) -> bool {
        self.in_flight < self.sndbuf
    }

    /// Whether a quarter of the buffer is free.
    pub(super) fn is_ample(self) -> bool {
        self.in_flight <= self.sndbuf - self.sndbuf / 4
    }
}

/// Packet sent by a process to make a full socket unwritable.
#[derive(Debug, Default)]
pub(super) struct Shown(AtomicU64);

impl Shown {
    /// Makes the descriptor of a socket without room unwritable, until the node has read everything
    /// and there is room. `position` is the ring's.
    pub(super) fn show_full(
        &self,
        socket: BorrowedFd<'_>,
        room: Room,
        position: u32,
    ) -> Result<(), Errno> {
        let state = u64::from(room.released) << 32 | (room.sndbuf as u64 & 0x7fff_ffff) << 1 | 1;
        // Unless room was freed since, the node reads the packet only to handle a cancellation.
        if self.0.load(Ordering::Relaxed) == state && !is_writable(socket)? {
            return Ok(());
        }
        let sent = match send_full(socket, position) {
            Err(Errno::AGAIN) => {
                self.widen(socket)?;
                send_full(socket, position)
            }
            sent => sent,
        };
        set_socket_send_buffer_size(socket, CHANNEL_MIN)?;
        match sent {
            Ok(()) => self.0.store(state, Ordering::Relaxed),
            // The node first reads the queued messages, which makes room for the next call.
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(gone(error)),
        }
        Ok(())
    }

    /// Restores the connection's usual send buffer.
    pub(super) fn widen(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        self.forget();
        set_socket_send_buffer_size(socket, CHANNEL_LEN)
    }

    /// Forgets the packet, because a message was sent after it.
    pub(super) fn forget(&self) {
        if self.0.load(Ordering::Relaxed) != 0 {
            self.0.store(0, Ordering::Relaxed);
        }
    }
}

fn is_writable(socket: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
    Ok(poll(&mut fds, Some(&Timespec::default()))? > 0)
}

fn send_full(socket: BorrowedFd<'_>, position: u32) -> Result<(), Errno> {
    let head = Packet::new(PacketKind::Full).with_position(position).encode();
    let parts = [IoSlice::new(&head), IoSlice::new(&[0; FULL_LEN - PACKET_LEN])];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut none = SendAncillaryBuffer::default();
    rustix::net::sendmsg(socket, &parts, &mut none, flags).map(drop)
}

/// Wait by a sending call, limited by the socket's send timeout.
#[derive(Debug, Default)]
pub(super) struct SendWait {
    /// End of the wait, once known; `Some(None)` if there is no time limit.
    ends_at: Option<Option<Instant>>,
}

impl SendWait {
    /// Waits until the descriptor is writable, or the node has exited.
    ///
    /// # Errors
    /// ETIMEDOUT, EINTR.
    pub(super) fn writable(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let ends_at = match self.ends_at {
            Some(ends_at) => ends_at,
            None => {
                let limit = socket_timeout(socket, Timeout::Send)?;
                *self.ends_at.insert(limit.and_then(|limit| Instant::now().checked_add(limit)))
            }
        };
        let left = ends_at.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
        match poll(&mut fds, left.as_ref())? {
            0 => Err(Errno::TIMEDOUT.into()),
            _ => Ok(()),
        }
    }
}
