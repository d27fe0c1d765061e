//! Communication between a node and the processes that use it, on one host.
//!
//! Each socket of a user is a connection to the node: a unix socket that preserves message
//! boundaries (SOCK_SEQPACKET), whose descriptor can be polled, duplicated and inherited. Messages
//! are `Packet`s followed by their payload; the rest of a payload above `INLINE_MAX` is in a memfd.
//! A request with an answer uses a separate connection. State that users check before they send is
//! in shared memory, the [`Board`]; the amounts that they have sent and taken are in counters that
//! they share with the node, the [`Flow`]. Short messages to the node, and all messages to users,
//! pass through rings in the same memory (`ring`).

mod big;
mod board;
mod connect;
mod flow;
mod info;
mod packet;
mod ring;
mod tally;

pub(crate) use big::{INLINE_FIRST, INLINE_MAX, put_rest, take_rest};
pub(crate) use board::BoardWriter;
pub use board::{Board, SocketView};
pub use connect::Connect;
pub(crate) use connect::{FDS_MAX, passed_fds};
pub use flow::Flow;
pub(crate) use flow::NodeFlow;
pub(crate) use info::encode as encode_info;
pub use info::{
    Counter, InfoConnection, InfoMessage, InfoOption, InfoSocket, InfoTcp, connections_of,
    counters_of, messages_of, sockets_of, tcp_of,
};
pub(crate) use packet::{PACKET_LEN, Packet, PacketKind, PacketTimes, mapped};
#[cfg(any(test, feature = "test-util"))]
pub(crate) use ring::{LONG_LEN, RING_LEN};
pub(crate) use ring::{Next, NodeRing, RING_MESSAGE_MAX};
pub(crate) use tally::TallyReader;
pub use tally::{Refusal, Tally};
