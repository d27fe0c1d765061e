//! Tests of daemons and commands running as real processes on the loopback interface: attach, list,
//! status, stats, detach, bench; signals and restarts; resource usage of idle and busy daemons.

use std::io::{Read, Seek, SeekFrom, Write};
use std::process::Command;
use std::time::{Duration, Instant};

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Front, Proc, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server,
    Stand, bin, consts, cpu_time, free_port, nbd_client, peak_memory, quick, requires,
    resident_memory, run, sparse_file, wait_for,
};
use serde_json::Value;

/// Whether `word` is a string anywhere inside `value`.
fn mentions(value: &Value, word: &str) -> bool {
    match value {
        Value::String(text) => text == word,
        Value::Array(items) => items.iter().any(|item| mentions(item, word)),
        Value::Object(fields) => {
            fields.iter().any(|(key, item)| key == word || mentions(item, word))
        }
        _ => false,
    }
}

/// Returns the sum of all numbers inside `value`.
fn total(value: &Value) -> f64 {
    match value {
        Value::Number(number) => number.as_f64().unwrap_or(0.0),
        Value::Array(items) => items.iter().map(total).sum(),
        Value::Object(fields) => fields.values().map(total).sum(),
        _ => 0.0,
    }
}

#[test]
fn attach_list_status_stats_detach() {
    let server = Server::builder()
        .export("vol0=mem:64M")
        .listen("tcp://127.0.0.1:0")
        .listen("tcp://127.0.0.2:0")
        .start();
    let portals = server.portals().to_vec();
    let client = Client::attach("vol0").path(&portals[0]).path(&portals[1]).start();
    client.wait_paths(2);
    let pid = client.pid();

    let list = client.command(&["list", "-o", "json"]).ok().json();
    assert!(mentions(&list, "vol0"), "{list}");
    let _ = client.command(&["list"]).ok().says("vol0");

    let status = client.command(&["status", "vol0", "-o", "json"]).ok().json();
    let paths = status["paths"].as_array().expect("a list of paths in the status");
    assert_eq!(paths.len(), 2, "{status}");
    for portal in &portals {
        let address = portal.strip_prefix("tcp://").expect("a tcp portal");
        assert!(status.to_string().contains(address), "no {address} in {status}");
    }
    for path in paths {
        assert!(mentions(path, "connected"), "{path}");
    }
    assert_eq!(status["pid"], pid, "{status}");
    let _ = client.command(&["status", "vol0"]).ok().says("127.0.0.2");

    let before = client.command(&["stats", "vol0", "-o", "json"]).ok().json();
    let mut nbd = nbd_client(&client);
    nbd.write_all(&[7; 1 << 16]).expect("write");
    nbd.rewind().expect("seek");
    nbd.read_exact(&mut [0; 1 << 16]).expect("read");
    drop(nbd);
    let after = client.command(&["stats", "vol0", "-o", "json"]).ok().json();
    assert!(total(&after) > total(&before), "IO left no trace in the stats: {after}");
    let _ = client.command(&["stats", "vol0"]).ok();

    client.detach();
    let Front::Unix(socket) = client.front() else { panic!("expected a unix socket") };
    assert!(!socket.exists(), "detach left the NBD socket behind");
    let list = client.command(&["list", "-o", "json"]).ok().json();
    assert!(!mentions(&list, "vol0"), "{list}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_search_path_exports_the_files_below_it() {
    let scratch = Scratch::new();
    std::fs::create_dir_all(scratch.path("vols/host")).expect("a directory");
    sparse_file(&scratch.path("vols/vol0"), 1 << 20);
    sparse_file(&scratch.path("outside"), 1 << 20);
    std::os::unix::fs::symlink("../outside", scratch.path("vols/link")).expect("a link");
    let server = Server::builder().args(&["--search-path", &scratch.text("vols")]).start();
    for name in ["host/none", "link", "../outside", "host"] {
        let (client, done) = Client::attach(name).path(server.portal()).try_start();
        let _ = done.code(1).says(name);
        assert!(client.pids().is_empty(), "a refused attach left a process behind");
    }
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut nbd = nbd_client(&client);
    nbd.write_all(&[7; 4096]).expect("write");
    drop(nbd);
    for words in [&["export", "remove", "vol0"][..], &["export", "set", "vol0", "ro"]] {
        let refused = server.command(words).code(1);
        let _ = refused.says("a client opened it below search-path").says("session evict");
    }
    client.detach();
    // The file is closed with its last session.
    let file = std::fs::File::open(scratch.path("vols/vol0")).expect("the file");
    wait_for("the file to be unlocked", STOP_TIME_MAX, || file.try_lock().ok());
    assert_eq!(std::fs::read(scratch.path("vols/vol0")).expect("read")[..4096], [7; 4096]);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn attach_in_the_foreground_exits_cleanly_on_sigterm() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let mut client = Client::attach("vol0").path(server.portal()).start_foreground();
    let mut nbd = nbd_client(&client);
    nbd.write_all(&[1; 4096]).expect("write");
    drop(nbd);
    assert!(mentions(&client.command(&["list", "-o", "json"]).ok().json(), "vol0"));
    let _ = client.take_foreground().terminate(STOP_TIME_MAX).code(0);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn detach_ends_a_session_in_the_foreground() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let mut client = Client::attach("vol0").path(server.portal()).start_foreground();
    let _ = client.command(&["detach", "vol0"]).ok();
    let _ = client.take_foreground().wait(STOP_TIME_MAX).code(0);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn sigterm_ends_a_background_session() {
    let stand = Stand::memory("16M");
    stand.client.signal("TERM");
    stand.client.wait_gone(STOP_TIME_MAX);
    let Front::Unix(socket) = stand.client.front() else { panic!("expected a unix socket") };
    assert!(!socket.exists(), "SIGTERM left the NBD socket behind");
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn sigterm_completes_io_in_flight() {
    let held = Scratch::new();
    let server = Server::builder().program("rtrs-held").env("RTRS_HELD_DIR", held.text(""));
    let server = server.export("vol0=mem:16M").start();
    let file = |name: &str| held.path(name).exists().then_some(());
    std::fs::write(held.path("hold"), "").expect("a file");
    wait_for("the disk to hold writes", COMMAND_TIME_MAX, || file("armed"));
    let mut client = Client::attach("vol0").path(server.portal()).start_foreground();
    let mut raw = RawNbd::go(client.front(), "vol0");
    let cookie = raw.send_request(0, consts::CMD_WRITE, 4096, 4096);
    raw.send(&[9; 4096]);
    wait_for("the write", COMMAND_TIME_MAX, || file("holding"));
    let mut session = client.take_foreground();
    session.signal("TERM");
    std::fs::write(held.path("release"), "").expect("a file");
    assert_eq!(raw.simple_reply(cookie), Reply::Error(0), "the write in flight");
    drop(raw);
    let _ = session.wait(STOP_TIME_MAX).code(0);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_busy_server_stops_within_a_bound_on_sigterm() {
    let stand = Stand::memory("64M");
    let front = stand.client.front().clone();
    let busy = std::thread::spawn(move || {
        let mut raw = RawNbd::go(&front, "vol0");
        let mut done = 0_u64;
        // Until the server has ended and the session reports an error, or has closed.
        while done < 10_000_000 && raw.write(0, (done % 1000) * 4096, &[3; 4096]) == Reply::Error(0)
        {
            done += 1;
        }
        done
    });
    wait_for("some IO", COMMAND_TIME_MAX, || {
        (stand.server.sessions()[0]["io"]["writes"].as_u64() > Some(10)).then_some(())
    });
    let _ = stand.server.stop(STOP_TIME_MAX);
    // The session is left without a path; the time that it takes to end must be bounded too.
    stand.client.signal("TERM");
    stand.client.wait_gone(STOP_TIME_MAX);
    assert!(busy.join().expect("the busy client") > 0, "no IO before the signal");
}

/// Returns a full pipe that is never read.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut filler = writer.try_clone().expect("its writing end again");
    let (sender, fills) = std::sync::mpsc::channel();
    // The thread blocks in its last write until the reading end is closed.
    std::thread::spawn(
        move || {
            while filler.write_all(&[b'.'; 512]).is_ok() && sender.send(()).is_ok() {}
        },
    );
    while fills.recv_timeout(Duration::from_millis(300)).is_ok() {}
    (reader, writer)
}

#[test]
fn an_unread_log_blocks_nothing() {
    let (_unread, full) = full_pipe();
    let stderr = || Some(full.try_clone().expect("the pipe again").into());
    let mut command = Command::new(bin("rtrs-server"));
    command.args(["--export", "v=mem:16M", "--listen", "tcp://127.0.0.1:0", "--log", "debug"]);
    let mut server = Proc::start_with(command, stderr());
    let portal = server.wait_lines("listening on ", 1, STOP_TIME_MAX).remove(0);
    for _ in 0..2 {
        let mut command = Command::new(bin("rtrs-client"));
        command.args(["bench", "v", "--path", &portal, "--runtime", "1s", "--log", "debug"]);
        let bench = Proc::start_with(command, stderr()).wait(COMMAND_TIME_MAX).ok();
        assert!(bench.stdout.contains(" 0 errors"), "{bench:#?}");
    }
    let _ = server.terminate(STOP_TIME_MAX).ok();
}

#[test]
fn a_failure_sets_the_exit_code_even_if_its_output_is_lost() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    for (program, args) in [
        ("rtrs-client", &["status", "nothing-of-that-name"][..]),
        ("rtrs-server", &["--export", "/nonexistent/file"][..]),
    ] {
        let mut command = Command::new(bin(program));
        command.args(args);
        let stderr = writer.try_clone().expect("the pipe again").into();
        let _ = Proc::start_with(command, Some(stderr)).wait(COMMAND_TIME_MAX).code(1);
    }
}

#[test]
fn a_session_survives_a_server_restart() {
    let scratch = Scratch::new();
    sparse_file(&scratch.path("vol0.img"), 16 << 20);
    let export = format!("vol0={}", scratch.text("vol0.img"));
    let listen = format!("tcp://127.0.0.1:{}", free_port());
    let start = || Server::builder().export(&*export).listen(&*listen).start();
    let server = start();
    let client = Client::attach("vol0").path(&*listen).start();
    let mut nbd = nbd_client(&client);
    nbd.write_all(&[0x42; 4096]).expect("write before the restart");
    drop(nbd);
    server.crash();
    let server = start();
    let mut back = [0; 4096];
    // IO may fail until the path reconnects; every attempt ends on its own.
    wait_for("IO after a restart of the server", Duration::from_secs(60), || {
        let mut raw = RawNbd::go(client.front(), "vol0");
        raw.read(0, &mut back).ok()
    });
    assert_eq!(back, [0x42; 4096]);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn detach_and_attach_again() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let mut byte = 0;
    for _ in 0..5 {
        let client = Client::attach("vol0").path(server.portal()).start();
        let mut nbd = nbd_client(&client);
        let mut back = [0; 512];
        nbd.read_exact(&mut back).expect("read");
        assert_eq!(back, [byte; 512], "data of the previous session");
        byte += 1;
        nbd.seek(SeekFrom::Start(0)).expect("seek");
        nbd.write_all(&[byte; 512]).expect("write");
        drop(nbd);
        client.detach();
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_killed_session_is_listed_as_dead_and_can_be_reattached() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let client = Client::attach("vol0").path(server.portal()).start();
    client.signal("KILL");
    client.wait_gone(STOP_TIME_MAX);
    let dead = serde_json::json!({
        "name": "vol0", "state": "dead", "reason": "its process has ended", "pid": null,
    });
    let list = client.command(&["list", "-o", "json"]).ok().json();
    assert_eq!(list, serde_json::json!([dead]));
    assert_eq!(client.status(), dead);
    let _ = client
        .command(&["list"])
        .ok()
        .says("attach it again, or detach it if it is no longer needed");
    let _ = client.command(&["detach", "vol0"]).ok().says("vol0 was dead");
    assert_eq!(client.command(&["list", "-o", "json"]).ok().json(), serde_json::json!([]));
    let _ = client.command(&["status", "vol0"]).code(1).says("not attached");
    let _ = client.command(&["detach", "vol0"]).code(1).says("not attached");
    // The dead session's control and NBD sockets do not block a new attach.
    let words = ["attach", "vol0", "--path", server.portal()].map(str::to_owned);
    let words: Vec<_> = words.into_iter().chain(client.front().args()).collect();
    wait_for("the server to let the dead session go", COMMAND_TIME_MAX, || {
        (client.command(&words).code == Some(0)).then_some(())
    });
    assert_eq!(RawNbd::go(client.front(), "vol0").write(0, 0, &[1; 512]), Reply::Error(0));
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_stopped_session_is_listed_as_unresponsive() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let client = Client::attach("vol0").path(server.portal()).start();
    client.signal("STOP");
    let list = client.command(&["list", "-o", "json"]).ok().json();
    assert_eq!((&list[0]["name"], &list[0]["state"]), (&"vol0".into(), &"unresponsive".into()));
    assert_eq!(list[0]["pid"], client.pid(), "{list}");
    assert_eq!(client.status()["state"], "unresponsive");
    let _ = client.command(&["status", "vol0"]).code(3).says("let it continue with kill -CONT");
    client.signal("CONT");
    // The server may have ended the session's path in the meantime.
    wait_for("IO of the session to resume", COMMAND_TIME_MAX, || {
        (client.status()["state"] == "open").then_some(())
    });
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_missing_run_directory_is_an_error_if_configured() {
    let scratch = Scratch::new();
    let list = |dir: &str| {
        let mut command = Command::new(bin("rtrs-client"));
        command.args(["list", "--run-dir", dir]);
        Proc::start(command).wait(COMMAND_TIME_MAX)
    };
    let _ = list(&scratch.text("mistyped")).code(1).says("there is no run directory");
    std::fs::create_dir(scratch.path("run")).expect("a directory");
    let _ = list(&scratch.text("run")).ok();
    let all = run(bin("rtrs-client"), &["list", "--all", "--run-dir", "/x"], COMMAND_TIME_MAX);
    let _ = all.code(2).says("drop --run-dir");
}

#[test]
fn concurrent_attaches_of_one_name() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let (client, done) = Client::attach("vol0").path(server.portal()).try_start();
    let _ = done.ok();
    client.detach();
    let log = client.run_dir().join("vol0.log");
    for round in 0..5 {
        let finished: Vec<Finished> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|which| {
                    let socket = client.run_dir().join(format!("{which}.sock"));
                    let socket = socket.to_str().expect("a plain path").to_owned();
                    let (client, portal) = (&client, server.portal());
                    scope.spawn(move || {
                        client.command(&["attach", "vol0", "--path", portal, "--socket", &socket])
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("an attach")).collect()
        });
        let (good, bad): (Vec<_>, Vec<_>) = finished.iter().partition(|f| f.code == Some(0));
        assert_eq!((good.len(), bad.len()), (1, 3), "round {round}: {finished:#?}");
        for refused in bad {
            let named = ["already", "being attached"].iter().any(|w| refused.stderr.contains(w));
            assert!(named && refused.code == Some(1), "round {round}: {refused:#?}");
        }
        // Refused attaches did not touch the running session's log.
        let text = wait_for("the open in the log", COMMAND_TIME_MAX, || {
            std::fs::read_to_string(&log).ok().filter(|text| text.contains("device open"))
        });
        assert!(!text.contains('\0'), "round {round}: {text:?}");
        client.detach();
    }
    let _ = server.stop(STOP_TIME_MAX);
}

/// Returns a stand whose session was detached and whose server is stopped, so that connections to
/// it wait, and a running `attach` in its run directory.
fn attach_under_way() -> (Stand, Proc) {
    let mut stand = Stand::memory("16M");
    stand.client.detach();
    stand.server.signal("STOP");
    let mut command = Command::new(bin("rtrs-client"));
    command
        .args(["attach", "vol0", "--path", stand.server.portal()])
        .args(stand.client.front().args());
    command.arg("--run-dir").arg(stand.client.run_dir());
    command.args(["--connect-timeout", "10m"]);
    let attach = Proc::start(command);
    wait_for("the attach to be listed", COMMAND_TIME_MAX, || {
        let begin = Instant::now();
        let list = stand.client.command(&["list"]).ok();
        assert!(begin.elapsed() < Duration::from_secs(60), "list took {:?}", begin.elapsed());
        list.stdout.contains("connecting").then_some(())
    });
    (stand, attach)
}

#[test]
fn an_attach_in_progress_can_be_detached() {
    let (mut stand, attach) = attach_under_way();
    let _ = stand.client.command(&["detach", "vol0"]).ok();
    let _ = attach.wait(COMMAND_TIME_MAX).code(1).says("detached before it was open");
    stand.client.wait_gone(STOP_TIME_MAX);
    assert!(!stand.client.command(&["list"]).ok().stdout.contains("vol0"));
    stand.server.signal("CONT");
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn an_attach_ends_with_its_killed_caller() {
    let (mut stand, mut attach) = attach_under_way();
    attach.signal("KILL");
    let _ = attach.wait(COMMAND_TIME_MAX);
    stand.client.wait_gone(COMMAND_TIME_MAX);
    stand.server.signal("CONT");
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn repeated_attach_and_detach_leaves_nothing() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let held = || {
        let count = |what: &str| {
            let dir = std::fs::read_dir(format!("/proc/{}/{what}", server.pid()));
            dir.expect("the server's entry in procfs").count()
        };
        (count("fd"), count("task"))
    };
    let client = Client::attach("vol0").path(server.portal()).start();
    client.detach();
    let before = held();
    let words = ["attach", "vol0", "--path", server.portal()].map(str::to_owned);
    let words: Vec<_> = words.into_iter().chain(client.front().args()).collect();
    for _ in 0..if quick() { 10 } else { 50 } {
        // Detach returns once the name is free, so the next attach need not wait.
        let _ = client.command(&words).ok();
        let _ = client.command(&["detach", "vol0"]).ok();
    }
    client.wait_gone(STOP_TIME_MAX);
    wait_for("the server's descriptors and threads to go", STOP_TIME_MAX, || {
        let now = held();
        (now.0 <= before.0 && now.1 <= before.1).then_some(())
    });
    let left = std::fs::read_dir(client.run_dir()).expect("the run directory");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(left, ["vol0.log"], "files left behind");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn detach_without_a_path_is_bounded() {
    let stand = Stand::memory("16M");
    let mut raw = RawNbd::go(stand.client.front(), "vol0");
    stand.server.crash();
    let status = || stand.client.status();
    wait_for("the path to be detected as dead", COMMAND_TIME_MAX, || {
        (status()["state"] == "no-path").then_some(())
    });
    assert_eq!(status()["size"], 16 << 20, "the size is known without a path");
    // This request waits for a path, and must not delay the detach beyond its limit.
    let _ = raw.send_request(0, consts::CMD_READ, 0, 512);
    wait_for("the read", COMMAND_TIME_MAX, || status()["oldest_io"].is_object().then_some(()));
    let begin = Instant::now();
    let detach = stand.client.command(&["detach", "vol0", "--force", "--within", "500ms"]);
    let _ = detach.code(1).says("1 IO request did not end in time");
    // Without its own limit, IO waits a minute for a path.
    assert!(begin.elapsed() < Duration::from_secs(50), "took {:?}", begin.elapsed());
    stand.client.wait_gone(STOP_TIME_MAX);
}

#[test]
fn printed_uris_work() {
    if !requires(&["nbdinfo"]) {
        return;
    }
    let name = "a b%?c#d/e";
    let server = Server::builder().export(format!("{name}=mem:16M")).start();
    let scratch = Scratch::new();
    let front = Front::Unix(scratch.path("an odd & name.sock"));
    let (client, done) = Client::attach(name).path(server.portal()).front(front).try_start();
    let printed = done.ok().stdout;
    let (_, uri) = printed.trim().split_once(" attached: ").expect("a URI");
    let _ = run("nbdinfo", &["--size", uri], COMMAND_TIME_MAX).ok().says("16777216");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

/// Whether `path` has data that the file system has not yet allocated on the disk (delayed
/// allocation, as in ext4 and xfs until the data is written back).
fn has_unplaced_data(path: &str) -> bool {
    run("filefrag", &["-v", path], COMMAND_TIME_MAX).ok().stdout.contains("delalloc")
}

#[test]
fn fua_and_flush_reach_the_disk() {
    if !requires(&["filefrag"]) {
        return;
    }
    // The file is not in memory: the test checks what the file system was made to write.
    let dir = tempfile::Builder::new().prefix("rtrs-").tempdir_in("/var/tmp").expect("a directory");
    let file = dir.path().join("vol0.img");
    sparse_file(&file, 16 << 20);
    let path = file.to_str().expect("a plain path");
    let server = Server::builder().export(format!("vol0={path},direct=off")).start();
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(0));
    if has_unplaced_data(path) {
        assert_eq!(raw.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));
        assert!(!has_unplaced_data(path), "a flush left data in memory");
        let fua = consts::CMD_FLAG_FUA;
        assert_eq!(raw.write(fua, 1 << 20, &[2; 4096]), Reply::Error(0));
        assert!(!has_unplaced_data(path), "a write with FUA stayed in memory");
        // The kernel may write back on its own, but not after each of these writes.
        let is_left = (2..16).any(|mib| {
            assert_eq!(raw.write(0, mib << 20, &[3; 4096]), Reply::Error(0));
            has_unplaced_data(path)
        });
        assert!(is_left, "no plain write was left to the page cache");
    } else {
        println!("skipped: the file system of /var/tmp does not report delayed allocation");
    }
    drop(raw);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn detach_does_not_wait_for_an_idle_client() {
    let stand = Stand::memory("16M");
    let mut raw = RawNbd::go(stand.client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[1; 512]), Reply::Error(0));
    stand.client.detach();
    raw.expect_closed();
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn two_exports_two_sessions_one_server() {
    let server = Server::builder().export("a=mem:8M").export("b=mem:16M").start();
    let a = Client::attach("a").path(server.portal()).start();
    let front = Front::Unix(a.run_dir().join("b.sock"));
    let words = ["attach", "b", "--path", server.portal()].map(str::to_owned);
    let _ = a.command(&words.into_iter().chain(front.args()).collect::<Vec<_>>()).ok();
    let list = a.command(&["list", "-o", "json"]).ok().json();
    assert!(mentions(&list, "a") && mentions(&list, "b"), "{list}");
    assert_eq!(RawNbd::go(&front, "b").write(0, 0, &[1; 512]), Reply::Error(0));
    let mut back = [9; 512];
    assert_eq!(RawNbd::go(a.front(), "a").read(0, &mut back), Ok(()));
    assert_eq!(back, [0; 512], "a write to one export showed in the other");
    let _ = a.command_without_users(&["detach", "b"]).ok();
    let list = a.command(&["list", "-o", "json"]).ok().json();
    assert!(mentions(&list, "a") && !mentions(&list, "b"), "{list}");
    a.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn bench_prints_json() {
    let server = Server::builder().export("vol0=mem:64M").start();
    for rw in ["randread", "randwrite", "randrw", "read", "write"] {
        let args = ["bench", "vol0", "--path", server.portal(), "--rw", rw, "--bs", "4k"];
        let more = ["--iodepth", "8", "--runtime", "1s", "-o", "json", "--yes"];
        let all: Vec<&str> = args.into_iter().chain(more).collect();
        let json = run(bin("rtrs-client"), &all, COMMAND_TIME_MAX).ok().json();
        assert!(json["iops"].as_f64() > Some(0.0), "{rw}: {json}");
        assert!(json["bw_bytes"].as_f64() > Some(0.0), "{rw}: {json}");
        for key in ["mean", "p50", "p99"] {
            assert!(json["lat_us"][key].as_f64() > Some(0.0), "{rw}: {key}: {json}");
        }
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn help_version_and_invalid_usage() {
    for name in ["rtrs-server", "rtrs-client"] {
        let run = |args: &[&str]| run(bin(name), args, COMMAND_TIME_MAX);
        let _ = run(&["--help"]).ok().says(name);
        let _ = run(&["--version"]).ok().says(env!("CARGO_PKG_VERSION"));
        let _ = run(&["--no-such-flag"]).code(2).says("--no-such-flag");
    }
}

#[test]
fn the_shipped_configurations_are_valid() {
    let configs = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs");
    // The files contain defaults; settings without a default are passed as flags.
    let listen = "tcp://127.0.0.1:0";
    let words = &["--export", "vol0=mem:1M", "--listen", listen][..];
    let server = ("rtrs-server", "server.yaml", words);
    let attach = &["attach", "vol0", "--path", "tcp://127.0.0.1:1", "--socket", "s"][..];
    for (name, file, words) in [server, ("rtrs-client", "client.yaml", attach)] {
        let run = |path: &str, what| {
            let args = [words, &["--config", path, what]].concat();
            run(bin(name), &args, COMMAND_TIME_MAX).ok()
        };
        let path = format!("{configs}/{file}");
        let _ = run(&path, "--check");
        let printed = run(&path, "--print-config").stdout;
        assert!(!printed.trim().is_empty(), "{name} printed no configuration");
        // The printed text is a valid configuration.
        let scratch = Scratch::new();
        let again = scratch.text("again.yaml");
        std::fs::write(&again, &printed).expect("write it");
        let _ = run(&again, "--check");
    }
}

#[test]
fn an_unknown_key_is_reported_with_its_line() {
    let scratch = Scratch::new();
    let path = scratch.text("server.yaml");
    std::fs::write(&path, "# a comment\nqueue-dept: 64\n").expect("write a configuration");
    let done = run(bin("rtrs-server"), &["--config", &path, "--check"], COMMAND_TIME_MAX).code(2);
    let done = done.says("queue-dept").says("queue-depth");
    let named = ["server.yaml:2", "line 2"].iter().any(|place| done.stderr.contains(place));
    assert!(named, "no line in {done:#?}");
}

#[test]
fn idle_daemons_use_no_cpu() {
    let stand = Stand::memory("16M");
    // A connected NBD client that sends nothing is idle too.
    let raw = RawNbd::go(stand.client.front(), "vol0");
    let pids = [stand.server.pid(), stand.client.pid()];
    std::thread::sleep(Duration::from_secs(2));
    let before = pids.map(cpu_time);
    let seconds = if quick() { 3 } else { 10 };
    std::thread::sleep(Duration::from_secs(seconds));
    for (pid, before) in pids.into_iter().zip(before) {
        let used = cpu_time(pid) - before;
        // Heartbeats cost a little; a busy loop would cost ten times this bound.
        let allowed = Duration::from_millis(100 * seconds);
        assert!(used <= allowed, "idle process {pid} used {used:?} in {seconds} s");
    }
    drop(raw);
    stand.finish();
}

/// Writes and reads 200 ranges of all sizes over a new connection.
fn write_and_read(front: &Front, worker: u64) {
    let mut data = vec![0x5a; 1 << 20];
    let mut raw = RawNbd::go(front, "vol0");
    for round in 0..200_u64 {
        let length = 512 << ((round + worker) % 12);
        let offset = ((round * 5) << 20) + worker * 512;
        assert_eq!(raw.write(0, offset, &data[..length]), Reply::Error(0));
        assert_eq!(raw.read(offset, &mut data[..length]), Ok(()));
    }
}

#[test]
fn memory_use_stays_constant_and_bounded() {
    // A null export, so that all the server's memory belongs to the session.
    let (chunk, depth) = (128 << 10, 128);
    let server = Server::builder().export("vol0=null:1G").args(&[
        "--chunk-size",
        "128K",
        "--queue-depth",
        "128",
    ]);
    let stand = Stand::start(Scratch::new(), server, |c| c);
    let (server_pid, client_pid) = (stand.server.pid(), stand.client.pid());
    // Each connection transfers 70 MB; the memory of connections that ended must be released too.
    let load = |connections: u32| {
        std::thread::scope(|scope| {
            for worker in 0..2 {
                let front = stand.client.front();
                scope.spawn(move || (0..connections).for_each(|_| write_and_read(front, worker)));
            }
        });
        [server_pid, client_pid].map(resident_memory)
    };
    let connections = if quick() { 6 } else { 40 };
    let first = load(connections);
    let last = load(2 * connections);
    for (name, (first, last)) in ["server", "client"].into_iter().zip(first.into_iter().zip(last)) {
        assert!(last <= first + (4 << 20), "the {name} grew from {first} to {last} bytes");
    }
    let bound = chunk * depth + (32 << 20);
    let peak = peak_memory(server_pid);
    assert!(peak <= bound, "the server used {peak} bytes, its bound is {bound}");
    stand.finish();
}
