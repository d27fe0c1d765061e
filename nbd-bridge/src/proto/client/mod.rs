//! Client side of the NBD protocol, as state machines without IO.
//!
//! [`ClientHandshake`] is fed the bytes that the server sent, appends the bytes to send, and ends
//! with the server's offer. [`Requests`] then encodes requests, and reads simple and structured
//! replies. The server is not trusted with memory: data must lie within its request, and every
//! reply must belong to a request.
//!
//! Source: sections "Handshake" and "Transmission" of the NBD protocol document.

mod handshake;
mod requests;
#[cfg(test)]
mod tests;

pub use handshake::{ClientHandshake, HandshakeError, Offered};
pub use requests::{BadReply, Reply, Requests};
