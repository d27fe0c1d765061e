//! Credential that an end presents in proofs without TLS, and its private key.

use std::fmt;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{Error, SignatureScheme};
use sha2::{Digest, Sha256};

use crate::fabric::peer::ProofError;
use crate::wire::{Credential, CredentialKind, SignedProof};

/// Signature schemes of proofs that TLS 1.3 permits and this implementation supports, best first.
pub(super) const SCHEMES: [SignatureScheme; 6] = [
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
];

/// Credential that an end presents, and its private key.
#[derive(Clone)]
pub(super) struct OwnCredential {
    shown: Arc<Credential>,
    key: Arc<CertifiedKey>,
}

impl fmt::Debug for OwnCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnCredential").field("kind", &self.shown.kind).finish_non_exhaustive()
    }
}

impl OwnCredential {
    /// Creates the credential for a raw key.
    pub(super) fn raw_key(key: &Arc<CertifiedKey>) -> Self {
        Self::new(CredentialKind::RawKey, Arc::clone(key))
    }

    /// Creates the credential for a certificate chain.
    pub(super) fn certificates(
        chain: &[CertificateDer<'static>],
        key: &PrivateKeyDer<'static>,
        provider: &CryptoProvider,
    ) -> Result<Self, Error> {
        let key = CertifiedKey::from_der(chain.to_vec(), key.clone_key(), provider)?;
        Ok(Self::new(CredentialKind::Certificates, Arc::new(key)))
    }

    /// Returns the kind of the credential.
    pub(super) fn kind(&self) -> CredentialKind {
        self.shown.kind
    }

    fn new(kind: CredentialKind, key: Arc<CertifiedKey>) -> Self {
        let chain = key.cert.iter().map(|one| one.to_vec()).collect();
        Self { shown: Arc::new(Credential { kind, chain }), key }
    }

    /// Returns the hash that announces the credential.
    pub(super) fn hash(&self) -> [u8; 32] {
        hash(&self.shown)
    }

    /// Signs a message, and returns the proof with the credential.
    pub(super) fn sign(&self, message: &[u8]) -> Result<SignedProof, ProofError> {
        let signer = self.key.key.choose_scheme(&SCHEMES);
        let Some(signer) = signer else {
            return Err(ProofError::from("our key supports no signature scheme of TLS 1.3"));
        };
        let signature = signer.sign(message)?;
        let credential = Credential::clone(&self.shown);
        let proof = SignedProof { credential, scheme: signer.scheme().into(), signature };
        if proof.encode().len() > SignedProof::LEN_MAX
            || proof.credential.chain.len() > Credential::CHAIN_MAX
        {
            let why = "our certificate chain is too long (max. 8 certificates, 16 KiB)";
            return Err(ProofError::from(why));
        }
        Ok(proof)
    }
}

/// Returns the hash that announces a credential.
pub(super) fn hash(credential: &Credential) -> [u8; 32] {
    Sha256::digest(credential.bytes()).into()
}
