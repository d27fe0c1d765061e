//! Tests of command-line input and output: machine-readable results, and messages about invalid
//! input.

use std::fs::File;
use std::process::Command;
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Front, Proc, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, bin,
    consts, free_port, requires, run, send_signal, wait_for,
};
use serde_json::Value;

/// Prepares a command for the sessions in this run directory, to run alongside other commands.
fn command(client: &Client, words: &[&str]) -> Command {
    let mut command = Command::new(bin("rtrs-client"));
    command.args(words).arg("--run-dir").arg(client.run_dir());
    command
}

/// Checks that the JSON output has all properties of an attached session.
fn assert_attached(attached: &Value, uri: &str, portal: &str) {
    assert_eq!(attached["export"], "vol0", "{attached}");
    assert_eq!(attached["uri"], uri, "{attached}");
    assert_eq!(attached["size"], 16 << 20, "{attached}");
    assert_eq!(attached.get("device"), None, "{attached}");
    let paths = attached["paths"].as_array().expect("paths");
    let shown: Vec<_> = paths.iter().map(|path| (&path["path"], &path["state"])).collect();
    assert_eq!(shown, [(&Value::from(portal), &Value::from("connected"))], "{attached}");
}

#[test]
fn attach_prints_the_result_for_programs() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let portal = server.portal();
    let (client, done) = Client::attach("vol0").path(portal).args(&["-o", "json"]).try_start();
    let attached = done.ok().json();
    assert_attached(&attached, &client.uri(), portal);
    assert_eq!(attached["pid"], client.pid(), "{attached}");
    client.detach();

    let Front::Unix(socket) = client.front() else { panic!("expected a unix socket") };
    let words = ["attach", "vol0", "--path", portal, "--foreground", "-o", "json"];
    let mut attach = command(&client, &words);
    attach.arg("--socket").arg(socket);
    let mut session = Proc::start(attach);
    let _ = session.wait_lines("\"paths\"", 1, COMMAND_TIME_MAX);
    let _ = client.command(&["detach", "vol0"]).ok();
    let attached = session.wait(STOP_TIME_MAX).ok().json();
    assert_attached(&attached, &client.uri(), portal);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn names_may_follow_two_dashes() {
    let server = Server::builder().args(&["--export=-dash=mem:16M"]).start();
    let client = Client::attach("-dash").unattached();
    let run = |words: &[&str], names: &[&str]| {
        let mut named = command(&client, words);
        named.arg("--").args(names);
        Proc::start(named).wait(COMMAND_TIME_MAX).ok()
    };
    let [flag, socket] = client.front().args();
    let _ = run(&["attach", "--path", server.portal(), &flag, &socket], &["-dash"]);
    let setting = run(&["get", "-o", "json"], &["-dash", "foreground"]).json();
    assert_eq!(setting["settings"][0]["value"], false, "{setting}");
    let _ = run(&["detach"], &["-dash"]);
    client.wait_gone(COMMAND_TIME_MAX);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn detach_refuses_while_an_nbd_client_is_connected() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    let name = std::fs::read_to_string("/proc/self/comm").expect("the name of this process");
    let own = format!("{} (pid {})", name.trim_end(), std::process::id());
    let refused = client.command(&["detach", "vol0"]).code(1);
    let refused =
        refused.says(&format!("\"vol0\" is served to NBD clients: {own}; end them first"));
    assert!(refused.stderr.contains("use --force, which ends their connections"), "{refused:#?}");
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(0), "the connection lives");
    let _ = client.command(&["detach", "vol0", "--force"]).ok();
    raw.expect_closed();
    client.wait_gone(COMMAND_TIME_MAX);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_detach_with_a_long_timeout_is_shortened_by_a_second_one() {
    let server = Server::builder().export("vol0=mem:16M,delay=5m").start();
    let client = Client::attach("vol0").path(server.portal()).start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    let _ = raw.send_request(0, consts::CMD_READ, 0, 4096);
    wait_for("the read", COMMAND_TIME_MAX, || (client.status()["inflight"] == 1).then_some(()));
    let patient = Proc::start(command(&client, &["detach", "vol0", "--force", "--within", "10m"]));
    wait_for("the detach", COMMAND_TIME_MAX, || {
        (client.status()["state"] == "detaching").then_some(())
    });
    let hurried = client.command(&["detach", "vol0", "--force", "--within", "0", "-o", "json"]);
    let hurried = hurried.code(1).says("1 IO request did not end in time and failed");
    assert_eq!(hurried.json()["abandoned"], 1, "{hurried:#?}");
    let _ = patient.wait(STOP_TIME_MAX).code(1).says("vol0 detached");
    client.wait_gone(STOP_TIME_MAX);
    server.crash();
}

#[test]
fn a_detach_counts_abandoned_io_on_every_shard() {
    for round in 0..4 {
        let server = Server::builder().export("vol0=mem:16M,delay=5m").start();
        let client = Client::attach("vol0").args(&["--shards", "4"]);
        let client = client.path(server.portal()).start();
        let mut raws: Vec<_> = (0..4).map(|_| RawNbd::go(client.front(), "vol0")).collect();
        for raw in &mut raws {
            let _ = raw.send_request(0, consts::CMD_READ, 0, 4096);
        }
        wait_for("the reads", COMMAND_TIME_MAX, || {
            (client.status()["inflight"] == 4).then_some(())
        });
        let within = if round % 2 == 0 { "0" } else { "100ms" };
        let detach = ["detach", "vol0", "--force", "--within", within, "-o", "json"];
        let done = client.command(&detach).code(1);
        assert_eq!(done.json()["abandoned"], 4, "round {round}");
        client.wait_gone(STOP_TIME_MAX);
        server.crash();
    }
}

#[test]
fn a_detach_waits_for_writes_of_closed_clients() {
    for (delay, within, code, abandoned) in [("5m", "100ms", 1, 1), ("10s", "1m", 0, 0)] {
        let server = Server::builder().export(format!("vol0=mem:16M,delay={delay}")).start();
        let client = Client::attach("vol0").path(server.portal()).start();
        let mut raw = RawNbd::go(client.front(), "vol0");
        let _ = raw.send_request(0, consts::CMD_WRITE, 0, 4096);
        raw.send(&[1; 4096]);
        wait_for("the write", COMMAND_TIME_MAX, || {
            (client.status()["inflight"] == 1).then_some(())
        });
        drop(raw);
        let detach = ["detach", "vol0", "--within", within, "-o", "json"];
        let done = client.command_without_users(&detach);
        assert_eq!(done.code(code).json()["abandoned"], abandoned);
        client.wait_gone(STOP_TIME_MAX);
        server.crash();
    }
}

#[test]
fn errors_are_json_if_requested() {
    let error = |program: &str, words: &[&str], code: i32| {
        let mut command = Command::new(bin(program));
        command.args(words);
        let done = Proc::start(command).wait(COMMAND_TIME_MAX).code(code);
        let error: Value = serde_json::from_str(&done.stderr).expect("JSON on stderr");
        assert_eq!(error["exit_code"], code, "{error}");
        error["error"].as_str().expect("a text").to_owned()
    };
    let scratch = Scratch::new();
    let run_dir = scratch.text("none");
    let words = ["status", "vol0", "-o", "json", "--run-dir", &run_dir];
    assert!(error("rtrs-client", &words, 1).contains("is not attached"));
    assert!(
        error("rtrs-client", &["frobnicate", "-o", "json"], 2).contains("unrecognized subcommand")
    );
    let words = ["session", "list", "-o", "json", "--run-dir", &run_dir];
    assert!(error("rtrs-server", &words, 1).starts_with("no server has a control socket in "));
    let words = ["--export", "/nonexistent/x", "--print-config", "--check", "-o", "json"];
    assert!(error("rtrs-server", &words, 1).contains("/nonexistent/x"));
}

#[test]
fn a_check_refuses_what_a_start_would_refuse() {
    let scratch = Scratch::new();
    let image = scratch.path("vol0.img");
    File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("an image");
    let export = format!("vol0={}", image.display());
    let listen = format!("tcp://127.0.0.1:{}", free_port());
    let server = Server::builder().export(&*export).listen(&*listen).start();
    let other = format!("tcp://127.0.0.1:{}", free_port());
    let check = |export: &str, listen: &str| {
        let words = ["--export", export, "--listen", listen, "--check", "--run-dir"];
        let run_dir = scratch.text("run");
        run(bin("rtrs-server"), &[&words[..], &[&*run_dir]].concat(), COMMAND_TIME_MAX)
    };
    let _ = check(&export, &other).code(1).says("cannot export \"vol0\"").says("locked");
    let _ = check("v=mem:1M", &listen).code(1).says("choose another port");
    // A check for the same server (by address) skips the resources that the server holds.
    let own = server.run_dir();
    let own = own.to_str().expect("a plain path");
    let same = |more: &[&str]| {
        let words = ["--export", &export, "--listen", &listen, "--check", "--run-dir", own];
        run(bin("rtrs-server"), &[&words[..], more].concat(), COMMAND_TIME_MAX)
    };
    let reported = same(&[]).ok().stdout;
    let name = &listen["tcp://".len()..];
    let running = format!("this server is running: {name}, process {}; ", server.pid());
    let holds = format!("it holds export \"vol0\", {listen}, which were not tested\n");
    assert_eq!(reported, format!("ok\n{running}{holds}"));
    let checked = same(&["--name", name, "-o", "json"]).ok().json();
    assert_eq!((&checked["ok"], &checked["running"]["pid"]), (&true.into(), &server.pid().into()));
    let _ = same(&["--export", "more=/nonexistent/x"]).code(1).says("/nonexistent/x");
    let _ = same(&["--listen", "tcp://192.0.2.1:1"]).code(1).says("192.0.2.1:1");
    assert_eq!(check("v=mem:1M", &other).ok().stdout, "ok\n");
    let attach = |listen: &str| {
        let words = ["attach", "v", "--path", "tcp://127.0.0.1", "--check", "--listen", listen];
        run(bin("rtrs-client"), &words, COMMAND_TIME_MAX)
    };
    let _ = attach(&listen["tcp://".len()..]).code(1).says("in use");
    assert_eq!(attach("127.0.0.1:0").ok().stdout, "ok\n");
    let _ = server.stop(STOP_TIME_MAX);
    // A check leaves nothing behind.
    assert_eq!(check(&export, &listen).ok().stdout, "ok\n");
    assert_eq!(check(&export, &listen).ok().stdout, "ok\n");
}

#[test]
fn the_nbd_socket_has_the_configured_mode_and_owner() {
    use std::os::unix::fs::MetadataExt;
    let server = Server::builder().export("vol0=mem:16M").start();
    let own = std::fs::metadata("/proc/self").expect("procfs");
    let owner = format!("{}:{}", own.uid(), own.gid());
    let args = ["--socket-mode", "660", "--socket-owner", &owner];
    let client = Client::attach("vol0").path(server.portal()).args(&args).start();
    let Front::Unix(socket) = client.front() else { panic!("expected a unix socket") };
    let meta = std::fs::metadata(socket).expect("the socket");
    assert_eq!(meta.mode() & 0o777, 0o660);
    assert_eq!((meta.uid(), meta.gid()), (own.uid(), own.gid()));
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_drain_of_a_stopped_server_reports_it() {
    let mut server = Server::builder().export("vol0=mem:16M").start();
    server.signal("STOP");
    let drain = server.command(&["drain", "--within", "10m"]).code(1);
    let drain = drain.says("does not answer yet; waiting up to 15 s");
    let _ = drain.says(&format!("its process {} is stopped", server.pid()));
    server.signal("CONT");
    let _ = server.command(&["drain"]).ok();
}

#[test]
fn a_command_that_a_stopped_server_did_not_answer_is_not_executed() {
    let mut server = Server::builder().export("vol0=mem:16M").start();
    server.signal("STOP");
    let remove = server.command(&["export", "remove", "vol0"]).code(1);
    let _ = remove.says(&format!("its process {} is stopped", server.pid()));
    // A change request whose sender is gone by the time the server resumes.
    let files = std::fs::read_dir(server.run_dir()).expect("the run directory").flatten();
    let is_socket = |path: &std::path::PathBuf| path.extension().is_some_and(|end| end == "srv");
    let socket = files.map(|file| file.path()).find(is_socket).expect("the control socket");
    let mut gone = std::os::unix::net::UnixStream::connect(socket).expect("a listener");
    let request = br#"{"command":"export-remove","name":"vol0","within_ms":0}"#;
    std::io::Write::write_all(&mut gone, &[request, &b"\n"[..]].concat()).expect("a request");
    // This also affects the copies in processes that other threads are starting at the same time.
    gone.shutdown(std::net::Shutdown::Both).expect("an end");
    drop(gone);
    server.signal("CONT");
    let _ = server.wait_output("the requester has disconnected");
    let _ = server.command(&["export", "list"]).ok().says("vol0");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn doctor_distinguishes_a_foreign_port_from_a_closed_one() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let path = format!("tcp://{}", listener.local_addr().expect("an address"));
    // This service closes connections that it does not understand.
    let _closing = std::thread::spawn(move || listener.incoming().for_each(drop));
    let doctor = run(bin("rtrs-client"), &["doctor", &path], COMMAND_TIME_MAX).code(1);
    let _ = doctor.says("hint: the port is open but does not speak RTRS; check that rtrs-server");
}

#[test]
fn a_command_ends_when_its_reader_closes() {
    let server = Server::builder().args(&["--ping-only"]).start();
    // The ping has no time limit.
    let ping = format!(
        "set -o pipefail; {} ping {} -i 1ms | head -n 2",
        bin("rtrs-client").display(),
        server.portal()
    );
    let mut bash = Command::new("bash");
    bash.args(["-c", &ping]);
    let done = Proc::start(bash).wait(COMMAND_TIME_MAX).ok();
    assert_eq!((done.stdout.lines().count(), &*done.stderr), (2, ""));
    let _ = server.stop(STOP_TIME_MAX);

    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("run")).expect("a directory");
    std::fs::write(scratch.path("run/v.log"), "one\ntwo\n").expect("a log");
    let logs = format!(
        "set -o pipefail; {} logs v -f --run-dir {} | head -n 1",
        bin("rtrs-client").display(),
        scratch.text("run")
    );
    let mut bash = Command::new("bash");
    bash.args(["-c", &logs]);
    assert_eq!(Proc::start(bash).wait(COMMAND_TIME_MAX).ok().stdout, "one\n");
}

#[test]
fn a_failed_attach_gives_the_reason_even_without_log_space() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let (client, done) = Client::attach("vol1").path(server.portal()).try_start();
    let _ = done.code(1).says("ENOENT");
    let Front::Unix(socket) = client.front() else { panic!("expected a unix socket") };
    // No file may grow, as on a full disk.
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh"]);
    shell.arg(bin("rtrs-client")).args(["attach", "vol1", "--path", server.portal(), "--socket"]);
    shell.arg(socket).arg("--run-dir").arg(client.run_dir());
    // The output goes through a pipe, since files cannot grow.
    let output = shell.output().expect("a shell");
    let reported = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{reported}");
    assert!(reported.contains("ENOENT"), "{reported}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_attach_succeeds_even_if_its_output_cannot_be_written() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let (client, done) = Client::attach("vol0").path(server.portal()).try_start();
    let _ = done.ok();
    client.detach();
    let Front::Unix(socket) = client.front() else { panic!("expected a unix socket") };
    let mut attach = command(&client, &["attach", "vol0", "--path", server.portal()]);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let output = attach.arg("--socket").arg(socket).stdout(full).output().expect("a process");
    let reported = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{reported}");
    assert!(reported.contains("vol0 is attached, but the result cannot be printed"), "{reported}");
    let _ = client.command(&["status", "vol0"]).ok().says("open");
    let _ = client.command(&["detach", "vol0"]).ok();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_client_chosen_name_cannot_forge_lines() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let name = "x\nFORGED\u{1b}[31m";
    let attach =
        || Client::attach("vol0").path(server.portal()).args(&["--session-name", name]).try_start();
    let (client, done) = attach();
    let _ = done.ok();
    // The name is in use; the log message names it.
    let (_, done) = attach();
    let _ = done.code(1);
    let list = server.command(&["session", "list"]).ok().stdout;
    assert_eq!(server.sessions()[0]["name"], name, "programs receive the name unchanged");
    for text in [&list, &server.wait_output("nFORGED")] {
        assert!(text.contains("\\nFORGED"), "{text}");
        assert!(!text.contains("\nFORGED") && !text.contains('\u{1b}'), "{text}");
    }
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_bench_ends_cleanly_when_its_terminal_closes() {
    if !requires(&["script"]) {
        return;
    }
    let server = Server::builder().export("vol0=mem:16M").start();
    let scratch = Scratch::new();
    let bench = format!(
        "{} bench vol0 --path {} --runtime 8s --run-dir {}",
        bin("rtrs-client").display(),
        server.portal(),
        scratch.text("run")
    );
    let code = scratch.path("code");
    // The bench shows its progress on its own terminal, which closes when `script` ends.
    let within = format!("trap '' HUP; {bench} >/dev/null; echo $? > {}", code.display());
    let mut script = Command::new("script");
    script.args(["-qc", &within, "/dev/null"]);
    let script = Proc::start(script);
    wait_for("the session, or its end", COMMAND_TIME_MAX, || {
        (!server.sessions().is_empty() || code.exists()).then_some(())
    });
    std::thread::sleep(Duration::from_millis(700));
    let _ = send_signal("KILL", &script.pid().to_string());
    let ended = wait_for("the end of the bench", COMMAND_TIME_MAX, || {
        std::fs::read_to_string(&code).ok().filter(|text| text.ends_with('\n'))
    });
    // The bench ends normally, or through the hang-up if that reached it, but not with a panic.
    assert!(matches!(&*ended, "0\n" | "1\n"), "exit code {ended}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_bench_overwrites_data_only_with_consent() {
    let scratch = Scratch::new();
    let (file, before) = (scratch.path("vol0.img"), vec![7_u8; 16 << 20]);
    std::fs::write(&file, &before).expect("the image");
    let server = Server::builder().export(format!("vol0={}", scratch.text("vol0.img"))).start();
    let portal = server.portal().to_owned();
    let bench = |more: &[&str]| {
        let words = ["bench", "vol0", "--path", portal.as_str(), "--runtime", "1s"];
        run(bin("rtrs-client"), &[&words[..], more].concat(), COMMAND_TIME_MAX)
    };
    let is_unchanged = || std::fs::read(&file).expect("the image") == before;
    for rw in ["write", "randwrite", "randrw"] {
        let text = format!(
            "bench --rw {rw} overwrites vol0 on {portal} (16.0 MiB); pass --yes if that data is \
             not needed"
        );
        let _ = bench(&["--rw", rw]).code(2).says(&text);
        let _ = bench(&["--rw", rw, "--size", "1M"]).code(2).says("(1.0 MiB)");
        let _ = bench(&["--rw", rw, "--check"]).ok();
    }
    let _ = bench(&["--rw", "randread"]).ok();
    assert!(is_unchanged(), "the data was overwritten");
    let _ = bench(&["--rw", "write", "--yes"]).ok();
    assert!(!is_unchanged(), "nothing was written");
    let _ = server.stop(STOP_TIME_MAX);
    // Without a server, the size is unknown.
    let _ = bench(&["--rw", "write"]).code(2).says(&format!("overwrites vol0 on {portal}; pass"));
}

#[test]
fn a_bench_takes_memory_in_pieces() {
    let scratch = Scratch::new();
    let file = scratch.path("vol0.img");
    std::fs::write(&file, vec![7_u8; 16 << 20]).expect("the image");
    let server = Server::builder().export(format!("vol0={}", scratch.text("vol0.img"))).start();
    let portal = server.portal().to_owned();
    let bench = |more: &[&str]| {
        let words = ["bench", "vol0", "--path", portal.as_str(), "--runtime", "1s", "-o", "json"];
        run(bin("rtrs-client"), &[&words[..], more].concat(), COMMAND_TIME_MAX).ok().json()
    };
    let write = ["--rw", "write", "--bs", "300k", "--pieces", "37", "--size", "3M", "--yes"];
    let written = bench(&write);
    assert_eq!((&written["pieces"], &written["errors"]), (&37.into(), &0.into()), "{written}");
    let image = std::fs::read(&file).expect("the image");
    let has = |block: &&[u8], byte| block.iter().all(|&is| is == byte);
    let blocks: Vec<&[u8]> = image.chunks(300 << 10).collect();
    let changed = blocks.iter().filter(|block| has(block, 0x5a)).count();
    assert!((1..=10).contains(&changed), "{changed} blocks were written");
    let kept = blocks.iter().filter(|block| has(block, 7)).count();
    assert_eq!(changed + kept, blocks.len(), "every block has the bytes of the pieces or its own");
    let read = bench(&["--bs", "1M", "--pieces", "128", "--iodepth", "3"]);
    assert_eq!(read["errors"], 0, "{read}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn several_sessions_are_detached_by_one_command() {
    let server = ["a", "b", "c"]
        .iter()
        .fold(Server::builder(), |server, name| server.export(format!("{name}=mem:16M")))
        .start();
    let a = Client::attach("a").path(server.portal()).start();
    let attach = |name: &str| {
        let front = Front::Unix(a.run_dir().join(format!("{name}.sock")));
        let words = ["attach", name, "--path", server.portal()].map(str::to_owned);
        let _ = a.command(&words.into_iter().chain(front.args()).collect::<Vec<_>>()).ok();
    };
    attach("b");
    attach("c");
    let done = a.command(&["detach", "b", "none", "c", "c", "gone"]).code(1);
    assert_eq!(done.stdout, "b detached\nc detached\n");
    assert_eq!(done.stderr.lines().count(), 2, "{done:#?}");
    let _ = done.says("\"none\" is not attached").says("\"gone\" is not attached");
    let list = a.command(&["list", "-o", "json"]).ok().json();
    assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
    attach("b");
    attach("c");
    // Nothing can be printed, but the sessions are detached anyway.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let done = command(&a, &["detach", "b", "c"]).stdout(full).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let list = a.command(&["list", "-o", "json"]).ok().json();
    assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
    attach("b");
    let all = a.command(&["detach", "--all", "-o", "json"]).ok().json();
    for (row, name) in all.as_array().expect("a list").iter().zip(["a", "b"]) {
        let reported = (&row["name"], &row["detached"], &row["error"]);
        assert_eq!(reported, (&name.into(), &true.into(), &Value::Null), "{all}");
    }
    assert_eq!(all.as_array().map(Vec::len), Some(2), "{all}");
    a.wait_gone(STOP_TIME_MAX);
    assert_eq!(a.command(&["detach", "--all"]).ok().stdout, "");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn all_dead_sessions_are_cleaned_up_whatever_their_names() {
    let name = "n".repeat(254);
    let server = Server::builder().export(format!("{name}=mem:1M")).start();
    let client = Client::attach(&name).path(server.portal()).start();
    client.signal("KILL");
    client.wait_gone(COMMAND_TIME_MAX);
    let listed = client.command(&["list", "-o", "json"]).ok().json();
    let shown = listed[0]["name"].as_str().expect("a name");
    assert!(shown.len() < name.len() && listed[0]["state"] == "dead", "{listed}");
    let _ = client.command(&["detach", "--all"]).ok().says("was dead; removed its socket");
    assert_eq!(client.command(&["list", "-o", "json"]).ok().json(), serde_json::json!([]));
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_configuration_that_only_the_command_can_read_is_refused_by_name() {
    let client = Client::attach("vol0").unattached();
    let socket = client.run_dir().join("nbd.sock").display().to_string();
    let attach = format!(
        "echo 'path: tcp://127.0.0.1:{}' | '{}' attach vol0 --socket '{socket}' --run-dir '{}' \
         --config /dev/fd/0",
        free_port(),
        bin("rtrs-client").display(),
        client.run_dir().display()
    );
    let done = run("sh", &["-c", &attach], COMMAND_TIME_MAX).code(2);
    let _ = done.says("--config /dev/fd/0 can be read only by this process").says("--foreground");
}

/// A command that waits for a stopped process reports the wait and its time limit.
#[test]
fn a_command_that_waits_for_a_daemon_says_so() {
    let server = Server::builder().export("vol0=mem:1M").start();
    let client = Client::attach("vol0").path(server.portal()).start();
    client.signal("STOP");
    for (words, code, seconds) in
        [(&["list"][..], 0, 5), (&["status", "vol0"], 3, 4), (&["stats", "vol0"], 1, 10)]
    {
        let done = client.command(words).code(code);
        let notice = "rtrs-client: waiting for \"vol0\" to answer, for at most ";
        assert!(done.stderr.contains(&format!("{notice}{seconds} s\n")), "{done:?}");
    }
    // Programs also read JSON from stderr.
    let json = client.command(&["list", "-o", "json"]).ok();
    assert_eq!((json.json()[0]["state"].as_str(), &*json.stderr), (Some("unresponsive"), ""));
    client.signal("CONT");
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn every_command_refuses_a_run_directory_that_is_too_long() {
    let run_dir = format!("/tmp/{}", "d".repeat(100));
    let run = |words: &[&str]| {
        let mut command = Command::new(bin("rtrs-client"));
        command.args(words).args(["--run-dir", &run_dir]);
        Proc::start(command).wait(COMMAND_TIME_MAX).code(2)
    };
    let attach = ["attach", "vol0", "--path", "tcp://127.0.0.1", "--socket", "/tmp/s"];
    let text = run(&attach).stderr;
    assert!(text.contains("control socket"), "{text}");
    for words in [&["detach", "vol0"], &["status", "vol0"], &["stats", "vol0"]] {
        assert_eq!(run(words).stderr, text);
    }
}
