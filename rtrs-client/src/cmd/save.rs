//! `save`: writes the file of `apply` from the running sessions.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_yaml::{Mapping, Value};

use super::apply::running;
use super::global::GlobalArgs;
use super::sessions::{Answer, find};
use super::text::remark;
use crate::control_protocol::SessionState;
use crate::error::{Error, ErrorKind, system};
use crate::plan::AttachPlan;
use crate::volumes::session_of_volumes;

/// The arguments.
#[derive(Debug, Args)]
pub struct SaveArgs {
    /// Write to this file instead of stdout
    ///
    /// A file of this name is replaced as a whole, including its comments.
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,
}

pub(super) fn run(args: &SaveArgs, global: &GlobalArgs) -> Result<(), Error> {
    let run_dir = global.run_dir()?;
    run_dir.check()?;
    let mut sessions: Vec<Shared> = Vec::new();
    for found in find(&[(None, run_dir.clone())])? {
        // A file that lacks a session is dangerous: `apply --prune` would detach it.
        let cannot = |why: &dyn std::fmt::Display| {
            let text = format!("cannot save {:?}: {why}", found.answer.name());
            Error::new(ErrorKind::System, text)
        };
        match &found.answer {
            Answer::Status(status) => {
                let running = running(status, &run_dir, global);
                let running = running.map_err(|error| cannot(&error.chain()))?;
                // A volume that was added meanwhile is in the list of only one of them.
                let shares = |one: &&mut Shared| {
                    let has = |name| status.volumes.contains(name);
                    one.volumes.contains(&status.name) || one.names().any(has)
                };
                match sessions.iter_mut().find(shares) {
                    Some(one) => one.plans.push(running.plan),
                    None => sessions.push(Shared {
                        volumes: status.volumes.clone(),
                        plans: vec![running.plan],
                    }),
                }
            }
            Answer::Silent(silent) if silent.state == SessionState::Dead => {
                remark(format_args!("{} is dead and left out", silent.name));
            }
            Answer::Silent(silent) => return Err(cannot(&silent.reason)),
        }
    }
    let sessions: Vec<Value> = sessions.into_iter().map(Shared::entry).collect();
    let file = Mapping::from_iter([("sessions".into(), Value::Sequence(sessions))]);
    let yaml = serde_yaml::to_string(&file).map_err(|error| {
        Error::with_source(ErrorKind::System, "cannot write the sessions", error)
    })?;
    match &args.output_file {
        Some(path) => {
            let what = format!("cannot write {}", path.display());
            replace(path, &yaml).map_err(system(what))
        }
        None => global.output.print(&file, |_| yaml),
    }
}

/// Session with its volumes.
struct Shared {
    /// Names of its volumes; the one attached longest comes first.
    volumes: Vec<String>,
    plans: Vec<AttachPlan>,
}

impl Shared {
    fn names(&self) -> impl Iterator<Item = &String> {
        self.plans.iter().map(|plan| &plan.session.name)
    }

    /// Returns the session's entry in the file. Its volumes have the order of their attach.
    fn entry(mut self) -> Value {
        let place = |name: &String| self.volumes.iter().position(|one| one == name);
        self.plans.sort_by_key(|plan| {
            let place = place(&plan.session.name);
            (place.is_none(), place)
        });
        let (session, differ) = session_of_volumes(&self.plans);
        for name in differ {
            remark(format_args!(
                "{name} does not have the settings that the file gives to the volumes of its \
                 session; apply reports the difference"
            ));
        }
        session.into()
    }
}

/// Writes a file as a whole or not at all. A file that is replaced keeps its permissions, and stays
/// where a symbolic link points.
fn replace(path: &std::path::Path, text: &str) -> std::io::Result<()> {
    let target = std::fs::canonicalize(path);
    let path = target.as_deref().unwrap_or(path);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = path.with_file_name(name);
    let written = std::fs::File::create_new(&new).and_then(|mut file| {
        if let Ok(before) = std::fs::metadata(path) {
            file.set_permissions(before.permissions())?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let replaced = written.and_then(|()| std::fs::rename(&new, path));
    if replaced.is_err() {
        // The file may not exist.
        let _ = std::fs::remove_file(&new);
    }
    replaced
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_file_behind_a_link_is_replaced_in_its_place_and_keeps_its_permissions() {
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
}
