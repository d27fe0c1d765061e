//! All RTRS and RNBD messages, byte for byte as in the Linux modules.
//!
//! In the order in which a session uses them: [`ConnReq`] and [`ConnRsp`] connect, [`InfoReq`] and
//! [`InfoRsp`] exchange names and memory, [`SessInfo`], [`Open`], [`OpenRsp`] and [`Close`] concern
//! the export; then each IO has an [`IoHeader`] and a [`ReadMsg`] or [`WriteMsg`], and is announced
//! and answered by an [`Imm`], with an [`RkeyRsp`] if keys rotate. [`ChunkLayout`] determines where
//! a client places these messages in a chunk; [`ChunkRequest`] locates and validates them there.
//!
//! Guarantees: decoding never panics, for any input; it accepts messages that are longer than
//! necessary; reserved bytes are never validated on input (the kernel client sends uninitialized
//! stack memory) and are always zero on output. Integers are little-endian, loaded byte by byte. IO
//! messages need no allocation. Both ends use this module; it is independent of sockets, clocks and
//! memory regions. In addition to RTRS, it contains the [ping](PingHello), whose messages are those
//! of rping and big-endian. Layouts: docs/PROTOCOL.md; golden vectors: `tests/golden/rtrs.hex`.

#[macro_use]
mod bytes;
mod auth;
mod chunk;
mod conn;
mod depth;
mod discover;
pub mod errno;
mod error;
mod export;
mod fence;
#[cfg(any(test, feature = "test-util"))]
#[path = "tests/fuzz.rs"]
mod fuzz;
mod gateway;
mod imm;
mod info;
mod io;
mod name;
mod ping;
mod rkey;
mod version;

pub use crate::limits::MemBits;
pub use auth::{
    AUTH_VERSION, Auth, Challenge, ChallengeRsp, Credential, CredentialKind, SignedProof,
};
pub use chunk::{ChunkLayout, ChunkRequest, Message, USER_LEN_MAX, UserMessage};
pub use conn::{ConnReq, ConnRsp};
pub use depth::ClientExtensions;
pub use discover::{Discover, Discovered, Page};
pub use errno::errno_name;
pub use error::{Fault, WireError};
pub use export::{
    AccessMode, Close, Open, OpenFlags, OpenRefusal, OpenRsp, OpenRspTail, SessInfo, SessInfoRsp,
};
pub use fence::{Extensions, Fence};
#[doc(hidden)]
#[cfg(any(test, feature = "test-util"))]
pub use fuzz::fuzz;
pub use gateway::Move;
pub use imm::Imm;
pub use info::{InfoReq, InfoRsp, SgDesc};
pub use io::{IoHeader, ReadMsg, Rw, RwOp, WriteMsg};
pub use name::{Name, NameError};
pub use ping::{
    PingHello, PingInfo, PingMode, PingReply, PingStatus, RPING_PORT, RPING_SIZE_MAX,
    RPING_SIZE_MIN, fill_pattern, text_len,
};
pub use rkey::{RkeyRsp, TimedRkeyRsp};
pub use version::{RNBD_VERSION, VERSION};
