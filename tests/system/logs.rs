//! Tests of the logs of both daemons: their content, format and location.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Front, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, Stand, bin,
    consts, requires, run, sparse_file, wait_for,
};
use serde_json::Value;

/// Opens and ends a session, and returns the logs of server and client in this format.
fn logs_in(format: &str) -> [String; 2] {
    let args = ["--log-format", format];
    let server = Server::builder().export("vol0=mem:16M").args(&args).args(&["--insecure-open"]);
    let server = server.start();
    let client = Client::attach("vol0").path(server.portal()).args(&args).start();
    client.detach();
    let log = client.run_dir().join("vol0.log");
    let client = std::fs::read_to_string(log).expect("the log of the session");
    [server.stop(STOP_TIME_MAX).stderr, client]
}

#[test]
fn each_line_has_the_requested_format() {
    for log in logs_in("json") {
        for line in log.lines() {
            let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
            for key in ["timestamp", "level", "message", "target"] {
                assert!(line[key].is_string(), "{key} of {line}");
            }
        }
        assert!(log.lines().count() > 0);
    }
    for log in logs_in("journald") {
        assert!(log.lines().all(|line| line.starts_with("<6>rtrs_")), "{log}");
        assert!(log.lines().count() > 0);
    }
    let words = ["--export", "v=mem:1M", "--log-format", "xml", "--check"];
    let refused = run(bin("rtrs-server"), &words, COMMAND_TIME_MAX);
    let _ = refused.code(2).says("log format \"xml\"").says("text, json or journald");
}

#[test]
fn the_log_names_the_failing_disk() {
    let scratch = Scratch::new();
    let disk = scratch.path("disk");
    sparse_file(&disk, 1 << 20);
    let server = Server::builder().export(format!("vol0={}", disk.display())).start();
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut nbd = RawNbd::go(client.front(), "vol0");
    std::fs::File::options().write(true).open(&disk).expect("the disk").set_len(4096).expect("cut");
    for _ in 0..20 {
        let _ = nbd.read(65536, &mut [0; 4096]).expect_err("a read of truncated data");
    }
    let line = "export=\"vol0\" op=\"read\" offset=65536 bytes=4096 errno=\"EIO\"";
    let logged = wait_for("the error in the log", COMMAND_TIME_MAX, || {
        let output = server.output();
        let lines: Vec<_> = output.lines().filter(|text| text.contains(line)).collect();
        (!lines.is_empty()).then_some(lines.len())
    });
    assert!(logged <= 8, "{logged} lines for 20 errors");
    assert_eq!(server.sessions()[0]["io"]["device_errors"], 20);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

/// A resource limit makes a write fail with EFBIG, which clients receive as EIO.
#[test]
fn the_log_has_the_errno_of_the_system() {
    if !requires(&["prlimit"]) {
        return;
    }
    let scratch = Scratch::new();
    let disk = scratch.path("disk");
    sparse_file(&disk, 1 << 20);
    let server = Server::builder().export(format!("vol0={}", disk.display())).start();
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut nbd = RawNbd::go(client.front(), "vol0");
    let limit = ["--pid", &server.pid().to_string(), "--fsize=65536:65536"];
    let _ = run("prlimit", &limit, COMMAND_TIME_MAX).ok();
    assert_eq!(nbd.write(0, 65536, &[1; 4096]), Reply::Error(5));
    wait_for("the error in the log", COMMAND_TIME_MAX, || {
        let line = "op=\"write\" offset=65536 bytes=4096 errno=\"EFBIG\"";
        server.output().contains(line).then_some(())
    });
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_renamed_log_is_reopened() {
    let stand = Stand::memory("16M");
    let dir = stand.client.run_dir();
    let (log, renamed) = (dir.join("vol0.log"), dir.join("vol0.log.1"));
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    stand.client.signal("HUP");
    wait_for("the log to stay", COMMAND_TIME_MAX, || {
        read(&log).contains("is still the log").then_some(())
    });
    std::fs::rename(&log, &renamed).expect("a log to rename");
    stand.client.signal("HUP");
    wait_for("a log", COMMAND_TIME_MAX, || read(&log).contains("log reopened").then_some(()));
    assert!(!read(&renamed).contains("log reopened"));
    // The new log also says which session has the name.
    let words = ["attach", "vol0", "--path", stand.server.portal(), "--socket", "/nowhere/s"];
    let _ = stand.client.command(&words).code(1);
    let shown = stand.client.command(&["logs", "vol0"]).ok().stdout;
    assert_eq!(shown, read(&log));
    assert_eq!(stand.client.command(&["logs", "vol0", "-n1"]).ok().stdout.lines().count(), 1);
    // The log is kept after the end of the session, and continued.
    stand.client.detach();
    assert!(read(&log).starts_with(&shown));
    let _ = stand.client.command(&["logs", "other"]).code(1).says("has no log");
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn repeated_connects_do_not_fill_the_log() {
    const CLIENTS: u64 = 4000;
    const LEAVING: usize = 160;
    // The lines of startup and shutdown, and a few of each kind.
    const BYTES_MAX: usize = 16 << 10;
    let server = Server::builder().export("vol0=mem:16M,delay=5ms").start();
    let client = Client::attach("vol0").path(server.portal()).args(&["--shards", "1"]).start();
    let Front::Unix(socket) = client.front().clone() else { panic!("a unix socket by default") };
    for _ in 0..LEAVING / 16 {
        for at in 0..16 {
            let mut leaving = RawNbd::go(client.front(), "vol0");
            let _ = leaving.send_request(0, consts::CMD_WRITE, at * 4096, 4096);
            leaving.send(&[7; 4096]);
        }
        // Waits for the writes that were left behind; queued ones are dropped.
        let mut whole = [0; 16 * 4096];
        RawNbd::go(client.front(), "vol0").read(0, &mut whole).expect("a read");
    }
    // More connections than a shard serves: the rest is turned away.
    let held: Vec<_> = (0..64).map(|_| UnixStream::connect(&socket).expect("a listener")).collect();
    for _ in 0..CLIENTS {
        drop(UnixStream::connect(&socket).expect("a listener"));
    }
    let log = client.run_dir().join("vol0.log");
    let read = || std::fs::read_to_string(&log).expect("the log");
    // The repeat count is logged once the messages have stopped.
    let text = wait_for("the repeat count", Duration::from_secs(60), || {
        let of_turned_away =
            |line: &&str| line.contains("turned away") && line.contains("repeated=");
        let text = read();
        text.lines().any(|line| of_turned_away(&line)).then_some(text)
    });
    assert!(text.len() < BYTES_MAX, "{} bytes: {text}", text.len());
    let own = format!("peer=pid {}", std::process::id());
    let line = text.lines().find(|line| line.contains("too many connections")).expect("a line");
    assert!(line.contains(&own) || line.contains(&own.replace('=', "=\"")), "{line}");
    drop(held);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
