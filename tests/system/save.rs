//! Tests of `rtrs-client save`: no volume is lost from the file, and its volumes return to their
//! exports, including those of random sessions after a host restart.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use rtrs_core::prng::Prng;
use rtrs_tests::{
    COMMAND_TIME_MAX, Finished, Front, RawNbd, STOP_TIME_MAX, Scratch, Server, bin, free_port,
    pattern_file, run, sparse_file, wait_for, wait_stopped,
};
use serde_json::Value;

/// A run directory, and the file that `save` writes.
struct Host {
    scratch: Scratch,
}

impl Host {
    fn new() -> Self {
        Self { scratch: Scratch::new() }
    }

    fn client(&self, words: &[&str]) -> Finished {
        let run_dir = self.scratch.text("run");
        run(bin("rtrs-client"), &[words, &["--run-dir", &run_dir]].concat(), COMMAND_TIME_MAX)
    }

    fn attach(&self, name: &str, path: &str) {
        let socket = self.scratch.text(&format!("{name}.nbd"));
        let words = ["attach", name, "--path", path, "--socket", &socket, "--shards=1"];
        let _ = self.client(&words).ok();
    }

    /// Detaches volumes once their NBD clients have closed their connections.
    fn detach(&self, words: &[&str]) -> Finished {
        wait_for("the NBD clients to be gone", COMMAND_TIME_MAX, || {
            let done = self.client(&[&["detach"], words].concat());
            Some(done).filter(|done| !done.is_refused_for_users())
        })
    }

    /// Returns the first byte of a volume.
    fn first_byte(&self, name: &str) -> u8 {
        let mut block = [0; 4096];
        let front = Front::Unix(self.scratch.path(&format!("{name}.nbd")));
        RawNbd::go(&front, name).read(0, &mut block).expect("a read");
        block[0]
    }

    /// Kills every session's process, as a host restart does.
    fn kill_all(&self) {
        ["a", "b"].iter().for_each(|name| self.kill(name));
    }

    fn apply(&self) -> Finished {
        self.client(&["apply", "-f", &self.scratch.text("saved.yaml"), "-o", "json"])
    }

    fn save(&self, more: &[&str]) -> Finished {
        let file = self.scratch.text("saved.yaml");
        self.client(&[&["save", "--output-file", &file], more].concat())
    }

    fn saved(&self) -> String {
        fs::read_to_string(self.scratch.path("saved.yaml")).expect("the file")
    }

    fn pid(&self, name: &str) -> String {
        self.client(&["status", name, "-o", "json"]).ok().json()["pid"].to_string()
    }

    /// Kills the process of a session.
    fn kill(&self, name: &str) {
        let _ = run("kill", &["-KILL", &self.pid(name)], COMMAND_TIME_MAX).ok();
        wait_for("the session to be dead", COMMAND_TIME_MAX, || {
            let listed = self.client(&["list", "-o", "json"]).ok().json();
            let mut all = listed.as_array().expect("a list").iter();
            all.any(|one| one["name"] == name && one["state"] == "dead").then_some(())
        });
    }
}

#[test]
fn a_volume_that_does_not_run_stays_in_the_file() {
    let server = Server::builder().export("a=mem:1M").export("b=mem:1M").export("c=mem:1M").start();
    let host = Host::new();
    for name in ["a", "b", "c"] {
        host.attach(name, server.portal());
    }
    let _ = host.save(&[]).ok();
    let before = host.saved();
    let kept = |done: Finished, why: [&str; 2]| {
        let done = done.code(1).says("nothing was saved");
        let _ = why.into_iter().fold(done, |done, why| done.says(why));
        assert_eq!(host.saved(), before);
    };
    host.kill("b");
    let stopped = host.pid("c");
    let _ = run("kill", &["-STOP", &stopped], COMMAND_TIME_MAX).ok();
    wait_stopped(stopped.parse().expect("a number"));
    let why = ["\"b\": its process has ended; attach it again", "\"c\": "];
    kept(host.save(&[]), why);
    let _ = host.client(&["save"]).code(1).says(why[0]).says(why[1]);
    let _ = run("kill", &["-CONT", &stopped], COMMAND_TIME_MAX).ok();

    // Detached volumes leave nothing on the host, like all volumes after a host restart.
    let missing = |name: &str| {
        format!("\"{name}\": it is listed in {}, but not attached", {
            host.scratch.text("saved.yaml")
        })
    };
    let _ = host.client(&["detach", "b", "c"]).ok();
    kept(host.save(&[]), [&missing("b"), &missing("c")]);
    let done = host.save(&["--force"]).ok().says(&missing("b"));
    let _ = done.says(&missing("c"));
    let only = host.saved();
    assert!(only.contains("export: a") && !only.contains("export: b"), "{only}");
    let _ = host.client(&["detach", "a"]).ok();
    let _ = host.save(&[]).code(1).says(&missing("a"));
    assert_eq!(host.saved(), only);

    // A file with different content.
    fs::write(host.scratch.path("saved.yaml"), "exports: []\n").expect("a file");
    let _ =
        host.save(&[]).code(1).says("cannot see which volumes ").says("unknown key \"exports\"");
    let _ = host.save(&["--force"]).ok();
    assert_eq!(host.saved(), "sessions: []\n");
    let _ = host.save(&[]).ok();
    let _ = server.stop(STOP_TIME_MAX);
}

/// A dead process's control socket is removed by a failed attach, or by hand.
#[test]
fn a_dead_volume_without_its_control_socket_is_named() {
    let server = Server::builder().export("a=mem:1M").export("b=mem:1M").start();
    let host = Host::new();
    ["a", "b"].iter().for_each(|name| host.attach(name, server.portal()));
    let _ = host.save(&[]).ok();
    let before = host.saved();
    host.kill("b");
    fs::remove_file(host.scratch.path("run/b.ctl")).expect("its socket");

    let why = "\"b\": its process has ended, and its control socket is gone; attach it again";
    let _ = host.client(&["save"]).code(1).says("nothing was saved").says(why);
    let _ = host.save(&[]).code(1).says(why);
    assert_eq!(host.saved(), before);
    let forced = host.client(&["save", "--force"]).ok().says(why);
    assert!(!forced.stdout.contains("export: b"), "{forced:?}");
    let file = host.scratch.text("saved.yaml");
    let row = |file: &str, more: &[&str]| {
        let done = host.client(&[&["diff", "-f", file, "-o", "json"], more].concat());
        (done.code, done.json()["sessions"][1].clone())
    };
    let (code, listed) = row(&file, &[]);
    assert_eq!((code, &listed["action"]), (Some(1), &"attach".into()));
    assert_eq!(listed["reason"], "its process has ended");
    let only = host.scratch.text("only.yaml");
    fs::write(&only, &forced.stdout).expect("a file");
    let (code, unlisted) = row(&only, &[]);
    assert_eq!((code, &unlisted["name"]), (Some(0), &"b".into()));
    assert_eq!(unlisted["action"], "not-listed");

    // The two remedies in the message work: another attach, and a detach.
    wait_for("its export to be free", COMMAND_TIME_MAX, || {
        (host.apply().code == Some(0)).then_some(())
    });
    let _ = host.save(&[]).ok();
    assert_eq!(host.saved(), before);
    host.kill("b");
    fs::remove_file(host.scratch.path("run/b.ctl")).expect("its socket");
    let _ = host.client(&["detach", "b"]).ok();
    assert_eq!(host.client(&["save"]).ok().stdout, forced.stdout);
    let _ = host.client(&["detach", "a"]).ok();
    let _ = server.stop(STOP_TIME_MAX);
}

/// Two servers that have an export with the same name, at addresses that can be swapped.
struct Pair {
    host: Host,
    addresses: [String; 2],
}

impl Pair {
    /// Starts the servers, with the given addresses.
    fn servers(&self, addresses: [usize; 2]) -> [Server; 2] {
        let start = |disk: &str, at: usize| {
            let export = format!("vol={}", self.host.scratch.text(disk));
            let server = Server::builder().export(export).listen(&self.addresses[at]);
            server.args(&["--server-id", disk]).start()
        };
        [start("one", addresses[0]), start("two", addresses[1])]
    }

    fn attach(&self, name: &str, at: usize) -> Finished {
        let socket = self.host.scratch.text(&format!("{name}.nbd"));
        let path = &self.addresses[at];
        let words = ["attach", "vol", "--as", name, "--path", path, "--socket", &socket];
        self.host.client(&[&words[..], &["--shards=1"]].concat())
    }
}

#[test]
fn swapped_servers_are_not_confused_after_a_restart() {
    let host = Host::new();
    for (name, seed) in [("one", 1), ("two", 2)] {
        pattern_file(&host.scratch.path(name), 1 << 20, seed);
    }
    let pair =
        Pair { host, addresses: [(); 2].map(|()| format!("tcp://127.0.0.1:{}", free_port())) };
    let host = &pair.host;
    let servers = pair.servers([0, 1]);
    let _ = (pair.attach("a", 0).ok(), pair.attach("b", 1).ok());
    let bytes = ["a", "b"].map(|name| host.first_byte(name));
    assert_ne!(bytes[0], bytes[1]);
    let _ = host.save(&[]).ok();
    let saved = host.saved();
    for name in ["a", "b"] {
        let status = host.client(&["status", name, "-o", "json"]).ok().json();
        let identity = status["identity"].as_str().expect("an identity").to_owned();
        assert!(saved.contains(&format!("identity: {identity}")), "{saved}");
    }
    let report = host.apply().ok().json();
    assert_eq!(report["sessions"][0]["action"], "unchanged", "{report}");

    // Everything was restarted: only the file is left.
    host.kill_all();
    let servers = swap(servers, &pair, [1, 0]);
    fs::remove_dir_all(host.scratch.path("run")).expect("the run directory");
    let refused = |done: Finished| {
        let done = done.code(1);
        assert_eq!(
            done.stdout.matches("cannot use this path: it leads to server ").count(),
            2,
            "{done:?}"
        );
        assert_eq!(host.client(&["list", "-o", "json"]).ok().json(), serde_json::json!([]));
    };
    refused(host.apply());
    let servers = swap(servers, &pair, [0, 1]);
    let _ = host.apply().ok();
    assert_eq!(["a", "b"].map(|name| host.first_byte(name)), bytes);

    // Only the processes have died: their files remain, and the saved file has no identities.
    let file: Vec<&str> = saved.lines().filter(|line| !line.contains("identity: ")).collect();
    fs::write(host.scratch.path("saved.yaml"), file.join("\n")).expect("the file");
    host.kill_all();
    let servers = swap(servers, &pair, [1, 0]);
    refused(host.apply());
    refused(host.apply());
    // A volume that was detached may be attached to any export.
    let _ = host.detach(&["a"]).ok();
    let _ = pair.attach("a", 0).ok();
    assert_eq!(host.first_byte("a"), bytes[1]);
    let refused = pair.attach("b", 1).code(1);
    let _ = refused.says("cannot use this path: it leads to server ");
    let _ = host.detach(&["a"]).ok();
    let servers = swap(servers, &pair, [0, 1]);
    let _ = host.apply().ok();
    assert_eq!(["a", "b"].map(|name| host.first_byte(name)), bytes);
    let _ = host.detach(&["--all"]).ok();
    servers.into_iter().for_each(|server| drop(server.stop(STOP_TIME_MAX)));
}

/// Starts the servers again, with different addresses.
fn swap(servers: [Server; 2], pair: &Pair, addresses: [usize; 2]) -> [Server; 2] {
    servers.into_iter().for_each(Server::crash);
    pair.servers(addresses)
}

/// Number of exports for random sessions.
const EXPORTS: usize = 9;

/// Volume of a random session.
#[derive(Clone, Debug)]
struct RandomVolume {
    export: usize,
    /// Name on the host.
    name: String,
}

/// A server, and a host on which random sessions run.
struct RandomHost {
    host: Host,
    server: Server,
    /// Backing file of each export.
    backings: Vec<String>,
}

impl RandomHost {
    fn new() -> Self {
        let host = Host::new();
        let backing = |at: usize| match at % 2 {
            0 => {
                let file = format!("e{at}.img");
                sparse_file(&host.scratch.path(&file), 1 << 20);
                host.scratch.text(&file)
            }
            _ => "mem:1M".to_owned(),
        };
        let backings: Vec<String> = (0..EXPORTS).map(backing).collect();
        let exports = backings.iter().enumerate();
        let server = exports.fold(Server::builder(), |server, (at, backing)| {
            server.export(format!("e{at}={backing}"))
        });
        let server = server.start();
        Self { host, server, backings }
    }

    /// Returns the path of a volume's socket, as written in a sessions file.
    fn socket(&self, name: &str) -> String {
        self.host.scratch.text(&format!("{name}.nbd"))
    }

    /// Writes a file with a few sessions, and returns their volumes.
    fn write_sessions(&self, prng: &mut Prng) -> Vec<Vec<RandomVolume>> {
        let pick = |prng: &mut Prng, from: &[&str]| from[prng.index(from.len())].to_owned();
        let mut exports: Vec<usize> = (0..EXPORTS).collect();
        let mut sessions = Vec::new();
        let mut text = "sessions:\n".to_owned();
        for _ in 0..=prng.index(3) {
            let take = |_| exports.swap_remove(prng.index(exports.len()));
            let own: Vec<usize> = (0..3).map(take).collect();
            let own = &own[..=prng.index(3)];
            text += &format!("- path: {}\n  shards: 1\n", self.server.portal());
            text += &pick(prng, &["", "  policy: round-robin\n", "  crc: off\n"]);
            text += &pick(prng, &["", "  no-path: queue\n", "  io-timeout: 7s\n"]);
            text += "  volumes:\n";
            let volume = |export: &usize| {
                let name = pick(prng, &[&format!("e{export}"), &format!("local.{export}")]);
                let place = match prng.index(3) {
                    0 => "listen: '127.0.0.1:0'".to_owned(),
                    _ => format!("socket: {}", self.socket(&name)),
                };
                let mode = pick(prng, &["", ", access: ro", ", access: rw", ", read-only: true"]);
                text += &format!("  - {{export: e{export}, name: {name}, {place}{mode}}}\n");
                RandomVolume { export: *export, name }
            };
            sessions.push(own.iter().map(volume).collect());
        }
        fs::write(self.host.scratch.path("random.yaml"), text).expect("a file");
        sessions
    }

    /// Detaches the first volume of a session and attaches it again as the last one.
    fn rotate(&self, session: &[RandomVolume]) {
        let (first, second) = (&session[0], &session[1]);
        let (export, socket) = (format!("e{}", first.export), self.socket(&first.name));
        let _ = self.host.client(&["detach", &first.name]).ok();
        let words = ["attach", &export, "--as", &first.name, "--session", &second.name];
        let _ = self.host.client(&[&words[..], &["--socket", &socket]].concat()).ok();
    }

    fn list(&self) -> Vec<Value> {
        let listed = self.host.client(&["list", "-o", "json"]).ok().json();
        listed.as_array().expect("a list").clone()
    }

    /// Returns the volumes by name, each with its export, session and mode.
    fn volumes(&self) -> BTreeMap<String, [Value; 3]> {
        let of = |volume: &Value| {
            let name = volume["name"].as_str().expect("a name").to_owned();
            let status = self.host.client(&["status", &name, "-o", "json"]).ok().json();
            (name, ["export", "session", "read_only"].map(|field| status[field].clone()))
        };
        self.list().iter().map(of).collect()
    }

    /// Ends everything on the host, as a restart does: only files outside the run directory remain.
    fn restart(&self) {
        let pids: BTreeSet<String> = self.list().iter().map(|one| one["pid"].to_string()).collect();
        for pid in pids {
            let _ = run("kill", &["-KILL", &pid], COMMAND_TIME_MAX).ok();
        }
        wait_for("all to be dead", COMMAND_TIME_MAX, || {
            self.list().iter().all(|one| one["state"] == "dead").then_some(())
        });
        self.wait_sessions_end();
        fs::remove_dir_all(self.host.scratch.path("run")).expect("the run directory");
    }

    fn wait_sessions_end(&self) {
        wait_for("the server to end the sessions", COMMAND_TIME_MAX, || {
            self.server.sessions().is_empty().then_some(())
        });
    }

    /// Applies the saved file first while a volume is missing on the server, then with all volumes
    /// present.
    fn apply_without(&self, missing: &RandomVolume) {
        let (export, backing) = (format!("e{}", missing.export), &self.backings[missing.export]);
        let _ = self.server.command(&["export", "remove", &export]).ok();
        let report = self.host.apply().code(1).json();
        for row in report["sessions"].as_array().expect("a list") {
            let is_missing = row["name"] == missing.name.as_str();
            assert_eq!(row["error"].is_null(), !is_missing, "{report}");
            assert_eq!(row["result"] == "attached", !is_missing, "{report}");
        }
        let _ = self.server.command(&["export", "add", &format!("{export}={backing}")]).ok();
        let _ = self.host.apply().ok();
    }

    /// Runs random sessions, saves them, and applies the file after a host restart.
    fn survive_a_restart(&self, seed: u64) {
        let prng = &mut Prng::new(seed);
        let sessions = self.write_sessions(prng);
        let wanted = self.host.scratch.text("random.yaml");
        let _ = self.host.client(&["apply", "-f", &wanted]).ok();
        for session in sessions.iter().filter(|session| session.len() > 1) {
            if prng.index(2) == 0 {
                self.rotate(session);
            }
        }
        let any = |prng: &mut Prng| {
            let session = &sessions[prng.index(sessions.len())];
            session[prng.index(session.len())].clone()
        };
        let changed = any(prng).name;
        let _ = self.host.client(&["set", &changed, "reconnect-max=9s"]).ok();
        let _ = self.host.save(&["--force"]).ok();
        let (saved, before) = (self.host.saved(), self.volumes());
        let count: usize = sessions.iter().map(Vec::len).sum();
        assert_eq!(before.len(), count, "seed {seed}");

        self.restart();
        match seed % 2 {
            0 => self.apply_without(&any(prng)),
            _ => {
                let _ = self.host.apply().ok();
                assert_eq!(self.host.client(&["save"]).ok().stdout, saved, "seed {seed}");
            }
        }
        assert_eq!(self.volumes(), before, "seed {seed}:\n{saved}");
        let file = self.host.scratch.text("saved.yaml");
        let _ = self.host.client(&["diff", "-f", &file, "--prune"]).ok();
        // A volume that was missing may be in a different position in the file.
        let _ = self.host.save(&[]).ok();
        let _ = self.host.client(&["diff", "-f", &file, "--prune"]).ok();
        let _ = self.host.client(&["detach", "--all"]).ok();
        self.wait_sessions_end();
    }
}

#[test]
fn random_sessions_survive_a_restart() {
    let host = RandomHost::new();
    (0..6).for_each(|seed| host.survive_a_restart(seed));
    let _ = host.server.stop(STOP_TIME_MAX);
}
