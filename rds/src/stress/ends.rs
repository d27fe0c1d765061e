//! Environments of the `rds stress` state machines: a node's own thread, or sockets.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use rtrs_base::rt::Clock;
use rtrs_base::time::{Duration, Instant};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::node::App;
use crate::proto::{Event, Node, Outgoing, SendError, SocketId};
use crate::socket::{Error, RdsSocket};
use crate::wire::PAYLOAD_MAX;

/// Reason why a message cannot be sent now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The send buffer is full.
    Full,
    /// The destination port is congested.
    Congested,
    /// The message can never be sent.
    Never(String),
}

/// Sockets, identified by number.
pub(super) trait Ends {
    /// Checks whether a message of this length may be sent now.
    fn may_send(&mut self, socket: usize, to: SocketAddr, len: usize) -> Result<(), Refusal>;
    /// Sends a message.
    fn send(&mut self, socket: usize, to: SocketAddr, message: Vec<u8>) -> Result<(), Refusal>;
    /// Passes the next message to `take`. Returns false if no message is waiting.
    fn receive(&mut self, socket: usize, take: &mut dyn FnMut(SocketAddr, &[u8])) -> bool;
}

/// A state machine that works on sockets.
pub(crate) trait Machine {
    /// Handles a socket that has become readable.
    fn readable(&mut self, socket: usize);
    /// Handles sockets on which sending may be possible again.
    fn writable(&mut self);
    /// Performs pending work. Returns true if there was any.
    #[allow(private_interfaces, reason = "both kinds of ends are in this module")]
    fn turn(&mut self, now: Instant, ends: &mut dyn Ends) -> bool;
    /// Returns the time at which to call `turn` even if nothing happens.
    fn deadline(&self) -> Option<Instant>;
    /// Whether the machine is waiting for room to send.
    fn is_blocked(&self) -> bool;
    /// Whether the machine has finished.
    fn is_done(&self) -> bool;
}

/// A state machine on a node's own thread.
#[derive(Debug)]
pub(crate) struct OnNode<M> {
    machine: M,
    ports: Vec<u16>,
    buffer: usize,
    sockets: Vec<SocketId>,
    numbers: BTreeMap<SocketId, usize>,
    /// Reason why the machine's ports could not be bound.
    failed: Option<String>,
}

impl<M: Machine> OnNode<M> {
    /// Creates a machine with sockets on these ports (0 for any) and with buffers of this size.
    pub(crate) fn new(machine: M, ports: Vec<u16>, buffer: usize) -> Self {
        let (sockets, numbers) = (Vec::new(), BTreeMap::new());
        Self { machine, ports, buffer, sockets, numbers, failed: None }
    }

    /// Returns the machine once it has finished.
    ///
    /// # Errors
    /// The reason why the machine's ports could not be bound.
    pub(crate) fn finish(self) -> Result<M, String> {
        self.failed.map_or(Ok(self.machine), Err)
    }

    fn bind(&mut self, node: &mut Node) {
        for (number, port) in std::mem::take(&mut self.ports).into_iter().enumerate() {
            match node.bind(port) {
                Ok(id) => {
                    node.set_buffers(id, Some(self.buffer), Some(self.buffer));
                    self.sockets.push(id);
                    self.numbers.insert(id, number);
                }
                Err(error) => self.failed = Some(format!("cannot bind port {port}: {error}")),
            }
        }
    }
}

struct NodeEnds<'a> {
    node: &'a mut Node,
    sockets: &'a [SocketId],
    now: Instant,
}

fn refusal(error: SendError) -> Refusal {
    match error {
        SendError::Full => Refusal::Full,
        SendError::Congested => Refusal::Congested,
        error => Refusal::Never(error.to_string()),
    }
}

impl Ends for NodeEnds<'_> {
    fn may_send(&mut self, socket: usize, to: SocketAddr, len: usize) -> Result<(), Refusal> {
        self.node.may_send(self.sockets[socket], to.ip(), to.port(), len).map_err(refusal)
    }

    fn send(&mut self, socket: usize, to: SocketAddr, message: Vec<u8>) -> Result<(), Refusal> {
        let id = self.sockets[socket];
        self.node.send(self.now, id, Outgoing::new(to.ip(), to.port(), message)).map_err(refusal)
    }

    fn receive(&mut self, socket: usize, take: &mut dyn FnMut(SocketAddr, &[u8])) -> bool {
        let Some(received) = self.node.receive(self.sockets[socket]) else { return false };
        take(SocketAddr::new(received.from, received.port), &received.payload);
        true
    }
}

impl<M: Machine> App for OnNode<M> {
    fn event(&mut self, _: Instant, _: &mut Node, event: Event) {
        match event {
            Event::Readable(id) => {
                if let Some(number) = self.numbers.get(&id) {
                    self.machine.readable(*number);
                }
            }
            Event::Writable(_) | Event::Congestion(_) => self.machine.writable(),
        }
    }

    fn turn(&mut self, _: Instant, node: &mut Node) -> bool {
        if !self.ports.is_empty() {
            self.bind(node);
        }
        if self.failed.is_some() {
            return false;
        }
        let now = Clock.now();
        self.machine.turn(now, &mut NodeEnds { node, sockets: &self.sockets, now })
    }

    fn deadline(&self) -> Option<Instant> {
        self.machine.deadline()
    }

    fn is_done(&self) -> bool {
        self.failed.is_some() || self.machine.is_done()
    }
}

struct SocketEnds<'a> {
    sockets: &'a [RdsSocket],
    buffer: Vec<u8>,
    /// Error that affects a socket as a whole.
    failed: Option<Error>,
}

impl Ends for SocketEnds<'_> {
    fn may_send(&mut self, _: usize, _: SocketAddr, _: usize) -> Result<(), Refusal> {
        Ok(())
    }

    fn send(&mut self, socket: usize, to: SocketAddr, message: Vec<u8>) -> Result<(), Refusal> {
        match self.sockets[socket].try_send_to(&message, to) {
            Ok(()) => Ok(()),
            Err(error) if error.is_congested() => Err(Refusal::Congested),
            Err(error) if error.is_temporary() => Err(Refusal::Full),
            Err(error) if error.is_gone() => {
                self.failed = Some(error);
                Err(Refusal::Full)
            }
            Err(error) => Err(Refusal::Never(error.to_string())),
        }
    }

    fn receive(&mut self, socket: usize, take: &mut dyn FnMut(SocketAddr, &[u8])) -> bool {
        match self.sockets[socket].try_recv_from(&mut self.buffer) {
            Ok((len, from)) => {
                take(from, &self.buffer[..len]);
                true
            }
            Err(error) => {
                if !error.is_temporary() {
                    self.failed = Some(error);
                }
                false
            }
        }
    }
}

/// Time that a sender waits after a refusal due to congestion before it tries again, since no
/// descriptor signals the end of congestion.
const CONGESTION_PAUSE: Duration = Duration::from_millis(1);

/// Runs a machine over sockets.
///
/// # Errors
/// The error of a socket.
pub(crate) fn over_sockets<M: Machine>(mut machine: M, sockets: &[RdsSocket]) -> Result<M, Error> {
    let mut ends = SocketEnds { sockets, buffer: vec![0; PAYLOAD_MAX], failed: None };
    loop {
        while machine.turn(Clock.now(), &mut ends) {}
        if let Some(error) = ends.failed {
            return Err(error);
        }
        if machine.is_done() {
            return Ok(machine);
        }
        let wanted = match machine.is_blocked() {
            true => PollFlags::IN | PollFlags::OUT,
            false => PollFlags::IN,
        };
        let mut fds: Vec<PollFd<'_>> =
            sockets.iter().map(|socket| PollFd::new(socket, wanted)).collect();
        let now = Clock.now();
        let left = machine.deadline().map(|at| at.since(now));
        let left = match machine.is_blocked() {
            true => Some(left.unwrap_or(CONGESTION_PAUSE).min(CONGESTION_PAUSE)),
            false => left,
        };
        match poll(&mut fds, left.and_then(|left| Timespec::try_from(left).ok()).as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(Error::receiving(error.into())),
        }
        for (number, fd) in fds.iter().enumerate() {
            if fd.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                machine.readable(number);
            }
        }
        machine.writable();
    }
}
