//! Tests of the server log: exports, opens, and refusals with their reasons.

use rtrs_tests::raw_mpa::{CRC, ENHANCED, REFUSED, REQUEST_KEY, start_data, start_frame};
use rtrs_tests::{COMMAND_TIME_MAX, Client, RawMpa, STOP_TIME_MAX, Server, wait_for};

/// Returns the log lines that contain all of these words.
fn lines(log: &str, words: &[&str]) -> Vec<String> {
    let has_all = |line: &&str| words.iter().all(|word| line.contains(word));
    log.lines().filter(has_all).map(str::to_owned).collect()
}

/// Waits for a log line, which is written slightly later.
fn wait_line(server: &Server, words: &[&str]) -> String {
    wait_for(&format!("a line with {words:?}"), COMMAND_TIME_MAX, || {
        lines(&server.output(), words).pop()
    })
}

#[test]
fn the_server_logs_its_exports_and_final_statistics() {
    let server = Server::builder().export("vol0=mem:16M,id=disk").start();
    let portal = server.portal().to_owned();
    let exported = wait_line(&server, &["exported", "vol0", "mem:16M", "16777216", "512"]);
    assert!(!exported.contains("id=\"-\""), "{exported}");
    let _ = wait_line(&server, &["listening", &portal]);
    let _ = wait_line(&server, &["the server is ready", env!("CARGO_PKG_VERSION"), "sessions_max"]);

    let client = Client::attach("vol0").path(&portal).args(&["--session-name", "vm7"]).start();
    let opened =
        wait_line(&server, &["opened", "export=\"vol0\"", "client=vm7", "peer=", "access=\"rw\""]);
    let identity = client.status()["identity"].as_str().expect("an identity").to_owned();
    let (_, export) = identity.split_once('/').expect("server and export");
    assert!(opened.contains(export), "{opened} without {export}");
    client.detach();
    let ended = server.stop(STOP_TIME_MAX);
    let log = format!("{}{}", ended.stderr, ended.stdout);
    assert_eq!(
        lines(&log, &["the server is stopping", "sessions=1", "errors=0"]).len(),
        1,
        "{log}"
    );
}

#[test]
fn the_log_level_changes_while_both_ends_run() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let client = Client::attach("vol0").path(server.portal());
    let client = client.args(&["--session-name", "sess"]).start();
    let connecting = || lines(&server.output(), &["DEBUG", "path connecting"]).len();
    assert_eq!(connecting(), 0);
    let _ = server.command(&["set", "log=debug"]).ok().says("log: debug\n");
    let _ = wait_line(&server, &["the log filter has changed", "before=info"]);
    let _ = server.command(&["session", "disconnect", "sess"]).ok();
    let _ = wait_line(&server, &["DEBUG", "path connecting"]);
    let got = server.command(&["get", "log", "queue-depth"]).ok();
    assert_eq!(got.stdout, "log: debug\nqueue-depth: 512  # needs a restart\n");
    let _ = server.command(&["set", "log=info", "-o", "json"]).ok();
    let _ = wait_line(&server, &["the log filter has changed", "after=info"]);
    let count = connecting();
    // A client whose path connects before it is refused.
    let (_, refused) = Client::attach("none").path(server.portal()).try_start();
    let _ = refused.code(1);
    let _ = wait_line(&server, &["refused an open", "export=\"none\""]);
    assert_eq!(connecting(), count, "{}", server.output());
    let allowed = "use error, warn, info, debug, trace or off, or MODULE=LEVEL";
    for words in [["set", "log=loud"], ["set", "log="]] {
        let _ = server.command(&words).code(2).says(allowed);
    }
    let _ = server.command(&["set", "queue-depth=1"]).code(2).says("restart the server");
    let _ = server.command(&["set", "no-such=1"]).code(2).says("there is no setting no-such");

    // The client logs each change at level info.
    let set = |value: &str| client.command(&["set", "vol0", value]);
    let _ = set("log=loud").code(2).says(allowed);
    let _ = set("log=error").ok().says("log: error\n");
    assert_eq!(client.command(&["get", "vol0", "log"]).ok().stdout, "log: error\n");
    let _ = set("no-path=queue").ok();
    let _ = set("log=info").ok();
    let log = wait_for("the log line for the last change", COMMAND_TIME_MAX, || {
        let log = client.command(&["logs", "vol0"]).ok().stdout;
        log.contains("log set to info").then_some(log)
    });
    assert!(!log.contains("no-path set to queue"), "{log}");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn repeated_refusals_are_logged_rarely_with_their_reason() {
    let server = Server::builder().export("vol0=mem:16M").export("failed=/nonexistent").start();
    let portal = server.portal().to_owned();
    let attach = || {
        let builder = Client::attach("none").path(&portal).args(&["--session-name", "lost"]);
        let (_, done) = builder.try_start();
        let _ = done.code(1).says("ENOENT");
    };
    let begun = std::time::Instant::now();
    attach();
    let words = ["refused an open", "export=\"none\"", "client=lost", "errno=\"ENOENT\""];
    let refused = wait_line(&server, &words);
    assert!(refused.contains("there is no export of that name"), "{refused}");
    let (_, done) = Client::attach("failed").path(&portal).try_start();
    let _ = done.code(1).says("ENOENT");
    let refused = wait_line(&server, &["refused an open", "export=\"failed\""]);
    assert!(refused.contains("the export has failed"), "{refused}");
    for _ in 0..4 {
        attach();
    }
    // One line for each interval that has passed, not for each attempt.
    let log = server.output();
    let intervals = begun.elapsed().as_secs() / 5;
    let count = lines(&log, &["refused an open", "export=\"none\""]).len() as u64;
    assert!(count <= 1 + intervals, "{count} lines in {intervals} intervals: {log}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn refused_pings_do_not_fill_the_log() {
    let server =
        Server::builder().export("vol0=mem:1M").args(&["--access", "anyone@10.9.9.9:ro"]).start();
    let address = server.address().parse().expect("an address");
    // Version 1, ping-pong, one at a time, with more bytes than a ping may have.
    let hello =
        [&b"RTRSPING"[..], &[1, 0, 0, 0, 0, 1, 0, 0], &u32::MAX.to_be_bytes(), &[0; 4]].concat();
    let request = start_frame(REQUEST_KEY, ENHANCED | CRC, 2, &start_data(&hello));
    let begun = std::time::Instant::now();
    for _ in 0..2000 {
        let mut raw = RawMpa::connect(address);
        raw.write(&request);
        assert_eq!(raw.read_exact(20)[16] & REFUSED, REFUSED);
    }
    // A burst of a hundred lines, then one line every five seconds.
    let most = 101 + begun.elapsed().as_secs() / 5;
    let log = server.stop(STOP_TIME_MAX).stderr;
    let count = lines(&log, &["refused a ping"]).len() as u64;
    assert!((1..=most).contains(&count), "{count} lines, at most {most}: {log}");
    assert!(log.len() < 64 << 10, "{} bytes", log.len());
}

#[test]
fn a_second_writer_is_logged_and_can_be_denied() {
    let server = Server::builder().export("a=mem:1M").export("b=mem:1M,migration=deny").start();
    let portal = server.portal().to_owned();
    let attach = |export: &str, args: &[&str]| Client::attach(export).path(&portal).args(args);
    let first = attach("a", &["--session-name", "one"]).start();
    let second = attach("a", &["--session-name", "two", "--access", "migration"]).start();
    let _ = wait_line(
        &server,
        &["WARN", "opened", "export=\"a\"", "client=two", "access=\"migration\""],
    );
    let (_, done) = attach("b", &["--session-name", "three", "--access", "migration"]).try_start();
    let _ = done.code(1).says("EPERM");
    let _ = wait_line(&server, &["refused an open", "the export does not allow migration"]);
    let third = attach("b", &["--session-name", "four"]).start();
    first.detach();
    second.detach();
    third.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
