//! Tests of a daemon and its environment: signals with a function, signals that must not end a
//! daemon, what a program inherits from the process that starts it, and what a background session
//! retains from its caller.

use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Proc, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, Stand, bin,
    free_port, requires, wait_for,
};

/// Signals that end a process by default and have no function here: USR2, ALRM, STKFLT, XFSZ,
/// VTALRM, PROF, IO, PWR and a real-time signal.
const IGNORED: [&str; 9] = ["12", "14", "16", "25", "26", "27", "29", "30", "40"];

#[test]
fn only_the_usual_signals_end_a_daemon() {
    let mut stand = Stand::memory("16M");
    let (client, server) = (stand.client.pid(), stand.server.pid());
    for name in IGNORED.iter().chain(&["HUP", "USR1"]) {
        stand.client.signal(name);
        stand.server.signal(name);
    }
    let log = stand.client.run_dir().join("vol0.log");
    for number in IGNORED {
        let line = format!("ignoring signal {number}");
        wait_for("the log line for a signal", COMMAND_TIME_MAX, || {
            let text = fs::read_to_string(&log).expect("the log");
            (text.contains(&line) && stand.server.output().contains(&line)).then_some(())
        });
    }
    wait_for("the states", COMMAND_TIME_MAX, || {
        let text = fs::read_to_string(&log).expect("the log");
        let (status, counters) = ("state: {", "counters: {");
        let session = "state: session {";
        let logged = text.contains(status) && text.contains(counters);
        (logged && stand.server.output().contains(session)).then_some(())
    });
    assert_eq!(RawNbd::go(stand.client.front(), "vol0").write(0, 0, &[1; 4096]), Reply::Error(0));
    assert_eq!((stand.client.pid(), stand.server.pid()), (client, server), "neither has restarted");
    stand.client.detach();
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn removed_control_sockets_are_recreated() {
    let mut stand = Stand::memory("16M");
    let files = fs::read_dir(stand.server.run_dir()).expect("the run directory");
    let files = files.map(|file| file.expect("a file").path());
    let mut sockets: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|ending| ending == "srv")).collect();
    sockets.push(stand.client.run_dir().join("vol0.ctl"));
    assert_eq!(sockets.len(), 2, "{sockets:?}");
    sockets.iter().for_each(|socket| fs::remove_file(socket).expect("a control socket"));
    stand.client.signal("HUP");
    stand.server.signal("HUP");
    wait_for("the sockets", COMMAND_TIME_MAX, || {
        sockets.iter().all(|socket| socket.exists()).then_some(())
    });
    assert_eq!(stand.client.status()["state"], "open");
    assert_eq!(stand.server.sessions().len(), 1);
    stand.client.detach();
    let _ = stand.server.stop(STOP_TIME_MAX);
    assert!(sockets.iter().all(|socket| !socket.exists()), "they are removed with their daemons");
}

/// Runs a program with all signals blocked, SIGCHLD ignored, and a full stdout.
const HINDERED: &str = r"
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, b'x')
except BlockingIOError:
    pass
os.set_blocking(writer, True)
os.set_inheritable(reader, True)
os.dup2(writer, 1)
os.execvp(sys.argv[1], sys.argv[1:])
";

fn hindered(program: &str, args: &[&str]) -> Proc {
    let mut command = Command::new("python3");
    command.args(["-c", HINDERED]).arg(bin(program)).args(args);
    Proc::start(command)
}

#[test]
fn daemons_serve_and_end_despite_blocked_signals_and_a_full_stdout() {
    if !requires(&["python3"]) {
        return;
    }
    let scratch = Scratch::new();
    let path = |name: &str| scratch.dir().join(name).display().to_string();
    let portal = format!("tcp://127.0.0.1:{}", free_port());
    let (run, state, socket) = (path("run"), path("state"), path("vol0.sock"));
    let started = |daemon: &mut Proc| {
        let _ = daemon.wait_lines("standard output is not being read", 1, COMMAND_TIME_MAX);
    };
    let listen = ["--listen", &portal, "--run-dir", &run, "--state-dir", &state];
    let mut server =
        hindered("rtrs-server", &[&["--export", "vol0=mem:16M"], &listen[..]].concat());
    started(&mut server);
    let attach = ["attach", "vol0", "--path", &portal, "--socket", &socket, "--run-dir", &run];
    let mut client = hindered("rtrs-client", &[&attach[..], &["--foreground"]].concat());
    started(&mut client);
    let port = free_port().to_string();
    let node = ["node", "--address", "127.0.0.77", "--listen-port", &port, "--socket-dir", &run];
    let mut node = hindered("rds", &node);
    started(&mut node);
    for daemon in [node, client, server] {
        let _ = daemon.terminate(STOP_TIME_MAX).ok();
    }
}

#[test]
fn a_failed_attach_gives_its_reason_even_if_its_starter_ignores_sigchld() {
    if !requires(&["python3"]) {
        return;
    }
    let client = Client::attach("vol0").unattached();
    let portal = format!("tcp://127.0.0.1:{}", free_port());
    let front = client.front().args();
    let ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); \
                    os.execvp(sys.argv[1], sys.argv[1:])";
    let mut attach = Command::new("python3");
    attach.args(["-c", ignoring]).arg(bin("rtrs-client"));
    attach.args(["attach", "vol0", "--path", &portal, &front[0], &front[1], "--run-dir"]);
    attach.arg(client.run_dir());
    let _ = Proc::start(attach).wait(COMMAND_TIME_MAX).code(1).says("connection refused");
}

#[test]
fn a_session_in_the_background_keeps_no_directory_open() {
    let stand = Stand::memory("16M");
    let dir = fs::read_link(format!("/proc/{}/cwd", stand.client.pid())).expect("a directory");
    assert_eq!(dir.to_str(), Some("/"));
    stand.client.detach();
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn a_session_in_the_background_keeps_no_descriptor() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let client = Client::attach("vol0").unattached();
    // Descriptor 9 is the write end of a pipe, which the attach command inherits.
    let mut attach = Command::new("sh")
        .args(["-c", "exec \"$0\" \"$@\" 9>&1 >/dev/null"])
        .arg(bin("rtrs-client"))
        .args(["attach", "vol0", "--path", server.portal()])
        .args(client.front().args())
        .arg("--run-dir")
        .arg(client.run_dir())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start a shell");
    let mut pipe = attach.stdout.take().expect("a pipe");
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(pipe.read_to_end(&mut Vec::new()).is_ok()));
    assert_eq!(ended.recv_timeout(COMMAND_TIME_MAX), Ok(true), "the pipe has to end");
    assert!(attach.wait().expect("wait for the shell").success());
    assert_eq!(client.status()["state"], "open", "the session is alive");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_session_whose_attach_command_was_killed_at_its_start_ends() {
    let client = Client::attach("vol0").unattached();
    let portal = format!("tcp://127.0.0.1:{}", free_port());
    let front = client.front().args();
    let run_dir = client.run_dir().display().to_string();
    let words = ["attach", "vol0", "--path", &portal, &front[0], &front[1]];
    let mut daemon = Command::new(bin("rtrs-client"));
    // The daemon is started as by an attach command that ends before the daemon notices.
    daemon.args(words).args(["--retry-for", "10m", "--run-dir", &run_dir]);
    daemon.env("RTRS_CLIENT_BACKGROUND_LOG", client.run_dir().join("vol0.log"));
    daemon.env("RTRS_CLIENT_STARTER", "1");
    let _ = Proc::start(daemon).wait(COMMAND_TIME_MAX).code(1).says("the attach command has ended");
    let left = fs::read_dir(client.run_dir()).expect("the run directory");
    let left: Vec<_> = left.map(|entry| entry.expect("a file").file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}
