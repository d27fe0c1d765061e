//! Tests of `top` for both daemons: rates that agree with the counters, plain output, and restoring
//! the terminal.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Innocent, Proc, STOP_TIME_MAX, Server, bin, requires, wait_for,
};
use serde_json::Value;

/// Starts a server with two addresses, and a session over both.
fn start() -> (Server, Client) {
    let server = Server::builder().export("vol0=mem:64M").listen("tcp://127.0.0.1:0");
    let server = server.listen("tcp://127.0.0.2:0").start();
    let [first, second] = server.portals() else { panic!("two portals") };
    let client = Client::attach("vol0").path(first).path(second).args(&["--shards=2"]).start();
    client.wait_paths(2);
    (server, client)
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("no {key} in {row}"))
}

/// Returns the session's counters: IOs, bytes read and written.
fn done(client: &Client) -> [f64; 3] {
    let stats = client.command(&["stats", "vol0", "-o", "json"]).ok().json();
    let ops = stats["ops"].as_object().expect("operations");
    let ios = ops.values().map(|op| number(op, "count")).sum();
    [ios, number(&ops["read"], "bytes"), number(&ops["write"], "bytes")]
}

/// Checks that the rates cover a significant part of the time between the two snapshots of the
/// counters. The server counts an IO before its answer arrives at the client, which has one IO in
/// flight.
fn agrees(view: &Value, row: &Value, before: [f64; 3], after: [f64; 3]) {
    let seconds = number(row, "interval_s");
    for ((key, one_io), (before, after)) in
        [("ios_per_s", 1.0), ("read_bytes_per_s", 4096.0), ("write_bytes_per_s", 4096.0)]
            .into_iter()
            .zip(before.into_iter().zip(after))
    {
        let in_interval = number(row, key) * seconds;
        let all = after - before;
        assert!(in_interval <= all + one_io + 0.5, "{key}: {in_interval} of {all} in {view}");
        assert!(in_interval >= all / 20.0, "{key}: {in_interval} of {all} in {view}");
    }
}

#[test]
fn rates_under_load_agree_with_the_counters() {
    let (server, client) = start();
    let load = Innocent::start(client.front(), "vol0");
    load.progress();
    let before = done(&client);
    let once = ["top", "--once", "--interval", "2s", "-o", "json"];
    let view = client.command(&once).ok().json();
    let after = done(&client);
    let [session] = view["sessions"].as_array().expect("sessions").as_slice() else {
        panic!("one session: {view}")
    };
    assert_eq!((&session["name"], &session["state"]), (&"vol0".into(), &"open".into()));
    assert_eq!((&session["paths_connected"], &session["paths_total"]), (&2.into(), &2.into()));
    agrees(&view, session, before, after);
    let rate = |row: &Value| number(row, "ios_per_s");
    let paths = session["paths"].as_array().expect("paths");
    let sum: f64 = paths.iter().map(rate).sum();
    // The samples are not simultaneous, so the sums may differ a little.
    assert!((sum - rate(session)).abs() <= rate(session) / 2.0 + 5.0, "{view}");
    let (p50, p99) = (number(session, "latency_p50_us"), number(session, "latency_p99_us"));
    assert!(0.0 < p50 && p50 <= p99 && p99 < 60e6, "{view}");
    assert!(number(session, "errors_per_s").abs() < f64::EPSILON, "{view}");

    let before = done(&client);
    let view = server.command(&once).ok().json();
    let after = done(&client);
    let (sessions, exports) = (&view["sessions"], &view["exports"]);
    assert_eq!((&sessions[0]["state"], &exports[0]["name"]), (&"up".into(), &"vol0".into()));
    agrees(&view, &exports[0], before, after);
    agrees(&view, &sessions[0], before, after);
    assert_eq!(sessions[0]["paths"].as_array().map(Vec::len), Some(2), "{view}");
    assert!(number(&exports[0], "latency_p99_us") > 0.0, "{view}");
    load.check();
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn top_continues_while_sessions_start_and_end() {
    let (server, client) = start();
    let mut command = Command::new(bin("rtrs-client"));
    command.args(["top", "--interval", "200ms", "-o", "json", "--run-dir"]);
    command.arg(client.run_dir()).stdout(Stdio::piped());
    let mut top = command.spawn().expect("start rtrs-client top");
    let mut lines = BufReader::new(top.stdout.take().expect("a pipe")).lines();
    let mut next = || -> Value {
        let line = lines.next().expect("another line").expect("a line");
        serde_json::from_str(&line).expect("a line of JSON")
    };
    assert_eq!(next()["sessions"][0]["name"], "vol0");
    assert_eq!(client.command(&["top", "other", "--once"]).code(1).stdout, "");
    let _ = client.command(&["detach", "vol0"]).ok();
    wait_for("the session to disappear", COMMAND_TIME_MAX, || {
        next()["sessions"].as_array()?.is_empty().then_some(())
    });
    top.kill().expect("end rtrs-client top");
    let _ = top.wait();
    let mut server_top = Command::new(bin("rtrs-server"));
    server_top.args(["top", "--interval", "100ms", "--count", "200", "--run-dir"]);
    server_top.arg(server.run_dir());
    let mut server_top = Proc::start(server_top);
    let _ = server_top.wait_lines("SESSIONS", 1, COMMAND_TIME_MAX);
    // No interval ends while the server stops, so the last one has nothing to show.
    server_top.signal("STOP");
    let _ = server.stop(STOP_TIME_MAX);
    server_top.signal("CONT");
    let ended = server_top.wait(COMMAND_TIME_MAX).code(1);
    let _ = ended.says("no server has a control socket in ");
}

#[test]
fn plain_output_ends_with_its_reader() {
    let (server, client) = start();
    let once = client.command(&["top", "vol0", "--once", "--interval", "100ms"]).ok().stdout;
    let lines: Vec<&str> = once.lines().collect();
    assert!(lines[0].starts_with("SESSIONS ") && lines[0].ends_with(" err/s"), "{once}");
    assert!(lines[1].starts_with("vol0 ") && lines[1].contains(" open ") && lines.len() == 4);
    assert!(lines[2].starts_with("  tcp://127.0.0.1:") && lines[2].contains(" connected "));
    assert!(!once.contains('\u{1b}'), "{once}");
    let mut shell = Command::new("bash");
    shell.args(["-o", "pipefail", "-c", "\"$@\" | head -n 1", "bash"]);
    shell.arg(bin("rtrs-client")).args(["top", "--interval", "100ms", "--run-dir"]);
    shell.arg(client.run_dir());
    let ended = Proc::start(shell).wait(COMMAND_TIME_MAX).ok();
    assert!(ended.stdout.starts_with("SESSIONS ") && ended.stdout.lines().count() == 1);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

/// Runs a program on its own terminal: `WAYS COMMAND...`. For each way of ending it checks that the
/// program changed the terminal's settings and restored them.
const ON_A_TERMINAL: &str = r#"
import fcntl, os, pty, re, select, signal, struct, subprocess, sys, termios, time

def expect(master, wanted, seen):
    end = time.monotonic() + 60
    while wanted not in seen[0]:
        assert time.monotonic() < end, (wanted, seen[0])
        if select.select([master], [], [], 0.1)[0]:
            seen[0] += os.read(master, 65536)

def is_raw(terminal):
    return termios.tcgetattr(terminal)[3] & (termios.ICANON | termios.ECHO) == 0

def wait(child):
    return child.wait(timeout=60)

def start(terminal, command):
    # Like a shell: in a process group of its own, which owns the terminal.
    def own():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    return subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal,
                            preexec_fn=own)

def run(way, command):
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    before = termios.tcgetattr(terminal)
    child = start(terminal, command)
    seen = [b""]
    expect(master, b"SESSIONS", seen)
    assert is_raw(terminal), "not raw"
    assert seen[0].startswith(b"\x1b[?1049h\x1b[?25l"), seen
    for line in re.split(rb"\n|\x1b\[H", seen[0]):
        assert len(re.sub(rb"\x1b\[[?0-9]*[A-Za-z]|\r", b"", line)) <= 60, line
    if way == "keys":
        for key, wanted in [(b"i", b"sorted by IO/s"), (b"h", b"Sort by:"), (b"h", b"SESSIONS"),
                            (b"p", b"SESSIONS"), (b"l", b"sorted by p99 us")]:
            seen[0] = b""
            os.write(master, key)
            expect(master, wanted, seen)
        os.write(master, b"q")
        assert wait(child) == 0
    elif way == "count":
        assert wait(child) == 0
    elif way == "stop":
        child.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        expect(master, b"\x1b[?25h\x1b[?1049l", seen)
        assert termios.tcgetattr(terminal) == before, "not restored by SIGTSTP"
        seen[0] = b""
        child.send_signal(signal.SIGCONT)
        expect(master, b"\x1b[?1049h\x1b[?25l", seen)
        assert is_raw(terminal), "not raw again"
        os.write(master, b"q")
        assert wait(child) == 0
    elif way == "ctrl-c":
        os.write(master, b"\x03")
        assert wait(child) == -signal.SIGINT
    else:
        child.send_signal(getattr(signal, way))
        assert wait(child) == -getattr(signal, way)
    expect(master, b"\x1b[?25h\x1b[?1049l", seen)
    assert termios.tcgetattr(terminal) == before, "not restored by " + way

for way in sys.argv[1].split(","):
    more = ["--count", "2"] if way == "count" else []
    run(way, sys.argv[2:] + more)
    print("ok", way)
"#;

#[test]
fn the_terminal_is_restored() {
    if !requires(&["python3"]) {
        return;
    }
    let (server, client) = start();
    let run = |ways: &str, program: &str, run_dir: &std::path::Path| {
        let mut python = Command::new("python3");
        python.args(["-c", ON_A_TERMINAL, ways]).arg(bin(program));
        python.args(["top", "--interval", "200ms", "--run-dir"]).arg(run_dir);
        let ended = Proc::start(python).wait(Duration::from_secs(600)).ok();
        assert_eq!(ended.stdout.lines().count(), ways.split(',').count(), "{}", ended.stderr);
    };
    run("keys,count,stop,ctrl-c,SIGTERM,SIGHUP,SIGQUIT", "rtrs-client", client.run_dir());
    run("keys", "rtrs-server", &server.run_dir());
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
