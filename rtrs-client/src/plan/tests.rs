//! Every judgement of a plan, by its message, and the round trip through printed settings.

use super::*;
use clap::Parser;
use rtrs_core::fabric::rdma::Rdma;
use rtrs_core::skip::skip;
use std::path::PathBuf;

/// A directory of this test's own, removed at its end.
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

fn plan(args: &[&str]) -> Result<Plan, Error> {
    Plan::new(&LowArgs::try_parse_from([&["rtrs-client"], args].concat()).unwrap())
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
fn values_and_combinations_of_attach_are_judged() {
    for (yaml, text) in [
        ("", "none of device, socket and listen is said; use --device auto, --socket PATH or"),
        ("listen: 127.0.0.1\nsocket: /s", "more than one of device, socket and listen is said"),
        ("device: auto\nsocket: /s", "more than one of device, socket and listen is said"),
        (
            "device: auto\ndevice-timeout-s: 60",
            "device-timeout-s 60 is too short beside io-timeout-ms 30000 and no-path queue-for=1m; \
             use 121 or more",
        ),
        ("device: auto\ndevice-timeout-s: 86401", "device-timeout-s 86401 is out of range"),
        (
            "device: auto\ndevice-dead-timeout-s: 86401",
            "device-dead-timeout-s 86401 is out of range; use 0 to 86400",
        ),
        ("socket: /s\ntakeover: true", "takeover is about a block device; use it with device"),
        ("device: auto\ntakeover: true\naccess: migration", "use access auto, rw or ro"),
        ("socket: /s\nquick-takeover: true", "quick-takeover is about a block device; use it with"),
        ("device: auto\nquick-takeover: true\naccess: migration", "use access auto, rw or ro"),
        (
            "device: auto\nquick-takeover: true\ndevice-timeout-s: 200",
            "with quick-takeover the kernel has no bound for a request, and device-timeout-s says",
        ),
        ("device: auto\nquick-takeover: true\nshards: 2", "use it with shards 1 instead of 2"),
        ("socket: ''", "socket \"\" is no path"),
        ("read-only: true\naccess: rw", "read-only contradicts access rw or migration; drop one"),
        ("session-name: ''", "session-name \"\" is empty; use 1 to 254 bytes without NUL"),
        ("session-name: a.b", "holds a slash or a dot, which servers refuse; use - or _"),
        ("session-name: a/b", "holds a slash or a dot"),
        ("heartbeat-ms: 9", "heartbeat-ms 9 is out of range; use 10 to 600000"),
        ("heartbeat-missed-max: 0", "heartbeat-missed-max 0 is out of range; use 1 to 1000"),
        ("connect-timeout-ms: 0", "connect-timeout-ms 0 is out of range; use 10 to 600000"),
        ("reconnect-min-ms: 0", "reconnect-min-ms 0 is out of range; use 1 to 600000"),
        ("reconnect-max-ms: 600001", "reconnect-max-ms 600001 is out of range; use 1 to 600000"),
        (
            "reconnect-min-ms: 20000",
            "reconnect-min-ms 20000 is more than reconnect-max-ms 3000; lower it, or raise that",
        ),
        ("io-timeout-ms: 0", "io-timeout-ms 0 is out of range; use 10 to 3600000"),
        ("queue-depth-limit: 0", "queue-depth-limit 0 is out of range; use 1 to 65535"),
        ("queue-depth-limit: 65536", "queue-depth-limit 65536 is out of range; use 1 to 65535"),
        ("poll-us: 10001", "poll-us 10001 is out of range; use 0 to 10000"),
        ("buffer-size: 4k", "buffer-size 4k is not usable; use 58M to 4G in steps of 4k"),
        ("buffer-size: 8G", "buffer-size 8G is not usable"),
        ("buffer-size: 1048577", "buffer-size 1048577 is not usable"),
        ("run-dir: ''", "run-dir \"\" is no path"),
        ("log: 'rtrs=nonsense'", "log filter \"rtrs=nonsense\" is not understood"),
        (
            "log: inof",
            "log filter \"inof\" has the word \"inof\", which is no level; did you mean \"info\"? \
             use error, warn, info, debug, trace or off",
        ),
        (
            "shards: 256\npath: tcp://h",
            "256 shards are too many for a path over TCP; use at most 255",
        ),
        ("path: tcp://h:0", "has port 0, which only a listener may use"),
        ("path: tcp://0.0.0.0", "leads to the unspecified address"),
        ("path: [tcp://h, tcp://h:1234]", "path names tcp://h:1234 twice; name it once"),
    ] {
        let said = ["socket", "device"].iter().any(|front| yaml.contains(front));
        let said = said || yaml.is_empty();
        let yaml = if said { yaml.to_owned() } else { format!("socket: /s\n{yaml}") };
        assert_usage(&attach(&yaml).unwrap_err(), text);
    }
    let many: String = (1..=129).map(|port| format!("- tcp://h:{port}\n")).collect();
    let error = attach(&format!("socket: /s\npath:\n{many}")).unwrap_err();
    assert_usage(&error, "129 paths are too many; use at most 128");
}

#[test]
fn names_are_judged_in_every_command() {
    let long = "n".repeat(255);
    for command in ["attach", "bench", "status", "stats", "detach"] {
        let mut args = vec![command, &long];
        if command == "attach" {
            args.push("--socket=/s");
        }
        assert_usage(&plan(&args).unwrap_err(), "is 255 bytes long; use 1 to 254 bytes");
        args[1] = "";
        assert_usage(&plan(&args).unwrap_err(), "export name \"\" is empty");
        args[1] = &long[1..];
        plan(&args).unwrap();
    }
    assert_usage(&check_nul(), "holds a NUL");
    assert_usage(
        &plan(&["detach", "v", "--within=1h"]).unwrap_err(),
        "within 1h is out of range; use 0ms to 10m",
    );
    for (args, text) in [
        (&["path", "remove", "v", "p", "--within=1h"][..], "within 1h is out of range"),
        (&["path", "disconnect", "v", ""], "the path is empty"),
        (&["path", "add", "v", "tcp://h:0"], "port 0"),
        (&["path", "list", ""], "export name \"\" is empty"),
        (&["policy", "", "round-robin"], "export name \"\" is empty"),
    ] {
        assert_usage(&plan(args).unwrap_err(), text);
    }
}

fn check_nul() -> Error {
    session::check_name("export name", "a\0b").unwrap_err()
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
fn the_kernel_waits_longer_than_the_session() {
    use nbd_bridge::kernel::{DeviceChoice, DeviceOptions};
    for (yaml, choice, timeout_s, dead_timeout_s) in [
        ("device: auto", DeviceChoice::Auto, 150, 0),
        ("device: nbd2\nio-timeout-ms: 3600000", DeviceChoice::Index(2), 7290, 0),
        ("device: auto\nio-timeout-ms: 10\nno-path: fail", DeviceChoice::Auto, 31, 0),
        ("device: auto\nno-path: queue", DeviceChoice::Auto, 86_400, 0),
        ("device: auto\nno-path: queue-for 24h", DeviceChoice::Auto, 86_400, 0),
        (
            "device: auto\nno-path: fail\nio-timeout-ms: 500\ndevice-timeout-s: 2",
            DeviceChoice::Auto,
            2,
            0,
        ),
        (
            "device: auto\ndevice-timeout-s: 121\ndevice-dead-timeout-s: 5",
            DeviceChoice::Auto,
            121,
            5,
        ),
        ("device: auto\ntakeover: true", DeviceChoice::Auto, 150, 60),
        ("device: auto\ntakeover: true\ndevice-dead-timeout-s: 7", DeviceChoice::Auto, 150, 7),
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
        assert_eq!(plan.takeover_patience().as_secs(), patience, "{yaml}");
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
fn access_follows_from_what_is_said() {
    use crate::config::Access;
    for (yaml, access) in [
        ("", Access::Auto),
        ("read-only: true", Access::Ro),
        ("read-only: false", Access::Auto),
        ("{read-only: true, access: ro}", Access::Ro),
        ("{read-only: false, access: migration}", Access::Migration),
    ] {
        let settings = Settings::from_yaml(yaml, "s").unwrap();
        let front = Settings { socket: Some("/s".into()), ..settings };
        assert_eq!(
            AttachPlan::new("v", front, Output::Text).unwrap().session.access,
            access,
            "{yaml}"
        );
    }
    assert_eq!(bench("").unwrap().session.access, Access::Ro);
    assert_eq!(bench("bench: {rw: randrw}").unwrap().session.access, Access::Rw);
    assert_eq!(bench("access: rw").unwrap().session.access, Access::Rw);
}

#[test]
fn values_and_combinations_of_bench_are_judged() {
    for (yaml, text) in [
        ("bench: {bs: 0}", "bs 0 is not usable; use a multiple of 512 up to 32M, as in 4k"),
        ("bench: {bs: 1000}", "bs 1000 is not usable"),
        ("bench: {bs: 64M}", "bs 64M is not usable"),
        ("bench: {bs: 8G}", "bs 8G is not usable"),
        ("bench: {bs: 8k, size: 4k}", "size 4k is less than one request of 8k; raise it"),
        ("bench: {iodepth: 0}", "iodepth 0 is out of range; use 1 to 65535"),
        ("bench: {runtime: 500ms}", "runtime 500ms is out of range; use 1s to 24h"),
        ("bench: {runtime: 25h}", "runtime 25h is out of range; use 1s to 24h"),
        ("bench: {rwmixread: 101}", "rwmixread 101 is out of range; use 0 to 100"),
        ("{read-only: true, bench: {rw: write}}", "rw writes and the access is ro; use --rw read"),
    ] {
        assert_usage(&bench(yaml).unwrap_err(), text);
    }
    let plan = bench("shards: 7\nbench: {numjobs: 3, runtime: 2, size: 1M}").unwrap();
    assert_eq!(plan.session.shards.count(), 3);
    assert_eq!((plan.runtime_ms, plan.size_bytes), (2000, Some(1 << 20)));
}

#[test]
fn printed_settings_make_the_same_plan() {
    let session = "path: ['tcp://10.0.0.1@10.0.0.2', 'tcp://[::1]:99']\n\
        identity: -/00112233445566778899aabbccddeeff\n\
        policy: min-latency\nsession-name: s\npin: off\ncrc: off\ninvalidate-reads: off\n\
        heartbeat-ms: 100\nheartbeat-missed-max: 3\nconnect-timeout-ms: 101\n\
        reconnect-min-ms: 102\nreconnect-max-ms: 103\nio-timeout-ms: 104\n\
        no-path: queue-for=900ms\nfailover: strict\n\
        queue-depth-limit: 105\npoll-us: 106\n\
        log: info,rtrs_client=debug\n";
    for front in [
        "socket: /s",
        "listen: 127.0.0.1:0\nshards: 3\nforeground: true\nrun-dir: /r",
        "device: auto",
        "device: auto\ntakeover: true",
        "device: auto\nquick-takeover: true\ndevice-dead-timeout-s: 9",
        "device: /dev/nbd7\ndevice-timeout-s: 3\ndevice-dead-timeout-s: 9",
    ] {
        let access = if front.contains("takeover") { "rw" } else { "migration" };
        let text = format!("{session}{front}\nbuffer-size: 64M\naccess: {access}\n");
        let plan = attach(&text).unwrap();
        for text in [
            serde_yaml::to_string(&plan.settings()).unwrap(),
            serde_json::to_string_pretty(&plan.settings()).unwrap(),
        ] {
            assert_eq!(attach(&text).unwrap(), plan, "{text}");
        }
    }
    for own in ["", "bench: {rw: randrw, bs: 8k, iodepth: 2, numjobs: auto, runtime: 5, size: 1G}"]
    {
        let plan = bench(&format!("{session}{own}")).unwrap();
        let text = serde_yaml::to_string(&plan.settings()).unwrap();
        assert_eq!(bench(&text).unwrap(), plan, "{text}");
    }
}

#[test]
fn the_system_is_looked_at_before_anything_starts() {
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
    assert!(error.to_string().starts_with("\"v\" is attached already (control socket "), "{error}");
    drop(control);

    let error = bench("path: tcp://no-such-host.invalid").unwrap().session.check().unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Path, 1));
    let chain = error.chain().to_string();
    assert!(chain.contains("cannot resolve host \"no-such-host.invalid\""), "{chain}");
}

#[test]
fn commands_become_plans() {
    let run_dir = RunDir::new(Some("/r".into())).unwrap();
    let (name, output) = ("v".to_owned(), Output::Json);
    for (args, expected) in [
        (&["list"][..], Plan::List { run_dir: run_dir.clone(), output }),
        (&["status", "v"], Plan::Status { name: name.clone(), run_dir: run_dir.clone(), output }),
        (&["stats", "v"], Plan::Stats { name: name.clone(), run_dir: run_dir.clone(), output }),
        (
            &["detach", "v", "--within=1s", "--force"],
            Plan::Detach {
                name: name.clone(),
                run_dir: run_dir.clone(),
                within_ms: 1000,
                force: true,
                output,
            },
        ),
        (
            &["policy", "v", "min-latency"],
            Plan::Policy {
                name: name.clone(),
                policy: Policy::MinLatency,
                run_dir: run_dir.clone(),
                output,
            },
        ),
        (
            // A path is named as listings show it, however it is written.
            &["path", "remove", "v", "ip:10.0.0.1@ip:10.0.0.2", "--within=1s"],
            Plan::Path(PathPlan {
                name,
                step: PathStep::Remove(Leave {
                    path: "rdma://10.0.0.1@10.0.0.2:1234".to_owned(),
                    within_ms: 1000,
                    force: false,
                }),
                run_dir,
                output,
            }),
        ),
    ] {
        let made = plan(&[args, &["-o", "json", "--run-dir=/r"]].concat()).unwrap();
        assert_eq!((made.settings(), &made), (None, &expected));
    }
}

#[test]
fn a_named_file_lies_below_the_flags() {
    let scratch = Scratch::new("file");
    let file = scratch.0.join("c.yaml");
    let text = "path: tcp://file\nsocket: /file\nread-only: true\nrun-dir: /file\npoll-us: 1\n";
    std::fs::write(&file, text).unwrap();
    let config = format!("--config={}", file.display());
    let Plan::Attach(plan) = plan(&[
        "attach",
        "v",
        &config,
        "--listen=127.0.0.1:5",
        "--access=rw",
        "--path=tcp://flag",
        "--run-dir=/flag",
    ])
    .unwrap() else {
        panic!("not attach")
    };
    assert_eq!(plan.front, Front::Tcp("127.0.0.1:5".parse().unwrap()));
    assert_eq!(plan.session.access, crate::config::Access::Rw);
    assert_eq!(plan.session.paths, ["tcp://flag:1234".parse().unwrap()]);
    assert_eq!(plan.run_dir.path(), PathBuf::from("/flag"));
    assert_eq!(plan.session.poll_us, 1);
}

#[test]
fn rdma_that_is_not_there_is_refused_with_what_is_missing() {
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

#[test]
fn a_ping_is_judged_by_its_mode() {
    let link = |args: &[&str]| plan(args);
    let ping = |args: &[&str]| match link(&[&["ping", "tcp://h"], args].concat()).unwrap() {
        Plan::Ping(plan) => *plan,
        other => panic!("{other:?}"),
    };
    let plan = ping(&[]);
    assert_eq!((plan.portal.port(), plan.hello.size, plan.count), (1234, 64, 0));
    assert_eq!(plan.interval.as_millis(), 1000);
    let plan = ping(&["-m", "read-bw"]);
    assert_eq!((plan.hello.size, plan.count, plan.hello.depth), (65536, 2000, 16));
    assert!(plan.interval.is_zero());
    assert_eq!(ping(&["--rping"]).portal.port(), 7174);
    for (target, port) in
        [("tcp://h:5", 5), ("tcp://[::1]", 7174), ("tcp://[::1]:9", 9), ("tcp://10.0.0.1@h", 7174)]
    {
        match link(&["ping", target, "--rping"]).unwrap() {
            Plan::Ping(plan) => assert_eq!(plan.portal.port(), port, "{target}"),
            other => panic!("{other:?}"),
        }
    }
    for (args, text) in [
        (&["-s", "0"][..], "size 0 is out of range; use 1 to 1048576"),
        (&["-s", "2M"], "size 2097152 is out of range"),
        (&["--rping", "-s", "22"], "size 22 is out of range; use 23 to 65535"),
        (&["--rping", "-m", "read-lat"], "rping knows --mode ping only"),
        (&["--rping", "--read-invalidate"], "rping knows no --server-invalidate"),
        (&["--duplex"], "--duplex is for --mode read-bw and write-bw"),
        (&["--depth", "4"], "--depth is for --mode read-bw"),
        (&["-m", "read-bw", "--depth", "257"], "depth 257 is out of range; use 1 to 256"),
        (&["-m", "write-bw", "-i", "5"], "--interval is not for bandwidth modes"),
        (&["-m", "read-lat", "--server-invalidate"], "are for --mode ping"),
        (&["-i", "21s"], "interval 21000 is out of range; use 0 to 20000"),
        (&["-n", "65"], "queue-pairs 65 is out of range; use 1 to 64"),
        (&["-W", "1"], "timeout 1 is out of range; use 10 to 600000"),
    ] {
        let error = link(&[&["ping", "tcp://h"], args].concat()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(text), "{error}\nlacks {text}");
    }
    for command in ["ping", "doctor"] {
        let error = link(&[command, "tcp://h:0"]).unwrap_err().chain().to_string();
        assert!(error.contains("has port 0"), "{error}");
    }
    let error = link(&["ping", "tcp://1.1.1.1@2.2.2.2", "-I", "3.3.3.3"]).unwrap_err();
    assert!(error.to_string().contains("write it once"), "{error}");
}
