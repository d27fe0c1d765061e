//! The search path: exports that clients name without any configuration.
//!
//! Owns [`Searcher`], a [`Finder`] with its own thread, because looking up and opening a path may
//! block and the control shard must not wait. The thread answers each search with a message to the
//! control shard, in order. It remembers the exports it has opened for as long as they are in use,
//! so that two sessions that name the same file share one export, even under different names. If a
//! name now leads to a different file, that file is opened as a separate export.
//!
//! Names cannot leave the search path: the control shard refuses names with `..`, and the target of
//! a symbolic link must be under the path, with all links in the path itself resolved. The resolved
//! path is then walked again without links (openat2 with RESOLVE_BENEATH), and all later operations
//! use the descriptor of the file found there. Replacing a directory with a link in the meantime
//! therefore has no effect.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::thread;

use rtrs_core::rt;
use rtrs_core::rt::blkdev::{find_beneath, find_directory};
use rtrs_core::wire::{Name, errno};

use crate::backend::{OpenedTarget, Target, open_target_at};
use crate::daemon::exports::{epoch_key, wait_saved};
use crate::daemon::identity::Sources;
use crate::engine::finder::{Finder, Search};
use crate::engine::message::{ControlMessage, Message};
use crate::export::{Closer, Export};
use crate::settings::ExportSpec;
use crate::state::StateDir;

/// Errnos from a kernel without openat2, or from a sandbox that forbids it.
const ENOSYS: i32 = 38;
const EPERM: i32 = 1;

/// Directory in which names are looked up.
#[derive(Debug, Clone)]
pub(crate) struct SearchPath {
    /// Path of the directory.
    pub(crate) prefix: PathBuf,
    /// Whether each session uses the subdirectory named after it.
    pub(crate) by_session: bool,
}

/// Handle to the search thread.
#[derive(Debug)]
pub(crate) struct Searcher {
    searches: Sender<Search>,
}

impl Searcher {
    /// Starts the thread, which ends when the searcher is dropped.
    ///
    /// # Errors
    /// The system's error if it cannot create a thread.
    pub(crate) fn start(
        path: SearchPath,
        sources: Sources,
        state: Arc<StateDir>,
        control: rt::Sender<Message>,
    ) -> io::Result<Self> {
        let (searches, jobs) = mpsc::channel();
        let shelf = Shelf { path, sources, state, known: BTreeMap::new() };
        thread::Builder::new().name("search".into()).spawn(move || run(shelf, &jobs, &control))?;
        Ok(Self { searches })
    }
}

impl Finder for Searcher {
    fn find(&self, search: Search) -> bool {
        self.searches.send(search).is_ok()
    }
}

/// Flushes and closes found exports on separate threads.
#[derive(Debug)]
pub(super) struct FlushingCloser;

impl Closer for FlushingCloser {
    fn close(&self, export: Arc<Export>) {
        // A flush may be slow, and searches do not wait for it.
        let closer = thread::Builder::new().name("release".into());
        if let Err(error) = closer.spawn(move || close(&export)) {
            tracing::error!("closing an export without a flush: cannot start a thread: {error}");
        }
    }
}

/// Flushes an export that no session has open. The kernel reports a write-back error to the next
/// opener of the file only as long as it remembers the file, so a failure raises the epoch.
fn close(export: &Export) {
    if let Err(error) = export.source.settle() {
        let name = &export.name;
        tracing::error!(export = &**name, %error, "cannot flush a closed export");
        let _ = wait_saved(&export.epoch, export.epoch.raise());
    }
}

fn run(mut shelf: Shelf, jobs: &Receiver<Search>, control: &rt::Sender<Message>) {
    for search in jobs {
        let result = shelf.look(search.session.as_bytes(), &search.name);
        let found = ControlMessage::Found(Box::new((search, result)));
        control.send(Message::Control(found));
    }
}

/// Found exports that are still in use.
struct Shelf {
    path: SearchPath,
    sources: Sources,
    known: BTreeMap<FileKey, Weak<Export>>,
    state: Arc<StateDir>,
}

impl Shelf {
    /// Returns the export for a name, opening it if necessary, or the errno of a failed open.
    fn look(&mut self, session: &[u8], name: &Name) -> Result<Arc<Export>, u16> {
        let shown = name.to_string();
        let found = self.path.resolve(session, name.as_bytes()).and_then(|place| place.find());
        let found = found.map_err(|error| {
            tracing::info!(export = shown, %error, "refused a name below the search path");
            error.errno()
        })?;
        self.known.retain(|_, export| export.strong_count() > 0);
        if let Some(export) = self.known.get(&found.key).and_then(Weak::upgrade) {
            return Ok(export);
        }
        let export = Arc::new(self.open(&found, &shown)?);
        self.known.insert(found.key, Arc::downgrade(&export));
        Ok(export)
    }

    /// Opens a found file for writing, or for reading if that is impossible.
    fn open(&self, found: &Found, name: &str) -> Result<Export, u16> {
        let (at, target) = (found.link(), Target::Path(found.path.clone()));
        let open = |ro| {
            let spec = ExportSpec { ro, ..ExportSpec::new(None, target.clone()) };
            open_target_at(&spec, Some(&at)).map(|opened| (opened, ro))
        };
        let opened = open(false).or_else(|error| {
            tracing::info!(export = name, %error, "cannot be written; opening it read-only");
            open(true)
        });
        match opened {
            Ok((OpenedTarget { source, file }, read_only)) => {
                let id = self.sources.export(name, None, &Target::Path(at));
                // Stored under the file's own ID: its name may later belong to another file, and an
                // epoch shared by two files could fall back to one that a client knows.
                let epoch = match id {
                    Some(id) => self.state.epoch(&epoch_key(id), read_only),
                    None => Ok(StateDir::unknown()),
                };
                let epoch = epoch.map_err(|error| {
                    tracing::warn!(export = name, %error, "cannot be opened below the search path");
                    errno::EBUSY
                })?;
                let backing = found.path.display().to_string();
                Ok(Export { backing, read_only, file, id, epoch, ..Export::new(name, source) })
            }
            Err(error) => {
                tracing::info!(export = name, %error, "cannot be opened below the search path");
                let code = error.io_error().and_then(io::Error::raw_os_error);
                Err(code.map_or(errno::EIO, errno::fit))
            }
        }
    }
}

/// Reason for refusing a name.
#[derive(Debug, thiserror::Error)]
enum Refused {
    /// Error from the system.
    #[error("{0}")]
    System(#[from] io::Error),
    /// A link leads out of the search path.
    #[error("the path leads out of search-path, to {}", .0.display())]
    Outside(PathBuf),
    /// The path changed during the lookup.
    #[error("the path changed during the lookup: {0}")]
    Changed(io::Error),
    /// The server cannot resolve paths without following links.
    #[error("search-path needs openat2, which the kernel or a sandbox refuses: {0}")]
    NoOpenat2(io::Error),
    /// Neither a regular file nor a block device.
    #[error("the path is neither a regular file nor a block device")]
    Kind,
}

impl Refused {
    fn errno(&self) -> u16 {
        match self {
            Self::System(error) => error.raw_os_error().map_or(errno::EIO, errno::fit),
            Self::Outside(_) | Self::Changed(_) | Self::NoOpenat2(_) => errno::EACCES,
            Self::Kind => errno::ENOTBLK,
        }
    }
}

impl SearchPath {
    /// Resolves a name to a path under the search path.
    fn resolve(&self, session: &[u8], name: &[u8]) -> Result<Place, Refused> {
        let mut base = self.prefix.clone();
        if self.by_session {
            base.push(OsStr::from_bytes(session));
        }
        let base = fs::canonicalize(base)?;
        let slashes = name.iter().take_while(|&&byte| byte == b'/').count();
        let path = fs::canonicalize(base.join(OsStr::from_bytes(&name[slashes..])))?;
        match path.strip_prefix(&base).map(Path::to_path_buf) {
            Ok(below) => Ok(Place { base, below }),
            Err(_) => Err(Refused::Outside(path)),
        }
    }
}

/// A directory, and a path under it, both without links.
#[derive(Debug)]
struct Place {
    base: PathBuf,
    below: PathBuf,
}

impl Place {
    /// Finds the file at this path.
    fn find(&self) -> Result<Found, Refused> {
        let path = if self.below.as_os_str().is_empty() { Path::new(".") } else { &self.below };
        let base = find_directory(&self.base).map_err(Refused::Changed)?;
        let file = find_beneath(&base, path).map_err(|error| match error.raw_os_error() {
            Some(EPERM | ENOSYS) => Refused::NoOpenat2(error),
            _ => Refused::Changed(error),
        })?;
        let meta = file.metadata()?;
        let kind = meta.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(Refused::Kind);
        }
        let key = (meta.dev(), meta.ino(), meta.rdev());
        Ok(Found { path: self.base.join(&self.below), key, file })
    }
}

/// Identity of a file: `st_dev`, `st_ino`, `st_rdev`. Unique while the file is open.
type FileKey = (u64, u64, u64);

/// A file or block device under the search path.
#[derive(Debug)]
struct Found {
    /// Path at the time of the lookup.
    path: PathBuf,
    key: FileKey,
    /// Descriptor of the file, not opened for IO.
    file: fs::File,
}

impl Found {
    /// Path that leads to exactly this file for the lifetime of `self`.
    fn link(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(bytes: &[u8]) -> Name {
        Name::new(bytes).unwrap()
    }

    struct Tree(PathBuf);

    impl Tree {
        /// Creates `vols/a`, `vols/dir/b`, `vols/in` to `dir/b`, `vols/out` to `outside`,
        /// `vols/s1/c`.
        fn new(name: &str) -> Self {
            let name = format!("rtrs-search-{}-{name}", std::process::id());
            let root = fs::canonicalize(std::env::temp_dir()).unwrap().join(name);
            let tree = Self(root);
            let _ = fs::remove_dir_all(&tree.0);
            for dir in ["vols/dir", "vols/s1"] {
                fs::create_dir_all(tree.0.join(dir)).unwrap();
            }
            for file in ["vols/a", "vols/dir/b", "vols/s1/c", "outside"] {
                fs::write(tree.0.join(file), [0; 4096]).unwrap();
            }
            let link = |to: &str, at: &str| {
                std::os::unix::fs::symlink(to, tree.0.join(at)).unwrap();
            };
            link("dir/b", "vols/in");
            link("../outside", "vols/out");
            link("..", "vols/up");
            tree
        }

        fn shelf(&self, by_session: bool) -> Shelf {
            let path = SearchPath { prefix: self.0.join("vols"), by_session };
            let state = Arc::new(StateDir::open(Some(&self.0.join("state")), None));
            Shelf { path, sources: Sources::system(), state, known: BTreeMap::new() }
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn find(path: &SearchPath, session: &[u8], name: &[u8]) -> Result<PathBuf, Refused> {
        Ok(path.resolve(session, name)?.find()?.path)
    }

    #[test]
    fn a_link_created_after_the_check_is_not_followed() {
        let tree = Tree::new("swap");
        let path = tree.shelf(false).path;
        let swap = |at: &str, to: &str| {
            let at = tree.0.join(at);
            fs::rename(&at, at.with_extension("old")).unwrap();
            std::os::unix::fs::symlink(to, &at).unwrap();
        };
        fs::create_dir(tree.0.join("far")).unwrap();
        fs::write(tree.0.join("far/b"), [1; 4096]).unwrap();
        // A directory along the way, the file itself, and the directory of the search path.
        for (name, at, to) in [
            ("dir/b", "vols/dir", "../far"),
            ("a", "vols/a", "../outside"),
            ("s1/c", "vols", "far"),
        ] {
            let place = path.resolve(b"s", name.as_bytes()).unwrap();
            place.find().unwrap();
            swap(at, to);
            let error = place.find().unwrap_err();
            assert!(matches!(error, Refused::Changed(_)), "{name}: {error}");
            assert_eq!(error.errno(), errno::EACCES, "{name}");
        }
    }

    #[test]
    fn the_examined_file_is_the_opened_one() {
        let tree = Tree::new("pinned");
        let shelf = tree.shelf(false);
        let found = shelf.path.resolve(b"s", b"a").unwrap().find().unwrap();
        let path = tree.0.join("vols/a");
        fs::remove_file(&path).unwrap();
        fs::write(&path, [0; 8192]).unwrap();
        assert_eq!(shelf.open(&found, "a").unwrap().geometry().size, 4096);
    }

    #[test]
    fn names_cannot_leave_the_search_path() {
        let tree = Tree::new("far");
        let path = tree.shelf(false).path;
        let resolve = |name: &str| find(&path, b"s1", name.as_bytes());
        for (name, to) in [
            ("a", "vols/a"),
            ("//a", "vols/a"),
            ("dir//b", "vols/dir/b"),
            ("./dir/b", "vols/dir/b"),
            ("in", "vols/dir/b"),
        ] {
            assert_eq!(resolve(name).unwrap(), tree.0.join(to), "{name}");
        }
        for (name, errno) in [
            ("out", errno::EACCES),
            ("up/outside", errno::EACCES),
            ("up", errno::EACCES),
            ("none", errno::ENOENT),
            ("a/b", errno::ENOTDIR),
            ("dir", errno::ENOTBLK),
            ("/", errno::ENOTBLK),
        ] {
            assert_eq!(resolve(name).unwrap_err().errno(), errno, "{name}");
        }
        let long = "x".repeat(300);
        assert_eq!(resolve(&long).unwrap_err().errno(), errno::ENAMETOOLONG);
    }

    #[test]
    fn each_session_has_its_own_directory() {
        let tree = Tree::new("own");
        let path = tree.shelf(true).path;
        assert_eq!(find(&path, b"s1", b"c").unwrap(), tree.0.join("vols/s1/c"));
        assert_eq!(find(&path, b"s1", b"a").unwrap_err().errno(), errno::ENOENT);
        assert_eq!(find(&path, b"s2", b"c").unwrap_err().errno(), errno::ENOENT);
    }

    #[test]
    fn one_file_is_one_export_while_in_use() {
        let tree = Tree::new("one");
        let mut shelf = tree.shelf(false);
        let first = shelf.look(b"s", &name(b"in")).unwrap();
        assert!(!first.read_only && first.geometry().size == 4096);
        let second = shelf.look(b"s", &name(b"dir/b")).unwrap();
        assert!(Arc::ptr_eq(&first, &second), "the link is the same file");
        drop((first, second));
        // The file was locked while it was in use.
        let again = shelf.look(b"t", &name(b"dir/b")).unwrap();
        assert_eq!(shelf.known.len(), 1);
        drop(again);
        shelf.look(b"t", &name(b"a")).unwrap();
        assert_eq!(shelf.known.len(), 1, "unused entries are forgotten");
        assert_eq!(shelf.look(b"t", &name(b"none")).unwrap_err(), errno::ENOENT);
    }

    #[test]
    fn an_export_belongs_to_the_file_and_not_to_its_name() {
        let tree = Tree::new("renamed");
        let mut shelf = tree.shelf(false);
        let at = |name: &str| tree.0.join("vols").join(name);
        let old = shelf.look(b"s", &name(b"a")).unwrap();
        fs::hard_link(at("a"), at("link")).unwrap();
        let linked = shelf.look(b"t", &name(b"link")).unwrap();
        assert!(Arc::ptr_eq(&old, &linked), "the same file");
        fs::write(at("new"), [0; 8192]).unwrap();
        fs::rename(at("new"), at("a")).unwrap();
        let new = shelf.look(b"t", &name(b"a")).unwrap();
        assert_eq!((old.geometry().size, new.geometry().size), (4096, 8192));
        assert!(!new.read_only);
        let linked = shelf.look(b"t", &name(b"link")).unwrap();
        assert!(Arc::ptr_eq(&old, &linked), "still the old one");
    }

    #[test]
    fn an_epoch_belongs_to_the_file_and_not_to_its_name() {
        let tree = Tree::new("epoch");
        let at = |name: &str| tree.0.join("vols").join(name);
        let fails = |name: &str, export: Arc<Export>| {
            let rises = export.epoch.raise();
            let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while !export.epoch.is_saved(rises) {
                assert!(std::time::Instant::now() < end, "{name}: not saved");
                thread::sleep(std::time::Duration::from_millis(1));
            }
        };
        // Each shelf represents a server that is killed at the end.
        let look = |at: &str| tree.shelf(false).look(b"s", &name(at.as_bytes())).unwrap();
        let base = look("a").epoch.number();
        fails("a", look("a"));
        assert_eq!(look("a").epoch.number(), base + 1);
        fs::rename(at("a"), at("moved")).unwrap();
        assert_eq!(look("moved").epoch.number(), base + 1, "the same file has failed a sync");
        fails("moved", look("moved"));
        // Another file takes over its name.
        fs::write(at("a"), [0; 4096]).unwrap();
        assert_ne!(look("a").epoch.number(), base + 2, "no sync of this one has failed");
        // A client that knows the epoch after the first failure must notice the second one.
        fs::rename(at("moved"), at("a")).unwrap();
        assert_eq!(look("a").epoch.number(), base + 2);
    }

    /// A write-back failure after the last session has closed the export is reported.
    #[test]
    fn a_found_export_is_flushed_before_it_closes() {
        let tree = Tree::new("closed");
        let export = tree.shelf(false).look(b"s", &name(b"a")).unwrap();
        let (epoch, rises) = (Arc::clone(&export.epoch), export.epoch.rises());
        let (settled, reported) = mpsc::channel();
        let failing = |fails| Failing { fails, settled: settled.clone() };
        for (fails, raised) in [(false, 0), (true, 1)] {
            let source = Arc::new(failing(fails));
            let found = Export { epoch: Arc::clone(&epoch), ..Export::new("a", source) };
            let table = crate::export::ExportTable::new(Vec::new());
            table.set_closer(Box::new(FlushingCloser));
            let found = Arc::new(found);
            let at = table.place(&found).unwrap();
            let weak = Arc::downgrade(&found);
            drop(found);
            table.leave(at);
            reported.recv_timeout(std::time::Duration::from_secs(60)).expect("it is flushed");
            let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while weak.strong_count() > 0 {
                assert!(std::time::Instant::now() < end, "not closed");
                thread::sleep(std::time::Duration::from_millis(1));
            }
            assert_eq!(epoch.rises(), rises + raised);
            assert!(epoch.is_saved(epoch.rises()));
        }
    }

    /// A source whose last flush may fail.
    #[derive(Debug)]
    struct Failing {
        fails: bool,
        settled: Sender<()>,
    }

    impl rtrs_core::block::BlockSource for Failing {
        fn geometry(&self) -> rtrs_core::block::Geometry {
            rtrs_core::block::Geometry::plain(4096)
        }

        fn open(
            &self,
            _core: &rtrs_core::block::Core,
        ) -> io::Result<Box<dyn rtrs_core::block::BlockDevice>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn settle(&self) -> io::Result<()> {
            let _ = self.settled.send(());
            if self.fails { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
        }
    }

    #[test]
    fn a_file_locked_elsewhere_is_read_only() {
        let tree = Tree::new("busy");
        let file = fs::File::open(tree.0.join("vols/a")).unwrap();
        file.lock().unwrap();
        assert!(tree.shelf(false).look(b"s", &name(b"a")).unwrap().geometry().read_only);
    }
}
