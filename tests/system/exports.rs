//! Tests of changes to a running server's exports, by commands and by reloads.

use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Front, Innocent, Proc, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server,
    consts, free_port, is_root, requires, run, skip, sparse_file, wait_for,
};
use serde_json::{Value, json};

use super::faults::proxy::{Proxy, Way};

const EIO: u32 = 5;
const MIB: u64 = 1 << 20;

fn attach(server: &Server, export: &str, args: &[&str]) -> Client {
    let name = format!("sess-{export}");
    let args = [&["--session-name", &name], args].concat();
    Client::attach(export).path(server.portal()).args(&args).start()
}

fn exports(server: &Server) -> Vec<Value> {
    let list = server.command(&["export", "list", "-o", "json"]).ok().json();
    list["exports"].as_array().expect("a list of exports").clone()
}

fn export(server: &Server, name: &str) -> Value {
    let found = exports(server).into_iter().find(|export| export["name"] == name);
    found.unwrap_or_else(|| panic!("no export {name}"))
}

#[test]
fn exports_are_added_and_removed_alongside_others() {
    let scratch = Scratch::new();
    let server = Server::builder().export("vol0=mem:16M").start();
    let beside = attach(&server, "vol0", &[]);
    let innocent = Innocent::start(beside.front(), "vol0");
    sparse_file(&scratch.path("a.img"), MIB);
    let target = scratch.text("a.img");
    let spec = format!("vol1={target}");
    let _ = server.command(&["export", "add", &spec]).ok().says("vol1 added");
    let again = server.command(&["export", "add", "vol1=mem:1M"]).code(1);
    let _ = again.says("there is already an export with this name");
    let locked = server.command(&["export", "add", &format!("vol2={target}")]).code(1);
    let _ = locked.says("is locked: it is already exported").says("\"vol1\" has it open");
    let missing = format!("vol2={}", scratch.text("none.img"));
    let _ = server.command(&["export", "add", &missing]).code(1).says("does not exist");
    let vol1 = export(&server, "vol1");
    for (key, value) in [
        ("backing", json!(target)),
        ("size", json!(MIB)),
        ("read_only", json!(false)),
        ("state", json!("unused")),
        ("open_by", json!([])),
        ("device_errors", json!(0)),
    ] {
        assert_eq!(vol1[key], value, "{key} of {vol1}");
    }
    assert!(vol1["id"].is_string(), "{vol1}");
    // The new export works like any other, and cannot be removed while a session uses it.
    let client = attach(&server, "vol1", &[]);
    let mut raw = RawNbd::go(client.front(), "vol1");
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(0));
    let used = export(&server, "vol1");
    assert_eq!((&used["state"], &used["open_by"][0]["access"]), (&json!("open"), &json!("rw")));
    let listed = server.command(&["export", "list"]).ok();
    let _ = listed.says("sess-vol1 (rw)");
    let busy = server.command(&["export", "remove", "vol1"]).code(1);
    let _ = busy.says("export \"vol1\" is open by sess-vol1 (rw); detach it at the client, or use");
    let _ = server
        .command(&["export", "set", "vol1", "direct=off"])
        .code(1)
        .says("only access, rate limits, and ro");
    let _ = server.command(&["export", "set", "vol1", "ro"]).code(1).says("open for writing by");
    drop(raw);
    client.detach();
    let _ = server.command(&["export", "set", "vol1", "ro"]).ok().says("vol1 changed");
    let again = server.command(&["export", "set", "vol1", "ro"]).ok();
    let _ = again.says("vol1 already has these options");
    assert_eq!(export(&server, "vol1")["read_only"], true);
    let _ = server.command(&["export", "set", "vol1", "rw", "block-size=4096"]).ok();
    let vol1 = export(&server, "vol1");
    assert_eq!((&vol1["read_only"], &vol1["block_size"]), (&json!(false), &json!(4096)));
    let _ = server.command(&["export", "set", "vol1", "bolck-size=512"]).code(2).says("did you");
    let _ = server.command(&["export", "remove", "vol1"]).ok().says("vol1 removed");
    let _ = server.command(&["export", "remove", "vol1"]).code(1).says("there is no export");
    // The file is no longer locked, and the written data is there.
    let _ = server.command(&["export", "add", &format!("new={target}")]).ok();
    assert_eq!(fs::read(scratch.path("a.img")).expect("the file")[..4096], [1; 4096]);
    assert_eq!(export(&server, "new")["id"], vol1["id"], "the same file");
    innocent.progress();
    drop(innocent);
    beside.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_forced_removal_fails_the_client_permanently() {
    let scratch = Scratch::new();
    sparse_file(&scratch.path("a.img"), MIB);
    sparse_file(&scratch.path("b.img"), MIB);
    let first = format!("vol0={}", scratch.text("a.img"));
    let server = Server::builder().export(&first).export("other=mem:16M").start();
    let beside = attach(&server, "other", &[]);
    let innocent = Innocent::start(beside.front(), "other");
    let client = attach(&server, "vol0", &["--no-path", "queue"]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(0));
    let preview = server.command(&["export", "remove", "vol0", "--dry-run"]).ok();
    let ended = "ended: the export of session sess-vol0 from 127.0.0.1 (rw)\n";
    let preview = preview.says("vol0 would be removed\n").says(&format!("would be {ended}"));
    let _ = preview.says("without --force, this change would be refused\n");
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(0), "a dry run changes nothing");
    let removed = server.command(&["export", "remove", "vol0", "--force"]).ok();
    let _ = removed.says("vol0 removed\n").says(ended);
    let second = format!("vol0={},id=another", scratch.text("b.img"));
    let _ = server.command(&["export", "add", &second]).ok();
    // Errors are returned immediately, although IO would wait indefinitely for a path.
    assert_eq!(raw.write(0, 4096, &[2; 4096]), Reply::Error(EIO));
    assert_eq!(raw.write(0, 4096, &[3; 4096]), Reply::Error(EIO));
    let reported = client.command(&["status", "vol0", "-o", "json"]).code(3).json();
    assert!(reported.to_string().contains("operator removed the export"), "{reported}");
    assert_eq!(reported["io_fails"], true, "{reported}");
    assert_eq!(fs::read(scratch.path("b.img")).expect("a file")[..8192], [0; 8192]);
    assert_eq!(fs::read(scratch.path("a.img")).expect("a file")[..4096], [1; 4096]);
    // The file is closed, and a new session opens the export that has the name now.
    let _ = server.command(&["export", "add", &format!("old={}", scratch.text("a.img"))]).ok();
    drop(raw);
    client.detach();
    let again = attach(&server, "vol0", &[]);
    let mut raw = RawNbd::go(again.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[4; 4096]), Reply::Error(0));
    innocent.progress();
    drop((innocent, raw));
    beside.detach();
    again.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_export_is_released_once_its_disk_responds() {
    let held = Scratch::new();
    let server = Server::builder().program("rtrs-held").env("RTRS_HELD_DIR", held.text(""));
    let server = server.export("slow=mem:16M").start();
    let there = |name: &str| held.path(name).exists().then_some(());
    fs::write(held.path("hold"), "").expect("a file");
    wait_for("the disk to hold writes", COMMAND_TIME_MAX, || there("armed"));
    let client = attach(&server, "slow", &[]);
    let mut raw = RawNbd::go(client.front(), "slow");
    let _ = raw.send_request(0, consts::CMD_WRITE, 0, 4096);
    raw.send(&[1; 4096]);
    wait_for("its write", COMMAND_TIME_MAX, || there("holding"));
    let remove = ["export", "remove", "slow", "--force", "--within", "100ms"];
    let _ = server.command(&remove).code(1).says("the backend still runs its requests");
    fs::write(held.path("release"), "").expect("a file");
    wait_for("its end", COMMAND_TIME_MAX, || exports(&server).is_empty().then_some(()));
    let _ = server.command(&["export", "add", "slow=mem:1M"]).ok();
    drop(raw);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

fn names(report: &Value, what: &str) -> Vec<String> {
    let all = report[what].as_array().expect("a list").iter();
    all.map(|one| one["name"].as_str().or(one.as_str()).expect("a name").to_owned()).collect()
}

#[test]
fn the_configuration_is_reloaded() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let write = |text: &str| fs::write(&config, text).expect("a file");
    fs::create_dir(scratch.path("exports.d")).expect("a directory");
    let extra = scratch.path("exports.d/extra.yaml");
    fs::write(&extra, "name: extra\ntarget: mem:1M\n").expect("a file");
    fs::write(scratch.path("exports.d/notes.txt"), "no export: [").expect("a file");
    let list = "export: [used=mem:16M, gone=null:1M, other=null:1M]\n";
    write(list);
    let mut server = Server::builder().args(&["--config", &config]).start();
    let all = |server: &Server| -> Vec<String> {
        let name = |export: &Value| export["name"].as_str().expect("a name").to_owned();
        exports(server).iter().map(name).collect()
    };
    assert_eq!(all(&server), ["extra", "gone", "other", "used"]);
    let reload = ["reload", "-o", "json"];
    let report = server.command(&reload).ok().json();
    assert_eq!(report["unchanged"], 4, "{report}");
    let client = attach(&server, "used", &[]);
    let innocent = Innocent::start(client.front(), "used");
    let _ = server.command(&["export", "add", "mine=null:1M"]).ok();
    // Exports in use are kept, and so are those added by a command.
    write("export: [new=null:2M, 'other=null:3M,ro']\nqueue-depth: 64\n");
    fs::write(&extra, "[]").expect("a file");
    let preview = server.command(&["reload", "--dry-run", "-o", "json"]).ok().json();
    assert_eq!(all(&server), ["extra", "gone", "mine", "other", "used"], "nothing was done");
    let _ = server.command(&["reload", "--dry-run"]).ok().says("would be added new");
    let report = server.command(&reload).ok().json();
    for what in ["added", "removed", "changed", "failed", "restart"] {
        assert_eq!(names(&preview, what), names(&report, what), "{what}");
    }
    assert_eq!(names(&preview, "kept"), ["used"]);
    assert_eq!(names(&report, "added"), ["new"]);
    assert_eq!(names(&report, "removed"), ["extra", "gone"]);
    assert_eq!(names(&report, "changed"), ["other"]);
    assert_eq!(names(&report, "kept"), ["used"]);
    assert_eq!(names(&report, "failed"), [] as [String; 0]);
    assert_eq!(names(&report, "restart"), ["queue-depth"]);
    assert_eq!(all(&server), ["mine", "new", "other", "used"]);
    let other = export(&server, "other");
    assert_eq!((&other["size"], &other["read_only"]), (&json!(3 * MIB), &json!(true)));
    // The running exports produce an equivalent file.
    let saved = server.command(&["export", "save"]).ok().stdout;
    fs::write(&extra, &saved).expect("a file");
    write("queue-depth: 64\n");
    let preview = server.command(&["reload", "--dry-run", "-o", "json"]).ok().json();
    assert_eq!(preview["unchanged"], 4, "{preview} of\n{saved}");
    fs::write(&extra, "[]").expect("a file");
    // An invalid configuration changes nothing.
    for (text, why) in [
        ("export: [a=null:1M]\nno-such-key: 1\n", "no-such-key"),
        ("export: [a=null:1M, a=null:2M]\n", "two exports have the name"),
    ] {
        write(text);
        let _ = server.command(&["reload"]).code(1).says("nothing changed: ").says(why);
        assert_eq!(all(&server), ["mine", "new", "other", "used"], "{text}");
    }
    // A new export that cannot be opened does not prevent other changes.
    write("export: [a=null:1M, b=/no/such/file]\n");
    let _ = server.command(&["reload", "--dry-run"]).code(1).says("would be failed b: ");
    let failed = server.command(&["reload"]).code(1).says("failed b: ").says("added a");
    let failed = failed.says("/no/such/file does not exist").says("the server tries again");
    let _ = failed.says("one export does not match the configuration");
    assert_eq!(all(&server), ["a", "b", "mine", "used"]);
    assert_eq!(export(&server, "b")["state"], "failed");
    fs::write(&extra, "name: extra\n").expect("a file");
    write(list);
    let _ = server.command(&["reload"]).code(1).says("extra.yaml:1: missing field");
    fs::remove_file(&extra).expect("the file");
    server.signal("HUP");
    wait_for("the exports of the file", COMMAND_TIME_MAX, || {
        (all(&server) == ["gone", "mine", "other", "used"]).then_some(())
    });
    let text = server.command(&["reload"]).ok();
    let _ = text.says("0 exports changed, 3 unchanged");
    innocent.progress();
    drop(innocent);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_replaced_file_is_exported_once_no_session_has_the_old_one() {
    let scratch = Scratch::new();
    let path = scratch.path("vol.img");
    let put = |byte: u8| {
        fs::write(scratch.path("fresh.img"), vec![byte; 1 << 20]).expect("a file");
        fs::rename(scratch.path("fresh.img"), &path).expect("a new file in its place");
    };
    put(1);
    let server = Server::builder().export(format!("vol0={}", scratch.text("vol.img"))).start();
    // While the new file replaces the old one, the export is briefly missing from the list.
    let state = || {
        let all = exports(&server);
        let found = all.iter().find(|export| export["name"] == "vol0");
        found.and_then(|export| export["state"].as_str()).unwrap_or("between").to_owned()
    };
    let holds = |client: &Client| {
        let mut found = [0; 512];
        assert_eq!(RawNbd::go(client.front(), "vol0").read(0, &mut found), Ok(()));
        found[0]
    };
    // The next session gets the new file immediately, even if nothing has checked the file yet.
    for byte in [2, 3, 4] {
        put(byte);
        let client = attach(&server, "vol0", &[]);
        assert_eq!((holds(&client), &*state()), (byte, "open"));
        client.detach();
    }
    let client = attach(&server, "vol0", &[]);
    put(5);
    assert_eq!(state(), "replaced");
    let _ = server.command(&["export", "list"]).ok().says("replaced").says("its content is lost");
    let _ =
        server.command(&["metrics"]).ok().says("rtrs_server_export_replaced{export=\"vol0\"} 1");
    for words in [&["reload", "--dry-run", "-o", "json"][..], &["reload", "-o", "json"]] {
        let report = server.command(words).ok().json();
        assert_eq!(names(&report, "kept"), ["vol0"], "{words:?}: {report}");
        let why = report["kept"][0]["why"].as_str().expect("a reason");
        assert!(why.contains("refers to another file") && why.contains("copy it"), "{why}");
    }
    let words = ["--session-name", "beside", "--access", "ro"];
    let beside = Client::attach("vol0").path(server.portal()).args(&words).start();
    assert_eq!((holds(&client), holds(&beside)), (4, 4), "all sessions use one file");
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[9; 512]), Reply::Error(0));
    drop(raw);
    assert_eq!(fs::read(&path).expect("the new file")[0], 5, "no write goes to the new file");
    client.detach();
    beside.detach();
    wait_for("the new file", COMMAND_TIME_MAX, || (state() == "unused").then_some(()));
    let client = attach(&server, "vol0", &[]);
    assert_eq!(holds(&client), 5);
    client.detach();
    // After the deletion, the file stays open so that it can be copied.
    fs::remove_file(&path).expect("a file");
    assert_eq!(state(), "missing");
    let report = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!(names(&report, "kept"), ["vol0"], "{report}");
    // No command closes the last copy of the content unless forced to.
    for words in [&["drain"][..], &["export", "remove", "vol0"]] {
        let done = server.command(words).code(1).says("of export \"vol0\" was deleted");
        let _ = done.says("copy it through a client, or with `cp ").says("--force continues");
    }
    let preview = server.command(&["export", "remove", "vol0", "--dry-run"]).ok();
    let _ = preview.says("warning: ").says("was deleted").says("--force");
    let client = attach(&server, "vol0", &[]);
    assert_eq!(holds(&client), 5);
    client.detach();
    put(6);
    let _ = server.command(&["reload", "--force"]).ok();
    assert_eq!(state(), "unused");
    // If the new file cannot be exported, the old one stays in use.
    fs::write(scratch.path("fresh.img"), "short").expect("a file");
    fs::rename(scratch.path("fresh.img"), &path).expect("a file that is too short");
    let report = server.command(&["reload", "-o", "json"]).ok().json();
    let why = report["kept"][0]["why"].as_str().expect("a reason");
    assert!(why.contains("less than one block"), "{why}");
    let client = attach(&server, "vol0", &[]);
    assert_eq!(holds(&client), 6);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

/// A missing file must not keep the other exports from being served, and is served once it appears.
#[test]
fn a_missing_export_does_not_keep_the_others_down() {
    let scratch = Scratch::new();
    let (late, never) = (scratch.text("late.img"), scratch.text("never.img"));
    let server = Server::builder()
        .export("vol0=mem:16M")
        .export(format!("late={late}"))
        .export(format!("never={never}"))
        .start();
    let client = attach(&server, "vol0", &[]);
    for (name, path) in [("late", &late), ("never", &never)] {
        let failed = export(&server, name);
        assert_eq!((&failed["state"], &failed["open_by"]), (&json!("failed"), &json!([])));
        let why = failed["reason"].as_str().expect("a reason");
        assert!(why.contains(&**path) && why.contains("does not exist"), "{why}");
        let metric = format!("rtrs_server_export_failed{{export=\"{name}\"}} 1");
        let _ = server.command(&["metrics"]).ok().says(&metric);
        let _ = server.command(&["export", "list"]).ok().says(&format!("{path} does not exist"));
        let taken = format!("{name}=mem:1M");
        let _ = server.command(&["export", "add", &taken]).code(1).says("already");
        let (_, done) = Client::attach(name).path(server.portal()).try_start();
        let _ = done.code(1).says("ENOENT").says("--retry-for");
    }
    let _ = server.command(&["export", "save"]).ok().says(&late).says(&never);
    let report = server.command(&["reload", "-o", "json"]).code(1).json();
    assert_eq!(names(&report, "failed"), ["late", "never"], "{report}");
    // Options can be changed even though the target is missing.
    let dry = server.command(&["export", "set", "late", "block-size=4096", "--dry-run"]).ok();
    let _ = dry.says("late would be changed\n");
    let set = server.command(&["export", "set", "late", "block-size=4096"]).ok();
    let set = set.says("late changed\n").says("warning: export \"late\" is not served yet: ");
    let _ = set.says("late.img does not exist").says("the server tries again");
    let _ = server.command(&["export", "set", "late", "ro=x"]).code(2);
    let waiting = Client::attach("late").path(server.portal()).args(&["--retry-for", "2m"]);
    let waiting = thread::scope(|scope| {
        let waiting = scope.spawn(|| waiting.start());
        let _ = server.wait_output("export=\"late\"");
        sparse_file(&scratch.path("late.img"), MIB);
        waiting.join().expect("an attached client")
    });
    let late = export(&server, "late");
    assert_eq!((&late["state"], &late["block_size"]), (&json!("open"), &json!(4096)), "{late}");
    let _ = server.command(&["export", "remove", "never"]).ok();
    assert_eq!(exports(&server).len(), 2);
    waiting.detach();
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

/// A target that hangs must not keep the others from being opened.
#[test]
fn a_hanging_target_delays_no_other_target() {
    let scratch = Scratch::new();
    let port = free_port();
    let server = Server::builder()
        .export("vol0=mem:16M")
        // Refused at startup, because nothing is listening there yet.
        .export(format!("hang=nbd://127.0.0.1:{port}/x,connect-timeout=10m"))
        .export(format!("late={}", scratch.text("late.img")))
        .start();
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("the port");
    // The attempt for `hang` is now waiting for an NBD server's greeting.
    let (_held, _) = listener.accept().expect("an attempt");
    sparse_file(&scratch.path("late.img"), MIB);
    let state = |name: &str| export(&server, name)["state"].clone();
    let long = COMMAND_TIME_MAX;
    wait_for("the other export", long, || (state("late") == "unused").then_some(()));
    wait_for("the reason", long, || {
        let hanging = export(&server, "hang");
        let why = hanging["reason"].as_str().expect("a reason");
        why.contains("takes longer than 10 s").then_some(())
    });
    let report = server.command(&["reload", "-o", "json"]).code(1).json();
    assert_eq!(names(&report, "failed"), ["hang"], "{report}");
    assert_eq!(report["unchanged"], 2, "{report}");
    let _ = server.command(&["export", "remove", "hang"]).ok();
    let _ = server.stop(STOP_TIME_MAX);
}

/// A file system whose server hangs must not block the shards that serve other exports.
#[test]
fn a_hanging_fuse_file_system_delays_no_other_export() {
    if !requires(&["nbdkit", "nbdfuse"]) {
        return;
    }
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip("mounting with FUSE takes root and /dev/fuse");
        return;
    }
    let scratch = Scratch::new();
    let (disk, mounted) = (scratch.text("disk.img"), scratch.text("mounted.img"));
    for path in ["disk.img", "mounted.img", "good.img"] {
        sparse_file(&scratch.path(path), MIB);
    }
    let socket = scratch.text("nbdkit.sock");
    let program = |name: &str, args: &[&str]| {
        let mut command = Command::new(name);
        command.args(args);
        Proc::start(command)
    };
    let _nbdkit = program("nbdkit", &["-f", "-U", &socket, "file", &disk]);
    wait_for("nbdkit", COMMAND_TIME_MAX, || scratch.path("nbdkit.sock").exists().then_some(()));
    let mut fuse = program("nbdfuse", &[&mounted, "--unix", &socket]);
    let is_fuse = || run("stat", &["-f", "-c", "%T", &mounted], COMMAND_TIME_MAX).stdout;
    wait_for("the mount", COMMAND_TIME_MAX, || is_fuse().contains("fuse").then_some(()));
    let server = Server::builder()
        .export(format!("hung={mounted},no-lock"))
        .export(format!("good={}", scratch.text("good.img")))
        .start();
    let (hung, good) = (attach(&server, "hung", &[]), attach(&server, "good", &[]));
    let mut at_hung = RawNbd::go(hung.front(), "hung");
    let mut at_good = RawNbd::go(good.front(), "good");
    fuse.signal("STOP");
    let cookie = at_hung.send_request(0, consts::CMD_READ, 4096, 4096);
    for _ in 0..20 {
        assert_eq!(at_good.write(0, 0, &[7; 4096]), Reply::Error(0));
        assert_eq!(export(&server, "good")["state"], "open");
    }
    fuse.signal("CONT");
    let mut bytes = [1; 4096];
    at_hung.take_replies(&[cookie], &mut bytes);
    assert_eq!(bytes, [0; 4096]);
    hung.detach();
    good.detach();
    let _ = server.stop(STOP_TIME_MAX);
    let _ = run("umount", &[&mounted], COMMAND_TIME_MAX).ok();
}

/// The only export in a configuration file may appear after its server has started.
#[test]
fn a_server_with_a_configuration_waits_for_its_only_export() {
    let scratch = Scratch::new();
    let late = scratch.text("late.img");
    let config = scratch.text("server.yaml");
    fs::write(&config, format!("export:\n- target: {late}\n  name: late\n")).expect("a file");
    let server = Server::builder().args(&["--config", &config]).start();
    assert_eq!(export(&server, "late")["state"], "failed");
    sparse_file(&scratch.path("late.img"), MIB);
    let state = || export(&server, "late")["state"].clone();
    wait_for("the export", COMMAND_TIME_MAX, || (state() == "unused").then_some(()));
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn flags_are_reloaded_like_a_configuration() {
    let server = Server::builder().export("vol0=null:1M").export("vol1=null:1M").start();
    let _ = server.command(&["export", "set", "vol0", "ro"]).ok();
    let _ = server.command(&["export", "add", "mine=null:1M"]).ok();
    let _ = server.command(&["export", "remove", "vol1"]).ok();
    let report = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!(
        (names(&report, "changed"), names(&report, "added")),
        (vec!["vol0".to_owned()], vec!["vol1".to_owned()])
    );
    assert_eq!(export(&server, "vol0")["read_only"], false);
    assert_eq!(exports(&server).len(), 3, "what a command has added stays");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn names_are_escaped_on_the_terminal() {
    let server = Server::builder().export("vol0=null:1M").start();
    let name = "v\u{1b}[31m";
    let add = format!("{name}=null:1M");
    for words in [
        &["export", "add", &add][..],
        &["export", "set", name, "ro"],
        &["export", "resize", name, "--size", "2M"],
        &["export", "remove", name],
    ] {
        let done = server.command(words).ok().says("v\\u{1b}[31m ");
        assert!(!done.stdout.contains('\u{1b}'), "{done:#?}");
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_memory_export_keeps_its_data_when_its_size_changes() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let write = |target: &str| {
        fs::write(&config, format!("export: [vol0={target}]\n")).expect("a file");
    };
    write("mem:1M");
    let server = Server::builder().args(&["--config", &config]).start();
    let bytes = [7; 4096];
    let client = attach(&server, "vol0", &[]);
    assert_eq!(RawNbd::go(client.front(), "vol0").write(0, 0, &bytes), Reply::Error(0));
    client.detach();
    for (target, hint) in [("mem:2M", "`export resize`"), ("null:1M", "remove it and add it")] {
        write(target);
        for words in [&["reload", "--dry-run", "-o", "json"][..], &["reload", "-o", "json"]] {
            let report = server.command(words).ok().json();
            assert_eq!(names(&report, "kept"), ["vol0"], "{words:?}: {report}");
            let why = report["kept"][0]["why"].as_str().expect("a reason");
            assert!(why.contains("would lose its content") && why.contains(hint), "{why}");
            assert_eq!(names(&report, "failed"), [] as [String; 0]);
        }
        assert_eq!(export(&server, "vol0")["backing"], "mem:1M");
    }
    let client = attach(&server, "vol0", &[]);
    let mut found = [0; 4096];
    assert_eq!(RawNbd::go(client.front(), "vol0").read(0, &mut found), Ok(()));
    assert_eq!(found, bytes);
    client.detach();
    // Follow the hint in the error.
    let _ = server.command(&["export", "resize", "vol0", "--size", "2M"]).ok();
    write("mem:2M");
    assert_eq!(server.command(&["reload", "-o", "json"]).ok().json()["unchanged"], 1);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn hundreds_of_exports_are_reloaded() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let write = |size: &str| {
        let exports = (0..300).map(|n| format!("  - vol{n}=null:{size}\n"));
        fs::write(&config, "export:\n".to_owned() + &exports.collect::<String>()).expect("a file");
    };
    fs::write(&config, "export: [vol0=null:1M]\n").expect("a file");
    let server = Server::builder().args(&["--config", &config]).start();
    write("1M");
    let report = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!((names(&report, "added").len(), &report["unchanged"]), (299, &json!(1)));
    write("2M");
    let report = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!(names(&report, "changed").len(), 300, "{report}");
    assert_eq!(export(&server, "vol299")["size"], 2 * MIB);
    fs::write(&config, "export: [vol0=null:2M]\n").expect("a file");
    let report = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!((names(&report, "removed").len(), &report["unchanged"]), (299, &json!(1)));
    assert_eq!(exports(&server).len(), 1);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_export_that_a_change_has_closed_is_retried() {
    let scratch = Scratch::new();
    let (file, old) = (scratch.path("v.img"), scratch.path("old.img"));
    sparse_file(&file, 1 << 20);
    let server = Server::builder().export(format!("v={}", file.display())).start();
    // The path now refers to a file that another program has locked.
    fs::rename(&file, old).expect("a file");
    sparse_file(&file, 1 << 20);
    let holder = fs::File::open(&file).expect("the file");
    holder.lock().expect("the lock");
    let set = server.command(&["export", "set", "v", "block-size=4096"]).code(1);
    let _ = set.says("with its old options failed too, and the server tries again");
    assert_eq!(export(&server, "v")["state"], "failed");
    let saved = server.command(&["export", "save", "-o", "json"]).ok().json();
    assert_eq!(saved[0]["name"], "v", "{saved}");
    drop(holder);
    wait_for("the export to be served", COMMAND_TIME_MAX, || {
        (export(&server, "v")["state"] == "unused").then_some(())
    });
    let _ = server.stop(STOP_TIME_MAX);
}

/// An NBD server: a client with a TCP port, and the server that it uses.
fn nbd_server() -> (Server, Client, u16) {
    let target = Server::builder().export("vol0=mem:1M").start();
    let client = Client::attach("vol0").path(target.portal()).tcp().start();
    let Front::Tcp(port) = *client.front() else { panic!("a TCP front") };
    (target, client, port)
}

#[test]
fn a_slow_change_to_an_export_delays_no_change_to_another() {
    let (target, client, port) = nbd_server();
    let proxy = Proxy::start("127.0.0.1", &format!("tcp://127.0.0.1:{port}"));
    let at = proxy.portal().replace("tcp", "nbd");
    let server = Server::builder()
        .export(format!("slow={at}/vol0,connect-timeout=10m"))
        .export("other=mem:1M")
        .start();
    assert_eq!(export(&server, "slow")["state"], "unused");
    proxy.shut(&[Way::ToServer, Way::ToClient]);
    thread::scope(|scope| {
        // Opens the target with the new options, and then with the old ones: each takes 10 s.
        let slow = scope.spawn(|| server.command(&["export", "set", "slow", "delay=1ms"]).code(1));
        wait_for("the export to be closed", COMMAND_TIME_MAX, || {
            let is_closed = exports(&server).iter().all(|export| export["name"] != "slow");
            (is_closed || slow.is_finished()).then_some(())
        });
        let _ = server.command(&["export", "set", "other", "ro"]).ok();
        let _ = server.command(&["export", "add", "new=mem:1M"]).ok();
        let _ = slow.join().expect("a command").says("with its old options");
    });
    let _ = server.stop(STOP_TIME_MAX);
    client.detach();
    let _ = target.stop(STOP_TIME_MAX);
}

#[test]
fn a_reload_opens_changed_exports_at_the_same_time() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let (target, client, port) = nbd_server();
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let write = |ports: [u16; 2]| {
        let exports = ["a", "b"].into_iter().zip(ports);
        let exports =
            exports.map(|(name, port)| format!("  - {name}=nbd://127.0.0.1:{port}/vol0,ro\n"));
        fs::write(&config, "export:\n".to_owned() + &exports.collect::<String>()).expect("a file");
    };
    write([port; 2]);
    let server = Server::builder().args(&["--config", &config]).start();
    write(listeners.each_ref().map(|listener| listener.local_addr().expect("a port").port()));
    thread::scope(|scope| {
        let reload = scope.spawn(|| server.command(&["reload", "-o", "json"]).ok().json());
        // Neither target answers before both are being opened.
        let opened = listeners.each_ref().map(|listener| listener.accept().expect("an open").0);
        for stream in opened {
            let onward = TcpStream::connect(("127.0.0.1", port)).expect("the NBD server");
            for (mut from, mut to) in [
                (stream.try_clone().expect("a stream"), onward.try_clone().expect("a stream")),
                (onward, stream),
            ] {
                thread::spawn(move || io::copy(&mut from, &mut to));
            }
        }
        let report = reload.join().expect("a command");
        assert_eq!(names(&report, "changed"), ["a", "b"], "{report}");
    });
    let _ = server.stop(STOP_TIME_MAX);
    client.detach();
    let _ = target.stop(STOP_TIME_MAX);
}

#[test]
fn a_target_that_never_answers_does_not_delay_the_start() {
    let (target, client, port) = nbd_server();
    let proxy = Proxy::start("127.0.0.1", &format!("tcp://127.0.0.1:{port}"));
    proxy.shut(&[Way::ToServer, Way::ToClient]);
    let at = proxy.portal().replace("tcp", "nbd");
    // Longer than startup may take.
    let server = Server::builder()
        .export(format!("hangs={at}/vol0,connect-timeout=10m"))
        .export("vol1=mem:1M")
        .start();
    let state = |name: &str| {
        let exports = exports(&server);
        let found = exports.iter().find(|export| export["name"] == name).expect("the export");
        (found["state"].clone(), found["reason"].as_str().unwrap_or_default().to_owned())
    };
    let (shown, reason) = state("hangs");
    assert_eq!(shown, "failed");
    let expected = ["its target has not responded yet", "takes longer than 10 s"];
    assert!(expected.iter().any(|why| reason.contains(why)), "{reason}");
    assert_eq!(state("vol1").0, "unused");
    attach(&server, "vol1", &[]).detach();
    proxy.open();
    server.wait_output("failed export opened; the server now serves the export");
    assert_eq!(state("hangs").0, "unused");
    attach(&server, "hangs", &[]).detach();
    let _ = server.stop(STOP_TIME_MAX);
    client.detach();
    let _ = target.stop(STOP_TIME_MAX);
}
