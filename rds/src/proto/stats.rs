//! Counters of a node, with the kernel's names where the kernel has the same counters.

use rtrs_base::metrics::{Kind, Metric};

/// Sends that were refused, or had to wait, before the message reached the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// The send buffer was full.
    pub queue_full: u64,
    /// The port was congested, and the call did not wait.
    pub congested: u64,
    /// The port was congested, and the call waited.
    pub congested_waits: u64,
}

impl Refused {
    /// Adds the counts of another user. Users may report arbitrary numbers.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            queue_full: self.queue_full.wrapping_add(other.queue_full),
            congested: self.congested.wrapping_add(other.congested),
            congested_waits: self.congested_waits.wrapping_add(other.congested_waits),
        }
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of a node since its start.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Stats {
            /// Returns each counter with its name.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)+]
            }

            /// Metric of each counter, in the order of [`all`](Self::all).
            pub const METRICS: &[Metric] = &[$(Metric {
                name: concat!("rds_", stringify!($name), "_total"),
                kind: Kind::Counter,
                labels: &["node"],
                help: concat!($($doc),+).trim_ascii_start(),
            },)+];

            /// Adds the counters of another part of the node.
            pub(super) fn plus(self, other: Self) -> Self {
                Self { $($name: self.$name.wrapping_add(other.$name),)+ }
            }
        }
    };
}

counters! {
    /// Established connections that were lost.
    conn_reset,
    /// Messages that had already arrived before.
    recv_drop_old_seq,
    /// Messages to unbound ports.
    recv_drop_no_sock,
    /// Messages that were waiting for a socket when it was closed.
    recv_drop_dead_sock,
    /// Messages dropped because of a memory limit.
    recv_drop_no_memory,
    /// Messages delivered to users.
    recv_delivered,
    /// Messages queued for users.
    recv_queued,
    /// Payload bytes queued for users.
    recv_bytes_added_to_sock,
    /// Payload bytes that users have read, or that were dropped when their socket was closed.
    recv_bytes_freed_fromsock,
    /// Received messages that ask for an acknowledgment, which TCP gives anyway.
    recv_ack_required,
    /// Pings and probes received.
    recv_ping,
    /// Connections closed because of invalid data.
    recv_bad_stream,
    /// Send attempts while the send buffer was full.
    send_queue_full,
    /// Send buffers that have become empty: everything sent from a socket is acknowledged.
    send_queue_empty,
    /// Messages acknowledged by peers.
    send_drop_acked,
    /// Messages sent by users.
    send_queued,
    /// Messages resent on another connection.
    send_retransmitted,
    /// Messages dropped without acknowledgment: canceled, sent by a socket that was closed, or sent
    /// to a peer that has restarted or that exceeds the limit of peers.
    send_dropped,
    /// Answers to pings.
    send_pong,
    /// Suppressed answers to pings: too many were waiting, or their port was congested.
    send_pong_dropped,
    /// Payload bytes taken from users.
    copy_from_user,
    /// Payload bytes passed to users.
    copy_to_user,
    /// Congestion maps sent.
    cong_update_queued,
    /// Congestion maps received.
    cong_update_received,
    /// Messages refused because their port was congested.
    cong_send_error,
    /// Messages that waited because their port was congested.
    cong_send_blocked,
    /// Peers refused because the node had too many (peers-max): connections closed, messages
    /// refused.
    peers_refused,
    /// Attempts to connect.
    tcp_connect_attempts,
    /// Short connections by which larger peers requested a connection.
    tcp_kicks_received,
    /// Short connections by which smaller peers were requested to connect.
    tcp_kicks_sent,
    /// Connections accepted while the former connection was up.
    tcp_connect_raced,
    /// Accepted connections closed because the peer sent nothing valid over them in time, or opened
    /// another connection.
    tcp_listen_closed_stale,
    /// Connections that had input.
    tcp_data_ready_calls,
    /// Connections that had room again for output.
    tcp_write_space_calls,
    /// Writes that stopped because the system accepted no more.
    tcp_sndbuf_full,
    /// Connections closed because too many had not sent valid data.
    tcp_crowded_out,
}
