//! The NBD protocol, client side, as machines without IO.
//!
//! [`ClientHandshake`] is fed what the server sent, appends what is to be sent, and ends with what
//! the server offers. [`Requests`] then encodes requests, and reads simple and structured replies.
//! A server is not trusted with memory: data lies within its request, and every reply has one.
//!
//! Source: "Handshake", "Transmission" of the NBD document.

mod handshake;
mod requests;
#[cfg(test)]
mod tests;

pub use handshake::{ClientHandshake, HandshakeError, Offered};
pub use requests::{BadReply, Reply, Requests};
