//! Selection of the node that a command uses.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::io::Errno;

use super::args::TcpPort;
use crate::channel::Connect;
use crate::error::{Error, ErrorKind, as_kind, failed};
use crate::node::NodeOptions;
use crate::settings::NodeAddress;
use crate::socket::{AtPath, Error as SocketError, Node, node_dir, node_path};

/// Selection of the node.
#[derive(Debug, Clone, Args)]
pub(super) struct ViaArgs {
    /// Local address to use
    ///
    /// The default is the source address of the route to the other host. Without another host, the
    /// default is the address of the only running node with a socket in /run/rds (or RDS_DIR).
    #[arg(short = 'I', long, value_name = "ADDRESS")]
    pub(super) local: Option<NodeAddress>,

    /// Use the node that listens at this path
    ///
    /// The default is the node of the local address with a socket in /run/rds (or RDS_DIR). If
    /// there is none, the command starts a node for its own duration.
    #[arg(long, value_name = "PATH", conflicts_with = "kernel")]
    pub(super) node: Option<PathBuf>,

    /// Use the kernel's RDS
    ///
    /// Needs the modules rds and rds_tcp.
    #[arg(long)]
    pub(super) kernel: bool,

    /// TCP port on which a node started by this command listens [default: 16385]
    #[arg(long, value_name = "PORT", conflicts_with_all = ["node", "kernel"])]
    pub(super) listen_port: Option<TcpPort>,

    /// TCP port on which the peers of a node started by this command listen [default: 16385]
    #[arg(long, value_name = "PORT", conflicts_with_all = ["node", "kernel"])]
    pub(super) peer_port: Option<TcpPort>,
}

/// A node for a command to use.
#[derive(Debug)]
pub(super) enum Via {
    /// A running node, or the kernel.
    Running(Node),
    /// A node to be started.
    Own(Box<NodeOptions>),
}

impl ViaArgs {
    /// Returns the node to use for messages to `to`, or the node at the given address.
    pub(super) fn find(&self, to: Option<IpAddr>) -> Result<Via, Error> {
        if let Some(path) = &self.node {
            return self.at_path(path).map(Via::Running);
        }
        let local = self.local(to)?;
        if self.kernel {
            return Ok(Via::Running(Node::kernel(local)));
        }
        let path = node_path(&node_dir(), local);
        if path.exists() {
            if self.listen_port.is_some() || self.peer_port.is_some() {
                let text = format!(
                    "--listen-port and --peer-port apply only to a node started by this command, \
                     but node {local} is already running; leave them out, or choose another \
                     address with --local"
                );
                return Err(Error::new(ErrorKind::Usage, text));
            }
            return Node::open_at(&path).map(Via::Running).map_err(as_kind(ErrorKind::Node));
        }
        let mut options = NodeOptions::new(local);
        for (port, wanted) in
            [(&mut options.listen_port, self.listen_port), (&mut options.peer_port, self.peer_port)]
        {
            *port = wanted.map_or(*port, TcpPort::get);
        }
        Ok(Via::Own(Box::new(options)))
    }

    /// Opens the node that [`Self::find`] returns, starting it if it is not running.
    pub(super) fn open(&self, to: Option<IpAddr>) -> Result<Node, Error> {
        match self.find(to)? {
            Via::Running(node) => Ok(node),
            Via::Own(options) => Node::start(*options).map_err(as_kind(ErrorKind::Node)),
        }
    }

    /// Returns a running node.
    pub(super) fn running(&self) -> Result<Node, Error> {
        match self.find(None)? {
            Via::Running(node) => Ok(node),
            Via::Own(options) => Err(not_running(options.config.address)),
        }
    }

    fn at_path(&self, path: &Path) -> Result<Node, Error> {
        let node = Node::open_at(path).map_err(as_kind(ErrorKind::Node))?;
        match self.local {
            Some(local) if local.0 != node.address() => {
                let text = format!(
                    "the node at {} has the address {}, not {local}; leave out --local",
                    path.display(),
                    node.address()
                );
                Err(Error::new(ErrorKind::Usage, text))
            }
            _ => Ok(node),
        }
    }

    fn local(&self, to: Option<IpAddr>) -> Result<IpAddr, Error> {
        if let Some(NodeAddress(local)) = self.local {
            return Ok(local);
        }
        if let Some(to) = to {
            return source_of(to).map_err(failed(
                ErrorKind::System,
                format!("cannot determine the address of this host for {to}; set it with --local"),
            ));
        }
        if self.kernel {
            return Ok(Ipv4Addr::UNSPECIFIED.into());
        }
        let text = match running_nodes(&node_dir()).as_slice() {
            [one] => return Ok(*one),
            [] => format!(
                "no running node found in {}; start one with `rds node`, or set --local to an \
                 address of this host",
                node_dir().display()
            ),
            several => {
                let several: Vec<String> = several.iter().map(ToString::to_string).collect();
                let several = several.join(", ");
                format!("several nodes are running ({several}); choose one with --local")
            }
        };
        Err(Error::new(ErrorKind::Usage, text))
    }
}

/// Returns the error for a node that is not running.
pub(super) fn not_running(address: IpAddr) -> Error {
    let text =
        format!("node {address} is not running; start it with `rds node --address {address}`");
    Error::new(ErrorKind::Node, text)
}

/// Converts an error from a node's socket, adding a hint for the command line.
pub(super) fn on(node: &Node, kind: ErrorKind) -> impl Fn(SocketError) -> Error + use<> {
    let address = node.address();
    move |error| {
        let text = match Errno::from_raw_os_error(error.errno()) {
            Errno::NETDOWN => {
                format!("node {address} has ended; start it and run this command again")
            }
            Errno::AFNOSUPPORT => "RDS is not loaded in the kernel; load it with `modprobe \
                                   rds_tcp`, or leave out --kernel"
                .to_owned(),
            _ => error.to_string(),
        };
        Error::new(kind, text)
    }
}

/// Returns the addresses of the running nodes with a socket in a directory, in order.
fn running_nodes(dir: &Path) -> Vec<IpAddr> {
    let paths = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let listening = paths.filter_map(|path| {
        let address = path.file_stem()?.to_str()?.parse().ok()?;
        let is_socket = path == node_path(dir, address);
        // A socket left over from a node that was killed refuses connections.
        (is_socket && AtPath(path).connect().is_ok()).then_some(address)
    });
    let mut found: Vec<IpAddr> = listening.collect();
    found.sort();
    found
}

/// Returns the source address of packets to `to`. No packets are sent.
fn source_of(to: IpAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = match to {
        IpAddr::V4(_) => [0; 4].into(),
        IpAddr::V6(_) => [0_u16; 8].into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((to, 1))?;
    Ok(socket.local_addr()?.ip())
}

/// Resolves a host to an address, of the same family as `like` if given.
pub(super) fn resolve(host: &str, like: Option<IpAddr>) -> Result<IpAddr, Error> {
    let what = || format!("cannot resolve host {host:?}; check the name, or use an address");
    let found = (host, 0).to_socket_addrs().map_err(failed(ErrorKind::Node, what()))?;
    let found: Vec<IpAddr> = found.map(|address: SocketAddr| address.ip().to_canonical()).collect();
    let fits = |ip: &&IpAddr| like.is_none_or(|like| like.is_ipv4() == ip.is_ipv4());
    let address = match (found.iter().find(fits), like, found.first()) {
        (Some(address), ..) => *address,
        (None, Some(like), Some(other)) => {
            let family = |ip: &IpAddr| if ip.is_ipv4() { "IPv4" } else { "IPv6" };
            let (one, two) = (family(other), family(&like));
            let text = format!(
                "cannot reach {host} from {like}: one is {one}, the other {two}; set another \
                 --local"
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        _ => return Err(Error::new(ErrorKind::Node, what())),
    };
    match NodeAddress::problem(address) {
        Some(problem) => {
            let text =
                format!("cannot reach {address}, which {problem}; use the address of a node");
            Err(Error::new(ErrorKind::Usage, text))
        }
        None => Ok(address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_give_a_command_line_hint() {
        let wrong = on(&Node::kernel([10, 0, 0, 1].into()), ErrorKind::Node);
        let text = |errno: Errno| wrong(SocketError::receiving(errno.into())).to_string();
        let gone = "node 10.0.0.1 has ended; start it and run this command again";
        assert_eq!(text(Errno::NETDOWN), gone);
        let missing = "RDS is not loaded in the kernel; load it with `";
        assert!(text(Errno::AFNOSUPPORT).starts_with(missing));
        assert!(text(Errno::AGAIN).starts_with("cannot receive: "));
    }

    #[test]
    fn the_source_address_follows_the_route() {
        let loopback: IpAddr = [127, 0, 0, 1].into();
        assert_eq!(source_of(loopback).unwrap(), loopback);
        assert_eq!(resolve("127.0.0.1", None).unwrap(), loopback);
        let error = resolve("no-such-host.invalid", None).unwrap_err();
        assert!(error.to_string().starts_with("cannot resolve host"), "{error}");
        let v6 = "::1".parse().unwrap();
        let error = resolve("127.0.0.1", Some(v6)).unwrap_err().to_string();
        let text = "cannot reach 127.0.0.1 from ::1: one is IPv4, the other IPv6; set another \
                    --local";
        assert_eq!(error, text);
        let error = resolve("224.0.0.1", None).unwrap_err().to_string();
        assert_eq!(
            error,
            "cannot reach 224.0.0.1, which is not the address of one node; use the address of a \
             node"
        );
    }
}
