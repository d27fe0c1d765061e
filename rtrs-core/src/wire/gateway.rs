//! MOVE: our own addition, by which a session has an export served by another gateway.
//!
//! A server that has such exports says so in CON_RSP
//! ([`Extensions::gateways`](super::Extensions::gateways)); to others it is never sent. It travels
//! as a user message of a WRITE without data, and is answered at once: the move has begun. Its end
//! is a CHANGED, or that of the path (docs/PROTOCOL.md, "Gateways").

use super::error::WireError;

message! {
    /// MOVE: a device that this session has open for writing is to be served here, or not any more.
    #[derive(Default)]
    pub struct Move[12] = "MOVE", type 0x8005 {
        /// The device, as OPEN_RSP named it.
        4 device_id: u32,
        /// The server is to give it up, so that another can take it over.
        8 & 1 away: bool,
    }
}
