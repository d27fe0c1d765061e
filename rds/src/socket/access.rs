//! Connection of a user to a node: sockets, requests and the board.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::fcntl_getfl;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::request::{ANSWER_TIME_MAX, ask, exchange, unclear};
use crate::channel::{Board, Connect, Packet, PacketKind, SocketView};

/// A node that listens on a unix socket.
#[derive(Clone, Debug)]
pub struct AtPath(pub PathBuf);

impl AtPath {
    /// Connects an existing socket.
    ///
    /// # Errors
    /// The system's error.
    pub fn connect_socket(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(rustix::net::connect(socket, &SocketAddrUnix::new(&self.0)?)?)
    }
}

impl Connect for AtPath {
    fn connect(&self) -> io::Result<OwnedFd> {
        let socket = new_socket()?;
        // Limits the connect, which blocks while too many others are pending.
        set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_TIME_MAX))?;
        self.connect_socket(socket.as_fd())?;
        set_socket_timeout(&socket, Timeout::Send, None)?;
        Ok(socket)
    }
}

/// Creates a unix socket for packets, not connected.
///
/// # Errors
/// The system's error.
pub fn new_socket() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// A node, as its users see it.
#[derive(Debug)]
pub struct Access {
    way: Box<dyn Connect>,
    board: Board,
}

/// A socket's slot on the board.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Number of the slot.
    pub index: usize,
    /// Distinguishes successive sockets of the slot.
    pub serial: u32,
}

impl Access {
    /// Connects to a node.
    ///
    /// # Errors
    /// The system's error when no process listens there; `InvalidData` for a node of another
    /// version.
    pub fn open(way: Box<dyn Connect>) -> io::Result<Self> {
        let (_, fd) = exchange(&*way, &Packet::new(PacketKind::Attach), &[])?;
        Self::with_board(way, fd.ok_or_else(unclear)?)
    }

    /// Creates the access to a node with a known board.
    ///
    /// # Errors
    /// `InvalidData` for a board of another version.
    pub fn with_board(way: Box<dyn Connect>, board: OwnedFd) -> io::Result<Self> {
        Ok(Self { way, board: Board::open(board)? })
    }

    /// Connects to a node, and finds the slot of the socket with this name.
    ///
    /// # Errors
    /// See [`Access::open`]; ENOENT if the node has no such socket.
    pub fn find(way: Box<dyn Connect>, name: &[u8]) -> io::Result<(Self, Slot)> {
        let (bound, fd) = exchange(&*way, &Packet::new(PacketKind::Attach), name)?;
        let slot = Slot { index: bound.extra as usize, serial: bound.len };
        Ok((Self::with_board(way, fd.ok_or_else(unclear)?)?, slot))
    }

    /// Returns the board of the node.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// Creates a new connection to the node.
    ///
    /// # Errors
    /// The system's error.
    pub fn connect(&self) -> io::Result<OwnedFd> {
        self.way.connect()
    }

    /// Turns a connection into a socket at a port of the node, 0 for any. Also returns the node's
    /// board.
    ///
    /// # Errors
    /// The node's error: EADDRINUSE, EADDRNOTAVAIL, EINVAL, ENOBUFS; otherwise the system's error.
    pub fn bind(socket: BorrowedFd<'_>, address: IpAddr, port: u16) -> io::Result<(Slot, OwnedFd)> {
        let packet = Packet { port, address, ..Packet::new(PacketKind::Bind) };
        let (bound, board) = ask(socket, &packet, &[])?;
        let slot = Slot { index: bound.extra as usize, serial: bound.len };
        Ok((slot, board.ok_or_else(unclear)?))
    }

    /// Returns the state of a socket; `None` if it is closed.
    pub fn view(&self, slot: Slot) -> Option<SocketView> {
        self.board.socket(slot.index).filter(|view| view.serial == slot.serial)
    }

    /// Sets the size of a socket's send buffer.
    ///
    /// # Errors
    /// See [`Access::bind`].
    pub fn set_sndbuf(&self, slot: Slot, bytes: usize) -> io::Result<()> {
        let value = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.ask_of(slot, Packet { value, ..Packet::new(PacketKind::SetBuffer) })
    }

    /// Sets the size of a socket's receive buffer.
    ///
    /// # Errors
    /// See [`Access::bind`].
    pub fn set_rcvbuf(&self, slot: Slot, bytes: usize) -> io::Result<()> {
        let value = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.ask_of(slot, Packet { value, port: 1, ..Packet::new(PacketKind::SetBuffer) })
    }

    /// Sets the default destination of a socket.
    ///
    /// # Errors
    /// See [`Access::bind`].
    pub fn set_destination(&self, slot: Slot, to: (IpAddr, u16)) -> io::Result<()> {
        let (address, port) = to;
        self.ask_of(slot, Packet { address, port, ..Packet::new(PacketKind::Connect) })
    }

    /// Sets whether a socket is notified of ports that are no longer congested.
    ///
    /// # Errors
    /// See [`Access::bind`].
    pub fn set_monitor(&self, slot: Slot, on: bool) -> io::Result<()> {
        let value = u32::from(on);
        self.ask_of(slot, Packet { value, ..Packet::new(PacketKind::Monitor) })
    }

    /// Reserves a place for a peer, if there is one.
    ///
    /// # Errors
    /// ENOMEM if there is none; otherwise see [`Access::bind`].
    pub fn reach(&self, address: IpAddr) -> io::Result<()> {
        exchange(&*self.way, &Packet { address, ..Packet::new(PacketKind::Reach) }, &[]).map(drop)
    }

    /// Cancels what a socket has sent to a port of a peer.
    ///
    /// # Errors
    /// See [`Access::bind`].
    pub fn cancel(&self, slot: Slot, to: (IpAddr, u16)) -> io::Result<()> {
        let (address, port) = to;
        self.ask_of(slot, Packet { address, port, ..Packet::new(PacketKind::Cancel) })
    }

    fn ask_of(&self, slot: Slot, packet: Packet) -> io::Result<()> {
        let extra = u32::try_from(slot.index).unwrap_or(u32::MAX);
        exchange(&*self.way, &Packet { extra, len: slot.serial, ..packet }, &[]).map(drop)
    }

    /// Returns an info option of the node, and the size of each element.
    ///
    /// # Errors
    /// ENOPROTOOPT for a number that is not an info option; otherwise see [`Access::bind`].
    pub fn info(&self, option: u32) -> io::Result<(Vec<u8>, usize)> {
        let packet = Packet { value: option, ..Packet::new(PacketKind::Info) };
        let (done, fd) = exchange(&*self.way, &packet, &[])?;
        let mut bytes = vec![0; done.len as usize];
        if let Some(fd) = fd {
            use std::os::unix::fs::FileExt;
            std::fs::File::from(fd).read_exact_at(&mut bytes, 0)?;
        }
        Ok((bytes, done.extra as usize))
    }
}

/// Whether calls on the descriptor are nonblocking.
pub(crate) fn is_nonblocking(fd: BorrowedFd<'_>) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}
