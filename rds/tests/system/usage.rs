//! Tests of the messages of the `rds` commands when something is missing, has ended or is
//! impossible.

use std::os::unix::fs::FileTypeExt;
use std::process::Command;

use rds::socket::{Node, RdsSocket};
use rtrs_tests::{Finished, Proc, Scratch, bin, free_port, run, wait_for};

use crate::stand::{LIMIT, Stand};

fn rds(args: &[&str]) -> Finished {
    run(bin("rds"), args, LIMIT)
}

/// Runs a script with the commands' environment; RDS is replaced with the program's path.
fn shell(stand: &Stand, script: &str) -> Finished {
    let script = script.replace("RDS", &format!("'{}'", bin("rds").display()));
    Proc::start(stand.command("sh".into(), &["-c", &script])).wait(LIMIT)
}

#[test]
fn a_single_node_is_selected_automatically() {
    let stand = Stand::new(1);
    let info = stand.rds(&["info", "-k", "-o", "json"]).ok();
    assert_eq!(info.json()["sockets"].as_array().unwrap().len(), 0);
    let receiver = stand.begin(&["recv", "4000", "-n", "1", "-W", "60s"]);
    wait_for("the receiver", LIMIT, || {
        stand.rds(&["info", "-k"]).ok().stdout.contains(" 4000 ").then_some(())
    });
    let _ = stand.rds(&["send", "127.0.0.1", "4000", "-m", "one"]).ok();
    assert_eq!(receiver.wait(LIMIT).ok().stdout, "one\n");
    let no_node = "node 127.0.0.77 is not running; start it with `rds node --address 127.0.0.77`";
    let _ = stand.rds(&["info", "-I", "127.0.0.77"]).code(1).says(no_node);
    let _ = stand.rds(&["recv", "4000", "--node", "/no/such"]).code(1).says("no node listens");
}

#[test]
fn several_nodes_are_listed_by_name() {
    let stand = Stand::new(2);
    let several = "several nodes are running (127.0.0.1, 127.0.0.2); choose one with --local";
    for args in [&["info"][..], &["recv", "4000"]] {
        let _ = stand.rds(args).code(2).says(several);
    }
    let dir = stand.dir();
    let dir = dir.to_str().unwrap();
    let list = stand.rds(&["node", "list", "--socket-dir", dir]).ok().stdout;
    let lines: Vec<&str> = list.lines().collect();
    assert!(lines[0].trim_start().starts_with("NODE ") && lines[0].ends_with("PEERS UP"));
    assert!(lines[1].contains("127.0.0.1 ") && lines[2].contains("127.0.0.2 "), "{list}");
    let info = stand.rds(&["node", "info", "--socket-dir", dir, "127.0.0.1"]).ok();
    let _ = info.says("memory: received 0 of 256M, sent 0 of 256M");
    let none = rds(&["node", "list", "--socket-dir", "/nonexistent"]).ok();
    assert_eq!(none.stdout, "no running node found in /nonexistent\n");
    let reset = |one, other| stand.rds(&["node", "reset", "--socket-dir", dir, one, other]);
    let _ = reset("127.0.0.9", "127.0.0.1").code(1).says("node 127.0.0.9 is not running; start it");
    let _ = stand.rds(&["ping", "127.0.0.2", "-c", "1", "-W", "60s", "-I", "127.0.0.1"]).ok();
    assert_eq!(reset("127.0.0.1", "127.0.0.2").ok().stdout, "connection reset\n");
}

#[test]
fn a_stopped_daemon_does_not_hide_others() {
    let mut stand = Stand::new(2);
    stand.signal(1, "STOP");
    let dir = stand.dir();
    let list = stand.rds(&["node", "list", "--socket-dir", dir.to_str().unwrap()]);
    stand.signal(1, "CONT");
    let list = list.code(1).says("cannot query the daemon at").says("longer than 10s");
    assert!(list.stdout.contains("127.0.0.2") && !list.stdout.contains("127.0.0.1 "), "{list:?}");
}

#[test]
fn a_signal_ends_a_ping_with_its_summary() {
    let stand = Stand::new(2);
    let args = ["ping", "127.0.0.2", "-i", "10ms", "-I", "127.0.0.1"];
    let mut ping = stand.begin(&args);
    ping.wait_lines(" usec", 3, LIMIT);
    ping.signal("INT");
    let _ = ping.wait(LIMIT).ok().says(" sent, ").says(" % lost, round trip min/avg/max");
    let mut ping = stand.begin(&["ping", "127.0.0.9", "-i", "1", "-I", "127.0.0.1"]);
    wait_for("the first ping", LIMIT, || {
        let info = stand.rds(&["info", "-n", "-I", "127.0.0.1"]).ok();
        info.stdout.contains("127.0.0.9").then_some(())
    });
    ping.signal("TERM");
    let _ = ping.wait(LIMIT).code(1).says(" sent, 0 received, 100 % lost").says("does not answer");
    // The reader stops after the first line.
    let script = "RDS ping 127.0.0.2 -i 1ms -I 127.0.0.1 | head -n 1";
    let head = shell(&stand, script).ok();
    assert_eq!((head.stdout.lines().count(), head.stderr.as_str()), (1, ""));
}

#[test]
fn a_stress_run_without_a_server_ends() {
    let stand = Stand::new(2);
    let text = "cannot reach 127.0.0.2 port 18000: no answer; check that `rds stress --listen`";
    for more in [&["-I", "127.0.0.1"][..], &["-I", "127.0.0.1", "-n", "1"]] {
        let _ = stand.rds(&[&["stress", "127.0.0.2"][..], more].concat()).code(1).says(text);
    }
}

#[test]
fn undelivered_messages_are_reported() {
    let mut stand = Stand::new(2);
    let send = ["send", "127.0.0.9", "4000", "-m", "x", "-I", "127.0.0.1", "-W"];
    let _ = stand.rds(&[&send[..], &["300ms"]].concat()).code(1).says(
        "1 message was not delivered to 127.0.0.9 within 0.3 s: no connection to the peer; check \
         that",
    );
    let sender = stand.begin(&[&send[..], &["60"]].concat());
    let receiver = stand.begin(&["recv", "4000", "-I", "127.0.0.2"]);
    let load = ["stress", "127.0.0.9", "-t", "60s", "-W", "600s", "-I", "127.0.0.1"];
    let load = stand.begin(&load);
    for (node, count) in [("127.0.0.1", 2), ("127.0.0.2", 1)] {
        wait_for("the sockets", LIMIT, || {
            let info = stand.rds(&["info", "-k", "-s", "-I", node, "-o", "json"]).ok().json();
            let len = |part: &str| info[part].as_array().map_or(0, Vec::len);
            (len("sockets") >= count && (node == "127.0.0.2" || len("send_queue") >= 2))
                .then_some(())
        });
    }
    stand.kill(1);
    stand.kill(2);
    let ended = "the node has ended; 1 message may not have arrived";
    let _ = sender.wait(LIMIT).code(1).says(ended);
    let again = |node| format!("node {node} has ended; start it and run this command again");
    let _ = receiver.wait(LIMIT).code(1).says(&again("127.0.0.2"));
    let _ = load.wait(LIMIT).code(1).says(&again("127.0.0.1"));
}

#[test]
fn impossible_values_are_refused() {
    let _ = rds(&["node", "list", "-o", "yaml"]).code(2).says("invalid value 'yaml'");
    let stand = Stand::new(1);
    let local = ["-I", "127.0.0.1"];
    for (args, text) in [
        (&["recv", "0"][..], "number \"0\" is out of range; use 2 to 65535"),
        (&["recv", "65536"], "number \"65536\" is out of range; use 2 to 65535"),
        (&["recv", "x"], "number \"x\" is not a whole number; use 2 to 65535"),
        (&["send", "127.0.0.1", "0", "-m", "x"], "use 2 to 65535"),
        (
            &["send", "127.0.0.1", "4000", "--size", "2M"],
            "size \"2M\" is out of range; use 1 to 1M",
        ),
        (&["stress", "--listen", "-p", "65530"], "use 2 to 65520"),
        (&["stress", "127.0.0.1", "-q", "2M"], "use 40 to 1M"),
        (&["ping", "127.0.0.1", "--listen-port", "0"], "use 1 to 65535"),
        (
            &["ping", "127.0.0.1", "--listen-port", "5"],
            "node 127.0.0.1 is already running; leave them",
        ),
        (&["ping", "224.0.0.1"], "cannot reach 224.0.0.1, which is not the address of one node"),
        (&["ping", "fe80::1", "-I", "::1"], "link-local address, which is not supported"),
        (&["recv", "4000", "--raw", "-o", "json"], "--raw and `-o json` are mutually exclusive"),
        (&["node", "--address", "fe80::1"], "link-local address, which is not supported"),
    ] {
        let more: &[&str] = if args.contains(&"-I") || args[0] == "node" { &[] } else { &local };
        let _ = stand.rds(&[args, more].concat()).code(2).says(text);
    }
    let _ = stand.rds(&["ping", "127.0.0.1", "-I", "::1"]).code(2).says("one is IPv4, the other");
    let socket = stand.dir().join("127.0.0.1.sock");
    let node = ["ping", "127.0.0.1", "--node", socket.to_str().unwrap(), "-I", "127.0.0.5"];
    let _ = stand.rds(&node).code(2).says("has the address 127.0.0.1, not 127.0.0.5");
    let control = stand.dir().join(format!("{}.ctl", stand.pid(1)));
    let _ = stand
        .rds(&["ping", "127.0.0.1", "--node", control.to_str().unwrap()])
        .code(1)
        .says("this is not the socket of a node; use the socket that ends in .sock");
    let script = "head -c 2000000 /dev/zero | RDS send 127.0.0.1 4000 --whole -I 127.0.0.1";
    let text = "cannot send: the message is longer than 1 MiB (1048576 bytes); use --size to split";
    let _ = shell(&stand, script).code(1).says(text);
}

#[test]
fn nodes_run_even_if_readiness_is_not_read() {
    let stand = Stand::new(1);
    let scratch = Scratch::new();
    let dir = scratch.dir().to_str().unwrap();
    let port = stand.port();
    let script = format!(
        "exec '{}' node --address 127.0.0.3 --socket-dir {dir} --listen-port {port} >/dev/full",
        bin("rds").display()
    );
    let mut daemon = Proc::start(stand.command("sh".into(), &["-c", &script]));
    daemon.wait_lines("cannot print that the nodes are", 1, LIMIT);
    let _ = rds(&["node", "info", "--socket-dir", dir, "127.0.0.3"]).ok().says("node 127.0.0.3");
    let socket = std::fs::metadata(scratch.dir().join("127.0.0.3.sock")).unwrap();
    assert!(socket.file_type().is_socket());
    // More nodes at the same address: in the same directory and in a different one.
    let port = port.to_string();
    let second = |dir: &str| {
        rds(&["node", "--address", "127.0.0.3", "--listen-port", &port, "--socket-dir", dir])
    };
    let pid = format!("node 127.0.0.3 already runs (PID {})", daemon.pid());
    let _ = second(dir).code(1).says(&pid);
    let other = Scratch::new();
    let _ = second(other.dir().to_str().unwrap()).code(1).says("cannot listen for peers at 127.0.");
    let long = format!("{dir}/{}", "x".repeat(100));
    let _ = second(&long).code(1).says("the path is longer than 107 bytes; choose a shorter");
    let _ = daemon.terminate(LIMIT).ok();
}

/// A socket takes two descriptors, so that the last one is missing either for the connection or for
/// the socket's memory.
#[test]
fn a_node_without_descriptors_reports_it() {
    for limit in [40, 41] {
        reports_missing_descriptors(limit);
    }
}

fn reports_missing_descriptors(limit: u32) {
    let scratch = Scratch::new();
    let (dir, port) = (scratch.dir().to_str().unwrap(), free_port());
    let script = format!(
        "ulimit -n {limit}; exec '{}' node --address 127.0.0.3 --socket-dir {dir} \
         --listen-port {port}",
        bin("rds").display()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]);
    let begun = std::time::Instant::now();
    let mut daemon = Proc::start(shell);
    daemon.wait_lines("is ready at ", 1, LIMIT);
    let node = Node::open_at(&scratch.dir().join("127.0.0.3.sock")).unwrap();
    let mut sockets = Vec::new();
    for round in 0..3 {
        let error = loop {
            match RdsSocket::bind(&node, 0) {
                Ok(socket) => sockets.push(socket),
                Err(error) => break error.to_string(),
            }
            assert!(sockets.len() < 60);
        };
        assert!(error.contains("the node has no free descriptor; raise the limit"), "{error}");
        // The descriptor of a closed socket is available for the next one.
        assert!(sockets.pop().is_some(), "round {round}");
        wait_for("a descriptor", LIMIT, || {
            let socket = RdsSocket::bind(&node, 0).ok()?;
            sockets.push(socket);
            Some(())
        });
    }
    let output = daemon.terminate(LIMIT).ok().stderr;
    let lines = output.lines().filter(|line| line.contains("cannot serve another user")).count();
    let most = 1 + begun.elapsed().as_secs() / 5;
    assert!((1..=most).contains(&(lines as u64)), "{output}");
}
