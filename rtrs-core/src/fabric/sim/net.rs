//! State shared by all connections of a world: the clock and its event queue, the seed, links,
//! nodes with their keys, shards with their event queues, and listeners.

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

/// Time at which a window bind or revoke takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindMode {
    /// When the call returns, as on iWARP.
    Done,
    /// At its completion, as with verbs.
    Pending,
    /// When the call returns; every revoke fails, as if another connection were writing through the
    /// window.
    InUse,
}

/// Options for behavior that may differ between providers.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// True: a send or write completes when the peer's acknowledgement arrives, as with verbs.
    /// False: it completes when it has departed, as on iWARP.
    pub acknowledged: bool,
    /// Messages that a machine sent before it lost power still arrive.
    pub flights: bool,
    /// Time at which binds take effect.
    pub bind: BindMode,
    /// Maximum time for which a revoke delays its send queue.
    pub revoke_max: Option<Duration>,
    /// Default options for links.
    pub link: LinkOptions,
    /// Maximum bytes in flight in one direction of a connection before its send queue waits (like
    /// socket buffers).
    pub buffered_max: usize,
    /// Timeout for a graceful disconnect.
    pub close_bound: Duration,
    /// Timeout for the answer to a request and for the start-up of an accepted connection.
    pub accept_bound: Duration,
    /// Fraction of the writes lost with their link that have placed some of their bytes.
    pub torn_writes: Ratio,
    /// Peers write to the bounce memory of scattered regions, as with verbs, and not to the pieces.
    pub bounces: bool,
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
            bounces: false,
        }
    }
}

/// Purpose of a connection's timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    Connect,
    Accept,
    Close,
    Detect,
}

/// Scheduled event.
#[derive(Debug)]
pub(super) enum Event {
    /// The next entry of this end's send queue departs.
    Depart(u64, usize),
    /// The first message sent by this end arrives.
    Deliver(u64, usize),
    /// A timeout of this end expires.
    Timer(u64, usize, Timer),
    /// The world changes.
    Fault(Fault),
    /// A delayed event reaches a shard.
    Emit(usize, Box<FabricEvent>),
}

/// Provider state of a shard.
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

/// A machine, with its addresses and keys.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) keys: Arc<Mutex<Keys>>,
}

/// Unanswered request inside a `ConnRequest`; dropping it closes the connection.
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

/// All state of a world except its connections.
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
    /// Time that each node's device takes to close a connection.
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

    /// Returns the shard that listens on this address of this node.
    pub(super) fn listener(&self, node: usize, address: SocketAddr) -> Option<usize> {
        let any = if address.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
        let wild = SocketAddr::new(any, address.port());
        let found = self.listeners.get(&(node, address));
        found.or_else(|| self.listeners.get(&(node, wild))).copied()
    }

    /// Returns the node with this address.
    pub(super) fn node_of(&self, address: IpAddr) -> Option<usize> {
        self.nodes.iter().position(|node| node.addresses.contains(&address))
    }

    /// Stores the data of a peer's write in memory.
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
            return Err("a write beyond the memory that the sender may use before OPEN");
        }
        target.copy_in(0, bytes);
        Ok(())
    }

    /// Fetches the bytes that a peer reads.
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
