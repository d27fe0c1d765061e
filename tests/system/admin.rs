//! Tests of operator commands on a running server, as real processes on loopback: listing and
//! ending sessions, taking an export over from a dead client, and draining for an upgrade, both
//! under load and with a backend that never answers.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Front, Innocent, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, bin,
    consts, fill_pattern, free_port, requires, run, sparse_file, wait_for,
};
use serde_json::{Value, json};

const EIO: u32 = 5;

/// Attaches `vol0` over these paths as the session `sess`.
fn attach(portals: &[String], args: &[&str]) -> Client {
    let builder = Client::attach("vol0").args(&["--session-name", "sess"]).args(args);
    portals.iter().fold(builder, |builder, portal| builder.path(portal)).start()
}

/// Returns the paths of a session that are up.
fn up(session: &Value) -> Vec<&Value> {
    let paths = session["paths"].as_array().expect("paths");
    paths.iter().filter(|path| path["state"] == "connected").collect()
}

/// Waits until the only session has this many paths up.
fn wait_up(server: &Server, count: usize) -> Value {
    wait_for("the session's paths", COMMAND_TIME_MAX, || {
        let sessions = server.sessions();
        let whole = sessions.len() == 1 && up(&sessions[0]).len() == count;
        whole.then(|| sessions[0].clone())
    })
}

#[test]
fn sessions_are_listed_with_paths_exports_and_counters() {
    let server = Server::builder()
        .export("vol0=mem:16M")
        .listen("tcp://127.0.0.1:0")
        .listen("tcp://127.0.0.2:0")
        .start();
    assert_eq!(server.sessions(), [] as [Value; 0]);
    let client = attach(server.portals(), &[]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[7; 8192]), Reply::Error(0));
    assert_eq!(raw.read(0, &mut [0; 4096]), Ok(()));
    let session = wait_up(&server, 2);
    assert_eq!((&session["name"], &session["state"]), (&"sess".into(), &"up".into()), "{session}");
    assert_eq!(session["opens"][0]["export"], "vol0", "{session}");
    assert_eq!(session["opens"][0]["access"], "rw", "{session}");
    assert_eq!(session["id"], client.status()["session_id"], "{session}");
    assert!(session["age_ms"].is_u64(), "{session}");
    let io = &session["io"];
    assert_eq!((&io["write_bytes"], &io["read_bytes"]), (&8192.into(), &4096.into()), "{io}");
    assert_eq!(io["inflight"], 0, "{io}");
    for path in up(&session) {
        assert_eq!(path["transport"], "tcp", "{path}");
        assert!(path["connections"].as_u64() > Some(1), "{path}");
        let local = format!("tcp://{}", path["local"].as_str().expect("an address"));
        assert!(server.portals().contains(&local), "{path}");
        assert!(path["peer"].as_str().is_some_and(|peer| peer.starts_with("127.0.0.")), "{path}");
    }
    let shown = server.command(&["session", "list"]).ok().stdout;
    for word in ["sess ", "vol0 (rw)", "2/2", "connected", "127.0.0.2:"] {
        assert!(shown.contains(word), "no {word:?} in {shown}");
    }
    drop(raw);
    client.detach();
    wait_for("the end of the session", COMMAND_TIME_MAX, || {
        server.sessions().is_empty().then_some(())
    });
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn the_status_counts_exports_sessions_and_paths() {
    let missing = Scratch::new();
    let server = Server::builder()
        .export("vol0=mem:16M")
        .export("vol1=mem:16M")
        .export(format!("vol2={}", missing.text("none.img")))
        .listen("tcp://127.0.0.1:0")
        .listen("tcp://127.0.0.2:0")
        .args(&["--metrics", "127.0.0.1:0"])
        .start();
    let status = || server.command(&["status", "-o", "json"]).ok().json();
    let idle = status();
    assert_eq!(idle["exports"], json!({ "failed": 1, "unused": 2 }), "{idle}");
    assert_eq!((&idle["sessions"], &idle["paths"]), (&json!({}), &json!({})), "{idle}");
    assert_eq!((&idle["pid"], &idle["draining"]), (&server.pid().into(), &false.into()), "{idle}");
    assert_eq!(idle["version"], env!("CARGO_PKG_VERSION"), "{idle}");
    assert!(idle["metrics"].as_str().is_some_and(|at| at.starts_with("http://127.")), "{idle}");
    let listeners = server.portals().iter().map(|portal| {
        json!({ "portal": portal, "transport": "tcp", "tls": false, "serving": true,
            "activated": false })
    });
    assert_eq!(idle["listeners"], listeners.collect::<Value>(), "{idle}");

    let client = attach(server.portals(), &[]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[7; 8192]), Reply::Error(0));
    let _ = wait_up(&server, 2);
    let busy = status();
    assert_eq!(busy["exports"], json!({ "failed": 1, "open": 1, "unused": 1 }), "{busy}");
    assert_eq!(busy["sessions"], json!({ "up": 1 }), "{busy}");
    assert_eq!(busy["paths"], json!({ "connected": 2 }), "{busy}");
    assert!(busy["memory"]["used_bytes"].as_u64() > Some(0), "{busy}");
    assert!(busy["uptime_ms"].as_u64() >= idle["uptime_ms"].as_u64(), "{busy}");
    let shown = server.command(&["status"]).ok().stdout;
    for line in [
        "state      serving\n",
        "exports    3: 1 failed, 1 open, 1 unused\n",
        "paths      2: 2 connected\n",
        &format!("listening  {} (TCP without TLS)\n", server.portal()),
    ] {
        assert!(shown.contains(line), "no {line:?} in {shown}");
    }
    drop(raw);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

/// A loss that no client's flush reports must not keep a server from ever ending.
#[test]
fn a_drain_is_refused_after_a_loss_unless_forced() {
    let scratch = Scratch::new();
    let disk = scratch.path("vol0.img");
    sparse_file(&disk, 16 << 20);
    let (export, state) = (format!("vol0={}", scratch.text("vol0.img")), scratch.text("state"));
    let start = || Server::builder().export(&export).args(&["--state-dir", &state]).start();
    let server = start();
    let epoch = |server: &Server| {
        let list = server.command(&["export", "list", "-o", "json"]).ok().json();
        list["exports"][0]["epoch"].clone()
    };
    let before = epoch(&server);
    let client = attach(server.portals(), &["--no-path", "fail"]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 12 << 20, &[7; 4096]), Reply::Error(0));
    let file = std::fs::File::options().write(true).open(&disk).expect("the disk");
    file.set_len(8 << 20).expect("a shorter file");
    for _ in 0..2 {
        let refused = server.command(&["drain"]).code(1).says("not draining, still serving: ");
        let _ = refused.says("the target shrank").says("flush at a client").says("use --force");
    }
    let ended = server.command(&["drain", "--force", "--within", "10s"]).code(1);
    let _ = ended.says("the server has ended, but export \"vol0\" cannot be flushed");
    let _ = server.wait(STOP_TIME_MAX).code(1);
    drop((raw, client));
    let server = start();
    assert_ne!(epoch(&server), before, "the next server reports the loss");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn disconnected_paths_reconnect_without_errors() {
    let server = Server::builder()
        .export("vol0=mem:16M")
        .listen("tcp://127.0.0.1:0")
        .listen("tcp://127.0.0.2:0")
        .start();
    let client = attach(server.portals(), &[]);
    let innocent = Innocent::start(client.front(), "vol0");
    let mut last = 0;
    for round in 0..6 {
        let session = wait_up(&server, 2);
        let numbers: Vec<_> = up(&session).iter().map(|path| path["path"].as_u64()).collect();
        assert!(numbers.iter().all(|number| *number > Some(last)) || round % 3 != 0, "{session}");
        // Disconnects all paths in some rounds, one path in the others.
        let done = if round % 3 == 0 {
            last = numbers.iter().flatten().copied().max().expect("paths");
            server.command(&["session", "disconnect", "sess"])
        } else {
            let one = numbers[0].expect("a number").to_string();
            server.command(&["session", "disconnect", "sess", "--path", &one])
        };
        let _ = done.ok().says("sess: ended path ");
        innocent.progress();
    }
    let _ = wait_up(&server, 2);
    innocent.check();
    for path in client.status()["paths"].as_array().expect("paths") {
        assert!(path["reconnects"].as_u64() >= Some(2), "{path}");
    }
    let _ =
        server.command(&["session", "disconnect", "sess", "--path", "1"]).code(1).says("path 1");
    let _ = server.command(&["session", "disconnect", "nobody"]).code(1).says("no session nobody");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_drain_and_a_new_server_cause_only_a_pause() {
    let scratch = Scratch::new();
    sparse_file(&scratch.path("vol0.img"), 16 << 20);
    let export = format!("vol0={}", scratch.text("vol0.img"));
    let listen = [1, 2].map(|n| format!("tcp://127.0.0.{n}:{}", free_port()));
    let start =
        || Server::builder().export(&*export).listen(&*listen[0]).listen(&*listen[1]).start();
    let mut server = start();
    let client = attach(&listen, &[]);
    let innocent = Innocent::start(client.front(), "vol0");
    for _ in 0..4 {
        let _ = wait_up(&server, 2);
        let _ = server.command(&["drain"]).ok().says("drained");
        // The process has ended when the command returns, so its address and file are free.
        let _ = server.wait(STOP_TIME_MAX).code(0);
        server = start();
        innocent.progress();
    }
    innocent.check();
    let stats = client.command(&["stats", "vol0", "-o", "json"]).ok().json();
    for op in ["read", "write"] {
        assert_eq!(stats["ops"][op]["errors"], 0, "{stats}");
    }
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_drain_completes_running_io() {
    // The write is in flight when the drain begins.
    let server = Server::builder().export("vol0=mem:16M,delay=5s").start();
    let client = attach(&[server.portal().to_owned()], &["--no-path", "fail"]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    let cookie = raw.send_request(0, consts::CMD_WRITE, 4096, 4096);
    raw.send(&[9; 4096]);
    wait_for("the write to arrive", COMMAND_TIME_MAX, || {
        (server.sessions()[0]["io"]["inflight"] == 1).then_some(())
    });
    let _ = server.command(&["drain", "-o", "json"]).ok().says("\"drained\": true");
    assert_eq!(raw.simple_reply(cookie), Reply::Error(0), "the write in flight");
    let _ = server.wait(STOP_TIME_MAX).code(0);
}

#[test]
fn a_drain_flushes_written_data() {
    if !requires(&["filefrag"]) {
        return;
    }
    // The file is not in memory, because the test checks what the file system was made to write.
    let dir = tempfile::Builder::new().prefix("rtrs-").tempdir_in("/var/tmp").expect("a directory");
    let path = dir.path().join("vol0.img");
    sparse_file(&path, 16 << 20);
    let path = path.to_str().expect("a plain path");
    let unplaced = || {
        let shown = run("filefrag", &["-v", path], COMMAND_TIME_MAX).ok().stdout;
        shown.contains("delalloc")
    };
    let server = Server::builder().export(format!("vol0={path},direct=off")).start();
    let client = attach(&[server.portal().to_owned()], &[]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[1; 1 << 16]), Reply::Error(0));
    if unplaced() {
        let _ = server.command(&["drain"]).ok();
        assert!(!unplaced(), "a drain left data in memory");
    } else {
        println!("skipped: the file system of /var/tmp does not report delayed allocation");
    }
}

/// Returns the number of connections of evicted sessions that the server has refused.
fn refusals(server: &Server) -> u64 {
    server.list()["refused"]["evicted"].as_u64().unwrap_or(0)
}

#[test]
fn an_evicted_session_fails_at_once_and_stays_away() {
    let server = Server::builder()
        .export("vol0=mem:16M")
        .listen("tcp://127.0.0.1:0")
        .listen("tcp://127.0.0.2:0")
        .start();
    let client = attach(server.portals(), &["--no-path", "queue"]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(0));
    let _ = server.command(&["session", "evict", "sess"]).ok().says("sess evicted");
    assert_eq!(server.sessions(), [] as [Value; 0]);
    // The error arrives immediately, although IO would wait indefinitely for a path.
    assert_eq!(raw.write(0, 4096, &[2; 4096]), Reply::Error(EIO));
    let got = client.status();
    assert!(got.to_string().contains("operator evicted this session"), "{got}");
    assert_eq!((&got["state"], &got["io_fails"]), (&"evicted".into(), &true.into()), "{got}");
    let _ = client.command(&["status", "vol0"]).code(3).says("detach it, and attach it again");
    let _ = client.command(&["list"]).ok().says("evicted: IO fails; evicted by the server's");
    // Log lines reach the file slightly later.
    let log = client.run_dir().join("vol0.log");
    wait_for("the report of the session", COMMAND_TIME_MAX, || {
        let text = std::fs::read_to_string(&log).expect("the log");
        text.contains("evicted by the server's operator").then_some(())
    });
    // Another session with the same name opens the export for writing.
    let second = attach(server.portals(), &[]);
    assert_eq!(RawNbd::go(second.front(), "vol0").write(0, 0, &[3; 4096]), Reply::Error(0));
    // Allow time for ten further attempts. Both paths may have made attempts before one received
    // the answer.
    std::thread::sleep(Duration::from_secs(3));
    let refused = refusals(&server);
    assert!((1..=6).contains(&refused), "{refused} attempts to come back");
    let _ = server.command(&["session", "evict", "nobody"]).code(1).says("no session nobody");
    drop(raw);
    client.detach();
    second.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_export_is_taken_over_from_a_hanging_client() {
    // The server would not notice on its own for a minute.
    let server = Server::builder().export("vol0=mem:16M").args(&["--heartbeat", "10s"]).start();
    let portals = server.portals().to_vec();
    let dead = attach(&portals, &[]);
    let mut old = RawNbd::go(dead.front(), "vol0");
    assert_eq!(old.write(0, 0, &[1; 4096]), Reply::Error(0));
    dead.signal("STOP");
    // As if the client's machine had restarted without the server noticing.
    let words = ["--session-name", "sess"];
    let (_refused, done) = Client::attach("vol0").path(&portals[0]).args(&words).try_start();
    let done = done
        .code(1)
        .says("the server refused session \"sess\": EEXIST (another session on the server has");
    assert!(!done.stderr.contains("protocol"), "{done:?}");
    let _ = server.wait_output("another session has the name \\\"sess\\\"");
    assert_eq!(server.list()["refused"]["session-name"], 1);
    let words = ["--session-name", "other"];
    let (_refused, done) = Client::attach("vol0").path(&portals[0]).args(&words).try_start();
    let _ = done.code(1).says("another session has it open for writing");
    let id = server.sessions()[0]["id"].as_str().expect("a number").to_owned();
    let _ = server.command(&["session", "evict", &id]).ok();
    let new = attach(&portals, &[]);
    let mut raw = RawNbd::go(new.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[2; 4096]), Reply::Error(0));
    // The client was not dead after all.
    let late = old.send_request(0, consts::CMD_WRITE, 0, 4096);
    old.send(&[3; 4096]);
    dead.signal("CONT");
    assert_eq!(old.simple_reply(late), Reply::Error(EIO));
    let mut back = [0; 4096];
    assert_eq!(raw.read(0, &mut back), Ok(()));
    assert_eq!(back, [2; 4096], "a write of the evicted session landed");
    drop((raw, old));
    new.detach();
    dead.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_hanging_backend_blocks_no_other_client() {
    let server = Server::builder().export("stuck=mem:16M,delay=10m").export("vol0=mem:16M").start();
    let portal = server.portal().to_owned();
    let stuck = Client::attach("stuck").path(&portal).args(&["--session-name", "hung"]).start();
    let mut raw = RawNbd::go(stuck.front(), "stuck");
    let _ = raw.send_request(0, consts::CMD_WRITE, 0, 4096);
    raw.send(&[1; 4096]);
    let client = attach(&[portal], &[]);
    let innocent = Innocent::start(client.front(), "vol0");
    let hung = || {
        let sessions = server.sessions();
        let found = sessions.into_iter().find(|session| session["name"] == "hung");
        found.expect("the session with the stuck backend")
    };
    wait_for("its write", COMMAND_TIME_MAX, || (hung()["io"]["inflight"] == 1).then_some(()));
    let _ = server.command(&["session", "disconnect", "hung"]).ok();
    // The path comes back while its write is still running.
    wait_for("its path to be back", COMMAND_TIME_MAX, || (up(&hung()).len() == 1).then_some(()));
    let states: Vec<Value> = hung()["paths"].as_array().expect("paths").clone();
    assert!(states.iter().any(|path| path["state"] == "draining"), "{states:?}");
    let begin = Instant::now();
    let evict = ["session", "evict", "hung", "--within", "300ms"];
    let _ = server.command(&evict).code(1).says("the backend still runs 1 of its requests");
    assert!(begin.elapsed() < Duration::from_secs(60), "took {:?}", begin.elapsed());
    assert_eq!(hung()["state"], "evicted");
    // The session's name is free, but the export, which the session may still write to, is not.
    let words = ["--session-name", "hung"];
    let (_client, done) = Client::attach("stuck").path(server.portal()).args(&words).try_start();
    let _ = done.code(1).says("another session has it open for writing");
    innocent.progress();
    let begin = Instant::now();
    let _ = server.command(&["drain", "--within", "2s"]).code(1).says("1 requests did not finish");
    assert!(begin.elapsed() < Duration::from_secs(60), "took {:?}", begin.elapsed());
    let _ = server.wait(STOP_TIME_MAX).code(1).says("drained, but 1 requests did not finish");
    drop(innocent);
}

#[test]
fn the_intended_server_is_selected() {
    let scratch = Scratch::new();
    let dir = scratch.text("run");
    let start = |name: &str| {
        let args = ["--run-dir", &*dir, "--name", name];
        Server::builder().export("vol0=mem:16M").args(&args).start()
    };
    let ask = |words: &[&str]| {
        let words = [words, &["--run-dir", &dir]].concat();
        run(bin("rtrs-server"), &words, COMMAND_TIME_MAX)
    };
    let _ = ask(&["session", "list"]).code(1).says("no server has a control socket");
    let one = start("one");
    let mode = std::fs::metadata(scratch.path("run/one.srv")).expect("a socket").permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let _ = ask(&["session", "list"]).ok();
    let two = start("two");
    let _ = ask(&["session", "list"]).code(2).says("--name").says("one, two");
    let _ = ask(&["session", "list", "--name", "two"]).ok();
    let _ = ask(&["session", "list", "--name", "three"])
        .code(1)
        .says("no server of that name is running")
        .says("running: one, two");
    // A name in use is refused if it was given explicitly.
    let third = Server::builder().export("vol0=mem:16M").listen("tcp://127.0.0.1:0");
    let _ = third.args(&["--run-dir", &dir, "--name", "one"]).run().code(1).says("one.srv");
    // Files left behind by a killed server do not affect others.
    two.crash();
    let _ = ask(&["session", "list"]).ok();
    let two = start("two");
    let _ = ask(&["drain", "--name", "two"]).ok();
    let _ = two.wait(STOP_TIME_MAX).code(0);
    assert!(!scratch.path("run/two.srv").exists(), "a drained server left its socket behind");
    let _ = one.stop(STOP_TIME_MAX);
    assert!(!scratch.path("run/one.srv").exists(), "SIGTERM left the control socket behind");
    // Without a name, the address serves as one.
    let named = Server::builder().export("vol0=mem:16M").start();
    let _ = named.command(&["session", "list", "--name", named.address()]).ok();
    let _ = named.stop(STOP_TIME_MAX);
}

#[test]
fn garbage_on_the_control_socket_of_a_server() {
    let mut server = Server::builder().export("vol0=mem:16M").start();
    let client = attach(&[server.portal().to_owned()], &[]);
    let innocent = Innocent::start(client.front(), "vol0");
    let entries = std::fs::read_dir(server.run_dir()).expect("the run directory");
    let mut paths = entries.map(|entry| entry.expect("an entry").path());
    let is_socket =
        |path: &std::path::PathBuf| path.extension().is_some_and(|ending| ending == "srv");
    let socket = paths.find(is_socket).expect("a control socket");
    let mut long = vec![b'x'; 1 << 17];
    fill_pattern(&mut long, 0, 1);
    let drain = format!("{{\"command\":\"drain\",\"within_ms\":{}}}\n", u64::MAX);
    let session = "s".repeat(3000);
    let evict = format!("{{\"command\":\"session-evict\",\"session\":\"{session}\"}}\n");
    for bytes in [
        &b"\xff\xfe\x00garbage\n"[..],
        b"{\"command\":",
        b"{\"command\":\"session-disconnect\"}\n",
        b"\n",
        &long,
        drain.as_bytes(),
        evict.as_bytes(),
    ] {
        let mut stream = UnixStream::connect(&socket).expect("connect to the control socket");
        stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
        stream.set_write_timeout(Some(Duration::from_secs(1))).expect("a timeout");
        // Either an error or the end of the stream is correct; the server must survive.
        let _ = stream.write_all(bytes);
        let mut answer = [0; 4096];
        let count = stream.read(&mut answer).unwrap_or(0);
        let text = String::from_utf8_lossy(&answer[..count]);
        assert!(text.is_empty() || text.contains("\"error\""), "{text}");
    }
    // A silent connection must not block others.
    let silent = UnixStream::connect(&socket).expect("connect to the control socket");
    assert_eq!(server.sessions().len(), 1);
    drop(silent);
    innocent.check();
    server.check_alive();
    let Front::Unix(_) = client.front() else { panic!("expected a unix socket") };
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
