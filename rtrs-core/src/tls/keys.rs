//! Raw Ed25519 keys: their text form and files, and a server's list of known clients.
//!
//! A public key is written `ed25519:BASE64`, with the 32 bytes of the key in base64. A private key
//! is a PKCS#8 file in PEM format, as written by `openssl genpkey -algorithm ed25519`.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use sha2::{Digest, Sha256};

use super::error::TlsConfigError as Error;
use super::files::{read, read_secret};

/// Encoding that precedes the key in its SubjectPublicKeyInfo (RFC 8410 section 4).
const SPKI_HEAD: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];
/// Maximum length of a client's name.
pub(super) const NAME_MAX: usize = 255;

/// Error for text that is not a public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a public key; write ed25519:BASE64, as `key show` prints it")]
pub struct KeyError;

/// Public half of a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// Returns the SHA-256 of the key in base64, short enough to read aloud.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        format!("SHA256:{}", STANDARD.encode(Sha256::digest(self.0)).trim_end_matches('='))
    }

    /// Returns the SubjectPublicKeyInfo.
    pub(super) fn spki(&self) -> Vec<u8> {
        [&SPKI_HEAD[..], &self.0].concat()
    }

    /// Extracts the key from a SubjectPublicKeyInfo, if it is an Ed25519 key.
    pub(super) fn from_spki(spki: &[u8]) -> Option<Self> {
        spki.strip_prefix(&SPKI_HEAD)?.try_into().ok().map(Self)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ed25519:{}", STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let bytes = text.strip_prefix("ed25519:").and_then(|key| STANDARD.decode(key).ok());
        bytes.and_then(|bytes| bytes.try_into().ok()).map(Self).ok_or(KeyError)
    }
}

crate::text_values! {
    PublicKey, "KEY", "a public key, ed25519:BASE64";
}

/// Private key with which this end proves its identity.
pub struct PrivateKey {
    pkcs8: Vec<u8>,
    public: PublicKey,
}

impl PrivateKey {
    /// Generates a key. Returns None if the system provides no random numbers.
    #[must_use]
    pub fn generate() -> Option<Self> {
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).ok()?;
        Self::from_pkcs8(pkcs8.as_ref())
    }

    /// Reads a file that only its owner may read.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = read_secret(path)?;
        let key = PrivatePkcs8KeyDer::from_pem_slice(&text).ok();
        let key = key.and_then(|key| Self::from_pkcs8(key.secret_pkcs8_der()));
        key.ok_or_else(|| Error::Content {
            path: path.into(),
            why: "it has no Ed25519 private key in PKCS#8 and PEM".into(),
        })
    }

    /// Derives a key from these bytes, deterministically.
    #[cfg(any(test, feature = "test-util"))]
    #[must_use]
    pub fn from_seed(seed: [u8; 32]) -> Option<Self> {
        /// PrivateKeyInfo of an Ed25519 key without its public half (RFC 8410 section 7).
        const HEAD: [u8; 16] =
            [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        Self::from_pkcs8(&[&HEAD[..], &seed].concat())
    }

    fn from_pkcs8(pkcs8: &[u8]) -> Option<Self> {
        // OpenSSL omits the public half.
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(pkcs8).ok()?;
        let public = PublicKey(pair.public_key().as_ref().try_into().ok()?);
        Some(Self { pkcs8: pkcs8.to_vec(), public })
    }

    /// Writes a new file that only its owner may read.
    ///
    /// # Errors
    /// The system's error; `AlreadyExists` if the file exists.
    pub fn write_new(&self, path: &Path) -> std::io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(self.pem().as_bytes())?;
        file.sync_all()
    }

    fn pem(&self) -> String {
        let text = STANDARD.encode(&self.pkcs8);
        let mut pem = String::from("-----BEGIN PRIVATE KEY-----\n");
        for line in text.as_bytes().chunks(64) {
            pem += &String::from_utf8_lossy(line);
            pem.push('\n');
        }
        pem + "-----END PRIVATE KEY-----\n"
    }

    /// Returns the public half.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        self.public
    }

    pub(super) fn der(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.pkcs8.clone()))
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateKey({})", self.public)
    }
}

/// Clients that a server identifies by their keys.
///
/// Each line of the file has a name and a key; `#` starts a comment. A client may have several
/// keys, so that a key can be replaced; a key belongs to one client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clients(BTreeMap<PublicKey, Arc<str>>);

impl Clients {
    /// Reads the file.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file and the line.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = read(path)?;
        let wrong = |why: String| Error::Content { path: path.into(), why };
        let text = str::from_utf8(&text).map_err(|error| wrong(error.to_string()))?;
        Self::parse(text).map_err(wrong)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut clients = BTreeMap::new();
        let mut lines = BTreeMap::new();
        for (at, line) in text.lines().enumerate() {
            let at = at + 1;
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let Some(name) = words.next() else { continue };
            let (Some(key), None) = (words.next(), words.next()) else {
                return Err(format!("line {at} is not NAME ed25519:BASE64"));
            };
            if name.ends_with(':') {
                let name = name.trim_end_matches(':');
                return Err(format!("line {at}: write {name} without a colon after it"));
            }
            let key: PublicKey = key.parse().map_err(|e: KeyError| format!("line {at}: {e}"))?;
            if !is_name(name) {
                return Err(format!("line {at}: use a name of 1 to 255 printable characters"));
            }
            if let Some(why) = reserved(name) {
                return Err(format!("line {at}: the name {name:?} {why}"));
            }
            clients.insert(key, Arc::from(name));
            if let Some(earlier) = lines.insert(key, at) {
                return Err(format!("line {at} repeats the key of line {earlier}; remove one"));
            }
        }
        Ok(Self(clients))
    }

    /// Adds a key for a client.
    #[cfg(any(test, feature = "test-util"))]
    pub fn add(&mut self, name: &str, key: PublicKey) {
        self.0.insert(key, Arc::from(name));
    }

    /// Returns the client with this key.
    pub(super) fn name(&self, key: &PublicKey) -> Option<Arc<str>> {
        self.0.get(key).cloned()
    }

    /// Returns all keys with the names of their clients.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&PublicKey, &Arc<str>)> {
        self.0.iter()
    }

    /// Returns the client that has this key.
    #[must_use]
    pub fn name_of(&self, key: &PublicKey) -> Option<&str> {
        self.0.get(key).map(|name| &**name)
    }

    /// Returns true if a client has this name.
    #[must_use]
    pub fn has_name(&self, name: &str) -> bool {
        self.0.values().any(|known| **known == *name)
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Names in access lists that look like a wildcard, but are not.
pub const EVERYONE: [&str; 5] = ["everyone", "everybody", "all", "any", "*"];

/// Returns the reason why a client must not have this name: access lists would give the name a
/// different meaning.
fn reserved(name: &str) -> Option<&'static str> {
    let is = |word: &str| name.eq_ignore_ascii_case(word);
    if is("anyone") || is("kernel") {
        return Some("is a reserved word in access lists; use another name");
    }
    let is_address = name.split('/').next().is_some_and(|at| at.parse::<IpAddr>().is_ok());
    if is_address || EVERYONE.into_iter().any(is) {
        return Some("looks like another kind of entry in an access list; use another name");
    }
    if name.contains('@') {
        return Some("contains @, which begins a network in access lists; remove it");
    }
    let prefixed = name.starts_with("key:") || name.starts_with("certificate:");
    prefixed.then_some("begins with a prefix that `session list` adds to names; remove it")
}

/// Returns true if text can be printed wherever the name of a peer is shown.
pub(super) fn is_name(text: &str) -> bool {
    (1..=NAME_MAX).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
}
