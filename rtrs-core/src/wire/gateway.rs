//! MOVE: an extension with which a session requests that another gateway serve an export.
//!
//! A server with such exports announces support in CON_RSP
//! ([`Extensions::gateways`](super::Extensions::gateways)); MOVE is never sent to other servers. It
//! is the user message of a WRITE without data, and is answered as soon as the move has begun. The
//! move ends with a CHANGED, or with the end of the path (docs/PROTOCOL.md, "Gateways").

use super::error::WireError;

message! {
    /// MOVE: makes this gateway start or stop serving a device that the session has open for
    /// writing.
    #[derive(Default)]
    pub struct Move[12] = "MOVE", type 0x8005 {
        /// Number of the device, from OPEN_RSP.
        4 device_id: u32,
        /// Whether the server must release the device, so that another gateway can take it over.
        8 & 1 away: bool,
    }
}
