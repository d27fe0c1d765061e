//! Table of the descriptors that are RDS sockets.
//!
//! Programs can close and duplicate descriptors without this library noticing, so an entry is valid
//! only while its descriptor still has the same inode. A newly started process recognizes inherited
//! sockets by their names.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use libc::c_int;
use rds::socket::{Access, AtPath, Binding, Control, node_dir};
use rustix::fs::fstat;
use rustix::net::{SocketAddrAny, SocketAddrUnix};

use crate::completions::{self, Completions};
use crate::memory::borrow;

/// Prefix of the abstract names of our sockets.
const NAME: &[u8] = b"rds-preload-";
/// Lowest descriptor that always requires a table lookup.
const MARKS: usize = 4096;

/// Options that a program may set before its socket is bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) sndbuf: Option<usize>,
    pub(crate) rcvbuf: Option<usize>,
    pub(crate) destination: Option<SocketAddr>,
    pub(crate) monitors: bool,
    /// The program has selected TCP, the only transport.
    pub(crate) transport: bool,
    pub(crate) recverr: bool,
    /// Options for control messages of unix sockets, one bit each; RDS delivers none.
    pub(crate) passes: u8,
}

/// An RDS socket of the program, shared by duplicated descriptors.
#[derive(Debug)]
pub(crate) struct Entry {
    inode: u64,
    /// Held while the descriptor is being connected to a node.
    pub(crate) connecting: Mutex<()>,
    bound: RwLock<Option<Arc<Binding>>>,
    pub(crate) wishes: Mutex<Wishes>,
    /// Option with which the program requested timestamps, or 0. Not behind a lock, since another
    /// thread may fork while this one receives.
    timestamps: AtomicI32,
    /// The program may send with MSG_ZEROCOPY.
    zerocopy: AtomicBool,
    /// Value of SO_RDS_MSG_RXPATH_LATENCY: the number of latencies that the program wants, and
    /// which ones.
    traces: AtomicU32,
    /// This process has sent a message.
    has_sent: AtomicBool,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.is_zerocopy() {
            completions::forget(self.inode);
        }
    }
}

impl Entry {
    fn new(inode: u64) -> Self {
        let (connecting, wishes) = (Mutex::default(), Mutex::default());
        let (timestamps, zerocopy) = (AtomicI32::new(0), AtomicBool::new(false));
        let (bound, traces) = (RwLock::new(None), AtomicU32::new(0));
        let has_sent = AtomicBool::new(false);
        Self { inode, connecting, bound, wishes, timestamps, zerocopy, traces, has_sent }
    }

    /// Whether this process has sent a message.
    pub(crate) fn has_sent(&self) -> bool {
        self.has_sent.load(Ordering::Relaxed)
    }

    pub(crate) fn set_sent(&self) {
        self.has_sent.store(true, Ordering::Relaxed);
    }

    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// Whether the program may send with MSG_ZEROCOPY.
    pub(crate) fn is_zerocopy(&self) -> bool {
        self.zerocopy.load(Ordering::Relaxed)
    }

    /// Returns which latencies of received messages the program wants: their number, and the
    /// position of each.
    pub(crate) fn traces(&self) -> [u8; 4] {
        self.traces.load(Ordering::Relaxed).to_ne_bytes()
    }

    pub(crate) fn set_traces(&self, traces: [u8; 4]) {
        self.traces.store(u32::from_ne_bytes(traces), Ordering::Relaxed);
    }

    pub(crate) fn set_zerocopy(&self, on: bool) {
        self.zerocopy.store(on, Ordering::Relaxed);
    }

    /// Returns the option with which the program requested timestamps.
    pub(crate) fn timestamps(&self) -> Option<c_int> {
        Some(self.timestamps.load(Ordering::Relaxed)).filter(|option| *option != 0)
    }

    pub(crate) fn set_timestamps(&self, option: Option<c_int>) {
        self.timestamps.store(option.unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns the binding, once this process or another one that shares the descriptor has bound
    /// the socket.
    pub(crate) fn bound(&self, fd: i32) -> Option<Arc<Binding>> {
        let known = self.bound.read().unwrap_or_else(PoisonError::into_inner).clone();
        known.or_else(|| {
            let bound = Arc::new(join(fd)?);
            self.set_bound(Arc::clone(&bound));
            Some(bound)
        })
    }

    pub(crate) fn set_bound(&self, bound: Arc<Binding>) {
        *self.bound.write().unwrap_or_else(PoisonError::into_inner) = Some(bound);
    }

    /// Returns the options set before the bind.
    pub(crate) fn wishes(&self) -> Wishes {
        *self.wishes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wish(&self, change: impl FnOnce(&mut Wishes)) {
        change(&mut self.wishes.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Descriptors that may be RDS sockets, so that all others cost only one check.
static MARKED: [AtomicBool; MARKS] = [const { AtomicBool::new(false) }; MARKS];
static ENTRIES: RwLock<BTreeMap<i32, Arc<Entry>>> = RwLock::new(BTreeMap::new());
/// Nodes, keyed by the inode of their board, so that all sockets of a node share one mapping.
static NODES: Mutex<BTreeMap<u64, Arc<Access>>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU32 = AtomicU32::new(0);

fn mark(fd: i32) -> Option<&'static AtomicBool> {
    usize::try_from(fd).ok().and_then(|fd| MARKED.get(fd))
}

/// Returns the RDS socket of a descriptor.
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
    // The descriptor was closed and has been reused.
    forget(fd);
    None
}

/// Process that owns the table. A child of vfork shares the table with its parent and must not
/// change it when the child closes and duplicates its own descriptors.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Locks held by a thread while it forks. The child has only this thread, so locks of other
    /// threads would never be released.
    static HELD: RefCell<Option<Locks>> = const { RefCell::new(None) };
}

type Locks = (
    RwLockWriteGuard<'static, BTreeMap<i32, Arc<Entry>>>,
    MutexGuard<'static, BTreeMap<u64, Arc<Access>>>,
    MutexGuard<'static, Completions>,
);

/// Makes this process the owner of the table.
pub(crate) fn own() {
    OWNER.store(std::process::id(), Ordering::Relaxed);
}

/// Takes the locks before a fork.
pub(crate) extern "C" fn fork_begins() {
    let entries = ENTRIES.write().unwrap_or_else(PoisonError::into_inner);
    let nodes = NODES.lock().unwrap_or_else(PoisonError::into_inner);
    hold(Some((entries, nodes, completions::lock())));
}

/// Releases the locks in the parent after a fork.
pub(crate) extern "C" fn fork_ends() {
    hold(None);
}

/// Releases the locks in the child after a fork.
pub(crate) extern "C" fn fork_ends_in_child() {
    hold(None);
    own();
}

fn hold(locks: Option<Locks>) {
    // A thread that is ending has already released its locks.
    let _ = HELD.try_with(|held| held.replace(locks));
}

fn is_owner() -> bool {
    OWNER.load(Ordering::Relaxed) == std::process::id()
}

/// Registers a duplicate of an RDS socket.
pub(crate) fn duplicated(fd: i32, entry: Arc<Entry>) {
    if is_owner() {
        insert(fd, entry);
    }
}

/// Registers a descriptor as an RDS socket.
fn insert(fd: i32, entry: Arc<Entry>) {
    ENTRIES.write().unwrap_or_else(PoisonError::into_inner).insert(fd, entry);
    if let Some(mark) = mark(fd) {
        mark.store(true, Ordering::Release);
    }
}

/// Removes a closed descriptor.
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

/// Adds a new socket, and names it so that processes that inherit it recognize it.
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

/// Returns the shared node with the same board, adding it if it is new.
pub(crate) fn share(access: Access) -> io::Result<Arc<Access>> {
    let inode = access.board().inode()?;
    let mut nodes = NODES.lock().unwrap_or_else(PoisonError::into_inner);
    // Drops nodes whose sockets are all closed, such as those that have stopped.
    nodes.retain(|_, node| Arc::strong_count(node) > 1);
    Ok(Arc::clone(nodes.entry(inode).or_insert_with(|| Arc::new(access))))
}

/// Returns the paths at which nodes listen.
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
        // Sockets that are not ours or no longer usable are skipped: no caller could be notified.
        let _ = adopt(fd);
    }
}

/// Registers a descriptor that another process has passed, if it is an RDS socket.
pub(crate) fn adopt_passed(fd: i32) {
    // The number may have belonged to an RDS socket that was closed without this library noticing.
    forget(fd);
    if is_owner() {
        // Skipped on failure, as for inherited sockets.
        let _ = adopt(fd);
    }
}

fn adopt(fd: i32) -> Option<()> {
    let own = unix(rustix::net::getsockname(borrow(fd)).ok())?;
    own.abstract_name().filter(|name| name.starts_with(NAME))?;
    insert(fd, Arc::new(Entry::new(fstat(borrow(fd)).ok()?.st_ino)));
    Some(())
}

/// Returns the path of the node that a descriptor is connected to.
pub(crate) fn node_of(fd: i32) -> Option<PathBuf> {
    let peer = unix(rustix::net::getpeername(borrow(fd)).ok().flatten())?;
    Some(Path::new(std::str::from_utf8(peer.path_bytes()?).ok()?).to_owned())
}

/// Finds a socket that another process has bound.
fn join(fd: i32) -> Option<Binding> {
    let way = AtPath(node_of(fd)?);
    // Fails if the socket is being bound right now.
    let (control, bound) = Control::open(borrow(fd)).ok()?;
    let access = share(Access::with_board(Box::new(way), bound.board).ok()?).ok()?;
    access.set_control(control);
    Binding::new(access, bound.place, borrow(fd)).ok()
}

fn unix(address: Option<SocketAddrAny>) -> Option<SocketAddrUnix> {
    SocketAddrUnix::try_from(address?).ok()
}
