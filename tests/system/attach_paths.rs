//! Tests of paths that do not work: `attach` names them, and `--require-paths` requires them.

use std::fs;

use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Proc, STOP_TIME_MAX, Scratch, Server, bin, free_port, wait_for,
};

/// Path whose host has no address: names under "invalid" never have one (RFC 6761).
const UNRESOLVED: &str = "tcp://no-such-host.invalid:21050";
/// Reason of [`UNRESOLVED`].
const UNRESOLVED_WHY: &str = "cannot resolve host \"no-such-host.invalid\"";

#[test]
fn a_host_without_an_address_is_a_path_that_does_not_work() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let (client, done) = Client::attach("vol0").path(server.portal()).path(UNRESOLVED).try_start();
    let warning = format!("warning: vol0: path {UNRESOLVED} is not connected: {UNRESOLVED_WHY}");
    let _ = done.ok().says(&warning);
    let status = client.status();
    assert_eq!(status["state"], "degraded", "{status}");
    let path = &status["paths"][1];
    assert_eq!((&path["path"], &path["address"]), (&UNRESOLVED.into(), &"".into()), "{status}");
    let _ = client.command(&["path", "list", "vol0"]).ok().says(UNRESOLVED);
    client.detach();
    let alone = Client::attach("vol0").path(UNRESOLVED);
    let (_, done) = alone.try_start();
    let _ = done.code(1).says("cannot attach vol0: ").says(UNRESOLVED_WHY);
    // A check names problems that a start would only warn about, and fails if no path is left.
    let alone = Client::attach("vol0").path(UNRESOLVED).args(&["--check"]);
    let _ = alone.try_start().1.code(1).says(UNRESOLVED_WHY);
    let both = Client::attach("vol0").path(server.portal()).path(UNRESOLVED).args(&["--check"]);
    let _ = both.try_start().1.ok().says(&format!("warning: {UNRESOLVED_WHY}"));
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_attach_with_patience_resolves_its_hosts_again() {
    let scratch = Scratch::new();
    let (run_dir, socket) = (scratch.text("run"), scratch.text("s"));
    let mut attach = Command::new(bin("rtrs-client"));
    attach.args(["attach", "vol0", "--foreground", "--path", UNRESOLVED, "--retry-for", "10m"]);
    attach.args(["--socket", &socket, "--run-dir", &run_dir]);
    let attach = Proc::start(attach);
    wait_for("three attempts", COMMAND_TIME_MAX, || {
        let mut status = Command::new(bin("rtrs-client"));
        status.args(["status", "vol0", "-o", "json", "--run-dir", &run_dir]);
        let done = Proc::start(status).wait(COMMAND_TIME_MAX);
        let status: serde_json::Value = serde_json::from_str(&done.stdout).ok()?;
        let path = &status["paths"][0];
        let is_tried = path["ends"].as_u64()? >= 3 && status["state"] == "connecting";
        assert!(path["last_error"].as_str()?.contains(UNRESOLVED_WHY), "{status}");
        is_tried.then_some(())
    });
    drop(attach);
}

#[test]
fn an_attach_names_the_paths_that_do_not_work() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let down = format!("tcp://127.0.0.1:{}", free_port());
    let (client, done) = Client::attach("vol0").path(server.portal()).path(&down).try_start();
    let done = done.ok().says(&format!("warning: vol0: path {down} is not connected: "));
    let warnings = done.stderr.lines().filter(|line| line.contains("is not connected"));
    assert_eq!(warnings.count(), 1, "{done:?}");
    assert!(done.stderr.contains("refused"), "{done:?}");
    client.detach();

    let attached = Client::attach("vol0").path(server.portal()).args(&["--access", "ro"]);
    let (client, done) = attached.try_start();
    let done = done.ok();
    assert!(done.stdout.ends_with(" (read-only)\n"), "{done:?}");
    assert!(!done.stderr.contains("is not connected"), "{done:?}");
    let _ = client.command(&["list"]).ok().says("read-only (access: ro)");
    let listed = client.command(&["list", "-o", "json"]).ok().json();
    assert_eq!(listed[0]["version"], env!("CARGO_PKG_VERSION"), "{listed}");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_attach_without_its_required_paths_leaves_nothing_behind() {
    let server = Server::builder()
        .export("vol0=mem:16M")
        .listen("tcp://127.0.0.1:0")
        .listen("tcp://127.0.0.2:0")
        .start();
    let down = format!("tcp://127.0.0.1:{}", free_port());
    let scratch = Scratch::new();
    let config = scratch.text("session.yaml");
    fs::write(&config, "require-paths: all\n").expect("a file");
    for args in [["--require-paths", "2"], ["--config", &config]] {
        let attach = Client::attach("vol0").path(server.portal()).path(&down).args(&args);
        let (client, done) = attach.try_start();
        let why = format!("1 of 2 required paths are connected; path {down} is not connected: ");
        let _ = done.code(1).says("cannot attach vol0: ").says(&why).says("refused");
        assert_eq!(client.command(&["list", "-o", "json"]).ok().json(), serde_json::json!([]));
        assert!(client.pids().is_empty());
        let left = fs::read_dir(client.run_dir()).expect("the run directory");
        let left = left.map(|entry| entry.expect("an entry").file_name());
        let left: Vec<_> = left.filter(|name| name.to_string_lossy() != "vol0.log").collect();
        assert!(left.is_empty(), "{left:?}");
        wait_for("the end of the session", COMMAND_TIME_MAX, || {
            server.sessions().is_empty().then_some(())
        });
    }
    let too_many = Client::attach("vol0").path(&down).args(&["--require-paths", "2"]);
    let (_, done) = too_many.try_start();
    let _ = done.code(2).says("require-paths is 2, and the session has 1 paths");

    let both = server.portals();
    let client = Client::attach("vol0").path(&both[0]).path(&both[1]);
    let client = client.args(&["--require-paths", "all"]).start();
    let status = client.status();
    let paths = status["paths"].as_array().expect("paths");
    assert!(paths.iter().all(|path| path["state"] == "connected"), "{status}");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
