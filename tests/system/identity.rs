//! Tests of two real servers with different disks under the same name, of a restart with a
//! different disk, and of a session that must accept neither disk: its path stays down, showing the
//! reason, and IO follows `--no-path`.

use std::time::Duration;

use rtrs_tests::{
    Client, ClientBuilder, Finished, Front, RawNbd, STOP_TIME_MAX, Scratch, Server, ServerBuilder,
    free_port, pattern_file, wait_for,
};

/// Longer than it takes to refuse or reconnect a path.
const PATH_TIME_MAX: Duration = Duration::from_secs(30);
const SIZE: u64 = 8 << 20;

/// Returns a server that exports this file as `vol` on this port.
fn server(id: &str, export: &str, portal: &str) -> ServerBuilder {
    let export = format!("vol={export}");
    Server::builder().export(export).listen(portal).args(&["--server-id", id])
}

/// Two files of the same size with different content, and two addresses.
struct Disks {
    scratch: Scratch,
    portals: [String; 2],
}

impl Disks {
    fn new() -> Self {
        let scratch = Scratch::new();
        for (name, seed) in [("a", 1), ("b", 2)] {
            pattern_file(&scratch.path(name), SIZE, seed);
        }
        Self { scratch, portals: [(); 2].map(|()| format!("tcp://127.0.0.1:{}", free_port())) }
    }

    fn server(&self, id: &str, disk: &str, portal: usize) -> Server {
        server(id, &self.scratch.text(disk), &self.portals[portal]).start()
    }

    /// Returns a session over these paths whose IO fails when no path is left.
    fn attach(&self, paths: &[usize], args: &[&str]) -> ClientBuilder {
        let builder = Client::attach("vol").args(&["--shards=1", "--no-path=fail"]).args(args);
        let builder = builder.args(&["--reconnect-max=200ms"]);
        paths.iter().fold(builder, |builder, path| builder.path(&self.portals[*path]))
    }
}

/// Waits until a path is down for this reason, as shown by `status`, `list` and the log.
fn refused(client: &Client, path: usize, why: &str) {
    let why = format!("cannot use this path: {why}");
    wait_for(&why, PATH_TIME_MAX, || {
        let path = &client.status()["paths"][path];
        let is_reported = path["last_error"].as_str().is_some_and(|error| error.contains(&why));
        (is_reported && path["state"] != "connected").then_some(())
    });
    let _ = client.command(&["list"]).ok().says(&why);
    let _ = client.command(&["status", "vol"]).says(&why);
    wait_for("the reason in the log", PATH_TIME_MAX, || {
        let log = std::fs::read_to_string(client.run_dir().join("vol.log")).expect("the log");
        log.contains(&why).then_some(())
    });
}

/// Returns the first byte that NBD reads, or None if the read fails.
fn first_byte(front: &Front) -> Option<u8> {
    let mut block = [0; 4096];
    let read = RawNbd::go(front, "vol").read(4096, &mut block);
    read.ok().map(|()| block[0])
}

/// Returns the byte that this disk contains.
fn byte_of(disks: &Disks, name: &str) -> u8 {
    std::fs::read(disks.scratch.path(name)).expect("the disk")[4096]
}

/// Waits until IO succeeds, and checks that this disk serves it.
fn continues(client: &Client, byte: u8) {
    let read = wait_for("IO", PATH_TIME_MAX, || first_byte(client.front()));
    assert_eq!(read, byte, "another disk answers");
}

#[test]
fn a_session_refuses_the_disk_of_another_server() {
    let disks = Disks::new();
    let (a, b) = (byte_of(&disks, "a"), byte_of(&disks, "b"));
    assert_ne!(a, b);
    let first = disks.server("one", "a", 0);
    let client = disks.attach(&[0, 1], &[]).start();
    // With both servers up, the second path stays down.
    let second = disks.server("two", "b", 1);
    std::thread::sleep(Duration::from_secs(1));
    assert_ne!(client.status()["paths"][1]["state"], "connected");
    for _ in 0..8 {
        assert_eq!(first_byte(client.front()), Some(a));
    }
    assert_eq!(client.status()["paths"][0]["state"], "connected");
    // If only the wrong server is left, IO fails as if there were no path.
    first.crash();
    wait_for("the path's end", PATH_TIME_MAX, || {
        (client.status()["state"] == "identity-mismatch").then_some(())
    });
    let mut nbd = RawNbd::go(client.front(), "vol");
    assert!(nbd.read(4096, &mut [0; 4096]).is_err(), "the other disk answers");
    refused(&client, 1, "it leads to server ");
    let status = client.status();
    let reason = status["reason"].as_str().expect("a reason");
    assert!(reason.starts_with(&disks.portals[1]), "{status}");
    assert_eq!(status["io_fails"], true, "{status}");
    let _ = client.command(&["status", "vol"]).code(3).says("check the addresses of its paths");
    // The right server comes back.
    let first = disks.server("one", "a", 0);
    continues(&client, a);
    client.detach();
    let _ = (first.stop(STOP_TIME_MAX), second.stop(STOP_TIME_MAX));
}

#[test]
fn a_restarted_server_with_another_file_is_refused() {
    let disks = Disks::new();
    let a = byte_of(&disks, "a");
    let first = disks.server("one", "a", 0);
    let client = disks.attach(&[0], &[]).start();
    first.crash();
    let wrong = disks.server("one", "b", 0);
    refused(&client, 0, "the export is a different disk or file");
    assert_eq!(first_byte(client.front()), None);
    wrong.crash();
    // A file copied over the exported file is also a different file.
    std::fs::copy(disks.scratch.path("a"), disks.scratch.path("copy")).expect("a copy");
    let copied = disks.server("one", "copy", 0);
    refused(&client, 0, "the export is a different disk or file");
    copied.crash();
    let first = disks.server("one", "a", 0);
    continues(&client, a);
    client.detach();
    let _ = first.stop(STOP_TIME_MAX);
}

#[test]
fn the_memory_export_of_a_restarted_server_is_refused() {
    let disks = Disks::new();
    let start = |export: &str| server("one", export, &disks.portals[0]).start();
    let first = start("mem:8M");
    let client = disks.attach(&[0], &[]).start();
    first.crash();
    let second = start("mem:8M");
    refused(&client, 0, "the export is a different disk or file");
    client.detach();
    second.crash();
    // The server is accepted if the operator declares that its export is the same.
    let first = start("mem:8M,id=scratch");
    let client = disks.attach(&[0], &[]).start();
    first.crash();
    let second = start("mem:8M,id=scratch");
    continues(&client, 0);
    client.detach();
    let _ = second.stop(STOP_TIME_MAX);
}

#[test]
fn an_identity_can_be_required_or_ignored() {
    let disks = Disks::new();
    let server = disks.server("one", "a", 0);
    let attach = |args: &[&str]| -> (Client, Finished) {
        disks.attach(&[0], &[args, &["--output", "json"]].concat()).try_start()
    };
    let (client, attached) = attach(&[]);
    let identity = attached.ok().json()["identity"].as_str().expect("an identity").to_owned();
    assert_eq!(client.status()["identity"], identity.as_str());
    let _ = client.command(&["status", "vol"]).ok().says(&identity);
    let listed = client.command(&["list", "-o", "json"]).ok().json();
    assert_eq!(listed[0]["identity"], identity.as_str());
    let export = &server.sessions()[0]["opens"][0];
    let id = export["id"].as_str().expect("an id");
    assert!(identity.ends_with(id), "{identity} and {export}");
    client.detach();

    let (client, attached) = attach(&["--identity", &identity]);
    let _ = attached.ok();
    client.detach();
    let (_, export) = identity.split_once('/').expect("two ids");
    let other = "00112233445566778899aabbccddeeff";
    for wrong in [format!("{other}/{export}"), format!("-/{other}")] {
        let (_client, attached) = attach(&[&format!("--identity={wrong}")]);
        let _ = attached.code(1).says("cannot use this path: ");
        let (client, attached) = attach(&[&format!("--identity={wrong}"), "--accept-new-identity"]);
        assert_eq!(attached.ok().json()["identity"], identity.as_str());
        client.detach();
    }
    let _ = attach(&["--identity", "x"]).1.code(2).says("SERVER/EXPORT");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_moved_volume_is_accepted_only_on_request() {
    let disks = Disks::new();
    let byte = byte_of(&disks, "a");
    let old = disks.server("one", "a", 0);
    let attach =
        |args: &[&str]| disks.attach(&[0], &[args, &["--output=json"]].concat()).try_start();
    let (client, attached) = attach(&[]);
    let identity = attached.ok().json()["identity"].as_str().expect("an identity").to_owned();
    client.detach();
    // Settings file used by every later attach.
    let saved = disks.scratch.path("client.yaml");
    std::fs::write(&saved, format!("identity: {identity}\n")).expect("the settings");
    let config = format!("--config={}", saved.display());
    let (client, attached) = attach(&[&config]);
    let _ = attached.ok();
    client.detach();
    // The volume moves to another server at the same address.
    let _ = old.stop(STOP_TIME_MAX);
    std::fs::copy(disks.scratch.path("a"), disks.scratch.path("moved")).expect("a copy");
    let new = disks.server("two", "moved", 0);
    let (_refused, attached) = attach(&[&config]);
    let _ = attached.code(1).says("cannot use this path: it leads to server ");
    let (client, attached) = attach(&[&config, "--accept-new-identity"]);
    let moved = attached.ok().json()["identity"].as_str().expect("an identity").to_owned();
    assert_ne!(moved, identity);
    assert_eq!(first_byte(client.front()), Some(byte));
    // The option applied only to the attach; from then on the session stays with its server.
    new.crash();
    let old = disks.server("one", "a", 0);
    refused(&client, 0, "it leads to server ");
    assert_eq!(first_byte(client.front()), None);
    old.crash();
    let new = disks.server("two", "moved", 0);
    continues(&client, byte);
    client.detach();
    // The accepted identity is not kept if the settings say otherwise.
    let (_refused, attached) = attach(&[&config]);
    let _ = attached.code(1).says("cannot use this path: it leads to server ");
    let _ = new.stop(STOP_TIME_MAX);
}
