//! What all connections of a world share: the clock and its queue of events, the seed, links,
//! nodes with their keys, shards with their queues of events, listeners.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;

use super::faults::Fault;
use super::link::{LinkOptions, Links};
use super::memory::{Keys, Want};
use crate::fabric::{FabricCounters, FabricEvent, RemoteMem};
use crate::ids::QpNum;
use crate::prng::{Prng, Ratio};
use crate::time::{Duration, Instant};

/// When a window bind or revoke is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindMode {
    /// When the call returns, as in iwarp.
    Done,
    /// At its completion, as in verbs.
    Pending,
    /// When the call returns; every revoke finds that another connection is in the middle of a
    /// write through the window, and fails.
    InUse,
}

/// How a world behaves where providers may differ.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// True: a send or write completes when the peer's acknowledgement is in, as in verbs.
    /// False: when it has departed, as in iwarp.
    pub acknowledged: bool,
    /// What a machine had sent when it lost power still arrives.
    pub flights: bool,
    /// When binds are in force.
    pub bind: BindMode,
    /// Longest time for which a revoke waits in its send queue, and what is behind it too.
    pub revoke_max: Option<Duration>,
    /// Links without options of their own.
    pub link: LinkOptions,
    /// Bytes that may be on the way in one direction of a connection before its send queue
    /// waits (a socket's buffers).
    pub buffered_max: usize,
    /// Bound of a graceful disconnect.
    pub close_bound: Duration,
    /// Bound for the answer to a request and for the start-up of an accepted connection.
    pub accept_bound: Duration,
    /// How often a write that is lost with its link has placed a part of its bytes.
    pub torn_writes: Ratio,
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            acknowledged: false,
            flights: false,
            bind: BindMode::Done,
            revoke_max: None,
            link: LinkOptions::default(),
            buffered_max: 4 << 20,
            close_bound: Duration::from_secs(1),
            accept_bound: Duration::from_secs(5),
            torn_writes: Ratio::new(1, 2),
        }
    }
}

/// What a timer of a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    Connect,
    Accept,
    Close,
    Detect,
}

/// What is due at a point in time.
#[derive(Debug)]
pub(super) enum Event {
    /// The next entry of this end's send queue leaves.
    Depart(u64, usize),
    /// The first message this end sent arrives.
    Deliver(u64, usize),
    /// A bound of this end is over.
    Timer(u64, usize, Timer),
    /// The world changes.
    Fault(Fault),
    /// A shard hears of something that has happened before.
    Emit(usize, Box<FabricEvent>),
}

/// A shard's provider state.
#[derive(Debug, Default)]
pub(super) struct CoreState {
    pub(super) node: usize,
    pub(super) events: VecDeque<FabricEvent>,
    pub(super) qps: BTreeMap<QpNum, (u64, usize)>,
    pub(super) touched: Vec<QpNum>,
    pub(super) next_qp: u32,
    pub(super) active: bool,
    pub(super) counters: FabricCounters,
}

/// A machine: addresses and keys.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) keys: Arc<Mutex<Keys>>,
}

/// The unanswered request inside a `ConnRequest`; dropping it closes the connection.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) conn: u64,
    pub(super) taken: bool,
    dropped: Arc<Mutex<Vec<u64>>>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.taken {
            self.dropped.lock().push(self.conn);
        }
    }
}

/// Everything of a world but its connections.
#[derive(Debug)]
pub(super) struct Net {
    pub(super) now: Instant,
    pub(super) prng: Prng,
    pub(super) options: WorldOptions,
    pub(super) links: Links,
    pub(super) nodes: Vec<Node>,
    pub(super) cores: Vec<CoreState>,
    pub(super) listeners: BTreeMap<(usize, SocketAddr), usize>,
    pub(super) queue: BTreeMap<(Instant, u64), Event>,
    pub(super) dropped: Arc<Mutex<Vec<u64>>>,
    /// By node, how long its device takes to end a connection.
    pub(super) linger: BTreeMap<usize, Duration>,
    next_event: u64,
}

impl Net {
    pub(super) fn new(seed: u64, options: WorldOptions) -> Self {
        Self {
            now: Instant::ZERO,
            prng: Prng::new(seed),
            links: Links::new(options.link),
            options,
            nodes: Vec::new(),
            cores: Vec::new(),
            listeners: BTreeMap::new(),
            queue: BTreeMap::new(),
            dropped: Arc::default(),
            linger: BTreeMap::new(),
            next_event: 0,
        }
    }

    pub(super) fn at(&mut self, when: Instant, event: Event) {
        self.next_event += 1;
        self.queue.insert((when, self.next_event), event);
    }

    pub(super) fn after(&mut self, by: Duration, event: Event) {
        self.at(self.now + by, event);
    }

    pub(super) fn emit(&mut self, core: usize, event: FabricEvent) {
        let core = &mut self.cores[core];
        core.active = true;
        core.events.push_back(event);
    }

    pub(super) fn keys(&self, node: usize) -> &Arc<Mutex<Keys>> {
        &self.nodes[node].keys
    }

    pub(super) fn ticket(&self, conn: u64) -> Ticket {
        Ticket { conn, taken: false, dropped: Arc::clone(&self.dropped) }
    }

    /// The shard that listens at this address of this node.
    pub(super) fn listener(&self, node: usize, address: SocketAddr) -> Option<usize> {
        let any = if address.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
        let wild = SocketAddr::new(any, address.port());
        let found = self.listeners.get(&(node, address));
        found.or_else(|| self.listeners.get(&(node, wild))).copied()
    }

    /// The node with this address.
    pub(super) fn node_of(&self, address: IpAddr) -> Option<usize> {
        self.nodes.iter().position(|node| node.addresses.contains(&address))
    }

    /// Places a peer's write.
    pub(super) fn place(
        &self,
        node: usize,
        pd: u64,
        remote: RemoteMem,
        bytes: &[u8],
    ) -> Result<(), &'static str> {
        if bytes.is_empty() {
            return Ok(());
        }
        let keys = self.keys(node).lock();
        let target = keys.check_remote(pd, remote, bytes.len(), Want::Write)?;
        if !target.region().admit_write(target.offset(), target.len()) {
            return Err("a write to more memory than its sender may use before OPEN");
        }
        target.copy_in(0, bytes);
        Ok(())
    }

    /// Fetches the bytes a peer reads.
    pub(super) fn fetch(
        &self,
        node: usize,
        pd: u64,
        remote: RemoteMem,
        len: usize,
    ) -> Result<Vec<u8>, &'static str> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let keys = self.keys(node).lock();
        Ok(keys.check_remote(pd, remote, len, Want::Read)?.to_vec())
    }
}
