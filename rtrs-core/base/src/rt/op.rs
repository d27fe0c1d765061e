//! [`Op`]: an operation for io_uring that owns everything the kernel may access while it runs.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use io_uring::{opcode, squeue, types};
use socket2::SockAddr;

use super::blkdev::FileFacts;
use super::fixed::Fixed;
use crate::mem::{IoVecs, MemSlice};

/// Shared descriptor of one shard. Closed when its last holder is dropped; operations in progress
/// are also holders.
#[derive(Clone, Debug)]
pub struct Fd(Rc<OwnedFd>);

impl Fd {
    /// Takes over a descriptor.
    pub fn new(fd: impl Into<OwnedFd>) -> Self {
        Self(Rc::new(fd.into()))
    }

    /// Returns the descriptor if there is no other holder. Otherwise drops this reference and
    /// returns None.
    pub fn into_owned(self) -> Option<OwnedFd> {
        Rc::into_inner(self.0)
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Operation for the kernel, with everything the kernel may access while it runs.
#[derive(Debug)]
pub enum Op {
    /// `sendmsg` of everything that remains in the vectors. May be short.
    SendMsg { fd: Fd, iov: Box<IoVecs> },
    /// `recvmsg` into the vectors. Usually short; 0 means end of stream.
    RecvMsg { fd: Fd, iov: Box<IoVecs> },
    /// `send` of one slice. May be short.
    Send { fd: Fd, buf: MemSlice },
    /// `recv` into one slice; 0 means end of stream.
    Recv { fd: Fd, buf: MemSlice },
    /// `pread`; offset `u64::MAX` reads at the descriptor's own position (pipes, eventfds).
    Read { fd: Fd, buf: MemSlice, offset: u64 },
    /// `pwrite`; with `dsync`, the data is durable on completion (RWF_DSYNC).
    Write { fd: Fd, buf: MemSlice, offset: u64, dsync: bool },
    /// `fdatasync`, or `fsync` unless `data_only` is set.
    Fsync { fd: Fd, data_only: bool },
    /// `fallocate`.
    Fallocate { fd: Fd, mode: i32, offset: u64, len: u64 },
    /// `statx` of the descriptor itself.
    Statx { fd: Fd, facts: FileFacts },
    /// `accept4` with CLOEXEC; the result is the new descriptor, see
    /// [`Completed::into_fd`](super::Completed::into_fd).
    Accept { fd: Fd },
    /// `connect`.
    Connect { fd: Fd, address: SocketAddr },
    /// One-shot `poll` for these POLL* bits; the result contains the bits that are set.
    Poll { fd: Fd, events: u32 },
}

impl Op {
    /// Poll that completes when a stream socket's peer has closed the connection or will send no
    /// more, even if data is unread.
    pub fn hangup(fd: Fd) -> Self {
        Self::Poll { fd, events: libc::POLLRDHUP.cast_unsigned().into() }
    }

    /// Poll that completes when there is something to read, including the end of the stream.
    pub fn readable(fd: Fd) -> Self {
        Self::Poll { fd, events: (libc::POLLIN | libc::POLLRDHUP).cast_unsigned().into() }
    }

    /// Poll that completes when there is room to write.
    pub fn writable(fd: Fd) -> Self {
        Self::Poll { fd, events: libc::POLLOUT.cast_unsigned().into() }
    }

    /// Converts the operation to a submission. `address` holds the target of a connect; the
    /// submission points to it until completion. A read or write with `nowait` fails with EAGAIN if
    /// it would block, or EOPNOTSUPP if that cannot be determined (RWF_NOWAIT).
    #[allow(clippy::cast_possible_truncation, reason = "slices are checked below 4 GiB")]
    pub(super) fn entry(
        &mut self,
        fixed: &mut Fixed,
        address: &mut Option<Box<SockAddr>>,
        nowait: bool,
    ) -> squeue::Entry {
        let nowait = if nowait { libc::RWF_NOWAIT } else { 0 };
        let raw = |fd: &Fd| types::Fd(fd.as_raw_fd());
        match self {
            Self::SendMsg { fd, iov } => opcode::SendMsg::new(raw(fd), iov.header())
                .flags((libc::MSG_NOSIGNAL | libc::MSG_WAITALL).cast_unsigned())
                .build(),
            Self::RecvMsg { fd, iov } => opcode::RecvMsg::new(raw(fd), iov.header()).build(),
            Self::Send { fd, buf } => opcode::Send::new(raw(fd), buf.address(), buf.len() as u32)
                .flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL)
                .build(),
            Self::Recv { fd, buf } => {
                opcode::Recv::new(raw(fd), buf.address(), buf.len() as u32).build()
            }
            Self::Read { fd, buf, offset } => {
                let slot = fixed.slot(buf);
                read_entry(raw(fd), buf, slot, *offset, nowait)
            }
            Self::Write { fd, buf, offset, dsync } => {
                let slot = fixed.slot(buf);
                let flags = nowait | if *dsync { libc::RWF_DSYNC } else { 0 };
                write_entry(raw(fd), buf, slot, *offset, flags)
            }
            Self::Fsync { fd, data_only } => {
                let flags = if *data_only {
                    types::FsyncFlags::DATASYNC
                } else {
                    types::FsyncFlags::empty()
                };
                opcode::Fsync::new(raw(fd)).flags(flags).build()
            }
            Self::Fallocate { fd, mode, offset, len } => {
                opcode::Fallocate::new(raw(fd), *len).offset(*offset).mode(*mode).build()
            }
            Self::Statx { fd, facts } => {
                opcode::Statx::new(raw(fd), c"".as_ptr(), facts.room().cast())
                    .flags(libc::AT_EMPTY_PATH)
                    .mask(libc::STATX_SIZE | libc::STATX_NLINK)
                    .build()
            }
            Self::Accept { fd } => {
                opcode::Accept::new(raw(fd), std::ptr::null_mut(), std::ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            }
            Self::Connect { fd, address: to } => {
                let to = address.insert(Box::new(SockAddr::from(*to)));
                opcode::Connect::new(raw(fd), to.as_ptr().cast(), to.len()).build()
            }
            Self::Poll { fd, events } => opcode::PollAdd::new(raw(fd), *events).build(),
        }
    }
}

/// Creates the submission of a read, through its memory's slot if the memory is registered.
#[allow(clippy::cast_possible_truncation, reason = "slices are checked below 4 GiB")]
fn read_entry(
    fd: types::Fd,
    buf: &MemSlice,
    slot: Option<u16>,
    offset: u64,
    flags: i32,
) -> squeue::Entry {
    let (at, len) = (buf.address(), buf.len() as u32);
    match slot {
        Some(index) => {
            opcode::ReadFixed::new(fd, at, len, index).offset(offset).rw_flags(flags).build()
        }
        None => opcode::Read::new(fd, at, len).offset(offset).rw_flags(flags).build(),
    }
}

/// Creates the submission of a write, through its memory's slot if the memory is registered.
#[allow(clippy::cast_possible_truncation, reason = "slices are checked below 4 GiB")]
fn write_entry(
    fd: types::Fd,
    buf: &MemSlice,
    slot: Option<u16>,
    offset: u64,
    flags: i32,
) -> squeue::Entry {
    let (at, len) = (buf.address(), buf.len() as u32);
    match slot {
        Some(index) => {
            opcode::WriteFixed::new(fd, at, len, index).offset(offset).rw_flags(flags).build()
        }
        None => opcode::Write::new(fd, at, len).offset(offset).rw_flags(flags).build(),
    }
}
