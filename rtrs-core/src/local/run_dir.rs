//! Places in the file system: the run directory and unix socket paths.
//!
//! Owns [`RunDir`], which knows where control sockets live and what each is called, and the checks
//! of a socket path: its length, and whether somebody listens on it. What is wrong with a place is
//! a [`PlaceError`], which each daemon turns into an error of its command.

use std::env;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};

use super::own_files::OwnFiles;
use crate::rt::effective_user;
use crate::settings::{CommandError, ErrorClass};

/// Longest path of a unix socket in bytes: `sun_path` has 108 with the NUL (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Longest encoded session name that is used whole in a file name, in bytes.
const STEM_BYTES_MAX: usize = 48;
/// How servers' control sockets end.
const SERVER_ENDING: &str = ".srv";
/// How sessions' control sockets end.
const SESSION_ENDING: &str = ".ctl";

/// What kind of thing is wrong with a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceProblem {
    /// It cannot be a place at all.
    Usage,
    /// It is in use, or not ours.
    InUse,
    /// The system refuses.
    System,
}

/// Why a place in the file system cannot be used.
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

    /// What kind of thing is wrong.
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

/// The directory control sockets live in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// The default directory of root.
    pub const OF_ROOT: &str = "/run/rtrs";
    /// The default directory of a server that root has started and that goes on as another user:
    /// [`OF_ROOT`](Self::OF_ROOT) belongs to root, whose sessions use it.
    pub const OF_SERVER: &str = "/run/rtrs-server";

    /// The directory said, made absolute, or the default: `/run/rtrs` for root, else
    /// `$XDG_RUNTIME_DIR/rtrs`, else `/tmp/rtrs-UID`.
    ///
    /// # Errors
    /// [`PlaceProblem::Usage`] if the directory said is empty.
    pub fn new(said: Option<PathBuf>) -> Result<Self, PlaceError> {
        match said {
            // Without a slash at the end, behind which a symbolic link would be followed.
            Some(path) => std::path::absolute(&path)
                .map(|path| Self(path.components().collect()))
                .map_err(|e| {
                    PlaceError::with_source(
                        PlaceProblem::Usage,
                        format!("run-dir {path:?} is not a path"),
                        e,
                    )
                }),
            None => Ok(Self(default_run_dir(effective_user(), env::var_os("XDG_RUNTIME_DIR")))),
        }
    }

    /// The directory, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The control socket of the session `name`, `NAME.ctl`. Letters, digits, `-`, `_` and inner
    /// dots stand for themselves, other bytes as `%XX`; a long name is cut and ends with a hash of
    /// the whole.
    #[must_use]
    pub fn control_socket(&self, name: &str) -> PathBuf {
        self.0.join(stem(name) + SESSION_ENDING)
    }

    /// The control socket of the server `name`, `NAME.srv`, written likewise.
    #[must_use]
    pub fn server_socket(&self, name: &str) -> PathBuf {
        self.0.join(stem(name) + SERVER_ENDING)
    }

    /// All that is called as servers' control sockets are, sorted; somebody may listen there or
    /// not. None when there is no run directory.
    ///
    /// # Errors
    /// [`PlaceProblem::System`] for a directory that cannot be read.
    pub fn server_sockets(&self) -> Result<Vec<PathBuf>, PlaceError> {
        self.ending_with(SERVER_ENDING)
    }

    /// The same of sessions, each with the session's name. A long name is cut.
    ///
    /// # Errors
    /// [`PlaceProblem::System`] for a directory that cannot be read.
    pub fn session_sockets(&self) -> Result<Vec<(String, PathBuf)>, PlaceError> {
        let paths = self.ending_with(SESSION_ENDING)?;
        Ok(paths.into_iter().map(|path| (name_of(&path), path)).collect())
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

    /// The default directories of all users that there are, each with its user: for root.
    /// Directories that are not that user's alone are left out.
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

    /// Creates the directory, for this user only, unless it is there, and checks it.
    ///
    /// # Errors
    /// [`PlaceProblem::System`] if it cannot be created, and those of [`check`](Self::check).
    pub fn make(&self) -> Result<(), PlaceError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        // What is there instead of a directory is named by the check.
        if let Err(error) = made
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            let text = format!("cannot make {}", self.0.display());
            return Err(PlaceError::with_source(PlaceProblem::System, text, error));
        }
        self.check()
    }

    /// If the directory exists, it is one and no symbolic link, belongs to this user, and no other
    /// user can write to it: others could put a socket or a link of theirs in place of ours. It
    /// need not exist.
    ///
    /// # Errors
    /// [`PlaceProblem::InUse`], naming the directory.
    pub fn check(&self) -> Result<(), PlaceError> {
        self.opened().map(drop)
    }

    /// As [`check`](Self::check), for somebody who only connects to a socket there: for root it may
    /// belong to any user.
    ///
    /// # Errors
    /// [`PlaceProblem::InUse`], naming the directory.
    pub fn check_to_connect(&self) -> Result<(), PlaceError> {
        let own = effective_user();
        let owner = fs::symlink_metadata(&self.0).map(|meta| meta.uid());
        let allowed = if own == 0 { owner.unwrap_or(own) } else { own };
        self.opened_of(allowed).map(drop)
    }

    /// The small files of this directory, which has to be there and pass [`check`](Self::check).
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

    /// The directory, opened and checked, if there is one.
    fn opened(&self) -> Result<Option<fs::File>, PlaceError> {
        self.opened_of(effective_user())
    }

    /// The same for a directory of this user.
    fn opened_of(&self, uid: u32) -> Result<Option<fs::File>, PlaceError> {
        let shown = self.0.display();
        let refuse = |text: String| Err(PlaceError::new(PlaceProblem::InUse, text));
        // The properties are those of what was opened, whatever has the name by now.
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
            return refuse(format!(
                "run directory {shown} belongs to user {}, but this is user {uid}; name another \
                 with --run-dir",
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

/// Opens the log of a session to append to it; it need not exist. A symbolic link is refused.
///
/// # Errors
/// The system's error; `FilesystemLoop` (ELOOP) for a symbolic link.
pub fn open_log(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::File::options();
    options.create(true).append(true).custom_flags(libc::O_NOFOLLOW).open(path)
}

/// A name as the stem of a file name.
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
        // 17 bytes of '~' and hash; '~' is never in a name that is used whole.
        stem.truncate(STEM_BYTES_MAX - 17);
        stem.push_str(&format!("~{:016x}", fnv1a(name.as_bytes())));
    }
    stem
}

/// The name whose [`stem`] a path has, as far as that tells.
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

/// FNV-1a, 64 bits: names files apart, protects nothing.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Refuses socket paths the system cannot bind.
///
/// # Errors
/// [`PlaceProblem::Usage`], naming the path as `what`.
pub fn check_socket_path(what: &str, path: &Path) -> Result<(), PlaceError> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.contains(&0) {
        return Err(PlaceError::new(
            PlaceProblem::Usage,
            format!("{what} {path:?} holds a NUL; write the path without it"),
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

/// What is at a socket path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketState {
    /// Nothing.
    Free,
    /// A socket nobody listens on: left over, may be removed.
    Stale,
    /// A socket somebody listens on.
    InUse,
}

/// Finds out what is at a socket path, without waiting.
///
/// # Errors
/// [`PlaceProblem::InUse`] if something else is there, or its directory is not.
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
        // A full backlog (EAGAIN) has a listener too.
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

    /// A directory of this test's own, removed at its end.
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
    fn run_directories() {
        let dir = |uid, xdg: Option<&str>| default_run_dir(uid, xdg.map(Into::into));
        assert_eq!(dir(0, Some("/run/user/0")), Path::new("/run/rtrs"));
        assert_eq!(dir(7, Some("/run/user/7")), Path::new("/run/user/7/rtrs"));
        assert_eq!(dir(7, Some("relative")), Path::new("/tmp/rtrs-7"));
        assert_eq!(dir(7, None), Path::new("/tmp/rtrs-7"));
        let error = RunDir::new(Some(PathBuf::new())).unwrap_err();
        assert_eq!(error.to_string(), "run-dir \"\" is not a path");
    }

    #[test]
    fn the_run_directory_must_be_ours() {
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
        // A directory of somebody else's: root's own for a user, a given away one for root.
        let is_root = effective_user() == 0;
        let other = if is_root { scratch.0.clone() } else { "/".into() };
        if is_root {
            std::os::unix::fs::chown(&other, Some(12345), None).unwrap();
        }
        assert_eq!(RunDir(other.clone()).check_to_connect().is_ok(), is_root);
        let error = RunDir(other).check().unwrap_err().to_string();
        assert!(
            error.contains(" belongs to user ") && error.ends_with("name another with --run-dir"),
            "{error}"
        );
    }

    #[test]
    fn a_run_directory_that_others_control_is_refused() {
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
        for said in [link.clone(), link.join("."), link.join("")] {
            let error = RunDir::new(Some(said)).unwrap().make().unwrap_err().to_string();
            assert!(error.contains("link is a symbolic link; name the directory"), "{error}");
        }
        symlink(scratch.0.join("nowhere"), scratch.0.join("broken")).unwrap();
        let error = RunDir(scratch.0.join("broken")).make().unwrap_err().to_string();
        assert!(error.contains("broken is a symbolic link"), "{error}");
    }

    #[test]
    fn a_log_is_no_link() {
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
    fn servers_are_told_from_sessions() {
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
    fn run_directories_of_all_users() {
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
    fn socket_paths_have_a_length() {
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
    fn socket_states() {
        let scratch = Scratch::new("sockets");
        let path = scratch.0.join("s");
        assert_eq!(socket_state(&path).unwrap(), SocketState::Free);
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(socket_state(&path).unwrap(), SocketState::InUse);
        drop(listener);
        assert_eq!(socket_state(&path).unwrap(), SocketState::Stale);
        // Looking removed nothing.
        assert!(path.exists());
        let file = scratch.0.join("file");
        fs::write(&file, "").unwrap();
        let error = socket_state(&file).unwrap_err();
        assert_eq!(error.problem(), PlaceProblem::InUse);
        assert!(error.to_string().ends_with("exists and is not a socket; use another path"));
    }

    #[test]
    fn a_full_backlog_is_in_use_and_waits_for_nobody() {
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
