//! Signals: those with a function, and those that must not end a daemon.

use rtrs_tests::{COMMAND_TIME_MAX, RawNbd, Reply, STOP_TIME_MAX, Stand, wait_for};

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
        wait_for("the line of a signal", COMMAND_TIME_MAX, || {
            let text = std::fs::read_to_string(&log).expect("the log");
            (text.contains(&line) && stand.server.output().contains(&line)).then_some(())
        });
    }
    wait_for("the states", COMMAND_TIME_MAX, || {
        let text = std::fs::read_to_string(&log).expect("the log");
        let (status, counters) = ("state: {", "counters: {");
        let session = "state: session {";
        let logged = text.contains(status) && text.contains(counters);
        (logged && stand.server.output().contains(session)).then_some(())
    });
    assert_eq!(RawNbd::go(stand.client.front(), "vol0").write(0, 0, &[1; 4096]), Reply::Error(0));
    assert_eq!((stand.client.pid(), stand.server.pid()), (client, server), "no one has restarted");
    stand.client.detach();
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn a_session_in_the_background_keeps_no_directory_open() {
    let stand = Stand::memory("16M");
    let dir = std::fs::read_link(format!("/proc/{}/cwd", stand.client.pid())).expect("a directory");
    assert_eq!(dir.to_str(), Some("/"));
    stand.client.detach();
    let _ = stand.server.stop(STOP_TIME_MAX);
}
