//! The configuration of a node: its address, its limits and its times.

use std::net::IpAddr;

use rtrs_core::time::Duration;

/// What a message counts beside its payload, in every limit of memory. Without it empty messages
/// would cost nothing.
pub const MESSAGE_COST: usize = 128;

/// The configuration of a [`Node`](super::Node).
#[derive(Clone, Debug)]
pub struct Config {
    /// The node's address.
    pub address: IpAddr,
    /// Drawn at random at each start: peers notice by it that a node has restarted. 0 is for
    /// simulators: a node like Linux 6.1, which announces nothing, and believes its TCP at once.
    pub generation: u32,
    /// Where random waits and ports come from.
    pub seed: u64,
    /// Bytes that a socket may have sent and its peers not acknowledged; see
    /// [`Node::set_buffers`](super::Node::set_buffers).
    pub sndbuf: usize,
    /// Bytes that may wait for a socket's reader before peers have to stop sending.
    pub rcvbuf: usize,
    /// The most that a socket may ask for, for either.
    pub buffer_max: usize,
    /// Bytes that may wait for one socket whatever peers do; what comes then is dropped.
    pub port_memory: usize,
    /// The same for all that one peer has sent.
    pub peer_memory: usize,
    /// The same for the node; senders get as much again.
    pub memory: usize,
    /// Sockets at a time.
    pub sockets_max: usize,
    /// Peers at a time; of those that have never sent anything valid the oldest is evicted.
    pub peers_max: usize,
    /// Bounds of the wait between attempts to connect.
    pub reconnect_min: Duration,
    /// See [`reconnect_min`](Self::reconnect_min).
    pub reconnect_max: Duration,
    /// How long an attempt to connect may take, and a new connection to send something valid.
    pub connect_timeout: Duration,
    /// Whether pings of other nodes are answered. Probes always are.
    pub ping: bool,
    /// Answers to pings that may wait for one peer.
    pub pongs_max: usize,
}

impl Config {
    /// The defaults for an address.
    pub fn new(address: IpAddr, generation: u32, seed: u64) -> Self {
        Self {
            address,
            generation,
            seed,
            // What sockets of the kernel have by default: half of net.core.wmem_default.
            sndbuf: 212_992 / 2,
            rcvbuf: 212_992 / 2,
            buffer_max: 64 << 20,
            port_memory: 64 << 20,
            peer_memory: 128 << 20,
            memory: 256 << 20,
            sockets_max: 4096,
            peers_max: 1024,
            reconnect_min: Duration::from_millis(1),
            reconnect_max: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(10),
            ping: true,
            pongs_max: 64,
        }
    }

    /// The number by which peers recognize this run of the node.
    pub(super) fn sent_generation(&self) -> Option<u32> {
        Some(self.generation).filter(|number| *number != 0)
    }

    /// A size of a buffer that a socket asks for, within what it may have.
    pub(super) fn buffer(&self, asked: usize) -> usize {
        asked.min(self.buffer_max).max(MESSAGE_COST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_buffer_is_larger_than_the_largest() {
        let mut config = Config::new([10, 0, 0, 1].into(), 1, 1);
        config.buffer_max = 120 << 10;
        for (asked, size) in [(0, MESSAGE_COST), (5000, 5000), (1 << 20, 120 << 10)] {
            assert_eq!(config.buffer(asked), size);
        }
    }
}
