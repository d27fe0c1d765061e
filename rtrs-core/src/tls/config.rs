//! rustls configurations of both ends, created from files.

use std::net::IpAddr;
use std::sync::Arc;

use rustls::client::danger::ServerCertVerifier;
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig, ServerConnection, SupportedProtocolVersion,
};

use super::credential::OwnCredential;
use super::error::TlsConfigError as Error;
use super::files::{Files, TlsDir};
use super::keys::{Clients, PrivateKey, PublicKey};
use super::lists::{Lists, is_revoked};
use super::raw::{RawKeys, RawVerifier};
use super::revocation::{client_verifier, server_verifier};
use super::sources::Sources;
use crate::fabric::peer::{PeerIdentity, Who};

/// Protocol name used by both ends (ALPN, RFC 7301).
pub const ALPN: &[u8] = b"rtrs/1";

/// TLS configuration of a server.
#[derive(Clone, Debug)]
pub struct TlsServerConfig {
    pub(super) rustls: Arc<ServerConfig>,
    /// Known clients, if raw keys are used.
    pub(super) clients: Option<Arc<Clients>>,
    /// CAs from `ca-cert.pem`; empty with raw keys.
    roots: Arc<RootCertStore>,
    pub(super) verifier: Arc<dyn ClientCertVerifier>,
    pub(super) own: OwnCredential,
    /// Files from which the configuration was created.
    pub(super) sources: Sources,
    /// Number of this configuration at its endpoint.
    pub(super) generation: u64,
}

/// TLS configuration of a client.
#[derive(Clone, Debug)]
pub struct TlsClientConfig {
    pub(crate) rustls: Arc<ClientConfig>,
    /// Name required in the server's certificate, regardless of the portal.
    pub(super) name: Option<ServerName<'static>>,
    pub(super) verifier: Arc<dyn ServerCertVerifier>,
    pub(super) own: OwnCredential,
    /// Files from which the configuration was created.
    pub(super) sources: Sources,
}

/// Returns the provider with the cipher suites of TLS 1.3, fastest first: the server selects the
/// first of the client's suites that it supports.
pub(super) fn provider() -> Arc<CryptoProvider> {
    use ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let cipher_suites =
        vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    Arc::new(CryptoProvider { cipher_suites, ..ring::default_provider() })
}

/// Returns the provider with the cipher suites of TLS 1.3, followed by those of TLS 1.2.
fn nbd_provider() -> Arc<CryptoProvider> {
    use ring::cipher_suite::{
        TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
        TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    };
    let mut provider = CryptoProvider::clone(&provider());
    provider.cipher_suites.extend([
        TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
        TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
        TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
        TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    ]);
    Arc::new(provider)
}

impl TlsServerConfig {
    /// Creates a configuration with certificates: a client needs a certificate signed by the CA.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn with_certificates(dir: &TlsDir) -> Result<Self, Error> {
        Self::certificates(dir, provider(), &[&TLS13], server)
    }

    /// Creates a configuration with certificates for NBD clients: like
    /// [`with_certificates`](Self::with_certificates), but without a protocol name, and with TLS
    /// 1.2 as well, because nbd-client 3.24 supports nothing newer.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn for_nbd(dir: &TlsDir) -> Result<Self, Error> {
        Self::certificates(dir, nbd_provider(), &[&TLS13, &TLS12], |config| {
            let mut config = full_handshakes(config);
            // Without this, a TLS 1.2 session is not bound to its handshake (RFC 7627).
            config.require_ems = true;
            config
        })
    }

    fn certificates(
        dir: &TlsDir,
        provider: Arc<CryptoProvider>,
        versions: &[&'static SupportedProtocolVersion],
        finish: impl FnOnce(ServerConfig) -> ServerConfig,
    ) -> Result<Self, Error> {
        let files = dir.read("server")?;
        let roots = roots(dir, &files)?;
        let verifier = client_verifier(&roots, &files.crl, &provider)
            .map_err(|error| unusable(dir, &files.crl, &error))?;
        let lists = Lists::check(dir, &files, &provider)?;
        let own = OwnCredential::certificates(&files.chain, &files.key, &provider)
            .map_err(|error| certificate(&files, &error))?;
        let builder = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(|error| certificate(&files, &error))?;
        let rustls = builder
            .with_client_cert_verifier(Arc::clone(&verifier))
            .with_single_cert(files.chain.clone(), files.key.clone_key())
            .map_err(|error| certificate(&files, &error))?;
        let (rustls, sources) = (Arc::new(finish(rustls)), Sources::certificates(&files, lists));
        Ok(Self { rustls, clients: None, roots, verifier, own, sources, generation: 0 })
    }

    /// Creates a configuration with raw keys: the server's own key, and the keys of the clients.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn with_keys(key: &PrivateKey, clients: Clients) -> Result<Self, Error> {
        let (provider, sources) = (provider(), Sources::raw_key(key.public()));
        let key = certified(key, &provider)?;
        let keys = RawKeys::Clients(clients.clone());
        let verifier: Arc<dyn ClientCertVerifier> =
            Arc::new(RawVerifier { keys, provider: Arc::clone(&provider) });
        let own = OwnCredential::raw_key(&key);
        let rustls = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| raw_key(&error))?
            .with_client_cert_verifier(Arc::clone(&verifier))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(key)));
        let clients = Some(Arc::new(clients));
        let rustls = Arc::new(server(rustls));
        let roots = Arc::new(RootCertStore::empty());
        Ok(Self { rustls, clients, roots, verifier, own, sources, generation: 0 })
    }

    /// Creates the server's end of a new connection, for programs that transfer its bytes
    /// themselves.
    ///
    /// # Errors
    /// Returns rustls' error.
    pub fn connection(&self) -> Result<ServerConnection, rustls::Error> {
        ServerConnection::new(Arc::clone(&self.rustls))
    }

    /// Returns true if a client that another configuration accepted is also accepted by this one,
    /// with the same identity. Verifies signatures, which takes a fraction of a millisecond.
    #[must_use]
    pub fn still_knows(&self, identity: &PeerIdentity) -> bool {
        let Some(proof) = &identity.proof else { return identity.who == Who::Anonymous };
        let Some((first, others)) = proof.chain.split_first() else { return false };
        let verified = self.verifier.verify_client_cert(first, others, UnixTime::now());
        verified.is_ok() && self.who(&proof.chain) == Some(identity.who.clone())
    }

    /// Returns the identity of a client with this verified chain or key.
    pub(super) fn who(&self, chain: &[CertificateDer<'_>]) -> Option<Who> {
        match &self.clients {
            None => self.name_of(chain).map(Who::Certificate),
            Some(clients) => {
                let key = chain.first().and_then(|key| PublicKey::from_spki(key));
                key.and_then(|key| clients.name(&key)).map(Who::Key)
            }
        }
    }

    /// Returns the name of a client with this verified chain of certificates. None if the first
    /// certificate has no usable name, or a name that the constraints of a CA do not cover.
    #[must_use]
    pub fn name_of(&self, chain: &[CertificateDer<'_>]) -> Option<Arc<str>> {
        super::names::name_of(chain, &self.roots.roots)
    }
}

impl TlsClientConfig {
    /// Creates a configuration with certificates: the server needs a certificate signed by the CA,
    /// with `name` or else the name in the portal.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file.
    pub fn with_certificates(dir: &TlsDir, name: Option<&str>) -> Result<Self, Error> {
        let provider = provider();
        let files = dir.read("client")?;
        let roots = roots(dir, &files)?;
        let verifier = server_verifier(&roots, &files.crl, &provider)
            .map_err(|error| unusable(dir, &files.crl, &error))?;
        let lists = Lists::check(dir, &files, &provider)?;
        let own = OwnCredential::certificates(&files.chain, &files.key, &provider)
            .map_err(|error| certificate(&files, &error))?;
        let rustls = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| certificate(&files, &error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&verifier))
            .with_client_auth_cert(files.chain.clone(), files.key.clone_key())
            .map_err(|error| certificate(&files, &error))?;
        let name = name.map(server_name).transpose()?;
        let sources = Sources::certificates(&files, lists);
        Ok(Self { rustls: client(rustls), name, verifier, own, sources })
    }

    /// Creates a configuration with raw keys: the client's own key, and the keys accepted from the
    /// server.
    ///
    /// # Errors
    /// Returns an [`Error`] for a key that rustls does not accept.
    pub fn with_keys(key: &PrivateKey, servers: &[PublicKey]) -> Result<Self, Error> {
        let (provider, sources) = (provider(), Sources::raw_key(key.public()));
        let key = certified(key, &provider)?;
        let keys = RawKeys::Pins(servers.to_vec());
        let verifier = Arc::new(RawVerifier { keys, provider: Arc::clone(&provider) });
        let own = OwnCredential::raw_key(&key);
        let rustls = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| raw_key(&error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&verifier) as _)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(key)));
        Ok(Self { rustls: client(rustls), name: None, verifier, own, sources })
    }

    /// Returns the name required in a server's certificate: the configured one, or else the
    /// portal's, or else the address.
    pub(super) fn server_name(&self, address: IpAddr, name: Option<&str>) -> ServerName<'static> {
        let named = name.and_then(|name| server_name(name).ok());
        let address = ServerName::IpAddress(address.into());
        self.name.clone().or(named).unwrap_or(address)
    }
}

/// Converts a name for use with certificates.
pub(super) fn server_name(name: &str) -> Result<ServerName<'static>, Error> {
    ServerName::try_from(name.to_owned()).map_err(|_| Error::Content {
        path: name.into(),
        why: "it is neither a host name nor an address".into(),
    })
}

/// Disables session resumption: a resumed session would have to be checked against later changes to
/// the configuration.
fn full_handshakes(mut config: ServerConfig) -> ServerConfig {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    config
}

fn server(config: ServerConfig) -> ServerConfig {
    let mut config = full_handshakes(config);
    config.alpn_protocols = vec![ALPN.to_vec()];
    // The shards' record layer needs the keys (`fabric/iwarp/tls.rs`).
    config.enable_secret_extraction = true;
    config
}

fn client(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_secret_extraction = true;
    Arc::new(config)
}

fn certified(key: &PrivateKey, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, Error> {
    let signing = provider.key_provider.load_private_key(key.der());
    let signing = signing.map_err(|error| raw_key(&error))?;
    let spki = CertificateDer::from(key.public().spki());
    Ok(Arc::new(CertifiedKey::new(vec![spki], signing)))
}

/// Returns the CAs in `ca-cert.pem` that no other CA has revoked.
fn roots(dir: &TlsDir, files: &Files) -> Result<Arc<RootCertStore>, Error> {
    let refuse = |why: String| Error::Content { path: dir.0.join("ca-cert.pem"), why };
    let mut roots = RootCertStore::empty();
    for certificate in files.ca.iter().filter(|ca| !is_revoked(ca, files)) {
        roots.add(certificate.clone()).map_err(|error| refuse(error.to_string()))?;
    }
    if roots.is_empty() && !files.ca.is_empty() {
        return Err(refuse(
            "ca-crl.pem revokes each of its CAs; use one that is not revoked".into(),
        ));
    }
    Ok(Arc::new(roots))
}

fn unusable(
    dir: &TlsDir,
    crl: &[CertificateRevocationListDer<'_>],
    error: &dyn std::error::Error,
) -> Error {
    let file = if crl.is_empty() { "ca-cert.pem" } else { "ca-crl.pem" };
    Error::Content { path: dir.0.join(file), why: error.to_string() }
}

fn certificate(files: &Files, error: &rustls::Error) -> Error {
    let path = match error {
        rustls::Error::InconsistentKeys(_) | rustls::Error::General(_) => &files.key_path,
        _ => &files.chain_path,
    };
    let why = match error {
        // This affects half of all ECDSA keys generated by GnuTLS 3.7, which writes a leading zero,
        // contrary to RFC 5915.
        rustls::Error::General(_) => "this private key cannot be read; use Ed25519, ECDSA with \
             P-256 or P-384, or RSA with 2048 bits or more (for example: openssl genpkey \
             -algorithm ed25519)"
            .into(),
        rustls::Error::InconsistentKeys(_) => format!(
            "this private key does not belong to the certificate {}; use the two files that were \
             created together",
            files.chain_path.display()
        ),
        error => error.to_string(),
    };
    Error::Content { path: path.clone(), why }
}

fn raw_key(error: &rustls::Error) -> Error {
    Error::Content { path: "the key".into(), why: error.to_string() }
}
