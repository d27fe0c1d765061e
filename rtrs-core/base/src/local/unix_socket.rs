//! Unix sockets with a path: bound safely even if several processes want the same path, and removed
//! when dropped.
//!
//! A path without a listener was left behind by a killed process and is replaced. All users of this
//! module hold a lock on the directory while they check and replace, so one of two processes that
//! start at the same time is refused, and neither listens on a socket that the other has removed.
//! No call waits longer than [`LOCK_PATIENCE`].
//!
//! Used by the NBD listener and by `control.rs`.

use std::fs::{File, Permissions, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::rt::peer_pid;
use crate::time::Duration;

/// Maximum time to wait for the lock on a directory. After that, the socket is bound without it,
/// since any user can lock a directory such as /tmp.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Path of a bound socket. Removes the socket when dropped, if the path still refers to it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode numbers.
    identity: (u64, u64),
}

impl SocketFile {
    /// Whether there is nothing at the path.
    pub(super) fn is_missing(&self) -> bool {
        identity(&self.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Do not wait, because the thread that drops this may be handling IO.
        let _turn = lock(&self.path, Duration::ZERO);
        let result = match identity(&self.path) {
            Ok(found) if found == self.identity => std::fs::remove_file(&self.path),
            Ok(_) => return,
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            tracing::debug!("{} not removed: {error}", self.path.display());
        }
    }
}

/// Binds and listens at `path`. Replaces a socket that no longer has a listener.
///
/// # Errors
/// The system's error; `AddrInUse` if another process listens on the path, `AlreadyExists` if the
/// path is not a socket.
pub fn bind_unix(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let _turn = lock(path, LOCK_PATIENCE);
    remove_stale(path, Type::STREAM)?;
    let listener = UnixListener::bind(path)?;
    let file = SocketFile { path: path.to_owned(), identity: identity(path)? };
    Ok((listener, file))
}

/// Like [`bind_unix`] for a socket that preserves message boundaries (SOCK_SEQPACKET), with these
/// permissions and this backlog. Clients cannot connect before the permissions are set.
///
/// # Errors
/// Those of [`bind_unix`].
pub fn bind_seqpacket(path: &Path, mode: u32, backlog: i32) -> io::Result<(OwnedFd, SocketFile)> {
    let _turn = lock(path, LOCK_PATIENCE);
    remove_stale(path, Type::SEQPACKET)?;
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile { path: path.to_owned(), identity: identity(path)? };
    std::fs::set_permissions(path, Permissions::from_mode(mode))?;
    socket.listen(backlog)?;
    Ok((socket.into(), file))
}

/// Removes the socket of a process that has ended. Returns false if there is no socket.
///
/// # Errors
/// Those of [`bind_unix`].
pub fn remove_left_behind(path: &Path) -> io::Result<bool> {
    let _turn = lock(path, LOCK_PATIENCE);
    let was_there = std::fs::symlink_metadata(path).is_ok();
    remove_stale(path, Type::STREAM).map(|()| was_there)
}

/// Returns the process that listens on a socket, if there is one, it has room for a connection, and
/// it is in this PID namespace.
#[must_use]
pub fn listening_pid(path: &Path) -> Option<u32> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).ok()?;
    socket.set_nonblocking(true).ok()?;
    socket.connect(&SockAddr::unix(path).ok()?).ok()?;
    peer_pid(&socket).ok().filter(|pid| *pid != 0)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

/// Locks the directory of `path`, if it can be read and is not locked by others for too long.
fn lock(path: &Path, patience: Duration) -> Option<File> {
    let parent =
        path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let dir = File::open(parent).ok()?;
    let deadline = std::time::Instant::now() + patience;
    loop {
        match dir.try_lock() {
            Ok(()) => return Some(dir),
            Err(TryLockError::WouldBlock) if std::time::Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(_) => return None,
        }
    }
}

fn remove_stale(path: &Path, kind: Type) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => {}
        Ok(_) => {
            let what = "exists and is not a socket";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    }
    let socket = Socket::new(Domain::UNIX, kind, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&SockAddr::unix(path)?) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        // A process listens for connections of another type.
        Err(e) if e.raw_os_error() == Some(libc::EPROTOTYPE) => Err(in_use()),
        // A full backlog also means that there is a listener.
        Ok(()) => Err(in_use()),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(in_use()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

fn in_use() -> io::Error {
    io::Error::new(io::ErrorKind::AddrInUse, "another process listens on it")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Temporary directory for a test, removed when the test ends.
    pub(in super::super) struct Scratch(pub(in super::super) PathBuf);

    impl Scratch {
        pub(in super::super) fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("rtrs-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_stale_sockets_are_replaced() {
        let scratch = Scratch::new("unix-socket");
        let path = scratch.0.join("s");
        drop(UnixListener::bind(&path).unwrap());
        let (_listener, file) = bind_unix(&path).unwrap();
        assert_eq!(listening_pid(&path), Some(std::process::id()));
        assert_eq!(remove_left_behind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(bind_unix(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(file);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        assert_eq!(listening_pid(&path), None);
        assert!(remove_left_behind(&path).unwrap() && !path.exists());
        assert!(!remove_left_behind(&path).unwrap());
        std::fs::write(&path, "").unwrap();
        assert_eq!(bind_unix(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(path.exists());
    }

    #[test]
    fn stale_packet_sockets_are_replaced_too() {
        let scratch = Scratch::new("unix-seqpacket");
        let path = scratch.0.join("s");
        drop(UnixListener::bind(&path).unwrap());
        let (fd, file) = bind_seqpacket(&path, 0o640, 4).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let again = bind_seqpacket(&path, 0o640, 4);
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(bind_unix(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop((fd, file));
        assert!(!path.exists());
        let (_fd, file) = bind_seqpacket(&path, 0o600, 4).unwrap();
        std::mem::forget(file);
        drop(_fd);
        bind_unix(&path).unwrap();
    }

    #[test]
    fn a_foreign_socket_is_not_removed() {
        let scratch = Scratch::new("unix-socket-other");
        let path = scratch.0.join("s");
        let (_first, old) = bind_unix(&path).unwrap();
        // Kept under a different name, so that its inode is not reused.
        std::fs::rename(&path, scratch.0.join("moved")).unwrap();
        let (_second, _new) = bind_unix(&path).unwrap();
        drop(old);
        assert!(path.exists());
    }

    #[test]
    fn one_of_many_concurrent_binds_succeeds() {
        let scratch = Scratch::new("unix-socket-race");
        for round in 0..50 {
            let path = scratch.0.join(format!("s{round}"));
            drop(UnixListener::bind(&path).unwrap());
            let barrier = std::sync::Barrier::new(4);
            let bind = || {
                barrier.wait();
                bind_unix(&path).ok()
            };
            let bound: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(bind)).collect();
                threads.into_iter().filter_map(|t| t.join().unwrap()).collect()
            });
            assert_eq!(bound.len(), 1, "round {round}");
            std::os::unix::net::UnixStream::connect(&path).unwrap();
        }
    }
}
