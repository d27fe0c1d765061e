//! [`Node`] and [`RdsSocket`].

use std::ffi::OsString;
use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rtrs_base::time::Duration;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::access::{Access, AtPath, Binding};
use super::error::{Action, Error};
use super::incoming::receive;
use super::kernel;
use super::transfer::{How, Incoming, Outgoing, send};
use crate::node::{NodeHandle, NodeOptions, StartError};

/// Default directory in which nodes of other processes listen for users; RDS_DIR overrides it.
pub const DIR_DEFAULT: &str = "/run/rds";

/// Returns the directory in which nodes listen: RDS_DIR, or [`DIR_DEFAULT`] if that is unset or
/// empty.
#[must_use]
pub fn node_dir() -> PathBuf {
    dir_named(std::env::var_os("RDS_DIR"))
}

fn dir_named(name: Option<OsString>) -> PathBuf {
    name.filter(|name| !name.is_empty()).map_or_else(|| DIR_DEFAULT.into(), PathBuf::from)
}

/// Returns the path at which the node for an address listens.
#[must_use]
pub fn node_path(dir: &Path, address: IpAddr) -> PathBuf {
    dir.join(format!("{address}.sock"))
}

/// A node: the endpoint of all connections of one address of this host. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Node(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    address: IpAddr,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// A user-space node, in this process or in a different one.
    User(Arc<Access>, Option<NodeHandle>),
    /// The kernel's node.
    Kernel,
}

impl Node {
    /// Starts a node in this process with default settings. The node ends once its last clone and
    /// socket have been dropped.
    ///
    /// # Errors
    /// See [`StartError`]: the address is not one of this host, or the port is in use.
    pub fn bind(address: IpAddr) -> Result<Self, StartError> {
        Self::start(NodeOptions::new(address))
    }

    /// Starts a node in this process with the given settings.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(options: NodeOptions) -> Result<Self, StartError> {
        let handle = NodeHandle::start(options, None)?;
        let what = "reach the node";
        let access = Access::open(Box::new(handle.way()));
        let access = Arc::new(access.map_err(|source| StartError::System { what, source })?);
        let address = handle.address();
        Ok(Self(Arc::new(Inner { address, kind: Kind::User(access, Some(handle)) })))
    }

    /// Opens the node for an address, which another process runs (`rds node`).
    ///
    /// # Errors
    /// ENOENT or ECONNREFUSED if there is none.
    pub fn open(address: IpAddr) -> Result<Self, Error> {
        Self::open_at(&node_path(&node_dir(), address))
    }

    /// Opens the node that listens at this path.
    ///
    /// # Errors
    /// ENOENT or ECONNREFUSED if there is none.
    pub fn open_at(path: &Path) -> Result<Self, Error> {
        let access = Access::open(Box::new(AtPath(path.to_owned())));
        let access = access.map_err(|error| Error::new(Action::Open(path.to_owned()), error))?;
        let address = access.board().address();
        Ok(Self(Arc::new(Inner { address, kind: Kind::User(Arc::new(access), None) })))
    }

    /// Returns the kernel's node for an address, on hosts with the rds_tcp module.
    #[must_use]
    pub fn kernel(address: IpAddr) -> Self {
        Self(Arc::new(Inner { address, kind: Kind::Kernel }))
    }

    /// Returns the node's address.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.0.address
    }

    /// Returns the node's thread, if it runs in this process.
    #[must_use]
    pub fn handle(&self) -> Option<&NodeHandle> {
        match &self.0.kind {
            Kind::User(_, handle) => handle.as_ref(),
            Kind::Kernel => None,
        }
    }

    /// Returns an info option of RDS sockets (10000 to 10017), and the size of each element.
    ///
    /// # Errors
    /// ENOPROTOOPT for any other number.
    pub fn info(&self, option: u32) -> Result<(Vec<u8>, usize), Error> {
        let result = match &self.0.kind {
            Kind::User(access, _) => access.info(option),
            Kind::Kernel => kernel::info(option),
        };
        result.map_err(|error| Error::new(Action::Info(option), error))
    }
}

/// A socket: sends and receives the messages of one port of a node.
///
/// Its descriptor can be polled: it is readable when a message or a congestion update is waiting,
/// and writable when there is room in the send buffer. After a send has failed because the port was
/// congested, it becomes readable once the congestion has ended, even if nothing can be received.
#[derive(Debug)]
pub struct RdsSocket {
    fd: OwnedFd,
    node: Node,
    /// State of a socket at a user-space node; `None` at the kernel's node.
    binding: Option<Binding>,
    port: u16,
}

impl RdsSocket {
    /// Creates a socket bound to a port of a node, 0 for any.
    ///
    /// # Errors
    /// EADDRINUSE; EINVAL for port 1; ENOBUFS if there are too many sockets; ENETDOWN if the node
    /// has ended.
    pub fn bind(node: &Node, port: u16) -> Result<Self, Error> {
        let address = node.address();
        let failed = |error| Error::new(Action::Bind(address, port), error);
        let (fd, binding, port) = match &node.0.kind {
            Kind::User(access, _) => {
                let fd = access.connect().map_err(failed)?;
                let bound = Access::bind(fd.as_fd(), address, port).map_err(failed)?;
                let binding = Binding::new(Arc::clone(access), bound.place, fd.as_fd());
                let binding = binding.map_err(failed)?;
                let port = binding.view().map_or(port, |view| view.port);
                (fd, Some(binding), port)
            }
            Kind::Kernel => {
                let (fd, port) = kernel::bind(address, port).map_err(failed)?;
                (fd, None, port)
            }
        };
        Ok(Self { fd, node: node.clone(), binding, port })
    }

    /// Returns the socket's node.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Returns the socket's port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sends a message; blocks while the send buffer is full or the port is congested. The message
    /// arrives in order and exactly once, as long as both nodes are alive. A message to port 0 is a
    /// ping, which the other node answers with an empty message from port 0.
    ///
    /// # Errors
    /// EMSGSIZE, EINVAL and EOPNOTSUPP for a message that cannot be sent there, ETIMEDOUT after
    /// [`set_send_timeout`](Self::set_send_timeout), ENETDOWN.
    pub fn send_to(&self, payload: &[u8], to: SocketAddr) -> Result<(), Error> {
        self.send(payload, to, false)
    }

    /// Sends a message without blocking.
    ///
    /// # Errors
    /// As for [`send_to`](Self::send_to), and also EAGAIN when the send buffer is full and ENOBUFS
    /// when the port is congested.
    pub fn try_send_to(&self, payload: &[u8], to: SocketAddr) -> Result<(), Error> {
        self.send(payload, to, true)
    }

    fn send(&self, payload: &[u8], to: SocketAddr, dontwait: bool) -> Result<(), Error> {
        let parts = [IoSlice::new(payload)];
        let sent = match &self.binding {
            Some(binding) => {
                let to = Some((to.ip(), to.port()));
                let message = Outgoing { to, payload: &parts, cookie: None };
                send(binding, self.fd.as_fd(), message, dontwait)
            }
            None => kernel::send(self.fd.as_fd(), payload, to, dontwait),
        };
        let len = payload.len();
        sent.map(drop).map_err(|error| Error::new(Action::Send { to: Some(to), len }, error))
    }

    /// Receives a message; blocks until there is one. Returns the number of bytes stored in the
    /// buffer, and the sender. Bytes that do not fit are lost; a message is at most 1 MiB long.
    ///
    /// # Errors
    /// ETIMEDOUT after [`set_receive_timeout`](Self::set_receive_timeout), ENETDOWN.
    pub fn recv_from(&self, buffer: &mut [u8]) -> Result<(usize, SocketAddr), Error> {
        self.next_message(buffer, How::default())
    }

    /// Receives a message without blocking.
    ///
    /// # Errors
    /// As for [`recv_from`](Self::recv_from), and also EAGAIN when there is no message.
    pub fn try_recv_from(&self, buffer: &mut [u8]) -> Result<(usize, SocketAddr), Error> {
        self.next_message(buffer, How { dontwait: true, peek: false })
    }

    fn next_message(&self, buffer: &mut [u8], how: How) -> Result<(usize, SocketAddr), Error> {
        loop {
            if let Incoming::Message { len, from, .. } = self.receive(buffer, how)? {
                return Ok((len, from));
            }
        }
    }

    /// Receives the next message or congestion update.
    ///
    /// # Errors
    /// See [`recv_from`](Self::recv_from) and [`try_recv_from`](Self::try_recv_from).
    pub fn receive(&self, buffer: &mut [u8], how: How) -> Result<Incoming, Error> {
        let mut parts = [IoSliceMut::new(buffer)];
        let received = match &self.binding {
            Some(binding) => {
                let arrival = receive(binding, self.fd.as_fd(), &mut parts, how);
                arrival.map(|arrival| arrival.incoming)
            }
            None => kernel::receive(self.fd.as_fd(), &mut parts, how),
        };
        received.map_err(|error| Error::new(Action::Receive, error))
    }

    /// Cancels unacknowledged messages to a port of a peer, which frees their space in the send
    /// buffer. Canceled messages may still arrive, but are not resent.
    ///
    /// # Errors
    /// ENETDOWN.
    pub fn cancel(&self, to: SocketAddr) -> Result<(), Error> {
        let canceled = match &self.binding {
            Some(binding) => binding.cancel(self.fd.as_fd(), (to.ip(), to.port())),
            None => kernel::cancel(self.fd.as_fd(), to),
        };
        canceled.map_err(|error| Error::new(Action::Set("messages to be given up"), error))
    }

    /// Sets how many bytes of payload may be unacknowledged; the message that exceeds this limit is
    /// still sent. If the size is below 1 MiB, it also limits the length of a message.
    ///
    /// # Errors
    /// ENETDOWN.
    pub fn set_send_buffer(&self, bytes: usize) -> Result<(), Error> {
        let set = match &self.binding {
            Some(binding) => binding.set_sndbuf(self.fd.as_fd(), bytes),
            None => kernel::set_buffer(self.fd.as_fd(), bytes, true),
        };
        set.map_err(|error| Error::new(Action::Set("the send buffer"), error))
    }

    /// Sets how many bytes of payload may wait to be received before senders have to stop.
    ///
    /// # Errors
    /// ENETDOWN.
    pub fn set_receive_buffer(&self, bytes: usize) -> Result<(), Error> {
        let set = match &self.binding {
            Some(binding) => binding.set_rcvbuf(self.fd.as_fd(), bytes),
            None => kernel::set_buffer(self.fd.as_fd(), bytes, false),
        };
        set.map_err(|error| Error::new(Action::Set("the receive buffer"), error))
    }

    /// Makes [`receive`](Self::receive) report ports that are no longer congested, after a
    /// nonblocking send to them has failed.
    ///
    /// # Errors
    /// ENETDOWN.
    pub fn set_congestion_updates(&self, on: bool) -> Result<(), Error> {
        let set = match &self.binding {
            Some(binding) => binding.set_monitor(self.fd.as_fd(), on),
            None => kernel::set_monitor(self.fd.as_fd(), on),
        };
        set.map_err(|error| Error::new(Action::Set("congestion updates"), error))
    }

    /// Limits how long sending blocks; `None` means no limit.
    ///
    /// # Errors
    /// EINVAL for zero.
    pub fn set_send_timeout(&self, limit: Option<Duration>) -> Result<(), Error> {
        let set = set_socket_timeout(&self.fd, Timeout::Send, limit);
        set.map_err(|error| Error::new(Action::Set("the send timeout"), error.into()))
    }

    /// Limits how long receiving blocks; `None` means no limit.
    ///
    /// # Errors
    /// EINVAL for zero.
    pub fn set_receive_timeout(&self, limit: Option<Duration>) -> Result<(), Error> {
        let set = set_socket_timeout(&self.fd, Timeout::Recv, limit);
        set.map_err(|error| Error::new(Action::Set("the receive timeout"), error.into()))
    }
}

impl AsFd for RdsSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_directory_variable_counts_as_unset() {
        for (name, dir) in [(None, DIR_DEFAULT), (Some(""), DIR_DEFAULT), (Some("/x"), "/x")] {
            assert_eq!(dir_named(name.map(OsString::from)), Path::new(dir));
        }
    }
}
