//! Drives a node: its connections, its users and its reactor.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::mpsc;

use rtrs_base::rt::{Inbox, Shard};
use rtrs_base::time::{Duration, Instant, earliest};

use super::blocked::Blocked;
use super::clients::Clients;
use super::conn::BuffersError;
use super::report::NodeReport;
use super::tcp::Tcp;
use crate::proto::{Event, Node};

/// Time for a stopping node to deliver its users' messages.
const GRACE: Duration = Duration::from_secs(1);
/// Interval between checks for undelivered messages during that time.
const GRACE_CHECK: Duration = Duration::from_millis(5);

/// Messages from other threads to a node.
#[derive(Debug)]
pub enum Command {
    /// Take over a user's connection.
    Adopt(OwnedFd),
    /// Report the node's state.
    Report(mpsc::Sender<NodeReport>),
    /// Reset the connections to a peer, which are then reestablished. The answer is their number.
    Reset(IpAddr, mpsc::Sender<usize>),
    /// Apply changed settings to the connections that are up.
    Retune(mpsc::Sender<Result<(), BuffersError>>),
    /// Stop the node.
    Stop,
}

/// A user that runs on the node's own thread.
pub trait App {
    /// Handles an event on one of its sockets, or a change in congestion.
    fn event(&mut self, now: Instant, node: &mut Node, event: Event);
    /// Does pending work. Returns true if there was any.
    fn turn(&mut self, now: Instant, node: &mut Node) -> bool;
    /// Returns the time at which to call `turn` even if nothing happens.
    fn deadline(&self) -> Option<Instant>;
    /// Whether the node should stop.
    fn is_done(&self) -> bool;
}

/// App of a node whose users are all on other threads or in other processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoApp;

impl App for NoApp {
    fn event(&mut self, _: Instant, _: &mut Node, _: Event) {}

    fn turn(&mut self, _: Instant, _: &mut Node) -> bool {
        false
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn is_done(&self) -> bool {
        false
    }
}

/// A node on its shard.
pub struct NodeShard<A> {
    node: Node,
    tcp: Tcp,
    clients: Clients,
    app: A,
    inbox: Inbox<Command>,
    blocked: Blocked,
    /// Time at which to stop, regardless of pending work.
    ends_at: Option<Instant>,
    looks_at: Option<Instant>,
    done: bool,
}

impl<A: App> NodeShard<A> {
    pub(super) fn new(
        node: Node,
        tcp: Tcp,
        clients: Clients,
        app: A,
        inbox: Inbox<Command>,
    ) -> Self {
        Self {
            node,
            tcp,
            clients,
            app,
            inbox,
            blocked: Blocked::default(),
            ends_at: None,
            looks_at: None,
            done: false,
        }
    }

    /// Returns the user on this thread.
    pub fn into_app(self) -> A {
        self.app
    }

    fn command(&mut self, now: Instant, command: Command) {
        match command {
            Command::Adopt(fd) => drop(self.clients.adopt(&mut self.node, fd)),
            Command::Report(reply) => {
                self.node.ports_mut().set_refused(self.clients.refused());
                let owners = self.clients.owners();
                // The requester may no longer be waiting.
                let _ = reply.send(NodeReport::new(now, &self.node, &self.blocked, &owners));
            }
            Command::Reset(peer, reply) => {
                let _ = reply.send(self.tcp.reset(now, &mut self.node, peer));
            }
            Command::Retune(reply) => {
                let _ = reply.send(self.tcp.set_buffers(&self.node.config().tuning));
            }
            Command::Stop => {
                self.clients.close_all(now, &mut self.node);
                self.ends_at.get_or_insert(now + GRACE);
            }
        }
    }

    fn events(&mut self, now: Instant) -> bool {
        let mut any = false;
        self.clients.release(&mut self.node);
        while let Some(event) = self.node.ports_mut().take_event() {
            any = true;
            if let Event::Congestion(peer) = event {
                self.blocked.congestion_changed(now, peer, self.node.congestion(peer));
            }
            if !self.clients.event(now, &mut self.node, event) {
                self.app.event(now, &mut self.node, event);
            }
        }
        any
    }

    /// Stops once all users' messages have arrived, or when the grace period is over.
    fn end(&mut self, now: Instant) {
        let Some(at) = self.ends_at else { return };
        self.looks_at = Some(now + GRACE_CHECK);
        if self.node.memory().1 == 0 || at <= now {
            self.tcp.close_all();
            self.done = true;
        }
    }
}

impl<A: App> Shard for NodeShard<A> {
    type Message = Command;

    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(command) = self.inbox.take() {
            busy = true;
            self.command(now, command);
        }
        self.clients.look(&mut self.node);
        busy |= self.tcp.turn(now, &mut self.node);
        busy |= self.clients.turn(now, &mut self.node);
        loop {
            let more = self.events(now) | self.app.turn(now, &mut self.node);
            if !more {
                break;
            }
            busy = true;
        }
        busy |= self.tcp.flush(now, &mut self.node);
        // Acknowledged messages free buffer space.
        busy |= self.events(now);
        self.clients.end_turn(now, &self.node);
        self.blocked.turn(now, &self.node);
        if self.app.is_done() && self.ends_at.is_none() {
            self.command(now, Command::Stop);
        }
        self.end(now);
        busy
    }

    fn deadline(&self) -> Option<Instant> {
        let parts = [
            self.tcp.deadline(&self.node),
            self.clients.deadline(),
            self.app.deadline(),
            self.blocked.deadline(),
            self.looks_at,
        ];
        parts.into_iter().fold(None, earliest)
    }

    fn has_input(&self) -> bool {
        self.clients.has_ring_input() || self.tcp.has_acks(&self.node)
    }

    fn prepare_sleep(&mut self) -> bool {
        self.clients.prepare_ring_sleep()
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn inbox(&mut self) -> Option<&mut Inbox<Command>> {
        Some(&mut self.inbox)
    }
}

impl<A> fmt::Debug for NodeShard<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeShard").field("node", &self.node).finish_non_exhaustive()
    }
}
