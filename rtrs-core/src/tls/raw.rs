//! Checks of raw public keys: the server's key against the pins, a client's key against the list.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme,
};

use super::keys::{Clients, PublicKey};

/// Keys by which peers are identified.
#[derive(Debug)]
pub(super) enum RawKeys {
    /// Pins: the server must have one of these keys.
    Pins(Vec<PublicKey>),
    /// List of clients: a client must have one of these keys.
    Clients(Clients),
}

/// Verifier of peers' [`RawKeys`], with its cryptography provider.
#[derive(Debug)]
pub(super) struct RawVerifier {
    pub(super) keys: RawKeys,
    pub(super) provider: Arc<CryptoProvider>,
}

/// Error for a peer with an unknown key, which is shown for comparison.
#[derive(Debug)]
pub(super) struct UnknownKey {
    /// None if the peer's key is not an Ed25519 key.
    key: Option<PublicKey>,
    /// Keys that would have been accepted.
    pins: Vec<PublicKey>,
}

impl UnknownKey {
    fn error(key: Option<PublicKey>, keys: &RawKeys) -> Error {
        let pins = match keys {
            RawKeys::Pins(pins) => pins.clone(),
            RawKeys::Clients(_) => Vec::new(),
        };
        CertificateError::Other(OtherError(Arc::new(Self { key, pins }))).into()
    }
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key.map_or_else(|| "not an Ed25519 key".into(), |key| key.fingerprint());
        let pins: Vec<String> = self.pins.iter().map(PublicKey::fingerprint).collect();
        match &pins[..] {
            [] => write!(f, "the peer's key is not known here ({key})"),
            pins => write!(
                f,
                "the peer's key is not known here: got {key}, expected {}",
                pins.join(" or ")
            ),
        }
    }
}

impl std::error::Error for UnknownKey {}

impl RawVerifier {
    fn check(&self, spki: &[u8]) -> Result<(), Error> {
        let key = PublicKey::from_spki(spki);
        let known = key.is_some_and(|key| match &self.keys {
            RawKeys::Pins(pins) => pins.contains(&key),
            RawKeys::Clients(clients) => clients.name(&key).is_some(),
        });
        if known { Ok(()) } else { Err(UnknownKey::error(key, &self.keys)) }
    }

    fn check_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
    }
}

/// Signature methods that both verifier traits require.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _cert: &CertificateDer<'_>,
            _dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("TLS 1.2 is not used".into()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.check_signature(message, cert, dss)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for RawVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for RawVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    signatures!();
}
