//! Tests of `rtrs-client apply`, `diff` and `save`: a host's sessions from a file, with real
//! daemons.

use std::fs::{self, File};
use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Front, Innocent, Proc, RawNbd, STOP_TIME_MAX, Scratch,
    Server, bin, free_port, run, wait_for,
};
use serde_json::{Value, json};

/// A server with three addresses and four exports, and a host without sessions.
struct Host {
    client: Client,
    server: Option<Server>,
    paths: Vec<String>,
}

impl Host {
    fn new() -> Self {
        let mut server = Server::builder();
        for n in 0..4 {
            server = server.export(format!("vol{n}=mem:16M"));
        }
        for ip in ["127.0.0.1", "127.0.0.2", "127.0.0.3"] {
            server = server.listen(format!("tcp://{ip}:{}", free_port()));
        }
        let server = server.start();
        let paths = server.portals().to_vec();
        Self { client: Client::attach("vol0").unattached(), server: Some(server), paths }
    }

    /// Returns an entry for the file: a session over these paths, with these settings.
    fn entry(&self, name: &str, paths: &[usize], more: &str) -> String {
        let paths: Vec<&str> = paths.iter().map(|at| self.paths[*at].as_str()).collect();
        let socket = self.client.run_dir().join(format!("{name}.sock"));
        format!(
            "- path: [{}]\n  shards: 1\n{more}  volumes:\n  - {{export: {name}, socket: {}}}\n",
            paths.join(", "),
            socket.display()
        )
    }

    /// Writes the file, and runs a command on it.
    fn with(&self, entries: &[String], words: &[&str]) -> Finished {
        let file = self.client.run_dir().join("volumes.yaml");
        fs::write(&file, format!("sessions:\n{}", entries.concat())).expect("the file");
        let file = file.display().to_string();
        self.client.command(&[&words[..1], &["-f", &file, "-o", "json"], &words[1..]].concat())
    }

    fn get(&self, name: &str, setting: &str) -> Value {
        let got = self.client.command(&["get", name, setting, "-o", "json"]).ok().json();
        got["settings"][0]["value"].clone()
    }

    fn status(&self, name: &str) -> Value {
        self.client.command(&["status", name, "-o", "json"]).ok().json()
    }

    /// Returns the state of a session, whether or not it serves IO.
    fn client_state(&self, name: &str) -> Value {
        let listed = self.client.command(&["list", "-o", "json"]).ok().json();
        let mut all = listed.as_array().expect("a list").iter();
        all.find(|one| one["name"] == name).expect("the session")["state"].clone()
    }

    /// Kills a session's process, and waits until the session is dead.
    fn kill(&self, name: &str) {
        let pid = self.status(name)["pid"].to_string();
        let _ = run("kill", &["-KILL", &pid], COMMAND_TIME_MAX).ok();
        wait_for("the session to be dead", COMMAND_TIME_MAX, || {
            (self.client_state(name) == "dead").then_some(())
        });
    }

    fn pids(&self) -> Vec<u32> {
        let mut pids = self.client.pids();
        pids.sort_unstable();
        pids
    }

    fn end(self) {
        for session in
            self.client.command(&["list", "-o", "json"]).ok().json().as_array().expect("a list")
        {
            let _ =
                self.client.command(&["detach", session["name"].as_str().expect("a name")]).ok();
        }
        self.client.wait_gone(COMMAND_TIME_MAX);
        self.server.map(|server| server.stop(STOP_TIME_MAX));
    }
}

/// Returns the name and one field of each session.
fn of(done: &Finished, field: &str) -> Vec<(String, Value)> {
    let report = done.json();
    let rows = report["sessions"].as_array().expect("a list of sessions").iter();
    rows.map(|row| (row["name"].as_str().expect("a name").to_owned(), row[field].clone())).collect()
}

fn pairs<const N: usize>(pairs: [(&str, &str); N]) -> Vec<(String, Value)> {
    pairs.map(|(name, value)| (name.to_owned(), value.into())).into()
}

#[test]
fn a_file_can_be_applied_repeatedly() {
    let host = Host::new();
    let file = [host.entry("vol0", &[0], ""), host.entry("vol1", &[0, 1], "  crc: off\n")];
    let attach = pairs([("vol0", "attach"), ("vol1", "attach")]);
    assert_eq!(
        of(&host.with(&file, &["diff"]).code(1).says("2 of 2 sessions differ"), "action"),
        attach
    );
    assert_eq!(of(&host.with(&file, &["apply", "--dry-run"]).ok(), "action"), attach);
    assert!(host.pids().is_empty(), "nothing was done");
    let done = host.with(&file, &["apply"]).ok();
    assert_eq!(of(&done, "result"), pairs([("vol0", "attached"), ("vol1", "attached")]));
    let pids = host.pids();
    assert_eq!((pids.len(), host.get("vol1", "crc")), (2, "off".into()));
    let unchanged = pairs([("vol0", "unchanged"), ("vol1", "unchanged")]);
    for words in [&["apply"][..], &["diff"], &["apply", "--prune", "--reattach"]] {
        assert_eq!(of(&host.with(&file, words).ok(), "action"), unchanged);
    }
    assert_eq!(host.pids(), pids, "no new process");

    // Settings that can change online are changed under load.
    let innocent = Innocent::start(&Front::Unix(host.client.run_dir().join("vol0.sock")), "vol0");
    let online = "  policy: round-robin\n  no-path: queue\n";
    let file = [host.entry("vol0", &[1, 2], online), file[1].clone()];
    let reported = host.with(&file, &["diff"]).code(1).json();
    let differences = &reported["sessions"][0]["differences"];
    assert_eq!(differences.as_array().map(Vec::len), Some(5), "{reported}");
    let _ = host.with(&file, &["apply", "--dry-run"]).ok();
    assert_eq!(host.get("vol0", "policy"), "min-inflight", "nothing was done");
    let done = host.with(&file, &["apply"]).ok();
    assert_eq!(of(&done, "result")[0].1, "changed");
    let values = (host.get("vol0", "policy"), host.get("vol0", "no-path"));
    assert_eq!(values, ("round-robin".into(), "queue".into()));
    let paths = host.status("vol0")["paths"].clone();
    let listed: Vec<&str> =
        paths.as_array().expect("paths").iter().filter_map(|path| path["path"].as_str()).collect();
    assert_eq!(listed, [&host.paths[1], &host.paths[2]]);
    assert_eq!(of(&host.with(&file, &["apply"]).ok(), "action"), unchanged);
    assert_eq!(host.pids(), pids, "no new process");
    innocent.check();
    host.end();
}

#[test]
fn a_detailed_exit_code_says_whether_anything_was_changed() {
    let host = Host::new();
    let detailed = |file: &[String], more: &[&str], code: i32| {
        let done = host.with(file, &[&["apply", "--detailed-exitcode"], more].concat());
        assert!(code == 1 || done.stderr.is_empty(), "{done:?}");
        let changed = done.json()["changed"].clone();
        assert_eq!((done.code, changed.as_bool()), (Some(code), Some(code == 3)), "{done:?}");
    };
    let file = [host.entry("vol0", &[0], ""), host.entry("vol1", &[0], "")];
    detailed(&file, &["--dry-run"], 3);
    detailed(&file, &[], 3);
    detailed(&file, &["--dry-run"], 0);
    detailed(&file, &["--prune", "--reattach"], 0);
    detailed(&[host.entry("vol0", &[0], "  policy: round-robin\n"), file[1].clone()], &[], 3);
    detailed(&file[..1], &["--prune"], 3);
    // Without the flag, only the report says so.
    let done = host.with(&file, &["apply"]).ok();
    assert_eq!(done.json()["changed"], true);
    assert_eq!(host.with(&file, &["apply"]).ok().json()["changed"], false);
    assert_eq!(host.with(&file, &["diff"]).ok().json()["changed"], Value::Null);
    // A failure takes precedence.
    let needs = [host.entry("vol0", &[0], "  crc: off\n"), file[1].clone()];
    detailed(&needs, &[], 1);
    let done = host.with(&needs, &["apply", "--detailed-exitcode", "--reattach"]);
    assert_eq!((done.code, done.json()["changed"].as_bool()), (Some(3), Some(true)), "{done:?}");
    let bad = host.entry("vol2", &[0], "  polcy: x\n");
    let _ = host.with(&[bad], &["apply", "--detailed-exitcode"]).code(2);
    host.end();
}

#[test]
fn a_mistyped_address_removes_no_connected_path() {
    let host = Host::new();
    let _ = host.with(&[host.entry("vol0", &[0, 1], "")], &["apply"]).ok();
    let dead = format!("tcp://127.0.0.1:{}", free_port());
    let wrong = host.entry("vol0", &[0], "  policy: round-robin\n").replace(&host.paths[0], &dead);
    let done = host.with(&[wrong], &["apply"]).code(1);
    let done = done.says("no added path is connected").says(&host.paths[0]);
    let _ = done.says("(done before: set policy, added path").says(&dead);
    wait_for("the old paths", COMMAND_TIME_MAX, || {
        let paths = host.status("vol0")["paths"].clone();
        let is_up = |path: &String| {
            let mut paths = paths.as_array().expect("paths").iter();
            paths.any(|one| one["path"] == **path && one["state"] == "connected")
        };
        host.paths[..2].iter().all(is_up).then_some(())
    });
    // The correct address replaces all paths.
    let _ = host.with(&[host.entry("vol0", &[2], "")], &["apply"]).ok();
    let paths = host.status("vol0")["paths"].clone();
    assert_eq!(paths.as_array().map(Vec::len), Some(1), "{paths}");
    host.end();
}

#[test]
fn a_required_reattach_happens_on_request() {
    let host = Host::new();
    let _ = host.with(&[host.entry("vol0", &[0], "")], &["apply"]).ok();
    let pid = host.pids();
    let file = [host.entry("vol0", &[0], "  crc: off\n  policy: round-robin\n")];
    let left = host.with(&file, &["apply"]).code(1).says("--reattach");
    assert_eq!(of(&left, "action"), pairs([("vol0", "needs-reattach")]));
    assert_eq!(of(&left, "result")[0].1, Value::Null);
    assert_eq!((host.pids(), host.get("vol0", "crc")), (pid.clone(), "on".into()));
    assert_eq!(host.get("vol0", "policy"), "round-robin", "this can change online");
    let done = host.with(&file, &["apply", "--reattach"]).ok();
    assert_eq!(of(&done, "result"), pairs([("vol0", "reattached")]));
    assert_eq!(host.get("vol0", "crc"), "off");
    assert_ne!(host.pids(), pid);
    let _ = host.with(&file, &["diff"]).ok();
    host.end();
}

#[test]
fn all_volumes_of_a_session_are_reattached_together() {
    let host = Host::new();
    let socket = |name: &str| host.client.run_dir().join(format!("{name}.sock"));
    let file = |more: &str| {
        let volume =
            |name: &str| format!("  - {{export: {name}, socket: {}}}\n", socket(name).display());
        [host.entry("vol0", &[0], more) + &volume("vol1") + &volume("vol2")]
    };
    let all = |text: &str| pairs(["vol0", "vol1", "vol2"].map(|name| (name, text)));
    let done = host.with(&file(""), &["apply"]).ok();
    assert_eq!(of(&done, "result"), all("attached"));
    let pid = host.pids();
    let changed = file("  crc: off\n");
    assert_eq!(of(&host.with(&changed, &["apply"]).code(1), "action"), all("needs-reattach"));

    // No volume is detached while one is in use.
    let raw = RawNbd::go(&Front::Unix(socket("vol1")), "vol1");
    let refused = host.with(&changed, &["apply", "--reattach"]).code(1);
    let _ = refused.says("cannot reattach it: ").says("is served to NBD clients");
    assert_eq!((host.pids(), host.get("vol0", "crc")), (pid.clone(), "on".into()));
    drop(raw);
    let done = wait_for("the NBD client to be gone", COMMAND_TIME_MAX, || {
        let done = host.with(&changed, &["apply", "--reattach"]);
        Some(done).filter(|done| !done.is_refused_for_users())
    });
    assert_eq!(of(&done.ok(), "result"), all("reattached"));
    let names = json!(["vol0", "vol1", "vol2"]);
    for name in ["vol0", "vol1", "vol2"] {
        assert_eq!((host.get(name, "crc"), &host.status(name)["volumes"]), ("off".into(), &names));
    }
    // The old process may take a short while to end.
    wait_for("one process", COMMAND_TIME_MAX, || (host.pids().len() == 1).then_some(()));
    assert_ne!(host.pids(), pid);
    let _ = host.with(&changed, &["diff"]).ok();

    // A session with a volume that the file does not list is not reattached.
    let fewer = [host.entry("vol0", &[0], "")];
    let refused = host.with(&fewer, &["apply", "--reattach"]).code(1);
    let _ = refused.says("the file does not list the other volumes of its session with it");
    assert_eq!(host.get("vol1", "crc"), "off");
    host.end();
}

#[test]
fn a_missing_volume_blocks_no_other_of_its_session() {
    let host = Host::new();
    let dir = host.client.run_dir().to_owned();
    let later = |name: &str, socket: String| format!("  - {{export: {name}, socket: {socket}}}\n");
    let socket = |name: &str| dir.join(format!("{name}.sock")).display().to_string();
    let all = host.entry("gone", &[0], "") + &later("vol0", socket("vol0"));
    let all = all + &later("lost", socket("lost")) + &later("vol1", socket("vol1"));
    let file = [all];
    let results = |done: &Finished| {
        let texts = |field| of(done, field).into_iter().map(|(_, value)| value.to_string());
        texts("result").zip(texts("error")).collect::<Vec<_>>()
    };
    let attached = ("\"attached\"".to_owned(), "null".to_owned());
    let is_missing = |(result, error): &(String, String), name: &str| {
        let expected = format!("cannot attach {name}: ");
        assert!(result == "null" && error.contains(&expected), "{error}");
        assert!(error.contains("ENOENT"), "{error}");
    };
    // If no volume can be opened, each has its own reason.
    let none = [host.entry("gone", &[0], "") + &later("lost", socket("lost"))];
    let done = host.with(&none, &["apply"]).code(1);
    results(&done).iter().zip(["gone", "lost"]).for_each(|(row, name)| is_missing(row, name));
    assert_eq!(host.client.command(&["list", "-o", "json"]).ok().json(), json!([]));

    let done = host.with(&file, &["apply"]).code(1).says("cannot apply 2 of 4 sessions");
    let rows = results(&done);
    assert_eq!((&rows[1], &rows[3]), (&attached, &attached));
    is_missing(&rows[0], "gone");
    is_missing(&rows[2], "lost");
    let pids = host.pids();
    assert_eq!(pids.len(), 1);
    let session = host.status("vol1")["session"].as_str().expect("a name").to_owned();
    assert!(session.ends_with("-gone"), "named after the first: {session}");
    assert_eq!(host.status("vol1")["volumes"], json!(["vol0", "vol1"]));
    // Another apply does not interrupt the volumes that are attached.
    let again = host.with(&file, &["apply", "--reattach"]).code(1);
    is_missing(&results(&again)[0], "gone");
    assert_eq!(host.pids(), pids);

    // The missing volumes join the running session.
    let server = host.server.as_ref().expect("a server");
    for name in ["gone", "lost"] {
        let _ = server.command(&["export", "add", &format!("{name}=mem:16M")]).ok();
    }
    let done = host.with(&file, &["apply"]).ok();
    assert_eq!((&results(&done)[0], &results(&done)[2]), (&attached, &attached));
    let _ = host.with(&file, &["diff"]).ok();
    assert_eq!(host.pids(), pids, "no new process");
    assert_eq!(host.status("gone")["session"], session);
    let _ = host.client.command(&["detach", "--all"]).ok();
    host.client.wait_gone(COMMAND_TIME_MAX);

    // Nor does a first volume block others if its socket's directory is missing, or if its export
    // is a different disk.
    let nowhere = socket("none/gone");
    let moved = format!("{}, identity: -/{:032x}", socket("gone"), 7);
    for (place, why) in [(nowhere, "does not exist; create it"), (moved, "is a different disk")] {
        let file = [file[0].replacen(&socket("gone"), &place, 1)];
        let done = host.with(&file, &["apply"]).code(1).says(why);
        let rows = results(&done);
        assert_eq!(rows[1..], [(); 3].map(|()| attached.clone()), "{place}");
        let is_named = |name| host.status(name)["session"] == session.as_str();
        assert!(["vol0", "vol1", "lost"].into_iter().all(is_named), "{place}");
        let _ = host.client.command(&["detach", "--all"]).ok();
        host.client.wait_gone(COMMAND_TIME_MAX);
    }
    host.end();
}

/// Waits until a session is in `state`, and checks that `diff` and `apply` report that.
fn serves_no_io(host: &Host, file: &[String], state: &str) {
    wait_for(state, COMMAND_TIME_MAX, || (host.client_state("vol0") == state).then_some(()));
    let pids = host.pids();
    let expected = pairs([("vol0", "serves-no-io")]);
    for words in [&["diff"][..], &["apply"], &["apply", "--reattach"], &["apply", "--dry-run"]] {
        let done = host.with(file, words).code(1).says("serve no IO");
        assert_eq!(of(&done, "action"), expected, "{words:?}");
        let reason = of(&done, "reason")[0].1.to_string();
        assert!(reason.contains(&format!("{state}: IO waits")), "{reason}");
    }
    assert_eq!(host.pids(), pids, "the IO that waits stays");
}

#[test]
fn a_session_without_service_is_reported_and_stays() {
    let mut host = Host::new();
    let file = [host.entry("vol0", &[0], "  no-path: queue\n  reconnect-max: 200ms\n")];
    let _ = host.with(&file, &["apply"]).ok();
    host.server.take().into_iter().for_each(Server::crash);
    serves_no_io(&host, &file, "no-path");
    // `apply` changes the settings that it can change online; the session still serves no IO.
    let online = [host.entry("vol0", &[0], "  no-path: queue\n  reconnect-max: 100ms\n")];
    let _ = host
        .with(&online, &["apply"])
        .code(1)
        .says("the session was changed, but serves no IO: no-path");
    assert_eq!(host.get("vol0", "reconnect-max"), "100ms");

    // A restarted server's memory is a different export.
    let server = Server::builder().export("vol0=mem:16M").listen(&host.paths[0]);
    host.server = Some(server.start());
    serves_no_io(&host, &online, "identity-mismatch");
    let offline = [online[0].replace("  no-path", "  crc: off\n  no-path")];
    let refused = host.with(&offline, &["apply", "--reattach"]).code(1);
    let _ = refused.says("cannot reattach it: its paths lead to another server or export");
    assert_eq!(host.get("vol0", "crc"), "on");
    host.end();
}

#[test]
fn unlisted_volumes_stay_unless_pruned() {
    let host = Host::new();
    let both = [host.entry("vol0", &[0], ""), host.entry("vol1", &[0], "")];
    let _ = host.with(&both, &["apply"]).ok();
    let expected = pairs([("vol0", "unchanged"), ("vol1", "not-listed")]);
    assert_eq!(of(&host.with(&both[..1], &["apply"]).ok(), "action"), expected);
    let _ = host.with(&both[..1], &["diff"]).ok();
    let expected = pairs([("vol0", "unchanged"), ("vol1", "detach")]);
    for words in [&["diff", "--prune"][..], &["apply", "--prune", "--dry-run"]] {
        let code = i32::from(words[0] == "diff");
        assert_eq!(of(&host.with(&both[..1], words).code(code), "action"), expected);
    }
    assert_eq!(host.pids().len(), 2, "nothing was done");
    let vol1 = Front::Unix(host.client.run_dir().join("vol1.sock"));
    // A connection in its handshake keeps no volume attached.
    let shaking = RawNbd::hello(&vol1);
    wait_for("its connection", COMMAND_TIME_MAX, || {
        (host.status("vol1")["nbd_connections"] == 1).then_some(())
    });
    let _ = host.with(&both[..1], &["apply", "--prune", "--dry-run"]).ok();
    drop(shaking);
    // A volume with an NBD client is not detached either, and a dry run says so.
    let raw = RawNbd::go(&vol1, "vol1");
    let in_use = "\"vol1\" is served to NBD clients (1 connected); end them first";
    let shown = host.with(&both[..1], &["apply", "--prune", "--dry-run"]).code(1);
    assert_eq!(of(&shown, "action"), expected);
    assert!(of(&shown, "error")[1].1.to_string().replace('\\', "").contains(in_use), "{shown:?}");
    let shown = host.with(&both[..1], &["diff", "--prune"]).code(1);
    assert!(of(&shown, "reason")[1].1.to_string().replace('\\', "").contains(in_use), "{shown:?}");
    let _ = host.with(&both[..1], &["apply", "--prune", "--dry-run", "--force"]).ok();
    let refused = host.with(&both[..1], &["apply", "--prune"]).code(1);
    let _ = refused.says("is served to NBD clients");
    assert_eq!(host.pids().len(), 2, "the session continues");
    let pruned = host.with(&both[..1], &["apply", "--prune", "--force"]).ok();
    raw.expect_closed();
    assert_eq!(of(&pruned, "result")[1], ("vol1".to_owned(), "detached".into()));
    wait_for("its process to end", COMMAND_TIME_MAX, || (host.pids().len() == 1).then_some(()));
    let _ = host.with(&both[..1], &["diff", "--prune"]).ok();
    for words in
        [&["apply", "--prune"][..], &["apply", "--prune", "--dry-run"], &["diff", "--prune"]]
    {
        let none = host.with(&both[..0], words);
        let _ = none.code(2).says("the file lists no session, and --prune would detach all");
    }
    assert_eq!(host.pids().len(), 1, "nothing was done");
    host.kill("vol0");
    let other = [host.entry("vol2", &[0], "")];
    let dead = host.with(&other, &["apply", "--prune", "--dry-run"]).code(1);
    let _ = dead.says("its process is dead; clean up with `rtrs-client detach`");
    host.end();
}

/// The pruned sessions hold the export or the socket of a session that is then attached.
#[test]
fn a_pruned_session_makes_room_for_others() {
    let host = Host::new();
    let before = [host.entry("vol0", &[0], ""), host.entry("vol1", &[0], "")];
    let _ = host.with(&before, &["apply"]).ok();
    // Another volume of the export, and another export at the socket.
    let renamed = before[0].replace("{export: vol0,", "{export: vol0, name: new,");
    let renamed = renamed.replace("vol0.sock", "new.sock");
    let moved = host.entry("vol2", &[0], "").replace("vol2.sock", "vol1.sock");
    let after = [renamed, moved];
    let actions =
        pairs([("new", "attach"), ("vol2", "attach"), ("vol0", "detach"), ("vol1", "detach")]);
    let refused = host.with(&after, &["apply", "--dry-run"]).code(1);
    let _ = refused.says("vol1.sock is in use by another process");
    // A session in use that holds the export or the socket counts as a difference and blocks apply.
    let raw = RawNbd::go(&Front::Unix(host.client.run_dir().join("vol1.sock")), "vol1");
    let differs = host.with(&after, &["diff", "--prune"]).code(1);
    assert_eq!(of(&differs, "action"), actions);
    let reasons = of(&differs, "reason");
    assert_eq!(reasons[1].1, "replaces \"vol1\"");
    assert!(reasons[3].1.to_string().contains("is served to NBD clients"), "{reasons:?}");
    let refused = host.with(&after, &["apply", "--dry-run", "--prune"]).code(1);
    let _ = refused.says("vol1.sock is in use by another process");
    drop(raw);
    wait_for("the end of the client", COMMAND_TIME_MAX, || {
        (host.status("vol1")["nbd_clients"] == 0).then_some(())
    });
    let shown = host.with(&after, &["apply", "--dry-run", "--prune"]).ok();
    assert_eq!(of(&shown, "action"), actions);
    assert_eq!(of(&shown, "reason")[1].1, "replaces \"vol1\"");
    let done = host.with(&after, &["apply", "--prune"]).ok();
    let results = pairs([
        ("new", "attached"),
        ("vol2", "attached"),
        ("vol0", "detached"),
        ("vol1", "detached"),
    ]);
    assert_eq!(of(&done, "result"), results);
    let _ = host.with(&after, &["diff", "--prune"]).ok();
    host.end();
}

#[test]
fn one_failing_volume_does_not_block_others() {
    let host = Host::new();
    let file = ["vol0", "none", "vol1"].map(|name| host.entry(name, &[0], ""));
    let done = host.with(&file, &["apply"]).code(1).says("cannot apply 1 of 3 sessions");
    let results = of(&done, "result");
    let attached = Value::from("attached");
    assert_eq!((&results[0].1, &results[1].1, &results[2].1), (&attached, &Value::Null, &attached));
    let error = of(&done, "error")[1].1.to_string();
    assert!(error.contains("ENOENT"), "{error}");
    assert_eq!(host.pids().len(), 2);
    // An invalid file changes nothing at all.
    for (bad, expected) in [
        (host.entry("vol2", &[0], "  polcy: x\n"), "did you mean"),
        (host.entry("vol2", &[], ""), "it has no path"),
        (host.entry("vol0", &[0], ""), "it is listed twice"),
        (
            host.entry("vol2", &[0], "").replace("vol2.sock", "vol0.sock"),
            "has the same socket as session",
        ),
    ] {
        let _ = host.with(&[host.entry("vol0", &[1], ""), bad], &["apply"]).code(2).says(expected);
    }
    assert_eq!(host.status("vol0")["paths"][0]["path"], host.paths[0]);
    for (command, code) in [("apply", 1), ("diff", 2)] {
        let missing = host.client.command(&[command, "-f", "/nonexistent/v.yaml"]);
        let _ = missing.code(code).says("cannot read the configuration file");
    }
    let bad = host.entry("vol2", &[0], "  polcy: x\n");
    let _ = host.with(&[bad], &["diff"]).code(2).says("did you mean");
    // A session that died is reattached.
    host.kill("vol1");
    let good = [file[0].clone(), file[2].clone()];
    let again = host.with(&good, &["diff"]).code(1);
    assert_eq!(of(&again, "reason")[1].1, "its process has ended");
    let again = wait_for("its export to be free", COMMAND_TIME_MAX, || {
        let done = host.with(&good, &["apply"]);
        (done.code == Some(0)).then_some(done)
    });
    assert_eq!(of(&again, "result")[1].1, "attached");
    host.end();
}

#[test]
fn saved_volumes_apply_without_changes() {
    let host = Host::new();
    let socket = host.client.run_dir().join("s.sock").display().to_string();
    let words = ["attach", "vol0", "--path", &host.paths[0], "--socket", &socket];
    let more = ["--policy", "min-latency", "--crc", "off", "--shards=1", "--read-only"];
    let _ = host.client.command(&[&words[..], &more].concat()).ok();
    let words = ["attach", "vol1", "--path", &host.paths[1], "--listen", "127.0.0.1:0"];
    let _ = host.client.command(&words).ok();
    let _ = host.client.command(&["set", "vol0", "no-path=queue"]).ok();
    let _ = host.client.command(&["path", "add", "vol0", &host.paths[2]]).ok();
    let pids = host.pids();
    let piped = Command::new("sh")
        .args(["-c", "\"$0\" save --run-dir \"$1\" | \"$0\" apply -f - -o json --run-dir \"$1\""])
        .args([bin("rtrs-client").as_os_str(), host.client.run_dir().as_os_str()])
        .output()
        .expect("a shell");
    let report: Value = serde_json::from_slice(&piped.stdout).expect("a report");
    for session in report["sessions"].as_array().expect("sessions") {
        assert_eq!(session["action"], "unchanged", "{report}");
    }
    assert!(piped.status.success() && host.pids() == pids, "{piped:?}");
    let file = host.client.run_dir().join("saved.yaml").display().to_string();
    let _ = host.client.command(&["save", "--output-file", &file]).ok();
    let saved = fs::read_to_string(&file).expect("the file");
    let to_stdout = host.client.command(&["save", "--output-file", "-"]).ok();
    let is_created = fs::remove_file("-").is_ok();
    assert_eq!((&to_stdout.stdout, is_created), (&saved, false));
    for line in ["policy: min-latency", "no-path: queue", "read-only: true", &host.paths[2]] {
        assert!(saved.contains(line), "no {line:?} in\n{saved}");
    }
    assert!(!saved.contains("reconnect-max"), "defaults are left out:\n{saved}");
    let as_json = host.client.command(&["save", "-o", "json"]).ok().json();
    // For an in-memory export, `save` writes only the server's ID.
    let identity = host.status("vol1")["identity"].as_str().expect("an identity").to_owned();
    let (server, _) = identity.split_once('/').expect("two IDs");
    assert_eq!(
        as_json["sessions"][1]["volumes"],
        json!([{
            "export": "vol1",
            "identity": format!("{server}/-"),
            "listen": "127.0.0.1:0",
        }])
    );
    // The saved file recreates the same sessions.
    for name in ["vol0", "vol1"] {
        let _ = host.client.command(&["detach", name]).ok();
    }
    let _ = host.client.command(&["apply", "-f", &file]).ok();
    let again = host.client.command(&["save"]).ok();
    assert_eq!(again.stdout, saved);
    host.end();
}

#[test]
fn concurrent_applies_take_turns() {
    let host = Host::new();
    let file = [host.entry("vol0", &[0], "")];
    let _ = host.with(&file, &["apply"]).ok();
    let lock = File::options().append(true).open(host.client.run_dir().join("apply.lock"));
    let lock = lock.expect("the lock");
    lock.lock().expect("a lock");
    let mut apply = Command::new(bin("rtrs-client"));
    apply.arg("apply").arg("-f").arg(host.client.run_dir().join("volumes.yaml"));
    apply.arg("--run-dir").arg(host.client.run_dir());
    let mut second = Proc::start(apply);
    let _ = second.wait_lines("another apply is running", 1, COMMAND_TIME_MAX);
    assert!(second.is_running());
    // The lock does not block commands that only read.
    let _ = host.with(&file, &["diff"]).ok();
    drop(lock);
    let _ = second.wait(COMMAND_TIME_MAX).ok().says("unchanged");
    host.end();
}

#[test]
fn a_byte_order_mark_is_ignored() {
    let host = Host::new();
    let file = host.client.run_dir().join("marked.yaml");
    let entry = host.entry("vol0", &[0], "  crc: no\n  invalidate-reads: yes\n");
    fs::write(&file, format!("\u{feff}sessions:\n{entry}")).expect("the file");
    let name = file.display().to_string();
    let _ = host.client.command(&["apply", "-f", &name]).ok().says("attached");
    let values = (host.get("vol0", "crc"), host.get("vol0", "invalidate-reads"));
    assert_eq!(values, ("off".into(), "on".into()));
    let piped = Command::new("sh")
        .args(["-c", "\"$0\" apply -f - --run-dir \"$1\" <\"$2\""])
        .args([bin("rtrs-client").as_os_str(), host.client.run_dir().as_os_str(), file.as_os_str()])
        .output()
        .expect("a shell");
    assert!(piped.status.success(), "{piped:?}");
    assert!(String::from_utf8_lossy(&piped.stdout).contains("unchanged"), "{piped:?}");
    host.end();
}

#[test]
fn a_saved_session_of_several_volumes_is_reapplied() {
    let server = Server::builder().export("a=mem:1M").export("b=mem:1M").export("c=mem:1M").start();
    let scratch = Scratch::new();
    let (run_dir, file) = (scratch.text("run"), scratch.text("saved.yaml"));
    let socket = scratch.text("{name}.nbd");
    let client = |words: &[&str]| {
        let args = [words, &["--run-dir", &run_dir]].concat();
        run(bin("rtrs-client"), &args, COMMAND_TIME_MAX)
    };
    let processes = || {
        let listed = client(&["list", "-o", "json"]).ok().json();
        let sessions = listed.as_array().expect("a list of sessions").clone();
        let pid = |name: &str| {
            let session = sessions.iter().find(|session| session["name"] == name);
            session.map(|session| session["pid"].clone())
        };
        ["a", "b", "c"].map(pid)
    };
    let path = ["--path", server.portal(), "--socket", &socket];
    let _ = client(&[&["attach", "a", "b"], &path[..]].concat()).ok();
    let _ = client(&[&["attach", "c"], &path[..]].concat()).ok();
    let [a, b, c] = processes();
    assert!(a.is_some() && a == b && b != c, "{a:?} {b:?} {c:?}");
    let _ = client(&["save", "--output-file", &file]).ok();
    let saved = fs::read_to_string(&file).expect("the saved file");

    // As after a host restart.
    let _ = client(&["detach", "--all"]).ok();
    let _ = client(&["apply", "-f", &file]).ok();
    let [a, b, c] = processes();
    assert!(a.is_some() && a == b && b != c, "{a:?} {b:?} {c:?}");
    assert_eq!(client(&["save"]).ok().stdout, saved);
    let _ = client(&["diff", "-f", &file]).code(0);

    // A volume that is missing joins the session, which keeps its process.
    let _ = client(&["detach", "b"]).ok();
    let _ = client(&["diff", "-f", &file]).code(1);
    let _ = client(&["apply", "-f", &file]).ok();
    assert_eq!(processes(), [a.clone(), a, c]);
    let _ = client(&["detach", "--all"]).ok();
    let _ = server.stop(STOP_TIME_MAX);
}
