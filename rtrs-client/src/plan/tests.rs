//! Tests of every plan error, by message, and of the round trip through printed settings.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rtrs_core::fabric::rdma::Rdma;
use rtrs_core::settings::{Output, print};
use rtrs_core::skip::skip;
use rtrs_core::tests::certificates::{TestDir, Wanted, certificates};

use super::*;
use crate::error::{Error, ErrorKind};
use crate::settings::{AttachSettings, Settings};

/// Directory of one test, removed at the end of the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rtrs-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn attach(yaml: &str) -> Result<AttachPlan, Error> {
    AttachPlan::new("v", Settings::from_yaml(yaml, "s.yaml").unwrap(), Output::Text)
}

fn bench(yaml: &str) -> Result<BenchPlan, Error> {
    BenchPlan::new("v", Settings::from_yaml(yaml, "s.yaml").unwrap(), Output::Text)
}

fn assert_usage(error: &Error, text: &str) {
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Usage, 2), "{error}");
    let chain = error.chain().to_string();
    assert!(chain.contains(text), "{chain}\nlacks\n{text}");
}

#[test]
fn values_and_combinations_of_attach_are_validated() {
    for (yaml, text) in [
        (
            "",
            "choose where to attach: --device auto, --socket PATH, --listen ADDR:PORT or \
             --vhost-user PATH",
        ),
        (
            "listen: 127.0.0.1\nsocket: /s",
            "device, socket, listen and vhost-user cannot be combined; set only one",
        ),
        (
            "device: auto\nsocket: /s",
            "device, socket, listen and vhost-user cannot be combined; set only one",
        ),
        (
            "vhost-user: /v\nsocket: /s",
            "device, socket, listen and vhost-user cannot be combined; set only one",
        ),
        ("vhost-user: /v\nslow-io: fail", "vhost-user does not support slow-io fail"),
        (
            "device: auto\ndevice-timeout: 60s",
            "device-timeout 60s is too short for io-timeout 30s and no-path queue-for=1m; use \
             121s or more",
        ),
        ("socket: /s\ntakeover: true", "takeover needs a block device; set device too"),
        ("device: auto\nsocket-mode: 660", "socket-mode needs a unix socket; set socket too"),
        ("socket: /s\nqueues: 2", "queues needs a virtual machine; set vhost-user too"),
        ("listen: 127.0.0.1\nsocket-owner: root", "socket-owner needs a unix socket; set socket"),
        ("socket: /s\nnbd-tls: require", "nbd-tls require needs a TCP address; set listen too"),
        ("device: auto\nnbd-tls: on\nnbd-tls-dir: /t", "nbd-tls on needs a TCP address"),
        ("socket: /s\nnbd-tls-dir: /t", "nbd-tls-dir needs nbd-tls; set nbd-tls require, or on"),
        ("socket: /s\ndevice-timeout: 200s", "device-timeout needs a block device; set device too"),
        ("listen: 127.0.0.1\ndevice-dead-timeout: 9s", "device-dead-timeout needs a block device"),
        ("device: auto\ntakeover: true\naccess: migration", "use access auto, rw or ro"),
        ("socket: /s\nquick-takeover: true", "quick-takeover needs a block device; set device"),
        ("device: auto\nquick-takeover: true\naccess: migration", "use access auto, rw or ro"),
        (
            "device: auto\nquick-takeover: true\ndevice-timeout: 200s",
            "quick-takeover and device-timeout cannot be combined, because the kernel then has",
        ),
        ("device: auto\nquick-takeover: true\nshards: 2", "use shards 1 instead of 2"),
        ("socket: ''", "socket \"\" is not a path"),
        ("read-only: true\naccess: rw", "read-only contradicts access rw or migration; drop one"),
        ("session-name: ''", "session-name \"\" is empty; use 1 to 254 bytes without NUL"),
        ("session-name: a.b", "contains a slash or a dot, which servers refuse; use - or _"),
        ("session-name: a/b", "contains a slash or a dot"),
        (
            "reconnect-min: 20s",
            "reconnect-min 20s is more than reconnect-max 3s; lower reconnect-min or raise",
        ),
        ("buffer-size: 4k", "buffer-size 4k is not usable; use 58M to 4G in steps of 4k"),
        ("buffer-size: 8G", "buffer-size 8G is not usable"),
        ("buffer-size: 1048577", "buffer-size 1048577 is not usable"),
        ("run-dir: ''", "run-dir \"\" is not a path"),
        (
            "shards: 256\npath: tcp://h",
            "256 shards are too many for a path over TCP; use at most 255",
        ),
        ("path: tcp://h:0", "has port 0, which only a listener may use"),
        ("path: tcp://0.0.0.0", "has the unspecified address as destination"),
        ("path: [tcp://h, tcp://h:1234]", "path tcp://h:1234 is listed twice; drop one"),
    ] {
        let has_front = ["socket", "device", "vhost-user"].iter().any(|front| yaml.contains(front));
        let has_front = has_front || yaml.is_empty();
        let yaml = if has_front { yaml.to_owned() } else { format!("socket: /s\n{yaml}") };
        assert_usage(&attach(&yaml).unwrap_err(), text);
    }
    let error = attach("listen: 127.0.0.1\nnbd-tls: require").unwrap_err();
    assert_usage(&error, "nbd-tls require needs certificates; set nbd-tls-dir to a directory with");
    for yaml in ["listen: 10.0.0.5", "listen: '[::]:1'\nnbd-tls: on\nnbd-tls-dir: /t"] {
        let error = attach(yaml).unwrap_err();
        assert_usage(&error, "would let every host that can connect read and write in clear text");
        assert!(attach(&format!("{yaml}\ninsecure-open: true")).is_ok());
    }
    for yaml in ["listen: 127.9.9.9", "listen: '::1'", "listen: '[::ffff:127.0.0.1]:1'"] {
        assert!(attach(yaml).is_ok(), "{yaml}");
    }
    assert!(attach("listen: 0.0.0.0\nnbd-tls: require\nnbd-tls-dir: /t").is_ok());
    let many: String = (1..=129).map(|port| format!("- tcp://h:{port}\n")).collect();
    let error = attach(&format!("socket: /s\npath:\n{many}")).unwrap_err();
    assert_usage(&error, "129 paths are too many; use at most 128");
}

#[test]
fn names_are_validated() {
    let long = "n".repeat(255);
    for (name, text) in [
        (&*long, "is 255 bytes long; use 1 to 254 bytes"),
        ("", "export name \"\" is empty"),
        ("a\0b", "contains a NUL"),
    ] {
        assert_usage(&check_name("export name", name).unwrap_err(), text);
        let settings = |yaml| Settings::from_yaml(yaml, "s.yaml").unwrap();
        let error = AttachPlan::new(name, settings("socket: /s"), Output::Text).unwrap_err();
        assert_usage(&error, text);
        assert_usage(&BenchPlan::new(name, settings(""), Output::Text).unwrap_err(), text);
    }
    check_name("export name", &long[1..]).unwrap();
}

#[test]
fn long_socket_paths_are_refused_with_their_length() {
    let long = format!("/{}", "s".repeat(107));
    let error = attach(&format!("socket: {long}")).unwrap_err();
    assert_usage(&error, "is 108 bytes long; unix sockets allow 107, use a shorter path");
    let error = attach(&format!("socket: /s\nrun-dir: {long}")).unwrap_err();
    assert_usage(&error, "control socket /");
    assert_usage(&error, "is 114 bytes long; unix sockets allow 107");
}

#[test]
fn session_names_default_to_host_and_export() {
    let settings = Settings::from_yaml("socket: /s", "s").unwrap();
    let plan = AttachPlan::new("pool/vol0.img", settings, Output::Text).unwrap();
    let name = &plan.session.session_name;
    assert!(name.ends_with("-pool_vol0_img") && !name.contains(['/', '.']), "{name}");
    let settings = Settings::from_yaml("socket: /s", "s").unwrap();
    let plan = AttachPlan::new(&"é".repeat(127), settings, Output::Text).unwrap();
    assert!((253..=254).contains(&plan.session.session_name.len()));
}

#[test]
fn the_kernels_timeout_exceeds_that_of_the_session() {
    use nbd_bridge::kernel::{DeviceChoice, DeviceOptions};
    for (yaml, choice, timeout_s, dead_timeout_s) in [
        ("device: auto", DeviceChoice::Auto, 86_400, 0),
        ("device: auto\nslow-io: fail", DeviceChoice::Auto, 150, 0),
        ("device: nbd2\nslow-io: fail\nio-timeout: 1h", DeviceChoice::Index(2), 7290, 0),
        ("device: auto\nslow-io: fail\nio-timeout: 10ms\nno-path: fail", DeviceChoice::Auto, 31, 0),
        ("device: auto\nslow-io: fail\nno-path: queue", DeviceChoice::Auto, 86_400, 0),
        ("device: auto\nno-path: queue", DeviceChoice::Auto, 86_400, 0),
        ("device: auto\nno-path: queue-for 24h", DeviceChoice::Auto, 86_400, 0),
        (
            "device: auto\nno-path: fail\nio-timeout: 500ms\ndevice-timeout: 2s",
            DeviceChoice::Auto,
            2,
            0,
        ),
        (
            "device: auto\ndevice-timeout: 121s\ndevice-dead-timeout: 4500ms",
            DeviceChoice::Auto,
            121,
            5,
        ),
        ("device: auto\ntakeover: true", DeviceChoice::Auto, 150, 60),
        ("device: auto\ntakeover: true\nslow-io: wait", DeviceChoice::Auto, 86_400, 60),
        ("device: auto\ntakeover: true\ndevice-dead-timeout: 7s", DeviceChoice::Auto, 150, 7),
        ("device: auto\nquick-takeover: true", DeviceChoice::Auto, 0, 60),
        ("device: auto\ntakeover: true\nquick-takeover: true", DeviceChoice::Auto, 0, 60),
    ] {
        let plan = attach(&format!("{yaml}\nsession-name: s\n")).unwrap();
        let backend = "rtrs:s/v".to_owned();
        let takeover = yaml.contains("takeover");
        let timeout_s = (timeout_s > 0).then_some(timeout_s);
        let options = DeviceOptions { choice, timeout_s, dead_timeout_s, backend, takeover };
        assert_eq!(plan.front, Front::Device(options), "{yaml}");
        let patience = if takeover { dead_timeout_s } else { 0 };
        assert_eq!(plan.open_patience().as_secs(), patience, "{yaml}");
        let longer = AttachPlan { retry_for: Duration::from_secs(61), ..plan };
        assert_eq!(longer.open_patience().as_secs(), 61.max(patience), "{yaml}");
    }
}

#[test]
fn a_quick_takeover_has_one_shard() {
    for (shards, count) in [("", 1), ("\nshards: auto", 1), ("\nshards: 1", 1)] {
        let plan = attach(&format!("device: auto\nquick-takeover: true{shards}")).unwrap();
        assert_eq!(plan.session.shards.count(), count, "{shards}");
    }
    let plan = attach("device: auto\ntakeover: true\nshards: 3").unwrap();
    assert_eq!(plan.session.shards.count(), 3);
}

#[test]
fn access_follows_from_the_settings() {
    use crate::settings::Access;
    for (yaml, access) in [
        ("", Access::Auto),
        ("read-only: true", Access::Ro),
        ("read-only: false", Access::Auto),
        ("{read-only: true, access: ro}", Access::Ro),
        ("{read-only: false, access: migration}", Access::Migration),
    ] {
        let settings = Settings::from_yaml(yaml, "s").unwrap();
        let attach = AttachSettings { socket: Some("/s".into()), ..settings.attach };
        let front = Settings { attach, ..settings };
        let plan = AttachPlan::new("v", front, Output::Text).unwrap();
        assert_eq!(plan.session.access, access, "{yaml}");
    }
    assert_eq!(bench("").unwrap().session.access, Access::Ro);
    assert_eq!(bench("bench: {rw: randrw}").unwrap().session.access, Access::Rw);
    assert_eq!(bench("access: rw").unwrap().session.access, Access::Rw);
}

#[test]
fn values_and_combinations_of_bench_are_validated() {
    for (yaml, text) in [
        ("bench: {bs: 0}", "bs 0 is not usable; use a multiple of 512 up to 32M, such as 4k"),
        ("bench: {bs: 1000}", "bs 1000 is not usable"),
        ("bench: {bs: 64M}", "bs 64M is not usable"),
        ("bench: {bs: 8G}", "bs 8G is not usable"),
        ("bench: {bs: 8k, size: 4k}", "size 4k is less than one request of 8k; raise it"),
        ("{read-only: true, bench: {rw: write}}", "rw writes, but access is ro; use --rw read"),
    ] {
        assert_usage(&bench(yaml).unwrap_err(), text);
    }
    let plan = bench("shards: 7\nbench: {numjobs: 3, runtime: 2s, size: 1M}").unwrap();
    assert_eq!(plan.session.shards.count(), 3);
    assert_eq!(plan.settings.runtime.millis(), 2000);
}

#[test]
fn printed_settings_yield_the_same_plan() {
    let session = "path: ['tcp://10.0.0.1@10.0.0.2', 'tcp://[::1]:99']\n\
        identity: -/00112233445566778899aabbccddeeff\n\
        policy: min-latency\nsession-name: s\npin: off\ncrc: off\ninvalidate-reads: off\n\
        heartbeat: 100ms\nheartbeat-missed-max: 3\nheartbeat-idle-max: 9s\n\
        connect-timeout: 101ms\n\
        reconnect-min: 102ms\nreconnect-max: 103ms\nio-timeout: 104ms\n\
        no-path: queue-for=900ms\nfailover: strict\n\
        queue-depth-limit: 105\npoll: 106us\n\
        log: info,rtrs_client=debug\n";
    for front in [
        "socket: /s",
        "listen: 127.0.0.1:0\nshards: 3\nforeground: true\nrun-dir: /r",
        "listen: 127.0.0.1:0\nnbd-tls: require\nnbd-tls-dir: /t",
        "device: auto",
        "device: auto\ntakeover: true",
        "device: auto\nquick-takeover: true\ndevice-dead-timeout: 9s",
        "device: /dev/nbd7\ndevice-timeout: 3s\ndevice-dead-timeout: 9s",
    ] {
        let access = if front.contains("takeover") { "rw" } else { "migration" };
        let text = format!("{session}{front}\nbuffer-size: 64M\naccess: {access}\n");
        let plan = attach(&text).unwrap();
        for text in [
            serde_yaml::to_string(&print(&plan.printed())).unwrap(),
            serde_json::to_string_pretty(&print(&plan.printed())).unwrap(),
        ] {
            assert_eq!(attach(&text).unwrap(), plan, "{text}");
        }
    }
    for own in ["", "bench: {rw: randrw, bs: 8k, iodepth: 2, numjobs: auto, runtime: 5s, size: 1G}"]
    {
        let plan = bench(&format!("{session}{own}")).unwrap();
        let text = serde_yaml::to_string(&print(&plan.printed())).unwrap();
        assert_eq!(bench(&text).unwrap(), plan, "{text}");
        assert!(text.contains(&format!("run-dir: {}", plan.run_dir.path().display())), "{text}");
    }
    // The place where the volume is served may be given later.
    let settings = Settings::from_yaml(&format!("{session}access: ro\nrun-dir: /r"), "s").unwrap();
    let printed = AttachPlan::printed_nowhere("v", settings).unwrap();
    let text = serde_yaml::to_string(&print(&printed)).unwrap();
    let plan = attach(&format!("{text}socket: /s").replace("socket: null\n", "")).unwrap();
    assert_eq!((plan.front, plan.run_dir.path()), (Front::Socket("/s".into()), Path::new("/r")));
}

#[test]
fn the_system_is_checked_before_anything_starts() {
    let scratch = Scratch::new("attach");
    let socket = scratch.0.join("s").display().to_string();
    let run = scratch.0.join("run").display().to_string();
    let base = format!("socket: {socket}\nrun-dir: {run}\npath: tcp://127.0.0.1\n");
    attach(&base).unwrap().check().unwrap();

    let error = attach(&format!("socket: {socket}\nrun-dir: {run}")).unwrap().check().unwrap_err();
    assert_usage(&error, "no path to the server; use --path tcp://HOST, or path: in the file");

    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let error = attach(&base).unwrap().check().unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::InUse, 1));
    assert_eq!(
        error.to_string(),
        format!("socket {socket} is in use by another process; use another path")
    );
    drop(listener);
    attach(&base).unwrap().check().unwrap();

    let plan = attach(&base).unwrap();
    std::fs::create_dir(&run).unwrap();
    let control = std::os::unix::net::UnixListener::bind(plan.run_dir.control_socket("v")).unwrap();
    let error = plan.check().unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::InUse, 1));
    assert!(error.to_string().starts_with("\"v\" is already attached (control socket "), "{error}");
    drop(control);

    // No other program uses this address, so the port stays free.
    let held = std::net::TcpListener::bind("127.93.17.1:0").unwrap();
    let listen = format!("listen: {}\n", held.local_addr().unwrap());
    let base = format!("run-dir: {run}\npath: tcp://127.0.0.1\n");
    let plan = attach(&format!("{base}{listen}")).unwrap();
    let error = plan.check_start().unwrap_err().chain().to_string();
    assert!(
        error.contains("cannot serve NBD on 127.93.17.1:") && error.contains("in use"),
        "{error}"
    );
    drop(held);
    plan.check_start().unwrap();
    let below = scratch.0.join("none/s").display().to_string();
    let error = attach(&format!("{base}socket: {below}\n")).unwrap().check_start().unwrap_err();
    assert!(error.chain().to_string().contains(" does not exist; create it"), "{error}");

    let error = bench("path: tcp://no-such-host.invalid").unwrap().session.check().unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Path, 1));
    let chain = error.chain().to_string();
    assert!(chain.contains("cannot resolve host \"no-such-host.invalid\""), "{chain}");
}

#[test]
fn missing_rdma_is_refused_with_what_is_missing() {
    let yaml = "socket: /s\npath: ['rdma://10.0.0.1', 'tcp://10.0.0.1']";
    if !Rdma::BUILT_IN {
        let text = "cannot use the path rdma://10.0.0.1:1234: this build has no RDMA support";
        return assert_usage(&attach(yaml).unwrap_err(), text);
    }
    let plan = attach(yaml).unwrap();
    let Err(error) = plan.session.check() else { return skip("this host has an RDMA device") };
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Path, 1));
    let text = error.chain().to_string();
    assert!(text.starts_with("cannot use the path rdma://10.0.0.1:1234: "), "{text}");
    assert!(["modprobe", "rdma link add"].iter().any(|remedy| text.contains(remedy)), "{text}");
}

/// The daemon changes its directory when it moves to the background.
#[test]
fn paths_to_certificates_and_keys_are_made_absolute() {
    let here = std::env::current_dir().unwrap();
    let plan = attach("{listen: '127.0.0.1:0', nbd-tls: require, nbd-tls-dir: nbd, tls-dir: tls}");
    let plan = plan.unwrap();
    assert_eq!(plan.settings.nbd_tls_dir, Some(here.join("nbd")));
    assert_eq!(plan.session.settings.tls_dir, Some(here.join("tls")));
    let key = "ed25519:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    let plan = bench(&format!("{{key-file: client.key, server-key: '{key}'}}")).unwrap();
    assert_eq!(plan.session.settings.key_file, Some(here.join("client.key")));
    assert_eq!(plan.session.tls_sources().server_key.len(), 1);
}

#[test]
fn unacceptable_certificates_are_refused_before_anything_starts() {
    let dir = TestDir::new("plan");
    let authority = certificates(&dir.0);
    let at = |name: &str| dir.0.join(name).display().to_string();
    let (tls, socket, run) = (dir.0.display(), at("s"), at("run"));
    let yaml = format!("socket: {socket}\nrun-dir: {run}\ntls-dir: {tls}\npath: tls://127.0.0.1\n");
    let check = || attach(&yaml).unwrap().check_start().map_err(|e| e.chain().to_string());
    check().unwrap();
    let years = |first, last| Wanted { years: (first, last), ..Wanted::CLIENT };
    for (wanted, why) in [
        (years(2020, 2021), "the certificate expired on 2021-01-01"),
        (years(2119, 2120), "the certificate is not valid before 2119-01-01"),
        (Wanted { uses: Wanted::SERVER_ONLY.uses, ..Wanted::CLIENT }, "is not for clients"),
    ] {
        authority.issue(&dir.0, &wanted);
        let text = check().unwrap_err();
        assert!(text.contains("client-cert.pem: ") && text.contains(why), "{text}");
    }
    authority.write_as_client(&dir.0);
    assert!(check().unwrap_err().contains("the certificate is a CA certificate"));
    authority.issue(&dir.0, &Wanted { days: Some(3), ..Wanted::CLIENT });
    check().unwrap();
    let got = attach(&yaml).unwrap().session.warnings();
    assert!(got.len() == 1 && got[0].contains("client-cert.pem expires on "), "{got:?}");
}

#[test]
fn unencrypted_paths_with_certificates_are_reported() {
    let dir = TestDir::new("plan");
    let _ = certificates(&dir.0);
    let got = |tls: &str| {
        let paths = "[tcp://10.0.0.1, tls://10.0.0.2, tcp://10.0.0.3]";
        let paths = if tls.is_empty() { "[tcp://10.0.0.1]" } else { paths };
        attach(&format!("{{socket: /s, path: {paths}{tls}}}")).unwrap().session.warnings()
    };
    assert_eq!(got(""), [""; 0]);
    let got = got(&format!(", tls-dir: {}", dir.0.display()));
    assert!(got.len() == 2 && got[0].contains("the path tcp://10.0.0.1:1234 does not"), "{got:?}");
    assert!(got[1].contains("tcp://10.0.0.3:1234") && got[1].contains("tls://"), "{got:?}");
}
