//! `save`: writes a file for `apply` from the running sessions.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use rtrs_core::local::RunDir;
use rtrs_core::settings::config_text;
use serde_yaml::{Mapping, Value};

use super::apply::running;
use super::global::GlobalArgs;
use super::sessions::{Answer, Silent, find_with_left};
use super::text::remark;
use crate::control_protocol::Status;
use crate::daemon::saved::UsedExport;
use crate::error::{Error, ErrorKind, system};
use crate::plan::AttachPlan;
use crate::volumes::{Volume, read, session_of_volumes};

/// The arguments.
#[derive(Debug, Args)]
pub struct SaveArgs {
    /// Write to this file instead of stdout; - writes to stdout
    ///
    /// A file of this name is replaced as a whole, including its comments. Devices and pipes are
    /// written to.
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,

    /// Omit volumes that cannot be saved, including volumes of the file that is replaced
    ///
    /// Without this option, nothing is written if a session is dead or does not answer, or if the
    /// file lists a volume that is not attached.
    #[arg(long)]
    pub force: bool,
}

pub(super) fn run(args: &SaveArgs, global: &GlobalArgs) -> Result<(), Error> {
    let run_dir = global.run_dir()?;
    run_dir.check()?;
    let mut saved = Saved::default();
    for found in find_with_left(&run_dir, global.output)? {
        saved.add(&found.answer, &run_dir, global);
    }
    let target = args.output_file.as_deref().filter(|path| *path != Path::new("-"));
    if let Some(file) = target {
        saved.keep_volumes_of(file);
    }
    let Saved { sessions, left_out, .. } = saved;
    match &left_out[..] {
        [] => {}
        left_out if args.force => left_out.iter().for_each(|why| remark(format_args!("{why}"))),
        // A file that lacks a volume is dangerous: the next boot does not attach it, and
        // `apply --prune` detaches it.
        left_out => {
            let text = format!(
                "nothing was saved, because these volumes would be missing (--force omits \
                 them):\n{}",
                left_out.join("\n")
            );
            return Err(Error::new(ErrorKind::System, text));
        }
    }
    let sessions: Vec<Value> = sessions.into_iter().map(Shared::entry).collect();
    let file = Mapping::from_iter([("sessions".into(), Value::Sequence(sessions))]);
    let yaml = serde_yaml::to_string(&file).map_err(|error| {
        Error::with_source(ErrorKind::System, "cannot write the sessions", error)
    })?;
    match target {
        Some(path) => {
            let what = format!("cannot write {}", path.display());
            replace(path, &yaml).map_err(system(what))
        }
        None => global.output.print(&file, |_| yaml),
    }
}

/// Sessions for the file, and volumes that cannot be in it.
#[derive(Default)]
struct Saved {
    sessions: Vec<Shared>,
    /// Volumes that cannot be saved, each with the reason.
    left_out: Vec<String>,
    /// Names of all volumes, saved or left out.
    names: Vec<String>,
}

impl Saved {
    /// Adds the volume that an answer describes.
    fn add(&mut self, answer: &Answer, run_dir: &RunDir, global: &GlobalArgs) {
        let name = answer.name();
        self.names.push(name.to_owned());
        let status = match answer {
            Answer::Status(status) => status,
            Answer::Silent(Silent { state, reason, .. }) => {
                let remedy = state.remedy().map(|remedy| format!("; {remedy}"));
                self.left_out.push(format!("{name:?}: {reason}{}", remedy.unwrap_or_default()));
                return;
            }
        };
        let plan = match running(status, run_dir, global) {
            Ok(running) => with_identity(running.plan, status),
            Err(error) => {
                self.left_out.push(format!("{name:?}: {}", error.chain()));
                return;
            }
        };
        // If a volume is being added, only the later answer may list it.
        let shares = |one: &&mut Shared| {
            let has = |name| status.volumes.contains(name);
            one.volumes.contains(&status.name) || one.names().any(has)
        };
        match self.sessions.iter_mut().find(shares) {
            Some(one) => one.plans.push(plan),
            None => {
                self.sessions.push(Shared { volumes: status.volumes.clone(), plans: vec![plan] });
            }
        }
    }

    /// Finds unattached volumes in the file to be replaced. After a restart of the host, nothing
    /// else shows that they existed.
    fn keep_volumes_of(&mut self, path: &Path) {
        if !fs::metadata(path).is_ok_and(|found| found.is_file()) {
            return;
        }
        let file = path.display().to_string();
        let listed = config_text(path).and_then(|text| read(&text, &file));
        let listed = match listed {
            Ok(listed) => listed,
            Err(error) => {
                let why = error.chain();
                self.left_out.push(format!("cannot see which volumes {file} lists: {why}"));
                return;
            }
        };
        for name in listed.iter().flat_map(Volume::names) {
            if self.names.iter().all(|one| one != name) {
                self.left_out.push(format!("{name:?}: it is listed in {file}, but not attached"));
            }
        }
    }
}

/// Adds the export that the volume is bound to, so that the next attach accepts no other. An
/// in-memory export is a different one after its server restarts.
fn with_identity(mut plan: AttachPlan, status: &Status) -> AttachPlan {
    let bound = status.identity.map(|identity| UsedExport { identity, memory: status.memory });
    let identity = &mut plan.session.settings.identity;
    *identity = bound.and_then(UsedExport::lasting).or(*identity);
    plan
}

/// Session with its volumes.
struct Shared {
    /// Names of the session's volumes; the one attached longest comes first.
    volumes: Vec<String>,
    plans: Vec<AttachPlan>,
}

impl Shared {
    fn names(&self) -> impl Iterator<Item = &String> {
        self.plans.iter().map(|plan| &plan.session.name)
    }

    /// Returns the session's entry in the file. Its volumes are in attach order.
    fn entry(mut self) -> Value {
        let place = |name: &String| self.volumes.iter().position(|one| one == name);
        self.plans.sort_by_key(|plan| {
            let place = place(&plan.session.name);
            (place.is_none(), place)
        });
        let (session, differ) = session_of_volumes(&self.plans);
        for name in differ {
            remark(format_args!(
                "the settings of {name} differ from those that the file gives to all volumes of \
                 the session; apply reports the difference"
            ));
        }
        session.into()
    }
}

/// Maximum number of symbolic links that are followed, as in Linux.
const LINKS_MAX: usize = 40;

/// Returns the file to replace, which need not exist and is not a symbolic link. Returns None for
/// anything that cannot be replaced: a device, a pipe, a descriptor of a process.
fn replaceable(path: &Path) -> io::Result<Option<PathBuf>> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => return Ok(None),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(link) = fs::read_link(&file) else { return Ok(Some(file)) };
        let dir = fs::canonicalize(dir_of(&file))?;
        if dir.starts_with("/proc") {
            return Ok(None);
        }
        file = dir.join(link);
    }
    Err(io::Error::other("too many symbolic links"))
}

/// Writes a file as a whole or not at all. A file that is replaced keeps its permissions, and stays
/// where a symbolic link points. Anything but a regular file is written to directly.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let Some(path) = replaceable(path)? else {
        return fs::OpenOptions::new().append(true).open(path)?.write_all(text.as_bytes());
    };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = path.with_file_name(name);
    let written = fs::File::create_new(&new).and_then(|mut file| {
        if let Ok(before) = fs::metadata(&path) {
            file.set_permissions(before.permissions())?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let replaced = written.and_then(|()| fs::rename(&new, &path));
    if replaced.is_err() {
        // The file may not exist.
        let _ = fs::remove_file(&new);
    }
    // Otherwise a power loss could bring the old file back.
    let synced = replaced.map(|()| fs::File::open(dir_of(&path)).and_then(|dir| dir.sync_all()));
    synced?.map_err(|error| {
        let text = format!("the file was replaced, but its directory cannot be synced: {error}");
        io::Error::new(error.kind(), text)
    })
}

/// Directory of a file.
fn dir_of(file: &Path) -> &Path {
    file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_file_behind_a_link_is_replaced_in_place_and_keeps_its_permissions() {
        let scratch = format!("rtrs-save-{}", std::process::id());
        let dir = std::env::temp_dir().join(scratch);
        fs::create_dir(&dir).unwrap();
        let (file, link) = (dir.join("real.yaml"), dir.join("volumes.yaml"));
        fs::write(&file, "before").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        symlink("real.yaml", &link).unwrap();
        replace(&link, "after").unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let mode = fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        let is_link = fs::symlink_metadata(&link).unwrap().is_symlink();
        replace(&dir.join("new.yaml"), "new").unwrap();
        let new = fs::read_to_string(dir.join("new.yaml")).unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!((&*text, mode, is_link, &*new), ("after", 0o640, true, "new"));
    }

    #[test]
    fn a_target_other_than_a_file_is_written_to_and_not_replaced() {
        let scratch = format!("rtrs-save-special-{}", std::process::id());
        let dir = std::env::temp_dir().join(scratch);
        fs::create_dir(&dir).unwrap();

        let (mut reader, writer) = io::pipe().unwrap();
        let link = dir.join("pipe");
        symlink(format!("/dev/fd/{}", writer.as_raw_fd()), &link).unwrap();
        replace(&link, "text").unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());

        let null = dir.join("null");
        symlink("/dev/null", &null).unwrap();
        replace(&null, "text").unwrap();
        assert!(fs::symlink_metadata(&null).unwrap().is_symlink());
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());

        // A descriptor keeps what was written to it before.
        let file = fs::File::options().create(true).append(true).open(dir.join("log")).unwrap();
        (&file).write_all(b"before ").unwrap();
        replace(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), "text").unwrap();
        assert_eq!(fs::read_to_string(dir.join("log")).unwrap(), "before text");

        let socket = dir.join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(replace(&socket, "text").is_err());
        assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
        assert!(replace(&dir, "text").is_err());

        // Links to a file that does not exist yet, and to each other.
        let (first, second) = (dir.join("first"), dir.join("second"));
        symlink("second", &first).unwrap();
        symlink("new.yaml", &second).unwrap();
        replace(&first, "new").unwrap();
        assert_eq!(fs::read_to_string(dir.join("new.yaml")).unwrap(), "new");
        assert!(fs::symlink_metadata(&second).unwrap().is_symlink());
        let circle = dir.join("circle");
        symlink("circle", &circle).unwrap();
        assert!(replace(&circle, "text").is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
