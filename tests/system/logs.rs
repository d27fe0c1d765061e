//! The logs of both daemons: what they say, in which format, and where.

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, RawNbd, STOP_TIME_MAX, Scratch, Server, Stand, bin, run, sparse_file,
    wait_for,
};
use serde_json::Value;

/// Ends a session that was opened, and returns what server and client logged in this format.
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
fn each_line_has_the_format_that_was_asked_for() {
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
fn the_log_names_the_disk_that_fails() {
    let scratch = Scratch::new();
    let disk = scratch.path("disk");
    sparse_file(&disk, 1 << 20);
    let server = Server::builder().export(format!("vol0={}", disk.display())).start();
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut nbd = RawNbd::go(client.front(), "vol0");
    std::fs::File::options().write(true).open(&disk).expect("the disk").set_len(4096).expect("cut");
    for _ in 0..20 {
        let _ = nbd.read(65536, &mut [0; 4096]).expect_err("a read of what is gone");
    }
    let line = "export=\"vol0\" op=\"read\" offset=65536 bytes=4096 errno=5";
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

#[test]
fn a_log_that_was_renamed_is_opened_again() {
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
    wait_for("a log", COMMAND_TIME_MAX, || read(&log).contains("log opened again").then_some(()));
    assert!(!read(&renamed).contains("log opened again"));
    // The new one says as well whose the name is.
    let words = ["attach", "vol0", "--path", stand.server.portal(), "--socket", "/nowhere/s"];
    let _ = stand.client.command(&words).code(1);
    let shown = stand.client.command(&["logs", "vol0"]).ok().stdout;
    assert_eq!(shown, read(&log));
    assert_eq!(stand.client.command(&["logs", "vol0", "-n1"]).ok().stdout.lines().count(), 1);
    // Kept over the end of the session, and continued.
    stand.client.detach();
    assert!(read(&log).starts_with(&shown));
    let _ = stand.client.command(&["logs", "other"]).code(1).says("has no log");
    let _ = stand.server.stop(STOP_TIME_MAX);
}
