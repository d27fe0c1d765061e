//! The NBD protocol, server side, fixed newstyle, as machines without IO.
//!
//! A connection starts with a [`Handshake`]: it is fed what the client sent, appends what the
//! client must be told, and ends with [`Negotiated`] terms. From these come the [`Rules`] that
//! judge each [`Request`]; [`reply`] writes the heads of the answers. Nothing here owns a socket,
//! a clock or a device, and no input makes it panic. The connection code calls all of it.
//!
//! Source: the NBD protocol document, `doc/proto.md` of the NetworkBlockDevice project; its
//! sections are named where code obeys them.

mod export_info;
pub(crate) mod fuzz;
mod handshake;
pub mod reply;
mod transmission;
pub mod wire;

pub use export_info::{BadExport, ExportInfo};
pub use handshake::{Exports, Handshake, Negotiated, Outcome, ProtocolError};
pub use transmission::{AfterRefusal, Op, Refusal, Request, Rules, Validated};
