//! Tests of NBD clients over TLS (`nbd-tls`): third-party programs, and refused clients.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use rtrs_core::tests::certificates::{Authority, Wanted, certificates};
use rtrs_tests::{
    COMMAND_TIME_MAX, COPY_TIME_MAX, Client, Finished, Front, RawNbd, Reply, STOP_TIME_MAX,
    Scratch, Server, bin, consts, equal_prefix, pattern_file, requires, run, wait_for,
};

const OPT_STARTTLS: u32 = 5;
const REP_ERR_TLS_REQD: u32 = (1 << 31) + 5;
const SIZE: u64 = 16 << 20;

/// A session whose NBD clients use TLS, and certificates for them.
struct Place {
    scratch: Scratch,
    authority: Authority,
    server: Server,
    client: Client,
}

impl Place {
    fn new(mode: &str) -> Self {
        let scratch = Scratch::new();
        fs::create_dir_all(scratch.path("tls")).expect("a directory");
        let authority = certificates(&scratch.path("tls"));
        let server = Server::builder().export("vol0=mem:16M").start();
        let mut client = Client::attach("vol0").path(server.portal()).tcp();
        if mode != "off" {
            client = client.args(&["--nbd-tls", mode, "--nbd-tls-dir", &scratch.text("tls")]);
        }
        let client = client.start();
        Self { scratch, authority, server, client }
    }

    fn port(&self) -> u16 {
        let Front::Tcp(port) = *self.client.front() else { panic!("expected a TCP port") };
        port
    }

    /// Returns the URI for TLS, with the certificates in this directory.
    fn uri_with(&self, dir: &str) -> String {
        let uri = self.client.uri().replace("nbd://", "nbds://");
        format!("{uri}?tls-certificates={}", self.scratch.text(dir))
    }

    fn uri(&self) -> String {
        self.uri_with("tls")
    }

    fn nbdinfo(&self, dir: &str) -> Finished {
        run("nbdinfo", &["--size", &self.uri_with(dir)], COMMAND_TIME_MAX)
    }

    /// Returns the qemu-img options for the certificates, and for the export as an image.
    fn qemu(&self) -> (String, String) {
        let object =
            format!("tls-creds-x509,id=t,dir={},endpoint=client", self.scratch.text("tls"));
        let server = format!("server.type=inet,server.host=127.0.0.1,server.port={}", self.port());
        (object, format!("driver=nbd,{server},export=vol0,tls-creds=t"))
    }

    /// Waits for a line in the session's log and returns it.
    fn says(&self, text: &str) -> String {
        wait_for(&format!("{text:?} in the log"), COMMAND_TIME_MAX, || {
            let log = self.client.command(&["logs", "vol0"]).ok().stdout;
            log.lines().find(|line| line.contains(text)).map(str::to_owned)
        })
    }

    fn finish(self) {
        self.client.detach();
        let _ = self.server.stop(STOP_TIME_MAX);
    }
}

fn fails(done: Finished) -> String {
    assert_ne!(done.code, Some(0), "{} worked", done.command);
    done.stderr
}

#[test]
fn nbdinfo_and_nbdcopy_work_over_tls() {
    if !requires(&["nbdinfo", "nbdcopy"]) {
        return;
    }
    for mode in ["require", "on"] {
        let place = Place::new(mode);
        let status = place.client.status();
        let shown = status["uri"].as_str().expect("a URI");
        assert_eq!(shown, place.client.uri().replace("nbd://", "nbds://"));
        let got = run("nbdinfo", &[&place.uri()], COMMAND_TIME_MAX).ok().stdout;
        assert!(got.contains("with TLS") && got.contains("export-size: 16777216"), "{got}");
        let line = place.says("NBD client over TLS");
        assert!(line.contains("db1") && line.contains("TLS_AES_"), "{line}");
        assert!(line.contains("127.0.0.1:"), "{line}");
        let (image, copy) = (place.scratch.path("image"), place.scratch.path("copy"));
        pattern_file(&image, SIZE, 3);
        let [from, to] = [&image, &copy].map(|path| path.display().to_string());
        let _ = run("nbdcopy", &["--flush", &from, &place.uri()], COPY_TIME_MAX).ok();
        let _ = run("nbdcopy", &[&place.uri(), &to], COPY_TIME_MAX).ok();
        equal_prefix(&image, &copy, SIZE);
        // The data received over TLS is that of the export.
        if mode == "on" {
            fs::remove_file(&copy).expect("the copy");
            let _ = run("nbdcopy", &[&place.client.uri(), &to], COPY_TIME_MAX).ok();
            equal_prefix(&image, &copy, SIZE);
        }
        place.finish();
    }
}

#[test]
fn qemu_img_works_over_tls() {
    if !requires(&["qemu-img"]) {
        return;
    }
    let place = Place::new("require");
    let (object, image) = place.qemu();
    let with = |words: &[&str]| {
        let words = [&[words[0], "--object", &object], &words[1..]].concat();
        run("qemu-img", &words, COPY_TIME_MAX)
    };
    let got = with(&["info", "--image-opts", &image]).ok().stdout;
    assert!(got.contains("16 MiB"), "{got}");
    let from = place.scratch.text("image");
    pattern_file(Path::new(&from), SIZE, 5);
    let raw = format!("driver=raw,file.driver=nbd,file.{}", &image["driver=nbd,".len()..])
        .replace(",server", ",file.server")
        .replace("file.file.", "file.")
        .replace(",export", ",file.export")
        .replace(",tls", ",file.tls");
    let source = format!("driver=raw,file.driver=file,file.filename={from}");
    let _ = with(&["convert", "-n", "--image-opts", "--target-image-opts", &source, &raw]).ok();
    let _ = with(&["compare", "--image-opts", &source, &raw]).ok().says("identical");
    let to = place.scratch.text("copy");
    let _ = with(&["convert", "--image-opts", "-O", "raw", &raw, &to]).ok();
    equal_prefix(Path::new(&from), Path::new(&to), SIZE);
    place.finish();
}

#[test]
fn nbd_client_lists_exports_over_tls() {
    if !requires(&["nbd-client"]) {
        return;
    }
    let place = Place::new("require");
    let [ca, cert, key] = ["ca-cert.pem", "client-cert.pem", "client-key.pem"]
        .map(|name| place.scratch.text(&format!("tls/{name}")));
    let port = place.port().to_string();
    let list = ["-l", "127.0.0.1", &port];
    let tls = ["-cacertfile", &ca, "-certfile", &cert, "-keyfile", &key];
    let tls = [&tls[..], &["-tlshostname", "127.0.0.1"]].concat();
    let got = run("nbd-client", &[&list[..], &tls].concat(), COMMAND_TIME_MAX).ok().stdout;
    assert!(got.lines().any(|line| line.starts_with("vol0")), "{got}");
    let _ = place.says("NBD client over TLS");
    let got = run("nbd-client", &list, COMMAND_TIME_MAX);
    assert!(!got.stdout.contains("vol0"), "{}", got.stdout);
    place.finish();
}

#[test]
fn plain_clients_are_refused_with_require() {
    let place = Place::new("require");
    let mut raw = RawNbd::hello(place.client.front());
    raw.send_option(consts::OPT_LIST, &[]);
    let (reply, text) = raw.option_reply().expect("a reply");
    assert_eq!((reply, &text[..]), (REP_ERR_TLS_REQD, &b"this server requires TLS"[..]));
    drop(raw);
    let line = place.says("no TLS, but nbd-tls is require");
    assert!(line.contains("127.0.0.1:"), "{line}");
    let uri = place.client.uri();
    if requires(&["nbdinfo"]) {
        let got = fails(run("nbdinfo", &[&uri], COMMAND_TIME_MAX));
        assert!(got.contains("Operation not supported"), "{got}");
    }
    if requires(&["qemu-img"]) {
        let got = fails(run("qemu-img", &["info", &uri], COMMAND_TIME_MAX));
        assert!(got.contains("this server requires TLS"), "{got}");
    }
    place.finish();
}

#[test]
fn clients_without_a_valid_certificate_are_refused() {
    if !requires(&["nbdinfo"]) {
        return;
    }
    let place = Place::new("require");
    let tls = place.scratch.path("tls");
    let _ = place.nbdinfo("tls").ok();
    // A certificate from a different CA; the client itself trusts the right CA.
    fs::create_dir_all(place.scratch.path("other")).expect("a directory");
    fs::copy(tls.join("ca-cert.pem"), place.scratch.path("other/ca-cert.pem")).expect("the CA");
    Authority::new().issue(&place.scratch.path("other"), &Wanted::CLIENT);
    let _ = fails(place.nbdinfo("other"));
    let _ = place.says("is not signed by the CA in ca-cert.pem");
    // A client that uses only a different CA does not trust the server.
    fs::create_dir_all(place.scratch.path("foreign")).expect("a directory");
    let _ = certificates(&place.scratch.path("foreign"));
    let _ = fails(place.nbdinfo("foreign"));
    // No certificate.
    fs::create_dir_all(place.scratch.path("none")).expect("a directory");
    fs::copy(tls.join("ca-cert.pem"), place.scratch.path("none/ca-cert.pem")).expect("the CA");
    let _ = fails(place.nbdinfo("none"));
    let _ = place.nbdinfo("tls").ok();
    // A certificate is revoked without a restart.
    let wait_admitted = |admitted: bool| {
        wait_for("the list to be reread", COMMAND_TIME_MAX, || {
            ((place.nbdinfo("tls").code == Some(0)) == admitted).then_some(())
        });
    };
    place.authority.revoke(&tls, &[Wanted::CLIENT.serial]);
    wait_admitted(false);
    place.authority.revoke(&tls, &[]);
    wait_admitted(true);
    fs::remove_file(tls.join("ca-crl.pem")).expect("the list");
    // The server needs time to reread the revocation list.
    std::thread::sleep(Duration::from_millis(1100));
    let _ = place.nbdinfo("tls").ok();
    place.finish();
}

#[test]
fn plain_text_after_starttls_is_not_executed() {
    let place = Place::new("on");
    let mut stream = TcpStream::connect(("127.0.0.1", place.port())).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let head = |number: u32, len: u32| {
        let magic = consts::OPTION_MAGIC.to_be_bytes();
        [&magic[..], &number.to_be_bytes(), &len.to_be_bytes()].concat()
    };
    let go = [&head(consts::OPT_GO, 10)[..], b"\0\0\0\x04vol0\0\0"].concat();
    let flags = consts::CLIENT_FLAGS.to_be_bytes();
    stream.write_all(&[&flags[..], &head(OPT_STARTTLS, 0), &go].concat()).expect("sent");
    let mut got = Vec::new();
    let _ = stream.read_to_end(&mut got);
    // The greeting, the acknowledgement and at most an alert, but no reply to the GO.
    let ack = [&consts::OPTION_REPLY_MAGIC.to_be_bytes()[..], &OPT_STARTTLS.to_be_bytes()].concat();
    assert_eq!(got[18..30], ack);
    assert!(got.len() < 18 + 20 + 16, "{got:?}");
    let _ = place.says("the TLS handshake failed: the peer does not speak TLS at all");
    // Other clients still work, even without TLS.
    let mut raw = RawNbd::go(place.client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[7; 4096]), Reply::Error(0));
    drop(raw);
    place.finish();
}

#[test]
fn starttls_is_refused_without_tls() {
    let place = Place::new("off");
    assert_eq!(place.client.status()["uri"], place.client.uri());
    let mut raw = RawNbd::hello(place.client.front());
    raw.send_option(OPT_STARTTLS, &[]);
    assert_eq!(raw.option_reply().map(|(reply, _)| reply), Some(consts::REP_ERR_UNSUP));
    raw.enter("vol0");
    drop(raw);
    if requires(&["nbdinfo"]) {
        let _ = fails(place.nbdinfo("tls"));
        let _ = run("nbdinfo", &[&place.client.uri()], COMMAND_TIME_MAX).ok();
    }
    place.finish();
}

#[test]
fn invalid_settings_are_refused_by_name() {
    let scratch = Scratch::new();
    let dir = scratch.text("tls");
    fs::create_dir_all(&dir).expect("a directory");
    let _ = certificates(Path::new(&dir));
    let attach = |args: &[&str]| {
        let words = [&["attach", "v", "--path", "tcp://127.0.0.1:9", "--check"][..], args].concat();
        let words = [&words[..], &["--run-dir", scratch.dir().to_str().expect("text")]].concat();
        run(bin("rtrs-client"), &words, COMMAND_TIME_MAX)
    };
    let listen = ["--listen", "127.0.0.1:0", "--nbd-tls", "require"];
    let with_dir = [&listen[..], &["--nbd-tls-dir", &dir]].concat();
    let _ = attach(&with_dir).ok();
    let _ = attach(&listen).code(2).says("set nbd-tls-dir to a directory with");
    let _ = attach(&["--socket", "/s", "--nbd-tls", "on"]).code(2).says("needs a TCP address");
    let only_dir = ["--listen", "127.0.0.1:0", "--nbd-tls-dir", &dir];
    let _ = attach(&only_dir).code(2).says("nbd-tls-dir needs nbd-tls");
    let key = Path::new(&dir).join("server-key.pem");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).expect("a mode");
    let _ = attach(&with_dir).code(1).says("its mode 640 gives access to others");
    fs::remove_file(&key).expect("the key");
    let _ = attach(&with_dir).code(1).says("server-key.pem");
}
