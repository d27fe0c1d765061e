//! Last writers of exports across restarts, in the file `KEY.writers` of each export.
//!
//! The file is replaced as a whole. If it is missing or damaged, no earlier writer is known.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use super::{StateDir, files_as};
use crate::engine::last_writers::{LastWriters, SessionHash, WriterLists, WriterStore};

/// Lists to be written to a file.
pub(super) type Job = (PathBuf, WriterLists);

/// The file of an export.
#[derive(Debug)]
struct WritersFile {
    path: PathBuf,
    jobs: Sender<Job>,
}

impl WriterStore for WritersFile {
    fn save(&self, lists: &WriterLists) {
        // The thread ends only with the last sender.
        drop(self.jobs.send((self.path.clone(), lists.clone())));
    }
}

/// Starts the thread that writes the files.
pub(super) fn start() -> io::Result<Sender<Job>> {
    let (jobs, inbox) = mpsc::channel();
    thread::Builder::new().name("state-writers".into()).spawn(move || run(&inbox))?;
    Ok(jobs)
}

fn run(inbox: &Receiver<Job>) {
    for (path, lists) in inbox {
        if let Err(error) = replace(&path, &text(&lists)) {
            tracing::warn!(
                "cannot write {}: {error}; after a restart of this server, a client that returns \
                 may not be told that another one has written",
                path.display()
            );
        }
    }
}

/// Replaces a file as a whole.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let fresh = path.with_extension("writers-new");
    let mut file =
        File::options().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&fresh, path)
}

fn text(lists: &WriterLists) -> String {
    let lines = |kind: &str, list: &[SessionHash]| -> String {
        list.iter().map(|SessionHash(hash)| format!("{kind} {hash:016x}\n")).collect()
    };
    // The last line shows that the file is complete.
    lines("writer", &lists.writers) + &lines("displaced", &lists.displaced) + "end\n"
}

/// Parses the text of a file; `None` if it is damaged.
fn parse(text: &str) -> Option<WriterLists> {
    let mut lists = WriterLists::default();
    for line in text.strip_suffix("end\n")?.lines() {
        let (kind, hash) = line.split_once(' ')?;
        let hash = SessionHash(u64::from_str_radix(hash, 16).ok()?);
        match kind {
            "writer" => lists.writers.push(hash),
            "displaced" => lists.displaced.push(hash),
            _ => return None,
        }
    }
    Some(lists)
}

impl StateDir {
    /// Last writers of the export with this `key`, from this process and earlier ones.
    pub(crate) fn writers(&self, key: &str) -> LastWriters {
        let Some(files) = &self.store else { return LastWriters::default() };
        let path = files.path(key).with_extension("writers");
        let read = files_as(self.owner.as_ref()).and_then(|_as| fs::read_to_string(&path));
        let lists = match read.map(|text| parse(&text)) {
            Ok(Some(lists)) => lists,
            Ok(None) => {
                tracing::warn!("{} is damaged; no earlier writer is known", path.display());
                WriterLists::default()
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!("cannot read {}: {error}", path.display());
                }
                WriterLists::default()
            }
        };
        LastWriters::kept(lists, Box::new(WritersFile { path, jobs: files.writers.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_they_were_written() {
        let lists = WriterLists {
            writers: [1, u64::MAX].map(SessionHash).into(),
            displaced: [7].map(SessionHash).into(),
        };
        assert_eq!(parse(&text(&lists)), Some(lists.clone()));
        assert_eq!(parse(&text(&WriterLists::default())), Some(WriterLists::default()));
        let whole = text(&lists);
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), None, "{end}");
        }
        assert_eq!(parse("reader 1\nend\n"), None);
    }
}
