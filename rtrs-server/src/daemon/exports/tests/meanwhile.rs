//! Tests of concurrent changes to exports: access lists that a reload applies during another
//! change, targets whose release hangs, and names that are already taken.

use std::fmt;
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::super::change::Begun;
use super::super::finish::Finished;
use super::*;
use crate::control_protocol::Reloaded;
use crate::settings::OnMissing;
use crate::stats::AccessLimit;

/// Function that a file's last flush calls once.
type OnSettle = Box<dyn FnOnce() + Send>;

/// A file whose last flush calls a function.
struct Hooked {
    memory: MemorySource,
    on_settle: Arc<Mutex<Option<OnSettle>>>,
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooked")
    }
}

impl BlockSource for Hooked {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn target_name(&self) -> Option<TargetName> {
        Some(TargetName::Kept)
    }

    fn settle(&self) -> std::io::Result<()> {
        let hook = self.on_settle.lock().take();
        hook.into_iter().for_each(|hook| hook());
        Ok(())
    }

    fn open(&self, core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        self.memory.open(core)
    }
}

impl Hooked {
    /// Returns a file, and the slot for its function.
    fn new() -> (Self, Arc<Mutex<Option<OnSettle>>>) {
        let on_settle = Arc::<Mutex<Option<OnSettle>>>::default();
        let memory = MemorySource::new(1 << 20, 512);
        (Self { memory, on_settle: Arc::clone(&on_settle) }, on_settle)
    }
}

/// Applies the access lists of a configuration with these exports.
fn narrow(exports: &Exports, specs: &[&str]) {
    let export = specs.iter().map(|spec| spec.parse().unwrap()).collect();
    let set = Settings { export, ..Settings::default() };
    let checking = exports.access.begin_check();
    exports.narrow_access(&set, &checking, &mut Reloaded::default());
}

/// Changes the access list and the options of `vol`, whose file is at `path`, while a reload
/// applies the lists of a configuration with `specs`. Calls `then` before the export is reopened.
fn change_while_narrowed(
    path: &Path,
    specs: &'static [&str],
    configured: bool,
    then: impl FnOnce() + Send + 'static,
) -> (Vec<String>, Option<AccessLimit>) {
    let (source, on_settle) = Hooked::new();
    let result = OnceLock::new();
    with_source(source, path, |exports, commands| {
        let entry = exports.entry("vol").unwrap();
        let export = entry.export.upgrade().unwrap();
        exports.entries.insert(&entry.spec, &export, configured);
        drop(export);
        let of_reload = Arc::downgrade(exports);
        *on_settle.lock() = Some(Box::new(move || {
            narrow(&of_reload.upgrade().unwrap(), specs);
            then();
        }));
        let options = ["delay=1ms", "access=anyone@10.0.0.1:rw"].map(str::to_owned);
        let _ = commands.set("vol", &options, true);
        let lists = exports.access.lists();
        let rules = lists.of("vol").iter().map(ToString::to_string).collect();
        result.set((rules, lists.limit_of("vol"))).unwrap();
    });
    result.into_inner().unwrap()
}

const SET: &str = "anyone@10.0.0.1/32:rw";

#[test]
fn a_reload_keeps_the_list_of_an_export_that_is_being_changed() {
    let (_dir, path) = file("lists-changed");
    let (rules, limit) = change_while_narrowed(&path, &[], false, || ());
    assert_eq!((rules, limit), (vec![SET.to_owned()], None), "a command has added the export");
    let (rules, limit) = change_while_narrowed(&path, &[], true, || ());
    let limited = Some(AccessLimit::Holders);
    assert_eq!((rules, limit), (vec![SET.to_owned()], limited), "it left the configuration");
}

/// A reload cannot find a new export that has its list but is not published yet.
#[test]
fn a_reload_keeps_the_list_of_an_export_that_is_being_added() {
    let source = MemorySource::new(1 << 20, 512);
    with_source(source, Path::new("/nonexistent/vol"), |exports, commands| {
        let (of_reload, first) = (Arc::downgrade(exports), AtomicBool::new(true));
        let reload = Arc::<Mutex<Option<std::thread::JoinHandle<()>>>>::default();
        let started = Arc::clone(&reload);
        exports.table.watch(move || {
            if !first.swap(false, Ordering::SeqCst) {
                return;
            }
            let (exports, (done, wait)) = (of_reload.upgrade().unwrap(), mpsc::channel());
            *started.lock() = Some(std::thread::spawn(move || {
                narrow(&exports, &["vol=/nonexistent/vol"]);
                drop(done);
            }));
            // The reload waits for the command; otherwise, it would finish within this time.
            let _: Result<(), _> = wait.recv_timeout(Duration::from_millis(200));
        });
        let spec: ExportSpec = format!("x=null:1M,access={SET}").parse().unwrap();
        commands.add(spec.clone(), true).unwrap();
        reload.lock().take().unwrap().join().unwrap();
        assert_eq!(exports.entry("x").unwrap().spec.access, spec.access);
    });
}

#[test]
fn a_failed_change_does_not_revert_the_list_of_a_reload() {
    let (dir, path) = file("lists-failed");
    let gone = dir.0.join("gone.img");
    let hide = {
        let path = path.clone();
        move || std::fs::rename(&path, &gone).unwrap()
    };
    let narrowed = &["vol=/nonexistent/vol,access=anyone@10.0.0.2:ro"];
    let (rules, _) = change_while_narrowed(&path, narrowed, true, hide);
    assert_eq!(rules, ["anyone@10.0.0.2/32:ro"]);
}

#[test]
fn a_failed_change_reverts_its_own_list() {
    let (dir, path) = file("lists-taken-back");
    let (source, on_settle) = Hooked::new();
    with_source(source, &path.clone(), move |exports, commands| {
        *on_settle.lock() = Some(Box::new(move || {
            std::fs::rename(&path, dir.0.join("gone.img")).unwrap();
        }));
        let options = ["delay=1ms", "access=anyone@10.0.0.1:rw"].map(str::to_owned);
        commands.set("vol", &options, true).unwrap_err();
        assert!(exports.access.of("vol").is_empty());
        assert!(exports.failed.spec("vol").unwrap().access.is_empty());
    });
}

const LONG: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_removal_delays_no_other_change_while_the_target_is_closed() {
    let (source, on_settle) = Hooked::new();
    with_source(source, Path::new("/nonexistent/vol"), |exports, commands| {
        let (of_settle, (free, was_free)) = (Arc::downgrade(exports), mpsc::channel());
        *on_settle.lock() = Some(Box::new(move || {
            free.send(of_settle.upgrade().unwrap().turns.are_free_for("vol")).unwrap();
        }));
        commands.remove("vol", false, LONG).unwrap();
        assert_eq!(was_free.recv_timeout(LONG), Ok(true));
    });
}

/// Waits until an export is published with these settings.
fn wait_published(exports: &Exports, spec: &ExportSpec) -> bool {
    let until = std::time::Instant::now() + LONG;
    while exports.entry(spec.name()).is_none_or(|entry| entry.spec != *spec) {
        if std::time::Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Changes the file exports `a` and `b` to these settings. The release of `a` completes only once
/// `b` is open again.
fn change_both(specs: &[ExportSpec; 2], paths: [&Path; 2]) -> (bool, Vec<Finished>) {
    let (first, on_settle) = Hooked::new();
    let (second, _) = Hooked::new();
    let table = ExportTable::new(vec![
        Export::new("a", Arc::new(first)),
        Export::new("b", Arc::new(second)),
    ]);
    let result = OnceLock::new();
    Shard::of(&table).run(|control| {
        let exports = serve(Arc::clone(&table), paths[0], control);
        let (release, held) = mpsc::channel::<()>();
        *on_settle.lock() = Some(Box::new(move || {
            // Ends when the sender is dropped.
            let _ = held.recv();
        }));
        let closed = specs.iter().zip(paths).map(|(spec, path)| {
            let old = ExportSpec::new(Some(spec.name().into()), Target::Path(path.to_owned()));
            let at = table.find(spec.name().as_bytes()).unwrap();
            exports.entries.insert(&old, &table.get(at).unwrap(), true);
            let entry = exports.entry(spec.name()).unwrap();
            match exports.begin_change(&entry, spec, false).unwrap() {
                Begun::Closed(closed) => *closed,
                _ => panic!("{} stays open", spec.name()),
            }
        });
        let closed: Vec<_> = closed.collect();
        result
            .set(std::thread::scope(|scope| {
                let finish = scope.spawn(|| exports.finish_within(closed, HOUR));
                let is_apart = specs[0].target != specs[1].target;
                let published = is_apart && wait_published(&exports, &specs[1]);
                drop(release);
                (published, finish.join().unwrap())
            }))
            .ok()
            .unwrap();
        table.clear();
    });
    result.into_inner().unwrap()
}

#[test]
fn an_unreleased_export_keeps_no_other_export_closed() {
    let (dir, path) = file("finish-stuck");
    let other = dir.0.join("other.img");
    std::fs::write(&other, [0; 8192]).unwrap();
    let spec = |name: &str, path: &Path| -> ExportSpec {
        format!("{name}={},delay=1ms", path.display()).parse().unwrap()
    };
    let (published, finished) =
        change_both(&[spec("a", &path), spec("b", &other)], [&path, &other]);
    assert!(published, "b is open again before a is released");
    assert_eq!(finished.iter().map(|(spec, _)| spec.name()).collect::<Vec<_>>(), ["a", "b"]);
    assert!(finished.iter().all(|(_, result)| result.is_ok()), "{finished:?}");
}

#[test]
fn exports_whose_files_are_swapped_are_both_changed() {
    let (dir, path) = file("finish-swapped");
    let other = dir.0.join("other.img");
    std::fs::write(&other, [0; 8192]).unwrap();
    let settings = |paths: [&Path; 2]| {
        let spec = |name: &str, path: &Path| format!("{name}={}", path.display());
        let export = ["a", "b"].into_iter().zip(paths);
        let export = export.map(|(name, path)| spec(name, path).parse().unwrap());
        Settings { export: export.collect(), insecure_open: true, ..Settings::default() }
    };
    let table = ExportTable::new(Vec::new());
    Shard::of(&table).run(|control| {
        let rig = Rig::new(&settings([&path, &other]), Arc::clone(&table), control);
        for round in 0..10 {
            let paths = if round % 2 == 0 { [&*other, &path] } else { [&*path, &other] };
            let done = rig.reload(&settings(paths)).unwrap();
            assert_eq!((done.changed.len(), done.failed.len()), (2, 0), "{done:?}");
        }
        table.clear();
    });
}

#[test]
fn a_missing_new_export_does_not_prevent_other_changes() {
    let (dir, path) = file("reload-missing");
    let spec = |text: &str| -> ExportSpec { text.parse().unwrap() };
    let missing = spec(&format!("new={}", dir.0.join("none.img").display()));
    for (on_missing, added) in [(OnMissing::Wait, 1), (OnMissing::Refuse, 0)] {
        let first = Settings { insecure_open: true, on_missing, ..Settings::default() };
        let second = spec(&format!("vol={}", path.display()));
        let set = Settings { export: vec![missing.clone(), second], ..first.clone() };
        let table = ExportTable::new(Vec::new());
        Shard::of(&table).run(|control| {
            let rig = Rig::new(&first, Arc::clone(&table), control);
            let preview = rig.preview(&set);
            let done = rig.reload(&set);
            assert_eq!(table.find(b"vol").is_some(), added == 1);
            assert_eq!((preview.is_ok(), done.is_ok()), (added == 1, added == 1), "{done:?}");
            for done in preview.into_iter().chain(done) {
                assert_eq!((&*done.added[0], &*done.failed[0].name), ("vol", "new"), "{done:?}");
                assert!(done.failed[0].why.contains(TRIES_AGAIN), "{done:?}");
            }
            let expected = if added == 1 { Lookup::Failed } else { Lookup::Unknown };
            assert_eq!(table.lookup(b"new"), expected);
            table.clear();
        });
    }
}

/// If the table is full or has another export with that name, neither target can be published.
#[test]
fn an_export_that_cannot_be_republished_has_failed() {
    let (_dir, path) = file("exchange");
    let memory = MemorySource::new(1 << 20, 512);
    let replaced = Deleted { memory, is_known: AtomicBool::new(true) };
    let table = ExportTable::new(vec![Export::new("vol", Arc::new(replaced))]);
    let of_shard = Arc::clone(&table);
    let on_remove = Box::new(move || {
        let other = Export::new("vol", Arc::new(MemorySource::new(1 << 20, 512)));
        of_shard.add(&Arc::new(other)).unwrap();
    });
    Shard { on_remove, ..Shard::of(&table) }.run(|control| {
        let exports = serve(Arc::clone(&table), &path, control);
        let followed = exports.follow_all(&["vol".to_owned()], true);
        assert!(matches!(&followed[..], [Followed::Failed(_)]), "{followed:?}");
        assert!(exports.failed.spec("vol").is_some(), "it is not lost");
        table.clear();
    });
}
