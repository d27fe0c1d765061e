//! Tests of several volumes in one session: one process and one set of connections, where each
//! volume has its own socket and statistics and is detached separately; volumes that are added,
//! refused, removed or lost while others keep running.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Exposition, Finished, Front, RawNbd, Reply, STOP_TIME_MAX, Server,
    ServerBuilder, scrape, wait_for,
};
use serde_json::{Value, json};

const DONE: Reply = Reply::Error(0);
/// Volumes of different sizes, so that none is mistaken for another.
const EXPORTS: [(&str, &str); 4] = [("a", "1M"), ("b", "2M"), ("pool/c", "4M"), ("d", "8M")];

fn server() -> ServerBuilder {
    EXPORTS
        .iter()
        .fold(Server::builder(), |server, (name, size)| server.export(format!("{name}=mem:{size}")))
}

/// A run directory with the volumes' sockets in it.
struct Host(Client);

impl Host {
    fn new() -> Self {
        Self(Client::attach("a").unattached())
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.0.run_dir().join(format!("{name}.nbd"))
    }

    fn run(&self, words: &[&str]) -> Finished {
        self.0.command(words)
    }

    /// Attaches volumes to a new session, with one socket each.
    fn attach(&self, server: &Server, names: &[&str], args: &[&str]) -> Finished {
        let sockets = self.socket("{name}").display().to_string();
        let fixed = ["--path", server.portal(), "--socket", &sockets, "--shards=2"];
        self.run(&[&["attach"], names, &fixed, args].concat())
    }

    /// Detaches a volume once its NBD clients have closed their connections.
    fn detach(&self, name: &str) -> Finished {
        self.0.command_without_users(&["detach", name])
    }

    /// Adds a volume to another volume's session.
    fn add(&self, name: &str, session: &str) -> Finished {
        let socket = self.socket(name).display().to_string();
        self.run(&["attach", name, "--session", session, "--socket", &socket])
    }

    fn nbd(&self, name: &str) -> RawNbd {
        let file = name.replace('/', "%2F");
        RawNbd::go(&Front::Unix(self.socket(&file)), name)
    }

    fn json(&self, command: &str, name: &str) -> Value {
        self.run(&[command, name, "-o", "json"]).json()
    }

    /// Returns the names and states of the volumes that `list` shows.
    fn list(&self) -> Vec<(String, String)> {
        let list = self.run(&["list", "-o", "json"]).ok().json();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let volumes = list.as_array().expect("a list").iter();
        volumes.map(|volume| (text(&volume["name"]), text(&volume["state"]))).collect()
    }

    fn assert_listed(&self, names: &[&str]) {
        let expected = names.iter().map(|name| ((*name).to_owned(), "open".to_owned()));
        assert_eq!(self.list(), expected.collect::<Vec<_>>());
    }
}

/// Writes a different block to each volume, then reads all blocks back.
fn write_own(host: &Host, names: &[&str], seed: u8) {
    let mut all: Vec<_> = names.iter().map(|name| host.nbd(name)).collect();
    let byte = |at: usize| seed + u8::try_from(at).expect("a few volumes");
    for (at, nbd) in all.iter_mut().enumerate() {
        assert_eq!(nbd.write(0, 4096, &[byte(at); 4096]), DONE, "{}", names[at]);
    }
    for (at, nbd) in all.iter_mut().enumerate() {
        let mut block = [0; 4096];
        nbd.read(4096, &mut block).expect("a read");
        assert_eq!(block, [byte(at); 4096], "{}", names[at]);
    }
}

#[test]
fn volumes_of_a_session_share_a_process_and_connections() {
    let (server, host) = (server().start(), Host::new());
    let names = ["a", "b", "pool/c"];
    let attached = host.attach(&server, &names, &["-o", "json"]).ok().json();
    let attached = attached.as_array().expect("a list");
    let uris: Vec<_> = attached.iter().map(|one| one["uri"].as_str().expect("a URI")).collect();
    assert!(uris[2].contains("pool%252Fc.nbd"), "{uris:?}");
    let pid = host.0.pid();
    host.assert_listed(&names);
    assert_eq!(server.sessions().len(), 1, "one session on the server");
    for (name, size) in names.iter().zip([1_u64, 2, 4]) {
        let status = host.json("status", name);
        assert_eq!(status["size"], json!(size << 20), "{status}");
        assert_eq!((&status["pid"], &status["volumes"]), (&json!(pid), &json!(names)), "{status}");
        assert_eq!(status["paths"].as_array().map(Vec::len), Some(1), "{status}");
    }
    let _ = host.run(&["status", "b"]).ok().says("volumes").says("a, b, pool/c");
    write_own(&host, &names, 1);
    // Each volume counts its own IO.
    assert_eq!(host.nbd("b").write(0, 0, &[9; 4096]), DONE);
    for (name, writes) in [("a", 1), ("b", 2), ("pool/c", 1)] {
        let stats = host.json("stats", name);
        assert_eq!(stats["ops"]["write"]["count"], writes, "{name}: {stats}");
    }
    // All volumes share the first one's log.
    let _ = host.run(&["logs", "b"]).ok().says("pool/c");

    // One volume is detached while the others keep running.
    let mut kept = host.nbd("a");
    let _ = host.detach("b").ok();
    host.assert_listed(&["a", "pool/c"]);
    assert!(!host.socket("b").exists(), "detach left the NBD socket behind");
    assert_eq!(kept.write(0, 0, &[3; 4096]), DONE, "its connection stays up");
    assert_eq!(host.0.pid(), pid);
    assert_eq!(host.json("status", "a")["volumes"], json!(["a", "pool/c"]));
    let open = server.list()["sessions"][0].to_string();
    assert!(!open.contains("\"b\""), "the server has closed it: {open}");
    let _ = host.detach("b").code(1).says("b");
    // The first volume may be detached too. Detaching the last one ends the session.
    let _ = host.run(&["detach", "a", "--force"]).ok();
    host.assert_listed(&["pool/c"]);
    write_own(&host, &["pool/c"], 7);
    let _ = host.detach("pool/c").ok();
    host.0.wait_gone(COMMAND_TIME_MAX);
    assert_eq!(host.list(), []);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_volume_is_added_to_and_removed_from_a_session() {
    let (server, host) = (server().start(), Host::new());
    let _ = host.attach(&server, &["a"], &["--session-name", "host7"]).ok();
    let pid = host.0.pid();
    let _ = host.add("b", "a").ok().says("b attached");
    // Adding by the session's name on the server also works.
    let _ = host.add("d", "host7").ok();
    assert_eq!(host.0.pid(), pid, "no other process");
    assert_eq!(server.sessions().len(), 1);
    host.assert_listed(&["a", "b", "d"]);
    write_own(&host, &["a", "b", "d"], 1);
    for (words, code, why) in [
        (&["attach", "b", "--session", "a"][..], 1, "choose where to attach"),
        (&["attach", "x", "--session", "nobody", "--socket", "/s"], 1, "nobody"),
        (&["attach", "x", "y", "--session", "a", "--socket", "/s"], 2, "one volume at a time"),
        (&["attach", "x", "--session", "a", "--crc", "off"], 2, "crc belongs to the session"),
    ] {
        let _ = host.run(words).code(code).says(why);
    }
    let twice = host.add("b", "a").code(1);
    let _ = twice.says("already attached");
    let _ = host.add("missing", "a").code(1).says("missing");
    host.assert_listed(&["a", "b", "d"]);
    assert!(!host.socket("missing").exists(), "a refused volume left a socket behind");
    // The volume's name is free immediately, every time.
    for round in 0..3 {
        let _ = host.detach("d").ok();
        let _ = host.add("d", "b").ok();
        write_own(&host, &["a", "b", "d"], 10 + round);
    }
    // The volume that started the session may be detached and added again.
    let _ = host.detach("a").ok();
    write_own(&host, &["b", "d"], 20);
    let alone = host.attach(&server, &["a"], &[]).code(1);
    let _ = alone.says("which began as a; add a to that session with --session");
    let _ = host.add("a", "host7").ok();
    write_own(&host, &["a", "b", "d"], 30);
    assert_eq!(host.0.pid(), pid);
    host.0.signal("TERM");
    host.0.wait_gone(STOP_TIME_MAX);
    assert!(!host.socket("d").exists(), "SIGTERM left an NBD socket behind");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_refused_volume_does_not_affect_others() {
    let (server, host) = (server().start(), Host::new());
    let done = host.attach(&server, &["a", "missing", "b"], &["-o", "json"]).code(1);
    let done = done.says("cannot attach missing");
    let attached = done.json();
    assert!(attached[0]["uri"].is_string() && attached[2]["uri"].is_string(), "{attached}");
    assert_eq!(attached[1]["export"], "missing", "{attached}");
    assert!(attached[1]["error"].is_string(), "{attached}");
    host.assert_listed(&["a", "b"]);
    write_own(&host, &["a", "b"], 1);
    let _ = host.detach("a").ok();
    let _ = host.detach("b").ok();
    host.0.wait_gone(COMMAND_TIME_MAX);
    // If no volume can be opened, there is no session.
    let _ = host.attach(&server, &["missing", "none"], &[]).code(1).says("missing");
    host.0.wait_gone(COMMAND_TIME_MAX);
    for (names, args, why) in [
        (&["a", "a"][..], &[][..], "named twice"),
        (&["a", "b"], &["--listen", "127.0.0.1:0"], "cannot listen at one address"),
        (&["a", "b"], &["--device", "/dev/nbd0"], "cannot share a device"),
        (&["a", "b"], &["--socket", "/s"], "cannot share the socket /s"),
    ] {
        let words = [&["attach"], names, &["--path", server.portal()], args].concat();
        let words =
            if args.is_empty() { [&words[..], &["--socket", "/{name}"]].concat() } else { words };
        let _ = host.run(&words).code(2).says(why);
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn events_of_one_volume_do_not_affect_others() {
    let mut server = server().start();
    let (host, names) = (Host::new(), ["a", "b", "d"]);
    let _ = host.attach(&server, &names, &["--no-path=fail", "--reconnect-max=200ms"]).ok();
    write_own(&host, &names, 1);
    let _ = server.command(&["export", "remove", "b", "--force"]).ok();
    wait_for("the volume to fail", COMMAND_TIME_MAX, || {
        host.list().contains(&("b".into(), "failed".into())).then_some(())
    });
    assert_ne!(host.nbd("b").write(0, 0, &[1; 4096]), DONE, "its IO fails");
    write_own(&host, &["a", "d"], 3);
    let status = host.json("status", "b");
    assert!(status["reason"].to_string().contains("removed the export"), "{status}");
    assert_eq!(host.json("status", "a")["state"], "open");
    let _ = host.detach("b").ok();
    // A new export with the same name is a different one, which only a new session may use.
    let _ = server.command(&["export", "add", "b=mem:16M"]).ok();
    let _ = host.add("b", "a").code(1).says("EIDRM");
    let _ = host.attach(&server, &["b"], &[]).ok();
    assert_eq!(host.json("status", "b")["size"], json!(16 << 20));
    // Growing a volume affects only that volume.
    let _ = server.command(&["export", "resize", "d", "--size", "32M"]).ok();
    wait_for("the size", COMMAND_TIME_MAX, || {
        (host.json("status", "d")["size"] == json!(32 << 20)).then_some(())
    });
    assert_eq!(host.json("status", "a")["size"], json!(1 << 20));
    server.check_alive();
    let _ = host.detach("b").ok();
    host.0.signal("TERM");
    host.0.wait_gone(STOP_TIME_MAX);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_removed_volume_stays_failed_whatever_its_paths_do() {
    let server = server().listen("tcp://127.0.0.1:0").listen("tcp://127.0.0.2:0").start();
    let (host, portals) = (Host::new(), server.portals().to_vec());
    let _ = host.attach(&server, &["a", "b"], &["--path", &portals[1]]).ok();
    let _ = server.command(&["export", "remove", "b", "--force"]).ok();
    let is_failed = || host.list().contains(&("b".into(), "failed".into())).then_some(());
    wait_for("the volume to fail", COMMAND_TIME_MAX, is_failed);
    let _ = host.run(&["status", "b"]).code(3).says("removed the export");
    wait_for("both paths of the other volume", COMMAND_TIME_MAX, || {
        host.list().contains(&("a".into(), "open".into())).then_some(())
    });
    for portal in &portals {
        let _ = host.run(&["path", "reconnect", "a", portal]).ok();
        let _ = host.run(&["status", "b"]).code(3).says("removed the export");
    }
    write_own(&host, &["a"], 1);
    for name in ["b", "a"] {
        let _ = host.detach(name).ok();
    }
    host.0.wait_gone(COMMAND_TIME_MAX);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn all_volumes_return_with_their_server() {
    let scratch = rtrs_tests::Scratch::new();
    let portal = format!("tcp://127.0.0.1:{}", rtrs_tests::free_port());
    let start = || {
        let server = Server::builder().listen(&portal);
        let server = ["a", "b"].iter().fold(server, |server, name| {
            let file = scratch.path(name);
            if !file.exists() {
                rtrs_tests::sparse_file(&file, 1 << 20);
            }
            server.export(format!("{name}={}", scratch.text(name)))
        });
        server.start()
    };
    let (server, host) = (start(), Host::new());
    let _ = host.attach(&server, &["a", "b"], &["--reconnect-max=200ms"]).ok();
    write_own(&host, &["a", "b"], 1);
    server.crash();
    let server = start();
    wait_for("both volumes", COMMAND_TIME_MAX, || {
        host.list().iter().all(|(_, state)| state == "open").then_some(())
    });
    write_own(&host, &["a", "b"], 5);
    let _ = host.detach("a").ok();
    let _ = host.detach("b").ok();
    host.0.wait_gone(COMMAND_TIME_MAX);
    for (name, byte) in [("a", 5), ("b", 6)] {
        let bytes = std::fs::read(scratch.path(name)).expect("the file");
        assert_eq!(bytes[4096..8192], [byte; 4096], "{name}");
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn metrics_have_a_label_for_each_volume() {
    let (server, host) = (server().start(), Host::new());
    let socket = host.socket("metrics");
    let metrics = format!("unix:{}", socket.display());
    let _ = host.attach(&server, &["a", "b"], &["--metrics", &metrics]).ok();
    write_own(&host, &["a", "b"], 1);
    assert_eq!(host.nbd("b").write(0, 0, &[9; 4096]), DONE);
    let scrape_all = || scrape(UnixStream::connect(&socket).expect("a connection"));
    let value = |name: &str, labels: &[(&str, &str)]| {
        let text = scrape_all();
        Exposition::parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}")).value(name, labels)
    };
    for (volume, writes) in [("a", 1.0), ("b", 2.0)] {
        let io = [("role", "client"), ("volume", volume), ("export", volume), ("op", "write")];
        assert_eq!(value("rtrs_io_seconds_count", &io), writes);
        assert_eq!(value("rtrs_client_up", &[("volume", volume)]), 1.0);
    }
    let _ = host.add("d", "a").ok();
    assert_eq!(value("rtrs_client_up", &[("volume", "d")]), 1.0);
    let _ = host.detach("a").ok();
    assert!(!scrape_all().contains("volume=\"a\""));
    let _ = (host.detach("b").ok(), host.detach("d").ok());
    host.0.wait_gone(COMMAND_TIME_MAX);
    let _ = server.stop(STOP_TIME_MAX);
}
