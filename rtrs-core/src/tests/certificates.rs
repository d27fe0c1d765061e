//! Certificates for tests, in a directory laid out like a production certificate directory.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose,
    NameConstraints, RevokedCertParams, SanType, SerialNumber, date_time_ymd,
};

/// Properties of a certificate to issue.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// `server` or `client`, which selects the file names.
    pub end: &'a str,
    /// Names and addresses; if empty, the certificate has only a common name.
    pub names: &'a [&'a str],
    /// Common name.
    pub common_name: &'a str,
    /// First and last year of validity.
    pub years: (i32, i32),
    /// If set, the number of days until the certificate expires, which overrides `years`.
    pub days: Option<u64>,
    /// If set, the number of seconds until the certificate expires, which overrides `years`.
    pub seconds: Option<u64>,
    /// Serial number, for a revocation list.
    pub serial: u64,
    /// Permitted purposes; if empty, there is no restriction.
    pub uses: &'a [ExtendedKeyUsagePurpose],
    /// URIs among the certificate's names.
    pub uris: &'a [&'a str],
}

impl Wanted<'_> {
    /// Server on the loopback address.
    pub const SERVER: Self = Self {
        end: "server",
        names: &["localhost", "127.0.0.1", "127.0.0.2", "127.0.0.3"],
        common_name: "server",
        years: (2020, 2120),
        days: None,
        seconds: None,
        serial: 1,
        uses: &[ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
        uris: &[],
    };
    /// Client `db1`.
    pub const CLIENT: Self = Self {
        end: "client",
        names: &["db1"],
        common_name: "a client",
        years: (2020, 2120),
        days: None,
        seconds: None,
        serial: 2,
        uses: &[ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
        uris: &[],
    };
    /// Client `db1`, restricted to use as a client.
    pub const CLIENT_ONLY: Self =
        Self { uses: &[ExtendedKeyUsagePurpose::ClientAuth], ..Self::CLIENT };
    /// Server on the loopback address, restricted to use as a server.
    pub const SERVER_ONLY: Self =
        Self { uses: &[ExtendedKeyUsagePurpose::ServerAuth], ..Self::SERVER };
}

/// Certificate authority.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    /// Creates a CA.
    ///
    /// # Panics
    /// Panics if no random numbers are available.
    pub fn new() -> Self {
        Self::named("test CA")
    }

    /// Creates a CA with this common name.
    ///
    /// # Panics
    /// Panics if no random numbers are available.
    pub fn named(name: &str) -> Self {
        let key = KeyPair::generate().expect("cannot generate a key");
        Self(
            CertifiedIssuer::self_signed(ca_params(name), key)
                .expect("cannot sign the CA certificate"),
        )
    }

    /// Creates a CA signed by this CA.
    ///
    /// # Panics
    /// Panics if no random numbers are available.
    #[must_use]
    pub fn subordinate(&self, name: &str) -> Self {
        self.sign(ca_params(name))
    }

    /// Creates a CA signed by this CA, with a serial number for a revocation list.
    ///
    /// # Panics
    /// Panics if no random numbers are available.
    #[must_use]
    pub fn subordinate_numbered(&self, name: &str, serial: u64) -> Self {
        let mut params = ca_params(name);
        params.serial_number = Some(SerialNumber::from(serial));
        self.sign(params)
    }

    /// Creates a CA signed by this CA that may sign only names in these subtrees.
    ///
    /// # Panics
    /// Panics if no random numbers are available.
    #[must_use]
    pub fn subordinate_for(&self, name: &str, permitted: &[GeneralSubtree]) -> Self {
        let (permitted_subtrees, excluded_subtrees) = (permitted.to_vec(), Vec::new());
        let mut params = ca_params(name);
        params.name_constraints = Some(NameConstraints { permitted_subtrees, excluded_subtrees });
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Self {
        let key = KeyPair::generate().expect("cannot generate a key");
        Self(
            CertifiedIssuer::signed_by(params, key, &self.0)
                .expect("cannot sign the CA certificate"),
        )
    }

    /// Writes a server's or client's certificate and key, with this CA's certificate in the chain.
    ///
    /// # Panics
    /// Panics if the files cannot be written.
    pub fn issue_with_chain(&self, dir: &Path, wanted: &Wanted<'_>) {
        self.issue(dir, wanted);
        let path = dir.join(format!("{}-cert.pem", wanted.end));
        let own = fs::read_to_string(&path).expect("cannot read the certificate");
        fs::write(path, own + &self.pem()).expect("cannot write the chain");
    }

    /// Returns the certificate in PEM.
    #[must_use]
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes this CA's own certificate and key as `client-cert.pem` and `client-key.pem`.
    ///
    /// # Panics
    /// Panics if the files cannot be written.
    pub fn write_as_client(&self, dir: &Path) {
        fs::write(dir.join("client-cert.pem"), self.pem()).expect("cannot write the certificate");
        write_secret(&dir.join("client-key.pem"), &self.0.key().serialize_pem());
    }

    /// Writes `ca-cert.pem`.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    pub fn write(&self, dir: &Path) {
        fs::write(dir.join("ca-cert.pem"), self.0.pem()).expect("cannot write ca-cert.pem");
    }

    /// Writes the certificate and key of a server or client.
    ///
    /// # Panics
    /// Panics if the files cannot be written.
    pub fn issue(&self, dir: &Path, wanted: &Wanted<'_>) {
        let names: Vec<String> = wanted.names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).expect("invalid names");
        let uris =
            wanted.uris.iter().map(|uri| SanType::URI((*uri).try_into().expect("invalid URI")));
        params.subject_alt_names.extend(uris);
        params.distinguished_name.push(DnType::CommonName, wanted.common_name);
        params.extended_key_usages = wanted.uses.to_vec();
        params.not_before = date_time_ymd(wanted.years.0, 1, 1);
        let seconds = wanted.seconds.or_else(|| wanted.days.map(|days| days * 24 * 3600));
        params.not_after = match seconds {
            Some(seconds) => (SystemTime::now() + Duration::from_secs(seconds)).into(),
            None => date_time_ymd(wanted.years.1, 1, 1),
        };
        params.serial_number = Some(SerialNumber::from(wanted.serial));
        let key = KeyPair::generate().expect("cannot generate a key");
        let certificate = params.signed_by(&key, &self.0).expect("cannot sign the certificate");
        let end = wanted.end;
        fs::write(dir.join(format!("{end}-cert.pem")), certificate.pem())
            .expect("cannot write the certificate");
        write_secret(&dir.join(format!("{end}-key.pem")), &key.serialize_pem());
    }

    /// Writes `ca-crl.pem`, which revokes the certificates with these serial numbers.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    pub fn revoke(&self, dir: &Path, serials: &[u64]) {
        fs::write(dir.join("ca-crl.pem"), self.list(serials, 1, 2120))
            .expect("cannot write ca-crl.pem");
    }

    /// Returns a PEM revocation list with this number that expires at the beginning of the year
    /// `until`.
    ///
    /// # Panics
    /// Panics if the list cannot be signed.
    pub fn list(&self, serials: &[u64], number: u64, until: i32) -> String {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2021, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2021, 1, 1),
            next_update: date_time_ymd(until, 1, 1),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params
            .signed_by(&self.0)
            .expect("cannot sign the list")
            .pem()
            .expect("cannot encode the list")
    }
}

fn ca_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

/// Writes a directory with a CA, a server on the loopback address and the client `db1`.
///
/// # Panics
/// Panics if a file cannot be written.
pub fn certificates(dir: &Path) -> Authority {
    let authority = Authority::new();
    authority.write(dir);
    authority.issue(dir, &Wanted::SERVER);
    authority.issue(dir, &Wanted::CLIENT);
    authority
}

/// Writes a file that only its owner may access.
///
/// # Panics
/// Panics on failure.
pub fn write_secret(path: &Path, text: &str) {
    fs::write(path, text).expect("cannot write the file");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .expect("cannot set the mode of the file");
}

/// Temporary directory for tests, removed when it is dropped.
#[derive(Debug)]
pub struct TestDir(pub PathBuf);

impl TestDir {
    /// Creates a directory.
    ///
    /// # Panics
    /// Panics if the directory cannot be created.
    pub fn new(name: &str) -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("rtrs-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("cannot create the directory");
        Self(path)
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
