//! Starts a node: on its own thread, or on the caller's thread together with an app.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use rtrs_base::rt::{Fd, Mailbox, PollPolicy, Ring, Sender, mailbox, random_number, run};
use rtrs_base::time::Duration;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::clients::Clients;
use super::conn::BuffersError;
use super::driver::{App, Command, NoApp, NodeShard};
use super::listen::{UserSocket, listen_tcp};
use super::report::NodeReport;
use super::tcp::Tcp;
use crate::channel::Connect;
use crate::proto::{Config, Node, Tunable, Tuning};
use crate::wire::TCP_PORT;

/// Number of submissions that a ring queues in one turn before it submits them early.
const RING_ENTRIES: u32 = 512;
/// Maximum time to wait for a node's answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// Path of the kernel module in sysfs; exists while the module is loaded.
const KERNEL_RDS: &str = "/sys/module/rds_tcp";
/// Ports below this number are privileged.
const PRIVILEGED_PORTS: u16 = 1024;

/// Options of a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Address, limits and timeouts of the node.
    pub config: Config,
    /// TCP port on which the node listens for peers.
    pub listen_port: u16,
    /// TCP port on which peers listen.
    pub peer_port: u16,
    /// Time for which a peer may leave data unacknowledged or keepalive probes unanswered.
    pub dead_after: Duration,
    /// Maximum time to poll before sleeping.
    pub poll: Duration,
}

impl NodeOptions {
    /// Returns the defaults for an address.
    pub fn new(address: IpAddr) -> Self {
        #[allow(clippy::cast_possible_truncation, reason = "half of the bits are random as well")]
        let generation = random_number() as u32 | 1;
        Self {
            config: Config::new(address, generation, random_number()),
            listen_port: TCP_PORT,
            peer_port: TCP_PORT,
            dead_after: Duration::from_secs(30),
            poll: Duration::from_micros(200),
        }
    }
}

/// Reason why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The node cannot listen for peers.
    #[error("cannot listen for peers at {address} port {port}: {source}{hint}")]
    Listen {
        /// Address of the node.
        address: IpAddr,
        /// TCP port.
        port: u16,
        /// The system's error.
        source: io::Error,
        /// Hint for the user.
        hint: &'static str,
    },
    /// Another operation failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::System { what, source }
}

/// Handle to a node that runs on its own thread. The node stops when the handle is dropped.
#[derive(Debug)]
pub struct NodeHandle {
    sender: Sender<Command>,
    thread: Option<JoinHandle<io::Result<()>>>,
    address: IpAddr,
    tuning: Tuning,
}

impl NodeHandle {
    /// Starts a node, which also serves users that connect to `users`.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(options: NodeOptions, users: Option<UserSocket>) -> Result<Self, StartError> {
        let (address, tuning) = (options.config.address, options.config.tuning.clone());
        let (sender, mailbox) = mailbox().map_err(system("create a mailbox"))?;
        let (report, started) = mpsc::channel();
        let thread = std::thread::Builder::new().name(format!("rds-{address}"));
        let thread = thread.spawn(move || {
            let (ring, mut shard) = match prepare(&options, users.as_ref(), NoApp, mailbox) {
                Ok(prepared) => prepared,
                Err(error) => {
                    // The caller is waiting for this.
                    let _ = report.send(Err(error));
                    return Ok(());
                }
            };
            let _ = report.send(Ok(()));
            run(&ring, PollPolicy { budget_max: options.poll }, &mut shard).map(drop)
        });
        let thread = Some(thread.map_err(system("start a thread"))?);
        let ended = || io::Error::other("the node's thread has ended");
        started.recv().map_err(|_| system("start a node")(ended()))??;
        Ok(Self { sender, thread, address, tuning })
    }

    /// Returns the node's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Whether the node's thread is still running.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Returns the node's state; `None` if the node does not respond.
    pub fn report(&self) -> Option<NodeReport> {
        let (reply, answer) = mpsc::channel();
        self.sender.send(Command::Report(reply));
        answer.recv_timeout(ANSWER_TIME_MAX).ok()
    }

    /// Resets the open connections to a peer, as a fault would; they are then reestablished.
    /// Returns the number of connections that were reset.
    pub fn reset(&self, peer: IpAddr) -> usize {
        let (reply, answer) = mpsc::channel();
        self.sender.send(Command::Reset(peer, reply));
        answer.recv_timeout(ANSWER_TIME_MAX).unwrap_or(0)
    }

    /// Changes settings of the running node. New connections use them in any case.
    ///
    /// # Errors
    /// See [`BuffersError`].
    pub fn tune(&self, values: &[(Tunable, u64)]) -> Result<(), BuffersError> {
        for (tunable, value) in values {
            self.tuning.set(*tunable, *value);
        }
        let (reply, answer) = mpsc::channel();
        self.sender.send(Command::Retune(reply));
        // A node that does not respond in time applies the change later.
        answer.recv_timeout(ANSWER_TIME_MAX).unwrap_or(Ok(()))
    }

    /// Returns a connector for users on other threads of this process.
    pub fn way(&self) -> OwnNode {
        OwnNode { sender: self.sender.clone() }
    }

    /// Stops the node. Messages of its users are delivered first, for at most a second.
    ///
    /// # Errors
    /// Returns the error that stopped the node earlier.
    pub fn stop(mut self) -> io::Result<()> {
        self.end()
    }

    fn end(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.sender.send(Command::Stop);
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the node's thread panicked")))
    }
}

impl Drop for NodeHandle {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "a node has failed");
        }
    }
}

/// Connector to a node of this process.
#[derive(Clone, Debug)]
pub struct OwnNode {
    sender: Sender<Command>,
}

impl Connect for OwnNode {
    fn connect(&self) -> io::Result<OwnedFd> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        self.sender.send(Command::Adopt(theirs));
        Ok(ours)
    }
}

/// Runs a node on this thread, together with `app`, until the app is done.
///
/// # Errors
/// See [`StartError`].
pub fn run_with<A: App>(options: &NodeOptions, app: A) -> Result<A, StartError> {
    let (_sender, mailbox) = mailbox().map_err(system("create a mailbox"))?;
    let (ring, mut shard) = prepare(options, None, app, mailbox)?;
    let policy = PollPolicy { budget_max: options.poll };
    run(&ring, policy, &mut shard).map_err(system("run the node"))?;
    Ok(shard.into_app())
}

/// Makes the C library keep freed memory for the next messages. By default it returns memory to the
/// system when a burst of messages has been read, and obtains it again page by page for the next
/// burst, which costs more than half of the throughput. After a block of this size is freed, the
/// library keeps up to twice as much (mallopt(3), "dynamic mmap threshold"); with a different
/// allocator this has no effect.
fn keep_memory() {
    const SIZE: usize = 8 << 20;
    drop(std::hint::black_box(Vec::<u8>::with_capacity(SIZE)));
}

fn prepare<A: App>(
    options: &NodeOptions,
    users: Option<&UserSocket>,
    app: A,
    mailbox: Mailbox<Command>,
) -> Result<(Rc<Ring>, NodeShard<A>), StartError> {
    let NodeOptions { config, listen_port: port, .. } = options;
    let address = config.address;
    let listener = listen_tcp(address, *port).map_err(|source| {
        let hint = match Errno::from_io_error(&source) {
            Some(Errno::ADDRINUSE) if Path::new(KERNEL_RDS).exists() => {
                "; the kernel's rds_tcp is loaded and holds port 16385: unload it, or redirect the \
                 port with nft and use another one (listen-port)"
            }
            Some(Errno::ADDRINUSE) => {
                "; another `rds` command may be using it: stop that one, or use another port \
                 (listen-port)"
            }
            Some(Errno::ACCESS) if *port < PRIVILEGED_PORTS => {
                "; a port below 1024 needs CAP_NET_BIND_SERVICE: use another one (listen-port)"
            }
            Some(Errno::ADDRNOTAVAIL) => "; use an address of this host",
            _ => "",
        };
        StartError::Listen { address, port: *port, source, hint }
    })?;
    keep_memory();
    let ring = Ring::new(RING_ENTRIES).map_err(system("set up io_uring"))?;
    let inbox = mailbox.arm(&ring).map_err(system("set up a mailbox"))?;
    let node = Node::new(config.clone());
    let users = users.map(UserSocket::try_clone).transpose();
    let users = users.map_err(system("listen for users"))?.map(Fd::new);
    let clients = Clients::new(&ring, &node, users).map_err(system("create shared memory"))?;
    let tcp = Tcp::new(&ring, Some(Fd::new(listener)), options.peer_port, options.dead_after);
    Ok((ring, NodeShard::new(node, tcp, clients, app, inbox)))
}
