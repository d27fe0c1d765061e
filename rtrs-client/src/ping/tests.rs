//! What a ping prints, from figures that are known.

use clap::Parser;

use super::*;
use crate::{LowArgs, Plan};

fn plan(args: &[&str]) -> PingPlan {
    let args = LowArgs::parse_from([&["rtrs-client", "ping"], args].concat());
    match Plan::new(&args).unwrap() {
        Plan::Ping(plan) => *plan,
        other => panic!("{other:?}"),
    }
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
fn a_round_is_a_line() {
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
fn the_table_has_what_was_told() {
    let plan = plan(&["tcp://10.0.0.2", "-c3"]);
    let mut tally = Tally::default();
    for (seq, read) in [(0, 100), (1, 200), (2, 300)] {
        tally.take(0, round(seq, read, 50));
    }
    let remote: SocketAddr = "10.0.0.2:1234".parse().unwrap();
    let summary = report::summary(&plan, remote, &[], &tally);
    assert_eq!(summary["latency_us"]["read"]["count"], 3);
    let average = summary["latency_us"]["round"]["avg"].as_f64().unwrap();
    assert!((average - 250.0).abs() < 1.0, "{average}");
    let table = report::summary_text(&summary);
    assert!(table.starts_with("--- tcp://10.0.0.2:1234 ping ---\n0 rounds begun"), "{table}");
    let read = table.lines().find(|line| line.starts_with("read")).unwrap();
    let words: Vec<&str> = read.split_whitespace().collect();
    assert_eq!(words[..3], ["read", "3", "100.0"], "{table}");
    assert!(words[6].starts_with("300."), "{table}");
}
