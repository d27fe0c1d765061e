//! The NBD protocol, fixed newstyle, as machines without IO: the server's side, and that of a
//! client in `client`.
//!
//! A connection starts with a [`Handshake`]: it is fed what the client sent, appends the
//! answers, and ends with [`Negotiated`] terms. From these come the [`Rules`] that validate
//! each [`Request`]; [`reply`] writes the heads of the answers. Nothing here owns a socket,
//! a clock or a device, and no input makes it panic. The connection code calls all of it.
//!
//! Source: the NBD protocol document, `doc/proto.md` of the NetworkBlockDevice project; its
//! sections are named where code obeys them.

pub mod client;
#[cfg(test)]
#[path = "tests/corpus.rs"]
mod corpus;
mod export_info;
#[cfg(any(test, feature = "test-util"))]
#[path = "tests/fuzz.rs"]
pub(crate) mod fuzz;
mod handshake;
pub mod reply;
mod transmission;
pub mod wire;

pub use export_info::{BadExport, ExportInfo};
pub use handshake::{Exports, Handshake, Negotiated, Outcome, ProtocolError};
pub(crate) use handshake::{
    OPTION_SKIP_MAX, OPTIONS_MAX, RECEIVED_MAX, Refused, put_error, put_reply,
};
pub use transmission::{AfterRefusal, Op, Refusal, Request, Rules, Terms, Validated};
