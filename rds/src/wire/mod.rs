//! Message formats of RDS over TCP, byte for byte as in Linux's rds_tcp.
//!
//! A message is a [`Header`] of 48 bytes and a payload. A [`CongestionMap`] is one kind of payload;
//! [`Extensions`] are part of the header. A [`Decoder`] splits a TCP stream into messages.
//!
//! Guarantees: decoding never panics, whatever the bytes, and holds at most 64 KiB or twice the
//! payload that has arrived. Integers are big-endian. Layouts and rules: docs/RDS.md.

mod decoder;
mod extension;
mod header;
mod map;

pub use decoder::{ArrivalTimes, Decoder, Step};
pub use extension::Extensions;
pub use header::{
    ACK_REQUIRED, CONG_BITMAP, HEADER_LEN, Header, Kind, PAYLOAD_MAX, PING_PORT, PROBE_PORT,
    RETRANSMITTED, TCP_PORT, WireError,
};
pub use map::{CongestionMap, MAP_LEN};
