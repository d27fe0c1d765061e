//! Explanations of TLS errors: what failed, at which end, and what to do.

use rustls::{AlertDescription, CertificateError, Error, OtherError, PeerIncompatible};

use super::keys::PublicKey;
use super::raw::UnknownKey;
use crate::fabric::peer::ProofError;

/// The client's certificate was verified, but does not identify the client.
pub(super) const NO_NAME: &str = "the client's certificate has no usable name; the name must be a \
                                  DNS name, URI or common name; if its CAs have name \
                                  constraints, these must cover this form of name";
/// Reason why the peer rejected a key.
const UNKNOWN: &str = "our key is not known to the peer";
/// One end uses keys and the other certificates, or the ends have no cipher in common.
const NO_COMMON_KIND: &str = "the two ends have no cipher or kind of certificate in common";

/// Describes a handshake error for an end that uses raw keys or certificates.
pub(super) fn error_text(error: &Error, raw_keys: bool) -> String {
    match error {
        Error::AlertReceived(alert) => alert_text(*alert, raw_keys, None),
        Error::InvalidCertificate(CertificateError::Other(OtherError(why)))
            if why.downcast_ref::<UnknownKey>().is_some() =>
        {
            why.to_string()
        }
        Error::InvalidCertificate(why) => format!("the peer's certificate {}", certificate(why)),
        Error::InvalidCertRevocationList(why) => {
            format!("our ca-crl.pem cannot be used: {}", words(&format!("{why:?}")))
        }
        Error::InvalidMessage(_) => "the peer does not speak TLS at all".into(),
        Error::NoCertificatesPresented => "the peer presented no certificate or key".into(),
        Error::PeerIncompatible(
            PeerIncompatible::IncorrectCertificateTypeExtension
            | PeerIncompatible::UnsolicitedCertificateTypeExtension,
        ) => NO_COMMON_KIND.into(),
        Error::PeerIncompatible(why) => {
            format!("the peer is not compatible: {}", words(&format!("{why:?}")))
        }
        error => error.to_string(),
    }
}

impl ProofError {
    /// Creates the proof error for a handshake error at an end that uses certificates.
    #[must_use]
    pub fn with_certificates(error: &Error) -> Self {
        Self::new(kind(error), error_text(error, false))
    }
}

impl From<Error> for ProofError {
    fn from(error: Error) -> Self {
        Self::new(kind(&error), error_text(&error, true))
    }
}

/// Returns the kind of a failure, without any text that the peer supplied.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::AlertReceived(alert) => {
            known_alert(*alert, true).unwrap_or("the peer sent an alert")
        }
        Error::InvalidCertificate(why) => match why {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the certificate has expired"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the certificate is not valid yet"
            }
            CertificateError::Revoked => "the certificate or its CA is revoked",
            CertificateError::UnknownIssuer => "the CA is not known",
            CertificateError::BadSignature => "the CA has not signed the certificate",
            CertificateError::UnknownRevocationStatus => "the CA has no revocation list",
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                "the certificate is for another use"
            }
            CertificateError::Other(OtherError(why)) if why.is::<UnknownKey>() => {
                "the key is not known"
            }
            _ => "the certificate is refused",
        },
        Error::InvalidCertRevocationList(_) => "the revocation list cannot be used",
        Error::InvalidMessage(_) => "the peer does not speak TLS",
        Error::NoCertificatesPresented => "no credential was presented",
        Error::PeerIncompatible(_) => "the peer is not compatible",
        Error::PeerMisbehaved(_) | Error::InappropriateMessage { .. } => {
            "the peer violated the TLS protocol"
        }
        _ => "TLS failed",
    }
}

/// Returns a name in a certificate without its type: rustls formats it as `DnsName("host")`.
fn bare(name: &str) -> &str {
    let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
    inner.unwrap_or(name).trim_matches('"')
}

/// Splits an identifier such as `NoKxGroupsInCommon` into words.
fn words(identifier: &str) -> String {
    let mut text = String::new();
    for c in identifier.chars() {
        if c.is_ascii_uppercase() && !text.is_empty() {
            text.push(' ');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}

fn certificate(error: &CertificateError) -> String {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has expired".into(),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "is not valid yet".into()
        }
        CertificateError::Revoked => {
            "is revoked by ca-crl.pem, or a CA in its chain is revoked".into()
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "is not signed by the CA in ca-cert.pem".into()
        }
        CertificateError::UnknownRevocationStatus => {
            "is signed by a CA that has no list in ca-crl.pem".into()
        }
        CertificateError::NotValidForNameContext { expected, presented } => {
            let names: Vec<&str> = presented.iter().map(|name| bare(name)).collect();
            let has = if names.is_empty() { "no name".into() } else { names.join(", ") };
            format!("is not for {}; it has {has}", expected.to_str())
        }
        CertificateError::NotValidForName => "is not for this server's name".into(),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "is not for this use (extended key usage)".into()
        }
        CertificateError::Other(OtherError(why)) => match why.downcast_ref() {
            Some(webpki::Error::CaUsedAsEndEntity) => {
                "is a CA certificate (basic constraints), not a client or server certificate".into()
            }
            Some(why) => format!("is refused: {}", words(&format!("{why:?}"))),
            None => format!("is refused: {why}"),
        },
        error => format!("is refused: {error}"),
    }
}

/// Rewords a handshake error for the server, if the error is about a client.
pub(super) fn at_server(error: ProofError, raw_keys: bool) -> ProofError {
    match (error.kind() == UNKNOWN, raw_keys) {
        (false, _) => error,
        (true, true) => "the client's server-key does not match the key of this server".into(),
        (true, false) => "the client does not accept the certificate of this server".into(),
    }
}

/// Describes an alert from the peer for an end that uses raw keys or certificates. For raw keys,
/// includes our own key, if known.
pub(crate) fn alert_text(
    alert: AlertDescription,
    raw_keys: bool,
    own: Option<PublicKey>,
) -> String {
    match (known_alert(alert, raw_keys), own) {
        (Some(UNKNOWN), Some(own)) => format!("{UNKNOWN} ({own}, {})", own.fingerprint()),
        (Some(known), _) => known.into(),
        (None, _) => format!("the peer sent the alert {alert:?}"),
    }
}

fn known_alert(alert: AlertDescription, raw_keys: bool) -> Option<&'static str> {
    let what = match alert {
        AlertDescription::CertificateExpired => "our certificate has expired, or is not valid yet",
        AlertDescription::CertificateRevoked => {
            "our certificate is revoked, or a CA in its chain is revoked"
        }
        // `DecryptError` is sent if a different CA with the same name signed the certificate.
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "our certificate is not signed by the CA that the peer trusts"
        }
        AlertDescription::CertificateRequired => "the peer requires a certificate or key",
        // `AccessDenied` is sent by peers of version 0.1.
        AlertDescription::AccessDenied | AlertDescription::CertificateUnknown if raw_keys => {
            UNKNOWN
        }
        AlertDescription::UnsupportedCertificate => {
            "our certificate is not for this use (extended key usage)"
        }
        AlertDescription::BadCertificate
        | AlertDescription::AccessDenied
        | AlertDescription::CertificateUnknown => "the peer does not accept our certificate",
        AlertDescription::ProtocolVersion => "the peer does not speak TLS 1.3",
        AlertDescription::NoApplicationProtocol => "the peer does not speak RTRS (ALPN rtrs/1)",
        AlertDescription::HandshakeFailure => NO_COMMON_KIND,
        _ => return None,
    };
    Some(what)
}

/// Returns advice for a failed TLS connection; `text` is the reason returned by the connection
/// attempt.
#[must_use]
pub fn hint(text: &str) -> Option<&'static str> {
    const HINTS: [(&str, &str); 20] = [
        (
            "our certificate has expired",
            "renew client-cert.pem, and check the clocks of both hosts",
        ),
        (
            "our certificate is not for this use",
            "issue client-cert.pem with the extended key usage clientAuth \
             (certtool: tls_www_client)",
        ),
        (
            "is not for this use",
            "issue server-cert.pem at the server with the extended key usage serverAuth \
             (certtool: tls_www_server)",
        ),
        ("our certificate is revoked", "get a new client-cert.pem and client-key.pem"),
        ("by the CA that the peer trusts", "have the server's CA sign client-cert.pem"),
        ("requires a certificate or key", "set tls-dir, or key-file and server-key"),
        (
            "not known to the peer",
            "add what `rtrs-client key show` prints to the server's clients-file, and reload it",
        ),
        ("has expired", "renew server-cert.pem at the server, and check the clocks of both hosts"),
        ("is not valid yet", "check the clocks of both hosts"),
        ("revoked by ca-crl.pem", "get a new server-cert.pem for the server"),
        (
            "has no list in ca-crl.pem",
            "append that CA's revocation list to ca-crl.pem (the list may be empty)",
        ),
        (
            "ca-crl.pem cannot be used",
            "replace ca-crl.pem with a list signed by the CA in ca-cert.pem (crl_signing_key)",
        ),
        (
            "does not accept our certificate",
            "use a client-cert.pem signed by the server's CA that is not a CA certificate; \
             the server's log has the reason",
        ),
        ("by the CA in ca-cert.pem", "use the CA of the server as ca-cert.pem"),
        ("certificate is not for ", "connect by a name in the certificate, or set tls-hostname"),
        (
            "key is not known here",
            "compare server-key with what `rtrs-server key show` prints at the server",
        ),
        (
            "kind of certificate in common",
            "use certificates (tls-dir) at both ends, or keys (key-file) at both",
        ),
        (
            "does not speak TLS at all",
            "the portal is not tls://: use tcp://, or make the server listen on tls://",
        ),
        (
            "during the TLS handshake",
            "check that the server listens there on tls://, and that both ends use certificates \
             (tls-dir) or both use keys (key-file); see the server's log",
        ),
        ("use tls://", "connect with tls://"),
    ];
    HINTS.iter().find(|(part, _)| text.contains(part)).map(|(_, hint)| *hint)
}
