//! Tests of keys, files and handshakes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::version::TLS12;
use rustls::{
    AlertDescription, CertRevocationListError, ClientConfig, ClientConnection, ProtocolVersion,
    RootCertStore,
};

use super::config::{TlsClientConfig, TlsServerConfig};
use super::files::TlsDir;
use super::handshake::{Begin, Ended, Handshake, Step};
use super::keys::{Clients, PrivateKey, PublicKey};
use super::workers::TlsEndpoint;
use crate::fabric::Who;
use crate::tests::certificates::{Authority, TestDir, Wanted, certificates, write_secret};

mod chains;

/// Treats every four bytes as one request.
fn request_len(_: &[u8]) -> Option<usize> {
    Some(4)
}

type Outcome = Result<Box<Ended>, String>;

fn server_of(config: &TlsServerConfig) -> Handshake {
    Handshake::new(Begin::Server { config: config.clone(), request_len })
}

/// Runs a handshake between both ends and returns each end's outcome.
fn handshake(client: &TlsClientConfig, server: &TlsServerConfig) -> (Outcome, Outcome) {
    let name = client.name.clone();
    let name = name.unwrap_or_else(|| ServerName::try_from("127.0.0.1").unwrap());
    let (config, request) = (client.clone(), b"ping".to_vec());
    let mut ends = [Handshake::new(Begin::Client { config, name, request }), server_of(server)];
    let mut done: [Option<Outcome>; 2] = [None, None];
    let (mut bytes, mut at) = (Vec::new(), 0);
    for _ in 0..10 {
        let progress = ends[at].advance(&bytes);
        match progress.step {
            Step::More => {}
            Step::Done(ended) => done[at] = Some(Ok(ended)),
            Step::Failed(why) => done[at] = Some(Err(why.to_string())),
        }
        bytes = progress.output;
        at = 1 - at;
        if done[at].is_some() {
            break;
        }
    }
    done.map(|outcome| outcome.unwrap_or(Err("not done".into()))).into()
}

struct Place {
    dir: TestDir,
    authority: Authority,
}

impl Place {
    fn new() -> Self {
        let dir = TestDir::new("tls");
        let authority = certificates(&dir.0);
        Self { dir, authority }
    }

    fn path(&self) -> &Path {
        &self.dir.0
    }

    fn server(&self) -> TlsServerConfig {
        TlsServerConfig::with_certificates(&TlsDir(self.dir.0.clone())).unwrap()
    }

    fn client(&self) -> TlsClientConfig {
        TlsClientConfig::with_certificates(&TlsDir(self.dir.0.clone()), None).unwrap()
    }
}

fn failure(outcome: Outcome) -> String {
    outcome.err().unwrap_or_else(|| "it succeeded".into())
}

#[test]
fn certificates_identify_both_ends() {
    let place = Place::new();
    let (client, server) = handshake(&place.client(), &place.server());
    let (client, server) = (client.unwrap(), server.unwrap());
    assert_eq!(server.request, b"ping");
    assert_eq!(server.session.peer.who, Who::Certificate("db1".into()));
    assert_eq!(server.session.peer.cipher, Some("TLS_AES_128_GCM_SHA256"));
    assert_eq!(client.session.peer.who, Who::Anonymous);
    // Without other names, the common name is used.
    place.authority.issue(place.path(), &Wanted { names: &[], ..Wanted::CLIENT });
    let (_, server) = handshake(&place.client(), &place.server());
    assert_eq!(server.unwrap().session.peer.who, Who::Certificate("a client".into()));
    // A name that cannot be printed is not accepted.
    let odd = Wanted { names: &[], common_name: "a\u{1b}[2J", ..Wanted::CLIENT };
    place.authority.issue(place.path(), &odd);
    let text = failure(handshake(&place.client(), &place.server()).1);
    assert!(text.contains("no usable name"), "{text}");
    let text = place.client().check_own().unwrap_err().to_string();
    assert!(text.contains("client-cert.pem: the certificate has no usable name"), "{text}");
    place.authority.issue(place.path(), &Wanted::CLIENT);
    place.client().check_own().unwrap();
}

#[test]
fn errors_name_the_end_and_the_file() {
    let place = Place::new();
    let names = Wanted { names: &["other.example", "10.0.0.9"], ..Wanted::SERVER };
    place.authority.issue(place.path(), &names);
    let text = failure(handshake(&place.client(), &place.server()).0);
    let why = "the peer's certificate is not for 127.0.0.1; it has other.example, 10.0.0.9";
    assert!(text.contains(why), "{text}");
    // The certificate is for the other end of the connection.
    place.authority.issue(place.path(), &Wanted::SERVER);
    place
        .authority
        .issue(place.path(), &Wanted { uses: Wanted::SERVER_ONLY.uses, ..Wanted::CLIENT });
    let text = failure(handshake(&place.client(), &place.server()).1);
    assert!(text.contains("is not for this use (extended key usage)"), "{text}");
    // The key does not belong to the certificate.
    let key = place.path().join("server-key.pem");
    write_secret(&key, &fs::read_to_string(place.path().join("client-key.pem")).unwrap());
    let error = TlsServerConfig::with_certificates(&TlsDir(place.dir.0.clone())).unwrap_err();
    let text = error.to_string();
    for part in ["server-key.pem", "does not belong to the certificate", "server-cert.pem"] {
        assert!(text.contains(part), "{text}");
    }
    // One end has keys, the other has certificates.
    let [server, client] = [(); 2].map(|()| PrivateKey::generate().unwrap());
    let place = Place::new();
    let known = raw(&[("db1", &client)], &server);
    let ours = TlsClientConfig::with_keys(&client, &[server.public()]).unwrap();
    for (client, server) in [(&place.client(), &known), (&ours, &place.server())] {
        let (at_client, at_server) = handshake(client, server);
        for text in [failure(at_client), failure(at_server)] {
            let is_known = text == "not done" || text.contains("kind of certificate");
            assert!(is_known, "{text}");
        }
    }
}

#[test]
fn a_wrong_client_certificate_is_refused() {
    let place = Place::new();
    let other = Authority::new();
    let server = place.server();
    let expired = Wanted { years: (2020, 2021), ..Wanted::CLIENT };
    let early = Wanted { years: (2119, 2120), ..Wanted::CLIENT };
    for (authority, wanted, why) in [
        (&place.authority, expired, "certificate has expired"),
        (&place.authority, early, "is not valid yet"),
        (&other, Wanted::CLIENT, "is not signed by the CA in ca-cert.pem"),
    ] {
        authority.issue(place.path(), &wanted);
        let text = failure(handshake(&place.client(), &server).1);
        assert!(text.contains(why), "{text}");
    }
    place.authority.issue(place.path(), &Wanted::CLIENT);
    handshake(&place.client(), &server).1.unwrap();
    place.authority.revoke(place.path(), &[9]);
    handshake(&place.client(), &place.server()).1.unwrap();
    place.authority.revoke(place.path(), &[9, Wanted::CLIENT.serial]);
    let text = failure(handshake(&place.client(), &place.server()).1);
    assert!(text.contains("is revoked by ca-crl.pem"), "{text}");
}

#[test]
fn a_ca_certificate_is_not_a_client_certificate() {
    let place = Place::new();
    let server = place.server();
    place.authority.write_as_client(place.path());
    let client = place.client();
    let text = failure(handshake(&client, &server).1);
    assert!(text.contains("the peer's certificate is a CA certificate (basic"), "{text}");
    let text = client.check_own().unwrap_err().to_string();
    assert!(text.contains("client-cert.pem: the certificate is a CA certificate"), "{text}");
    // This is how the client describes the alert.
    let heard = |raw_keys| super::alert_text(AlertDescription::CertificateUnknown, raw_keys, None);
    assert_eq!(heard(true), "our key is not known to the peer");
    assert_eq!(heard(false), "the peer does not accept our certificate");
    let own = PrivateKey::generate().unwrap().public();
    let text = super::alert_text(AlertDescription::CertificateUnknown, true, Some(own));
    assert!(text.contains(&own.to_string()) && text.contains(&own.fingerprint()), "{text}");
    assert!(super::hint(&text).is_some_and(|hint| hint.contains("key show")));
    assert!(super::hint(&heard(true)).is_some_and(|hint| hint.contains("key show")));
    assert!(super::hint(&heard(false)).is_some_and(|hint| hint.contains("not a CA certificate")));
}

#[test]
fn an_unusable_list_differs_from_a_wrong_protocol() {
    let error = rustls::Error::InvalidCertRevocationList(CertRevocationListError::BadSignature);
    let text = super::explain::error_text(&error, true);
    assert_eq!(text, "our ca-crl.pem cannot be used: bad signature");
    assert!(super::hint(&text).is_some_and(|hint| hint.contains("replace ca-crl.pem")));
}

#[test]
fn a_wrong_server_certificate_is_refused() {
    let place = Place::new();
    let client = place.client();
    let other = Authority::new();
    let expired = Wanted { years: (2020, 2021), ..Wanted::SERVER };
    let early = Wanted { years: (2119, 2120), ..Wanted::SERVER };
    let elsewhere = Wanted { names: &["other.example"], ..Wanted::SERVER };
    for (authority, wanted, why) in [
        (&place.authority, expired, "certificate has expired"),
        (&place.authority, early, "is not valid yet"),
        (&place.authority, elsewhere, "certificate is not for 127.0.0.1; it has"),
        (&other, Wanted::SERVER, "is not signed by the CA in ca-cert.pem"),
    ] {
        authority.issue(place.path(), &wanted);
        let text = failure(handshake(&client, &place.server()).0);
        assert!(text.contains(why), "{text}");
        assert!(super::hint(&text).is_some(), "{text}");
    }
    // The configured name is required, not the address.
    place.authority.issue(place.path(), &elsewhere);
    let dir = TlsDir(place.dir.0.clone());
    let named = TlsClientConfig::with_certificates(&dir, Some("other.example")).unwrap();
    handshake(&named, &place.server()).0.unwrap();
    place.authority.revoke(place.path(), &[Wanted::SERVER.serial]);
    let text = failure(handshake(&place.client(), &place.server()).0);
    assert!(text.contains("revoked"), "{text}");
}

fn raw(clients: &[(&str, &PrivateKey)], server: &PrivateKey) -> TlsServerConfig {
    let dir = TestDir::new("tls");
    let path = dir.0.join("clients");
    let lines: Vec<String> = clients
        .iter()
        .map(|(name, key)| format!("{name} {} # a comment\n", key.public()))
        .collect();
    fs::write(&path, lines.concat()).unwrap();
    TlsServerConfig::with_keys(server, Clients::read(&path).unwrap()).unwrap()
}

#[test]
fn raw_keys_identify_both_ends() {
    let [server, client, other] = [(); 3].map(|()| PrivateKey::generate().unwrap());
    let known = raw(&[("db0", &other), ("db1", &client)], &server);
    let ours = TlsClientConfig::with_keys(&client, &[server.public()]).unwrap();
    let (_, at_server) = handshake(&ours, &known);
    assert_eq!(at_server.unwrap().session.peer.who, Who::Key("db1".into()));
    // Either the server is not the pinned server, or the client is unknown.
    let pinned = TlsClientConfig::with_keys(&client, &[other.public()]).unwrap();
    let text = failure(handshake(&pinned, &known).1);
    assert_eq!(text, "the client's server-key does not match the key of this server");
    let text = failure(handshake(&pinned, &known).0);
    let (got, expected) = (server.public().fingerprint(), other.public().fingerprint());
    let why = format!("the peer's key is not known here: got {got}, expected {expected}");
    assert!(text.contains(&why), "{text}");
    let (at_client, at_server) = handshake(&ours, &raw(&[("db0", &other)], &server));
    at_client.unwrap();
    let why = format!("the peer's key is not known here ({})", client.public().fingerprint());
    assert!(failure(at_server).contains(&why));
    // One of several pins is enough, for use while the server's key is being replaced.
    let pins = [other.public(), server.public()];
    let both = TlsClientConfig::with_keys(&client, &pins).unwrap();
    handshake(&both, &known).1.unwrap();
    // Certificates and keys do not mix.
    let place = Place::new();
    for (client, server) in [(&place.client(), &known), (&ours, &place.server())] {
        let (at_client, at_server) = handshake(client, server);
        let texts = [failure(at_client), failure(at_server)];
        println!("{texts:?}");
        assert!(texts.iter().all(|text| text != "it succeeded"), "{texts:?}");
    }
}

#[test]
fn a_client_without_certificate_or_protocol_is_refused() {
    let place = Place::new();
    let server = place.server();
    let mut client = place.client();
    let mut config = (*client.rustls).clone();
    config.alpn_protocols.clear();
    client.rustls = Arc::new(config);
    let text = failure(handshake(&client, &server).1);
    assert!(text.contains("ALPN rtrs/1"), "{text}");
    let mut config = (*client.rustls).clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    client.rustls = Arc::new(config);
    failure(handshake(&client, &server).1);
    let mut client = place.client();
    let mut config = (*client.rustls).clone();
    config.client_auth_cert_resolver = Arc::new(NoCertificate);
    client.rustls = Arc::new(config);
    let text = failure(handshake(&client, &server).1);
    assert!(text.contains("presented no certificate or key"), "{text}");
}

#[derive(Debug)]
struct NoCertificate;

impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(
        &self,
        _hints: &[&[u8]],
        _schemes: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// Returns a TLS 1.2 ClientHello with a common suite, curve and signature algorithm.
fn old_hello() -> Vec<u8> {
    let extensions: &[u8] = &[
        0, 10, 0, 4, 0, 2, 0, 23, // supported_groups: P-256
        0, 13, 0, 4, 0, 2, 4, 3, // signature_algorithms: ECDSA with SHA-256
        0, 11, 0, 2, 1, 0, // ec_point_formats
    ];
    let mut hello = vec![3, 3];
    hello.extend([7; 32]);
    hello.extend([0, 0, 2, 0xc0, 0x2b, 1, 0, 0, extensions.len() as u8]);
    hello.extend(extensions);
    let mut record = vec![22, 3, 1, 0, hello.len() as u8 + 4, 1, 0, 0, hello.len() as u8];
    record.extend(hello);
    record
}

#[test]
fn older_versions_are_refused() {
    let progress = server_of(&Place::new().server()).advance(&old_hello());
    assert!(matches!(progress.step, Step::Failed(_)));
    // A fatal alert: protocol_version, or handshake_failure.
    assert_eq!(progress.output[..6], [21, 3, 3, 0, 2, 2], "{:?}", progress.output);
    assert_eq!(progress.output[6], 70, "protocol_version");
}

#[test]
fn an_invalid_or_oversize_handshake_is_refused() {
    let server = Place::new().server();
    let mut plain = server_of(&server);
    let progress = plain.advance(b"MPA ID Req Frame\x10\x02\0\0");
    let Step::Failed(error) = progress.step else { panic!("it continues") };
    let text = error.to_string();
    assert!(text.contains("does not speak TLS at all"), "{text}");
    // A ClientHello of 16 MiB, in records of 16 KiB.
    let mut long = server_of(&server);
    let mut record = vec![22, 3, 3, 0x40, 0];
    record.resize(5 + 0x4000, 0);
    record[5..9].copy_from_slice(&[1, 0xff, 0xff, 0xff]);
    let failed = (0..8).any(|_| matches!(long.advance(&record).step, Step::Failed(_)));
    assert!(failed, "it is not limited");
    // The records never end.
    let mut slow = server_of(&server);
    let failed = std::iter::once(&[22, 3, 1, 2, 0][..]).chain(std::iter::repeat_n(&[1; 64][..], 4));
    let steps: Vec<bool> =
        failed.map(|bytes| matches!(slow.advance(bytes).step, Step::More)).collect();
    assert_eq!(steps, [true; 5], "the rest of a record is awaited");
}

#[test]
fn data_before_the_server_has_answered_is_refused() {
    let place = Place::new();
    let (config, request) = (place.client(), b"ping and more".to_vec());
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut client = Handshake::new(Begin::Client { config, name, request });
    let mut server = server_of(&place.server());
    let hello = client.advance(&[]).output;
    let flight = server.advance(&hello).output;
    let rest = client.advance(&flight).output;
    let Step::Failed(error) = server.advance(&rest).step else { panic!("it continues") };
    let text = error.to_string();
    assert!(text.contains("did not wait"), "{text}");
}

#[test]
fn missing_and_exposed_files_are_named() {
    let place = Place::new();
    let dir = TlsDir(place.dir.0.clone());
    let text = || TlsServerConfig::with_certificates(&dir).unwrap_err().to_string();
    let key = place.path().join("server-key.pem");
    for mode in [0o640, 0o604, 0o660] {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        let text = text();
        assert!(text.contains("server-key.pem") && text.contains("chmod 600"), "{text}");
        assert!(text.contains(&format!("{mode:03o}")), "{text}");
    }
    fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).unwrap();
    TlsServerConfig::with_certificates(&dir).unwrap();
    for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        let (from, to) = (place.path().join(name), place.path().join("away"));
        fs::rename(&from, &to).unwrap();
        assert!(text().contains(name), "{}", text());
        fs::write(&from, "nothing").unwrap();
        fs::set_permissions(&from, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(text().contains(name), "{}", text());
        fs::rename(&to, &from).unwrap();
    }
    fs::write(place.path().join("ca-crl.pem"), "nothing").unwrap();
    assert!(text().contains("ca-crl.pem"), "{}", text());
}

#[test]
fn an_unreadable_key_is_named_with_a_remedy() {
    let place = Place::new();
    let dir = TlsDir(place.dir.0.clone());
    let key = "-----BEGIN EC PRIVATE KEY-----\nMAMCAQE=\n-----END EC PRIVATE KEY-----\n";
    fs::write(dir.0.join("server-key.pem"), key).unwrap();
    let text = TlsServerConfig::with_certificates(&dir).unwrap_err().to_string();
    assert!(
        text.contains("server-key.pem: this private key cannot be read; use Ed25519"),
        "{text}"
    );
}

#[test]
fn a_key_is_written_once_and_read_back() {
    let dir = TestDir::new("tls");
    let path = dir.0.join("key");
    let key = PrivateKey::generate().unwrap();
    key.write_new(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(PrivateKey::read(&path).unwrap().public(), key.public());
    let error = PrivateKey::generate().unwrap().write_new(&path).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
    let text = key.public().to_string();
    assert_eq!(text.parse::<PublicKey>().unwrap(), key.public());
    assert_eq!(text.len(), "ed25519:".len() + 44);
    assert_eq!(key.public().fingerprint().len(), "SHA256:".len() + 43);
    for wrong in ["", "ed25519:", "ed25519:AAAA", &text[8..], "rsa:AAAA"] {
        wrong.parse::<PublicKey>().unwrap_err();
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(PrivateKey::read(&path).unwrap_err().to_string().contains("chmod 600"));
    write_secret(&path, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
    assert!(PrivateKey::read(&path).unwrap_err().to_string().contains("no Ed25519 private key"));
    for head in ["-----BEGIN ENCRYPTED PRIVATE KEY-----", "x\nProc-Type: 4,ENCRYPTED"] {
        write_secret(&path, head);
        let text = PrivateKey::read(&path).unwrap_err().to_string();
        assert!(text.contains("it is encrypted") && text.contains("openssl pkey"), "{text}");
    }
    // The example in RFC 8410 section 10.3, as openssl writes it.
    let pem = "-----BEGIN PRIVATE KEY-----\n\
               MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n\
               -----END PRIVATE KEY-----\n";
    write_secret(&path, pem);
    let public = PrivateKey::read(&path).unwrap().public().to_string();
    assert_eq!(public, "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=");
}

#[test]
fn an_error_in_the_client_list_names_its_line() {
    let dir = TestDir::new("tls");
    let path = dir.0.join("clients");
    let [one, two] = [(); 2].map(|()| PrivateKey::generate().unwrap().public());
    let read = |text: &str| {
        fs::write(&path, text).unwrap();
        Clients::read(&path).map_err(|error| error.to_string())
    };
    let clients = read(&format!("# all\n\n db1 {one}\ndb1\t{two} # the new key\n")).unwrap();
    assert_eq!((clients.len(), clients.name(&two).as_deref()), (2, Some("db1")));
    for (text, part) in [
        (format!("db1 {one}\ndb2"), "line 2 is not NAME ed25519:BASE64"),
        (format!("db1 {one} x"), "line 1 is not NAME"),
        ("db1 ed25519:zz".to_owned(), "line 1: not a public key"),
        (format!("db1 {one}\ndb2 {one}\n"), "line 2 repeats the key of line 1; remove one"),
        (format!("db1: {one}\n"), "line 1: write db1 without a colon after it"),
        ("db1 ed25519:\n".into(), "line 1: not a public key"),
        (format!("d\u{7f}b {one}"), "line 1: use a name"),
    ] {
        let error = read(&text).unwrap_err();
        assert!(error.contains(part) && error.contains("clients"), "{error}");
    }
}

/// Returns the version that this server negotiates with a client that supports only TLS 1.2.
fn agree(dir: &Path, server: &TlsServerConfig) -> Result<ProtocolVersion, rustls::Error> {
    let files = TlsDir(dir.into()).read("client").unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(files.ca[0].clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS12])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(files.chain, files.key)
        .unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut server = server.connection().unwrap();
    for _ in 0..4 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        server.read_tls(&mut bytes.as_slice()).unwrap();
        server.process_new_packets()?;
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        client.read_tls(&mut bytes.as_slice()).unwrap();
        client.process_new_packets()?;
    }
    assert!(!server.is_handshaking());
    Ok(server.protocol_version().unwrap())
}

#[test]
fn only_nbd_clients_may_use_tls_1_2() {
    let place = Place::new();
    let dir = TlsDir(place.path().into());
    let nbd = TlsServerConfig::for_nbd(&dir).unwrap();
    assert_eq!(agree(place.path(), &nbd), Ok(ProtocolVersion::TLSv1_2));
    let refused = agree(place.path(), &place.server()).unwrap_err();
    assert!(matches!(refused, rustls::Error::PeerIncompatible(_)), "{refused}");
    place.authority.revoke(place.path(), &[Wanted::CLIENT.serial]);
    let nbd = TlsServerConfig::for_nbd(&dir).unwrap();
    let refused = agree(place.path(), &nbd).unwrap_err();
    assert!(super::explain::error_text(&refused, false).contains("is revoked"), "{refused}");
}

#[test]
fn a_certificate_for_the_other_role_is_refused_by_its_owner() {
    let place = Place::new();
    let (dir, tls_dir) = (place.path(), TlsDir(place.dir.0.clone()));
    let copy = |from: &str, to: &str| {
        for end in ["cert", "key"] {
            let text = fs::read_to_string(dir.join(format!("{from}-{end}.pem"))).unwrap();
            write_secret(&dir.join(format!("{to}-{end}.pem")), &text);
        }
    };
    place.server().check_own().unwrap();
    place.authority.issue(dir, &Wanted::CLIENT_ONLY);
    place.client();
    copy("client", "server");
    let text = place.server().check_own().unwrap_err().to_string();
    assert!(text.contains("server-cert.pem: the certificate is not for servers"), "{text}");
    place.authority.issue(dir, &Wanted::SERVER_ONLY);
    place.server().check_own().unwrap();
    copy("server", "client");
    let client = TlsClientConfig::with_certificates(&tls_dir, None).unwrap();
    let text = client.check_own().unwrap_err().to_string();
    assert!(text.contains("client-cert.pem: the certificate is not for clients"), "{text}");
}

#[test]
fn changes_are_named() {
    let place = Place::new();
    let before = place.server();
    assert_eq!(place.server().changes_since(&before), [""; 0]);
    place.authority.revoke(place.path(), &[7]);
    assert_eq!(place.server().changes_since(&before), ["ca-crl.pem"]);
    place.authority.issue(place.path(), &Wanted::SERVER);
    let changes = ["ca-crl.pem", "server-cert.pem", "server-key.pem"];
    assert_eq!(place.server().changes_since(&before), changes);
    let [server, one, two] = [(); 3].map(|()| PrivateKey::generate().unwrap());
    let before = raw(&[("db1", &one)], &server);
    assert_eq!(raw(&[("db1", &one)], &server).changes_since(&before), [""; 0]);
    let line = |what: &str, key: &PrivateKey| {
        format!("clients-file: {what} ({})", key.public().fingerprint())
    };
    let after = raw(&[("db2", &one), ("db3", &two)], &server).changes_since(&before);
    assert_eq!(after[0], line("removed db1", &one), "{after:?}");
    assert_eq!(after.len(), 3, "{after:?}");
    assert!(after.contains(&line("added db2", &one)), "{after:?}");
    assert!(after.contains(&line("added db3", &two)), "{after:?}");
    let after = raw(&[("db1", &one)], &two).changes_since(&before);
    assert_eq!(after, ["key-file"]);
}

#[test]
fn a_bad_certificate_is_refused_unless_already_in_use() {
    let place = Place::new();
    let expired = Wanted { years: (2020, 2021), ..Wanted::SERVER };
    let good = place.server();
    place.authority.issue(place.path(), &expired);
    let text = place.server().check_renewed(&good).unwrap_err().to_string();
    assert!(text.contains("server-cert.pem: the certificate expired on 2021-01-01"), "{text}");
    let in_use = place.server();
    place.authority.revoke(place.path(), &[Wanted::CLIENT.serial]);
    let endpoint = TlsEndpoint::server(in_use.clone()).unwrap();
    assert_eq!(endpoint.expires(), Some(1_609_459_200));
    assert!(
        endpoint
            .expiry_warning()
            .is_some_and(|text| text.ends_with("clients refuse the certificate"))
    );
    assert_eq!(TlsEndpoint::server(good.clone()).unwrap().expiry_warning(), None);
    let warning = place.server().check_renewed(&in_use).unwrap().unwrap();
    assert!(warning.contains("expired on 2021-01-01") && warning.contains("in use"), "{warning}");
    place.authority.issue(place.path(), &expired);
    assert!(place.server().check_renewed(&in_use).is_err());
    place.authority.issue(place.path(), &Wanted { days: Some(2), ..Wanted::SERVER });
    assert_eq!(place.server().check_renewed(&in_use).unwrap(), None);
}

#[test]
fn identical_files_start_no_generation() {
    let place = Place::new();
    let endpoint = TlsEndpoint::server(place.server()).unwrap();
    assert_eq!(endpoint.replace(place.server()), 0);
    place.authority.revoke(place.path(), &[7]);
    assert_eq!([endpoint.replace(place.server()), endpoint.replace(place.server())], [1; 2]);
    let [server, client] = [(); 2].map(|()| PrivateKey::generate().unwrap());
    let endpoint = TlsEndpoint::server(raw(&[("db1", &client)], &server)).unwrap();
    assert_eq!(endpoint.replace(raw(&[("db1", &client)], &server)), 0);
    assert_eq!(endpoint.replace(raw(&[("db2", &client)], &server)), 1);
    assert_eq!(endpoint.replace(raw(&[], &server)), 2);
    assert_eq!(endpoint.replace(raw(&[], &client)), 3);
}

#[test]
fn names_that_mean_something_else_in_access_lists_are_refused() {
    let dir = TestDir::new("names");
    let (path, key) = (dir.0.join("clients"), PrivateKey::generate().unwrap().public());
    for (name, why) in [
        ("anyone", "is a reserved word in access lists"),
        ("Kernel", "is a reserved word in access lists"),
        ("kernel@10.0.0.0/8", "contains @"),
        ("db1@store", "contains @"),
        ("key:db1", "begins with a prefix that `session list` adds"),
    ] {
        fs::write(&path, format!("{name} {key}\n")).unwrap();
        let text = Clients::read(&path).unwrap_err().to_string();
        assert!(text.contains(why) && text.contains("line 1"), "{text}");
    }
    let text = Clients::read(&dir.0.join("none")).unwrap_err().chain();
    assert!(text.contains("none: No such file or directory"), "{text}");
}
