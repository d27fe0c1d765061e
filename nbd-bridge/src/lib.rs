//! A library that serves any block device over NBD.
//!
//! Map of the crate, in the order a request walks it:
//! - `proto`: the NBD protocol as machines without IO; bytes in, bytes and decisions out.

#![forbid(unsafe_code)]

mod proto;

pub use proto::{
    AfterRefusal, BadExport, ExportInfo, Exports, Handshake, Negotiated, Op, Outcome,
    ProtocolError, Refusal, Request, Rules, Validated, reply, wire,
};

/// Bodies of the fuzz targets; no part of the API.
#[doc(hidden)]
pub mod fuzz {
    pub use crate::proto::fuzz::{fuzz_handshake, fuzz_transmission};
}
