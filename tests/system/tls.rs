//! Tests of tls:// with the real daemons: certificates and keys, refusals and their messages,
//! disconnected paths, new certificates without a restart, and the bytes on the wire.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rtrs_core::ids::SessionId;
use rtrs_core::tests::certificates::{Authority, Wanted, certificates};
use rtrs_core::wire::errno::EACCES;
use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Innocent, Peer, PeerOptions, Proc, RawNbd, Reply,
    STOP_TIME_MAX, Scratch, Server, ServerBuilder, bin, is_root, requires, run, wait_for,
};
use serde_json::Value;

/// A scratch directory with certificates and the CA that issues them.
struct Place {
    scratch: Scratch,
    authority: Authority,
}

impl Place {
    fn new() -> Self {
        let scratch = Scratch::new();
        fs::create_dir_all(scratch.path("tls")).expect("a directory");
        let authority = certificates(&scratch.path("tls"));
        Self { scratch, authority }
    }

    fn dir(&self) -> String {
        self.scratch.text("tls")
    }

    fn issue(&self, wanted: &Wanted<'_>) {
        self.authority.issue(Path::new(&self.dir()), wanted);
    }

    fn server(&self) -> ServerBuilder {
        Server::builder()
            .export("vol0=mem:16M")
            .listen("tls://127.0.0.1:0")
            .args(&["--tls-dir", &self.dir()])
    }

    fn doctor(&self, portal: &str) -> Finished {
        run(bin("rtrs-client"), &["doctor", portal, "--tls-dir", &self.dir()], COMMAND_TIME_MAX)
    }
}

/// Waits until the only session has this many paths up, and returns it.
fn only_session(server: &Server, paths: usize) -> Value {
    wait_for("the session's paths", COMMAND_TIME_MAX, || {
        let sessions = server.sessions();
        let up = |session: &Value| {
            let paths = session["paths"].as_array().expect("paths");
            paths.iter().filter(|path| path["state"] == "connected").count()
        };
        (sessions.len() == 1 && up(&sessions[0]) == paths).then(|| sessions[0].clone())
    })
}

#[test]
fn two_tls_paths_of_a_session_fail_over_and_prove_its_identity() {
    let place = Place::new();
    // The list also admits clients without a name, so it is the identity that protects the session.
    let server = place.server().listen("tls://127.0.0.2:0").listen("tcp://127.0.0.3:0");
    let server = server.args(&["--access", "anyone:rw"]).start();
    let tls_dir = place.dir();
    let client = server.portals()[..2]
        .iter()
        .fold(Client::attach("vol0"), |client, portal| client.path(portal))
        .args(&["--session-name", "sess", "--tls-dir", &tls_dir])
        .start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 1 << 20, &[7; 300_032]), Reply::Error(0));
    let mut back = vec![0; 300_032];
    assert_eq!(raw.read(1 << 20, &mut back), Ok(()));
    assert_eq!(back, vec![7; 300_032]);
    drop(raw);
    let innocent = Innocent::start(client.front(), "vol0");
    for _ in 0..3 {
        let session = only_session(&server, 2);
        assert_eq!(session["identity"], "certificate:db1", "{session}");
        for path in session["paths"].as_array().expect("paths") {
            assert_eq!(path["transport"], "tls", "{path}");
            assert_eq!(path["cipher"], "TLS_AES_128_GCM_SHA256", "{path}");
        }
        // A path that was disconnected earlier may still be listed.
        let mut paths = session["paths"].as_array().expect("paths").iter();
        let path = paths.find(|path| path["state"] == "connected").expect("a path");
        let path = path["path"].to_string();
        let _ = server.command(&["session", "disconnect", "sess", "--path", &path]).ok();
        innocent.progress();
    }
    let session = only_session(&server, 2);
    innocent.check();
    let shown = server.command(&["session", "list"]).ok().stdout;
    assert!(shown.contains("certificate:db1") && shown.contains("TLS_AES_128_GCM"), "{shown}");
    // An attacker who has read the session's ID joins over the plain portal with a different
    // identity.
    let id = session["id"].as_str().expect("a number").replace('-', "");
    let bytes: Vec<u8> = (0..16)
        .map(|at| u8::from_str_radix(&id[at * 2..at * 2 + 2], 16).expect("hex digits"))
        .collect();
    let options = PeerOptions::new(1, 99);
    let plain = server.portals()[2].strip_prefix("tcp://").expect("a portal");
    let mut peer = Peer::new(plain.parse().expect("an address"), options);
    let mut request = options.request(0);
    request.session_id = SessionId(bytes.try_into().expect("16 bytes"));
    let refused = peer.connect_raw(&request.encode());
    assert_eq!(refused, Err(-EACCES.cast_signed()));
    assert_eq!(server.list()["refused"]["identity"], 1);
    let _ = only_session(&server, 2);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn access_lists_match_certificate_names_and_without_a_list_any_name_is_admitted() {
    let place = Place::new();
    let tls_dir = place.dir();
    let attach = |portal: &str, tls: bool| {
        let client = Client::attach("vol0").path(portal);
        if tls { client.args(&["--tls-dir", &tls_dir]) } else { client }.try_start()
    };
    for (list, named, nameless) in [
        (&[][..], true, false),
        (&["--access", "db1:rw"], true, false),
        (&["--access", "kernel@127.0.0.0/8:rw"], false, true),
        (&["--access", "db2:rw"], false, false),
        (&["--access", "anyone:rw"], true, true),
    ] {
        let server = place.server().listen("tcp://127.0.0.1:0").args(list).start();
        for (portal, tls, may) in [(0, true, named), (1, false, nameless)] {
            let (client, done) = attach(&server.portals()[portal], tls);
            assert_eq!(done.code == Some(0), may, "{list:?} {portal}: {}", done.stderr);
            match may {
                true => client.detach(),
                false => drop(done.says("access lists do not admit this client")),
            }
        }
        let warning = "the portal tcp://127.0.0.1:0 admits no client";
        let output = if nameless { server.output() } else { server.wait_output(warning) };
        let warnings = output.matches(" WARN rtrs_server::daemon::warnings: ").count();
        assert_eq!(warnings, usize::from(!nameless), "{list:?}: {output}");
        assert_eq!(output.contains(warning), !nameless);
        let _ = server.stop(STOP_TIME_MAX);
    }
}

#[test]
fn a_revoked_certificate_ends_only_its_sessions() {
    let place = Place::new();
    let tls_dir = place.dir();
    let server = place.server().args(&["--access", "db1:rw", "--access", "db2:rw"]).start();
    let client =
        Client::attach("vol0").path(server.portal()).args(&["--tls-dir", &tls_dir]).start();
    assert_eq!(only_session(&server, 1)["identity"], "certificate:db1");
    let _ = server.command(&["reload"]).ok();
    assert_eq!(server.sessions().len(), 1, "nothing is revoked");
    let metrics = server.command(&["metrics"]).ok().stdout;
    // 2120-01-01
    let line = "rtrs_server_certificate_expiry_timestamp_seconds 4733510400\n";
    assert!(metrics.contains(line), "{metrics}");
    place.authority.revoke(Path::new(&tls_dir), &[Wanted::CLIENT.serial]);
    let _ = server.command(&["reload"]).ok();
    wait_for("the end of the session", COMMAND_TIME_MAX, || {
        server.sessions().is_empty().then_some(())
    });
    let got = place.doctor(server.portal()).code(1).stdout;
    assert!(got.contains("revoked"), "{got}");
    let _ = client.command(&["detach", "vol0", "--force", "--within", "0"]);
    let _ = server.stop(STOP_TIME_MAX);
}

/// Runs a daemon's `key generate`; returns the file and the public key that it prints.
fn generate(program: &str, scratch: &Scratch, name: &str) -> (String, String) {
    let file = scratch.text(name);
    let made = run(bin(program), &["key", "generate", &file], COMMAND_TIME_MAX).ok();
    let public = made.stdout.trim().to_owned();
    let shown = run(bin(program), &["key", "show", &file], COMMAND_TIME_MAX).ok().stdout;
    assert_eq!(shown.trim(), public);
    let print = run(bin(program), &["key", "fingerprint", &file], COMMAND_TIME_MAX).ok().stdout;
    assert!(print.starts_with("SHA256:"), "{print}");
    let of_public = ["key", "fingerprint", &public];
    assert_eq!(run(bin(program), &of_public, COMMAND_TIME_MAX).ok().stdout, print);
    let json = run(bin(program), &["key", "show", &file, "-o", "json"], COMMAND_TIME_MAX).ok();
    assert_eq!(json.json()["public"], public.as_str());
    let again = run(bin(program), &["key", "generate", &file], COMMAND_TIME_MAX);
    let _ = again.code(1).says("move the old key away first");
    (file, public)
}

#[test]
fn sessions_authenticate_with_raw_keys_and_a_reload_revokes_them() {
    let scratch = Scratch::new();
    let (server_file, server_key) = generate("rtrs-server", &scratch, "server.key");
    let (client_file, client_key) = generate("rtrs-client", &scratch, "client.key");
    let clients = scratch.text("clients");
    fs::write(&clients, format!("db1 {client_key}\n")).expect("the list");
    let mut server = Server::builder()
        .export("vol0=mem:16M")
        .listen("tls://127.0.0.1:0")
        .args(&["--key-file", &server_file, "--clients-file", &clients])
        .start();
    let tls = ["--key-file", &client_file, "--server-key", &server_key];
    let client = Client::attach("vol0").path(server.portal()).args(&tls).start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[7; 8192]), Reply::Error(0));
    let before = only_session(&server, 1);
    assert_eq!(before["identity"], "key:db1");
    let ping = [&["ping", server.portal(), "-c3", "-i0"][..], &tls].concat();
    let _ = run(bin("rtrs-client"), &ping, COMMAND_TIME_MAX).ok();
    // A list with additional clients does not affect the session.
    fs::write(&clients, format!("db1 {client_key}\n# db2\n")).expect("the list");
    let _ = server.command(&["reload"]).ok();
    let after = only_session(&server, 1);
    assert_eq!(after["paths"][0]["path"], before["paths"][0]["path"], "the same path");
    assert_eq!(raw.read(0, &mut [0; 4096]), Ok(()));
    // A list without the client ends the client's session and does not admit the client again.
    fs::write(&clients, "# nobody\n").expect("the list");
    server.signal("HUP");
    let _ = server.wait_output("certificates or keys reloaded");
    wait_for("the end of the session", COMMAND_TIME_MAX, || {
        server.sessions().is_empty().then_some(())
    });
    let doctor = [&["doctor", server.portal()][..], &tls].concat();
    let got = run(bin("rtrs-client"), &doctor, COMMAND_TIME_MAX).code(1);
    let text = format!("our key is not known to the peer ({client_key}, SHA256:");
    assert!(got.stdout.contains(&text), "{}", got.stdout);
    assert!(got.stdout.contains("server's clients-file"), "{}", got.stdout);
    // An invalid list changes nothing.
    fs::write(&clients, "db1\n").expect("the list");
    for words in [&["reload"][..], &["reload", "--dry-run"]] {
        let _ = server.command(words).code(1).says("line 1 is not NAME ed25519:BASE64");
    }
    fs::write(&clients, format!("db1 {client_key}\nstore1 {server_key}\n")).expect("the list");
    let _ = server.command(&["reload"]).code(1).says("the key of store1 is the key of this server");
    fs::write(&clients, format!("db1 {client_key}\n")).expect("the list");
    let _ = server.command(&["reload"]).ok();
    // A name that is missing from the list is reported wherever it is set.
    let warning = "warning: access rules name \"db9\", but clients-file has no such client";
    let add = ["export", "add", "vol9=null:1M,access=db9:rw", "--force"];
    let _ = server.command(&add).ok().says(warning);
    let set = server.command(&["export", "set", "vol9", "access=db9:ro", "-o", "json"]).ok().json();
    assert!(
        set["warnings"][0].as_str().is_some_and(|text| text.starts_with(&warning[9..])),
        "{set}"
    );
    let _ = server.command(&["export", "set", "vol9", "access=db1:ro"]).ok();
    let _ = server.command(&["export", "remove", "vol9"]).ok();
    let _ = server.command(&["reload"]).ok();
    let _ = run(bin("rtrs-client"), &doctor, COMMAND_TIME_MAX).ok();
    let _ = only_session(&server, 1);
    assert_eq!(raw.read(0, &mut [0; 4096]), Ok(()), "the read waited for a path");
    drop(raw);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn doctor_explains_certificate_errors() {
    let place = Place::new();
    let server = place.server().start();
    let portal = server.portal().to_owned();
    let _ = place.doctor(&portal).ok();
    let check = |portal: &str, what: &str, hint: &str| {
        let got = place.doctor(portal).code(1).stdout;
        assert!(got.contains(what) && got.contains(hint), "no {what:?}, {hint:?} in {got}");
    };
    place.issue(&Wanted { years: (2020, 2021), ..Wanted::CLIENT });
    check(&portal, "our certificate has expired", "renew client-cert.pem");
    Authority::new().issue(Path::new(&place.dir()), &Wanted::CLIENT);
    check(&portal, "not signed by the CA that the peer trusts", "have the server's CA sign");
    place.issue(&Wanted::CLIENT);
    // A reload also rereads the server's own certificate.
    place.issue(&Wanted { names: &["elsewhere"], ..Wanted::SERVER });
    let _ = server.command(&["reload"]).ok().says("changed: server-cert.pem");
    check(&portal, "is not for 127.0.0.1", "hostname");
    // A certificate that no client would accept does not replace the current one.
    for (years, why) in [((2020, 2021), "expired on 2021-01-01"), ((2119, 2120), "clock")] {
        place.issue(&Wanted { years, ..Wanted::SERVER });
        for words in [&["reload"][..], &["reload", "--dry-run"]] {
            let _ = server.command(words).code(1).says("nothing changed").says(why);
        }
        check(&portal, "is not for 127.0.0.1", "hostname");
        let _ = place.server().args(&["--check"]).run().code(1).says(why);
        let _ = place.server().run().code(1).says(why);
    }
    let named = ["doctor", &portal, "--tls-dir", &place.dir(), "--tls-hostname", "elsewhere"];
    let _ = run(bin("rtrs-client"), &named, COMMAND_TIME_MAX).ok();
    // Use the wrong scheme, in both directions.
    let plain = portal.replace("tls://", "tcp://");
    check(&plain, "the server accepts only TLS on this port; use tls://", "connect with tls://");
    let plain_server = Server::builder().export("vol0=mem:16M").listen("tcp://127.0.0.1:0").start();
    let other = plain_server.portal().replace("tcp://", "tls://");
    check(&other, "during the TLS handshake", "listens there on tls://");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn invalid_settings_are_refused_by_name() {
    let place = Place::new();
    let dir = place.dir();
    let server = |args: &[&str]| server_without_place(args);
    let _ = server(&[]).code(2).says("set tls-dir, or key-file and clients-file");
    let both = ["--tls-dir", &dir, "--key-file", "k", "--clients-file", "c"];
    let _ = server(&both).code(2).says("tls-dir excludes key-file");
    let _ = server(&["--key-file", "k"]).code(2).says("key-file needs clients-file");
    let key = place.scratch.path("tls").join("server-key.pem");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("a mode");
    let _ = server(&["--tls-dir", &dir]).code(1).says("its mode 644 gives access to others");
    fs::remove_file(&key).expect("the key");
    let _ = server(&["--tls-dir", &dir]).code(1).says("server-key.pem");
    let attach = |args: &[&str]| {
        let words = [&["bench", "vol0", "--path", "tls://127.0.0.1:9"][..], args].concat();
        run(bin("rtrs-client"), &words, COMMAND_TIME_MAX)
    };
    let _ = attach(&[]).code(2).says("set tls-dir, or key-file and server-key");
    let _ = attach(&["--key-file", "k"]).code(2).says("key-file needs server-key");
    let _ = attach(&["--tls-hostname", "h"]).code(2).says("tls-hostname needs tls-dir");
    let key = place.scratch.path("tls").join("client-key.pem");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).expect("a mode");
    let _ = attach(&["--tls-dir", &dir]).code(1).says("its mode 640 gives access to others");
}

fn server_without_place(args: &[&str]) -> Finished {
    Server::builder().export("vol0=mem:16M").listen("tls://127.0.0.1:0").args(args).run()
}

#[test]
fn no_data_is_readable_on_the_wire() {
    if !requires(&["dumpcap"]) || !(is_root() || requires(&["(capturing: run as root)"])) {
        return;
    }
    let place = Place::new();
    let server =
        place.server().listen("tcp://127.0.0.1:0").args(&["--access", "anyone:rw"]).start();
    let block: Vec<u8> = b"this block is a secret. ".iter().copied().cycle().take(8192).collect();
    let seen = |portal: &str| {
        let scratch = Scratch::new();
        let file = scratch.text("session.pcap");
        let (_, port) = portal.rsplit_once(':').expect("a port");
        let mut dumpcap = Command::new("dumpcap");
        dumpcap.args([
            "-q",
            "-i",
            "lo",
            "-f",
            &format!("tcp port {port}"),
            "-B",
            "64",
            "-w",
            &file,
        ]);
        let mut capture = Proc::start(dumpcap);
        wait_for("dumpcap to start", COMMAND_TIME_MAX, || {
            fs::metadata(&file).ok().filter(|meta| meta.len() > 0)
        });
        std::thread::sleep(Duration::from_secs(1));
        let dir = place.dir();
        let client = Client::attach("vol0").path(portal).args(&["--tls-dir", &dir]).start();
        let mut raw = RawNbd::go(client.front(), "vol0");
        assert_eq!(raw.write(0, 0, &block), Reply::Error(0));
        let mut back = vec![0; block.len()];
        assert_eq!(raw.read(0, &mut back), Ok(()));
        assert_eq!(back, block);
        drop(raw);
        client.detach();
        std::thread::sleep(Duration::from_secs(1));
        capture.signal("INT");
        assert_eq!(capture.wait(COMMAND_TIME_MAX).code, Some(0));
        let bytes = fs::read(&file).expect("the capture");
        assert!(bytes.len() > 2 * block.len(), "too little was captured");
        let has = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
        (has(b"this block is a secret."), has(b"MPA ID Req Frame"), has(b"vol0"))
    };
    assert_eq!(seen(&server.portals()[1]), (true, true, true), "the search itself works");
    assert_eq!(seen(server.portal()), (false, false, false));
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn the_audit_log_names_authenticated_clients() {
    let (place, stranger) = (Place::new(), Place::new());
    let log = place.scratch.text("audit.log");
    let server = place.server().args(&["--audit-log", &log]).start();
    let client = Client::attach("vol0").path(server.portal()).args(&["--tls-dir", &place.dir()]);
    let client = client.start();
    let _ = stranger.doctor(server.portal()).code(1);
    wait_for("the refusal in the log", COMMAND_TIME_MAX, || {
        let text = fs::read_to_string(&log).expect("an audit log");
        text.contains(r#""result":"refused""#).then_some(())
    });
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
    let text = fs::read_to_string(&log).expect("an audit log");
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let lines: Vec<Value> = lines.filter(|line: &Value| line["event"] == "authenticate").collect();
    let result = |result| lines.iter().find(|line| line["result"] == result);
    let ok = result("ok").unwrap_or_else(|| panic!("{text}"));
    assert_eq!((&ok["identity"], &ok["cipher"]), (&"db1".into(), &"TLS_AES_128_GCM_SHA256".into()));
    let refused = result("refused").unwrap_or_else(|| panic!("{text}"));
    assert_eq!((&refused["identity"], &refused["cipher"]), (&Value::Null, &Value::Null), "{text}");
    for line in [ok, refused] {
        assert!(line["address"].as_str().is_some_and(|at| at.starts_with("127.0.0.1:")), "{text}");
    }
}

#[test]
fn a_reload_and_its_dry_run_name_the_revoked_clients() {
    let place = Place::new();
    let server = place.server().start();
    let client = Client::attach("vol0").path(server.portal()).args(&["--tls-dir", &place.dir()]);
    let client = client.args(&["--session-name", "sess"]).start();
    let _ = only_session(&server, 1);
    place.authority.revoke(Path::new(&place.dir()), &[Wanted::CLIENT.serial]);
    let expected = serde_json::json!([
        { "session": "sess", "identity": "certificate:db1", "paths": 1, "paths_left": 0,
          "peers": ["127.0.0.1"] }
    ]);
    let would = server.command(&["reload", "--dry-run", "-o", "json"]).ok().json();
    assert_eq!(would["keys_changed"], serde_json::json!(["ca-crl.pem"]), "{would}");
    assert_eq!(would["revoked"], expected, "{would}");
    let _ = only_session(&server, 1);
    let done = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!((&done["revoked"], &done["keys_changed"]), (&expected, &would["keys_changed"]));
    let _ = server.command(&["reload"]).ok().says("0 exports changed");
    drop(client);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn revoked_clients_are_disconnected_despite_an_expired_server_certificate() {
    let place = Place::new();
    let tls_dir = place.dir();
    let config = place.scratch.text("server.yaml");
    let list = |who: &str| fs::write(&config, format!("access: [{who}]\n")).expect("a file");
    list("'db1:rw', 'db2:rw'");
    let server = place.server().args(&["--config", &config]).start();
    let attach = |name: &str, access: &str| {
        let client = Client::attach("vol0").path(server.portal()).args(&["--tls-dir", &tls_dir]);
        client.args(&["--session-name", name, "--access", access]).start()
    };
    let first = attach("one", "rw");
    place.issue(&Wanted { names: &["db2"], serial: 5, ..Wanted::CLIENT });
    let second = attach("two", "ro");
    // Increases the validity until the certificate is still valid when the server reads it.
    let short = [2, 8, 32].into_iter().any(|seconds| {
        place.issue(&Wanted { seconds: Some(seconds), ..Wanted::SERVER });
        server.command(&["reload"]).code == Some(0)
    });
    assert!(short, "no reload in 32 s");
    let preview = || server.command(&["reload", "--dry-run", "-o", "json"]).ok().json();
    wait_for("the certificate to expire", COMMAND_TIME_MAX, || {
        let certificate = preview()["certificate"].clone();
        certificate.as_str().is_some_and(|why| why.contains("expired on")).then_some(())
    });
    // No client can be admitted, but access can still be revoked.
    list("'db1:rw'");
    let done = server.command(&["reload", "--force"]).ok();
    let done = done.says("warning: ").says("server-cert.pem: the certificate expired on ");
    let _ = done.says("ended: 1 path of session two");
    assert_eq!(only_session(&server, 1)["name"], "one");
    place.authority.revoke(Path::new(&tls_dir), &[Wanted::CLIENT.serial]);
    assert_eq!(preview()["revoked"][0]["session"], "one");
    let done = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!(done["revoked"][0]["session"], "one", "{done}");
    wait_for("the end of the session", COMMAND_TIME_MAX, || {
        server.sessions().is_empty().then_some(())
    });
    let _ = server.wait_output("the certificate is still in use, and clients refuse it");
    // A reload accepts no other invalid certificate, and a start accepts none at all.
    place.issue(&Wanted { years: (2020, 2021), ..Wanted::SERVER });
    let _ = server.command(&["reload"]).code(1).says("nothing changed").says("2021-01-01");
    let _ = place.server().args(&["--check"]).run().code(1).says("expired on 2021-01-01");
    drop((first, second));
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_failed_reload_reports_what_it_changed() {
    let place = Place::new();
    let (tls_dir, log) = (place.dir(), place.scratch.text("audit.log"));
    let config = place.scratch.text("server.yaml");
    let write = |more: &str| {
        let text = format!("export: [{{name: vol0, target: 'mem:16M'}}{more}]\n");
        fs::write(&config, text).expect("a file");
    };
    write("");
    let server = |args: &[&str]| {
        let server = Server::builder().listen("tls://127.0.0.1:0").args(&["--tls-dir", &tls_dir]);
        server.args(&["--config", &config]).args(args).start()
    };
    let pings = server(&["--ping-only"]);
    let server = server(&["--audit-log", &log, "--strict"]);
    let client = Client::attach("vol0").path(server.portal()).args(&["--tls-dir", &tls_dir]);
    let client = client.args(&["--session-name", "sess"]).start();
    let _ = only_session(&server, 1);
    write(", {name: new, target: /none/there}");
    let _ = server.command(&["reload"]).code(1).says("nothing changed: ").says("/none/there");
    let dry = server.command(&["reload", "--dry-run"]).code(1);
    let _ = dry.says("nothing would change: ").says("/none/there");
    place.authority.revoke(Path::new(&tls_dir), &[Wanted::CLIENT.serial]);
    let dry = server.command(&["reload", "--dry-run"]).code(1);
    let dry = dry.says("no export would change: ").says("/none/there");
    let _ = dry.says("this would apply: ca-crl.pem; sessions that would lose paths: sess");
    let _ = only_session(&server, 1);
    let done = server.command(&["reload", "-o", "json"]).code(1);
    let got: Value = serde_json::from_str(&done.stderr).expect("JSON");
    let got = got["error"].as_str().expect("an error");
    let applied = "but this was applied: ca-crl.pem; sessions that lost paths: sess";
    assert!(got.starts_with("no export changed: ") && got.ends_with(applied), "{got}");
    wait_for("the end of the session", COMMAND_TIME_MAX, || {
        server.sessions().is_empty().then_some(())
    });
    drop(client);
    let _ = server.stop(STOP_TIME_MAX);
    let text = fs::read_to_string(&log).expect("an audit log");
    let lines = text.lines().filter(|line| line.contains(r#""event":"reload""#));
    let lines: Vec<&str> = lines.collect();
    assert!(lines[0].contains(r#""result":"refused""#), "{text}");
    assert!(lines[1].contains(r#""result":"partly""#) && lines[1].contains(applied), "{text}");
    // Without exports there is no conflict.
    let _ = pings.command(&["reload"]).ok().says("changed: ca-crl.pem\n0 exports changed, 0 ");
    let _ = pings.stop(STOP_TIME_MAX);
}

#[test]
fn revocation_lists_are_validated_before_use() {
    let place = Place::new();
    let dir = place.dir();
    let write = |list: &str| fs::write(Path::new(&dir).join("ca-crl.pem"), list).expect("a list");
    let (expired, good) = (place.authority.list(&[], 9, 2022), place.authority.list(&[], 10, 2120));
    write(&good);
    let server = place.server().start();
    let path = place.scratch.text("socket");
    let run_dir = place.scratch.text("run");
    let words = ["attach", "vol0", "--path", server.portal(), "--socket", &path, "--check"];
    let words = [&words[..], &["--run-dir", &run_dir, "--tls-dir", &dir]].concat();
    let attach = || run(bin("rtrs-client"), &words, COMMAND_TIME_MAX);
    let _ = attach().ok();
    let foreign = Authority::named("foreign CA").list(&[], 11, 2120);
    for (list, why) in [
        (foreign.as_str(), "\"foreign CA\": no session could begin"),
        (&Authority::new().list(&[], 11, 2120), "\"test CA\" is not signed by the key"),
    ] {
        write(list);
        let _ = server.command(&["reload"]).code(1).says("ca-crl.pem").says(why);
        let _ = place.server().args(&["--check"]).run().code(1).says(why);
        let _ = place.server().run().code(1).says(why);
        let _ = attach().code(1).says("ca-crl.pem").says(why);
        let _ = place.doctor(server.portal()).code(1).says(why);
    }
    // An older, expired list remains in use.
    write(&expired);
    let checked = place.server().args(&["--check"]).run().ok();
    assert!(checked.stderr.contains("ca-crl.pem expired on 2022-01-01"), "{checked:?}");
    assert!(attach().ok().stderr.contains("ca-crl.pem expired on 2022-01-01"));
    let _ = server.command(&["reload"]).ok().says("has number 9, below the previous 10");
    let _ = place.doctor(server.portal()).ok();
    fs::remove_file(Path::new(&dir).join("ca-crl.pem")).expect("the list");
    let _ = server.command(&["reload"]).ok().says("removed: ca-crl.pem: no certificate is revoked");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_unencrypted_path_with_certificates_is_reported() {
    let place = Place::new();
    let server = Server::builder().export("vol0=mem:16M").listen("tcp://127.0.0.1:0").start();
    let got = place.doctor(server.portal()).ok();
    let what = format!("the path {} does not use them", server.portal());
    assert!(got.stdout.contains("warn  connect") && got.stdout.contains(&what), "{got:?}");
    let (socket, run_dir) = (place.scratch.text("socket"), place.scratch.text("run"));
    let words = ["vol0", "--run-dir", &run_dir];
    let attach = [&["attach"], &words[..], &["--path", server.portal(), "--socket", &socket]];
    let dir = place.dir();
    let attach = [&attach.concat()[..], &["--tls-dir", &dir]].concat();
    let client = |words: &[&str]| run(bin("rtrs-client"), words, COMMAND_TIME_MAX);
    let got = client(&[&attach[..], &["--check"]].concat()).ok();
    assert!(got.stderr.contains(&what) && got.stdout == "ok\n", "{got:?}");
    let got = client(&attach).ok();
    assert!(got.stderr.contains(&what), "{got:?}");
    wait_for("the warning in the log", COMMAND_TIME_MAX, || {
        let log = client(&[&["logs"], &words[..]].concat()).ok().stdout;
        log.contains(&what).then_some(())
    });
    let _ = client(&[&["detach"], &words[..]].concat()).ok();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn both_keys_of_a_server_are_accepted_during_rotation() {
    let scratch = Scratch::new();
    let (old_file, old) = generate("rtrs-server", &scratch, "old.key");
    let (new_file, new) = generate("rtrs-server", &scratch, "new.key");
    let (client_file, client_key) = generate("rtrs-client", &scratch, "client.key");
    let clients = scratch.text("clients");
    fs::write(&clients, format!("db1 {client_key}\n")).expect("the list");
    let key = scratch.text("server.key");
    let put = |from: &str| {
        fs::copy(from, &key).expect("a key");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("a mode");
    };
    put(&old_file);
    let server = Server::builder()
        .export("vol0=mem:16M")
        .listen("tls://127.0.0.1:0")
        .args(&["--key-file", &key, "--clients-file", &clients])
        .start();
    let both = ["--key-file", &client_file, "--server-key", &old, "--server-key", &new];
    let client = Client::attach("vol0").path(server.portal()).args(&both).start();
    put(&new_file);
    let _ = server.command(&["reload"]).ok().says("changed: key-file");
    let path = only_session(&server, 1)["paths"][0]["path"].clone();
    let session = only_session(&server, 1)["name"].as_str().expect("a name").to_owned();
    let _ = server.command(&["session", "disconnect", &session, "--path", &path.to_string()]).ok();
    wait_for("the path with the new key", COMMAND_TIME_MAX, || {
        let now = server.sessions().first()?["paths"][0].clone();
        (now["state"] == "connected" && now["path"] != path).then_some(())
    });
    let ping = |pin: &str| {
        let words = ["ping", server.portal(), "-c1", "-i0", "--key-file", &client_file];
        run(bin("rtrs-client"), &[&words[..], &["--server-key", pin]].concat(), COMMAND_TIME_MAX)
    };
    let _ = ping(&new).ok();
    let _ = ping(&old).code(1).says("expected SHA256:");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
