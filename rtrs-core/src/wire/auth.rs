//! CHALLENGE and AUTH: an extension with which both ends of a path prove their identities.
//!
//! A server that requires proofs announces this in CON_RSP
//! ([`Extensions`](super::Extensions::authenticate)), to a client that announced support in CON_REQ
//! ([`ClientExtensions`](super::ClientExtensions::authenticates)). CHALLENGE is sent as the user
//! message of a READ, and the answer contains the server's proof; AUTH is sent as the user message
//! of a WRITE, whose data is the client's proof. `tls/proof.rs` defines the signed data; this
//! module checks no signatures.

use super::bytes::{expect_type, fixed, put, u16_at};
use super::error::WireError;

/// Version of both messages and of the signed data.
pub const AUTH_VERSION: u16 = 1;

message! {
    /// CHALLENGE: the client requests a proof of the server's identity.
    pub struct Challenge[72] = "CHALLENGE", type 0x8003 {
        /// [`AUTH_VERSION`].
        2 version: u16,
        /// Random bytes from the client.
        8 nonce: [u8; 32],
        /// SHA-256 of the credential that the client will present ([`Credential::bytes`]).
        40 credential: [u8; 32],
    }
}

message! {
    /// AUTH: the client proves its identity. The data of the WRITE is a [`SignedProof`].
    pub struct Auth[8] = "AUTH", type 0x8004 {
        /// [`AUTH_VERSION`].
        2 version: u16,
    }
}

codes! {
    /// Kind of credential that an end presents.
    pub enum CredentialKind {
        /// A raw public key: one SubjectPublicKeyInfo.
        RawKey = 1,
        /// A chain of X.509 certificates, starting with the end's own.
        Certificates = 2,
    }
}

/// Credential that an end presents, in DER.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// Kind of the credential.
    pub kind: CredentialKind,
    /// One key, or the certificates.
    pub chain: Vec<Vec<u8>>,
}

impl Credential {
    /// Maximum number of certificates in a chain.
    pub const CHAIN_MAX: usize = 8;

    /// Encodes the kind, the number of elements, then each element with its length: the form in
    /// which a credential is sent and hashed.
    pub fn bytes(&self) -> Vec<u8> {
        let count = u8::try_from(self.chain.len()).unwrap_or(u8::MAX);
        let mut out = vec![self.kind.to_wire(), count];
        for one in &self.chain {
            out.extend(u16::try_from(one.len()).unwrap_or(u16::MAX).to_le_bytes());
            out.extend(one);
        }
        out
    }
}

/// Credential, with a signature that proves possession of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedProof {
    /// Presented credential.
    pub credential: Credential,
    /// SignatureScheme of TLS 1.3 (RFC 8446 section 4.2.3).
    pub scheme: u16,
    /// Signature.
    pub signature: Vec<u8>,
}

impl SignedProof {
    /// Maximum length of a proof in bytes.
    pub const LEN_MAX: usize = 16 << 10;
    const SIGNATURE_MAX: usize = 2048;
    const NAME: &str = "AUTH proof";
    const HEAD: usize = 6;

    /// Encodes the proof.
    pub fn encode(&self) -> Vec<u8> {
        let credential = self.credential.bytes();
        let mut out = vec![0; Self::HEAD];
        out[..2].copy_from_slice(&credential[..2]);
        put(&mut out, 2, self.scheme.to_le_bytes());
        let len = u16::try_from(self.signature.len()).unwrap_or(u16::MAX);
        put(&mut out, 4, len.to_le_bytes());
        out.extend(&credential[2..]);
        out.extend(&self.signature);
        out
    }

    /// Reads a proof at the start of `bytes`.
    ///
    /// # Errors
    /// Input that is too short or too long, an unknown kind, or a number of keys or certificates
    /// that does not match the kind.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let head: &[u8; Self::HEAD] = fixed(Self::NAME, bytes)?;
        let kind = CredentialKind::from_wire(head[0]).ok_or_else(|| {
            let expected = "1 (a raw key) or 2 (certificates)";
            WireError::value(Self::NAME, 0, "kind", u64::from(head[0]), expected)
        })?;
        let count = usize::from(head[1]);
        let (max, expected) = match kind {
            CredentialKind::RawKey => (1, "1 key"),
            CredentialKind::Certificates => (Credential::CHAIN_MAX, "1 to 8 certificates"),
        };
        if count == 0 || count > max {
            return Err(WireError::value(Self::NAME, 1, "count", count as u64, expected));
        }
        let mut at = Self::HEAD;
        let mut take = |len: usize| {
            let short = WireError::short(Self::NAME, at + len, bytes.len());
            let taken = bytes.get(at..at + len).ok_or(short)?;
            at += len;
            Ok::<_, WireError>(taken)
        };
        let mut chain = Vec::with_capacity(count);
        for _ in 0..count {
            let len = usize::from(u16_at(take(2)?, 0));
            chain.push(take(len)?.to_vec());
        }
        let len = usize::from(u16_at(head, 4));
        if len > Self::SIGNATURE_MAX {
            return Err(WireError::value(Self::NAME, 4, "signature", len as u64, "2048 bytes"));
        }
        let signature = take(len)?.to_vec();
        if at > Self::LEN_MAX {
            return Err(WireError::value(Self::NAME, 0, "length", at as u64, "16384 bytes"));
        }
        Ok(Self { credential: Credential { kind, chain }, scheme: u16_at(head, 2), signature })
    }
}

/// CHALLENGE_RSP: the server's nonce and its proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChallengeRsp {
    /// [`AUTH_VERSION`].
    pub version: u16,
    /// Random bytes from the server.
    pub nonce: [u8; 32],
    /// Proof of the server's identity.
    pub proof: SignedProof,
}

impl ChallengeRsp {
    /// Minimum space that a client must provide for the answer.
    pub const ROOM_MIN: usize = 512;
    /// Maximum length of the answer.
    pub const LEN_MAX: usize = Self::HEAD + SignedProof::LEN_MAX;
    const NAME: &str = "CHALLENGE_RSP";
    const HEAD: usize = 40;
    const EXPECTED: (u16, &str) = (Challenge::TYPE, "0x8003 (CHALLENGE)");

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; Self::HEAD];
        put(&mut out, 0, Challenge::TYPE.to_le_bytes());
        put(&mut out, 2, self.version.to_le_bytes());
        put(&mut out, 8, self.nonce);
        out.extend(self.proof.encode());
        out
    }

    /// Reads the message. The caller must validate the version.
    ///
    /// # Errors
    /// A message that is too short, a wrong type, or an invalid proof.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let head: &[u8; Self::HEAD] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, head, Self::EXPECTED)?;
        let proof = SignedProof::decode(&bytes[Self::HEAD..])?;
        Ok(Self { version: u16_at(head, 2), nonce: super::bytes::take(head, 8), proof })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proof(kind: CredentialKind, lens: &[usize]) -> SignedProof {
        let chain = lens.iter().map(|len| vec![7; *len]).collect();
        SignedProof {
            credential: Credential { kind, chain },
            scheme: 0x0807,
            signature: vec![9; 64],
        }
    }

    #[test]
    fn proofs_round_trip_and_truncated_ones_are_refused() {
        for proof in [
            proof(CredentialKind::RawKey, &[44]),
            proof(CredentialKind::Certificates, &[700, 0, 800]),
            proof(CredentialKind::Certificates, &[1; Credential::CHAIN_MAX]),
        ] {
            let rsp = ChallengeRsp { version: 1, nonce: [5; 32], proof };
            let mut bytes = rsp.encode();
            for len in 0..bytes.len() {
                assert!(ChallengeRsp::decode(&bytes[..len]).is_err(), "{len} bytes");
            }
            bytes.extend([0xee; 9]);
            assert_eq!(ChallengeRsp::decode(&bytes), Ok(rsp));
        }
    }

    #[test]
    fn a_proof_is_validated() {
        let good = proof(CredentialKind::Certificates, &[10]).encode();
        let fault = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            SignedProof::decode(&bytes).map_err(|error| error.at)
        };
        assert_eq!(fault(0, 0), Err(0), "kind");
        assert_eq!(fault(0, 3), Err(0), "kind");
        assert_eq!(fault(1, 0), Err(1), "no certificate");
        assert_eq!(fault(1, 9), Err(1), "too many");
        assert_eq!(fault(1, 2).unwrap_err(), good.len(), "one that is not there");
        assert_eq!(fault(5, 0xff), Err(4), "a huge signature");
        assert_eq!(fault(7, 0xff).unwrap_err(), good.len(), "a certificate beyond the end");
        let keys = proof(CredentialKind::RawKey, &[1, 1]).encode();
        assert_eq!(SignedProof::decode(&keys).map_err(|error| error.at), Err(1), "two keys");
        let large = proof(CredentialKind::Certificates, &[9000, 9000]).encode();
        assert_eq!(SignedProof::decode(&large).map_err(|error| error.at), Err(0), "too long");
    }

    #[test]
    fn credential_kinds_are_distinguished() {
        let one = proof(CredentialKind::Certificates, &[10]).credential;
        let two = proof(CredentialKind::Certificates, &[4, 4]).credential;
        let key = Credential { kind: CredentialKind::RawKey, ..one.clone() };
        assert_ne!(one.bytes(), two.bytes());
        assert_ne!(one.bytes(), key.bytes());
    }
}
