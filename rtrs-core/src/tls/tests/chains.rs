//! Tests of chains with intermediate CAs: revoked CAs, and CAs with name constraints.

use rcgen::GeneralSubtree;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};

use super::*;

/// Serial number of the intermediate CA.
const BETWEEN: u64 = 70;

/// Ends that verify a chain.
const VERIFIERS: [&str; 3] = ["server", "client", "nbd"];

/// A root, a CA below it, and two ends whose certificates that CA has signed.
struct Chained {
    place: Place,
    between: Authority,
}

impl Chained {
    fn new() -> Self {
        let place = Place::new();
        let between = place.authority.subordinate_numbered("between", BETWEEN);
        for wanted in [Wanted::SERVER, Wanted::CLIENT] {
            between.issue_with_chain(place.path(), &wanted);
        }
        Self { place, between }
    }

    fn lists(&self, lists: &[String]) {
        fs::write(self.place.path().join("ca-crl.pem"), lists.concat()).unwrap();
    }

    /// Returns a verifier's result for the chain of the other end.
    fn verified(&self, verifier: &str) -> Result<(), String> {
        let dir = TlsDir(self.place.path().into());
        let chain_of = |end: &str| -> Vec<CertificateDer<'static>> {
            let path = self.place.path().join(format!("{end}-cert.pem"));
            CertificateDer::pem_file_iter(path).unwrap().map(Result::unwrap).collect()
        };
        let now = UnixTime::now();
        let verified = match verifier {
            "client" => {
                let config = TlsClientConfig::with_certificates(&dir, None).unwrap();
                let (chain, name) =
                    (chain_of("server"), ServerName::try_from("127.0.0.1").unwrap());
                let verified =
                    config.verifier.verify_server_cert(&chain[0], &chain[1..], &name, &[], now);
                verified.map(drop)
            }
            end => {
                let config = match end {
                    "nbd" => TlsServerConfig::for_nbd(&dir),
                    _ => TlsServerConfig::with_certificates(&dir),
                };
                let chain = chain_of("client");
                let verified = config.unwrap().verifier;
                verified.verify_client_cert(&chain[0], &chain[1..], now).map(drop)
            }
        };
        verified.map_err(|error| crate::tls::explain::error_text(&error, false))
    }
}

#[test]
fn a_list_applies_to_every_certificate_of_a_chain() {
    let chained = Chained::new();
    let root = |serials: &[u64]| chained.place.authority.list(serials, 1, 2120);
    let between = |serials: &[u64]| chained.between.list(serials, 1, 2120);
    let leaves = [Wanted::SERVER.serial, Wanted::CLIENT.serial];
    let (revoked, unlisted) = ("is revoked by ca-crl.pem", "a CA that has no list in ca-crl.pem");
    for (lists, expected) in [
        (vec![], None),
        (vec![root(&[]), between(&[])], None),
        (vec![root(&[7]), between(&[7])], None),
        (vec![root(&[BETWEEN]), between(&[])], Some(revoked)),
        (vec![root(&[]), between(&leaves)], Some(revoked)),
        (vec![root(&[BETWEEN]), between(&leaves)], Some(revoked)),
        // The CA of a leaf needs a list; the CA of that CA does not.
        (vec![between(&[])], None),
        (vec![between(&leaves)], Some(revoked)),
        (vec![root(&[])], Some(unlisted)),
        (vec![root(&[BETWEEN])], Some(unlisted)),
        // The CA's serial number counts only in the list of its own issuer.
        (vec![root(&[]), between(&[BETWEEN])], None),
    ] {
        if lists.is_empty() {
            let _ = fs::remove_file(chained.place.path().join("ca-crl.pem"));
        } else {
            chained.lists(&lists);
        }
        for verifier in VERIFIERS {
            let verified = chained.verified(verifier);
            let is_expected = match (&verified, expected) {
                (Ok(()), None) => true,
                (Err(text), Some(part)) => text.contains(part),
                _ => false,
            };
            assert!(is_expected, "{verifier}: {verified:?}, expected {expected:?}");
        }
    }
}

#[test]
fn a_handshake_reports_a_revoked_ca_to_both_ends() {
    let chained = Chained::new();
    let place = &chained.place;
    let lists =
        |root: &[u64]| [place.authority.list(root, 1, 2120), chained.between.list(&[], 1, 2120)];
    chained.lists(&lists(&[]));
    let (_, before) = handshake(&place.client(), &place.server());
    let client = before.unwrap().session.peer;
    assert_eq!(client.who, Who::Certificate("db1".into()));
    assert!(place.server().still_knows(&client));
    let early = place.client();
    chained.lists(&lists(&[BETWEEN]));
    let server = place.server();
    assert!(!server.still_knows(&client), "a session that began before is kept");
    let text = failure(handshake(&early, &server).1);
    assert!(text.contains("is revoked by ca-crl.pem"), "{text}");
    let text = failure(handshake(&place.client(), &server).0);
    assert!(text.contains("is revoked by ca-crl.pem"), "{text}");
}

#[test]
fn a_ca_revoked_by_another_ca_of_the_file_is_not_trusted() {
    let chained = Chained::new();
    let (place, between) = (&chained.place, &chained.between);
    let ca_path = place.path().join("ca-cert.pem");
    let lists =
        |root: &[u64]| [place.authority.list(root, 1, 2120), between.list(&[], 1, 2120)].concat();
    let write = |ca: String, list: String| {
        fs::write(&ca_path, ca).unwrap();
        fs::write(place.path().join("ca-crl.pem"), list).unwrap();
    };
    write(place.authority.pem() + &between.pem(), lists(&[]));
    for verifier in VERIFIERS {
        chained.verified(verifier).unwrap();
    }
    assert_eq!(place.server().file_warnings(), [""; 0]);
    write(place.authority.pem() + &between.pem(), lists(&[BETWEEN]));
    for verifier in VERIFIERS {
        let text = chained.verified(verifier).unwrap_err();
        assert!(text.contains("is revoked by ca-crl.pem"), "{verifier}: {text}");
    }
    let warnings = place.server().file_warnings().join("; ");
    let part = "revokes the CA \"between\", which is in ca-cert.pem";
    assert!(warnings.contains(part), "{warnings}");
}

/// Returns the identity of a client whose certificate a CA with these constraints has signed.
fn identity(permitted: &[GeneralSubtree], wanted: &Wanted<'_>) -> Result<String, String> {
    let place = Place::new();
    let between = match permitted {
        [] => place.authority.subordinate("between"),
        permitted => place.authority.subordinate_for("between", permitted),
    };
    between.issue_with_chain(place.path(), wanted);
    let (_, at_server) = handshake(&place.client(), &place.server());
    let peer = at_server.map(|ended| ended.session.peer);
    // A path without TLS and the client's own check give the same result.
    let own = place.client().check_own().map_err(|error| error.to_string());
    match peer.map(|peer| peer.who) {
        Ok(Who::Certificate(name)) => {
            own.unwrap();
            Ok(name.to_string())
        }
        Ok(other) => Err(format!("{other:?}")),
        Err(text) => {
            assert!(text.contains("is refused") || own.is_err(), "{own:?} {text}");
            Err(text)
        }
    }
}

#[test]
fn names_cannot_evade_the_constraints_of_a_ca() {
    let (team, mail) = (
        GeneralSubtree::DnsName("team-a.example.org".into()),
        GeneralSubtree::Rfc822Name("example.org".into()),
    );
    let dns = Wanted { names: &["db1"], ..Wanted::CLIENT };
    let permitted = Wanted { names: &["db1.team-a.example.org"], ..Wanted::CLIENT };
    let uri = Wanted { names: &[], uris: &["db1"], ..Wanted::CLIENT };
    let common = Wanted { names: &[], common_name: "db1", ..Wanted::CLIENT };
    let unconstrained: &[GeneralSubtree] = &[];
    for wanted in [&dns, &uri, &common] {
        assert_eq!(identity(unconstrained, wanted), Ok("db1".into()), "{wanted:?}");
    }
    let constrained = std::slice::from_ref(&team);
    assert_eq!(identity(constrained, &permitted), Ok("db1.team-a.example.org".into()));
    let text = identity(constrained, &dns).unwrap_err();
    assert!(text.contains("is refused"), "{text}");
    for wanted in [&uri, &common] {
        let text = identity(constrained, wanted).unwrap_err();
        assert!(text.contains("no usable name"), "{wanted:?}: {text}");
    }
    // Constraints of names that do not serve as identities restrict neither form.
    let constrained = std::slice::from_ref(&mail);
    assert_eq!(identity(constrained, &dns), Ok("db1".into()));
    assert_eq!(identity(constrained, &uri), Ok("db1".into()));
    identity(constrained, &common).unwrap_err();
}

#[test]
fn constraints_of_a_trusted_ca_apply_too() {
    let place = Place::new();
    let team = GeneralSubtree::DnsName("team-a.example.org".into());
    let between = place.authority.subordinate_for("between", &[team]);
    let common = Wanted { names: &[], common_name: "db1", ..Wanted::CLIENT };
    between.issue(place.path(), &common);
    let both = place.authority.pem() + &between.pem();
    fs::write(place.path().join("ca-cert.pem"), both).unwrap();
    let text = failure(handshake(&place.client(), &place.server()).1);
    assert!(text.contains("no usable name"), "{text}");
    let permitted = Wanted { names: &["db1.team-a.example.org"], ..common };
    between.issue(place.path(), &permitted);
    handshake(&place.client(), &place.server()).1.unwrap();
}
