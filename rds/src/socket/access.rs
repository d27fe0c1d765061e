//! A user's connections to a node: sockets, requests and the board.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use rustix::fs::{fcntl_getfl, fstat};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::request::{ANSWER_TIME_MAX, Answer, ask, ask_apart, exchange, tell, unclear};
use super::room::{Room, Shown};
use crate::channel::{
    Board, Connect, Flow, Packet, PacketKind, Refusal, SocketView, Tally, mapped,
};

/// Lowest number for the descriptors of control connections, above those that programs usually
/// choose.
const CONTROL_FD_MIN: i32 = 900;

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
        // Limits how long connecting blocks while too many other connections are pending.
        set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_TIME_MAX))?;
        self.connect_socket(socket.as_fd())?;
        set_socket_timeout(&socket, Timeout::Send, None)?;
        Ok(socket)
    }
}

/// Creates an unconnected unix socket for packets.
///
/// # Errors
/// The system's error.
pub fn new_socket() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// A user's access to a node.
#[derive(Debug)]
pub struct Access {
    way: Box<dyn Connect>,
    board: Board,
    control: Mutex<Option<Arc<Control>>>,
}

/// A socket's slot on the board.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Number of the slot.
    pub index: usize,
    /// Distinguishes successive sockets in the slot.
    pub serial: u32,
}

/// Access to a socket's state in memory that its users share with the node.
#[derive(Debug)]
pub struct Place {
    /// Slot of the socket on the board.
    pub slot: Slot,
    /// Counters and ring of the socket.
    pub flow: Flow,
}

/// The node's answer about a socket.
#[derive(Debug)]
pub struct Bound {
    /// The socket's shared state.
    pub place: Place,
    /// The node's board.
    pub board: OwnedFd,
}

impl Bound {
    fn of(answer: Answer) -> io::Result<Self> {
        let (packet, fds) = answer;
        let slot = Slot { index: packet.extra as usize, serial: packet.len };
        let [board, flow] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| unclear())?;
        Ok(Self { place: Place { slot, flow: Flow::open(flow.as_fd())? }, board })
    }
}

/// Connection for requests about this process's sockets. Each request is answered on a connection
/// of its own, so that threads and forked processes can share this connection.
#[derive(Debug)]
pub struct Control {
    /// Present until the connection is dropped.
    fd: Option<OwnedFd>,
    inode: u64,
    number: u64,
    tally: Tally,
}

impl Control {
    /// Asks the node which socket this is, and opens a control connection that may change the
    /// socket.
    ///
    /// # Errors
    /// ENETDOWN if the node has ended.
    pub fn open(socket: BorrowedFd<'_>) -> io::Result<(Self, Bound)> {
        let (packet, tally) = (Packet::new(PacketKind::Control), Tally::create()?);
        let (answer, fd) = ask_apart(socket, &packet, tally.fd())?;
        let inode = fstat(&fd)?.st_ino;
        // A program may close all descriptors up to some number, or replace them with duplicates of
        // others.
        let fd = fcntl_dupfd_cloexec(&fd, CONTROL_FD_MIN).unwrap_or(fd);
        let number = number_of(answer.0.address);
        Ok((Self { fd: Some(fd), inode, number, tally }, Bound::of(answer)?))
    }

    /// Allows this connection to change another socket as well. Returns false if the node no longer
    /// knows this connection.
    fn add(&self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let packet = Packet::with_wide(PacketKind::Control, self.number);
        let ((packet, _), _) = ask_apart(socket, &packet, None)?;
        Ok(number_of(packet.address) == self.number)
    }

    /// Returns the descriptor if it is still open: the program may have closed it.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.fd.as_ref()?;
        let is_open = fstat(fd).is_ok_and(|stat| stat.st_ino == self.inode);
        is_open.then(|| fd.as_fd())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if self.fd().is_none() {
            // The descriptor's number may now belong to a different file.
            std::mem::forget(self.fd.take());
        }
    }
}

fn number_of(address: IpAddr) -> u64 {
    u64::try_from(u128::from(mapped(address))).unwrap_or(0)
}

impl Access {
    /// Connects to a node.
    ///
    /// # Errors
    /// The system's error if no process is listening there; `InvalidData` for a node with a
    /// different version.
    pub fn open(way: Box<dyn Connect>) -> io::Result<Self> {
        let (_, fds) = exchange(&*way, &Packet::new(PacketKind::Attach))?;
        Self::with_board(way, fds.into_iter().next().ok_or_else(unclear)?)
    }

    /// Creates access to a node whose board is known.
    ///
    /// # Errors
    /// `InvalidData` for a board with a different version.
    pub fn with_board(way: Box<dyn Connect>, board: OwnedFd) -> io::Result<Self> {
        Ok(Self { way, board: Board::open(board)?, control: Mutex::new(None) })
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

    /// Turns a connection into a socket bound to a port of the node, 0 for any.
    ///
    /// # Errors
    /// The node's error: EADDRINUSE, EADDRNOTAVAIL, EINVAL, ENOBUFS; otherwise the system's error.
    pub fn bind(socket: BorrowedFd<'_>, address: IpAddr, port: u16) -> io::Result<Bound> {
        let packet = Packet { port, address, ..Packet::new(PacketKind::Bind) };
        Bound::of(ask(socket, &packet)?)
    }

    /// Returns an info option of the node, and the size of each element.
    ///
    /// # Errors
    /// ENOPROTOOPT for a number that is not an info option; otherwise see [`Access::bind`].
    pub fn info(&self, option: u32) -> io::Result<(Vec<u8>, usize)> {
        let packet = Packet { value: option, ..Packet::new(PacketKind::Info) };
        info_of(exchange(&*self.way, &packet)?)
    }

    /// Returns the control connection; `None` if there is none, or if another thread is changing it
    /// or was doing so when this process was forked.
    fn control(&self) -> Option<Arc<Control>> {
        self.control.try_lock().ok()?.clone()
    }

    /// Replaces the control connection.
    pub fn set_control(&self, control: Control) -> Arc<Control> {
        let control = Arc::new(control);
        if let Ok(mut current) = self.control.try_lock() {
            *current = Some(Arc::clone(&control));
        }
        control
    }
}

/// Reads the answer to a request for information.
fn info_of(answer: Answer) -> io::Result<(Vec<u8>, usize)> {
    let (done, fds) = answer;
    let mut bytes = vec![0; done.len as usize];
    if let Some(fd) = fds.into_iter().next() {
        use std::os::unix::fs::FileExt;
        std::fs::File::from(fd).read_exact_at(&mut bytes, 0)?;
    }
    Ok((bytes, done.extra as usize))
}

/// A socket of a node. Its descriptor is passed to each call.
#[derive(Debug)]
pub struct Binding {
    access: Arc<Access>,
    slot: Slot,
    pub(super) flow: Flow,
    pub(super) shown: Shown,
}

impl Binding {
    /// Creates the state of a bound socket, and lets the control connection of `access` change the
    /// socket.
    ///
    /// # Errors
    /// See [`Control::open`].
    pub fn new(access: Arc<Access>, place: Place, socket: BorrowedFd<'_>) -> io::Result<Self> {
        let is_added = access.control().filter(|control| control.fd().is_some());
        let is_added = is_added.map(|control| control.add(socket)).transpose()?;
        if is_added != Some(true) {
            access.set_control(Control::open(socket)?.0);
        }
        let Place { slot, flow } = place;
        Ok(Self { access, slot, flow, shown: Shown::default() })
    }

    /// Creates the state of a socket for a test, without a control connection.
    #[cfg(test)]
    pub(super) fn of_test(way: Box<dyn Connect>, flow: Flow) -> Self {
        use crate::channel::BoardWriter;
        let board = BoardWriter::create(std::net::Ipv4Addr::LOCALHOST.into(), 1, 1).unwrap();
        let board = board.as_fd().try_clone_to_owned().unwrap();
        let access = Arc::new(Access::with_board(way, board).unwrap());
        Self { access, slot: Slot { index: 0, serial: 1 }, flow, shown: Shown::default() }
    }

    /// Returns the board of the socket's node.
    pub fn board(&self) -> &Board {
        &self.access.board
    }

    /// Counts a refused send.
    pub(super) fn refused(&self, refusal: Refusal) {
        if let Some(control) = self.access.control() {
            control.tally.add(refusal);
        }
    }

    /// Returns the state of the socket; `None` if it is closed.
    pub fn view(&self) -> Option<SocketView> {
        self.board().socket(self.slot.index).filter(|view| view.serial == self.slot.serial)
    }

    /// Returns the number of unacknowledged payload bytes that the socket has sent.
    pub fn in_flight(&self) -> usize {
        self.flow.in_flight(self.board().released(self.slot.index))
    }

    /// Returns the state of the send buffer.
    ///
    /// # Errors
    /// ENETDOWN if the node has ended.
    pub(super) fn room(&self) -> Result<Room, Errno> {
        let sndbuf = self.view().ok_or(Errno::NETDOWN)?.sndbuf;
        let released = self.board().released(self.slot.index);
        Ok(Room { in_flight: self.flow.in_flight(released), sndbuf, released })
    }

    /// Counts a message that was sent.
    pub(super) fn sent(&self, len: u32) {
        self.flow.sent(len);
        self.shown.forget();
    }

    /// Counts a received message, and notifies the node if it is waiting for that.
    pub(super) fn taken(&self, socket: BorrowedFd<'_>, len: u32) {
        if self.flow.taken(len, || self.board().mark(self.slot.index)) {
            self.report(socket, PacketKind::Taken);
        }
    }

    /// Sends a report to the node, which does not answer it.
    pub(super) fn report(&self, socket: BorrowedFd<'_>, kind: PacketKind) {
        let packet = self.named(Packet::new(kind));
        // While the send buffer is full, the node does not read the socket itself.
        let guard = self.access.control();
        let control = guard.as_deref().and_then(Control::fd);
        let mut channels = control.into_iter().chain([socket]);
        // The node may have closed the first one. If both fail, the node checks by itself within a
        // second.
        let _ = channels.any(|channel| tell(channel, &packet).is_ok());
    }

    /// Whether the users of the socket have asked to be notified of ports that are no longer
    /// congested.
    pub(super) fn monitors(&self) -> bool {
        self.view().is_some_and(|view| view.monitors)
    }

    /// Sets the size of the send buffer.
    ///
    /// # Errors
    /// ENETDOWN if the node has ended.
    pub fn set_sndbuf(&self, socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
        let value = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.change(socket, Packet { value, ..Packet::new(PacketKind::SetBuffer) })
    }

    /// Sets the size of the receive buffer.
    ///
    /// # Errors
    /// See [`Binding::set_sndbuf`].
    pub fn set_rcvbuf(&self, socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
        let value = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.change(socket, Packet { value, port: 1, ..Packet::new(PacketKind::SetBuffer) })
    }

    /// Sets the default destination.
    ///
    /// # Errors
    /// See [`Binding::set_sndbuf`].
    pub fn set_destination(&self, socket: BorrowedFd<'_>, to: (IpAddr, u16)) -> io::Result<()> {
        let (address, port) = to;
        self.change(socket, Packet { address, port, ..Packet::new(PacketKind::Connect) })
    }

    /// Sets whether the socket is notified of ports that are no longer congested.
    ///
    /// # Errors
    /// See [`Binding::set_sndbuf`].
    pub fn set_monitor(&self, socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
        let value = u32::from(on);
        self.change(socket, Packet { value, ..Packet::new(PacketKind::Monitor) })
    }

    /// Cancels messages that the socket has sent to a port of a peer.
    ///
    /// # Errors
    /// See [`Binding::set_sndbuf`].
    pub fn cancel(&self, socket: BorrowedFd<'_>, to: (IpAddr, u16)) -> io::Result<()> {
        let (address, port) = to;
        self.change(socket, Packet { address, port, ..Packet::new(PacketKind::Cancel) })
    }

    /// Reserves an entry among the node's peers, if one is free.
    ///
    /// # Errors
    /// ENOMEM if there is none; otherwise see [`Binding::set_sndbuf`].
    pub fn reach(&self, socket: BorrowedFd<'_>, address: IpAddr) -> io::Result<()> {
        self.ask(socket, &Packet { address, ..Packet::new(PacketKind::Reach) }).map(drop)
    }

    /// Returns an info option of the node, and the size of each element.
    ///
    /// # Errors
    /// ENOPROTOOPT for a number that is not an info option; otherwise see [`Binding::set_sndbuf`].
    pub fn info(&self, socket: BorrowedFd<'_>, option: u32) -> io::Result<(Vec<u8>, usize)> {
        let packet = Packet { value: option, ..Packet::new(PacketKind::Info) };
        info_of(self.ask(socket, &packet)?)
    }

    fn change(&self, socket: BorrowedFd<'_>, packet: Packet) -> io::Result<()> {
        self.ask(socket, &self.named(packet)).map(drop)
    }

    /// Identifies the socket in a request.
    fn named(&self, packet: Packet) -> Packet {
        let extra = u32::try_from(self.slot.index).unwrap_or(u32::MAX);
        Packet { extra, len: self.slot.serial, ..packet }
    }

    /// Sends a request over the control connection. Opens a new one if the program has closed it,
    /// or if the node has closed it to make room.
    fn ask(&self, socket: BorrowedFd<'_>, packet: &Packet) -> io::Result<Answer> {
        let control = self.access.control();
        if let Some(fd) = control.as_deref().and_then(Control::fd) {
            match ask_apart(fd, packet, None) {
                Err(error) if is_lost(&error) => {}
                answer => return answer.map(|(answer, _)| answer),
            }
        }
        let control = self.access.set_control(Control::open(socket)?.0);
        let fd = control.fd().ok_or(Errno::BADF)?;
        ask_apart(fd, packet, None).map(|(answer, _)| answer)
    }
}

/// Whether the error means that the node has closed the control connection, or that the connection
/// may not change the socket.
fn is_lost(error: &io::Error) -> bool {
    [Errno::NETDOWN, Errno::PERM].map(Errno::raw_os_error).map(Some).contains(&error.raw_os_error())
}

/// Whether calls on the descriptor are nonblocking.
pub(crate) fn is_nonblocking(fd: BorrowedFd<'_>) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}
