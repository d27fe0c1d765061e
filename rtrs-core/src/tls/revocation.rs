//! Certificate verifiers that check every certificate of a chain against the revocation lists.
//!
//! rustls applies one level of strictness to a whole chain, but two are needed. A peer's own
//! certificate is refused if its CA has no list. An intermediate CA is refused only if a list
//! revokes it: its issuer may well have no list, which causes a warning when the files are read. So
//! a chain with intermediates is verified twice. Both passes agree on the list of the peer's own
//! certificate, because only one key has signed that certificate.
//!
//! A CA in `ca-cert.pem` is trusted regardless of the chain, so lists never apply to it during
//! verification; `lists.rs` finds the CAs that other CAs in the file have revoked.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::VerifierBuilderError,
};

/// Verifier of a peer's own certificate, and verifier of the CAs between that certificate and the
/// root.
#[derive(Debug)]
struct Verifiers<V: ?Sized> {
    leaf: Arc<V>,
    chain: Arc<V>,
}

/// Creates the verifier for client certificates.
pub(super) fn client_verifier(
    roots: &Arc<RootCertStore>,
    lists: &[CertificateRevocationListDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, VerifierBuilderError> {
    let builder = || {
        WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider))
            .with_crls(lists.to_vec())
    };
    let leaf: Arc<dyn ClientCertVerifier> = builder().only_check_end_entity_revocation().build()?;
    if lists.is_empty() {
        return Ok(leaf);
    }
    let chain = builder().allow_unknown_revocation_status().build()?;
    Ok(Arc::new(Verifiers { leaf, chain }))
}

/// Creates the verifier for server certificates.
pub(super) fn server_verifier(
    roots: &Arc<RootCertStore>,
    lists: &[CertificateRevocationListDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ServerCertVerifier>, VerifierBuilderError> {
    let builder = || {
        WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider))
            .with_crls(lists.to_vec())
    };
    let leaf: Arc<dyn ServerCertVerifier> = builder().only_check_end_entity_revocation().build()?;
    if lists.is_empty() {
        return Ok(leaf);
    }
    let chain: Arc<dyn ServerCertVerifier> = builder().allow_unknown_revocation_status().build()?;
    Ok(Arc::new(Verifiers { leaf, chain }))
}

/// Methods that both traits share.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.leaf.verify_tls12_signature(message, cert, dss)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.leaf.verify_tls13_signature(message, cert, dss)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.leaf.supported_verify_schemes()
        }
    };
}

impl ClientCertVerifier for Verifiers<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.leaf.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.leaf.verify_client_cert(end_entity, intermediates, now)?;
        if !intermediates.is_empty() {
            self.chain.verify_client_cert(end_entity, intermediates, now)?;
        }
        Ok(verified)
    }

    signatures!();
}

impl ServerCertVerifier for Verifiers<dyn ServerCertVerifier> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verify = |verifier: &dyn ServerCertVerifier| {
            let (own, others) = (end_entity, intermediates);
            verifier.verify_server_cert(own, others, server_name, ocsp_response, now)
        };
        let verified = verify(&*self.leaf)?;
        if !intermediates.is_empty() {
            verify(&*self.chain)?;
        }
        Ok(verified)
    }

    signatures!();
}
