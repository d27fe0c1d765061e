//! Tests of writes that a server loses while the volume has no running process: the next process
//! reports them, whatever happened in between, and reports no loss where nothing could be lost.

use std::fs;
use std::io::{ErrorKind, Read};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Front, Proc, RawNbd, Reply, STOP_TIME_MAX, Server, consts,
    free_port, send_signal, wait_for,
};

/// In-memory volume, its server, and its sessions' run directory.
struct Volume {
    server: Option<Server>,
    portal: String,
    /// Export of the volume.
    export: String,
    client: Client,
}

impl Volume {
    fn new() -> Self {
        let portal = format!("tcp://127.0.0.1:{}", free_port());
        let client = Client::attach("vol0").unattached();
        let export = "vol0=mem:16M,id=vol0".to_owned();
        let mut volume = Self { server: None, portal, export, client };
        volume.restart_server();
        volume
    }

    /// Kills the server, which loses the content of the export, and restarts it.
    fn restart_server(&mut self) {
        self.server.take().into_iter().for_each(Server::crash);
        let server = Server::builder().export(&self.export).export("vol1=mem:16M");
        self.server = Some(server.listen(&self.portal).start());
    }

    fn words(&self, more: &[&str]) -> Vec<String> {
        let front = self.client.front().args();
        let own = ["attach", "vol0", "--path", &self.portal, &front[0], &front[1]];
        own.iter().chain(more).map(ToString::to_string).collect()
    }

    fn attach(&self) {
        let _ = self.client.command(&self.words(&[])).ok();
    }

    fn detach(&self, more: &[&str]) -> Finished {
        let done = self.client.command_without_users(&[&["detach", "vol0"], more].concat());
        self.client.wait_gone(COMMAND_TIME_MAX);
        done
    }

    fn nbd(&self) -> RawNbd {
        RawNbd::go(self.client.front(), "vol0")
    }

    /// Leaves behind a write by a process that dies, and a user waiting for the next process.
    fn die_with_a_write(&self) {
        self.attach();
        let mut user = self.nbd();
        assert_eq!(user.write(0, 0, &[7; 4096]), Reply::Error(0));
        self.end("KILL");
        user.expect_closed();
    }

    /// Sends a signal to the volume's processes, and waits for them to end.
    fn end(&self, signal: &str) {
        for pid in self.client.pids() {
            // A command may have exited in the meantime.
            let _ = send_signal(signal, &pid.to_string());
        }
        self.client.wait_gone(COMMAND_TIME_MAX);
    }

    /// Returns the arguments of an attach that requires a path that does not exist.
    fn words_without_a_path(&self, more: &[&str]) -> Vec<String> {
        let down = format!("tcp://127.0.0.1:{}", free_port());
        let required = ["--path", &down, "--require-paths", "all"];
        self.words(&[&required[..], more].concat())
    }

    /// Starts an attach that waits for its paths longer than any test runs.
    fn begin_attach(&self, more: &[&str]) -> Proc {
        let words = self.words_without_a_path(&[&["--retry-for", "10m"], more].concat());
        let attach = self.client.spawn(&words);
        self.wait_open();
        attach
    }

    /// Waits until a session has opened the volume.
    fn wait_open(&self) {
        wait_for("the volume to open", COMMAND_TIME_MAX, || {
            let status = self.client.command(&["status", "vol0", "-o", "json"]);
            let status: serde_json::Value = serde_json::from_str(&status.stdout).ok()?;
            status["size"].is_u64().then_some(())
        });
    }

    /// Returns the state files that the volume's processes have left behind.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.client.run_dir()).expect("the run directory");
        let names = entries.map(|entry| entry.expect("a file").file_name());
        let names = names.map(|name| name.to_string_lossy().into_owned());
        let endings = [".life", ".identity", ".detached"];
        let is_state = |name: &String| endings.iter().any(|ending| name.ends_with(ending));
        let mut left: Vec<String> = names.filter(is_state).collect();
        left.sort();
        left
    }

    /// Attaches and checks whether a flush reports a loss, once. Then detaches.
    fn check_flushes(&self, lost: bool, after: &str) {
        self.attach();
        let mut user = self.nbd();
        let first = user.call(0, consts::CMD_FLUSH, 0, 0);
        assert_eq!(first != Reply::Error(0), lost, "{after}: {first:?}");
        assert_eq!(user.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0), "{after}");
        leave(user);
        let _ = self.detach(&[]).ok();
        assert_eq!(self.left(), [""; 0], "{after}");
    }
}

/// Disconnects a user cleanly.
fn leave(mut user: RawNbd) {
    let _ = user.send_request(0, consts::CMD_DISC, 0, 0);
    user.expect_closed();
}

/// Makes an attach fail as `way` says, before its volume is served or before its users have
/// connected.
fn fail_an_attach(volume: &Volume, way: &str) {
    match way {
        "no path" => {
            let down = format!("tcp://127.0.0.1:{}", free_port());
            let front = volume.client.front().args();
            let words = ["attach", "vol0", "--path", &down, &front[0], &front[1]];
            let _ = volume.client.command(&words).code(1);
        }
        "required paths are missing" => {
            let _ = volume.client.command(&volume.words_without_a_path(&[])).code(1);
        }
        "a detach ends the wait" => {
            let attach = volume.begin_attach(&[]);
            let _ = volume.detach(&[]).ok();
            let _ = attach.wait(COMMAND_TIME_MAX).code(1);
        }
        "its command is killed in the wait" => {
            let mut attach = volume.begin_attach(&[]);
            attach.signal("KILL");
        }
        "a signal ends the wait" => {
            let _attach = volume.begin_attach(&["--foreground"]);
            volume.end("TERM");
        }
        "its command is killed while a path is silent" => {
            let silent = TcpListener::bind("127.0.0.1:0").expect("an address");
            let silent = format!("tcp://{}", silent.local_addr().expect("an address"));
            let attach = volume.client.spawn(&volume.words(&["--path", &silent]));
            volume.wait_open();
            // The attach waits a second for the silent path, and may already have succeeded.
            let _ = send_signal("KILL", &attach.pid().to_string());
            volume.end("TERM");
        }
        "a signal ends it before its users come" => {
            volume.attach();
            volume.end("TERM");
        }
        _ => panic!("{way}"),
    }
    volume.client.wait_gone(COMMAND_TIME_MAX);
}

const WAYS: [&str; 7] = [
    "no path",
    "required paths are missing",
    "a detach ends the wait",
    "its command is killed in the wait",
    "a signal ends the wait",
    "its command is killed while a path is silent",
    "a signal ends it before its users come",
];

#[test]
fn a_loss_is_reported_after_an_attach_that_failed() {
    for way in WAYS {
        let mut volume = Volume::new();
        volume.die_with_a_write();
        // An attach fails both before and after the loss.
        fail_an_attach(&volume, way);
        volume.restart_server();
        fail_an_attach(&volume, way);
        volume.check_flushes(true, way);
    }
}

#[test]
fn an_attach_without_users_leaves_nothing_to_report() {
    for way in WAYS {
        let mut volume = Volume::new();
        fail_an_attach(&volume, way);
        assert_eq!(volume.left(), [""; 0], "{way}");
        volume.restart_server();
        volume.check_flushes(false, way);
    }
    // Another volume of the session fails.
    let volume = Volume::new();
    let socket = volume.client.run_dir().join("{name}.sock");
    let socket = socket.display().to_string();
    let words = ["attach", "vol1", "none", "--path", &volume.portal, "--socket", &socket];
    let _ = volume.client.command(&words).code(1);
    assert_eq!(volume.left(), ["vol1.identity", "vol1.life"]);
    let _ = volume.client.command(&["detach", "vol1"]).ok();
    assert_eq!(volume.left(), [""; 0]);
}

#[test]
fn a_loss_is_reported_to_users_disconnected_by_the_end_of_a_session() {
    for signal in ["TERM", "detach"] {
        let mut volume = Volume::new();
        volume.attach();
        let mut user = volume.nbd();
        assert_eq!(user.write(0, 0, &[7; 4096]), Reply::Error(0));
        match signal {
            "detach" => drop(volume.detach(&["--force"]).ok()),
            signal => volume.end(signal),
        }
        user.expect_closed();
        volume.restart_server();
        volume.check_flushes(true, signal);
    }
}

#[test]
fn an_unreported_loss_outlasts_a_detach() {
    let mut volume = Volume::new();
    volume.attach();
    let mut user = volume.nbd();
    assert_eq!(user.write(0, 0, &[7; 4096]), Reply::Error(0));
    drop(user);
    volume.restart_server();
    wait_for("the session to report the loss in its log", COMMAND_TIME_MAX, || {
        let log = volume.client.command(&["logs", "vol0"]).stdout;
        log.contains("acknowledged writes are lost").then_some(())
    });
    let _ = volume.detach(&[]).ok();
    volume.check_flushes(true, "a detach");

    // Users that have disconnected cleanly receive no report of a later loss.
    volume.attach();
    let mut user = volume.nbd();
    assert_eq!(user.write(0, 0, &[7; 4096]), Reply::Error(0));
    leave(user);
    let _ = volume.detach(&[]).ok();
    assert_eq!(volume.left(), [""; 0]);
    volume.restart_server();
    volume.check_flushes(false, "a detach");
}

#[test]
fn a_loss_is_reported_to_users_that_are_between_two_connections() {
    for (ends, way) in [
        (["detach"].as_slice(), "a detach"),
        (&["TERM"], "a signal"),
        (&["TERM", "detach"], "a signal, and a detach before the user is back"),
        (&["KILL", "detach", "TERM"], "a crash, and two ends before the user is back"),
    ] {
        let mut volume = Volume::new();
        volume.attach();
        let mut user = volume.nbd();
        assert_eq!(user.write(0, 0, &[7; 4096]), Reply::Error(0));
        drop(user);
        for (at, end) in ends.iter().enumerate() {
            if at > 0 {
                volume.attach();
            }
            match *end {
                "detach" => drop(volume.detach(&[]).ok()),
                signal => volume.end(signal),
            }
        }
        volume.restart_server();
        volume.check_flushes(true, way);
    }
}

#[test]
fn a_loss_is_reported_to_a_user_that_left_before_a_signal() {
    let mut volume = Volume::new();
    volume.attach();
    let mut user = volume.nbd();
    assert_eq!(user.write(0, 0, &[7; 4096]), Reply::Error(0));
    leave(user);
    volume.end("TERM");
    volume.restart_server();
    volume.check_flushes(true, "a signal");
}

#[test]
fn another_export_of_the_same_name_has_lost_nothing() {
    for (other, lost) in [("own", true), ("other", false)] {
        let mut volume = Volume::new();
        let disk = |name: &str| {
            let path = volume.client.run_dir().join(format!("{name}.img"));
            fs::write(&path, [0; 1 << 20]).expect("a file for an export");
            format!("vol0={}", path.display())
        };
        let (own, other) = (disk("own"), disk(other));
        volume.export = own;
        volume.restart_server();
        volume.attach();
        let mut user = volume.nbd();
        assert_eq!(user.write(0, 0, &[7; 4096]), Reply::Error(0));
        drop(user);
        let _ = volume.detach(&[]).ok();
        assert_eq!(volume.left(), ["vol0.detached", "vol0.life"]);
        volume.export = other;
        volume.restart_server();
        volume.check_flushes(lost, "a detach");
    }
}

#[test]
fn a_detach_of_a_dead_session_keeps_unreported_losses() {
    let mut volume = Volume::new();
    volume.die_with_a_write();
    let _ = volume.detach(&[]).ok().says("vol0 was dead; removed its socket");
    let _ = volume.detach(&[]).code(1).says("is not attached");
    volume.restart_server();
    volume.check_flushes(true, "a detach of a dead session");

    volume.die_with_a_write();
    let _ = volume.detach(&["--force"]).ok().says("vol0 was dead; removed its socket");
    assert_eq!(volume.left(), [""; 0]);
    volume.restart_server();
    volume.check_flushes(false, "a forced detach of a dead session");
}

#[test]
fn clients_wait_until_the_attach_has_its_paths() {
    let volume = Volume::new();
    let attach = volume.begin_attach(&[]);
    let Front::Unix(socket) = volume.client.front() else { panic!("no socket") };
    let mut early = UnixStream::connect(socket).expect("a connection that waits");
    let _ = volume.detach(&[]).ok();
    let _ = attach.wait(STOP_TIME_MAX).code(1);
    let mut heard = Vec::new();
    // The connection may be reset when the session ends.
    if let Err(error) = early.read_to_end(&mut heard) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    assert_eq!(heard, [0; 0], "served by a session that was not attached");
}

#[test]
fn an_attach_and_status_name_files_that_cannot_be_written() {
    let volume = Volume::new();
    // A temporary file cannot replace a directory.
    let obstacle = volume.client.run_dir().join("vol0.identity.new");
    fs::create_dir_all(&obstacle).expect("a directory");
    let why = format!("cannot write {}: ", obstacle.with_extension("").display());
    let done = volume.client.command(&volume.words(&[])).ok();
    let done = done.says(&format!("warning: vol0: {why}"));
    assert!(done.stderr.contains("after a takeover, the export cannot be verified"), "{done:?}");
    let _ =
        volume.client.command(&["status", "vol0"]).ok().says(&format!("not saved        {why}"));
    let status = volume.client.status();
    assert!(status["unsaved"][0].as_str().is_some_and(|text| text.starts_with(&why)), "{status}");
    let _ = volume.detach(&[]).ok();
}
