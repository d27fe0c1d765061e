//! Revocation lists: checks of their issuers, their usability and their age.
//!
//! With a list that its CA did not sign, or without a list from any local CA, every handshake would
//! fail; of two lists from the same CA, only the first would be used. Such files are therefore
//! refused when they are read. Files that may be correct cause only a warning: a list from a CA
//! that is not known here, since peers may present that CA; a CA without a list; a list that has
//! expired, or is older than the list in use.

use std::path::PathBuf;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, SignatureVerificationAlgorithm,
    SubjectPublicKeyInfoDer, UnixTime,
};
use webpki::{
    BorrowedCertRevocationList, CertRevocationList, EndEntityCert, RawPublicKeyEntity,
    anchor_from_trusted_cert, spki_for_anchor,
};

use super::dates::time;
use super::error::TlsConfigError as Error;
use super::files::{Files, TlsDir};
use super::names::{common_name, element};

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const UTC_TIME: u8 = 0x17;
const SEQUENCE: u8 = 0x30;
const EXTENSIONS: u8 = 0xa0;
/// OBJECT IDENTIFIER 2.5.29.20, the list number, with tag and length.
const LIST_NUMBER: [u8; 5] = [6, 3, 0x55, 0x1d, 20];
/// OBJECT IDENTIFIER 2.5.29.28, the scope of a list, with tag and length.
const PART: [u8; 5] = [6, 3, 0x55, 0x1d, 28];

/// Properties of the lists in a directory.
#[derive(Clone, Debug, Default)]
pub(super) struct Lists {
    path: PathBuf,
    all: Vec<List>,
    /// Time-independent warnings for the operator.
    notes: Vec<String>,
}

#[derive(Clone, Debug)]
struct List {
    /// Name of the CA, in DER.
    issuer: Vec<u8>,
    /// Expiry as YYYYMMDDHHMMSS in UTC.
    until: String,
    /// Number, big-endian, without leading zeros; empty if the list has none.
    number: Vec<u8>,
    /// The list covers only part of its CA's certificates, so that CA may have other lists.
    is_part: bool,
}

/// Signed content of a list.
struct Signed<'a> {
    data: &'a [u8],
    algorithm: &'a [u8],
    signature: &'a [u8],
}

/// CA that may have signed a list.
struct Authority {
    subject: Vec<u8>,
    spki: SubjectPublicKeyInfoDer<'static>,
}

/// CAs that may have signed lists.
struct Authorities {
    /// CAs in `ca-cert.pem`.
    roots: Vec<Authority>,
    /// CAs signed by other CAs, each with the name of its issuer.
    intermediates: Vec<(Authority, Vec<u8>)>,
}

impl Authorities {
    fn of(files: &Files) -> Self {
        Self { roots: roots(files), intermediates: intermediates(files) }
    }

    /// Returns the known CAs with the name of a list's issuer.
    fn signers(&self, list: &List) -> Vec<&Authority> {
        let named = |ca: &&Authority| ca.subject == list.issuer;
        let mut signers: Vec<&Authority> = self.roots.iter().filter(named).collect();
        if signers.is_empty() {
            signers.extend(self.intermediates.iter().map(|(ca, _)| ca).filter(named));
        }
        signers
    }
}

impl Lists {
    /// Refuses lists with which no session could be established, or that would not be used. The
    /// lists must already have been parsed by rustls.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the file and the CA.
    pub(super) fn check(
        dir: &TlsDir,
        files: &Files,
        provider: &CryptoProvider,
    ) -> Result<Self, Error> {
        let path = dir.0.join("ca-crl.pem");
        let refuse = |why: String| Err(Error::Content { path: path.clone(), why });
        let algorithms = provider.signature_verification_algorithms.all;
        let authorities = Authorities::of(files);
        let mut all: Vec<List> = Vec::new();
        let mut foreign = Vec::new();
        for der in &files.crl {
            let Some((signed, list)) = parse(der) else {
                return refuse("it contains a revocation list that cannot be read".into());
            };
            let name = ca_name(&list.issuer);
            // rustls uses the first list of an issuer.
            let same = |one: &List| one.issuer == list.issuer && !(one.is_part && list.is_part);
            if all.iter().any(same) {
                return refuse(format!(
                    "it has two lists of {name}, and only the first would count; keep the newer one"
                ));
            }
            let signers = authorities.signers(&list);
            // rustls, too, selects a list by its issuer's name before it checks the key.
            if !signers.iter().all(|ca| signed.is_by(ca, algorithms)) {
                return refuse(format!(
                    "the list of {name} is not signed by the key of that CA in ca-cert.pem; make \
                     it with the CA's own key, and give CAs with different keys different \
                     names"
                ));
            }
            if signers.is_empty() {
                foreign.push(name);
            }
            all.push(list);
        }
        if foreign.len() == all.len()
            && let Some(name) = foreign.first()
        {
            return refuse(format!(
                "it has no list of a CA in ca-cert.pem, only one of {name}: no session could \
                 begin; use the list of your CA, or append the intermediate CA to ca-cert.pem"
            ));
        }
        let lists = Self { path, all, notes: Vec::new() };
        let mut notes = lists.bare_authorities(&authorities);
        notes.extend(lists.revoked_authorities(files));
        notes.extend(lists.foreign_lists(&foreign));
        Ok(Self { notes, ..lists })
    }

    /// Returns a warning for each CA in `ca-cert.pem` that has no list.
    fn bare_authorities(&self, authorities: &Authorities) -> Vec<String> {
        let has_list = |subject: &[u8]| self.all.iter().any(|list| list.issuer == subject);
        let signs_through = |subject: &[u8]| {
            let mut signed = authorities.intermediates.iter();
            signed.any(|(ca, issuer)| issuer == subject && has_list(&ca.subject))
        };
        let text = |ca: &Authority| {
            let (path, name) = (self.path.display(), ca_name(&ca.subject));
            if signs_through(&ca.subject) {
                format!(
                    "{path} has no list of {name}, which is in ca-cert.pem: intermediate CAs that \
                     it has revoked are still trusted; append its list"
                )
            } else {
                format!(
                    "{path} has no list of {name}, which is in ca-cert.pem: certificates issued \
                     directly by this CA are refused; append its list, which may be empty"
                )
            }
        };
        let bare = |ca: &&Authority| !has_list(&ca.subject) && !self.all.is_empty();
        authorities.roots.iter().filter(bare).map(text).collect()
    }

    /// Returns a warning for each CA in `ca-cert.pem` that another CA has revoked.
    fn revoked_authorities(&self, files: &Files) -> Vec<String> {
        let revoked = files.ca.iter().filter(|ca| is_revoked(ca, files));
        let parsed = revoked.filter_map(|ca| EndEntityCert::try_from(ca).ok());
        let text = |ca: EndEntityCert<'_>| {
            format!(
                "{} revokes {}, which is in ca-cert.pem: certificates issued by this CA are \
                 refused; remove the CA from ca-cert.pem",
                self.path.display(),
                ca_name(ca.subject())
            )
        };
        parsed.map(text).collect()
    }

    /// Returns a warning for each CA that has a list, but is not known here.
    fn foreign_lists(&self, names: &[String]) -> Vec<String> {
        let text = |name: &String| {
            format!(
                "{} has a list of {name}, which is not in ca-cert.pem: the list applies only if a \
                 peer presents a certificate of that CA",
                self.path.display()
            )
        };
        names.iter().map(text).collect()
    }

    /// Returns warnings for the operator.
    pub(super) fn warnings(&self, now: UnixTime) -> Vec<String> {
        let now = digits(now);
        let expired = self.all.iter().filter(|list| list.until <= now);
        let text = |list: &List| {
            let (day, path) = (list.until.as_str(), self.path.display());
            format!(
                "the list of {} in {path} expired on {}-{}-{} {}:{}:{} UTC: the list is still \
                 used, but lacks later revocations; replace it with a new list",
                ca_name(&list.issuer),
                &day[..4],
                &day[4..6],
                &day[6..8],
                &day[8..10],
                &day[10..12],
                &day[12..]
            )
        };
        self.notes.iter().cloned().chain(expired.map(text)).collect()
    }

    /// Returns a message for each list whose number is lower than before.
    pub(super) fn older_than(&self, before: &Self) -> Vec<String> {
        let text = |list: &List| {
            let then = before.all.iter().find(|then| then.issuer == list.issuer)?;
            // Without leading zeros, the longer number is greater.
            let of = |list: &List| (list.number.len(), list.number.clone());
            (of(list) < of(then)).then(|| {
                format!(
                    "the list of {} in {} has number {}, below the previous {}: the list is older \
                     and may lack revocations",
                    ca_name(&list.issuer),
                    self.path.display(),
                    number(&list.number),
                    number(&then.number)
                )
            })
        };
        self.all.iter().filter_map(text).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

impl Signed<'_> {
    fn is_by(&self, ca: &Authority, all: &[&dyn SignatureVerificationAlgorithm]) -> bool {
        let Ok(key) = RawPublicKeyEntity::try_from(&ca.spki) else { return false };
        all.iter()
            .filter(|one| one.signature_alg_id().as_ref() == self.algorithm)
            .any(|one| key.verify_signature(*one, self.data, self.signature).is_ok())
    }
}

/// Returns the CAs in `ca-cert.pem`.
fn roots(files: &Files) -> Vec<Authority> {
    let anchors = files.ca.iter().filter_map(|ca| anchor_from_trusted_cert(ca).ok());
    anchors
        .map(|ca| Authority { subject: ca.subject.to_vec(), spki: spki_for_anchor(&ca) })
        .collect()
}

/// Returns the CAs signed by other CAs, from the local chain and from `ca-cert.pem`, each with the
/// name of its issuer.
fn intermediates(files: &Files) -> Vec<(Authority, Vec<u8>)> {
    let all = files.chain.iter().skip(1).chain(&files.ca);
    let parsed = all.filter_map(|one| EndEntityCert::try_from(one).ok());
    parsed
        .filter(|ca| ca.issuer() != ca.subject())
        .map(|ca| {
            let (subject, spki) = (ca.subject().to_vec(), ca.subject_public_key_info());
            (Authority { subject, spki }, ca.issuer().to_vec())
        })
        .collect()
}

/// Returns true if another CA that is known here has revoked a CA in `ca-cert.pem`.
/// [`Lists::check`] refuses a list not signed by that CA.
pub(super) fn is_revoked(ca: &CertificateDer<'_>, files: &Files) -> bool {
    let Ok(ca) = EndEntityCert::try_from(ca) else { return false };
    let issuer = ca.issuer();
    let is_issuer = |one: &CertificateDer<'_>| {
        EndEntityCert::try_from(one).is_ok_and(|one| one.subject() == issuer)
    };
    if issuer == ca.subject() || !files.chain.iter().skip(1).chain(&files.ca).any(is_issuer) {
        return false;
    }
    let lists = files.crl.iter().filter_map(|der| BorrowedCertRevocationList::from_der(der).ok());
    lists.map(CertRevocationList::from).any(|list| {
        list.issuer() == issuer && matches!(list.find_serial(ca.serial()), Ok(Some(_)) | Err(_))
    })
}

/// Parses a list (RFC 5280 section 5.1).
fn parse<'a>(der: &'a CertificateRevocationListDer<'_>) -> Option<(Signed<'a>, List)> {
    let (SEQUENCE, outer, _) = element(der)? else { return None };
    let (SEQUENCE, content, behind) = element(outer)? else { return None };
    let (SEQUENCE, algorithm, signature) = element(behind)? else { return None };
    let (BIT_STRING, [0, signature @ ..], _) = element(signature)? else { return None };
    let signed = Signed { data: &outer[..outer.len() - behind.len()], algorithm, signature };
    let (_version, rest) = skip(content)?;
    let (_algorithm, rest) = skip(rest)?;
    let (SEQUENCE, issuer, rest) = element(rest)? else { return None };
    let (_from, rest) = skip(rest)?;
    let (tag, until, mut rest) = element(rest)?;
    let until = str::from_utf8(until).ok()?.trim_end_matches('Z');
    // A year of two digits means 1950 to 2049.
    let century = match (tag, until.get(..1)?) {
        (UTC_TIME, "5" | "6" | "7" | "8" | "9") => "19",
        (UTC_TIME, _) => "20",
        _ => "",
    };
    let until = format!("{century}{until}");
    if until.len() != 14 || !until.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (mut number, mut is_part) = (Vec::new(), false);
    while !rest.is_empty() {
        let (tag, inner, more) = element(rest)?;
        if tag == EXTENSIONS {
            let extensions = element(inner)?.1;
            (number, is_part) = (list_number(extensions)?, has_part(extensions)?);
        }
        rest = more;
    }
    Some((signed, List { issuer: issuer.to_vec(), until, number, is_part }))
}

/// Returns true if the extensions limit the list to some of its CA's certificates.
fn has_part(mut extensions: &[u8]) -> Option<bool> {
    while !extensions.is_empty() {
        let (_, extension, more) = element(extensions)?;
        if extension.starts_with(&PART) {
            return Some(true);
        }
        extensions = more;
    }
    Some(false)
}

/// Returns the list number from the extensions; empty if there is none.
fn list_number(mut extensions: &[u8]) -> Option<Vec<u8>> {
    while !extensions.is_empty() {
        let (_, extension, more) = element(extensions)?;
        if let Some(mut value) = extension.strip_prefix(&LIST_NUMBER) {
            // The extension may contain the critical flag first.
            loop {
                let (tag, inner, more) = element(value)?;
                if tag == OCTET_STRING {
                    let (INTEGER, number, _) = element(inner)? else { return None };
                    return Some(number.iter().copied().skip_while(|byte| *byte == 0).collect());
                }
                value = more;
            }
        }
        extensions = more;
    }
    Some(Vec::new())
}

/// Returns the contents of the first element, and the data that follows.
fn skip(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    element(bytes).map(|(_, contents, rest)| (contents, rest))
}

/// Returns the name of a CA in readable form.
fn ca_name(subject: &[u8]) -> String {
    match common_name(subject) {
        Some(name) => format!("the CA {name:?}"),
        None => "a CA without a common name".into(),
    }
}

/// Formats the number of a list: decimal if it is short, otherwise like `certtool` and `openssl`.
fn number(bytes: &[u8]) -> String {
    match bytes.len() {
        0..=8 => bytes.iter().fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte)).to_string(),
        _ => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

/// Formats a time as YYYYMMDDHHMMSS in UTC.
fn digits(at: UnixTime) -> String {
    time(at).chars().filter(char::is_ascii_digit).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::tests::certificates::{Authority, TestDir, Wanted, certificates};
    use crate::tls::{TlsClientConfig, TlsServerConfig};

    /// Reads a list and the CA file with each kind of configuration.
    fn read(dir: &TestDir, list: &str) -> Result<TlsServerConfig, String> {
        fs::write(dir.0.join("ca-crl.pem"), list).unwrap();
        let dir = TlsDir(dir.0.clone());
        let server = TlsServerConfig::with_certificates(&dir);
        let nbd = TlsServerConfig::for_nbd(&dir).map(drop);
        let client = TlsClientConfig::with_certificates(&dir, None).map(drop);
        let texts = [server.as_ref().map(drop), nbd.as_ref().copied(), client.as_ref().copied()]
            .map(|read| read.map_err(Error::to_string));
        assert!(texts[0] == texts[1] && texts[0] == texts[2], "{texts:?}");
        server.map_err(|error| error.to_string())
    }

    fn refused(dir: &TestDir, list: &str, part: &str) {
        let text = read(dir, list).unwrap_err();
        assert!(text.contains("ca-crl.pem: ") && text.contains(part), "{text}");
    }

    #[test]
    fn an_unusable_list_is_refused() {
        let dir = TestDir::new("lists");
        let authority = certificates(&dir.0);
        let other = Authority::named("other CA");
        let (own, foreign) = (authority.list(&[7], 1, 2120), other.list(&[], 1, 2120));
        read(&dir, &own).unwrap();
        refused(&dir, &foreign, "no list of a CA in ca-cert.pem, only one of the CA \"other CA\"");
        // The list has the same issuer name but a different key.
        let impostor = Authority::new().list(&[], 1, 2120);
        refused(&dir, &impostor, "the list of the CA \"test CA\" is not signed by the key");
        // An operator has appended a newer list to revoke a client.
        let newer = own.clone() + &authority.list(&[7, 8], 2, 2120);
        refused(&dir, &newer, "two lists of the CA \"test CA\", and only the first would count");
        // The list is long.
        fs::write(dir.0.join("ca-cert.pem"), authority.pem() + &other.pem()).unwrap();
        let serials: Vec<u64> = (1000..8000).collect();
        read(&dir, &(authority.list(&serials, 1, 2120) + &foreign)).unwrap();
        let twins = authority.pem() + &Authority::new().pem();
        fs::write(dir.0.join("ca-cert.pem"), twins).unwrap();
        refused(&dir, &own, "give CAs with different keys different names");
    }

    #[test]
    fn a_questionable_list_causes_a_warning() {
        let dir = TestDir::new("lists");
        let authority = certificates(&dir.0);
        let other = Authority::named("other CA");
        let (own, foreign) = (authority.list(&[7], 1, 2120), other.list(&[], 1, 2120));
        let warned = |list: &str| read(&dir, list).unwrap().file_warnings().join("; ");
        let text = warned(&(own.clone() + &foreign));
        assert!(text.contains("a list of the CA \"other CA\", which is not in"), "{text}");
        // A new CA is added to the old CA.
        fs::write(dir.0.join("ca-cert.pem"), authority.pem() + &other.pem()).unwrap();
        let text = warned(&own);
        assert!(text.contains("no list of the CA \"other CA\", which is in ca-cert"), "{text}");
        assert_eq!(warned(&(own.clone() + &foreign)), "");
        // A root signs through an intermediate CA, which has a list.
        let between = other.subordinate("between");
        let all = authority.pem() + &other.pem() + &between.pem();
        fs::write(dir.0.join("ca-cert.pem"), all).unwrap();
        let text = warned(&(own.clone() + &between.list(&[], 1, 2120)));
        assert!(
            text.contains("\"other CA\"") && text.contains("revoked are still trusted"),
            "{text}"
        );
        let all = own + &between.list(&[], 1, 2120) + &foreign;
        assert_eq!(warned(&all), "");
    }

    #[test]
    fn a_list_of_an_intermediate_ca_in_our_chain_suffices() {
        let dir = TestDir::new("lists");
        let root = Authority::named("root");
        let between = root.subordinate("between");
        root.write(&dir.0);
        for (end, wanted) in [("server", Wanted::SERVER), ("client", Wanted::CLIENT)] {
            between.issue(&dir.0, &wanted);
            let path = dir.0.join(format!("{end}-cert.pem"));
            let chain = fs::read_to_string(&path).unwrap() + &between.pem();
            fs::write(path, chain).unwrap();
        }
        read(&dir, &between.list(&[], 1, 2120)).unwrap();
        refused(&dir, &Authority::named("between").list(&[], 1, 2120), "\"between\" is not signed");
    }

    #[test]
    fn an_expired_or_older_list_is_reported() {
        let dir = TestDir::new("lists");
        let authority = certificates(&dir.0);
        let server = |number, until| read(&dir, &authority.list(&[7], number, until)).unwrap();
        let first = server(300, 2120);
        assert_eq!(first.file_warnings(), [""; 0]);
        let over = server(301, 2025).file_warnings();
        assert!(
            over.len() == 1 && over[0].contains("expired on 2025-01-01 00:00:00 UTC: "),
            "{over:?}"
        );
        let client = TlsClientConfig::with_certificates(&TlsDir(dir.0.clone()), None).unwrap();
        assert_eq!(client.check_now().unwrap(), over);
        // This covers both encodings of time.
        assert_eq!(server(301, 2049).file_warnings(), [""; 0]);
        for number in [299, 44, 1] {
            let older = server(number, 2120);
            let reported = older.older_lists_than(&first);
            let part = format!("has number {number}, below the previous 300");
            assert!(reported.len() == 1 && reported[0].contains(&part), "{reported:?}");
            assert_eq!(older.changes_since(&first), ["ca-crl.pem"]);
        }
        assert_eq!(server(300, 2120).older_lists_than(&first), [""; 0]);
        assert_eq!(server(70_000, 2120).older_lists_than(&first), [""; 0]);
        fs::remove_file(dir.0.join("ca-crl.pem")).unwrap();
        let none = TlsServerConfig::with_certificates(&TlsDir(dir.0.clone())).unwrap();
        assert_eq!(none.changes_since(&first), [crate::tls::NO_LIST]);
        assert_eq!(first.changes_since(&none), ["ca-crl.pem"]);
    }

    #[test]
    fn times_are_compared_to_the_second() {
        let at = UnixTime::since_unix_epoch(Duration::from_secs(951_782_400 + 3661));
        assert_eq!(digits(at), "20000229010101");
    }
}
