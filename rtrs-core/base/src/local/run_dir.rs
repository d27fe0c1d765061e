//! Paths in the file system: the run directory and Unix socket paths.
//!
//! [`RunDir`] determines the location and names of control sockets. Socket paths are checked for
//! their length and for a process that listens on them. Problems are reported as a [`PlaceError`],
//! which each daemon converts to its command's error.

use std::env;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};

use super::own_files::OwnFiles;
use crate::paths::absolute;
use crate::rt::effective_user;
use crate::settings::{CommandError, ErrorClass};

/// Maximum length of a Unix socket path in bytes: `sun_path` has 108 including the NUL (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Maximum length in bytes of an encoded session name that is used in full in a file name.
const STEM_BYTES_MAX: usize = 48;
/// Suffix of servers' control sockets.
const SERVER_ENDING: &str = ".srv";
/// Suffix of sessions' control sockets.
const SESSION_ENDING: &str = ".ctl";

/// Kind of problem with a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceProblem {
    /// The path is invalid.
    Usage,
    /// The path is in use, or belongs to another user.
    InUse,
    /// The system reported an error.
    System,
}

/// Reason why a path in the file system cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct PlaceError {
    problem: PlaceProblem,
    text: String,
    source: Option<io::Error>,
}

impl PlaceError {
    fn new(problem: PlaceProblem, text: impl Into<String>) -> Self {
        Self { problem, text: text.into(), source: None }
    }

    fn with_source(problem: PlaceProblem, text: impl Into<String>, source: io::Error) -> Self {
        Self { problem, text: text.into(), source: Some(source) }
    }

    /// Returns the kind of problem.
    #[must_use]
    pub const fn problem(&self) -> PlaceProblem {
        self.problem
    }
}

impl<K: ErrorClass> From<PlaceError> for CommandError<K> {
    fn from(error: PlaceError) -> Self {
        let PlaceError { problem, text, source } = error;
        let kind = match problem {
            PlaceProblem::Usage => K::USAGE,
            PlaceProblem::InUse => K::IN_USE,
            PlaceProblem::System => K::SYSTEM,
        };
        match source {
            Some(source) => Self::with_source(kind, text, source),
            None => Self::new(kind, text),
        }
    }
}

/// Directory for control sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Default directory for root.
    pub const OF_ROOT: &str = "/run/rtrs";
    /// Default directory for a server that is started by root but runs as another user:
    /// [`OF_ROOT`](Self::OF_ROOT) belongs to root, for root's own sessions.
    pub const OF_SERVER: &str = "/run/rtrs-server";

    /// Returns the given directory, made absolute, or the default: `/run/rtrs` for root, otherwise
    /// `$XDG_RUNTIME_DIR/rtrs`, otherwise `/tmp/rtrs-UID`.
    ///
    /// # Errors
    /// Those of [`absolute_path`].
    pub fn new(given: Option<PathBuf>) -> Result<Self, PlaceError> {
        match given {
            // Remove a trailing slash, because a symbolic link before it would be followed.
            Some(path) => {
                absolute_path("run-dir", &path).map(|path| Self(path.components().collect()))
            }
            None => Ok(Self(default_run_dir(effective_user(), env::var_os("XDG_RUNTIME_DIR")))),
        }
    }

    /// Returns the absolute path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the control socket of the session `name`, `NAME.ctl`. Letters, digits, `-`, `_` and
    /// inner dots are kept, other bytes are encoded as `%XX`; a long name is truncated and ends
    /// with a hash of the whole.
    #[must_use]
    pub fn control_socket(&self, name: &str) -> PathBuf {
        self.0.join(stem(name) + SESSION_ENDING)
    }

    /// Returns the control socket of the server `name`, `NAME.srv`, encoded in the same way.
    #[must_use]
    pub fn server_socket(&self, name: &str) -> PathBuf {
        self.0.join(stem(name) + SERVER_ENDING)
    }

    /// Returns all paths named like servers' control sockets, sorted, whether or not a process
    /// listens on them. None if there is no run directory.
    ///
    /// # Errors
    /// [`PlaceProblem::System`] for a directory that cannot be read.
    pub fn server_sockets(&self) -> Result<Vec<PathBuf>, PlaceError> {
        self.ending_with(SERVER_ENDING)
    }

    /// Returns all paths named like sessions' control sockets, each with the session's name. Long
    /// names are truncated.
    ///
    /// # Errors
    /// [`PlaceProblem::System`] for a directory that cannot be read.
    pub fn session_sockets(&self) -> Result<Vec<(String, PathBuf)>, PlaceError> {
        let paths = self.ending_with(SESSION_ENDING)?;
        Ok(paths.into_iter().map(|path| (name_of(&path), path)).collect())
    }

    /// Returns the sessions that have a file with this extension next to their control socket: each
    /// name, and the path of the socket, which may not exist. Long names are truncated.
    ///
    /// # Errors
    /// [`PlaceProblem::System`] for a directory that cannot be read.
    pub fn sessions_with(&self, extension: &str) -> Result<Vec<(String, PathBuf)>, PlaceError> {
        let paths = self.ending_with(&format!(".{extension}"))?;
        let socket = |path: PathBuf| path.with_extension(&SESSION_ENDING[1..]);
        Ok(paths.into_iter().map(|path| (name_of(&path), socket(path))).collect())
    }

    fn ending_with(&self, ending: &str) -> Result<Vec<PathBuf>, PlaceError> {
        let failed = |error| {
            let text = format!("cannot read the run directory {}", self.0.display());
            PlaceError::with_source(PlaceProblem::System, text, error)
        };
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            if path.as_os_str().as_bytes().ends_with(ending.as_bytes()) {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths)
    }

    /// Returns each user's default directory, with the user's ID, for use by root. Directories that
    /// do not belong to that user alone are omitted.
    #[must_use]
    pub fn of_all_users() -> Vec<(u32, Self)> {
        Self::below(Path::new("/"))
    }

    fn below(root: &Path) -> Vec<(u32, Self)> {
        let named = |dir: &str| {
            let entries = fs::read_dir(root.join(dir)).into_iter().flatten().flatten();
            entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
        };
        let runtime = named("run/user")
            .filter_map(|(user, path)| Some((user.parse().ok()?, path.join("rtrs"))));
        let temporary = named("tmp")
            .filter_map(|(name, path)| Some((name.strip_prefix("rtrs-")?.parse().ok()?, path)));
        let all = [(0, root.join("run/rtrs"))].into_iter().chain(runtime).chain(temporary);
        let mut dirs: Vec<(u32, Self)> = all
            .map(|(user, path)| (user, Self(path)))
            .filter(|(user, dir)| dir.opened_of(*user).is_ok_and(|dir| dir.is_some()))
            .collect();
        dirs.sort_by(|a, b| (a.0, &a.1.0).cmp(&(b.0, &b.1.0)));
        dirs
    }

    /// Creates the directory, accessible only to this user, if it does not exist, and checks it.
    ///
    /// # Errors
    /// [`PlaceProblem::System`] if it cannot be created, and those of [`check`](Self::check).
    pub fn make(&self) -> Result<(), PlaceError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        // The check reports any other file at the path.
        if let Err(error) = made
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            let text = format!("cannot create {}", self.0.display());
            return Err(PlaceError::with_source(PlaceProblem::System, text, error));
        }
        self.check()
    }

    /// Checks that the directory, if it exists, is a directory and not a symbolic link, belongs to
    /// this user, and is not writable by other users, who could otherwise put their own sockets or
    /// links in it.
    ///
    /// # Errors
    /// [`PlaceProblem::InUse`], naming the directory.
    pub fn check(&self) -> Result<(), PlaceError> {
        self.opened().map(drop)
    }

    /// Like [`check`](Self::check), for callers that only connect to a socket in the directory: for
    /// root, it may belong to any user.
    ///
    /// # Errors
    /// [`PlaceProblem::InUse`], naming the directory.
    pub fn check_to_connect(&self) -> Result<(), PlaceError> {
        let own = effective_user();
        let owner = fs::symlink_metadata(&self.0).map(|meta| meta.uid());
        let allowed = if own == 0 { owner.unwrap_or(own) } else { own };
        self.opened_of(allowed).map(drop)
    }

    /// Returns the small files in this directory, which must exist and pass [`check`](Self::check).
    ///
    /// # Errors
    /// Those of [`check`](Self::check), and [`PlaceProblem::System`] if it does not exist.
    pub fn files(&self) -> Result<OwnFiles, PlaceError> {
        let missing = || {
            let text = format!("there is no run directory {}", self.0.display());
            PlaceError::new(PlaceProblem::System, text)
        };
        self.opened()?.map(OwnFiles::new).ok_or_else(missing)
    }

    /// Opens and checks the directory, if it exists.
    fn opened(&self) -> Result<Option<fs::File>, PlaceError> {
        self.opened_of(effective_user())
    }

    /// Like [`opened`](Self::opened), for a directory that must belong to the user `uid`.
    fn opened_of(&self, uid: u32) -> Result<Option<fs::File>, PlaceError> {
        let shown = self.0.display();
        let refuse = |text: String| Err(PlaceError::new(PlaceProblem::InUse, text));
        // The properties are those of the opened directory, even if its path is replaced later.
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let opened = fs::File::options().read(true).custom_flags(flags).open(&self.0);
        let (dir, meta) = match opened.and_then(|dir| dir.metadata().map(|meta| (dir, meta))) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return match fs::symlink_metadata(&self.0) {
                    Ok(meta) if meta.is_symlink() => refuse(format!(
                        "run directory {shown} is a symbolic link; name the directory itself, or \
                         use another --run-dir"
                    )),
                    Ok(meta) if !meta.is_dir() => refuse(format!(
                        "run directory {shown} is not a directory; name another with --run-dir"
                    )),
                    _ => {
                        let text = format!("cannot use the run directory {shown}");
                        Err(PlaceError::with_source(PlaceProblem::InUse, text, error))
                    }
                };
            }
        };
        if meta.uid() != uid {
            let as_root = if meta.uid() == 0 { "run this as root, or " } else { "" };
            return refuse(format!(
                "run directory {shown} belongs to user {}, but this is user {uid}; {as_root}name \
                 another with --run-dir",
                meta.uid()
            ));
        }
        if meta.mode() & 0o022 != 0 {
            return refuse(format!(
                "run directory {shown} can be written by other users (mode {:o}); use `chmod \
                 go-w`, or --run-dir",
                meta.mode() & 0o7777
            ));
        }
        Ok(Some(dir))
    }
}

/// Opens a session's log for appending, creating it if necessary. Symbolic links are refused.
///
/// # Errors
/// The system's error; `FilesystemLoop` (ELOOP) for a symbolic link.
pub fn open_log(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::File::options();
    options.create(true).append(true).custom_flags(libc::O_NOFOLLOW).open(path)
}

/// Encodes a name as the stem of a file name.
fn stem(name: &str) -> String {
    let mut stem = String::new();
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => stem.push(byte.into()),
            b'.' if at > 0 => stem.push('.'),
            _ => stem.push_str(&format!("%{byte:02X}")),
        }
    }
    if stem.len() > STEM_BYTES_MAX {
        // '~' and the hash are 17 bytes; '~' never occurs in a name that is used in full.
        stem.truncate(STEM_BYTES_MAX - 17);
        stem.push_str(&format!("~{:016x}", fnv1a(name.as_bytes())));
    }
    stem
}

/// Returns the name that [`stem`] encoded in a path; a truncated name stays truncated.
fn name_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().as_bytes();
    let hex = |at: usize| {
        let digits = std::str::from_utf8(stem.get(at + 1..at + 3)?).ok()?;
        u8::from_str_radix(digits, 16).ok()
    };
    let (mut name, mut at) = (Vec::new(), 0);
    while let Some(&byte) = stem.get(at) {
        match hex(at).filter(|_| byte == b'%') {
            Some(value) => (name.push(value), at += 3),
            None => (name.push(byte), at += 1),
        };
    }
    String::from_utf8_lossy(&name).into_owned()
}

fn default_run_dir(uid: u32, xdg: Option<std::ffi::OsString>) -> PathBuf {
    match xdg.map(PathBuf::from) {
        _ if uid == 0 => PathBuf::from(RunDir::OF_ROOT),
        Some(dir) if dir.is_absolute() => dir.join("rtrs"),
        _ => PathBuf::from(format!("/tmp/rtrs-{uid}")),
    }
}

/// Computes the 64-bit FNV-1a hash, which distinguishes file names and is not for security.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Makes a path absolute.
///
/// # Errors
/// [`PlaceProblem::Usage`], naming the path as `what`.
pub fn absolute_path(what: &str, path: &Path) -> Result<PathBuf, PlaceError> {
    absolute(path).map_err(|error| {
        let text = match error.kind() {
            io::ErrorKind::InvalidInput => format!("{what} {path:?} is not a path"),
            _ => format!("cannot use {what}"),
        };
        PlaceError::with_source(PlaceProblem::Usage, text, error)
    })
}

/// Refuses socket paths that the system cannot bind to.
///
/// # Errors
/// [`PlaceProblem::Usage`], naming the path as `what`.
pub fn check_socket_path(what: &str, path: &Path) -> Result<(), PlaceError> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.contains(&0) {
        return Err(PlaceError::new(
            PlaceProblem::Usage,
            format!("{what} {path:?} contains a NUL; write the path without it"),
        ));
    }
    if bytes.len() > SOCKET_PATH_BYTES_MAX {
        return Err(PlaceError::new(
            PlaceProblem::Usage,
            format!(
                "{what} {} is {} bytes long; unix sockets allow {SOCKET_PATH_BYTES_MAX}, use a \
             shorter path",
                path.display(),
                bytes.len()
            ),
        ));
    }
    Ok(())
}

/// State of a socket path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketState {
    /// Nothing exists at the path.
    Free,
    /// No process listens on the socket: it is stale and may be removed.
    Stale,
    /// A process listens on the socket.
    InUse,
}

/// Determines the state of a socket path without waiting.
///
/// # Errors
/// [`PlaceProblem::InUse`] if another kind of file exists there, or if its directory does not
/// exist.
pub fn socket_state(path: &Path) -> Result<SocketState, PlaceError> {
    let shown = path.display();
    let failed = |source| {
        PlaceError::with_source(
            PlaceProblem::InUse,
            format!("cannot use the socket path {shown}"),
            source,
        )
    };
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => {}
        Ok(_) => {
            let text = format!("{shown} exists and is not a socket; use another path");
            return Err(PlaceError::new(PlaceProblem::InUse, text));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(SocketState::Free),
        Err(error) => return Err(failed(error)),
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    match socket.connect(&SockAddr::unix(path).map_err(failed)?) {
        // A full backlog (EAGAIN) also means that a process is listening.
        Ok(()) => Ok(SocketState::InUse),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(SocketState::InUse),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(SocketState::Stale),
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// Temporary directory for a test, removed when the test ends.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = env::temp_dir().join(format!("rtrs-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn run_directories_default_by_user() {
        let dir = |uid, xdg: Option<&str>| default_run_dir(uid, xdg.map(Into::into));
        assert_eq!(dir(0, Some("/run/user/0")), Path::new("/run/rtrs"));
        assert_eq!(dir(7, Some("/run/user/7")), Path::new("/run/user/7/rtrs"));
        assert_eq!(dir(7, Some("relative")), Path::new("/tmp/rtrs-7"));
        assert_eq!(dir(7, None), Path::new("/tmp/rtrs-7"));
        let error = RunDir::new(Some(PathBuf::new())).unwrap_err();
        assert_eq!(error.to_string(), "run-dir \"\" is not a path");
    }

    #[test]
    fn a_foreign_run_directory_is_refused() {
        let scratch = Scratch::new("run-dir");
        RunDir(scratch.0.clone()).check().unwrap();
        RunDir(scratch.0.join("not-yet")).check().unwrap();
        let file = scratch.0.join("file");
        fs::write(&file, "").unwrap();
        let error = RunDir(file.clone()).check().unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "run directory {} is not a directory; name another with --run-dir",
                file.display()
            )
        );
        let error = RunDir(file.join("below")).check().unwrap_err();
        assert!(format!("{:?}", error.source).contains("NotADirectory"), "{error:?}");
        // Use another user's directory: root's, or if the test runs as root, one whose owner was
        // changed.
        let is_root = effective_user() == 0;
        let other = if is_root { scratch.0.clone() } else { "/".into() };
        if is_root {
            std::os::unix::fs::chown(&other, Some(12345), None).unwrap();
        }
        assert_eq!(RunDir(other.clone()).check_to_connect().is_ok(), is_root);
        let error = RunDir(other).check().unwrap_err().to_string();
        assert_eq!(error.contains("run this as root, or "), !is_root, "{error}");
        assert!(
            error.contains(" belongs to user ") && error.ends_with("name another with --run-dir"),
            "{error}"
        );
    }

    #[test]
    fn a_run_directory_writable_by_others_is_refused() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let scratch = Scratch::new("run-dir-others");
        let dir = scratch.0.join("dir");
        RunDir(dir.clone()).make().unwrap();
        for mode in [0o770, 0o702, 0o1777] {
            fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
            for error in [RunDir(dir.clone()).check(), RunDir(dir.clone()).make()] {
                let error = error.unwrap_err();
                assert_eq!(error.problem(), PlaceProblem::InUse);
                let text = error.to_string();
                assert!(text.contains(&format!("by other users (mode {mode:o})")), "{text}");
            }
        }
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        RunDir(dir.clone()).make().unwrap();
        let link = scratch.0.join("link");
        symlink(&dir, &link).unwrap();
        for given in [link.clone(), link.join("."), link.join("")] {
            let error = RunDir::new(Some(given)).unwrap().make().unwrap_err().to_string();
            assert!(error.contains("link is a symbolic link; name the directory"), "{error}");
        }
        symlink(scratch.0.join("nowhere"), scratch.0.join("broken")).unwrap();
        let error = RunDir(scratch.0.join("broken")).make().unwrap_err().to_string();
        assert!(error.contains("broken is a symbolic link"), "{error}");
    }

    #[test]
    fn a_log_must_not_be_a_symbolic_link() {
        let scratch = Scratch::new("log");
        let (log, other) = (scratch.0.join("v.log"), scratch.0.join("other"));
        open_log(&log).unwrap();
        open_log(&log).unwrap();
        fs::remove_file(&log).unwrap();
        std::os::unix::fs::symlink(&other, &log).unwrap();
        assert_eq!(open_log(&log).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert!(!other.exists());
    }

    #[test]
    fn control_sockets_have_plain_distinct_names() {
        let dir = RunDir("/r".into());
        for (name, file) in [
            ("vol0", "/r/vol0.ctl"),
            ("vol0.img", "/r/vol0.img.ctl"),
            ("..", "/r/%2E..ctl"),
            ("/dev/ram0", "/r/%2Fdev%2Fram0.ctl"),
            ("a b~%", "/r/a%20b%7E%25.ctl"),
            ("é", "/r/%C3%A9.ctl"),
        ] {
            assert_eq!(dir.control_socket(name), Path::new(file));
            assert_eq!(name_of(Path::new(file)), name);
            let server = file.replace(".ctl", ".srv");
            assert_eq!(dir.server_socket(name), Path::new(&server));
        }
        let long = dir.control_socket(&"n".repeat(254));
        assert_eq!(long.file_name().unwrap().len(), STEM_BYTES_MAX + ".ctl".len());
        assert_ne!(long, dir.control_socket(&"n".repeat(253)));
        check_socket_path("control socket", &long).unwrap();
    }

    #[test]
    fn servers_and_sessions_are_distinguished() {
        let scratch = Scratch::new("servers");
        let dir = RunDir(scratch.0.join("run"));
        assert_eq!(dir.server_sockets().unwrap(), Vec::<PathBuf>::new());
        dir.make().unwrap();
        dir.make().unwrap();
        let mode = fs::metadata(dir.path()).unwrap().mode();
        assert_eq!(mode & 0o777, 0o700);
        for path in [dir.server_socket("b"), dir.server_socket("a"), dir.control_socket("a")] {
            fs::write(path, "").unwrap();
        }
        let found = dir.server_sockets().unwrap();
        assert_eq!(found, [dir.server_socket("a"), dir.server_socket("b")]);
        assert_eq!(dir.session_sockets().unwrap(), [("a".to_owned(), dir.control_socket("a"))]);
    }

    #[test]
    fn run_directories_of_all_users_are_found() {
        let scratch = Scratch::new("all-users");
        let uid = effective_user();
        assert_eq!(RunDir::below(&scratch.0), []);
        let mine = [format!("run/user/{uid}/rtrs"), format!("tmp/rtrs-{uid}")];
        let others = [format!("tmp/rtrs-{}", uid + 1), "tmp/rtrs-x".into(), "tmp/other".into()];
        for dir in mine.iter().chain(&others) {
            RunDir(scratch.0.join(dir)).make().unwrap();
        }
        let dirs = mine.map(|dir| (uid, RunDir(scratch.0.join(dir))));
        assert_eq!(RunDir::below(&scratch.0), dirs, "none that belongs to another user");
    }

    #[test]
    fn socket_path_length_is_limited() {
        let path = |len: usize| PathBuf::from(format!("/{}", "s".repeat(len - 1)));
        check_socket_path("socket", &path(107)).unwrap();
        let error = check_socket_path("socket", &path(108)).unwrap_err();
        assert_eq!(error.problem(), PlaceProblem::Usage);
        assert!(
            error
                .to_string()
                .ends_with(" is 108 bytes long; unix sockets allow 107, use a shorter path"),
            "{error}"
        );
        assert!(check_socket_path("socket", Path::new("/a\0b")).is_err());
    }

    #[test]
    fn socket_states_are_detected() {
        let scratch = Scratch::new("sockets");
        let path = scratch.0.join("s");
        assert_eq!(socket_state(&path).unwrap(), SocketState::Free);
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(socket_state(&path).unwrap(), SocketState::InUse);
        drop(listener);
        assert_eq!(socket_state(&path).unwrap(), SocketState::Stale);
        // The checks removed nothing.
        assert!(path.exists());
        let file = scratch.0.join("file");
        fs::write(&file, "").unwrap();
        let error = socket_state(&file).unwrap_err();
        assert_eq!(error.problem(), PlaceProblem::InUse);
        assert!(error.to_string().ends_with("exists and is not a socket; use another path"));
    }

    #[test]
    fn a_full_backlog_counts_as_in_use_without_waiting() {
        let scratch = Scratch::new("backlog");
        let path = scratch.0.join("s");
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        listener.listen(0).unwrap();
        for _ in 0..4 {
            assert_eq!(socket_state(&path).unwrap(), SocketState::InUse);
        }
    }
}
