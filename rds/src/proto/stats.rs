//! Counters of a node, with the kernel's names where it has them.

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of a node since its start.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Stats {
            /// Each counter with its name.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)+]
            }
        }
    };
}

counters! {
    /// Connections that were up and are not any more.
    conn_reset,
    /// Messages that had arrived before.
    recv_drop_old_seq,
    /// Messages to ports that nobody has bound.
    recv_drop_no_sock,
    /// Messages that waited for a socket when it was closed.
    recv_drop_dead_sock,
    /// Messages dropped because a limit of memory was reached.
    recv_drop_no_memory,
    /// Messages that users were given.
    recv_delivered,
    /// Messages that were queued for users.
    recv_queued,
    /// Pings and probes that arrived.
    recv_ping,
    /// Connections ended because what they sent makes no sense.
    recv_bad_stream,
    /// Times that a socket was found full by a sender.
    send_queue_full,
    /// Messages that peers have acknowledged.
    send_drop_acked,
    /// Messages that users have sent.
    send_queued,
    /// Messages that were sent once more, on another connection.
    send_retransmitted,
    /// Messages that were dropped unacknowledged: canceled, of a closed socket, to a peer that has
    /// restarted, or to more peers than there may be.
    send_dropped,
    /// Answers to pings.
    send_pong,
    /// Answers to pings that were left out: too many waited, or their port was congested.
    send_pong_dropped,
    /// Congestion maps that were sent.
    cong_update_queued,
    /// Congestion maps that arrived.
    cong_update_received,
    /// Messages refused because their port was congested.
    cong_send_error,
    /// Peers for which there was no place (peers-max): connections closed, messages refused.
    peers_refused,
    /// Attempts to connect.
    tcp_connect_attempts,
    /// Short connections by which larger peers asked for one.
    tcp_kicks_received,
    /// Short connections by which smaller peers were asked for one.
    tcp_kicks_sent,
    /// Connections accepted while the former one was up.
    tcp_connect_raced,
    /// Connections closed because too many had sent nothing valid.
    tcp_crowded_out,
}
