//! Every flag has its help, its key and its effect; wrong usage says what would do.

use super::*;
use clap::CommandFactory;

fn parse(args: &[&str]) -> Result<LowArgs, clap::Error> {
    LowArgs::try_parse_from([&["rtrs-client"], args].concat())
}

/// The keys of the file, as serde knows them; those of `bench` if `under_bench`.
fn keys(under_bench: bool) -> Vec<String> {
    let text = if under_bench { "bench: {zzzzzzzzzzzz: 1}" } else { "zzzzzzzzzzzz: 1" };
    let error = Settings::from_yaml(text, "s").unwrap_err().to_string();
    let (_, keys) = error.split_once("the keys are ").unwrap();
    keys.split(", ").map(str::to_owned).collect()
}

#[test]
fn the_definition_holds() {
    LowArgs::command().debug_assert();
}

#[test]
fn every_flag_has_short_and_long_help() {
    fn check(command: &clap::Command) {
        for arg in command.get_arguments() {
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

#[test]
fn every_setting_is_a_key_and_every_key_a_setting() {
    let not_keys = ["config", "check", "print-config", "help", "version", "accept-new-identity"];
    let flags = |name: &str| -> Vec<String> {
        let command = LowArgs::command();
        let sub = command.find_subcommand(name).unwrap().clone();
        sub.get_arguments()
            .filter_map(|arg| arg.get_long())
            .filter(|flag| !not_keys.contains(flag))
            .map(str::to_owned)
            .collect()
    };
    let (top, under_bench) = (keys(false), keys(true));
    let (attach, bench) = (flags("attach"), flags("bench"));
    for flag in &attach {
        assert!(top.contains(flag), "--{flag} is no key");
    }
    for flag in &bench {
        assert!(top.contains(flag) || under_bench.contains(flag), "--{flag} is no key");
    }
    for key in top.iter().filter(|key| !["run-dir", "bench"].contains(&key.as_str())) {
        assert!(attach.contains(key), "the key {key} is no flag of attach");
    }
    for key in &under_bench {
        assert!(bench.contains(key), "the key bench.{key} is no flag of bench");
    }
    assert!(LowArgs::command().get_arguments().any(|arg| arg.get_long() == Some("run-dir")));
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
    "--heartbeat-ms=10",
    "--heartbeat-missed-max=2",
    "--connect-timeout-ms=11",
    "--reconnect-min-ms=12",
    "--reconnect-max-ms=13",
    "--io-timeout-ms=14",
    "--queue-depth-limit=15",
    "--poll-us=16",
    "--log=debug",
];
const SESSION_FILE: &str = "identity: -/00112233445566778899aabbccddeeff\n\
    path: [tcp://10.0.0.1@10.0.0.2, tcp://h:1]\naccess: ro\n\
    policy: round-robin\nsession-name: s\npin: on\ncrc: off\ninvalidate-reads: on\n\
    heartbeat-ms: 10\nheartbeat-missed-max: 2\nconnect-timeout-ms: 11\nreconnect-min-ms: 12\n\
    reconnect-max-ms: 13\nio-timeout-ms: 14\nqueue-depth-limit: 15\npoll-us: 16\nlog: debug\n";

#[test]
fn flags_reach_their_settings() {
    let more = ["--socket=/tmp/s", "--foreground", "--shards=2", "--buffer-size=1M"];
    let args = parse(&[&["attach", "vol0"], &SESSION[..], &more].concat()).unwrap();
    let Command::Attach(attach) = args.command else { panic!("not attach") };
    let file = format!(
        "{SESSION_FILE}socket: /tmp/s\nforeground: true\nshards: 2\n\
        buffer-size: 1M\n"
    );
    assert_eq!(attach.settings(), Settings::from_yaml(&file, "s").unwrap());
    assert_eq!(attach.name, "vol0");

    let args = parse(&["attach", "v", "--listen", "127.0.0.1", "--read-only"]).unwrap();
    let Command::Attach(attach) = args.command else { panic!("not attach") };
    let file = "listen: 127.0.0.1:10809\nread-only: true\n";
    assert_eq!(attach.settings(), Settings::from_yaml(file, "s").unwrap());

    let more = ["--device=nbd3", "--device-timeout-s=100", "--device-dead-timeout-s=7"];
    let args = parse(&[&["attach", "v"], &more[..]].concat()).unwrap();
    let Command::Attach(attach) = args.command else { panic!("not attach") };
    let file = "device: /dev/nbd3\ndevice-timeout-s: 100\ndevice-dead-timeout-s: 7\n";
    assert_eq!(attach.settings(), Settings::from_yaml(file, "s").unwrap());

    let more = ["--rw=randrw", "--bs=8k", "--iodepth=3", "--numjobs=4", "--runtime=5", "--size=1G"];
    let bench = [&["bench", "vol0", "--rwmixread=70"], &SESSION[..], &more].concat();
    let Command::Bench(bench) = parse(&bench).unwrap().command else { panic!("not bench") };
    let file = format!(
        "{SESSION_FILE}bench:\n  rw: randrw\n  bs: 8k\n  iodepth: 3\n  \
        numjobs: 4\n  runtime: 5\n  size: 1G\n  rwmixread: 70\n"
    );
    assert_eq!(bench.settings(), Settings::from_yaml(&file, "s").unwrap());
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
    for (args, millis) in [(&["detach", "v"][..], 5000), (&["detach", "v", "--within=250"], 250)] {
        let Command::Detach(detach) = parse(args).unwrap().command else { panic!("not detach") };
        assert_eq!((detach.name.as_str(), detach.within.get()), ("v", millis));
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
        (&["attach", "v", "--socket=/s", "--listen=127.0.0.1"], "cannot be used with"),
        (&["attach", "v", "--socket=/s", "--device=auto"], "cannot be used with"),
        (&["attach", "v", "--listen=::1", "--device=auto"], "cannot be used with"),
        (&["attach", "v", "--device=/dev/nbd0p1"], "is no NBD device; use auto or a whole device"),
        (&["attach", "v", "--listen=localhost:1"], "is no numeric address; use ADDR:PORT"),
        (&["attach", "v", "--policy=best"], "round-robin, min-inflight, min-latency"),
        (&["attach", "v", "--access=wo"], "ro, rw, migration"),
        (&["bench", "v", "--socket=/s"], "unexpected argument '--socket'"),
        (&["bench", "v", "--rw=trim"], "read, write, randread, randwrite, randrw"),
        (&["detach", "v", "--within=soon"], "time \"soon\" does not begin with a digit"),
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
