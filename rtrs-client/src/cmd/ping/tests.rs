//! Tests of a ping's output for known figures.

use clap::Parser;

use super::*;
use crate::cmd::{Command, LowArgs};
use crate::engine::PathEnd;
use crate::path::refusal::Rejection;

fn try_plan(args: &[&str]) -> Result<PingPlan, Error> {
    let args = LowArgs::parse_from([&["rtrs-client", "ping"], args].concat());
    let Command::Ping(ping) = &args.command else { panic!("{args:?}") };
    PingPlan::new(ping, &args.global)
}

fn plan(args: &[&str]) -> PingPlan {
    try_plan(args).unwrap()
}

fn round(seq: u64, read: u64, write: u64) -> PingEvent {
    PingEvent::Round {
        seq,
        read: Some(Duration::from_micros(read)),
        write: Some(Duration::from_micros(write)),
        text: b"rdma-ping-0: ABC\xff".to_vec(),
    }
}

#[test]
fn a_round_prints_one_line() {
    let remote: SocketAddr = "10.0.0.2:1234".parse().unwrap();
    let one = plan(&["tcp://10.0.0.2"]);
    assert_eq!(
        report::round_text(&one, remote, 0, &round(7, 120, 80)),
        "64 bytes from 10.0.0.2:1234: seq=7 read=0.120 ms write=0.080 ms\n"
    );
    let two = plan(&["tcp://10.0.0.2", "-n2", "-v"]);
    assert_eq!(
        report::round_text(&two, remote, 1, &round(0, 1000, 2)),
        "64 bytes from 10.0.0.2:1234: qp=1 seq=0 read=1.000 ms write=0.002 ms\n\
         ping data: rdma-ping-0: ABC\\xff\n"
    );
}

#[test]
fn the_table_shows_the_reported_values() {
    let plan = plan(&["tcp://10.0.0.2", "-c3"]);
    let mut tally = Tally::default();
    for (seq, read) in [(0, 100), (1, 200), (2, 300)] {
        tally.take(0, round(seq, read, 50));
    }
    let remote: SocketAddr = "10.0.0.2:1234".parse().unwrap();
    let summary = report::summary(&plan, remote, &[], &tally);
    let times = summary.latency_us.as_ref().unwrap();
    assert_eq!(times.read.as_ref().unwrap().count, 3);
    let average = times.round.as_ref().unwrap().avg;
    assert!((average - 250.0).abs() < 1.0, "{average}");
    let json = serde_json::json!(summary);
    assert_eq!(json["latency_us"]["read"]["count"], 3);
    assert!(json["bandwidth"].is_null() && json["mode"] == "ping", "{json}");
    let table = summary.text();
    assert!(table.starts_with("--- tcp://10.0.0.2:1234 ping ---\n0 rounds begun"), "{table}");
    let read = table.lines().find(|line| line.starts_with("read")).unwrap();
    let words: Vec<&str> = read.split_whitespace().collect();
    assert_eq!(words[..3], ["read", "3", "100.0"], "{table}");
    assert!(words[6].starts_with("300."), "{table}");
}

#[test]
fn defaults_and_limits_depend_on_the_mode() {
    let ping = |args: &[&str]| plan(&[&["tcp://h"], args].concat());
    let made = ping(&[]);
    assert_eq!((made.portal.port(), made.hello.size, made.count), (1234, 64, 0));
    assert_eq!(made.interval.as_millis(), 1000);
    let made = ping(&["-m", "read-bw"]);
    assert_eq!((made.hello.size, made.count, made.hello.depth), (65536, 2000, 16));
    assert!(made.interval.is_zero());
    assert_eq!(ping(&["--rping"]).portal.port(), 7174);
    for (target, port) in
        [("tcp://h:5", 5), ("tcp://[::1]", 7174), ("tcp://[::1]:9", 9), ("tcp://10.0.0.1@h", 7174)]
    {
        assert_eq!(plan(&[target, "--rping"]).portal.port(), port, "{target}");
    }
    for (args, text) in [
        (&["-s", "0"][..], "size 0 is out of range; use 1 to 1048576"),
        (&["-s", "2M"], "size 2097152 is out of range"),
        (&["--rping", "-s", "22"], "size 22 is out of range; use 23 to 65535"),
        (&["--rping", "-m", "read-lat"], "rping supports only --mode ping"),
        (&["--rping", "--read-invalidate"], "rping supports neither --server-invalidate"),
        (&["--duplex"], "--duplex is for --mode read-bw and write-bw"),
        (&["--depth", "4"], "--depth is for --mode read-bw"),
        (&["-m", "write-bw", "-i", "5ms"], "--interval is not for bandwidth modes"),
        (&["-m", "read-lat", "--server-invalidate"], "are for --mode ping"),
    ] {
        let error = try_plan(&[&["tcp://h"], args].concat()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(text), "{error}\nlacks {text}");
    }
    let error = try_plan(&["tcp://h:0"]).unwrap_err().chain().to_string();
    assert!(error.contains("has port 0"), "{error}");
    let error = try_plan(&["tcp://1.1.1.1@2.2.2.2", "-I", "3.3.3.3"]).unwrap_err();
    assert!(error.to_string().contains("--source 3.3.3.3 contradicts tcp://"), "{error}");
    for (words, text) in [
        (["tcp://[fe80::2%a]", "-I", "fe80::1%b"], "has the zone \"b\" in its source"),
        (["tcp://[fe80::2]", "-I", "fe80::1%b"], "write it in both"),
        (["tcp://1.1.1.1", "-I", "fd00::1"], "has an IPv6 source and an IPv4 destination"),
    ] {
        let error = try_plan(&words).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let error = error.chain().to_string();
        assert!(error.contains(text), "{error}\nlacks {text}");
    }
    let plan = try_plan(&["tcp://[fe80::2%a]", "-I", "fe80::1%a"]).unwrap();
    assert_eq!(plan.source, Some("fe80::1".parse().unwrap()));
}

#[test]
fn a_server_that_only_answers_pings_proves_nothing() {
    let reject = rtrs_core::wire::ConnRsp::reject(errno::EOPNOTSUPP);
    let why = PathEnd::Rejected(Rejection::decode(&reject.encode()));
    let text = describe_unproved("rdma://10.0.0.1:1234", &why.into());
    assert!(text.contains("it answers pings only"), "{text}");
    assert!(text.ends_with("omit key-file or tls-dir"), "{text}");
    let text = describe_unproved("rdma://10.0.0.1:1234", &AskError::Ended);
    assert!(!text.contains("ping-only"), "{text}");
}
