//! Tests of captured sessions with the kernel. The lab scenario interop-capture recorded them on
//! soft RoCE. Our own wire code decodes every message and checks it against docs/PROTOCOL.md, in
//! order and with the keys valid at the time.
//!
//! The files are classic pcap with packets truncated to 700 bytes, which omits the data of reads
//! and long writes but keeps every header.

mod roce;
mod session;

use roce::packets;
use session::{Counts, judge};

fn read(name: &str) -> Vec<u8> {
    let path = format!("{}/golden/{name}.pcap", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn counts(name: &str) -> Counts {
    let bytes = read(name);
    assert!(bytes.len() < 100 << 10, "{name}: {} bytes are too many to keep", bytes.len());
    judge(&packets(&bytes)).unwrap_or_else(|fault| panic!("{name}: {fault}"))
}

#[test]
fn our_client_with_the_kernels_server() {
    let seen = counts("our-client-kernel-server");
    assert_eq!((seen.connections, seen.accepts, seen.ends), (2, 2, 2));
    assert_eq!(seen.session_name, "goldn");
    assert!(seen.new_rkey && !seen.keeps_lengths, "like the kernel by default");
    assert_eq!((seen.chunks, seen.descriptors), (16, 16));
    assert_eq!((seen.opens, seen.closes), (1, 1));
    let io = (seen.reads, seen.writes, seen.flushes, seen.discards);
    assert!(io.0 >= 2 && io.1 > 2 && io.2 > 0 && io.3 > 0, "{io:?}");
    assert_eq!(seen.write_zeroes, 0, "not to a server before Linux 6.8");
    assert!(seen.fua > 0);
    assert_eq!(seen.invalidates, 0, "our client asks for none");
    assert_eq!(seen.fresh_keys, seen.answers, "one with each answer");
    assert!(seen.heartbeats > 0 && seen.heartbeat_acks > 0);
}

#[test]
fn the_kernels_client_with_our_server() {
    let seen = counts("kernel-client-our-server");
    assert_eq!((seen.connections, seen.accepts), (3, 3));
    assert_eq!(seen.ends, 3);
    assert_eq!(seen.session_name, "goldn");
    assert!(seen.new_rkey && seen.keeps_lengths);
    assert_eq!((seen.chunks, seen.descriptors), (16, 16));
    assert_eq!((seen.opens, seen.closes), (1, 1));
    assert!(seen.reads > 0 && seen.writes > 2 && seen.flushes > 0 && seen.discards > 0);
    assert!(seen.fua > 0);
    assert_eq!(seen.invalidates, seen.reads_with_data, "one with each read, control too");
    assert_eq!(seen.fresh_keys, seen.answers);
    assert!(seen.heartbeats > 0 && seen.heartbeat_acks > 0);
}

#[test]
fn a_wrong_byte_is_detected() {
    let bytes = read("our-client-kernel-server");
    let good = packets(&bytes);
    let mut found = 0;
    for index in 0..good.len() {
        // Changes the immediate of a reliable packet to a different permit or a different kind.
        if good[index].imm().is_none() {
            continue;
        }
        let mut bad = good.clone();
        bad[index].spoil_immediate();
        found += usize::from(judge(&bad).is_err());
    }
    let all = good.iter().filter(|packet| packet.imm().is_some()).count();
    assert!(all > 20 && found == all, "{found} of {all}");
}

#[test]
fn any_bytes_are_parsed_without_a_panic() {
    let bytes = read("kernel-client-our-server");
    for at in (0..bytes.len()).step_by(997) {
        let mut bad = bytes.clone();
        bad[at] ^= 0x55;
        let _ = judge(&packets(&bad));
        let _ = judge(&packets(&bytes[..at]));
    }
}
