//! Checks of an end's own files: whether its certificate is usable, when it expires, and how two
//! sets of files differ.
//!
//! As in qemu, a certificate that every peer would refuse is refused here, with the file's name: a
//! certificate that has expired, is not valid yet, or is for the other end (extended key usage).
//! Whether its CA is in `ca-cert.pem` is not checked: each end may have a CA of its own.

use std::path::Path;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use super::config::{TlsClientConfig, TlsServerConfig};
use super::dates::{DAY, time};
use super::error::TlsConfigError as Error;
use super::keys::{Clients, PublicKey};

/// Number of days before a certificate's expiry at which warnings begin.
pub const EXPIRES_SOON_DAYS: u64 = 14;
/// Message for a reload that leaves no revocation list.
pub const NO_LIST: &str = "ca-crl.pem: no certificate is revoked anymore";
/// Offset beyond the expiry of every certificate.
const FAR: Duration = Duration::from_secs(1 << 40);

/// Purpose of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Server,
    Client,
}

impl TlsServerConfig {
    /// Refuses a certificate that no client would accept now. Returns a warning if it expires soon.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn check_own(&self) -> Result<Option<String>, Error> {
        let Some((certificate, path)) = &self.sources.certificate else { return Ok(None) };
        check_purpose(certificate, path, End::Server)?;
        check_dates(certificate, path, End::Server, UnixTime::now())
    }

    /// Returns when this end's certificate expires, in seconds since 1970. None if it has no
    /// certificate.
    #[must_use]
    pub fn expires(&self) -> Option<u64> {
        let (certificate, _) = self.sources.certificate.as_ref()?;
        match verified(certificate, End::Server, UnixTime::since_unix_epoch(FAR)) {
            Some(webpki::Error::CertExpired { not_after, .. }) => Some(not_after.as_secs()),
            _ => None,
        }
    }

    /// Returns warnings for the operator about the files that define trust.
    #[must_use]
    pub fn file_warnings(&self) -> Vec<String> {
        self.sources.warnings(UnixTime::now())
    }

    /// Returns a message for each revocation list that is older than the previous list.
    #[must_use]
    pub fn older_lists_than(&self, before: &Self) -> Vec<String> {
        self.sources.lists.older_than(&before.sources.lists)
    }

    /// Checks like [`Self::check_own`], for files that are reread. The certificate already in use
    /// is not refused, because otherwise no client could be revoked once that certificate has
    /// expired. Returns the problem with that certificate, if there is one.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn check_renewed(&self, before: &Self) -> Result<Option<String>, Error> {
        let certificate = |of: &Self| of.sources.certificate.clone().map(|(it, _)| it);
        match self.check_own() {
            Err(error) if certificate(self) == certificate(before) => Ok(Some(format!(
                "{}: the certificate is still in use, and clients refuse it; all other changes \
                 take effect",
                error.chain()
            ))),
            checked => checked.map(|_| None),
        }
    }

    /// Returns false if no client can have this name, because no key is listed for it.
    #[must_use]
    pub fn may_know(&self, name: &str) -> bool {
        self.clients.as_ref().is_none_or(|clients| clients.has_name(name))
    }

    /// Returns true if clients are identified by their keys and no client is listed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.clients.as_ref().is_some_and(|clients| clients.is_empty())
    }

    /// Returns a message for each difference from the previous keys or certificates.
    #[must_use]
    pub fn changes_since(&self, before: &Self) -> Vec<String> {
        let (now, then) = (&self.sources, &before.sources);
        let pairs = now.files.iter().zip(&then.files);
        let changed = pairs.filter(|(now, then)| now != then);
        let unlisted = now.lists.is_empty() && !then.lists.is_empty();
        let text = |name: &str| match name {
            "ca-crl.pem" if unlisted => NO_LIST.to_owned(),
            name => name.to_owned(),
        };
        let mut changes: Vec<String> = changed.map(|(now, _)| text(now.0)).collect();
        if now.key != then.key {
            changes.push("key-file".to_owned());
        }
        if let (Some(now), Some(then)) = (&self.clients, &before.clients) {
            changes.extend(now.changes_since(then));
        }
        changes
    }
}

impl TlsClientConfig {
    /// Refuses a certificate that no server would accept now. Returns warnings that it expires soon
    /// or that a revocation list has expired.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn check_now(&self) -> Result<Vec<String>, Error> {
        let now = UnixTime::now();
        let mut warnings = self.sources.warnings(now);
        if let Some((certificate, path)) = &self.sources.certificate {
            warnings.extend(check_dates(certificate, path, End::Client, now)?);
        }
        Ok(warnings)
    }

    /// Refuses a certificate that no server would ever accept from a client.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn check_own(&self) -> Result<(), Error> {
        let Some((certificate, path)) = &self.sources.certificate else { return Ok(()) };
        check_purpose(certificate, path, End::Client)?;
        if !self.sources.is_named {
            let why = "the certificate has no usable name; issue one with a DNS name, a URI or a \
                       common name, or with a DNS name if a CA of its chain has name constraints";
            return Err(Error::Content { path: path.clone(), why: why.into() });
        }
        Ok(())
    }
}

impl Clients {
    fn changes_since(&self, before: &Self) -> Vec<String> {
        let line = |what: &str, name: &str, key: &PublicKey| {
            format!("clients-file: {what} {name} ({})", key.fingerprint())
        };
        let missing = |from: &Self, what: &str, other: &Self| -> Vec<String> {
            let all = from.entries();
            let lacks = all.filter(|(key, name)| other.name(key).as_ref() != Some(name));
            lacks.map(|(key, name)| line(what, name, key)).collect()
        };
        let mut changes = missing(before, "removed", self);
        changes.extend(missing(self, "added", before));
        changes
    }
}

/// Refuses a certificate that is valid only for the other end.
pub(super) fn check_purpose(
    certificate: &CertificateDer<'_>,
    path: &Path,
    end: End,
) -> Result<(), Error> {
    let (peers, usage, certtool) = match end {
        End::Server => ("servers", "serverAuth", "tls_www_server"),
        End::Client => ("clients", "clientAuth", "tls_www_client"),
    };
    match verified(certificate, end, UnixTime::now()) {
        // GnuTLS accepts such a certificate from a server.
        Some(webpki::Error::CaUsedAsEndEntity) if end == End::Client => Err(Error::Content {
            path: path.into(),
            why:
                "the certificate is a CA certificate (basic constraints), which no server accepts \
                 from a client; create a certificate signed by the server's CA"
                    .into(),
        }),
        Some(webpki::Error::RequiredEkuNotFoundContext(_)) => Err(Error::Content {
            path: path.into(),
            why: format!(
                "the certificate is not for {peers} (extended key usage); create one with {usage} \
                 (certtool: {certtool})"
            ),
        }),
        _ => Ok(()),
    }
}

/// Refuses a certificate that has expired or is not valid yet. Returns a warning if it expires
/// soon.
fn check_dates(
    certificate: &CertificateDer<'_>,
    path: &Path,
    end: End,
    now: UnixTime,
) -> Result<Option<String>, Error> {
    let refuse = |why: String| Err(Error::Content { path: path.into(), why });
    let soon = Duration::from_secs(now.as_secs().saturating_add(EXPIRES_SOON_DAYS * DAY));
    let at = |time| verified(certificate, end, time);
    match (at(now), at(UnixTime::since_unix_epoch(soon))) {
        (Some(webpki::Error::CertExpired { not_after, .. }), _) => {
            refuse(format!("the certificate expired on {}; renew it", time(not_after)))
        }
        (Some(webpki::Error::CertNotValidYet { not_before, .. }), _) => refuse(format!(
            "the certificate is not valid before {}, and the current time is {}; check this host's \
             clock",
            time(not_before),
            time(now)
        )),
        (_, Some(webpki::Error::CertExpired { not_after, .. })) => Ok(Some(format!(
            "the certificate {} expires on {}; renew it before that",
            path.display(),
            time(not_after)
        ))),
        _ => Ok(None),
    }
}

/// Returns the problem with a certificate, regardless of its issuer.
fn verified(certificate: &CertificateDer<'_>, end: End, at: UnixTime) -> Option<webpki::Error> {
    let usage = match end {
        End::Server => KeyUsage::server_auth(),
        End::Client => KeyUsage::client_auth(),
    };
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    // Properties that do not depend on the issuer are checked first. Without any issuer,
    // verification ends there.
    parsed.verify_for_usage(&[], &[], &[], at, usage, None, None).err()
}
