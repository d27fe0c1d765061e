//! Tests of IO that the server fails: `list`, `status` and `logs` of the client show it.

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, RawNbd, Reply, STOP_TIME_MAX, Server, consts, free_port, wait_for,
};

const EIO: u32 = 5;
const WRITES: u64 = 5;

/// Number of failed IOs that the log reports: one per line, plus the suppressed ones that it
/// counts.
fn reported(log: &str) -> u64 {
    let lines = log.lines().filter(|line| line.contains("IO failed: I/O error"));
    let left_out = |line: &str| {
        let number = line.split("left_out=").nth(1).and_then(|rest| rest.split(' ').next());
        number.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0)
    };
    lines.map(|line| left_out(line) + u64::from(!line.contains("more IO failed"))).sum()
}

/// Columns of a session's line in `list`.
fn columns(client: &Client, name: &str) -> Vec<String> {
    let list = client.command(&["list"]).ok().stdout;
    let line = list.lines().find(|line| line.starts_with(name)).expect("the session's line");
    line.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn failed_writes_are_in_list_status_and_logs() {
    let server = Server::builder().export("bad=mem:16M,error-rate=1").start();
    let client = Client::attach("bad").path(server.portal()).args(&["--shards", "1"]).start();
    assert_eq!(columns(&client, "bad")[4..6], ["1/1", "0"]);
    let before = client.command(&["status", "bad"]).ok().stdout;
    assert!(!before.contains("failed IO"), "{before}");

    let mut nbd = RawNbd::go(client.front(), "bad");
    for _ in 0..WRITES {
        assert_eq!(nbd.write(0, 8192, &[7; 4096]), Reply::Error(EIO));
    }
    assert_eq!(columns(&client, "bad")[4..6], ["1/1", "5"]);
    let shown = client.command(&["status", "bad"]).ok();
    let _ = shown
        .says("failed IO        5, the last ")
        .says(&format!(" ago: EIO, write of 4096 bytes at offset 8192 on {}\n", server.portal()));
    let errors = client.status()["io_errors"].clone();
    let last = &errors["last"];
    assert_eq!((&errors["count"], &last["errno"]), (&WRITES.into(), &"EIO".into()), "{errors}");
    assert_eq!((&last["op"], &last["offset"]), (&"write".into(), &8192.into()), "{errors}");
    assert_eq!((&last["bytes"], &last["path"]), (&4096.into(), &server.portal().into()));

    let logs = || client.command(&["logs", "bad"]).ok().stdout;
    let log = wait_for("a report of all failed writes", COMMAND_TIME_MAX, || {
        Some(logs()).filter(|log| reported(log) == WRITES)
    });
    let fields = format!(
        "export=\"bad\" op=\"write\" offset=8192 bytes=4096 errno=\"EIO\" path={}",
        server.portal()
    );
    assert!(log.lines().any(|line| line.contains(" WARN ") && line.contains(&fields)), "{log}");
    drop(nbd);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_flush_that_reports_lost_writes_is_in_list_status_and_stats() {
    let portal = format!("tcp://127.0.0.1:{}", free_port());
    let start = || Server::builder().listen(&portal).export("vol0=mem:16M,id=kept").start();
    let first = start();
    let client = Client::attach("vol0").path(&portal).args(&["--reconnect-max=200ms"]).start();
    let mut nbd = RawNbd::go(client.front(), "vol0");
    assert_eq!(nbd.write(0, 0, &[7; 4096]), Reply::Error(0));
    first.crash();
    let second = start();
    assert_eq!(nbd.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(EIO), "its memory is lost");
    assert_eq!(columns(&client, "vol0")[5], "1");
    let shown = client.command(&["status", "vol0"]).ok();
    let _ = shown.says("failed IO        1 (1 flush ended with EIO, as the server may have lost");
    let errors = client.status()["io_errors"].clone();
    assert_eq!((&errors["count"], &errors["lost_writes"]), (&1.into(), &1.into()), "{errors}");
    let stats = client.command(&["stats", "vol0", "-o", "json"]).ok().json();
    assert_eq!(stats["ops"]["flush"]["errors"], 1, "{stats}");
    // The loss is reported only once.
    assert_eq!(nbd.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));
    assert_eq!(columns(&client, "vol0")[5], "1");
    drop(nbd);
    client.detach();
    let _ = second.stop(STOP_TIME_MAX);
}
