//! Tests of `--user`: a server that starts as root and then runs as another user.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, RawNbd, Reply, STOP_TIME_MAX, Server, bin, consts, is_root, run,
    skip, sparse_file,
};
use tempfile::TempDir;

const USER: &str = "nobody";
const UID: u32 = 65534;
const MIB: u64 = 1 << 20;

/// Whether the test is running as root and the other user exists.
fn can_become() -> bool {
    if !is_root() {
        skip("not root");
        return false;
    }
    let id = run("id", &["-u", USER], COMMAND_TIME_MAX);
    if id.stdout.trim() != UID.to_string() {
        skip("no user nobody with the number 65534");
        return false;
    }
    true
}

/// Creates a directory that the user can access, on a disk, because files in memory are not synced.
fn disk() -> TempDir {
    let dir = TempDir::new_in("/var/tmp").expect("a directory on a disk");
    set_mode(dir.path(), 0o711);
    dir
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("set a mode");
}

/// Creates a file of 1 MiB, owned by root, with this mode.
fn file(dir: &TempDir, name: &str, mode: u32) -> String {
    let path = dir.path().join(name);
    sparse_file(&path, MIB);
    set_mode(&path, mode);
    path.to_str().expect("a plain path").to_owned()
}

/// Returns the values of a key in the status of all threads.
fn of_threads(pid: u32, key: &str) -> BTreeSet<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the threads of a process");
    let status = tasks.filter_map(|task| {
        // The thread may have ended in the meantime.
        fs::read_to_string(task.expect("a thread").path().join("status")).ok()
    });
    let status: Vec<String> = status.collect();
    assert!(status.len() > 3, "{} threads", status.len());
    let line = |text: &String| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).expect(key);
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    status.iter().map(line).collect()
}

#[test]
fn a_server_drops_all_root_privileges() {
    if !can_become() {
        return;
    }
    let dir = disk();
    let secret = file(&dir, "secret.img", 0o600);
    let server = Server::builder()
        .export(format!("secret={secret}"))
        .user(USER)
        .args(&["--shards", "2", "--metrics", "127.0.0.1:0"])
        .start();
    let attach = |export: &str| {
        let args = ["--session-name", export, "--shards", "2"];
        Client::attach(export).path(server.portal()).args(&args).start()
    };
    // The server serves files that only root can open, over rings created as root.
    let client = attach("secret");
    let mut raw = RawNbd::go(client.front(), "secret");
    assert_eq!(raw.write(0, 0, &[7; 8192]), Reply::Error(0));
    assert_eq!(raw.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));
    let mut data = [0; 8192];
    assert_eq!(raw.read(4096, &mut data[..4096]), Ok(()));
    assert_eq!(data[..4096], [7; 4096]);
    // Writing zeroes and punching holes use the ring's worker threads.
    assert_eq!(raw.call(0, consts::CMD_TRIM, 65536, 65536), Reply::Error(0));
    assert_eq!(raw.call(0, consts::CMD_WRITE_ZEROES, 0, 4096), Reply::Error(0));
    assert_eq!(raw.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));

    let pid = server.pid();
    let groups = run("id", &["-G", USER], COMMAND_TIME_MAX).ok().stdout;
    let gid = groups.split_whitespace().next().expect("a group").to_owned();
    for (key, value) in [
        ("Uid:", [&*UID.to_string(); 4].join(" ")),
        ("Gid:", [&*gid; 4].join(" ")),
        ("Groups:", groups.trim().to_owned()),
        ("CapEff:", "0".repeat(16)),
        ("CapPrm:", "0".repeat(16)),
        ("NoNewPrivs:", "1".to_owned()),
    ] {
        assert_eq!(of_threads(pid, key), BTreeSet::from([value]), "{key}");
    }
    // Files created by the server belong to the user.
    let run_dir = server.run_dir();
    let mut made = vec![run_dir.clone(), run_dir.with_file_name("state/epochs")];
    for dir in made.clone() {
        made.extend(fs::read_dir(dir).expect("a directory").map(|entry| entry.unwrap().path()));
    }
    assert!(made.len() >= 4, "a socket and a lock: {made:?}");
    for path in &made {
        let meta = fs::symlink_metadata(path).expect("a file");
        assert_eq!((meta.uid(), meta.gid().to_string()), (UID, gid.clone()), "{path:?}");
    }
    let socket = made.iter().find(|path| path.extension().is_some_and(|end| end == "srv"));
    let socket = socket.expect("a control socket").clone();

    // Root's commands work, and files are opened as the user.
    let refused = server.command(&["export", "add", &format!("late={secret}")]).code(1);
    let why = format!("user {USER} ({UID}) may not read {secret} (mode 600, owner 0:0)");
    let _ = refused.says(&why);
    let open = file(&dir, "open.img", 0o666);
    let _ = server.command(&["export", "add", &format!("open={open}")]).ok();
    let other = attach("open");
    let mut raw_other = RawNbd::go(other.front(), "open");
    assert_eq!(raw_other.write(0, 0, &[5; 4096]), Reply::Error(0));
    assert_eq!(raw_other.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));
    drop((raw, raw_other));
    client.detach();
    other.detach();
    // A removal syncs the file, which the user could not open again.
    let _ = server.command(&["export", "remove", "secret"]).ok();
    let _ = server.command(&["export", "remove", "open"]).ok();
    assert_eq!(fs::read(&open).expect("the file")[..4096], [5; 4096]);

    assert!(socket.exists());
    let _ = server.stop(STOP_TIME_MAX);
    assert!(!socket.exists(), "{} is left", socket.display());
}

#[test]
fn a_drain_and_restart_keep_the_users_files() {
    if !can_become() {
        return;
    }
    let dir = disk();
    let secret = file(&dir, "secret.img", 0o600);
    let (run_dir, state) = (dir.path().join("run/server"), dir.path().join("state"));
    let words = |path: &Path| path.to_str().expect("a plain path").to_owned();
    let args = ["--run-dir", &words(&run_dir), "--state-dir", &words(&state)].map(str::to_owned);
    let args = args.each_ref().map(String::as_str);
    for _ in 0..2 {
        let server =
            Server::builder().export(format!("vol={secret}")).user(USER).args(&args).start();
        let drain = ["drain", "--run-dir", args[1]];
        let _ = run(bin("rtrs-server"), &drain, COMMAND_TIME_MAX).ok();
        let _ = server.wait(STOP_TIME_MAX).ok();
        assert_eq!(fs::metadata(&run_dir).expect("it is kept").uid(), UID);
        assert_eq!(fs::read_dir(&run_dir).expect("a directory").count(), 0);
    }
    // The server does not give the user a directory that has a different owner.
    chown(&state, Some(0), Some(0)).expect("change an owner");
    let builder = Server::builder().export("mem:1M").listen("tcp://127.0.0.1:0").user(USER);
    let refused = builder.args(&args).run().code(1);
    let _ = refused.says(&format!("state-dir {} belongs to user 0; use `chown", state.display()));
}

#[test]
fn a_reload_opens_exports_as_the_user() {
    if !can_become() {
        return;
    }
    let dir = disk();
    let secret = file(&dir, "secret.img", 0o600);
    let open = file(&dir, "open.img", 0o666);
    let config = dir.path().join("server.yaml");
    let configure = |exports: &str, user: &str| {
        fs::write(&config, format!("user: {user}\nexport: [{exports}]\n")).expect("write a file");
    };
    configure("mem:1M", USER);
    let of_config = ["--strict", "--config", config.to_str().expect("a plain path")];
    // The kit makes its directories accessible to the user passed to the builder.
    let server = Server::builder().user(USER).args(&of_config).start();
    configure(&format!("mem:1M, vol={open}"), "daemon:adm");
    let preview = server.command(&["reload", "--dry-run", "-o", "json"]).ok().json();
    assert_eq!(preview["added"], serde_json::json!(["vol"]), "{preview}");
    let done = server.command(&["reload"]).ok();
    // The flag takes precedence over the file.
    assert!(!done.stdout.contains("restart"), "{done:?}");
    configure(&format!("mem:1M, vol={open}, more={secret}"), USER);
    let refused = server.command(&["reload"]).code(1).says("nothing changed");
    let _ = refused.says(&format!("user {USER} ({UID}) may not read {secret}"));
    let mut server = server;
    server.signal("HUP");
    let line = format!("reload: nothing changed: cannot export \"more\": user {USER}");
    let _ = server.wait_output(&line);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_change_of_user_needs_a_restart() {
    if !can_become() {
        return;
    }
    let dir = disk();
    let config = dir.path().join("server.yaml");
    let configure = |user: &str| {
        fs::write(&config, format!("user: {user}\nexport: ['mem:1M']\n")).expect("write a file");
    };
    configure(USER);
    let text = |name: &str| dir.path().join(name).to_str().expect("a plain path").to_owned();
    let (run_dir, state) = (text("server"), text("state"));
    let config = text("server.yaml");
    let args = ["--config", &config, "--run-dir", &run_dir, "--state-dir", &state];
    let server = Server::builder().args(&args).start();
    assert_eq!(of_threads(server.pid(), "Uid:").len(), 1);
    configure("daemon");
    for words in [&["reload", "--dry-run"][..], &["reload"]] {
        let words = [words, &["--run-dir", &run_dir, "-o", "json"]].concat();
        let done = run(bin("rtrs-server"), &words, COMMAND_TIME_MAX).ok().json();
        assert_eq!(done["restart"], serde_json::json!(["user"]), "{done}");
    }
    assert_eq!(
        of_threads(server.pid(), "Uid:"),
        BTreeSet::from([[&*UID.to_string(); 4].join(" ")])
    );
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_unusable_user_is_refused_at_the_start() {
    let start = |user: &'static str, more: &[&str]| {
        let builder = Server::builder().export("mem:1M").listen("tcp://127.0.0.1:0").user(user);
        builder.args(more).run()
    };
    if !is_root() {
        let _ = start("root", &[]).code(1).says("only root can become another user");
        return;
    }
    for more in [&[][..], &["--check"]] {
        let unknown = start("no-such-user", more).code(1);
        let _ = unknown.says("cannot run as user no-such-user: there is no user \"no-such-user\"");
        let unknown = start("daemon:no-such-group", more).code(1);
        let _ = unknown.says("there is no group \"no-such-group\"");
        let _ = start("root", more).code(1).says("that user is root; choose another user");
    }
    let _ = start("a b", &[]).code(2).says("is not a user; use NAME or NAME:GROUP");
    if !rtrs_tests::requires(&["setpriv"]) {
        return;
    }
    let program = bin("rtrs-server");
    let server = program.to_str().expect("a plain path");
    let words = ["--reuid=65534", "--clear-groups", "--regid=65534", server];
    let words = [&words[..], &["--export=mem:1M", "--user=daemon"]].concat();
    let finished = run("setpriv", &words, COMMAND_TIME_MAX);
    if finished.stderr.starts_with("setpriv: ") {
        return skip("another user cannot reach the program");
    }
    let _ = finished
        .code(1)
        .says("the server runs as user 65534, and only root can become another user");
}
