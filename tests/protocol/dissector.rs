//! Tests of `scripts/rtrs.lua` in tshark: the captures in `tests/golden` (soft RoCE, with a kernel
//! peer at one end) and a session of our own over TCP. The script's output is compared with the
//! expected content.

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom, Write};

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Scratch, Server, is_root, nbd_client, requires, run, skip,
};

use crate::capture::{PATIENT, can_capture, capture_to};

/// Whether a tshark with Lua support is installed; prints the reason if not.
fn has_lua() -> bool {
    if !requires(&["tshark"]) {
        return false;
    }
    let version = run("tshark", &["--version"], COMMAND_TIME_MAX).ok().stdout;
    // The output may contain line breaks at any position.
    let version = version.split_whitespace().collect::<Vec<_>>().join(" ");
    let has = version.contains("with Lua");
    if !has {
        skip("tshark without Lua");
    }
    has
}

/// Output of tshark for one packet: the values of each field.
type Packet = BTreeMap<&'static str, Vec<String>>;

const FIELDS: &[&str] = &[
    "frame.number",
    "_ws.col.Info",
    "rtrs.cid",
    "rtrs.session",
    "rtrs.con.cid",
    "rtrs.con.queue_depth",
    "rtrs.con.new_rkey",
    "rtrs.ext.depth",
    "rtrs.ext.fence",
    "rtrs.ext.lengths",
    "rtrs.ext.server_id",
    "rtrs.type",
    "rtrs.info.name",
    "rtrs.info.count",
    "rtrs.imm.type",
    "rtrs.permit",
    "rtrs.imm.offset",
    "rtrs.imm.errno",
    "rtrs.rkey.key",
    "rtrs.request_in",
    "rtrs.answer_in",
    "rtrs.time",
    "rnbd.type",
    "rnbd.name",
    "rnbd.op",
    "rnbd.sector",
    "rnbd.bytes",
    "rnbd.fua",
    "rnbd.open.sectors",
    "rtrs.ext.idle_ms",
    "rtrs.ext.authenticate",
    "rtrs.ext.client_authenticates",
    "rnbd.auth.nonce",
    "rnbd.auth.kind",
    "rnbd.auth.scheme",
];

/// Returns the packets of a capture that the dissector decodes.
fn dissect(file: &str) -> Vec<Packet> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/rtrs.lua");
    let script = format!("lua_script:{script}");
    let mut args = vec!["-2", "-r", file, "-X", &script, "-Y", "rtrs", "-T", "fields"];
    args.extend(FIELDS.iter().flat_map(|field| ["-e", field]));
    args.extend(["-E", "occurrence=a", "-E", "separator=/t", "-E", "aggregator=;"]);
    let ended = run("tshark", &args, COMMAND_TIME_MAX).ok();
    assert!(!ended.stderr.contains("Lua"), "{}", ended.stderr);
    let packet = |line: &str| -> Packet {
        let values = |text: &str| text.split_terminator(';').map(str::to_owned).collect();
        FIELDS.iter().copied().zip(line.split('\t').map(values)).collect()
    };
    let packets: Vec<Packet> = ended.stdout.lines().map(packet).collect();
    for packet in &packets {
        let info = packet["_ws.col.Info"].concat();
        assert!(!info.contains("Lua Error"), "{packet:?}");
    }
    packets
}

/// Returns the number of packets with this value of a field.
fn count(packets: &[Packet], field: &str, value: &str) -> usize {
    packets.iter().map(|packet| packet[field].iter().filter(|one| *one == value).count()).sum()
}

/// Checks that each request refers to its answer, and each answer to its request and a time.
fn are_matched(packets: &[Packet]) {
    let mut answers = 0;
    for packet in packets {
        for request in &packet["rtrs.request_in"] {
            let number = &packet["frame.number"];
            let asked = packets.iter().find(|one| one["frame.number"] == [request.as_str()]);
            let asked = asked.unwrap_or_else(|| panic!("no request: {packet:?}"));
            assert!(asked["rtrs.answer_in"].contains(&number[0]), "{asked:?} {packet:?}");
            answers += 1;
        }
        for time in &packet["rtrs.time"] {
            let seconds: f64 = time.parse().expect("a number");
            assert!((0.0..60.0).contains(&seconds), "{packet:?}");
        }
        assert_eq!(packet["rtrs.request_in"].len(), packet["rtrs.time"].len(), "{packet:?}");
    }
    let all = |kind| count(packets, "rtrs.imm.type", kind);
    assert_eq!((answers, answers), (all("0"), all("1") + all("2")), "each has its answer");
    assert!(answers > 10);
}

fn golden(name: &str) -> Vec<Packet> {
    dissect(&format!("{}/golden/{name}.pcap", env!("CARGO_MANIFEST_DIR")))
}

#[test]
fn our_client_with_the_kernels_server() {
    if !has_lua() {
        return;
    }
    let packets = golden("our-client-kernel-server");
    are_matched(&packets);
    let count = |field, value| count(&packets, field, value);
    // INFO_REQ, INFO_RSP; each answer carries a key.
    assert_eq!((count("rtrs.type", "0"), count("rtrs.type", "1")), (1, 1));
    assert_eq!((count("rtrs.info.name", "goldn"), count("rtrs.info.count", "16")), (1, 1));
    assert_eq!(count("rtrs.type", "4"), count("rtrs.imm.type", "1"));
    assert_eq!(count("rtrs.con.queue_depth", "16"), 2);
    assert_eq!(count("rtrs.con.new_rkey", "True") + count("rtrs.con.new_rkey", "1"), 2);
    // Heartbeats and their answers.
    assert_eq!(count("rtrs.imm.type", "8"), count("rtrs.imm.type", "9"));
    // SESS_INFO and OPEN with their answers, CLOSE.
    for kind in ["0x0000", "0x0001", "0x0002", "0x0003", "0x0005"] {
        assert_eq!(count("rnbd.type", kind), 1, "{kind}");
    }
    assert_eq!(count("rnbd.name", "/dev/sda"), 1);
    // Reads, writes, flushes and a discard; the long writes consist of two packets.
    let ops = ["0", "1", "2", "3"].map(|op| count("rnbd.op", op));
    assert!(ops.iter().all(|count| *count > 0), "{ops:?}");
    let discard = packets.iter().find(|packet| packet["rnbd.op"] == ["3"]).expect("a discard");
    let place = (&*discard["rnbd.sector"][0], &*discard["rnbd.bytes"][0]);
    assert_eq!((place, &*discard["rtrs.imm.offset"][0]), (("32", "65536"), "32"));
    assert!(discard["_ws.col.Info"].concat().contains("discard sector 32, 65536 bytes"));
}

#[test]
fn the_kernels_client_with_our_server() {
    if !has_lua() {
        return;
    }
    let packets = golden("kernel-client-our-server");
    are_matched(&packets);
    let count = |field, value| count(&packets, field, value);
    let cids = ["0", "1", "2"].map(|cid| count("rtrs.con.cid", cid));
    assert_eq!(cids, [1, 1, 1]);
    assert_eq!((count("rnbd.name", "vol"), count("rtrs.session", "goldn") > 100), (1, true));
    assert!(count("rtrs.imm.type", "1") > 0 && count("rtrs.imm.type", "2") > 0);
    assert_eq!(
        count("rtrs.imm.errno", "0"),
        count("rtrs.imm.type", "1") + count("rtrs.imm.type", "2")
    );
    assert_eq!(count("rtrs.ext.lengths", "True") + count("rtrs.ext.lengths", "1"), 3, "our server");
    let open = packets.iter().find(|packet| packet["rnbd.type"] == ["0x0003"]).expect("OPEN_RSP");
    assert_eq!(open["rnbd.open.sectors"], ["32768"], "16 MiB");
}

#[test]
fn a_session_over_tcp_with_our_own_peers() {
    if !has_lua() || !can_capture() || !is_root() {
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.text("session.pcap");
    let server = Server::builder().export("vol0=mem:64M").start();
    capture_to(&file, &server, || {
        let client = Client::attach("vol0").path(server.portal()).args(&PATIENT).start();
        let mut nbd = nbd_client(&client);
        nbd.seek(SeekFrom::Start(8192)).expect("seek");
        for _ in 0..10 {
            nbd.write_all(&[0xa5; 4096]).expect("write");
        }
        // The write is longer than a frame.
        nbd.seek(SeekFrom::Start(1 << 20)).expect("seek");
        nbd.write_all(&vec![0x5a; 200 << 10]).expect("write");
        nbd.seek(SeekFrom::Start(8192)).expect("seek");
        nbd.read_exact(&mut [0; 4096]).expect("read");
        nbd.flush().expect("flush");
        drop(nbd);
        client.detach();
    });
    let packets = dissect(&file);
    are_matched(&packets);
    let count = |field, value| count(&packets, field, value);
    assert_eq!((count("rtrs.con.cid", "0"), count("rtrs.con.cid", "1")), (1, 1));
    assert_eq!(count("rtrs.ext.fence", "True") + count("rtrs.ext.fence", "1"), 2);
    for kind in ["0x0000", "0x0001", "0x0002", "0x0003", "0x0005"] {
        assert_eq!(count("rnbd.type", kind), 1, "{kind}");
    }
    assert_eq!((count("rnbd.name", "vol0"), count("rtrs.type", "0")), (1, 1));
    // A write's message is complete, regardless of frame boundaries.
    let of = |op: &str, field: &str| -> Vec<u64> {
        let packets = packets.iter().filter(|packet| packet["rnbd.op"].iter().any(|one| one == op));
        packets.flat_map(|packet| &packet[field]).map(|text| text.parse().unwrap_or(0)).collect()
    };
    assert!(count("rtrs.ext.idle_ms", "30000") > 0);
    let written: u64 = of("1", "rnbd.bytes").iter().sum();
    assert_eq!(written, 10 * 4096 + (200 << 10));
    assert_eq!(of("1", "rnbd.sector").first(), Some(&16));
    assert!(of("0", "rnbd.sector").contains(&16) && !of("2", "rnbd.bytes").is_empty());
    assert_eq!(count("rtrs.rkey.key", "0x00000000"), 0);
    assert!(count("rtrs.type", "4") >= 12, "each answer carries a key");
}

#[test]
fn proofs_of_both_ends() {
    if !has_lua() {
        return;
    }
    let packets = golden("our-client-our-server");
    let count = |field, value| count(&packets, field, value);
    // The challenge and its answer, then the proof.
    assert_eq!((count("rnbd.type", "0x8003"), count("rnbd.type", "0x8004")), (2, 1));
    let is_set = |field| count(field, "True") + count(field, "1");
    assert!(is_set("rtrs.ext.authenticate") > 0 && is_set("rtrs.ext.client_authenticates") > 0);
    let nonces: Vec<_> = packets.iter().flat_map(|packet| &packet["rnbd.auth.nonce"]).collect();
    assert!(nonces.len() == 2 && nonces[0] != nonces[1], "one of each end: {nonces:?}");
    assert!(nonces.iter().all(|nonce| nonce.len() == 64), "{nonces:?}");
    assert_eq!((count("rnbd.auth.kind", "1"), count("rnbd.auth.scheme", "0x0807")), (1, 1));
}
