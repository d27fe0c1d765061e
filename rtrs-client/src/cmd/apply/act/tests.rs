//! Tests of the flags of sessions that `apply` starts, and of requests to a session with several
//! volumes.

use std::sync::Arc;

use clap::Parser;
use parking_lot::Mutex;
use rtrs_core::local::{ControlSocket, RunDir, reply};
use rtrs_core::settings::Output;
use serde_json::json;

use super::super::start::flags;
use super::*;
use crate::cmd::tests::status;
use crate::cmd::{Command, LowArgs};
use crate::plan::AttachPlan;
use crate::settings::Settings;
use crate::volumes::difference::Difference;

#[test]
fn flags_match_the_settings() {
    for yaml in [
        "path: [tcp://a, 'rdma://[fd00::2]@[fd00::1]:7']\nsocket: '-s p'\ncrc: off\nlog: debug\n",
        "path: tcp://a\nread-only: true\ndevice: auto\ntakeover: true\nshards: 2\n",
        "path: tcp://a\nsocket: /s\nsocket-mode: 660\nheartbeat: 50ms\nbuffer-size: 80M\n",
        "path: tcp://a\nlisten: 127.0.0.1:0\nno-path: queue-for=3s\nqueue-depth-limit: 9\n",
    ] {
        let settings = Settings::from_yaml(yaml, "s.yaml").unwrap();
        let mut args = vec!["rtrs-client".to_owned(), "attach".into()];
        args.extend(flags(&settings));
        args.extend(["--".into(), "-v".into()]);
        let parsed = LowArgs::try_parse_from(args).unwrap();
        let Command::Attach(attach) = parsed.command else { panic!("no attach") };
        assert_eq!(attach.settings(&parsed.global).unwrap(), settings, "{yaml}");
        assert_eq!(attach.names, ["-v"]);
    }
}

/// Fake sockets for a session's volumes, which record change requests.
struct Fake {
    dir: RunDir,
    requests: Arc<Mutex<Vec<String>>>,
    _sockets: Vec<ControlSocket>,
}

impl Fake {
    /// Serves volumes that share a session. The session's log belongs to the first volume. The
    /// first `refused` attaches fail.
    fn new(test: &str, session: &str, volumes: &[&str], refused: usize) -> Self {
        let dir = format!("rtrs-act-{test}-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(dir))).unwrap();
        dir.make().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let mut sockets = Vec::new();
        for name in volumes {
            let names: Vec<String> = volumes.iter().map(|name| (*name).to_owned()).collect();
            let (session, log) = (session.to_owned(), names[0].clone());
            let status = Status { name: (*name).into(), session, volumes: names, log, ..status() };
            let (requests, mut refused) = (Arc::clone(&requests), refused);
            let serve = move |request: Request, stream| {
                let done = |what: String| requests.lock().push(format!("{}: {what}", status.name));
                match request {
                    Request::Status => reply(&stream, Ok(&status)),
                    Request::Detach { .. } => {
                        done("detach".into());
                        reply(&stream, Ok(json!({ "detached": true })));
                    }
                    Request::VolumeAdd { name, settings } => {
                        done(format!("add {name} {settings:?}"));
                        let attached = json!({ "name": name, "export": name, "pid": 7 });
                        let result = if refused == 0 { Ok(attached) } else { Err("no".into()) };
                        refused = refused.saturating_sub(1);
                        reply(&stream, result);
                    }
                    other => {
                        done(format!("{other:?}"));
                        reply(&stream, Ok(json!({ "changed": true })));
                    }
                }
            };
            let socket = ControlSocket::bind(&dir.control_socket(name)).unwrap();
            socket.serve(serve).unwrap();
            sockets.push(socket);
        }
        Self { dir, requests, _sockets: sockets }
    }

    fn session(&self, name: &str) -> Session {
        Session { name: name.into(), run_dir: self.dir.clone(), output: Output::Text }
    }

    /// Acts on a volume that shares a session with `mate` in the file, with time for one retry.
    fn act(&self, wanted: &Wanted, task: &Task, mate: &str) -> Result<Option<&str>, String> {
        let may = Allowed {
            reattach: true,
            force: false,
            within_ms: 0,
            retry_for: Within::new(Duration::ZERO),
        };
        let session = self.session(&wanted.plan.session.name);
        let mates = [self.session(mate)];
        let retry_until = Instant::now() + Duration::from_secs(600);
        let wanted = Some(wanted);
        let turn = Turn { session: &session, wanted, task, mates: &mates, retry_until };
        act(&turn, may).map_err(|error| error.chain().to_string())
    }

    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.requests.lock())
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.dir.path());
    }
}

/// Volumes `a` and `b` of session `s` in the file.
fn two_volumes() -> (Wanted, Wanted) {
    let configured =
        Settings::from_yaml("path: tcp://127.0.0.1\nsocket: /s/a\nsession-name: s\n", "s.yaml");
    let configured = configured.unwrap();
    let first = AttachPlan::new("a", configured.clone(), Output::Text).unwrap();
    let own = [("socket".to_owned(), "/s/b".to_owned())].into();
    let plan = first.adding("b", &own).unwrap();
    let second = Wanted { configured: configured.clone(), plan, first: Some("a".into()) };
    (Wanted { configured, plan: first, first: None }, second)
}

/// Task for a running volume whose value of this setting differs, which requires a reattach.
fn needs_reattach(setting: &str) -> Task {
    let one = Difference {
        setting: setting.into(),
        running: "x".into(),
        wanted: "y".into(),
        online: false,
    };
    Task { differences: vec![one], ..Task::of(Action::NeedsReattach, None) }
}

const ADD_A: &str = "b: add a {\"access\": \"auto\", \"socket\": \"/s/a\"}";
const ADD_B: &str = "a: add b {\"access\": \"auto\", \"socket\": \"/s/b\"}";

#[test]
fn a_missing_volume_joins_its_running_session() {
    let (first, second) = two_volumes();
    let attach = Task::of(Action::Attach, None);
    let fake = Fake::new("join", "s", &["a"], 1);
    assert_eq!(fake.act(&second, &attach, "a"), Ok(Some("attached")));
    let expected = [ADD_B, ADD_B].map(str::to_owned);
    assert_eq!(fake.requests(), expected, "refused once, and retried");
    // The first volume joins too, if others are running.
    let fake = Fake::new("join-first", "s", &["b"], 0);
    assert_eq!(fake.act(&first, &attach, "b"), Ok(Some("attached")));
    assert_eq!(fake.requests(), [ADD_A]);
    // There is no session, or only a different session.
    for (test, session, volumes) in [("none", "s", &[][..]), ("other", "t", &["a"])] {
        let fake = Fake::new(test, session, volumes, 0);
        let error = fake.act(&second, &attach, "a").unwrap_err();
        assert!(error.starts_with("cannot add the volume to the session of \"a\", "), "{error}");
        assert!(fake.requests().is_empty());
    }
}

#[test]
fn a_reattach_keeps_the_other_volumes_of_a_session() {
    let (first, second) = two_volumes();
    let fake = Fake::new("reattach", "s", &["a", "b"], 0);
    // A setting of an individual volume, including the first.
    let own = needs_reattach("socket-mode");
    assert_eq!(fake.act(&second, &own, "a"), Ok(Some("reattached")));
    assert_eq!(fake.requests(), ["b: detach", ADD_B]);
    assert_eq!(fake.act(&first, &own, "b"), Ok(Some("reattached")));
    assert_eq!(fake.requests(), ["a: detach", ADD_A]);
    // Settings of the session.
    for wanted in [&first, &second] {
        let error = fake.act(wanted, &needs_reattach("crc"), "a").unwrap_err();
        let expected = "cannot reattach the volume alone: the file does not list the other volumes \
                        of its session with it; detach all with `rtrs-client detach a b`, then \
                        apply again";
        assert_eq!(error, expected);
    }
    // The running session uses the log of the volume that would leave it.
    let fake = Fake::new("leave", "t", &["a", "b"], 0);
    let error = fake.act(&first, &needs_reattach("session-name"), "b").unwrap_err();
    assert!(error.starts_with("cannot reattach the volume alone: "), "{error}");
    // The session to join is not running.
    let error = fake.act(&second, &needs_reattach("session-name"), "a").unwrap_err();
    assert!(error.starts_with("cannot add the volume to the session of \"a\", "), "{error}");
    assert!(fake.requests().is_empty(), "nothing was detached");
}
