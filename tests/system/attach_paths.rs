//! Paths that do not work: `attach` names them, and `--require-paths` demands them.

use std::fs;

use rtrs_tests::{COMMAND_TIME_MAX, Client, STOP_TIME_MAX, Scratch, Server, free_port, wait_for};

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
