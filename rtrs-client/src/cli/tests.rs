//! Every flag has its help, its key and its effect; wrong usage says what would do.

use super::*;
use clap::CommandFactory;

fn parse(args: &[&str]) -> Result<LowArgs, clap::Error> {
    LowArgs::try_parse_from([&["rtrs-client"], args].concat())
}

#[test]
fn the_definition_holds() {
    LowArgs::command().debug_assert();
}

#[test]
fn every_flag_has_short_and_long_help() {
    fn check(command: &clap::Command) {
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let name = arg.get_id();
            let short = arg.get_help().unwrap_or_else(|| panic!("{name} has no help")).to_string();
            assert!(short.len() <= 100, "the short help of {name} is long");
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

const SESSION: [&str; 18] = [
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
    heartbeat: 10ms\nheartbeat-missed-max: 2\nconnect-timeout: 11ms\nreconnect-min: 12ms\n\
    reconnect-max: 13ms\nio-timeout: 14ms\nqueue-depth-limit: 15\npoll: 16us\nlog: debug\n";

#[test]
fn flags_reach_their_settings() {
    let more = ["--socket=/tmp/s", "--foreground", "--shards=2", "--buffer-size=1M"];
    let args = parse(&[&["attach", "vol0"], &SESSION[..], &more].concat()).unwrap();
    let Command::Attach(attach) = args.command else { panic!("not attach") };
    let file = format!(
        "{SESSION_FILE}socket: /tmp/s\nforeground: true\nshards: 2\n\
        buffer-size: 1M\n"
    );
    assert_eq!(attach.settings().unwrap(), Settings::from_yaml(&file, "s").unwrap());
    assert_eq!(attach.name, "vol0");

    let args = parse(&["attach", "v", "--listen", "127.0.0.1", "--read-only"]).unwrap();
    let Command::Attach(attach) = args.command else { panic!("not attach") };
    let file = "listen: 127.0.0.1:10809\nread-only: true\n";
    assert_eq!(attach.settings().unwrap(), Settings::from_yaml(file, "s").unwrap());

    let more = ["--device=nbd3", "--device-timeout=100s", "--device-dead-timeout-s=7"];
    let args = parse(&[&["attach", "v"], &more[..]].concat()).unwrap();
    let Command::Attach(attach) = args.command else { panic!("not attach") };
    let file = "device: /dev/nbd3\ndevice-timeout: 100s\ndevice-dead-timeout: 7s\n";
    assert_eq!(attach.settings().unwrap(), Settings::from_yaml(file, "s").unwrap());

    let more =
        ["--rw=randrw", "--bs=8k", "--iodepth=3", "--numjobs=4", "--runtime=5s", "--size=1G"];
    let bench = [&["bench", "vol0", "--rwmixread=70"], &SESSION[..], &more].concat();
    let Command::Bench(bench) = parse(&bench).unwrap().command else { panic!("not bench") };
    let file = format!(
        "{SESSION_FILE}bench:\n  rw: randrw\n  bs: 8k\n  iodepth: 3\n  \
        numjobs: 4\n  runtime: 5s\n  size: 1G\n  rwmixread: 70\n"
    );
    assert_eq!(bench.settings().unwrap(), Settings::from_yaml(&file, "s").unwrap());
}

#[test]
fn global_flags_stand_anywhere() {
    for args in [
        &["-o", "json", "--run-dir", "/x", "list"][..],
        &["list", "-o", "json", "--run-dir", "/x"],
        &["status", "v", "--output=json", "--run-dir=/x"],
    ] {
        let parsed = parse(args).unwrap();
        assert_eq!((parsed.output, parsed.run_dir), (Output::Json, Some(PathBuf::from("/x"))));
    }
}

#[test]
fn detach_has_a_bound() {
    for (args, millis) in [(&["detach", "v"][..], 5000), (&["detach", "v", "--within=250ms"], 250)]
    {
        let Command::Detach(detach) = parse(args).unwrap().command else { panic!("not detach") };
        assert_eq!((detach.name.as_str(), detach.within.millis()), ("v", millis));
        assert!(!detach.force);
    }
    let Command::Detach(detach) = parse(&["detach", "v", "--force"]).unwrap().command else {
        panic!("not detach")
    };
    assert!(detach.force);
}

#[test]
fn wrong_usage_says_flag_value_and_remedy() {
    for (args, part) in [
        (&["attach"][..], "<NAME>"),
        (&["attach", "v", "--path=1.2.3.4"], "has no scheme; write tcp://1.2.3.4"),
        (&["attach", "v", "--io-timeout=30"], "time \"30\" has no unit; write 30s or 30ms"),
        (&["attach", "v", "--poll=1s"], "time \"1s\" is out of range; use 0s to 10ms"),
        (&["attach", "v", "--device=/dev/nbd0p1"], "is no NBD device; use auto or a whole device"),
        (&["attach", "v", "--listen=localhost:1"], "is no numeric address; use ADDR:PORT"),
        (&["attach", "v", "--policy=best"], "use round-robin, min-inflight or min-latency"),
        (&["attach", "v", "--access=wo"], "use auto, ro, rw or migration"),
        (&["bench", "v", "--socket=/s"], "unexpected argument '--socket'"),
        (&["bench", "v", "--rw=trim"], "use read, write, randread, randwrite or randrw"),
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
fn a_port_is_known_to_be_written_or_not() {
    for (text, default_port) in [
        ("tcp://h", true),
        ("tcp://h:1234", false),
        ("rdma://[fd00::1]", true),
        ("rdma://[fd00::1]:1234", false),
        ("ip:10.0.0.2", true),
        ("ip:fd00::1@ip:fd00::2", true),
    ] {
        let target: LinkTarget = text.parse().unwrap();
        assert_eq!((target.default_port, target.portal.port()), (default_port, 1234), "{text}");
    }
}

#[test]
fn old_flags_give_way_to_new_ones_and_are_judged() {
    let settings = |args: &[&str]| match parse(&[&["attach", "v"], args].concat()).unwrap().command
    {
        Command::Attach(attach) => attach.settings(),
        _ => panic!("not attach"),
    };
    let both = settings(&["--io-timeout-ms=14", "--io-timeout=20s"]).unwrap();
    assert_eq!(both.session.io_timeout.get().as_secs(), 20);
    let error = settings(&["--io-timeout-ms", "1"]).unwrap_err();
    assert_eq!((error.exit_code(), error.to_string().contains("--io-timeout-ms: time")), (2, true));
}
