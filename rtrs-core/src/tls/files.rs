//! Reads key, certificate and list files. A file with a secret is refused if other users can access
//! it.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use super::error::TlsConfigError as Error;
use crate::rt::forbid_dumps;

/// Maximum size of a file: enough for a list of ten thousand clients, or a large revocation list.
const FILE_MAX: u64 = 16 << 20;

/// Directory with certificates, under the names that qemu and nbdkit use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsDir(pub PathBuf);

/// Contents of a [`TlsDir`] for one end.
pub(super) struct Files {
    pub(super) ca: Vec<CertificateDer<'static>>,
    pub(super) crl: Vec<CertificateRevocationListDer<'static>>,
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
    /// Paths of the chain and the key.
    pub(super) chain_path: PathBuf,
    pub(super) key_path: PathBuf,
    /// Warnings about files that other users can modify.
    pub(super) loose: Vec<String>,
}

impl TlsDir {
    /// Reads `ca-cert.pem`, `ca-crl.pem` if there is one, `END-cert.pem` and `END-key.pem`.
    pub(super) fn read(&self, end: &str) -> Result<Files, Error> {
        let at = |name: &str| self.0.join(name);
        let chain_path = at(&format!("{end}-cert.pem"));
        let key_path = at(&format!("{end}-key.pem"));
        let crl_path = at("ca-crl.pem");
        let crl = match read(&crl_path) {
            Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Vec::new()
            }
            text => pem(&crl_path, &text?, "a revocation list")?,
        };
        let ca_path = at("ca-cert.pem");
        let ca = pem(&ca_path, &read(&ca_path)?, "a certificate")?;
        let chain = pem(&chain_path, &read(&chain_path)?, "a certificate")?;
        let key = pem(&key_path, &read_secret(&key_path)?, "a private key")?.remove(0);
        let loose = [&ca_path, &crl_path].into_iter().filter_map(|path| writable_by_others(path));
        let loose = loose.collect();
        Ok(Files { ca, crl, chain, key, chain_path, key_path, loose })
    }
}

/// Returns a warning if a file that defines trust can be changed by users other than its owner.
#[must_use]
pub fn writable_by_others(path: &Path) -> Option<String> {
    let mode = std::fs::metadata(path).ok()?.mode() & 0o777;
    let path = path.display();
    (mode & 0o022 != 0).then(|| {
        format!(
            "{path}, which defines trust, is writable by other users (mode {mode:03o}); run chmod \
             go-w {path}"
        )
    })
}

/// Returns all objects of this kind; there must be at least one.
fn pem<T: PemObject>(path: &Path, text: &[u8], what: &'static str) -> Result<Vec<T>, Error> {
    let found = T::pem_slice_iter(text).collect::<Result<Vec<T>, _>>();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(Error::Content {
            path: path.into(),
            why: format!("it does not contain {what} in PEM"),
        }),
        Err(error) => Err(Error::Content { path: path.into(), why: error.to_string() }),
    }
}

/// Reads a file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    read_checked(path, |_| None)
}

/// Reads a file with a secret, which only its owner may be able to access. Disables core dumps of
/// the process, which would contain the secret.
pub(super) fn read_secret(path: &Path) -> Result<Vec<u8>, Error> {
    forbid_dumps().map_err(|source| Error::Read { path: path.into(), source })?;
    let text = read_checked(path, |mode| (mode & 0o077 != 0).then_some(mode & 0o777))?;
    let has = |part: &[u8]| text.windows(part.len()).any(|window| window == part);
    // PKCS#8, and OpenSSL's older format.
    if has(b"BEGIN ENCRYPTED PRIVATE KEY") || has(b"4,ENCRYPTED") {
        let why = "it is encrypted, and a daemon cannot ask for its passphrase; decrypt it, for \
                   example with openssl pkey -in FILE -out NEWFILE";
        return Err(Error::Content { path: path.into(), why: why.into() });
    }
    Ok(text)
}

fn read_checked(path: &Path, bad: impl FnOnce(u32) -> Option<u32>) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Read { path: path.into(), source };
    let file = File::open(path).map_err(failed)?;
    // Check the open file, so that it cannot be replaced in between.
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        return Err(Error::Content { path: path.into(), why: "it is not a regular file".into() });
    }
    if let Some(mode) = bad(meta.mode()) {
        return Err(Error::Unsafe { path: path.into(), mode });
    }
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_MAX {
        return Err(Error::Content { path: path.into(), why: "it is larger than 16 MiB".into() });
    }
    Ok(bytes)
}
