//! Files from which a configuration was created.

use std::path::PathBuf;

use rustls::pki_types::{CertificateDer, UnixTime};
use sha2::{Digest, Sha256};

use super::files::Files;
use super::keys::PublicKey;
use super::lists::Lists;
use super::names::name_of;

/// Files from which a configuration was created.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    /// Own certificate, with the path of its file.
    pub(super) certificate: Option<(CertificateDer<'static>, PathBuf)>,
    /// Whether the local chain yields a name for the certificate.
    pub(super) is_named: bool,
    /// Names of the files, and hashes of their contents.
    pub(super) files: Vec<(&'static str, [u8; 32])>,
    pub(super) lists: Lists,
    /// Warnings about files that other users can change.
    loose: Vec<String>,
    /// Own key, if there are no certificates.
    pub(super) key: Option<PublicKey>,
}

impl Sources {
    pub(super) fn certificates(files: &Files, lists: Lists) -> Self {
        let certificate = files.chain.first().cloned();
        let hash = |parts: &mut dyn Iterator<Item = &[u8]>| -> [u8; 32] {
            let mut hash = Sha256::new();
            parts.for_each(|part| hash.update(part));
            hash.finalize().into()
        };
        Self {
            certificate: certificate.map(|certificate| (certificate, files.chain_path.clone())),
            // The CAs of `ca-cert.pem` may be only the CAs of the other end.
            is_named: name_of(&files.chain, &[]).is_some(),
            files: vec![
                ("ca-cert.pem", hash(&mut files.ca.iter().map(AsRef::as_ref))),
                ("ca-crl.pem", hash(&mut files.crl.iter().map(AsRef::as_ref))),
                ("server-cert.pem", hash(&mut files.chain.iter().map(AsRef::as_ref))),
                ("server-key.pem", hash(&mut std::iter::once(files.key.secret_der()))),
            ],
            lists,
            loose: files.loose.clone(),
            key: None,
        }
    }

    pub(super) fn raw_key(key: PublicKey) -> Self {
        Self { key: Some(key), ..Self::default() }
    }

    pub(super) fn warnings(&self, now: UnixTime) -> Vec<String> {
        let mut all = self.lists.warnings(now);
        all.extend(self.loose.iter().cloned());
        all
    }
}
