//! Identities of the server and the disk that a session uses.
//!
//! A client that reconnects by address and name alone could reach a different server's disk. So
//! each server and each export has a 128-bit ID; docs/PROTOCOL.md describes their encoding,
//! docs/explanation/identity.md their origin. IDs are compared, never interpreted, with one
//! exception: a *weak* export ID is valid only within one boot of the server's host, which it
//! identifies.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use crate::ids::SessionId;

/// Returns the first 16 bytes of the SHA-256 of `parts`. Each part is preceded by its length, so
/// that different lists of parts never hash the same bytes.
fn hash(parts: &[&[u8]]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let mut out = [0; 16];
    out.copy_from_slice(&hash.finalize()[..16]);
    out
}

/// ID of a server. Lasts as long as the server's host, regardless of process and run directory.
/// Never zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId([u8; 16]);

impl ServerId {
    /// Derives the ID of a host from its /etc/machine-id. The machine ID itself is not disclosed,
    /// as its manual page requires.
    pub fn of_machine(machine_id: &[u8]) -> Self {
        Self(hash(&[b"rtrs server machine", machine_id]))
    }

    /// Derives the ID of a server that was named by its operator.
    pub fn of_name(name: &str) -> Self {
        Self(hash(&[b"rtrs server name", name.as_bytes()]))
    }

    /// Creates the ID from these bytes. Returns None if all are zero, which means that there is no
    /// ID.
    pub fn from_bytes(bytes: [u8; 16]) -> Option<Self> {
        (bytes != [0; 16]).then_some(Self(bytes))
    }

    /// Returns the bytes of the ID.
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

/// ID of one process of a server, in 48 bits. Clients use it to tell the processes of a server
/// apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerProcess(pub [u8; 6]);

impl ServerProcess {
    /// Unknown process.
    pub const NONE: Self = Self([0; 6]);

    /// Creates the ID from the low bits of a random number drawn by the process.
    pub const fn new(number: u64) -> Self {
        let [a, b, c, d, e, f, ..] = number.to_le_bytes();
        Self([a, b, c, d, e, f])
    }

    /// Returns true if both processes are known and they differ.
    pub fn differs(self, other: Self) -> bool {
        self != other && self != Self::NONE && other != Self::NONE
    }
}

/// ID of an export. Lasts as long as the export refers to the same disk or file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportId {
    bytes: [u8; 16],
    weak: bool,
}

/// Result of comparing two export IDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// Both refer to the same export.
    Same,
    /// They refer to different exports.
    Different,
    /// Both are weak and from different boots: unknown.
    Unknown,
}

impl ExportId {
    /// Derives the ID of an export that was named by its operator.
    pub fn of_name(name: &str) -> Self {
        Self { bytes: hash(&[b"rtrs export name", name.as_bytes()]), weak: false }
    }

    /// Derives the ID of something permanent; `kind` says what `parts` mean.
    pub fn stable(kind: &str, parts: &[&[u8]]) -> Self {
        Self { bytes: hash(&[&[b"rtrs export", kind.as_bytes()], parts].concat()), weak: false }
    }

    /// Derives the ID of something that is identifiable only within the boot `boot` of the host.
    pub fn weak(boot: u64, kind: &str, parts: &[&[u8]]) -> Self {
        let boot = boot.to_le_bytes();
        let mut bytes = hash(&[&[b"rtrs weak export", &boot[..], kind.as_bytes()], parts].concat());
        bytes[..8].copy_from_slice(&hash(&[b"rtrs boot", &boot])[..8]);
        Self { bytes, weak: true }
    }

    /// Creates the ID from these bytes, as received from a peer.
    pub const fn from_bytes(bytes: [u8; 16], weak: bool) -> Self {
        Self { bytes, weak }
    }

    /// Returns the bytes of the ID. The first eight bytes of a weak ID identify the boot.
    pub const fn bytes(self) -> [u8; 16] {
        self.bytes
    }

    /// Returns true if the ID is valid only within one boot of the server's host.
    pub const fn is_weak(self) -> bool {
        self.weak
    }

    /// Compares two IDs.
    pub fn compare(self, other: Self) -> Comparison {
        if self == other {
            Comparison::Same
        } else if self.weak && other.weak && self.bytes[..8] != other.bytes[..8] {
            Comparison::Unknown
        } else {
            Comparison::Different
        }
    }
}

/// Identity of a server and its export; None if the server does not report one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Server.
    pub server: Option<ServerId>,
    /// Export.
    pub export: Option<ExportId>,
}

impl Identity {
    /// Returns true if the server reports neither ID.
    pub fn is_unknown(&self) -> bool {
        self.server.is_none() && self.export.is_none()
    }

    /// Returns true if the identities refer to different servers or exports. Unknown parts
    /// contradict nothing.
    pub fn contradicts(&self, other: &Self) -> bool {
        let servers = self.server.zip(other.server).is_some_and(|(a, b)| a != b);
        let exports = self.export.zip(other.export);
        servers || exports.is_some_and(|(a, b)| a.compare(b) == Comparison::Different)
    }

    /// Returns this identity, with unknown parts taken from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { server: self.server.or(other.server), export: self.export.or(other.export) }
    }
}

/// Secret with which a client verifies that its own server has evicted its session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct EvictionSecret(pub [u8; 16]);

/// Key from which a server derives the secrets of its sessions: random bytes chosen by its process.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct EvictionKey(pub [u8; 32]);

impl EvictionKey {
    /// Derives the secret of a session. It differs for each session and cannot be derived without
    /// the key.
    pub fn secret(&self, session: SessionId) -> EvictionSecret {
        EvictionSecret(hash(&[b"rtrs eviction", &self.0, &session.0]))
    }
}

/// Short hash of a session's UUID, for logs. The UUID itself is secret, since anyone who knows it
/// could join the session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SessionTag([u8; 6]);

impl SessionTag {
    /// Derives the tag of a session.
    pub fn of(session: SessionId) -> Self {
        let [a, b, c, d, e, f, ..] = hash(&[b"rtrs session in logs", &session.0]);
        Self([a, b, c, d, e, f])
    }
}

impl fmt::Display for SessionTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Debug for SessionTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn write_hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

impl fmt::Display for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Debug for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.bytes)?;
        f.write_str(if self.weak { WEAK } else { "" })
    }
}

impl fmt::Debug for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for EvictionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EvictionKey")
    }
}

impl fmt::Debug for EvictionSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EvictionSecret")
    }
}

/// Suffix of a weak ID.
const WEAK: &str = ":weak";
/// Text for an ID that the server does not report.
const NONE: &str = "-";

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.server {
            Some(server) => write!(f, "{server}/")?,
            None => write!(f, "{NONE}/")?,
        }
        match self.export {
            Some(export) => write!(f, "{export}"),
            None => f.write_str(NONE),
        }
    }
}

/// Error in the text of an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an identity is SERVER/EXPORT as status prints it: each 32 hex digits (EXPORT may end in \
     :weak), or -"
)]
pub struct IdentityError;

fn parse_hex(text: &str) -> Result<[u8; 16], IdentityError> {
    let hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u128::from_str_radix(text, 16).ok().filter(|_| hex);
    number.map(u128::to_be_bytes).ok_or(IdentityError)
}

impl FromStr for Identity {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let (server, export) = text.split_once('/').ok_or(IdentityError)?;
        let server = match server {
            NONE => None,
            server => Some(ServerId::from_bytes(parse_hex(server)?).ok_or(IdentityError)?),
        };
        let export = match export.strip_suffix(WEAK) {
            Some(hex) => Some(ExportId::from_bytes(parse_hex(hex)?, true)),
            None if export == NONE => None,
            None => Some(ExportId::from_bytes(parse_hex(export)?, false)),
        };
        Ok(Self { server, export })
    }
}

crate::text_values! {
    Identity, "ID", "an identity, SERVER/EXPORT";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_by_source_and_parts() {
        let stable = |kind, parts: &[&[u8]]| ExportId::stable(kind, parts);
        let a = stable("file", &[b"uuid", b"12"]);
        assert_eq!(a, stable("file", &[b"uuid", b"12"]));
        for other in [
            stable("file", &[b"uuid1", b"2"]),
            stable("disk", &[b"uuid", b"12"]),
            stable("file", &[b"uuid"]),
            ExportId::of_name("file"),
            ExportId::weak(1, "file", &[b"uuid", b"12"]),
        ] {
            assert_eq!(a.compare(other), Comparison::Different, "{other}");
        }
        assert_ne!(ServerId::of_name("x"), ServerId::of_machine(b"x"));
        let secret = |key, session| EvictionKey([key; 32]).secret(SessionId([session; 16]));
        assert_ne!(secret(1, 7), secret(2, 7));
        assert_ne!(secret(1, 7), secret(1, 8));
        assert_eq!(format!("{:?}", secret(1, 7)), "EvictionSecret", "not in a log");
        assert_eq!(format!("{:?}", EvictionKey([1; 32])), "EvictionKey");
    }

    #[test]
    fn weak_ids_compare_only_within_one_boot() {
        let weak = |boot, name: &[u8]| ExportId::weak(boot, "device", &[name]);
        assert_eq!(weak(1, b"a").compare(weak(1, b"a")), Comparison::Same);
        assert_eq!(weak(1, b"a").compare(weak(1, b"b")), Comparison::Different);
        assert_eq!(weak(1, b"a").compare(weak(2, b"a")), Comparison::Unknown);
        assert_eq!(weak(1, b"a").compare(weak(2, b"b")), Comparison::Unknown);
        let stable = ExportId::stable("device", &[b"a"]);
        assert_eq!(weak(1, b"a").compare(stable), Comparison::Different);
    }

    #[test]
    fn identities_are_parsed_as_printed() {
        let server = Some(ServerId::of_name("s"));
        for identity in [
            Identity { server, export: Some(ExportId::of_name("e")) },
            Identity { server, export: Some(ExportId::weak(3, "x", &[])) },
            Identity { server: None, export: Some(ExportId::from_bytes([0; 16], false)) },
            Identity { server, export: None },
            Identity::default(),
        ] {
            let text = identity.to_string();
            assert_eq!(text.parse(), Ok(identity), "{text}");
        }
        let digits = "0".repeat(32);
        for bad in [
            "",
            "-",
            "/",
            "x/-",
            "-/+0000000000000000000000000000000",
            &format!("{digits}/-"),
            &format!("-/{digits}0"),
            &format!("-/{digits}:strong"),
            &format!("-/-{WEAK}"),
        ] {
            assert_eq!(bad.parse::<Identity>(), Err(IdentityError), "{bad}");
        }
    }
}
