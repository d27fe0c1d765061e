//! Tests of clients whose certificates or keys are no longer accepted, epochs, and exports whose
//! file was deleted or replaced.

mod meanwhile;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use rtrs_core::block::{BlockDevice, BlockSource, Core, Geometry, TargetName};
use rtrs_core::fabric::PeerIdentity;
use rtrs_core::ids::{PathUuid, SessionId};
use rtrs_core::rt::{Ring, Sender, mailbox};
use rtrs_core::tests::certificates::TestDir;
use rtrs_core::tls::{Clients, PrivateKey, ProofFacts, TlsClientConfig, TlsServerConfig};

use super::commands::ExportCommands;
use super::*;
use crate::backend::MemorySource;
use crate::daemon::identity::Sources;
use crate::daemon::rig::Rig;
use crate::engine::finder::Examined;
use crate::engine::message::{ControlMessage, Message};
use crate::path::PathKey;
use crate::settings::Target;
use crate::state::StateDir;
use crate::stats::TRIES_AGAIN;

fn key(seed: u8) -> PrivateKey {
    PrivateKey::from_seed([seed; 32]).unwrap()
}

/// Configuration with the server's key and the clients with these numbers.
fn server(clients: &[u8]) -> TlsServerConfig {
    let mut list = Clients::default();
    clients.iter().for_each(|n| list.add(&format!("db{n}"), key(*n).public()));
    TlsServerConfig::with_keys(&key(100), list).unwrap()
}

/// Identity that a client proved to a server that knew the client.
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

/// A certificate may expire, or a file change, long before anything is reread.
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
                other => panic!("unexpected {other:?}"),
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

/// A client that knows an epoch must not see it again when the file is opened by a different path.
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
    // Each iteration represents a server that is then killed.
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

/// A deleted file that was replaced by another, as an examination reveals.
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

    fn examine_name(&self) -> u64 {
        self.is_known.store(true, Ordering::SeqCst);
        0
    }

    fn open(&self, core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        self.memory.open(core)
    }
}

/// A control shard that removes exports from its table.
struct Shard {
    table: Arc<ExportTable>,
    /// Whether sessions have the exports open.
    in_use: bool,
    /// Called when sessions lose paths.
    on_check: Box<dyn FnMut() + Send>,
    /// Called when an export has been removed.
    on_remove: Box<dyn FnMut() + Send>,
    /// Called when the exports are listed, before the answer is sent.
    on_list: Box<dyn FnMut() + Send>,
}

impl Shard {
    fn of(table: &Arc<ExportTable>) -> Self {
        Self {
            table: Arc::clone(table),
            in_use: false,
            on_check: Box::new(|| ()),
            on_remove: Box::new(|| ()),
            on_list: Box::new(|| ()),
        }
    }

    fn answer(&mut self, request: AdminRequest) -> AdminReply {
        match request {
            AdminRequest::ExportRemove { name, .. } => match self.table.find(name.as_bytes()) {
                Some(at) if !self.in_use => {
                    self.table.remove(at, false);
                    (self.on_remove)();
                    AdminReply::ExportRemoved { ended: Vec::new() }
                }
                _ => AdminReply::Refused("it is open".to_owned()),
            },
            AdminRequest::CheckAccess => {
                (self.on_check)();
                AdminReply::Revoked(Vec::new())
            }
            AdminRequest::WouldEnd { .. } => AdminReply::Revoked(Vec::new()),
            AdminRequest::Holders(names) => {
                let nobody = names.into_iter().map(|name| (name, BTreeMap::new()));
                AdminReply::Holders(nobody.collect())
            }
            _ => {
                (self.on_list)();
                AdminReply::Exports(Vec::new())
            }
        }
    }

    /// Calls `test` while the shard runs.
    fn run(mut self, test: impl FnOnce(Sender<Message>)) {
        let (sender, inbox) = mailbox().unwrap();
        let shard = std::thread::spawn(move || {
            let ring = Ring::new(8).unwrap();
            let mut inbox = inbox.arm(&ring).unwrap();
            loop {
                ring.turn().unwrap();
                match inbox.take_or_watch() {
                    None => drop(ring.turn_or_sleep(None).unwrap()),
                    Some(Message::Control(ControlMessage::Admin { request, reply })) => {
                        reply.send(self.answer(request));
                    }
                    Some(Message::Control(_)) => {}
                    Some(_) => return,
                }
            }
        });
        test(sender.clone());
        sender.send(Message::Wake);
        shard.join().unwrap();
    }
}

/// Serves the exports of a table, with this path for `vol`.
fn serve(table: Arc<ExportTable>, path: &Path, control: Sender<Message>) -> Arc<Exports> {
    let state = Arc::new(StateDir::open(Some(&std::env::temp_dir()), None));
    let opener = Arc::new(Opener::new(Sources::system(), state));
    let spec = ExportSpec::new(Some("vol".into()), Target::Path(path.to_owned()));
    let set = Settings { export: vec![spec], ..Settings::default() };
    let (control, audit) = (ControlShard(control), AuditSink::default());
    Arc::new(Exports::new(table, opener, control, None, &set, audit))
}

/// Calls `test` with the unused export `vol` of this source. The file at its path is `path`.
fn with_source(
    source: impl BlockSource + 'static,
    path: &Path,
    test: impl FnOnce(&Arc<Exports>, &ExportCommands),
) {
    let table = ExportTable::new(vec![Export::new("vol", Arc::new(source))]);
    Shard::of(&table).run(|control| {
        let exports = serve(table, path, control);
        test(&exports, &ExportCommands::new(&exports));
    });
}

/// Calls `test` with the unused export `vol` of a deleted file. The file at its path is `path`.
fn with_deleted(path: &Path, test: impl FnOnce(&Arc<Exports>)) {
    let memory = MemorySource::new(1 << 20, 512);
    let source = Deleted { memory, is_known: AtomicBool::new(false) };
    with_source(source, path, |exports, _| test(exports));
}

/// A file whose last flush fails, or whose file system does not answer.
#[derive(Debug)]
struct Broken {
    memory: MemorySource,
    answers: bool,
}

impl Broken {
    fn new(answers: bool) -> Self {
        Self { memory: MemorySource::new(1 << 20, 512), answers }
    }
}

impl BlockSource for Broken {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn target_name(&self) -> Option<TargetName> {
        Some(TargetName::Kept)
    }

    fn is_examined(&self, _number: u64) -> bool {
        self.answers
    }

    fn settle(&self) -> std::io::Result<()> {
        Err(std::io::Error::other("the disk is gone"))
    }

    fn open(&self, core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        self.memory.open(core)
    }
}

/// A file to export, in its own directory.
fn file(name: &str) -> (TestDir, PathBuf) {
    let dir = TestDir::new(name);
    let path = dir.0.join("vol.img");
    std::fs::write(&path, [0; 8192]).unwrap();
    (dir, path)
}

#[test]
fn an_export_whose_last_flush_fails_is_reopened() {
    let (_dir, path) = file("exports-flush");
    with_source(Broken::new(true), &path, |exports, commands| {
        let changed = commands.set("vol", &["delay=1ms".to_owned()], false).unwrap();
        let warned = changed.warnings.iter().any(|why| why.contains("could not be flushed"));
        assert!(warned, "{:?}", changed.warnings);
        assert!(exports.entry("vol").is_some());
    });
}

#[test]
fn a_removed_export_is_gone_even_if_its_last_flush_fails() {
    let (_dir, path) = file("exports-remove");
    with_source(Broken::new(true), &path, |_, commands| {
        let removed = commands.remove("vol", false, RELEASE_MAX).unwrap();
        assert!(removed.not_closed.is_some_and(|why| why.contains("could not be flushed")));
    });
}

/// The file may have been deleted since its file system last answered.
#[test]
fn an_export_whose_file_system_does_not_answer_is_closed_only_by_force() {
    let (_dir, path) = file("exports-hang");
    with_source(Broken::new(false), &path, |exports, commands| {
        let why = commands.remove("vol", false, RELEASE_MAX).map(|_| ()).unwrap_err();
        assert!(why.contains("does not respond") && why.ends_with(LAST_COPY_HINT), "{why}");
        let why = commands.set("vol", &["delay=1ms".to_owned()], false).map(|_| ()).unwrap_err();
        assert!(why.contains("does not respond"), "{why}");
        assert!(exports.targets.last_copies().is_some_and(|why| why.contains("does not respond")));
        commands.remove("vol", true, RELEASE_MAX).unwrap();
    });
}

/// With a search path, a client would otherwise find the file of that name there.
#[test]
fn a_name_stays_reserved_while_its_export_is_changed() {
    let (_dir, path) = file("exports-reserved");
    let source = MemorySource::new(1 << 20, 512);
    let table = ExportTable::new(vec![Export::new("vol", Arc::new(source))]);
    let (of_shard, (found, lookups)) = (Arc::clone(&table), mpsc::channel());
    let on_check = Box::new(move || found.send(of_shard.lookup(b"vol")).unwrap());
    Shard { on_check, ..Shard::of(&table) }.run(|control| {
        let exports = serve(Arc::clone(&table), &path, control);
        let commands = ExportCommands::new(&exports);
        let options = ["delay=1ms", "access=anyone@10.0.0.1:ro"].map(str::to_owned);
        commands.set("vol", &options, true).unwrap();
        assert!(matches!(table.lookup(b"vol"), Lookup::Named(_)));
        assert_eq!(lookups.try_iter().next(), Some(Lookup::Changing));
        commands.remove("vol", true, RELEASE_MAX).unwrap();
        assert_eq!(table.lookup(b"vol"), Lookup::Unknown, "no reservation is left");
    });
}

#[test]
fn the_second_of_two_commands_that_add_an_export_changes_nothing() {
    let source = MemorySource::new(1 << 20, 512);
    with_source(source, Path::new("/nonexistent/vol"), |exports, commands| {
        let spec = |who: &str| -> ExportSpec {
            format!("x=null:1M,access=anyone@{who}:rw").parse().unwrap()
        };
        // Both open the target before either is published.
        let [first, second] = ["10.1.1.1", "10.2.2.2"].map(spec);
        let opened = [&first, &second].map(|spec| exports.opener.open_shared(spec).unwrap());
        commands.add_opened(&first, &opened[0], true).unwrap();
        let why = commands.add_opened(&second, &opened[1], true).map(drop).unwrap_err();
        assert!(why.contains("there is already an export with this name"), "{why}");
        assert_eq!(exports.entry("x").unwrap().spec.access, first.access);
    });
}

/// A server with a file as its only export `a`.
fn with_reload(in_use: bool, path: &Path, test: impl FnOnce(&Rig, &dyn Fn(&str) -> Settings)) {
    let table = ExportTable::new(Vec::new());
    let shard = Shard { in_use, ..Shard::of(&table) };
    let settings = |export: &str| {
        let (name, options) = export.split_once(',').unwrap_or((export, ""));
        let spec = format!("{name}={},{options}", path.display());
        let export = vec![spec.trim_end_matches(',').parse().unwrap()];
        Settings { export, insecure_open: true, ..Settings::default() }
    };
    shard.run(|control| {
        let rig = Rig::new(&settings("a"), Arc::clone(&table), control);
        test(&rig, &settings);
        table.clear();
    });
}

/// The shard lists the exports before this export is served; the failed exports are read
/// afterwards.
#[test]
fn a_list_includes_an_export_opened_in_the_meantime() {
    let (_dir, path) = file("exports-listed");
    let table = ExportTable::new(Vec::new());
    let opens = Arc::new(OnceLock::<Arc<Exports>>::new());
    let late = ExportSpec::new(Some("late".into()), Target::Path(path.clone()));
    let (of_shard, spec) = (Arc::clone(&opens), late.clone());
    let mut shard = Shard::of(&table);
    shard.on_list = Box::new(move || {
        let exports = of_shard.get().unwrap();
        recovery::open_now(exports, &spec).unwrap();
    });
    shard.run(|control| {
        let exports = opens.get_or_init(|| serve(Arc::clone(&table), &path, control));
        recovery::begin(exports, vec![(late, "it does not exist".into())]);
        let listed = exports.list().unwrap().exports;
        assert_eq!(listed.iter().map(|export| &export.name).collect::<Vec<_>>(), ["late"]);
        assert!(table.find(b"late").is_some());
    });
}

#[test]
fn an_export_that_a_reload_has_closed_is_retried() {
    let (dir, path) = file("exports-reload");
    with_reload(false, &path, |rig, settings| {
        // The path now leads to a file that another program has locked.
        std::fs::rename(&path, dir.0.join("old.img")).unwrap();
        std::fs::write(&path, [0; 8192]).unwrap();
        let holder = std::fs::File::open(&path).unwrap();
        holder.lock().unwrap();
        let done = rig.reload(&settings("a,block-size=4096")).unwrap();
        assert!(done.removed.is_empty(), "{done:?}");
        assert!(done.failed[0].why.contains(TRIES_AGAIN), "{done:?}");
        assert_eq!(rig.saved(), settings("a").export, "it is kept, with its old options");
    });
}

#[test]
fn an_export_in_use_that_a_reload_cannot_rename_is_retried() {
    let (_dir, path) = file("exports-rename");
    with_reload(true, &path, |rig, settings| {
        let done = rig.reload(&settings("b")).unwrap();
        assert_eq!((done.removed.len(), done.kept.len(), done.failed.len()), (0, 1, 1), "{done:?}");
        let names: Vec<_> = rig.saved().iter().map(|spec| spec.name().to_owned()).collect();
        assert_eq!(names, ["a", "b"]);
    });
}

/// The periodic examination may have run before the file was deleted.
#[test]
fn changed_options_close_a_just_deleted_file_only_if_forced() {
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

/// Another change to the export may be running for as long as its target hangs.
#[test]
fn an_export_that_cannot_be_reopened_in_time_is_not_opened_with_its_old_file() {
    with_deleted(Path::new("/nonexistent/vol"), |exports| {
        let turn = exports.turns.of("vol", Duration::ZERO);
        assert_eq!(exports.examine_before_open(b"vol"), Examined::Outdated);
        drop(turn);
        // The new file cannot be opened, so the old file stays exported.
        assert_eq!(exports.examine_before_open(b"vol"), Examined::Yes);
    });
}

/// Changing an export whose target hangs may take a long time.
#[test]
fn a_change_to_an_export_delays_no_other_export() {
    with_deleted(Path::new("/nonexistent/vol"), |exports| {
        // Held for the whole test: anything that waits for this turn waits forever.
        let _turn = exports.turns.begin("other").unwrap();
        assert_eq!(exports.examine_before_open(b"vol"), Examined::Yes);
        assert!(exports.turns.are_free_for("vol"));
    });
}
