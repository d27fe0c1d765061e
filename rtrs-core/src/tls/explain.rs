//! Errors of TLS for people: what failed, at which end, and what to do.

use rustls::{AlertDescription, CertificateError, Error};

/// What a handshake's error means.
#[must_use]
pub fn error_text(error: &Error) -> String {
    match error {
        Error::AlertReceived(alert) => alert_text(*alert),
        Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure) => {
            "the peer's key is not known here".into()
        }
        Error::InvalidCertificate(why) => format!("the peer's certificate {}", certificate(why)),
        Error::InvalidMessage(_) => "the peer does not speak it".into(),
        Error::NoCertificatesPresented => "the peer has shown no certificate or key".into(),
        Error::PeerIncompatible(why) => format!("the peer is not compatible: {why:?}"),
        error => error.to_string(),
    }
}

fn certificate(error: &CertificateError) -> String {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has expired".into(),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "is not valid yet".into()
        }
        CertificateError::Revoked => "is revoked by ca-crl.pem".into(),
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "is not signed by the CA in ca-cert.pem".into()
        }
        CertificateError::UnknownRevocationStatus => {
            "is signed by a CA that has no list in ca-crl.pem".into()
        }
        CertificateError::NotValidForNameContext { expected, presented } => {
            let has = if presented.is_empty() { "no name".into() } else { presented.join(", ") };
            format!("is not for {}; it has {has}", expected.to_str())
        }
        CertificateError::NotValidForName => "is not for this server's name".into(),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "is not for this use (extended key usage)".into()
        }
        error => format!("is refused: {error}"),
    }
}

/// What an alert of the peer means.
pub(crate) fn alert_text(alert: AlertDescription) -> String {
    let what = match alert {
        AlertDescription::CertificateExpired => "our certificate has expired, or is not valid yet",
        AlertDescription::CertificateRevoked => "our certificate is revoked",
        // The second is the answer to a certificate of another CA with the same name.
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "our certificate is not signed by the CA that the peer trusts"
        }
        AlertDescription::CertificateRequired => "the peer wants a certificate or key of ours",
        AlertDescription::AccessDenied => "our key is not known to the peer",
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown => "the peer does not accept our certificate",
        AlertDescription::ProtocolVersion => "the peer does not speak TLS 1.3",
        AlertDescription::NoApplicationProtocol => "the peer does not speak RTRS (ALPN rtrs/1)",
        AlertDescription::HandshakeFailure => {
            "there is no cipher or kind of certificate that both ends have"
        }
        other => return format!("the peer sent the alert {other:?}"),
    };
    what.into()
}

/// What to do about a failed TLS connection; `text` is the reason that a connection attempt gave.
#[must_use]
pub fn hint(text: &str) -> Option<&'static str> {
    const HINTS: [(&str, &str); 15] = [
        (
            "our certificate has expired",
            "renew client-cert.pem, and check the clocks of both hosts",
        ),
        ("our certificate is revoked", "get a new client-cert.pem and client-key.pem"),
        ("by the CA that the peer trusts", "use the CA of the server for client-cert.pem"),
        ("wants a certificate or key", "set tls-dir, or key-file and server-key"),
        ("not known to the peer", "add this client's `key show` to the server's clients-file"),
        ("has expired", "renew server-cert.pem at the server, and check the clocks of both hosts"),
        ("is not valid yet", "check the clocks of both hosts"),
        ("revoked by ca-crl.pem", "get a new server-cert.pem for the server"),
        ("by the CA in ca-cert.pem", "use the CA of the server as ca-cert.pem"),
        ("certificate is not for ", "connect by a name in the certificate, or set tls-hostname"),
        ("key is not known here", "compare server-key with the server's `key show`"),
        ("kind of certificate that both ends", "use certificates at both ends, or keys at both"),
        (
            "does not speak it",
            "the portal is not tls://: use tcp://, or make the server listen on tls://",
        ),
        ("during the TLS handshake", "check that the server listens there on tls://, and its log"),
        ("use tls://", "connect with tls://"),
    ];
    HINTS.iter().find(|(part, _)| text.contains(part)).map(|(_, hint)| *hint)
}
