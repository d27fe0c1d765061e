//! Versions of the two protocols.

/// RTRS 2.0, as in CON_REQ and CON_RSP; only the major version is compared.
pub const VERSION: u16 = 0x0200;
/// Major version of RNBD, as in SESS_INFO.
pub const RNBD_VERSION: u8 = 2;
