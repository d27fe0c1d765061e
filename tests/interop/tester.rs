//! Test client of the nbd project. Debian does not package it: build that project and set
//! `RTRS_NBD_TESTER` to the directory with `nbd-tester-client` and its logs (tests/run).

use std::path::PathBuf;

use rtrs_tests::{COPY_TIME_MAX, Front, Scratch, Server, Stand, run, skip, sparse_file};

use crate::{FRONTS, MIB};

/// Returns the directory, or None with a message.
fn tester() -> Option<PathBuf> {
    let dir = std::env::var_os("RTRS_NBD_TESTER").map(PathBuf::from);
    let found = dir.filter(|dir| dir.join("nbd-tester-client").is_file());
    if found.is_none() {
        skip("no nbd-tester-client: build the nbd project and set RTRS_NBD_TESTER");
    }
    found
}

/// Runs the client against a fresh export of `size` bytes, over each front with each block size.
/// The client never requests block sizes. A log is a file in the directory.
fn passes(size: u64, args: &[&str], log: Option<&str>) {
    let Some(dir) = tester() else { return };
    let mut args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    if let Some(log) = log {
        args.extend(["-i", "-t", &dir.join(log).display().to_string()].map(str::to_owned));
    }
    for (name, front) in FRONTS {
        for block in [512, 4096] {
            eprintln!("front: {name}, blocks of {block}: {args:?}");
            let scratch = Scratch::new();
            sparse_file(&scratch.path("vol0.img"), size);
            let export = format!("vol0={},block-size={block}", scratch.text("vol0.img"));
            let stand = Stand::start(scratch, Server::builder().export(export), front);
            let place = match stand.client.front() {
                Front::Unix(path) => vec!["-u".to_owned(), path.display().to_string()],
                Front::Tcp(port) => vec!["127.0.0.1".to_owned(), port.to_string()],
            };
            let own = ["-N", "vol0"].map(str::to_owned);
            let all = [&own[..], &args, &place].concat();
            let _ = run(dir.join("nbd-tester-client"), &all, COPY_TIME_MAX).ok();
            stand.finish();
        }
    }
}

#[test]
fn throughput() {
    passes(4 * MIB, &[], None);
}

#[test]
fn oversized_requests() {
    passes(4 * MIB, &["-o"], None);
}

#[test]
fn writes() {
    passes(4 * MIB, &["-w"], None);
}

#[test]
fn writes_and_flushes() {
    passes(4 * MIB, &["-w", "-f"], None);
}

#[test]
fn handshakes() {
    passes(4 * MIB, &["-h"], None);
}

#[test]
fn the_integrity_log() {
    passes(50 * MIB, &[], Some("integrity-test.tr"));
}

#[test]
fn the_log_of_huge_requests() {
    passes(50 * MIB, &[], Some("integrityhuge-test.tr"));
}
