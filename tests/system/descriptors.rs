//! Tests of daemons that run out of file descriptors: they log the shortage, and serve again once
//! descriptors are free.

use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Front, Proc, RawNbd, Server, bin, requires, run, wait_for,
};

/// Sets the soft limit on a process's descriptors.
fn limit(pid: u32, soft: usize) {
    let args = ["--pid", &pid.to_string(), &format!("--nofile={soft}:")];
    let _ = run("prlimit", &args, COMMAND_TIME_MAX).ok();
}

/// Returns the number of open descriptors of a process.
fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).expect("a process").count()
}

#[test]
fn a_session_without_free_descriptors_serves_again_when_some_are_free() {
    if !requires(&["prlimit"]) {
        return;
    }
    let server = Server::builder().export("vol0=mem:16M").start();
    let client = Client::attach("vol0").path(server.portal()).args(&["--shards", "1"]).start();
    let pid = client.pid();
    limit(pid, descriptors(pid));
    let Front::Unix(path) = client.front() else { panic!("not a unix socket") };
    // The pending accept began under the old limit.
    let _admitted = UnixStream::connect(path).expect("a connection");
    let logged = |words: &str| {
        wait_for(words, COMMAND_TIME_MAX, || {
            let log = client.command(&["logs", "vol0"]).ok().stdout;
            log.lines().find(|line| line.contains(words)).map(str::to_owned)
        })
    };
    let line = logged("cannot accept NBD clients");
    assert!(line.contains("os error 24") && line.contains("LimitNOFILE="), "{line}");
    limit(pid, 1024);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.read(0, &mut [1; 4096]), Ok(()));
    let _ = logged("accepting NBD clients again");
    client.detach();
}

#[test]
fn an_attach_with_too_low_a_limit_is_refused() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let client = Client::attach("vol0").unattached();
    let (program, dir) = (bin("rtrs-client"), client.run_dir().to_owned());
    let attach = |limit: usize| {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {limit} && exec \"$0\" \"$@\"");
        command.args(["-c", &script]).arg(&program).args(["attach", "vol0", "--shards", "1"]);
        command.args(["--path", server.portal(), "--run-dir"]).arg(&dir);
        command.arg("--socket").arg(dir.join("v.sock"));
        Proc::start(command).wait(COMMAND_TIME_MAX)
    };
    let refused = attach(20).code(1);
    let text = "the limit of open files is 20, but this session needs 21 (paths: 1, shards: 1, ";
    assert!(refused.stderr.contains(text), "{}", refused.stderr);
    // The lowest limit is enough for a session and a client.
    let _ = attach(21).ok();
    let mut raw = RawNbd::go(&Front::Unix(dir.join("v.sock")), "vol0");
    assert_eq!(raw.read(0, &mut [1; 4096]), Ok(()));
    let _ = client.command(&["status", "vol0"]).ok();
}

#[test]
fn a_server_without_free_descriptors_logs_that_at_a_limited_rate() {
    if !requires(&["prlimit"]) {
        return;
    }
    let server = Server::builder().export("vol0=mem:16M").start();
    let begun = Instant::now();
    limit(server.pid(), descriptors(server.pid()) - 2);
    // The pending accept began under the old limit. Closing that connection frees too little.
    let _admitted = TcpStream::connect(server.address()).expect("a connection");
    let _ = server.wait_output("cannot accept a connection");
    // Leave time for further attempts.
    std::thread::sleep(Duration::from_millis(500));
    let log = server.output();
    let count = log.lines().filter(|line| line.contains("accept")).count();
    let intervals = usize::try_from(begun.elapsed().as_secs() / 5).expect("a short time");
    assert!(count <= 1 + intervals, "{count} lines: {log}");
    limit(server.pid(), 1024);
    let client = Client::attach("vol0").path(server.portal()).start();
    client.detach();
}
