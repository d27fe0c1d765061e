//! The NBD protocol, fixed newstyle, as state machines without IO: the server side, and the client
//! side in `client`.
//!
//! A connection starts with a [`Handshake`], which is fed the bytes that the client sent, appends
//! the answers, and ends with [`Negotiated`] terms. These determine the [`Rules`] that validate
//! each [`Request`]; [`reply`] writes the headers of the answers. Nothing here owns a socket, a
//! clock or a device, and no input causes a panic. The connection code calls all parts.
//!
//! Source: the NBD protocol document, `doc/proto.md` of the NetworkBlockDevice project; the code
//! names the sections that it implements.

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
