//! Tests of `rtrs-client ping` and `doctor` against real servers, closed ports, and other services;
//! and of rping's byte sequence against `rtrs-server --rping`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use rtrs_core::wire::fill_pattern;
use rtrs_tests::raw_mpa::{
    CRC, ENHANCED, REPLY_KEY, REQUEST_KEY, SEND, frame, start_frame, tagged, untagged,
};
use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Proc, STOP_TIME_MAX, Server, ServerBuilder, bin, free_port,
    run,
};

fn client(args: &[&str]) -> Finished {
    run(bin("rtrs-client"), args, COMMAND_TIME_MAX)
}

fn exporting() -> ServerBuilder {
    Server::builder().export("vol0=mem:16M").listen("tcp://127.0.0.1:0")
}

#[test]
fn a_busy_server_answers_pings() {
    // A client or server that stalls for a few seconds loses no path.
    let patient = ["--heartbeat", "1m"];
    let server = exporting().args(&patient).start();
    let session = Client::attach("vol0").path(server.portal()).args(&patient).start();
    for mode in ["ping", "read-lat", "write-lat", "read-bw", "write-bw"] {
        let args = ["ping", server.portal(), "-m", mode, "-c50", "-n2", "-o", "json"];
        let interval: &[&str] = if mode.ends_with("bw") { &["--duplex"] } else { &["-i0"] };
        let summary = client(&[&args[..], interval].concat()).ok().json();
        assert_eq!((&summary["sent"], &summary["answered"]), (&100.into(), &100.into()), "{mode}");
        assert_eq!(summary["errors"].as_array().map(Vec::len), Some(0), "{summary}");
        if mode.ends_with("bw") {
            assert!(summary["bandwidth"]["there"]["operations"].as_u64() > Some(0), "{summary}");
        } else {
            assert_eq!(summary["latency_us"]["round"]["count"], 100, "{summary}");
        }
    }
    let variants = ["ping", server.portal(), "-c20", "-i0", "--server-invalidate"];
    let _ = client(&[&variants[..], &["--read-invalidate", "-s", "1M"]].concat()).ok();
    let status = session.command(&["status", "vol0", "-o", "json"]).ok().json();
    assert_eq!(status["paths"][0]["state"], "connected", "{status}");
    assert_eq!(status["paths"][0]["reconnects"], 0, "{status}");
    session.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn rounds_are_printed_as_by_ping() {
    let server = exporting().start();
    let out = client(&["ping", server.portal(), "-c3", "-i10ms", "-v"]).ok().stdout;
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].starts_with("PING tcp://127.0.0.1:"), "{out}");
    for seq in 0..3 {
        let line = lines[1 + 2 * seq];
        assert!(line.starts_with("64 bytes from 127.0.0.1:"), "{out}");
        assert!(line.contains(&format!(": seq={seq} read=")) && line.contains(" write="), "{out}");
        assert!(lines[2 + 2 * seq].starts_with(&format!("ping data: rdma-ping-{seq}: ")), "{out}");
    }
    assert!(out.contains("\n3 rounds begun, 3 answered, 0% lost, "), "{out}");
    for row in ["\nread ", "\nwrite ", "\nround ", "\nconnect "] {
        assert!(out.contains(row), "no {row:?} in {out}");
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_endless_ping_prints_its_table_on_ctrl_c() {
    let server = exporting().start();
    let mut command = std::process::Command::new(bin("rtrs-client"));
    command.args(["ping", server.portal(), "-i", "20ms"]);
    let mut ping = Proc::start(command);
    ping.wait_lines("seq=", 5, COMMAND_TIME_MAX);
    ping.signal("INT");
    let out = ping.wait(STOP_TIME_MAX).ok().stdout;
    assert!(out.contains(" 0% lost"), "{out}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_lost_server_is_reported_with_exit_code_1() {
    let server = exporting().start();
    let mut command = std::process::Command::new(bin("rtrs-client"));
    command.args(["ping", server.portal(), "-i", "20ms", "-W", "1m"]);
    let mut ping = Proc::start(command);
    ping.wait_lines("seq=", 3, COMMAND_TIME_MAX);
    server.crash();
    let ended = ping.wait(STOP_TIME_MAX).code(1);
    assert!(ended.stderr.contains("the connection ended"), "{}", ended.stderr);
}

#[test]
fn a_stopped_server_is_reported_within_the_bound() {
    let mut server = exporting().start();
    let mut command = std::process::Command::new(bin("rtrs-client"));
    // A single lost round is shown as 0% once there are 200 rounds.
    command.args(["ping", server.portal(), "-i", "500ms", "-W", "5s"]);
    let mut ping = Proc::start(command);
    ping.wait_lines("seq=", 3, COMMAND_TIME_MAX);
    server.signal("STOP");
    let ended = ping.wait(STOP_TIME_MAX).code(1);
    server.signal("CONT");
    assert!(ended.stderr.contains("within 5s"), "{}", ended.stderr);
    assert!(ended.stdout.contains(" answered, ") && !ended.stdout.contains(" 0% lost"));
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn refusals_by_the_server_are_printed() {
    let server = exporting().args(&["--no-ping"]).start();
    let ended = client(&["ping", server.portal(), "-c1"]).code(1);
    assert!(ended.stderr.contains("answers no pings (--no-ping)"), "{}", ended.stderr);
    let doctor = client(&["doctor", server.portal()]).code(0);
    assert!(doctor.stdout.contains("warn  ping"), "{}", doctor.stdout);
    assert!(doctor.stdout.contains("ok    handshake"), "{}", doctor.stdout);
    let _ = server.stop(STOP_TIME_MAX);
    // rping's mode against a server without --rping: refused as a session, with a hint.
    let server = exporting().start();
    let ended = client(&["ping", server.portal(), "--rping", "-c1"]).code(1);
    assert!(ended.stderr.contains("start it with --rping"), "{}", ended.stderr);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn ping_only_needs_no_export_and_opens_no_session() {
    let listen = "tcp://127.0.0.1:0";
    let server = Server::builder().listen(listen).args(&["--ping-only", "--rping"]).start();
    for args in [&["-s", "64"][..], &["-s", "65535", "--rping"], &["--rping", "--crc", "off"]] {
        let args = [&["ping", server.portal(), "-c20", "-i0", "-q"], args].concat();
        let _ = client(&args).ok();
    }
    let doctor = client(&["doctor", server.portal(), "-o", "json"]).code(1).json();
    let step = |name: &str| -> String {
        let steps = doctor["steps"].as_array().expect("steps");
        let step = steps.iter().find(|step| step["step"] == name).expect("the step");
        step["verdict"].as_str().expect("a verdict").to_owned()
    };
    assert_eq!((step("ping"), step("bandwidth")), ("ok".into(), "ok".into()), "{doctor}");
    assert_eq!((step("handshake"), step("device")), ("fail".into(), "skip".into()), "{doctor}");
    assert_eq!((&doctor["usable"], &doctor["failures"]), (&false.into(), &1.into()));
    let _ = server.stop(STOP_TIME_MAX);
    let bad = Server::builder().listen(listen).args(&["--ping-only", "--no-ping"]).run();
    assert_eq!(bad.code, Some(2), "{}", bad.stderr);
}

#[test]
fn doctor_passes_a_good_server_and_opens_nothing() {
    let server = exporting().start();
    let doctor = client(&["doctor", server.portal()]).ok().stdout;
    for line in ["ok    route", "ok    port", "ok    ping", "ok    bandwidth", "ok    handshake"] {
        assert!(doctor.contains(line), "no {line:?} in {doctor}");
    }
    assert!(doctor.contains("512 requests at once"), "{doctor}");
    // The ping's path is closed: the same server accepts a session from the same addresses.
    let session = Client::attach("vol0").path(server.portal()).start();
    session.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn doctor_names_the_failing_step() {
    let port = free_port();
    for (target, step, words) in [
        (format!("tcp://127.0.0.1:{port}"), "FAIL  port", "start rtrs-server there"),
        ("tcp://no-such-host.invalid".into(), "FAIL  name", "correct the name"),
        ("tcp://203.0.113.9@127.0.0.1:1".into(), "FAIL  route", "use a source that this host has"),
    ] {
        let ended = client(&["doctor", &target, "-W", "30s"]).code(1);
        assert!(ended.stdout.contains(step), "{target}: {}", ended.stdout);
        assert!(ended.stdout.contains(words), "{target}: {}", ended.stdout);
        assert!(ended.stdout.contains("skip  handshake  not tried"), "{}", ended.stdout);
    }
    let _ = client(&["doctor", "tcp://h:0"]).code(2);
}

#[test]
fn a_peer_that_is_not_an_rtrs_server_is_reported_within_the_bound() {
    // One never answers, one speaks a different protocol, one closes immediately.
    for (answer, words, limit) in [
        (None, "timed out", "500ms"),
        (Some(&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..]), "MPA start-up frame", "1m"),
        (Some(&b""[..]), "cannot connect", "1m"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let target = format!("tcp://{}", listener.local_addr().expect("its address"));
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            match answer {
                Some(bytes) => stream.write_all(bytes).expect("the answer"),
                None => {
                    let mut all = Vec::new();
                    let _ = stream.read_to_end(&mut all);
                }
            }
        });
        let ended = client(&["ping", &target, "-c1", "-W", limit]).code(1);
        assert!(ended.stderr.contains(words), "{words:?} is not in {}", ended.stderr);
        peer.join().expect("the peer");
    }
}

/// rping's side of a connection, byte by byte.
struct Rping {
    stream: TcpStream,
    msn: u32,
}

impl Rping {
    /// Connects like siw: revision 2, one read each way, checksums not requested.
    fn connect(server: &Server) -> Self {
        let stream = TcpStream::connect(server.address()).expect("a connection");
        stream.set_read_timeout(Some(COMMAND_TIME_MAX)).expect("a timeout");
        let mut this = Self { stream, msn: 0 };
        let request = start_frame(REQUEST_KEY, ENHANCED, 2, &[0, 1, 0, 1]);
        this.stream.write_all(&request).expect("the request");
        // The reply, without a byte after it: siw fails if a frame follows in the same segment.
        let mut reply = [0; 25];
        let len = this.stream.read(&mut reply).expect("a reply");
        assert_eq!(len, 24, "{:02x?}", &reply[..len]);
        assert_eq!(reply[..16], REPLY_KEY[..]);
        assert_eq!(reply[16..20], [CRC | ENHANCED, 2, 0, 4]);
        let [ird, ord] = [[reply[20], reply[21]], [reply[22], reply[23]]].map(u16::from_be_bytes);
        assert!(ird >= 1 && ord == 1, "depths {ird} and {ord}");
        this
    }

    fn send(&mut self, message: &[u8]) {
        self.msn += 1;
        let bytes = frame(&untagged(SEND, [0, self.msn, 0], message));
        self.stream.write_all(&bytes).expect("a send");
    }

    fn info(&mut self, addr: u64, key: u32, size: u32) {
        let mut message = addr.to_be_bytes().to_vec();
        message.extend(key.to_be_bytes());
        message.extend(size.to_be_bytes());
        self.send(&message);
    }

    /// Receives the ULPDU of the next frame.
    fn receive(&mut self) -> Vec<u8> {
        let mut len = [0; 2];
        self.stream.read_exact(&mut len).expect("a frame");
        let len = usize::from(u16::from_be_bytes(len));
        let mut rest = vec![0; (2 + len).next_multiple_of(4) - 2 + 4];
        self.stream.read_exact(&mut rest).expect("the rest of the message");
        rest.truncate(len);
        rest
    }

    /// Reads until the server closes the connection; returns false if it does not.
    fn is_closed(&mut self) -> bool {
        let mut all = Vec::new();
        match self.stream.read_to_end(&mut all) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn rping_messages_are_answered_as_by_rping() {
    let listen = "tcp://127.0.0.1:0";
    let server = Server::builder().listen(listen).args(&["--ping-only", "--rping"]).start();
    let mut rping = Rping::connect(&server);
    for round in 0..3u32 {
        let mut data = [0; 64];
        fill_pattern(round.into(), &mut data);
        rping.info(0x5607_db66_1470, 0xd58e_bd00 + round, 64);
        // Read Request: queue 1, 28 bytes; sink key and address are the server's.
        let request = rping.receive();
        assert_eq!(request[..2], [0x41, 0x41]);
        assert_eq!(request[6..14], [[0, 0, 0, 1], (round + 1).to_be_bytes()].concat());
        let read = &request[18..];
        assert_eq!(read.len(), 28);
        assert_eq!(read[12..16], 64u32.to_be_bytes());
        assert_eq!(read[16..20], (0xd58e_bd00 + round).to_be_bytes());
        assert_eq!(read[20..28], 0x5607_db66_1470_u64.to_be_bytes());
        let sink = u32::from_be_bytes(read[..4].try_into().expect("four"));
        let at = u64::from_be_bytes(read[4..12].try_into().expect("eight"));
        let response = frame(&tagged([0xc1, 0x42], sink, at, &data));
        rping.stream.write_all(&response).expect("the response");
        let go = rping.receive();
        assert_eq!(go[..2], [0x41, 0x43]);
        assert_eq!(go[18..], [0; 16]);
        rping.info(0x1000, 7, 64);
        let written = rping.receive();
        assert_eq!(written[..2], [0xc1, 0x40]);
        assert_eq!(written[2..6], 7u32.to_be_bytes());
        assert_eq!(written[6..14], 0x1000_u64.to_be_bytes());
        assert_eq!(written[14..], data);
        let go = rping.receive();
        assert_eq!((&go[..2], go.len()), (&[0x41, 0x43][..], 34));
    }
    drop(rping);
    // A string that ends early is written back only up to its NUL, as rping does.
    let mut rping = Rping::connect(&server);
    rping.info(0x2000, 9, 100);
    let request = rping.receive();
    let sink = u32::from_be_bytes(request[18..22].try_into().expect("four"));
    let at = u64::from_be_bytes(request[22..30].try_into().expect("eight"));
    let mut data = [b'x'; 100];
    data[41] = 0;
    rping.stream.write_all(&frame(&tagged([0xc1, 0x42], sink, at, &data))).expect("a response");
    let _ = rping.receive();
    rping.info(0x3000, 10, 100);
    assert_eq!(rping.receive()[14..], data[..42]);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn invalid_rping_messages_end_only_their_connection() {
    let listen = "tcp://127.0.0.1:0";
    let mut server = Server::builder().listen(listen).args(&["--ping-only", "--rping"]).start();
    type Lie = fn(&mut Rping);
    let lies: [Lie; 6] = [
        |rping| rping.info(1, 1, 0),
        |rping| rping.info(1, 1, u32::MAX),
        |rping| rping.send(&[0; 15]),
        |rping| rping.send(&[0; 20]),
        |rping| rping.send(&[0; 5000]),
        // A second message before the go-ahead for the first.
        |rping| {
            rping.info(1, 1, 64);
            rping.info(1, 1, 64);
        },
    ];
    for (at, lie) in lies.into_iter().enumerate() {
        let mut rping = Rping::connect(&server);
        lie(&mut rping);
        assert!(rping.is_closed(), "lie {at} did not end its connection");
        server.check_alive();
        let _ = client(&["ping", server.portal(), "--rping", "-c3", "-i0"]).ok();
    }
    let _ = server.stop(STOP_TIME_MAX);
}
