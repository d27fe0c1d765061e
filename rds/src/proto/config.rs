//! Configuration of a node: its address, limits and timeouts.

use std::net::IpAddr;

use rtrs_base::time::Duration;

use super::event::SendError;
use super::tuning::Tuning;
use crate::wire::PAYLOAD_MAX;

/// Cost of a message in every memory limit, in addition to its payload. Without it, empty messages
/// would be free.
pub const MESSAGE_COST: usize = 128;

/// Maximum number of connections to a peer, as in the kernel.
pub const PATHS_MAX: usize = 8;

/// Configuration of a [`Node`](super::Node).
#[derive(Clone, Debug)]
pub struct Config {
    /// Address of the node.
    pub address: IpAddr,
    /// Random number drawn at each start, by which peers detect a restart of the node. 0 is for
    /// simulators: the node then behaves like Linux 6.1, which announces no generation and
    /// immediately trusts TCP's acknowledgments.
    pub generation: u32,
    /// Seed for random delays and ports.
    pub seed: u64,
    /// Maximum number of bytes that a socket may have sent and its peers have not acknowledged; see
    /// [`Node::set_buffers`](super::Node::set_buffers).
    pub sndbuf: usize,
    /// Maximum number of bytes that may wait for a socket's reader before peers have to stop
    /// sending.
    pub rcvbuf: usize,
    /// Maximum size that a socket may request for either buffer.
    pub buffer_max: usize,
    /// Maximum number of bytes that may wait for one socket, no matter what peers do; further
    /// messages are dropped.
    pub port_memory: usize,
    /// Like [`port_memory`](Self::port_memory), for everything sent by one peer.
    pub peer_memory: usize,
    /// Like [`port_memory`](Self::port_memory), for the whole node; sent messages have a separate
    /// limit of the same size.
    pub memory: usize,
    /// Maximum number of sockets.
    pub sockets_max: usize,
    /// Maximum number of peers; beyond it, the oldest peer that has never sent valid data is
    /// evicted.
    pub peers_max: usize,
    /// Maximum number of connections to a peer, 1 to [`PATHS_MAX`]. Peers that support only one
    /// connection have one.
    pub paths: usize,
    /// Settings that can change while the node runs.
    pub tuning: Tuning,
    /// Timeout for an attempt to connect, and for the first valid data on a new connection.
    pub connect_timeout: Duration,
    /// Whether pings from other nodes are answered. Probes always are.
    pub ping: bool,
    /// Maximum number of ping answers queued for one peer.
    pub pongs_max: usize,
}

impl Config {
    /// Returns the defaults for an address.
    pub fn new(address: IpAddr, generation: u32, seed: u64) -> Self {
        Self {
            address,
            generation,
            seed,
            // Default for kernel sockets: half of net.core.wmem_default.
            sndbuf: 212_992 / 2,
            rcvbuf: 212_992 / 2,
            buffer_max: 64 << 20,
            port_memory: 64 << 20,
            peer_memory: 128 << 20,
            memory: 256 << 20,
            sockets_max: 4096,
            peers_max: 1024,
            paths: 1,
            tuning: Tuning::default(),
            connect_timeout: Duration::from_secs(10),
            ping: true,
            pongs_max: 64,
        }
    }

    /// Returns the number by which peers recognize this run of the node.
    pub(super) fn sent_generation(&self) -> Option<u32> {
        Some(self.generation).filter(|number| *number != 0)
    }

    /// Returns the maximum number of connections to a peer. Without a generation, a peer could not
    /// tell which of several connections were made by an earlier run of the node.
    pub(super) fn paths(&self) -> usize {
        match self.generation {
            0 => 1,
            _ => self.paths.clamp(1, PATHS_MAX),
        }
    }

    /// Checks whether a message of this length may be sent to a node.
    pub(super) fn check(&self, sndbuf: usize, to: IpAddr, len: usize) -> Result<(), SendError> {
        let is_broadcast = matches!(to, IpAddr::V4(v4) if v4.is_broadcast());
        if to.is_unspecified() || to.is_multicast() || is_broadcast {
            return Err(SendError::Address(to));
        }
        if to.is_ipv4() != self.address.is_ipv4() {
            return Err(SendError::Family(to));
        }
        let max = PAYLOAD_MAX.min(sndbuf);
        if len > max {
            return Err(SendError::TooLong { len, max });
        }
        Ok(())
    }

    /// Limits a requested buffer size to the allowed range.
    pub(super) fn buffer(&self, asked: usize) -> usize {
        asked.min(self.buffer_max).max(MESSAGE_COST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_do_not_exceed_the_maximum() {
        let mut config = Config::new([10, 0, 0, 1].into(), 1, 1);
        config.buffer_max = 120 << 10;
        for (asked, size) in [(0, MESSAGE_COST), (5000, 5000), (1 << 20, 120 << 10)] {
            assert_eq!(config.buffer(asked), size);
        }
    }
}
