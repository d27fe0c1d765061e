//! Tests of `rds node` and the commands that use it.

use rtrs_tests::{bin, free_port, run, wait_for};
use serde_json::Value;

use crate::stand::{LIMIT, Stand, address};

#[test]
fn messages_pass_between_commands() {
    let stand = Stand::new(2);
    let receiver = stand.begin(&["recv", "4000", "-I", "127.0.0.2", "-n", "3", "-W", "60s"]);
    wait_for("the receiver", LIMIT, || {
        let info = stand.rds(&["info", "-k", "-I", "127.0.0.2", "-o", "json"]).ok().json();
        info["sockets"].as_array().is_some_and(|all| !all.is_empty()).then_some(())
    });
    let sent = stand.rds(&["send", "127.0.0.2", "4000", "-m", "one", "-o", "json"]).ok();
    assert_eq!(sent.json()["messages"], 1);
    let _ = stand.rds(&["send", "127.0.0.2", "4000", "-m", "", "-I", "127.0.0.1"]).ok();
    let _ = stand.rds(&["send", "127.0.0.2", "4000", "--message", "three"]).ok();
    assert_eq!(receiver.wait(LIMIT).ok().stdout, "one\n\nthree\n");
}

#[test]
fn standard_input_is_split_as_requested() {
    let stand = Stand::new(1);
    let rds = bin("rds");
    for (flags, messages) in [
        (&[][..], &["ab", "", "cde"][..]),
        (&["--whole"], &["ab\n\ncde\n"]),
        (&["--size", "4"], &["ab\n\n", "cde\n"]),
    ] {
        let count = messages.len().to_string();
        let receiver =
            stand.begin(&["recv", "4000", "-I", "127.0.0.1", "-n", &count, "-o", "json"]);
        wait_for("the receiver", LIMIT, || {
            let info = stand.rds(&["info", "-k", "-I", "127.0.0.1"]).ok();
            info.stdout.contains(" 4000 ").then_some(())
        });
        let flags = flags.join(" ");
        let script =
            format!("printf 'ab\\n\\ncde\\n' | '{}' send 127.0.0.1 4000 {flags}", rds.display());
        let shell = stand.command("sh".into(), &["-c", &script]);
        let _ = rtrs_tests::Proc::start(shell).wait(LIMIT).ok();
        let output = receiver.wait(LIMIT).ok().stdout;
        let texts: Vec<Value> =
            output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let texts: Vec<&str> = texts.iter().map(|line| line["text"].as_str().unwrap()).collect();
        assert_eq!(texts, messages, "{flags}");
    }
}

#[test]
fn nodes_answer_pings() {
    let mut stand = Stand::new(2);
    // One ping for each socket: a ping counts as lost when its socket sends the next one.
    let args = ["ping", "127.0.0.2", "-c", "8", "-i", "10ms", "-W", "60s", "-o", "json"];
    let summary = stand.rds(&args).ok().json();
    assert_eq!(
        (&summary["sent"], &summary["received"], &summary["lost"]),
        (&8.into(), &8.into(), &0.into())
    );
    assert!(summary["avg_us"].as_f64().unwrap() > 0.0);
    stand.stop(2);
    let ping = stand.rds(&["ping", "127.0.0.2", "-c", "1", "-W", "200ms"]);
    let _ = ping.code(1).says("does not answer; check that a node runs there");
    let _ = stand.rds(&["ping", "no-such-host.invalid"]).code(1).says("cannot resolve host");
}

/// Without a daemon, a command runs its own node.
#[test]
fn commands_work_without_a_daemon() {
    let stand = Stand::new(2);
    // An address without a daemon.
    let own = address(77).to_string();
    let port = stand.port().to_string();
    let args = [
        "ping",
        "127.0.0.2",
        "-c",
        "3",
        "-i",
        "10ms",
        "-W",
        "60s",
        "-I",
        &own,
        "--listen-port",
        &port,
        "--peer-port",
        &port,
    ];
    let _ = stand.rds(&args).ok();
}

#[test]
fn stress_load_is_verified_on_all_kinds_of_nodes() {
    let stand = Stand::new(2);
    let port = free_port().to_string();
    // Server and client use daemons.
    let _server = stand.begin(&["stress", "--listen", "-I", "127.0.0.2", "-p", &port]);
    let stress = |args: &[&str]| {
        let fixed = ["stress", "127.0.0.2", "-p", &port, "-t", "500ms", "-o", "json"];
        // The server may not be listening yet, or may have had no CPU for most of the time.
        wait_for("a run with more than 10 answers", LIMIT, || {
            let finished = stand.rds(&[&fixed[..], args].concat());
            let summary = (finished.code == Some(0)).then(|| finished.json())?;
            (summary["answered"].as_u64() > Some(10)).then_some(summary)
        })
    };
    for args in [
        &["-d", "16", "-s", "4", "-q", "3000", "-I", "127.0.0.1"][..],
        &["-q", "200000", "-a", "100000", "-d", "4", "-I", "127.0.0.1"],
        &["--tcp", "-q", "64"],
        &["--tcp", "-q", "8192", "-d", "64"],
    ] {
        let summary = stress(args);
        let found = (&summary["lost"], &summary["wrong"]);
        assert_eq!(found, (&0.into(), &0.into()), "{args:?}: {summary}");
    }
}

#[test]
fn the_daemon_lists_its_users() {
    let stand = Stand::new(2);
    let receiver = stand.begin(&["recv", "4000", "-I", "127.0.0.2"]);
    let dir = stand.dir();
    let dir = dir.to_str().unwrap();
    let ask = |what: &str, more: &[&str]| {
        let fixed = ["node", what, "--socket-dir", dir, "-o", "json"];
        stand.rds(&[&fixed[..], more].concat()).ok().json()
    };
    wait_for("the receiver", LIMIT, || {
        let info = ask("info", &["127.0.0.2"]);
        let socket = &info[0]["nodes"][0]["sockets"][0];
        (socket["port"] == 4000 && socket["pid"] == receiver.pid()).then_some(())
    });
    // A killed user frees its port.
    drop(receiver);
    wait_for("the port to be free", LIMIT, || {
        let info = ask("info", &["127.0.0.2"]);
        info[0]["nodes"][0]["sockets"].as_array().unwrap().is_empty().then_some(())
    });
    let list = ask("list", &[]);
    let pids: Vec<u64> =
        list.as_array().unwrap().iter().map(|d| d["pid"].as_u64().unwrap()).collect();
    assert_eq!(pids.len(), 2);
    assert!(pids.contains(&stand.pid(1).into()));
    let _ = stand.rds(&["ping", "127.0.0.2", "-I", "127.0.0.1", "-c", "1", "-W", "60s"]).ok();
    assert_eq!(ask("stats", &["127.0.0.2"])[0]["nodes"][0]["counters"]["recv_ping"], 2);
    ask("reset", &["127.0.0.1", "127.0.0.2"]);
    let args = ["node", "reset", "--socket-dir", dir, "127.0.0.1", "127.0.0.9"];
    let _ = stand.rds(&args).code(1).says("has no connection to 127.0.0.9");
    let args = ["node", "info", "--socket-dir", dir, "127.0.0.9"];
    let _ = stand.rds(&args).code(1).says("node 127.0.0.9 is not running; start it with");
}

#[test]
fn invalid_settings_are_refused_with_a_remedy() {
    let rds = |args: &[&str]| run(bin("rds"), args, LIMIT);
    let _ = rds(&["node"]).code(2).says("set an address of this host with --address");
    let _ = rds(&["node", "--address", "host"]).code(2).says("is not an address; use an IPv4");
    let _ = rds(&["node", "--address", "127.0.0.1", "--sndbuf", "1G"]).code(2).says("buffer-max");
    let scratch = rtrs_tests::Scratch::new();
    let dir = scratch.dir().to_str().unwrap();
    let args = ["node", "--address", "192.0.2.1", "--socket-dir", dir];
    let _ = rds(&args).code(1).says("cannot listen for peers at 192.0.2.1 port 16385");
    let args = ["node", "--address", "127.0.0.1", "--socket-dir", "/proc/x"];
    let _ = rds(&args).code(1).says("cannot create the directory /proc/x");
    let _ = rds(&["recv", "4000"]).code(2).says("or set --local");
    let _ =
        rds(&["ping", "127.0.0.1", "--node", "/no/such"]).code(1).says("start one with `rds node`");
    let _ = rds(&["stress", "127.0.0.1", "-q", "10"]).code(2).says("40");
    let printed = rds(&["node", "--print-config", "--address", "10.0.0.1"]).ok();
    assert!(printed.stdout.contains("address:\n- 10.0.0.1\n"), "{}", printed.stdout);
}

/// A second daemon for an address is refused without affecting the first; a killed daemon is
/// replaced.
#[test]
fn only_one_daemon_runs_per_address() {
    let mut stand = Stand::new(1);
    let dir = stand.dir();
    let dir = dir.to_str().unwrap();
    let second = ["node", "--address", "127.0.0.1", "--socket-dir", dir, "--listen-port", "1"];
    let _ = stand.rds(&second).code(1).says("node 127.0.0.1 already runs (PID ");
    stand.kill(1);
    stand.start(1);
    let paths = std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path());
    let controls: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|ending| ending == "ctl")).collect();
    assert_eq!(controls.len(), 1, "{controls:?}");
    let _ = stand.rds(&["ping", "127.0.0.1", "-I", "127.0.0.1", "-c", "1", "-W", "60s"]).ok();
    stand.stop(1);
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().flatten().map(|e| e.path()).collect();
    let left: Vec<_> =
        left.iter().filter(|path| path.extension().is_some_and(|e| e == "sock")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Resources of a killed daemon stay in use briefly after it is gone.
#[test]
fn a_killed_daemon_restarts_at_once() {
    let mut stand = Stand::new(2);
    for _ in 0..10 {
        let _ = stand.rds(&["ping", "127.0.0.2", "-I", "127.0.0.1", "-c", "1", "-W", "60s"]).ok();
        stand.kill(2);
        stand.start(2);
    }
}
