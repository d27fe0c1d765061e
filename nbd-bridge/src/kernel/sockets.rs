//! Sockets of a kernel device, and the check that the kernel reads them.
//!
//! The driver reads from each socket in a work item that never ends, on a workqueue with a rescuer
//! (`nbd_start_device`, `recv_work`). If the kernel takes more than 10 ms to create threads, the
//! rescuer takes all items that are waiting for one and runs them in sequence: the first never
//! ends, so the others never run, and answers on their sockets are never read (`rescuer_thread` in
//! `kernel/workqueue.c`). Therefore every socket contains [`FIRST_BYTES`] when the device is
//! connected, and the device is usable once the kernel has read them from each.
//!
//! Called by `device`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};

use crate::proto::wire::magic;
use crate::send_buffer;

/// Maximum time for the kernel to start reading from all sockets of a device.
pub(super) const READ_PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of times that a device is connected if the kernel does not read from all of its
/// sockets.
pub(super) const CONNECTS_MAX: u32 = 6;

/// First bytes sent to the kernel: the start of the first reply, whichever that is. The bridge that
/// adopts the socket omits them from that reply.
pub const FIRST_BYTES: [u8; 4] = magic::SIMPLE_REPLY.to_be_bytes();

/// MSG_PEEK and MSG_DONTWAIT on Linux.
const PEEK: i32 = 0x2 | 0x40;

/// Both ends of a device's sockets.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    kernel: Vec<Socket>,
    ours: Vec<OwnedFd>,
}

impl Sockets {
    /// Creates pairs of connected sockets with [`FIRST_BYTES`] already sent to the kernel ends.
    pub(super) fn new(count: usize) -> io::Result<Self> {
        let mut all = Self::default();
        for _ in 0..count {
            let (kernel, ours) = Socket::pair(Domain::UNIX, Type::STREAM, None)?;
            for socket in [&kernel, &ours] {
                if let Err(error) = send_buffer::enlarge(socket, send_buffer::ROOM) {
                    tracing::debug!("cannot tune the socket of a kernel device: {error}");
                }
            }
            if ours.send(&FIRST_BYTES)? != FIRST_BYTES.len() {
                return Err(io::ErrorKind::WriteZero.into());
            }
            all.kernel.push(kernel);
            all.ours.push(ours.into());
        }
        Ok(all)
    }

    /// Adds the sockets of another set.
    pub(super) fn append(&mut self, mut more: Self) {
        self.kernel.append(&mut more.kernel);
        self.ours.append(&mut more.ours);
    }

    /// Returns the ends for the kernel.
    pub(super) fn kernel_ends(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.kernel.iter().map(AsFd::as_fd)
    }

    /// Hands out our ends, for [`crate::Bridge::adopt_kernel`], one for each shard.
    pub(super) fn take_ours(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.ours)
    }

    /// Whether our ends were handed out.
    pub(super) fn are_served(&self) -> bool {
        self.ours.is_empty()
    }

    /// Number of sockets from which the kernel has not yet read all bytes.
    pub(super) fn unread(&self) -> usize {
        let holds_bytes = |socket: &&Socket| {
            let mut byte = [MaybeUninit::uninit()];
            let seen = SockRef::from(*socket).recv_with_flags(&mut byte, PEEK);
            seen.is_ok_and(|count| count > 0)
        };
        self.kernel.iter().filter(holds_bytes).count()
    }

    /// Shuts down all connections; the kernel then fails the IO in flight.
    pub(super) fn shut_down(&mut self) {
        for socket in self.kernel.drain(..) {
            if let Err(error) = socket.shutdown(std::net::Shutdown::Both) {
                tracing::debug!("cannot shut down the socket of a kernel device: {error}");
            }
        }
        self.ours.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Returns a duplicate of the kernel's end, like the driver's.
    fn driver_end(sockets: &Sockets, index: usize) -> UnixStream {
        UnixStream::from(OwnedFd::from(sockets.kernel[index].try_clone().unwrap()))
    }

    #[test]
    fn sockets_are_connected_pairs() {
        let mut sockets = Sockets::new(2).unwrap();
        assert_eq!(sockets.kernel_ends().count(), 2);
        let mut kernel = driver_end(&sockets, 1);
        kernel.write_all(b"x").unwrap();
        let ours = sockets.take_ours();
        assert_eq!((ours.len(), sockets.take_ours().len()), (2, 0));
        let mut ours: Vec<_> = ours.into_iter().map(UnixStream::from).collect();
        ours[1].write_all(b"rest").unwrap();
        sockets.shut_down();
        let (mut asked, mut answered) = (String::new(), Vec::new());
        ours[1].read_to_string(&mut asked).unwrap();
        kernel.read_to_end(&mut answered).unwrap();
        assert_eq!(
            (asked.as_str(), answered.as_slice()),
            ("x", b"\x67\x44\x66\x98rest".as_slice())
        );
    }

    #[test]
    fn sockets_without_a_reader_are_counted() {
        let mut sockets = Sockets::new(3).unwrap();
        assert_eq!(sockets.unread(), 3);
        for index in [0, 2] {
            // The driver reads a whole reply header, which is longer.
            driver_end(&sockets, index).read_exact(&mut [0; 4]).unwrap();
        }
        assert_eq!(sockets.unread(), 1);
        driver_end(&sockets, 1).read_exact(&mut [0; 3]).unwrap();
        assert_eq!(sockets.unread(), 1, "a byte is left");
        driver_end(&sockets, 1).read_exact(&mut [0; 1]).unwrap();
        assert_eq!(sockets.unread(), 0);
        sockets.shut_down();
        assert_eq!(sockets.unread(), 0);
    }
}
