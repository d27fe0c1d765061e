//! Every message of RTRS and RNBD, byte for byte as the Linux modules speak them.
//!
//! The map, in the order of a session's life: [`ConnReq`] and [`ConnRsp`] connect, [`InfoReq`]
//! and [`InfoRsp`] introduce, [`SessInfo`], [`Open`], [`OpenRsp`], [`Close`] concern the export;
//! then an [`IoHeader`] and a [`ReadMsg`] or [`WriteMsg`] per IO, announced and answered by an
//! [`Imm`], with an [`RkeyRsp`] where keys rotate. [`ChunkLayout`] says where a client puts them in
//! a chunk, [`ChunkRequest`] finds and validates them there.
//!
//! Promises: decoding never panics, whatever the bytes; it takes messages that are longer than
//! they must be; reserved bytes are never validated on input (the kernel's client sends what its
//! stack held) and always zero on output. Integers are little-endian, loaded byte by byte.
//! Nothing of an IO allocates. Both ends call it; it knows no socket, clock or memory region.
//! Beside RTRS stands the [ping](PingHello), which is rping's and big-endian.
//! Layouts: docs/PROTOCOL.md; golden vectors: `tests/golden/rtrs.hex`.

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
    AccessMode, Close, Open, OpenRefusal, OpenRsp, OpenRspTail, SessInfo, SessInfoRsp,
};
pub use fence::{Extensions, Fence};
#[doc(hidden)]
#[cfg(any(test, feature = "test-util"))]
pub use fuzz::fuzz;
pub use gateway::Move;
pub use imm::{Imm, MemBits};
pub use info::{InfoReq, InfoRsp, SgDesc};
pub use io::{IoHeader, ReadMsg, Rw, RwOp, WriteMsg};
pub use name::{Name, NameError};
pub use ping::{
    PingHello, PingInfo, PingMode, PingReply, PingStatus, RPING_PORT, RPING_SIZE_MAX,
    RPING_SIZE_MIN, fill_pattern, text_len,
};
pub use rkey::{RkeyRsp, TimedRkeyRsp};

/// RTRS 2.0, as CON_REQ and CON_RSP carry it; only the major version is compared.
pub const VERSION: u16 = 0x0200;
/// Major version of RNBD, as SESS_INFO carries it.
pub const RNBD_VERSION: u8 = 2;
