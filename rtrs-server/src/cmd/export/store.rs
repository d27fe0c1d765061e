//! The files of `exports-dir`, to which `--save` writes running exports.
//!
//! The command writes the files, because the server often runs as a user that may not. A file is
//! replaced as a whole, so that a starting server never reads half of it. While it writes, locks
//! exclude other commands and reloads. Whatever can be refused is refused before the server changes
//! anything.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rtrs_core::settings::{config_text, printable};
use serde_yaml::Value;

use super::save::without_defaults;
use crate::cmd::server::Server;
use crate::control_protocol::{Origin, Request, SavedExports};
use crate::error::{Error, ErrorKind, failed};
use crate::save_lock::{acquire_directory, acquire_for_command};
use crate::settings::{AccessRule, ExportSpec, exports_dir};

/// Name of a file that is being written.
const TEMPORARY: &str = ".rtrs-server.new";
/// Mode of a new file: `reload` reads it as the server's user.
const MODE: u32 = 0o644;
/// Maximum length of a file name.
const FILE_NAME_MAX: usize = 255;

/// The file of an export in `exports-dir`.
pub(super) struct Store {
    name: String,
    /// Lock that excludes reloads and other commands to the server.
    _lock: Option<File>,
    /// Directory, kept locked.
    dir: File,
    dir_path: PathBuf,
    /// Number of the server's last reload.
    configuration: u64,
    /// File that defines the export, or the one to be written.
    file: PathBuf,
}

impl Store {
    /// Acquires the locks, and checks that a change to this export can be saved. `has_list` takes
    /// the current access list and returns whether the export has one after the change.
    pub(super) fn open(
        server: &Server,
        name: &str,
        has_list: impl FnOnce(Vec<AccessRule>) -> bool,
    ) -> Result<Self, Error> {
        let lock = acquire_for_command(server.socket())?;
        let mut origin: Origin =
            server.request(&Request::ExportOrigin { name: name.to_owned() })?;
        let dir_path = match &origin.exports_dir {
            Some(dir) => dir.clone(),
            None => return Err(refuse(name, &no_directory(&origin))),
        };
        let what = format!("nothing changed: cannot save in {}", dir_path.display());
        let dir = acquire_directory(&dir_path)?;
        let file = match exports_dir::file_of(&dir_path, name)? {
            Some(file) => file,
            None if origin.elsewhere => return Err(refuse(name, &elsewhere(&origin, name))),
            None => dir_path.join(file_name(name)?),
        };
        if file.is_symlink() {
            let text = format!("{} is a symbolic link; change the file itself", file.display());
            return Err(refuse(name, &text));
        }
        if origin.edited {
            return Err(refuse(name, &edited(&file)));
        }
        if origin.reloading {
            return Err(refuse(name, RELOADING));
        }
        let access = std::mem::take(&mut origin.access);
        if origin.opens_without_list && !has_list(access) {
            return Err(refuse(name, WOULD_OPEN));
        }
        let configuration = origin.configuration;
        let (name, lock) = (name.to_owned(), Some(lock));
        let store = Self { name, _lock: lock, dir, dir_path, configuration, file };
        let probed = store.create().and_then(|_| fs::remove_file(store.temporary()));
        probed.map_err(failed(ErrorKind::System, what))?;
        Ok(store)
    }

    /// Writes the running settings of the export. `done` describes the change already made.
    pub(super) fn save(self, server: &Server, done: &str) -> Result<PathBuf, Error> {
        let hint = "write its entry from `rtrs-server export save` to that file, in place of an \
                    old entry, or a restart loses the change";
        let saved = server.request::<SavedExports>(&Request::ExportSave).and_then(|saved| {
            let spec = saved.exports.into_iter().find(|spec| spec.name() == self.name);
            self.put(
                &spec
                    .ok_or_else(|| Error::new(ErrorKind::System, "the export no longer exists"))?,
            )
        });
        saved
            .and_then(|()| self.check_not_reloaded(server))
            .map_err(|error| self.not_saved(done, hint, error))?;
        Ok(self.file)
    }

    /// Removes the export from its file. Returns the file, if it defined the export.
    pub(super) fn remove(self, server: &Server) -> Result<Option<PathBuf>, Error> {
        let hint = "delete its entry from that file, or a restart restores the export";
        let removed =
            self.take_out().and_then(|removed| self.check_not_reloaded(server).map(|()| removed));
        let removed = removed.map_err(|error| self.not_saved("removed", hint, error))?;
        Ok(removed.then_some(self.file))
    }

    /// Checks that no reload has begun since [`Self::open`] and may have read the old file: a
    /// reload that cannot get the lock proceeds without it.
    fn check_not_reloaded(&self, server: &Server) -> Result<(), Error> {
        let now: Origin = server.request(&Request::ExportOrigin { name: self.name.clone() })?;
        if now.configuration == self.configuration {
            return Ok(());
        }
        let text = "a concurrent reload may have read the old file; repeat the reload";
        Err(Error::new(ErrorKind::System, text))
    }

    fn not_saved(&self, done: &str, hint: &str, error: Error) -> Error {
        let (name, file) = (&self.name, self.file.display());
        let text = format!("{name:?} is {done}, but the change is not saved in {file}; {hint}");
        Error::with_source(ErrorKind::System, text, error)
    }

    /// Adds an export to its file, or replaces its entry.
    fn put(&self, spec: &ExportSpec) -> Result<(), Error> {
        let (old, mut items) = self.read()?;
        let new = Value::Mapping(without_defaults(spec));
        match items.iter_mut().find(|item| is_named(item, &self.name)) {
            Some(item) => *item = new,
            None => items.push(new),
        }
        let text = rendered(&old, &items)?;
        if !exports_dir::parse(&text, &self.file)?.contains(spec) {
            let text = "its settings cannot be written as YAML, for example a path that is not \
                        UTF-8";
            return Err(Error::new(ErrorKind::System, text));
        }
        self.replace(&old, &text)
    }

    /// Removes the export's entry. Returns false if there is none.
    fn take_out(&self) -> Result<bool, Error> {
        let (old, mut items) = self.read()?;
        let count = items.len();
        items.retain(|item| !is_named(item, &self.name));
        if items.len() == count {
            return Ok(false);
        }
        if items.is_empty() {
            let removed = fs::remove_file(&self.file).and_then(|()| self.dir.sync_all());
            removed.map_err(failed(ErrorKind::System, "cannot remove the file"))?;
        } else {
            self.replace(&old, &rendered(&old, &items)?)?;
        }
        Ok(true)
    }

    /// Reads the text of the file, which may be missing, and its entries.
    fn read(&self) -> Result<(String, Vec<Value>), Error> {
        if !self.file.exists() {
            return Ok((String::new(), Vec::new()));
        }
        let text = config_text(&self.file)?;
        exports_dir::parse(&text, &self.file)?;
        let document = serde_yaml::from_str::<Value>(&text);
        let document = document.map_err(failed(ErrorKind::Config, "cannot read the file"))?;
        let items = match document {
            Value::Null => Vec::new(),
            Value::Sequence(items) => items,
            single => vec![single],
        };
        Ok((text, items))
    }

    /// Replaces the text of the file. If that loses comments, keeps the old text in `FILE~`.
    fn replace(&self, old: &str, new: &str) -> Result<(), Error> {
        if loses_comments(old) {
            let mut copy = self.file.clone().into_os_string();
            copy.push("~");
            self.write(Path::new(&copy), old)?;
        }
        self.write(&self.file, new)
    }

    /// Writes a file completely, or leaves it as it is.
    fn write(&self, path: &Path, text: &str) -> Result<(), Error> {
        let written = self.create().and_then(|mut file| {
            match fs::metadata(&self.file) {
                Ok(old) => {
                    file.set_permissions(old.permissions())?;
                    let new = file.metadata()?;
                    if (old.uid(), old.gid()) != (new.uid(), new.gid()) {
                        fchown(&file, Some(old.uid()), Some(old.gid()))?;
                    }
                }
                Err(_) => file.set_permissions(Permissions::from_mode(MODE))?,
            }
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(self.temporary(), path)?;
            self.dir.sync_all()
        });
        written.map_err(|error| {
            // The temporary file is missing if it was renamed.
            drop(fs::remove_file(self.temporary()));
            Error::with_source(ErrorKind::System, format!("cannot write {}", path.display()), error)
        })
    }

    fn temporary(&self) -> PathBuf {
        self.dir_path.join(TEMPORARY)
    }

    /// Creates the temporary file. A command that was killed may have left one behind.
    fn create(&self) -> io::Result<File> {
        match fs::remove_file(self.temporary()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        OpenOptions::new().write(true).create_new(true).open(self.temporary())
    }
}

/// Formats the message about the file that was written.
pub(super) fn saved_text(file: Option<&Path>) -> String {
    file.map(|file| format!("saved in {}\n", printable(&file.display().to_string())))
        .unwrap_or_default()
}

/// Formats the message about the file from which an export was removed.
pub(super) fn unsaved_text(file: Option<&Path>) -> String {
    file.map(|file| format!("removed from {}\n", printable(&file.display().to_string())))
        .unwrap_or_default()
}

fn refuse(name: &str, why: &str) -> Error {
    Error::new(ErrorKind::System, format!("nothing changed: cannot save export {name:?}: {why}"))
}

/// Reason why an export whose file was edited cannot be saved.
fn edited(file: &Path) -> String {
    format!(
        "{} has changes to this export that the server has not applied; apply them with \
         `rtrs-server reload`, which reports any obstacle, or revert them",
        file.display()
    )
}

/// Reason why nothing can be saved while a reload that did not wait for the lock is running.
const RELOADING: &str = "a running reload may undo the change; repeat the command when the reload \
                         has finished";

/// Reason why the last access list cannot be removed from the files.
const WOULD_OPEN: &str = "this is the last access list; after a restart, exports without a list, \
                          which are closed now, would be open to all clients; set `access` of the \
                          server in its configuration, reload, and repeat the command";

/// Reason why a server without `exports-dir` cannot save, with a hint.
fn no_directory(origin: &Origin) -> String {
    let beside = origin.config.as_ref().and_then(|config| config.parent());
    match beside {
        Some(dir) => {
            let dir = dir.join(exports_dir::DEFAULT);
            format!("the directory {} does not exist; create it", dir.display())
        }
        None => "the server has no directory of exports; start it with --exports-dir".to_owned(),
    }
}

/// Reason why an export from the configuration file or a flag cannot be saved, with a hint.
fn elsewhere(origin: &Origin, name: &str) -> String {
    let file = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
    let dir = file(&origin.exports_dir).unwrap_or_default();
    let its = match file(&origin.config) {
        Some(config) => format!("{config}, or the flag --export,"),
        None => "the flag --export".to_owned(),
    };
    format!(
        "{its} defines {name:?}, and a second entry in {dir} would be a duplicate; move the entry \
         to a file in {dir} and use `rtrs-server reload`, or change it where it is"
    )
}

/// Returns the name of a new export's file.
fn file_name(name: &str) -> Result<String, Error> {
    let mut file = String::new();
    for byte in name.bytes() {
        match byte {
            b'.' if file.is_empty() => file += "%2E",
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' | b'+' | b'@' | b':' => {
                file.push(char::from(byte));
            }
            _ => file += &format!("%{byte:02X}"),
        }
    }
    file += ".yaml";
    if file.len() > FILE_NAME_MAX {
        let why = "its name is too long for a file name; write a file with `rtrs-server export \
                   save`";
        return Err(refuse(name, why));
    }
    Ok(file)
}

/// Whether an entry of a file defines the export called `name`.
fn is_named(item: &Value, name: &str) -> bool {
    let spec = serde_yaml::from_value::<ExportSpec>(item.clone()).ok();
    spec.and_then(|spec| spec.resolved_name().ok()).is_some_and(|its| its == name)
}

/// Leading comment lines of a file.
fn heading(text: &str) -> &str {
    let comments = text.split_inclusive('\n').take_while(|line| line.starts_with('#'));
    &text[..comments.map(str::len).sum()]
}

/// Whether a file may have comments after its heading.
fn loses_comments(text: &str) -> bool {
    let rest = &text[heading(text).len()..];
    rest.lines().any(|line| line.trim_start().starts_with('#') || line.contains(" #"))
}

/// Formats entries as the text of a file, with the heading of the old text.
fn rendered(old: &str, items: &[Value]) -> Result<String, Error> {
    let list = serde_yaml::to_string(items);
    let list = list.map_err(failed(ErrorKind::System, "cannot write the exports as YAML"))?;
    Ok(heading(old).to_owned() + &list)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let dir =
                std::env::temp_dir().join(format!("rtrs-store-{name}-{}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        fn store(&self, name: &str, file: &str) -> Store {
            Store {
                name: name.to_owned(),
                _lock: None,
                dir: File::open(&self.0).unwrap(),
                dir_path: self.0.clone(),
                configuration: 0,
                file: self.0.join(file),
            }
        }

        fn text(&self, file: &str) -> String {
            fs::read_to_string(self.0.join(file)).unwrap()
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn an_entry_changes_and_the_others_stay() {
        let dir = Dir::new("entries");
        let old = "# Ours.\n- a=mem:1M\n# A disk.\n- name: b\n  target: /dev/sdb\n";
        fs::write(dir.0.join("all.yaml"), old).unwrap();
        fs::set_permissions(dir.0.join("all.yaml"), Permissions::from_mode(0o640)).unwrap();
        dir.store("a", "all.yaml").put(&"a=mem:1M,ro".parse().unwrap()).unwrap();
        let new =
            "# Ours.\n- name: a\n  target: mem:1M\n  ro: true\n- name: b\n  target: /dev/sdb\n";
        assert_eq!(dir.text("all.yaml"), new);
        assert_eq!(dir.text("all.yaml~"), old, "comments are kept in the copy");
        let mode = fs::metadata(dir.0.join("all.yaml")).unwrap().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert!(dir.store("a", "all.yaml").take_out().unwrap());
        assert_eq!(dir.text("all.yaml"), "# Ours.\n- name: b\n  target: /dev/sdb\n");
        assert!(!dir.store("a", "all.yaml").take_out().unwrap());
        assert!(dir.store("b", "all.yaml").take_out().unwrap());
        assert!(!dir.0.join("all.yaml").exists(), "a file without exports is removed");
    }

    #[test]
    fn a_file_that_cannot_be_replaced_stays_complete() {
        let dir = Dir::new("replaced");
        let spec: ExportSpec = "a=mem:1M".parse().unwrap();
        let file = dir.0.join("a.yaml");
        fs::create_dir(&file).unwrap();
        let error = dir.store("a", "a.yaml").write(&file, "x").unwrap_err();
        assert!(error.to_string().starts_with("cannot write "), "{error}");
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1, "no temporary file is left");
        fs::remove_dir(&file).unwrap();
        // Left behind by a killed command.
        fs::write(dir.0.join(TEMPORARY), "half").unwrap();
        dir.store("a", "a.yaml").put(&spec).unwrap();
        assert_eq!(exports_dir::read(&file).unwrap(), [spec]);
    }

    #[test]
    fn file_names_are_safe_and_distinct() {
        for (name, file) in [
            ("vol0", "vol0.yaml"),
            ("a/b", "a%2Fb.yaml"),
            ("a%2Fb", "a%252Fb.yaml"),
            (".a", "%2Ea.yaml"),
            ("ä", "%C3%A4.yaml"),
        ] {
            assert_eq!(file_name(name).unwrap(), file);
        }
        file_name(&"/".repeat(100)).unwrap_err();
    }
}
