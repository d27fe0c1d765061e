//! Tests of the wire format as seen by an independent program: tshark decodes a session and a ping
//! captured on loopback, which must be iWARP with correct checksums.

use std::io::{Read, Seek, SeekFrom, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Proc, Scratch, Server, bin, is_root, nbd_client, requires, run,
    wait_for,
};

/// Maximum number of captured packets: a bound, not a requirement.
const PACKETS_MAX: &str = "20000";
/// One shard, and heartbeats that are not missed if an end stalls for a few seconds.
pub(crate) const PATIENT: [&str; 4] = ["--shards", "1", "--heartbeat", "5s"];
/// Data of the last captured packets.
const LAST: &[u8] = b"the capture ends here";

/// Output of tshark for a capture.
struct Decoded {
    text: String,
    opcodes: Vec<u32>,
}

impl Decoded {
    fn count(&self, what: &str) -> usize {
        self.text.matches(what).count()
    }

    fn seen(&self, opcode: u32) -> usize {
        self.opcodes.iter().filter(|other| **other == opcode).count()
    }

    /// Checks that there are a startup and frames, each decoded and with a correct checksum.
    fn is_sound(&self, frames_min: usize) {
        let start = self.count("MPA ID Req Frame") + self.count("Request frame header");
        assert!(start > 0, "no MPA request");
        assert!(self.count("Good CRC32") >= frames_min, "{} good sums", self.count("Good CRC32"));
        assert_eq!(self.count("Bad CRC32"), 0);
        assert_eq!(self.count("Malformed"), 0);
        assert_eq!(self.seen(7), 0, "no end had a reason to send a Terminate");
    }
}

/// Whether this host can capture; prints the reason if not.
pub(crate) fn can_capture() -> bool {
    if !requires(&["tshark", "dumpcap"]) {
        return false;
    }
    // Capturing on loopback needs CAP_NET_RAW.
    is_root() || requires(&["(capturing: run as root)"])
}

/// Captures the traffic on a server's port to a file while `meanwhile` runs.
pub(crate) fn capture_to(file: &str, server: &Server, meanwhile: impl FnOnce()) {
    let (_, port) = server.portal().rsplit_once(':').expect("a portal with a port");
    let filter = format!("tcp port {port}");
    let mut dumpcap = Command::new("dumpcap");
    dumpcap.args(["-q", "-i", "lo", "-f", &filter, "-B", "64", "-c", PACKETS_MAX]);
    dumpcap.args(["-P", "-w", file]);
    let mut capture = Proc::start(dumpcap);
    // dumpcap creates the file just before it starts capturing.
    wait_for("dumpcap to start", COMMAND_TIME_MAX, || {
        std::fs::metadata(file).ok().filter(|meta| meta.len() > 0)
    });
    std::thread::sleep(Duration::from_secs(1));
    meanwhile();
    // When stopped, dumpcap drops packets that it has not read yet. It reads them in order.
    let mut last = TcpStream::connect(server.address()).expect("a connection");
    last.write_all(LAST).expect("to write");
    wait_for("dumpcap to write the last packets", COMMAND_TIME_MAX, || {
        let bytes = std::fs::read(file).expect("the capture");
        bytes.windows(LAST.len()).any(|window| window == LAST).then_some(())
    });
    capture.signal("INT");
    let ended = capture.wait(COMMAND_TIME_MAX);
    assert_eq!(ended.code, Some(0), "dumpcap: {}", ended.stderr);
}

/// Captures the traffic on a server's port while `meanwhile` runs, and decodes it.
fn capture(server: &Server, meanwhile: impl FnOnce()) -> Decoded {
    let scratch = Scratch::new();
    let file = scratch.path("session.pcap");
    let file = file.to_str().expect("a plain path");
    capture_to(file, server, meanwhile);
    let shark = |rest: &[&str]| {
        let args = [&["-r", file, "--disable-protocol", "rpcordma"][..], rest].concat();
        run("tshark", &args, COMMAND_TIME_MAX).ok().stdout
    };
    let fields = shark(&["-Y", "iwarp_rdma", "-T", "fields", "-e", "iwarp_rdma.opcode"]);
    let numbers = fields.split(|c: char| !c.is_ascii_alphanumeric()).filter_map(|text| match text
        .strip_prefix("0x")
    {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    });
    Decoded { text: shark(&["-V", "-Y", "iwarp_mpa"]), opcodes: numbers.collect() }
}

#[test]
fn tshark_decodes_a_session_as_iwarp() {
    if !can_capture() {
        return;
    }
    let server = Server::builder().export("vol0=mem:64M").start();
    let decoded = capture(&server, || {
        let client = Client::attach("vol0").path(server.portal()).args(&PATIENT).start();
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
        drop(nbd);
        client.detach();
    });
    decoded.is_sound(20);
    // RDMA Write, Send and RFC 7306's Immediate Data carry a session (RFC 5040 section 4.3).
    for (opcode, name) in [(0, "RDMA Write"), (3, "Send"), (8, "Immediate Data")] {
        assert!(decoded.seen(opcode) > 0, "no {name} among {:?}", decoded.opcodes);
    }
}

#[test]
fn tshark_decodes_rping_rounds_and_nothing_else() {
    if !can_capture() {
        return;
    }
    let listen = "tcp://127.0.0.1:0";
    let server = Server::builder().listen(listen).args(&["--ping-only", "--rping"]).start();
    let decoded = capture(&server, || {
        let args = ["ping", server.portal(), "--rping", "-c10", "-i0", "-s1000"];
        let _ = run(bin("rtrs-client"), &args, COMMAND_TIME_MAX).ok();
    });
    decoded.is_sound(60);
    // A round: two sends each way, a read with its response, a write; none of our protocol.
    let kinds = [(0, 10), (1, 10), (2, 10), (3, 40)];
    for (opcode, frames) in kinds {
        assert_eq!(decoded.seen(opcode), frames, "opcode {opcode} in {:?}", decoded.opcodes);
    }
    assert_eq!(decoded.opcodes.len(), 70, "{:?}", decoded.opcodes);
    assert_eq!(decoded.count("RTIW"), 0, "rping has no preamble");
}
