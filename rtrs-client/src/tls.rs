//! This client's certificates or keys: their locations, and whether they match.

use std::path::PathBuf;

use clap::Args;
use rtrs_core::settings::{Portal, Scheme};
use rtrs_core::tls::{PrivateKey, PublicKey, TlsClientConfig, TlsConfigError, TlsDir};

use crate::engine::Prover;
use crate::error::{Error, ErrorKind, usage};
use crate::settings::SessionSettings;

/// Certificates or keys as configured, not read yet. Also the flags of commands without a
/// configuration file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct TlsSources {
    /// Directory with ca-cert.pem, client-cert.pem and client-key.pem, for tls:// and rdma://
    ///
    /// The names are those of qemu and nbdkit. ca-crl.pem, if it exists, revokes certificates. The
    /// key must be readable only by its owner. Not with --key-file.
    #[arg(long = "tls-dir", value_name = "PATH")]
    pub dir: Option<PathBuf>,

    /// Name that the server's certificate must have [default: the host in the path]
    ///
    /// A DNS name or an address among the alternative names of the certificate. Needs --tls-dir.
    #[arg(long = "tls-hostname", value_name = "NAME")]
    pub hostname: Option<String>,

    /// File with the private key of this client, for tls:// and rdma://
    ///
    /// `rtrs-client key generate` creates one. The file must be readable only by its owner. Needs
    /// --server-key.
    #[arg(long, value_name = "PATH")]
    pub key_file: Option<PathBuf>,

    /// Public key of the server, ed25519:BASE64; repeatable
    ///
    /// `rtrs-server key show` prints it. The server must have the private half of one of these
    /// keys. Needs --key-file.
    #[arg(long, value_name = "KEY")]
    pub server_key: Vec<PublicKey>,
}

impl TlsSources {
    /// Returns the certificates or keys for a session.
    pub(crate) fn of(settings: &SessionSettings) -> Self {
        Self {
            dir: settings.tls_dir.clone(),
            hostname: settings.tls_hostname.clone(),
            key_file: settings.key_file.clone(),
            server_key: settings.server_key.clone(),
        }
    }

    /// Rejects inconsistent settings, and a tls:// path without certificates or keys.
    pub(crate) fn check(&self, paths: &[Portal]) -> Result<(), Error> {
        let Self { dir, hostname, key_file, server_key } = self;
        if dir.is_some() && (key_file.is_some() || !server_key.is_empty()) {
            return Err(usage("tls-dir excludes key-file and server-key; leave one out"));
        }
        if key_file.is_some() == server_key.is_empty() {
            let (has, needs) = match key_file {
                Some(_) => ("key-file", "server-key, which `rtrs-server key show` prints"),
                None => ("server-key", "key-file, which `rtrs-client key generate` makes"),
            };
            return Err(usage(format!("{has} needs {needs}")));
        }
        if hostname.is_some() && dir.is_none() {
            return Err(usage("tls-hostname needs tls-dir"));
        }
        let secure = paths.iter().find(|path| path.scheme() == Scheme::Tls);
        match secure {
            Some(path) if dir.is_none() && key_file.is_none() => Err(usage(format!(
                "cannot use the path {path}: TLS needs certificates or keys; set tls-dir, or \
                 key-file and server-key"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the prover for the client's identity on paths without TLS; None if there are no
    /// certificates or keys.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::Path`], which names the file.
    pub(crate) fn prover(&self) -> Result<Option<Prover>, Error> {
        self.has_keys().then(|| self.load().map(Prover::of_system)).transpose()
    }

    /// Rejects files that no server would accept now. Returns warnings for the operator.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::Path`], which names the file.
    pub(crate) fn check_now(&self) -> Result<Vec<String>, Error> {
        if !self.has_keys() {
            return Ok(Vec::new());
        }
        self.load()?.check_now().map_err(unusable)
    }

    /// Warning for the operator about a path that does not use the certificates or keys.
    pub(crate) fn unused_by(&self, path: &Portal) -> Option<String> {
        (self.has_keys() && path.scheme() == Scheme::Tcp).then(|| {
            format!(
                "certificates or keys are set, but the path {path} does not use them: it is \
                 neither encrypted nor authenticated; use tls://"
            )
        })
    }

    fn has_keys(&self) -> bool {
        self.dir.is_some() || self.key_file.is_some()
    }

    /// Reads the files.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::Path`], which names the file.
    pub(crate) fn load(&self) -> Result<TlsClientConfig, Error> {
        let loaded = match (&self.dir, &self.key_file) {
            (Some(dir), _) => {
                TlsClientConfig::with_certificates(&TlsDir(dir.clone()), self.hostname.as_deref())
            }
            (None, Some(file)) => PrivateKey::read(file)
                .and_then(|key| TlsClientConfig::with_keys(&key, &self.server_key)),
            _ => return Err(usage("TLS needs tls-dir, or key-file and server-key")),
        };
        let checked = loaded.and_then(|loaded| loaded.check_own().map(|()| loaded));
        checked.map_err(unusable)
    }
}

fn unusable(error: TlsConfigError) -> Error {
    Error::with_source(ErrorKind::Path, "bad certificates or keys", error)
}
