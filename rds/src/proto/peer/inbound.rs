//! State of what a peer sends: its sequence numbers, generation and congestion map.

use crate::proto::config::MESSAGE_COST;
use crate::wire::{CongestionMap, Extensions, Header};

/// Maximum number of a peer's earlier runs whose late connections are recognized.
const FORMER_MAX: usize = 8;

/// The peer's run to which a map belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto) enum Run {
    /// The known run, or the first run.
    Same,
    /// A different run: the peer has restarted.
    New,
    /// An earlier run, while the known run is still connected: this connection is late.
    Former,
}

/// Changes made by a peer's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto) struct MapChange {
    /// Groups of ports that may have been cleared.
    pub(in crate::proto) cleared: u64,
    /// The map differs from the previous map.
    pub(in crate::proto) is_new: bool,
}

/// Data from a peer, across connections.
#[derive(Debug, Default)]
pub(in crate::proto) struct Inbound {
    is_proven: bool,
    /// The peer has sent a message to a user. If this were forgotten, a repeated message would look
    /// new.
    has_sent: bool,
    /// The peer's congested ports; none before its first map.
    map: Option<CongestionMap>,
    /// Generation of the peer, which distinguishes its runs, if the peer ever announced one.
    generation: Option<u32>,
    /// Generations of earlier runs, newest last.
    former: Vec<u32>,
    /// The peer announces its generation in maps, and thus before anything else on a connection.
    generation_in_map: bool,
    /// Cost of messages that the peer has sent and users have not read.
    held: usize,
}

impl Inbound {
    /// Whether the peer has sent valid data.
    pub(super) fn is_proven(&self) -> bool {
        self.is_proven
    }

    pub(in crate::proto) fn prove(&mut self) {
        self.is_proven = true;
    }

    pub(super) fn has_sent(&self) -> bool {
        self.has_sent
    }

    /// Records that the peer has sent a message to a user.
    pub(in crate::proto) fn note_sent(&mut self) {
        self.has_sent = true;
    }

    pub(in crate::proto) fn map(&self) -> Option<&CongestionMap> {
        self.map.as_ref()
    }

    pub(in crate::proto) fn held(&self) -> usize {
        self.held
    }

    pub(in crate::proto) fn charge(&mut self, cost: usize) {
        self.held += cost;
    }

    pub(in crate::proto) fn discharge(&mut self, cost: usize) {
        self.held -= cost;
    }

    /// Whether a port of the peer accepts no more messages now.
    pub(super) fn is_congested(&self, port: u16) -> bool {
        self.map.as_ref().is_some_and(|map| map.get(port))
    }

    /// Whether any port of the peer is congested.
    pub(super) fn has_congestion(&self) -> bool {
        self.map.as_ref().is_some_and(|map| map.ports().next().is_some())
    }

    /// Whether messages on a new connection must wait for a map.
    pub(in crate::proto) fn awaits_map(&self) -> bool {
        self.map.is_none() || self.generation_in_map
    }

    /// Whether a message of this length fits into the memory limit of a peer.
    pub(super) fn fits(&self, len: usize, memory: usize) -> bool {
        self.held + len + MESSAGE_COST <= memory
    }

    /// Records the generation from a probe or the answer to a probe. Returns true if the peer has
    /// restarted. The probe's sequence number and the number now expected already belong to the new
    /// run.
    pub(in crate::proto) fn probed(&mut self, header: &Header) -> bool {
        let generation = Extensions::decode(&header.extensions).generation;
        generation.is_some_and(|generation| self.run(generation))
    }

    /// Returns the generation of the peer, if it ever announced one.
    pub(in crate::proto) fn generation(&self) -> Option<u32> {
        self.generation
    }

    /// Records the generation from a map's header. `is_connected` says whether another connection
    /// belongs to the known run. If none does, an earlier run may be back, because the address has
    /// moved between hosts.
    pub(in crate::proto) fn map_begun(
        &mut self,
        generation: Option<u32>,
        is_connected: bool,
    ) -> Run {
        let Some(generation) = generation else { return Run::Same };
        if is_connected && self.former.contains(&generation) {
            return Run::Former;
        }
        self.generation_in_map = true;
        if self.run(generation) { Run::New } else { Run::Same }
    }

    /// Records the peer's generation. Returns true if it differs from the known generation.
    fn run(&mut self, generation: u32) -> bool {
        let known = self.generation.replace(generation).filter(|known| *known != generation);
        self.former.retain(|former| *former != generation);
        if self.former.len() == FORMER_MAX {
            self.former.remove(0);
        }
        self.former.extend(known);
        known.is_some()
    }

    /// Replaces the peer's map.
    pub(in crate::proto) fn replace_map(&mut self, map: CongestionMap) -> MapChange {
        let cleared = self.map.as_ref().map_or(0, |old| old.cleared(&map));
        let is_new = self.map.as_ref() != Some(&map);
        self.map = Some(map);
        MapChange { cleared, is_new }
    }
}
