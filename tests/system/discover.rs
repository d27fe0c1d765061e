//! Tests of `rtrs-client discover` against real servers.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use rtrs_tests::{COMMAND_TIME_MAX, Client, Finished, STOP_TIME_MAX, Scratch, Server, bin, run};

fn discover(args: &[&str]) -> Finished {
    run(bin("rtrs-client"), &[&["discover"], args].concat(), COMMAND_TIME_MAX)
}

#[test]
fn a_thousand_exports_are_listed() {
    let scratch = Scratch::new();
    let exports: String =
        (0..1000).map(|n| format!("- {{name: vol{n:04}, target: 'null:1M'}}\n")).collect();
    std::fs::create_dir(scratch.path("exports.d")).expect("a directory");
    std::fs::write(scratch.path("exports.d/all.yaml"), exports).expect("a file");
    let dir = scratch.text("exports.d");
    let server = Server::builder().args(&["--exports-dir", &dir]).start();
    let listed = discover(&[server.portal(), "-o", "json"]).ok().json();
    let all = &listed["servers"][0]["exports"];
    let all = all.as_array().expect("a list of exports");
    let names: Vec<_> = all.iter().filter_map(|export| export["name"].as_str()).collect();
    let expected: Vec<String> = (0..1000).map(|n| format!("vol{n:04}")).collect();
    assert_eq!(names, expected);
    assert_eq!((&all[7]["size"], &all[7]["block_size"]), (&(1 << 20).into(), &512.into()));
    assert!(server.sessions().is_empty(), "it leaves nothing behind");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn exports_are_listed_with_mode_use_and_identity() {
    let server = Server::builder().export("vol0=mem:16M").export("fixed=mem:1M,ro").start();
    let client = Client::attach("vol0").path(server.portal()).start();
    let listed = discover(&[server.portal(), "-o", "json"]).ok().json();
    let exports = &listed["servers"][0]["exports"];
    let [fixed, vol0] = [&exports[0], &exports[1]];
    assert_eq!((&fixed["read_only"], &fixed["in_use"]), (&true.into(), &false.into()), "{listed}");
    assert_eq!((&vol0["read_only"], &vol0["in_use"]), (&false.into(), &true.into()), "{listed}");
    assert_eq!(vol0["identity"], client.status()["identity"], "as attach --identity accepts it");
    let text = discover(&[server.portal()]).ok().stdout;
    let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["fixed", "1.0", "MiB", "512", "ro", "-", server.portal()], "{text}");
    assert_eq!(lines[2], ["vol0", "16.0", "MiB", "512", "rw", "yes", server.portal()], "{text}");
    // The error for an unknown name suggests the command.
    let (_failed, ended) = Client::attach("none").path(server.portal()).try_start();
    let _ = ended.code(1).says("rtrs-client discover");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn doctor_discover_and_ping_take_the_paths_of_a_session_or_a_file() {
    let server = Server::builder()
        .export("vol0=mem:16M")
        .listen("tcp://127.0.0.1:0")
        .listen("tcp://127.0.0.2:0")
        .start();
    let portals = server.portals().to_vec();
    let client = Client::attach("vol0").path(&portals[0]).path(&portals[1]).start();
    let checked = client.command(&["doctor", "vol0", "-o", "json"]).ok().json();
    let paths = checked["paths"].as_array().expect("a list of paths");
    assert_eq!(paths.len(), 2, "{checked}");
    assert!(paths.iter().all(|path| path["usable"] == true), "{checked}");
    assert_eq!(paths[0]["path"], portals[0], "{checked}");
    let listed = client.command(&["discover", "vol0", "-o", "json"]).ok().json();
    assert_eq!(listed["servers"][1]["exports"][0]["name"], "vol0", "{listed}");
    let _ = client.command(&["ping", "vol0", "-c1"]).ok().says("the first of 2 paths");
    let _ = client.command(&["doctor", "vol1"]).code(1).says("is not attached");

    let scratch = Scratch::new();
    let file = scratch.text("vol0.yaml");
    std::fs::write(&file, format!("path: ['{}']\n", portals[0])).expect("a file");
    let checked = client.command(&["doctor", "--config", &file, "-o", "json"]).ok().json();
    assert_eq!(checked["paths"].as_array().map(Vec::len), Some(1), "{checked}");
    std::fs::write(&file, "shards: 1\n").expect("a file");
    let _ = client.command(&["doctor", "--config", &file]).code(2).says("has no path");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_server_that_does_not_list_is_named_with_the_reason() {
    let server = Server::builder().export("vol0=mem:1M").start();
    let off = Server::builder().export("vol0=mem:1M").args(&["--discovery", "off"]).start();
    // This listener accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = format!("tcp://{}", silent.local_addr().expect("an address"));
    let nobody = "tcp://127.0.0.1:1";
    let started = Instant::now();
    let paths = [server.portal(), off.portal(), nobody, &silent, "-W", "5s", "-o", "json"];
    let ended = discover(&paths).code(1);
    assert!(started.elapsed() < Duration::from_secs(60), "{ended:?}");
    let listed = ended.json();
    let error = |at: usize| listed["servers"][at]["error"].as_str().unwrap_or_default().to_owned();
    assert_eq!(listed["servers"][0]["exports"][0]["name"], "vol0", "{listed}");
    assert!(error(1).contains("discovery: off"), "{listed}");
    assert!(error(2).contains("refused"), "{listed}");
    assert!(!error(3).is_empty(), "{listed}");
    let _ = discover(&[off.portal()]).code(1).says("cannot list the exports of tcp://");
    let _ = discover(&[]).code(2);
    let _ = discover(&["ftp://host"]).code(2);
    for server in [server, off] {
        let _ = server.stop(STOP_TIME_MAX);
    }
}
