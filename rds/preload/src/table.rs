//! Which descriptors are RDS sockets.
//!
//! Programs close and duplicate descriptors in ways that nobody sees, so an entry counts only while
//! its descriptor still has the same inode. A process that is started by another one finds the
//! sockets that it has inherited by their names.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use rds::socket::{Access, AtPath, Slot, node_dir};
use rustix::fs::fstat;
use rustix::net::{SocketAddrAny, SocketAddrUnix};

use crate::memory::borrow;

/// Begins the abstract name of each of our sockets.
const NAME: &[u8] = b"rds-preload-";
/// Descriptors from here on are not distinguished without a look at the table.
const MARKS: usize = 4096;

/// What a program may set before its socket is bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) sndbuf: Option<usize>,
    pub(crate) rcvbuf: Option<usize>,
    pub(crate) destination: Option<SocketAddr>,
    pub(crate) monitors: bool,
    /// Asks for another transport than TCP, of which there is none.
    pub(crate) other_transport: bool,
    pub(crate) recverr: bool,
}

/// A socket of a node.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    pub(crate) access: Arc<Access>,
    pub(crate) slot: Slot,
}

/// An RDS socket of the program. Descriptors that were duplicated have one.
#[derive(Debug)]
pub(crate) struct Entry {
    inode: u64,
    /// The node that the descriptor is connected to.
    pub(crate) path: Mutex<Option<PathBuf>>,
    bound: RwLock<Option<Bound>>,
    pub(crate) wishes: Mutex<Wishes>,
}

impl Entry {
    fn new(inode: u64) -> Self {
        let (path, wishes) = (Mutex::default(), Mutex::default());
        Self { inode, path, bound: RwLock::new(None), wishes }
    }

    /// The socket of the node, once it is bound.
    pub(crate) fn bound(&self) -> Option<Bound> {
        self.bound.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_bound(&self, bound: Bound) {
        *self.bound.write().unwrap_or_else(PoisonError::into_inner) = Some(bound);
    }

    /// What was set before it was bound.
    pub(crate) fn wishes(&self) -> Wishes {
        *self.wishes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wish(&self, change: impl FnOnce(&mut Wishes)) {
        change(&mut self.wishes.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Descriptors that may be RDS sockets, so that others cost nothing but a look.
static MARKED: [AtomicBool; MARKS] = [const { AtomicBool::new(false) }; MARKS];
static ENTRIES: RwLock<BTreeMap<i32, Arc<Entry>>> = RwLock::new(BTreeMap::new());
/// Nodes by the inode of their board, so that all sockets of one share a mapping.
static NODES: Mutex<BTreeMap<u64, Arc<Access>>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU32 = AtomicU32::new(0);

fn mark(fd: i32) -> Option<&'static AtomicBool> {
    usize::try_from(fd).ok().and_then(|fd| MARKED.get(fd))
}

/// The RDS socket behind a descriptor.
pub(crate) fn find(fd: i32) -> Option<Arc<Entry>> {
    if fd < 0 || mark(fd).is_some_and(|mark| !mark.load(Ordering::Acquire)) {
        return None;
    }
    let entries = ENTRIES.read().unwrap_or_else(PoisonError::into_inner);
    let entry = entries.get(&fd).cloned()?;
    drop(entries);
    if fstat(borrow(fd)).is_ok_and(|stat| stat.st_ino == entry.inode) {
        return Some(entry);
    }
    // It was closed, and is something else now.
    forget(fd);
    None
}

/// The process that the table belongs to. A child of vfork has it in common with its parent, and
/// changes nothing: it closes and duplicates descriptors of its own.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The locks that a thread holds while it forks. The child has this thread alone: nobody would
    /// release those of others.
    static HELD: RefCell<Option<Locks>> = const { RefCell::new(None) };
}

type Locks = (
    RwLockWriteGuard<'static, BTreeMap<i32, Arc<Entry>>>,
    MutexGuard<'static, BTreeMap<u64, Arc<Access>>>,
);

/// The table belongs to this process from now on.
pub(crate) fn own() {
    OWNER.store(std::process::id(), Ordering::Relaxed);
}

/// A thread is about to fork.
pub(crate) extern "C" fn fork_begins() {
    let entries = ENTRIES.write().unwrap_or_else(PoisonError::into_inner);
    let nodes = NODES.lock().unwrap_or_else(PoisonError::into_inner);
    hold(Some((entries, nodes)));
}

/// It has, in the parent.
pub(crate) extern "C" fn fork_ends() {
    hold(None);
}

/// The same in the child.
pub(crate) extern "C" fn fork_ends_in_child() {
    hold(None);
    own();
}

fn hold(locks: Option<Locks>) {
    // A thread that ends holds them no longer.
    let _ = HELD.try_with(|held| held.replace(locks));
}

fn is_owner() -> bool {
    OWNER.load(Ordering::Relaxed) == std::process::id()
}

/// A descriptor is a duplicate of an RDS socket.
pub(crate) fn duplicated(fd: i32, entry: Arc<Entry>) {
    if is_owner() {
        insert(fd, entry);
    }
}

/// A descriptor is an RDS socket.
fn insert(fd: i32, entry: Arc<Entry>) {
    ENTRIES.write().unwrap_or_else(PoisonError::into_inner).insert(fd, entry);
    if let Some(mark) = mark(fd) {
        mark.store(true, Ordering::Release);
    }
}

/// A descriptor is closed.
pub(crate) fn forget(fd: i32) {
    let is_marked = fd >= 0 && mark(fd).is_none_or(|mark| mark.load(Ordering::Acquire));
    if !is_marked || !is_owner() {
        return;
    }
    if let Some(mark) = mark(fd) {
        mark.store(false, Ordering::Release);
    }
    ENTRIES.write().unwrap_or_else(PoisonError::into_inner).remove(&fd);
}

/// A new socket, which gets a name by which processes that inherit it find it.
pub(crate) fn add(fd: i32) -> io::Result<()> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let inode = fstat(borrow(fd))?.st_ino;
    let process = std::process::id();
    let name = format!("{process}-{number}-{inode}");
    let name = [NAME, name.as_bytes()].concat();
    rustix::net::bind(borrow(fd), &SocketAddrUnix::new_abstract_name(&name)?)?;
    insert(fd, Arc::new(Entry::new(inode)));
    Ok(())
}

/// A node by its board, of which the one that is known is used.
pub(crate) fn share(access: Access) -> io::Result<Arc<Access>> {
    let inode = access.board().inode()?;
    let mut nodes = NODES.lock().unwrap_or_else(PoisonError::into_inner);
    // Those of nodes that have ended, whose sockets are closed, are not needed any more.
    nodes.retain(|_, node| Arc::strong_count(node) > 1);
    Ok(Arc::clone(nodes.entry(inode).or_insert_with(|| Arc::new(access))))
}

/// Paths at which nodes listen.
pub(crate) fn node_paths() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(node_dir()).into_iter().flatten().flatten();
    let is_node = |path: &PathBuf| {
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let is_address = stem.is_some_and(|stem| stem.parse::<IpAddr>().is_ok());
        is_address && path.extension().is_some_and(|ending| ending == "sock")
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_node).collect();
    paths.sort();
    paths
}

/// Finds the sockets that this process has inherited.
pub(crate) fn adopt_inherited() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for fd in numbers.collect::<Vec<i32>>() {
        // What is not ours, or cannot be used any more, is left alone: nobody could be notified.
        let _ = adopt(fd);
    }
}

fn adopt(fd: i32) -> Option<()> {
    let own = unix(rustix::net::getsockname(borrow(fd)).ok())?;
    let name = own.abstract_name().filter(|name| name.starts_with(NAME))?.to_vec();
    let entry = Entry::new(fstat(borrow(fd)).ok()?.st_ino);
    if let Some(peer) = unix(rustix::net::getpeername(borrow(fd)).ok().flatten()) {
        let path = Path::new(std::str::from_utf8(peer.path_bytes()?).ok()?).to_owned();
        if let Ok((access, slot)) = Access::find(Box::new(AtPath(path.clone())), &name) {
            entry.set_bound(Bound { access: share(access).ok()?, slot });
        }
        *entry.path.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
    }
    insert(fd, Arc::new(entry));
    Some(())
}

fn unix(address: Option<SocketAddrAny>) -> Option<SocketAddrUnix> {
    SocketAddrUnix::try_from(address?).ok()
}
