//! MOVE: an extension with which a session requests that another gateway serve an export.
//!
//! A server with such exports announces that in CON_RSP
//! ([`Extensions::gateways`](super::Extensions::gateways)); it is never sent to other servers. It
//! is the user message of a WRITE without data, and is answered as soon as the move has begun. The
//! move ends with a CHANGED, or with the end of the path (docs/PROTOCOL.md, "Gateways").

use super::error::WireError;

message! {
    /// MOVE: starts or stops serving a device here that this session has open for writing.
    #[derive(Default)]
    pub struct Move[12] = "MOVE", type 0x8005 {
        /// Number of the device, from OPEN_RSP.
        4 device_id: u32,
        /// The server must release the device, so that another can take it over.
        8 & 1 away: bool,
    }
}
