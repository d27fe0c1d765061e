//! Tests of connection setup on the wire: invalid MPA start-up frames, silence at each step, and
//! more connections than the server has room for.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use rtrs_core::wire::{AccessMode, Rw};
use rtrs_tests::raw_mpa::{
    CRC, ENHANCED, MARKERS, REFUSED, REPLY_KEY, REQUEST_KEY, start_data, start_frame,
};
use rtrs_tests::{
    Client, Peer, PeerOptions, RawMpa, STOP_TIME_MAX, Server, requires, resident_memory, wait_for,
};
use serde_json::Value;
use socket2::{Domain, Protocol, Socket, Type};

use super::*;

#[test]
fn invalid_start_up_frames() {
    let mut scene = Scene::new();
    let request = scene.options().request(0).encode();
    let data = start_data(&request);
    let flags = ENHANCED | CRC;
    let mut key = *REQUEST_KEY;
    key[15] ^= 0x20;
    let mut long = start_frame(REQUEST_KEY, flags, 2, &[7; 513]);
    let mut longest = start_frame(REQUEST_KEY, flags, 2, &[7; 512]);
    longest[18..20].copy_from_slice(&[0xff, 0xff]);
    long.extend([0; 64]);
    let garbage: Vec<u8> = (0..200u8).map(|at| at.wrapping_mul(151) ^ 0x5a).collect();
    for (what, bytes) in [
        ("garbage", garbage),
        ("zeroes", vec![0; 4096]),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("a wrong key", start_frame(&key, flags, 2, &data)),
        ("a reply", start_frame(REPLY_KEY, flags, 2, &data)),
        ("revision 0", start_frame(REQUEST_KEY, flags, 0, &data)),
        ("revision 3", start_frame(REQUEST_KEY, flags, 3, &data)),
        ("revision 255", start_frame(REQUEST_KEY, flags, 255, &data)),
        ("enhanced in revision 1", start_frame(REQUEST_KEY, flags, 1, &data)),
        ("enhanced without its words", start_frame(REQUEST_KEY, flags, 2, &[0; 3])),
        ("513 bytes of private data", long),
        ("65535 bytes of private data", longest),
    ] {
        let mut raw = RawMpa::connect(scene.server);
        raw.write(&bytes);
        let ended = raw.ended(what, AT_ONCE);
        assert!(ended.bytes.is_empty(), "{what} was answered: {:02x?}", ended.bytes);
    }
    // Frames cut off at every seventh byte, around the end of the header, and one byte early.
    let whole = start_frame(REQUEST_KEY, flags, 2, &data);
    for len in (0..whole.len()).step_by(7).chain([19, 20, 21, whole.len() - 1]) {
        let mut raw = RawMpa::connect(scene.server);
        raw.write(&whole[..len]);
        raw.finish();
        let ended = raw.ended("a truncated start", AT_ONCE);
        assert!(ended.bytes.is_empty(), "{len} bytes were answered: {:02x?}", ended.bytes);
    }
    // A peer that demands markers is refused.
    let mut raw = RawMpa::connect(scene.server);
    raw.write(&start_frame(REQUEST_KEY, flags | MARKERS, 2, &data));
    let ended = raw.ended("markers", AT_ONCE);
    assert!(ended.bytes.starts_with(REPLY_KEY), "no answer: {:02x?}", ended.bytes);
    assert_eq!(ended.bytes[16] & REFUSED, REFUSED, "{:02x?}", ended.bytes);
    scene.end();
}

#[test]
fn silence_at_each_step() {
    let mut scene = Scene::with_handshakes(SHORT, &[]);
    let request = scene.options().request(0).encode();
    let whole = start_frame(REQUEST_KEY, ENHANCED | CRC, 2, &start_data(&request));
    let mut silent: Vec<RawMpa> = [0, 1, 19, 20, 21, whole.len() - 1]
        .map(|len| {
            let mut raw = RawMpa::connect(scene.server);
            raw.write(&whole[..len]);
            raw
        })
        .into();
    // A complete request, but without the first frame, which the server waits for next.
    let mut raw = RawMpa::connect(scene.server);
    raw.write(&whole);
    assert_eq!(&raw.read_exact(20)[..16], REPLY_KEY);
    silent.push(raw);
    // All connections, but no INFO_REQ; then only one of two connections.
    let mut mute = Peer::connected(scene.server, scene.options());
    let mut half = Peer::new(scene.server, scene.options());
    half.connect(0).expect("connection 0");
    let took = trickle(scene.server, &whole);
    assert!(took > SHORT / 2, "it was closed before the timeout: {took:?}");
    for mut raw in silent {
        let _ = raw.ended("silence", SHORT + PATIENCE);
    }
    let _ = mute.ended("no INFO_REQ", SHORT + PATIENCE);
    let _ = half.ended("a missing connection", SHORT + PATIENCE);
    drop((mute, half));
    scene.end();
}

/// Sends one byte at a time, which does not extend the timeout, until the server closes the
/// connection. Returns how long that took.
fn trickle(server: SocketAddr, whole: &[u8]) -> Duration {
    let start = Instant::now();
    let mut slow = connect_from(1, server).expect("a connection");
    // Sending everything takes longer than the timeout, even if the server accepts late.
    let pause = (SHORT + PATIENCE) / whole.len() as u32;
    slow.set_read_timeout(Some(pause)).expect("a timeout");
    for byte in whole {
        // An error means that the server has closed the connection, which the read shows.
        let _ = slow.write_all(&[*byte]);
        match slow.read(&mut [0; 64]) {
            Ok(0) => return start.elapsed(),
            Ok(count) => panic!("a trickle was answered with {count} bytes"),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return start.elapsed(),
            Err(_) => {}
        }
    }
    panic!("a trickle extends the timeout");
}

/// Raises this process's own descriptor limit as far as allowed, and returns the new limit.
fn raise_descriptors(wanted: u64) -> u64 {
    let limits = || {
        let text = std::fs::read_to_string("/proc/self/limits").expect("own limits");
        let line = text.lines().find(|line| line.starts_with("Max open files")).expect("a line");
        let mut words =
            line.split_whitespace().skip(3).map(|word| word.parse::<u64>().unwrap_or(1 << 20));
        (words.next().unwrap_or(0), words.next().unwrap_or(0))
    };
    let (soft, hard) = limits();
    if soft < wanted && requires(&["prlimit"]) {
        let bound = format!("--nofile={}:{hard}", wanted.min(hard));
        let pid = std::process::id().to_string();
        let _ = Command::new("prlimit").args(["--pid", &pid, &bound]).status();
    }
    limits().0
}

/// Connects from 127.0.0.`host`.
fn connect_from(host: u8, server: SocketAddr) -> Option<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).ok()?;
    let source = IpAddr::V4(Ipv4Addr::new(127, 0, 0, host));
    socket.bind(&SocketAddr::new(source, 0).into()).ok()?;
    socket.connect_timeout(&server.into(), PATIENCE).ok()?;
    Some(socket.into())
}

/// A session with an open export reconnects even while unproven sessions hold the maximum number of
/// connections, at both steps of a handshake.
#[test]
fn a_session_reconnects_amid_a_thousand_handshakes() {
    const COUNT: usize = 1024;
    assert!(raise_descriptors(2600) >= 2600, "too few descriptors are left for this test");
    let minutes = Duration::from_secs(300);
    let mut scene = Scene::with_handshakes(minutes, &["--sessions-max", "1100"]);
    let server = &scene.stand.server;
    let mut strangers: Vec<TcpStream> = (0..COUNT)
        .map(|_| connect_from(3, scene.server).expect("a connection that is silent"))
        .collect();
    for n in 0..COUNT {
        let mut request = PeerOptions::new(0, 0).request(0);
        request.session_id.0[..8].copy_from_slice(&(n as u64 + 1).to_le_bytes());
        request.path_uuid.0 = request.session_id.0;
        let data = start_data(&request.encode());
        let mut stream = connect_from(4, scene.server).expect("a connection that asks");
        stream.write_all(&start_frame(REQUEST_KEY, ENHANCED | CRC, 2, &data)).expect("to write");
        strangers.push(stream);
    }
    let handshakes = || {
        let connecting = |session: &Value| session["state"] == "connecting";
        server.sessions().iter().filter(|session| connecting(session)).count()
    };
    wait_for("all handshakes", PATIENCE, || (handshakes() == COUNT).then_some(()));
    let path = || {
        let sessions = server.sessions();
        let ours = sessions.iter().find(|session| session["opens"][0]["export"] == "vol0")?;
        let up = |path: &&Value| path["state"] == "connected";
        let path = ours["paths"].as_array()?.iter().find(up)?;
        Some((ours["name"].as_str()?.to_owned(), path["path"].as_u64()?))
    };
    let (name, before) = path().expect("the session of the innocent client");
    let _ = server.command(&["session", "disconnect", &name]).ok();
    wait_for("the session to reconnect", PATIENCE, || {
        path().filter(|(_, now)| *now != before).map(drop)
    });
    assert_eq!(handshakes(), COUNT, "all handshakes are still open");
    drop(strangers);
    scene.innocent.check();
    scene.stand.server.check_alive();
    scene.stand.finish();
}

#[test]
fn ten_thousand_half_open_connections() {
    const WANTED: u64 = 10_000;
    let count = raise_descriptors(WANTED + 200).saturating_sub(200).min(WANTED) as usize;
    assert!(count >= 700, "only {count} descriptors are left for this test");
    if count < WANTED as usize {
        eprintln!("only {count} connections: the hard limit of descriptors allows no more");
    }
    let mut scene = Scene::with_handshakes(SHORT, &[]);
    let pid = scene.stand.server.pid();
    let connect = |at: usize| connect_from(2 + (at % 40) as u8, scene.server);
    let start = Instant::now();
    let (mut held, mut most_open) = (Vec::with_capacity(count), 0);
    for at in 0..count {
        held.push(connect(at).unwrap_or_else(|| panic!("connection {at} of {count} failed")));
        if at % 500 == 0 {
            most_open = most_open.max(descriptors(pid));
        }
    }
    eprintln!("{count} connections in {:?}, the server had {most_open}", start.elapsed());
    // The limit on half-open connections is 1024: one more closes the oldest from its source.
    assert!(most_open < scene.descriptors + 1024 + 200, "{most_open} descriptors");
    let grown = resident_memory(pid).saturating_sub(scene.memory);
    assert!(grown < 32 * MIB, "{count} half-open connections took {grown} bytes");
    // The half-open connections are still there, and others are admitted.
    let mut peer = scene.writer();
    peer.send_write((1, 2), io(Rw::WRITE, 0, 512), &[1; 512]);
    assert_eq!(peer.answer().errno, 0);
    peer.check_alive("among the half-open connections");
    drop(peer);
    let second = Client::attach("vol1").path(scene.stand.server.portal()).start();
    second.detach();
    // The server closes them although our ends stay open.
    wait_for("half-open connections to be closed", SHORT + PATIENCE, || {
        (descriptors(pid) <= scene.descriptors).then_some(())
    });
    drop(held);
    scene.end();
}

#[test]
fn connections_beyond_the_handshake_limit() {
    let mut scene = Scene::with(&["--half-open-max", "4"]);
    // Accepted connections whose path never receives its INFO_REQ.
    let mut waiting = PeerOptions { cid_num: 4, ..scene.options() };
    waiting.local = 2;
    let mut waiting = Peer::connected(scene.server, waiting);
    // A path cannot exceed the limit; a new session evicts the waiting one.
    let options = PeerOptions { cid_num: 5, ..scene.options() };
    let mut large = Peer::new(scene.server, options);
    large.connect(0).expect("the slot of the waiting path");
    let _ = waiting.ended("a handshake whose slot another path needs", at_once());
    (1..4).for_each(|cid| large.connect(cid).expect("a place"));
    assert_eq!(large.connect(4), Err(-errno::EDQUOT.cast_signed()));
    drop((waiting, large));
    scene.peer().check_alive("after the handshakes were closed");
    scene.end();
}

#[test]
fn paths_come_and_go() {
    let mut scene = Scene::new();
    for round in 0..60 {
        let mut peer = if round % 3 == 0 {
            Peer::connected(scene.server, scene.options())
        } else {
            scene.peer()
        };
        if round % 3 == 2 {
            // The client disconnects while requests are in flight.
            peer.open("slow", AccessMode::ReadOnly).expect("open slow");
            for permit in 0..DEPTH {
                peer.send_read((1, permit), io(Rw::READ, 0, 512));
            }
        }
    }
    scene.writer().check_alive("many short paths");
    scene.end();
}

#[test]
fn a_server_without_free_descriptors() {
    if !requires(&["prlimit"]) {
        return;
    }
    let scene = Scene::new();
    let pid = scene.stand.server.pid();
    let bound = scene.descriptors + 8;
    let limit = |bound: usize| {
        let mut command = Command::new("prlimit");
        command.args(["--pid", &pid.to_string(), &format!("--nofile={bound}:")]);
        assert!(command.status().expect("prlimit").success(), "cannot set a limit");
    };
    limit(bound);
    let held: Vec<RawMpa> = (0..64).map(|_| RawMpa::connect(scene.server)).collect();
    std::thread::sleep(Duration::from_millis(300));
    let now = descriptors(pid);
    // The pending accept began under the old limit.
    assert!(now <= bound + 1, "{now} descriptors with a bound of {bound}");
    // The half-open connections stay open; a client is still admitted.
    let mut peer = Peer::new(scene.server, PeerOptions::new(250, 250));
    peer.connect(0).expect("connection 0");
    peer.connect(1).expect("connection 1");
    peer.introduce("patient");
    peer.check_alive("a server short of descriptors");
    drop((peer, held));
    scene.end();
}

#[test]
fn a_server_stops_despite_hostile_peers() {
    let server = Server::builder()
        .export("slow=mem:1M,delay=300ms")
        .args(&["--queue-depth", "24", "--chunk-size", "64k"])
        .start();
    let address: SocketAddr = server.address().parse().expect("an address");
    let _silent: Vec<RawMpa> = (0..20).map(|_| RawMpa::connect(address)).collect();
    let _half = Peer::connected(address, PeerOptions::new(1, 1));
    let mut busy = Peer::up(address, PeerOptions::new(2, 2), "busy");
    busy.open("slow", AccessMode::ReadWrite).expect("open slow");
    for permit in 0..DEPTH {
        busy.send_write((1, permit), io(Rw::WRITE, 0, 512), &[1; 512]);
    }
    busy.idle(Duration::from_millis(50));
    let done = server.stop(STOP_TIME_MAX);
    assert!(!done.stderr.contains("panicked at"), "{}", done.stderr);
}
