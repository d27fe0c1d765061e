//! What goes over the wire, seen by somebody else: tshark captures a session on the loopback and
//! must decode it as iWARP, with every checksum good.
#![forbid(unsafe_code)]

use std::io::{Read, Seek, SeekFrom, Write};
use std::process::Command;
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Proc, Scratch, Server, is_root, nbd_client, requires, run, wait_for,
};

/// Most packets that are captured: a bound, not a need.
const PACKETS_MAX: &str = "20000";

#[test]
fn tshark_decodes_a_session_as_iwarp() {
    if !requires(&["tshark", "dumpcap"]) {
        return;
    }
    if !is_root() {
        // Capturing on the loopback needs CAP_NET_RAW.
        let _ = requires(&["(the right to capture: run as root)"]);
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.path("session.pcap");
    let file = file.to_str().expect("a plain path");
    let server = Server::builder().export("vol0=mem:64M").start();
    let (_, port) = server.portal().rsplit_once(':').expect("a portal with a port");
    let filter = format!("tcp port {port}");
    let mut dumpcap = Command::new("dumpcap");
    dumpcap.args(["-q", "-i", "lo", "-f", &filter, "-B", "64", "-c", PACKETS_MAX]);
    dumpcap.args(["-P", "-w", file]);
    let mut capture = Proc::start(dumpcap);
    // dumpcap makes the file when it is about to capture.
    wait_for("dumpcap to start", Duration::from_secs(20), || {
        std::fs::metadata(file).ok().filter(|meta| meta.len() > 0)
    });
    std::thread::sleep(Duration::from_millis(300));

    let client = Client::attach("vol0").path(server.portal()).args(&["--shards", "1"]).start();
    {
        let mut nbd = nbd_client(&client);
        let small: Vec<u8> = (0..4096u32).map(|i| (i % 251) as u8).collect();
        let large = vec![0xa5; 300_000 / 512 * 512];
        nbd.seek(SeekFrom::Start(8192)).expect("seek");
        nbd.write_all(&small).expect("write");
        nbd.seek(SeekFrom::Start(1 << 20)).expect("seek");
        nbd.write_all(&large).expect("write");
        nbd.seek(SeekFrom::Start(8192)).expect("seek");
        let mut back = vec![0; small.len()];
        nbd.read_exact(&mut back).expect("read");
        assert_eq!(back, small);
        nbd.flush().expect("flush");
    }
    client.detach();
    std::thread::sleep(Duration::from_millis(500));
    capture.signal("INT");
    let ended = capture.wait(Duration::from_secs(20));
    assert_eq!(ended.code, Some(0), "dumpcap: {}", ended.stderr);

    let args = ["-r", file, "--disable-protocol", "rpcordma", "-V", "-Y", "iwarp_mpa"];
    let decoded = run("tshark", &args, COMMAND_TIME_MAX).ok().stdout;
    let count = |what: &str| decoded.matches(what).count();
    assert!(count("MPA ID Req Frame") + count("Request frame header") > 0, "no MPA request");
    assert!(count("Good CRC32") >= 20, "only {} good checksums", count("Good CRC32"));
    assert_eq!(count("Bad CRC32"), 0);
    assert_eq!(count("Malformed"), 0);

    let fields = [
        "-r",
        file,
        "--disable-protocol",
        "rpcordma",
        "-Y",
        "iwarp_rdma",
        "-T",
        "fields",
        "-e",
        "iwarp_rdma.opcode",
    ];
    let opcodes = run("tshark", &fields, COMMAND_TIME_MAX).ok().stdout;
    let seen = |opcode: u32| {
        opcodes
            .split(|c: char| !c.is_ascii_alphanumeric())
            .filter_map(|text| match text.strip_prefix("0x") {
                Some(hex) => u32::from_str_radix(hex, 16).ok(),
                None => text.parse().ok(),
            })
            .filter(|number| *number == opcode)
            .count()
    };
    // RDMA Write, Send and RFC 7306's Immediate Data carry a session (RFC 5040 section 4.3).
    for (opcode, name) in [(0, "RDMA Write"), (3, "Send"), (8, "Immediate Data")] {
        assert!(seen(opcode) > 0, "no {name} among the opcodes: {opcodes}");
    }
    assert_eq!(seen(7), 0, "nobody had a reason to send a Terminate");
}
