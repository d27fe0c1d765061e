//! Tests that every flag has help, a key and an effect, and that errors suggest a correction.

use std::path::PathBuf;

use serde_json::json;

use super::path::PathCommand;
use super::session::Session;
use super::*;
use crate::control_protocol::{PathInfo, Status};
use crate::daemon::saved::{Saved, SavedVolume};
use crate::plan::{AttachPlan, Front};
use crate::settings::{Access, Settings};

/// Status of a session without paths that is served at a URI.
pub(super) fn status() -> Status {
    serde_json::from_value(json!({
        "name": "v", "export": "v", "session": "host-v", "session_id": "id",
        "state": "not-answering", "access": "auto", "no_path": "queue", "failover": "fast",
        "pid": 7, "shards": 2, "uri": "nbd://127.0.0.1:10809/v", "inflight": 0,
        "nbd_connections": 0,
    }))
    .unwrap()
}

/// Path in a state, with a last error if it has ended.
pub(super) fn path(state: &str, reconnects: u64, ends: u64) -> PathInfo {
    serde_json::from_value(json!({
        "path": "p", "transport": "tcp", "address": "10.0.0.2:1234", "state": state,
        "connections": 3, "reconnects": reconnects, "ends": ends,
        "heartbeats": { "sent": 0, "missed": 0 }, "internal_errors": 0,
        "last_error": if ends > 0 { Some("why") } else { None }, "slow": false,
    }))
    .unwrap()
}

fn parse(args: &[&str]) -> Result<LowArgs, clap::Error> {
    LowArgs::try_parse_from([&["rtrs-client"], args].concat())
}

#[test]
fn the_command_line_definition_is_valid() {
    LowArgs::command().debug_assert();
}

#[test]
fn a_takeover_finds_the_other_volumes_by_their_local_names() {
    let dir = std::env::temp_dir().join(format!("rtrs-left-as-{}", std::process::id()));
    let run_dir = rtrs_core::local::RunDir::new(Some(dir.clone())).unwrap();
    run_dir.make().unwrap();
    let words = |names: &[&str]| {
        let place = ["--device", "auto", "--takeover", "--path", "tcp://127.0.0.1:1"];
        let run_dir = ["--run-dir", dir.to_str().unwrap()];
        let all = parse(&[&["attach"], names, &place, &run_dir].concat()).unwrap();
        let Command::Attach(args) = &all.command else { panic!("{all:?}") };
        args.plan(&all.global, &[]).unwrap()
    };
    let before = words(&["x", "y", "--as", "a", "--as", "b", "--session-name", "s"]);
    for volume in before.volumes() {
        let (name, settings) = (volume.session.name.clone(), volume.own());
        let left = SavedVolume { session: "s".into(), name: name.clone(), settings };
        let saved = Saved::new(&run_dir, &name).unwrap();
        saved.begin();
        saved.save_volume(&left);
    }
    let found = |names: &[&str]| {
        let plan = words(names);
        let of =
            |volume: &AttachPlan| (volume.session.name.clone(), volume.session.export_name.clone());
        (plan.session.session_name.clone(), plan.volumes().map(of).collect::<Vec<_>>())
    };
    let pair = |name: &str, export: &str| (name.to_owned(), export.to_owned());
    let (a, b) = (pair("a", "x"), pair("b", "y"));
    assert_eq!(found(&["x", "--as", "a"]), ("s".to_owned(), vec![a.clone(), b.clone()]));
    assert_eq!(found(&["y", "--as", "b"]), ("s".to_owned(), vec![b, a]));
    // Without the local name, it is a different volume.
    assert_eq!(found(&["x"]).1, [pair("x", "x")]);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn every_flag_has_short_and_long_help() {
    fn check(command: &clap::Command) {
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let name = arg.get_id();
            let short = arg.get_help().unwrap_or_else(|| panic!("{name} has no help")).to_string();
            assert!(short.len() <= 100, "the short help of {name} is long: {short}");
            if arg.get_long().is_some() && !["help", "version"].contains(&name.as_str()) {
                let long = arg.get_long_help().unwrap_or_else(|| panic!("{name}: no long help"));
                assert_ne!(long.to_string(), short, "{name}");
            }
        }
        for sub in command.get_subcommands() {
            assert!(sub.get_about().is_some(), "{} has no help", sub.get_name());
            check(sub);
        }
    }
    check(&LowArgs::command());
}

const SESSION: [&str; 19] = [
    "--identity=-/00112233445566778899aabbccddeeff",
    "--path=tcp://10.0.0.1@10.0.0.2",
    "--path=tcp://h:1",
    "--access=ro",
    "--policy=round-robin",
    "--session-name=s",
    "--pin=on",
    "--crc=off",
    "--invalidate-reads=on",
    "--heartbeat=10ms",
    "--heartbeat-missed-max=2",
    "--heartbeat-idle-max=9s",
    "--connect-timeout=11ms",
    "--reconnect-min=12ms",
    "--reconnect-max=13ms",
    "--io-timeout-ms=14",
    "--queue-depth-limit=15",
    "--poll=16us",
    "--log=debug",
];
const SESSION_FILE: &str = "identity: -/00112233445566778899aabbccddeeff\n\
    path: [tcp://10.0.0.1@10.0.0.2, tcp://h:1]\naccess: ro\n\
    policy: round-robin\nsession-name: s\npin: on\ncrc: off\ninvalidate-reads: on\n\
    heartbeat: 10ms\nheartbeat-missed-max: 2\nheartbeat-idle-max: 9s\n\
    connect-timeout: 11ms\nreconnect-min: 12ms\nreconnect-max: 13ms\nio-timeout: 14ms\n\
    queue-depth-limit: 15\npoll: 16us\nlog: debug\n";

#[test]
fn flags_reach_their_settings() {
    let more =
        ["--socket=/tmp/s", "--foreground", "--shards=2", "--slow-io=fail", "--buffer-size=1M"];
    let args = parse(&[&["attach", "vol0"], &SESSION[..], &more].concat()).unwrap();
    let Command::Attach(attach) = &args.command else { panic!("not attach") };
    let file = format!(
        "{SESSION_FILE}socket: /tmp/s\nforeground: true\nshards: 2\n\
        slow-io: fail\nbuffer-size: 1M\n"
    );
    assert_eq!(attach.settings(&args.global).unwrap(), Settings::from_yaml(&file, "s").unwrap());
    assert_eq!(attach.names, ["vol0"]);

    let args = parse(&["attach", "v", "--listen", "127.0.0.1", "--read-only"]).unwrap();
    let Command::Attach(attach) = &args.command else { panic!("not attach") };
    let file = "listen: 127.0.0.1:10809\nread-only: true\n";
    assert_eq!(attach.settings(&args.global).unwrap(), Settings::from_yaml(file, "s").unwrap());

    let more = ["--device=nbd3", "--device-timeout=100s", "--device-dead-timeout-s=7"];
    let args = parse(&[&["attach", "v"], &more[..]].concat()).unwrap();
    let Command::Attach(attach) = &args.command else { panic!("not attach") };
    let file = "device: /dev/nbd3\ndevice-timeout: 100s\ndevice-dead-timeout: 7s\n";
    assert_eq!(attach.settings(&args.global).unwrap(), Settings::from_yaml(file, "s").unwrap());

    let more =
        ["--rw=randrw", "--bs=8k", "--iodepth=3", "--numjobs=4", "--runtime=5s", "--size=1G"];
    let bench = [&["bench", "vol0", "--rwmixread=70"], &SESSION[..], &more].concat();
    let args = parse(&bench).unwrap();
    let Command::Bench(bench) = &args.command else { panic!("not bench") };
    let file = format!(
        "{SESSION_FILE}bench:\n  rw: randrw\n  bs: 8k\n  iodepth: 3\n  \
        numjobs: 4\n  runtime: 5s\n  size: 1G\n  rwmixread: 70\n"
    );
    assert_eq!(bench.settings(&args.global).unwrap(), Settings::from_yaml(&file, "s").unwrap());
}

#[test]
fn global_flags_are_accepted_anywhere() {
    for args in [
        &["-o", "json", "--run-dir", "/x", "list"][..],
        &["list", "-o", "json", "--run-dir", "/x"],
        &["status", "v", "--output=json", "--run-dir=/x"],
    ] {
        let parsed = parse(args).unwrap();
        let GlobalArgs { output, run_dir } = parsed.global;
        assert_eq!((output, run_dir), (Output::Json, Some(PathBuf::from("/x"))));
    }
}

#[test]
fn detach_is_bounded() {
    for (args, millis) in [(&["detach", "v"][..], 5000), (&["detach", "v", "--within=250ms"], 250)]
    {
        let Command::Detach(detach) = parse(args).unwrap().command else { panic!("not detach") };
        assert_eq!((detach.names[0].as_str(), detach.within.millis()), ("v", millis));
        assert!(!detach.force);
    }
    let Command::Detach(detach) = parse(&["detach", "v", "--force"]).unwrap().command else {
        panic!("not detach")
    };
    assert!(detach.force);
    let Command::Detach(detach) = parse(&["detach", "v", "w"]).unwrap().command else {
        panic!("not detach")
    };
    assert_eq!((detach.names, detach.all), (vec!["v".to_owned(), "w".to_owned()], false));
    assert!(parse(&["detach", "--all"]).is_ok());
}

#[test]
fn wrong_usage_names_flag_value_and_remedy() {
    for (args, part) in [
        (&["attach"][..], "<NAME>"),
        (&["attach", "v", "--path=1.2.3.4"], "has no scheme; write tcp://1.2.3.4"),
        (&["attach", "v", "--io-timeout=30"], "time \"30\" has no unit; write 30s or 30ms"),
        (&["attach", "v", "--poll=1s"], "time \"1s\" is out of range; use 0s to 10ms"),
        (
            &["attach", "v", "--device=/dev/nbd0p1"],
            "is not an NBD device; use auto or a whole device",
        ),
        (&["attach", "v", "--listen=localhost:1"], "is not a numeric address; use ADDR:PORT"),
        (&["attach", "v", "--policy=best"], "use round-robin, min-inflight or min-latency"),
        (&["attach", "v", "--access=wo"], "use auto, ro, rw or migration"),
        (&["bench", "v", "--socket=/s"], "unexpected argument '--socket'"),
        (&["bench", "v", "--rw=trim"], "use read, write, randread, randwrite or randrw"),
        (&["detach"], "<NAME>"),
        (&["detach", "v", "--all"], "cannot be used with"),
        (&["detach", "v", "--within=250"], "time \"250\" has no unit; write 250s or 250ms"),
        (&["detach", "v", "--within=1h"], "time \"1h\" is out of range; use 0s to 10m"),
        (&["detach", "v", "--within=soon"], "time \"soon\" does not begin with a digit"),
        (&["ping", "tcp://h", "--depth=257"], "number \"257\" is out of range; use 1 to 256"),
        (&["ping", "tcp://h", "-i", "21s"], "time \"21s\" is out of range; use 0s to 20s"),
        (&["ping", "tcp://h", "-n", "65"], "number \"65\" is out of range; use 1 to 64"),
        (&["ping", "tcp://h", "-W", "1ms"], "time \"1ms\" is out of range; use 10ms to 10m"),
        (&["status"], "<NAME>"),
        (&["mount"], "unrecognized subcommand 'mount'"),
        (&["list", "-o", "xml"], "[possible values: text, json]"),
    ] {
        let error = parse(args).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(part), "{error}\nlacks {part}");
    }
    assert_eq!(parse(&[]).unwrap_err().exit_code(), 2);
    assert_eq!(parse(&["--help"]).unwrap_err().exit_code(), 0);
}

#[test]
fn old_flags_yield_to_new_ones_and_are_validated() {
    let settings = |args: &[&str]| {
        let args = parse(&[&["attach", "v"], args].concat()).unwrap();
        let Command::Attach(attach) = &args.command else { panic!("not attach") };
        attach.settings(&args.global)
    };
    let both = settings(&["--io-timeout-ms=14", "--io-timeout=20s"]).unwrap();
    assert_eq!(both.session.io_timeout.get().as_secs(), 20);
    let error = settings(&["--io-timeout-ms", "1"]).unwrap_err();
    assert_eq!((error.exit_code(), error.to_string().contains("--io-timeout-ms: time")), (2, true));
}

#[test]
fn names_are_validated_in_every_command() {
    let long = "n".repeat(255);
    for command in ["attach", "bench", "status", "stats", "detach", "path", "policy"] {
        for (name, text) in
            [(&*long, "is 255 bytes long; use 1 to 254 bytes"), ("", "name \"\" is empty")]
        {
            let args: &[&str] = match command {
                "attach" => &["attach", name, "--socket=/s"],
                "path" => &["path", "list", name],
                "policy" => &["policy", name, "round-robin"],
                _ => &[command, name],
            };
            let error = parse(args).unwrap().run().unwrap_err();
            assert_eq!(error.exit_code(), 2, "{command}");
            assert!(error.to_string().contains(text), "{command}: {error}");
        }
    }
    let global = parse(&["list", "--run-dir=/r"]).unwrap().global;
    let session = Session::new(&long[1..], &global).unwrap();
    assert_eq!(session.run_dir.path(), PathBuf::from("/r"));
    for command in ["ping", "doctor"] {
        let error = parse(&[command, "tcp://h:0"]).unwrap().run().unwrap_err();
        assert!(error.chain().to_string().contains("has port 0"), "{error}");
    }
}

#[test]
fn a_path_removal_is_bounded() {
    let args = parse(&["path", "remove", "v", "p", "--within=1s", "--force"]).unwrap();
    let Command::Path(PathArgs { command: PathCommand::Remove(args) }) = args.command else {
        panic!("not path remove")
    };
    assert_eq!((args.within.millis(), args.force), (1000, true));
}

#[test]
fn flags_override_the_configuration_file() {
    let file = std::env::temp_dir().join(format!("rtrs-file-{}.yaml", std::process::id()));
    let text = "path: tcp://file\nsocket: /file\nread-only: true\nrun-dir: /file\npoll: 1us\n";
    std::fs::write(&file, text).unwrap();
    let config = format!("--config={}", file.display());
    let args = parse(&[
        "attach",
        "v",
        &config,
        "--listen=127.0.0.1:5",
        "--access=rw",
        "--path=tcp://flag",
        "--run-dir=/flag",
    ])
    .unwrap();
    let Command::Attach(attach) = &args.command else { panic!("not attach") };
    let plan = attach.plan(&args.global, &[]).unwrap();
    assert_eq!(plan.front, Front::Tcp("127.0.0.1:5".parse().unwrap()));
    assert_eq!(plan.session.access, Access::Rw);
    assert_eq!(plan.session.settings.path, ["tcp://flag:1234".parse().unwrap()]);
    assert_eq!(plan.run_dir.path(), PathBuf::from("/flag"));
    assert_eq!(plan.session.settings.poll.get().as_micros(), 1);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn switches_in_the_file_stay_on_without_their_flags() {
    let file = std::env::temp_dir().join(format!("rtrs-switches-{}.yaml", std::process::id()));
    let text = "path: tcp://file\ndevice: auto\nread-only: true\ntakeover: true\n\
        quick-takeover: true\nforeground: true\n";
    std::fs::write(&file, text).unwrap();
    let args = parse(&["attach", "v", &format!("--config={}", file.display())]).unwrap();
    let Command::Attach(attach) = &args.command else { panic!("not attach") };
    assert_eq!(attach.settings(&args.global).unwrap(), Settings::from_yaml(text, "s").unwrap());
    std::fs::remove_file(file).unwrap();
}
