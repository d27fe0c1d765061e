//! Tests of clients whose certificates or keys are no longer accepted, of epochs, and of exports
//! whose file was deleted or replaced.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use rtrs_core::block::{BlockDevice, BlockSource, Core, Geometry, TargetName};
use rtrs_core::fabric::PeerIdentity;
use rtrs_core::ids::{PathUuid, SessionId};
use rtrs_core::rt::{Ring, mailbox};
use rtrs_core::tls::{Clients, PrivateKey, ProofFacts, TlsClientConfig, TlsServerConfig};

use super::*;
use crate::backend::MemorySource;
use crate::daemon::identity::Sources;
use crate::engine::finder::Examined;
use crate::engine::message::{ControlMessage, Message};
use crate::path::PathKey;
use crate::settings::Target;
use crate::state::StateDir;

fn key(seed: u8) -> PrivateKey {
    PrivateKey::from_seed([seed; 32]).unwrap()
}

/// Configuration with the server's key and the clients with these numbers.
fn server(clients: &[u8]) -> TlsServerConfig {
    let mut list = Clients::default();
    clients.iter().for_each(|n| list.add(&format!("db{n}"), key(*n).public()));
    TlsServerConfig::with_keys(&key(100), list).unwrap()
}

/// Identity that a client proved to a server that knew it.
fn proved(n: u8) -> PeerIdentity {
    let client = TlsClientConfig::with_keys(&key(n), &[key(100).public()]).unwrap();
    let address = [127, 0, 0, 1].into();
    let (session, path) = (SessionId([1; 16]), PathUuid([2; 16]));
    let facts = ProofFacts { session, path, client: address, server: address };
    let (server, asked) = (server(&[n]), client.challenge([7; 32]));
    let (answer, exchange) = server.prove(facts, &asked, [8; 32]).unwrap();
    let data = client.answer(facts, None, &asked, &answer).unwrap();
    server.check(&exchange, &data).unwrap()
}

/// A certificate may expire, or a file change, long before anything is read again.
#[test]
fn an_access_change_disconnects_clients_with_invalid_credentials() {
    let (sender, inbox) = mailbox().unwrap();
    let (ended, ends) = mpsc::channel();
    let shard = std::thread::spawn(move || {
        let ring = Ring::new(8).unwrap();
        let mut inbox = inbox.arm(&ring).unwrap();
        loop {
            ring.turn().unwrap();
            let Some(message) = inbox.take_or_watch() else {
                ring.turn_or_sleep(None).unwrap();
                continue;
            };
            let Message::Control(ControlMessage::Admin { request, reply }) = message else {
                return;
            };
            reply.send(match request {
                AdminRequest::CheckAccess => AdminReply::Revoked(Vec::new()),
                AdminRequest::Identities => {
                    let clients = [1, 2].map(|n| (PathKey(n.into()), proved(n)));
                    AdminReply::Identities(clients.into())
                }
                AdminRequest::EndUnknown(keys) => {
                    ended.send(keys).unwrap();
                    AdminReply::Revoked(Vec::new())
                }
                other => panic!("{other:?} is not due"),
            });
        }
    });
    let keys = TlsEndpoint::server(server(&[1])).unwrap();
    let control = ControlShard(sender.clone());
    let state = Arc::new(StateDir::open(Some(&std::env::temp_dir()), None));
    let opener = Arc::new(Opener::new(Sources::system(), state));
    let (table, settings) = (ExportTable::new(Vec::new()), Settings::default());
    let exports = Exports::new(table, opener, control, Some(keys), &settings, AuditSink::default());
    exports.access.check().unwrap();
    assert_eq!(ends.try_recv(), Ok(vec![PathKey(2)]));
    sender.send(Message::Wake);
    shard.join().unwrap();
}

/// A client that knows an epoch must not see the same number again under another path.
#[test]
fn an_epoch_belongs_to_the_file_and_not_to_its_name() {
    let dir = std::env::temp_dir().join(format!("rtrs-exports-{}-paths", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(dir.join("sub")).unwrap();
    let paths = ["vol", "sub/../vol", "sub/link", "hard"].map(|path| dir.join(path));
    std::fs::write(&paths[0], [0; 8192]).unwrap();
    std::os::unix::fs::symlink("../vol", &paths[2]).unwrap();
    std::fs::hard_link(&paths[0], &paths[3]).unwrap();
    let mut number = None;
    // Each iteration is a server that is killed at the end.
    for (path, name) in paths.iter().zip(["vol", "vol", "other", "vol"]) {
        let state = Arc::new(StateDir::open(Some(&dir.join("state")), None));
        let opener = Opener::new(Sources::system(), state);
        let spec = ExportSpec::new(Some(name.into()), Target::Path(path.clone()));
        let export = opener.open(&spec).unwrap();
        let found = export.epoch.number();
        assert_eq!(number.unwrap_or(found), found, "{}", path.display());
        assert!(wait_saved(&export.epoch, export.epoch.raise()));
        number = Some(found + 1);
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A deleted file in whose place is another one. That is known once it was examined.
#[derive(Debug)]
struct Deleted {
    memory: MemorySource,
    is_known: AtomicBool,
}

impl BlockSource for Deleted {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn target_name(&self) -> Option<TargetName> {
        let is_known = self.is_known.load(Ordering::SeqCst);
        Some(if is_known { TargetName::Replaced } else { TargetName::Kept })
    }

    fn is_deleted(&self) -> bool {
        self.is_known.load(Ordering::SeqCst)
    }

    fn examine_name(&self, _within: Duration) {
        self.is_known.store(true, Ordering::SeqCst);
    }

    fn open(&self, core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        self.memory.open(core)
    }
}

/// Calls `test` with the unused export `vol` of a deleted file. The file at its path is `path`.
fn with_deleted(path: &Path, test: impl FnOnce(&Arc<Exports>)) {
    let (sender, inbox) = mailbox().unwrap();
    let shard = std::thread::spawn(move || {
        let ring = Ring::new(8).unwrap();
        let mut inbox = inbox.arm(&ring).unwrap();
        loop {
            ring.turn().unwrap();
            match inbox.take_or_watch() {
                None => drop(ring.turn_or_sleep(None).unwrap()),
                Some(Message::Control(ControlMessage::Admin { reply, .. })) => {
                    reply.send(AdminReply::Exports(Vec::new()));
                }
                Some(Message::Control(_)) => {}
                Some(_) => return,
            }
        }
    });
    let memory = MemorySource::new(1 << 20, 512);
    let source = Deleted { memory, is_known: AtomicBool::new(false) };
    let table = ExportTable::new(vec![Export::new("vol", Arc::new(source))]);
    let state = Arc::new(StateDir::open(Some(&std::env::temp_dir()), None));
    let opener = Arc::new(Opener::new(Sources::system(), state));
    let spec = ExportSpec::new(Some("vol".into()), Target::Path(path.to_owned()));
    let settings = Settings { export: vec![spec], ..Settings::default() };
    let control = ControlShard(sender.clone());
    let exports = Exports::new(table, opener, control, None, &settings, AuditSink::default());
    test(&Arc::new(exports));
    sender.send(Message::Wake);
    shard.join().unwrap();
}

/// The regular examination may have been before the file was deleted.
#[test]
fn changed_options_close_a_file_that_was_just_deleted_by_force_only() {
    let file = std::env::temp_dir().join(format!("rtrs-exports-{}-set", std::process::id()));
    std::fs::write(&file, [0; 8192]).unwrap();
    with_deleted(&file, |exports| {
        let commands = ExportCommands::new(exports);
        let refused = commands.set("vol", &["delay=1ms".to_owned()], false);
        let why = refused.map(|_| ()).unwrap_err();
        assert!(why.contains("was deleted") && why.contains("--force"), "{why}");
    });
    std::fs::remove_file(&file).unwrap();
}

/// Another change of the export may run for as long as its target hangs.
#[test]
fn an_export_that_cannot_be_reopened_in_time_is_not_opened_with_its_old_file() {
    with_deleted(Path::new("/nonexistent/vol"), |exports| {
        let turn = exports.turns.of("vol", Duration::ZERO);
        assert_eq!(exports.examine_before_open(b"vol"), Examined::Outdated);
        drop(turn);
        // The new file cannot be opened, so the old one stays exported.
        assert_eq!(exports.examine_before_open(b"vol"), Examined::Yes);
    });
}

/// An export whose target hangs may be changed for long.
#[test]
fn a_change_of_an_export_delays_no_other() {
    with_deleted(Path::new("/nonexistent/vol"), |exports| {
        let _turn = exports.turns.begin("other").unwrap();
        assert_eq!(exports.examine_before_open(b"vol"), Examined::Yes);
        assert_eq!(exports.to_reopen(), Vec::<String>::new(), "it has just failed");
        assert!(exports.turns.begin("vol").is_ok());
    });
}
