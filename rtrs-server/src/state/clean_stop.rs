//! Cache ids of exports whose unflushed changes this process alone knows of.
//!
//! What is unflushed at an NBD server is counted in this process only. When the process ends, a
//! loss that follows is noticed by nobody: server and NBD server may be started anew together. So
//! the cache id of such an export depends on a number that each process draws. A stop that has
//! flushed the export leaves the number behind in the file `KEY.clean`, and the next process takes
//! it over, with the file: clients then learn of no loss, since there was none.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rtrs_core::rt::{Account, random_number};

use super::{StateDir, files_as};
use crate::engine::epoch::{StopMark, SyncEpoch};

/// Leaves the number of an export behind when the export is flushed and closed.
#[derive(Debug)]
struct CleanStop {
    path: PathBuf,
    number: u64,
    owner: Option<Account>,
}

impl StopMark for CleanStop {
    fn note(&self) {
        let text = format!("{}\n", self.number);
        let noted = files_as(self.owner.as_ref()).and_then(|_as| fs::write(&self.path, text));
        if let Err(error) = noted {
            tracing::warn!(
                "cannot write {}: {error}; clients treat the next start of this server as a loss \
                 of unflushed data",
                self.path.display()
            );
        }
    }
}

impl CleanStop {
    /// Takes the number over that a clean stop has left.
    fn take(&self) -> io::Result<u64> {
        let _as = files_as(self.owner.as_ref())?;
        let text = fs::read_to_string(&self.path)?;
        // Else a process that is killed would leave the number too.
        fs::remove_file(&self.path)?;
        let number = text.strip_suffix('\n').and_then(|number| number.parse().ok());
        number.filter(|number| *number != 0).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

impl StateDir {
    /// Makes the cache ids of an export depend on this process, or on an earlier one if all stops
    /// since were clean.
    pub(crate) fn tie_to_process(&self, key: &str, epoch: Arc<SyncEpoch>) -> Arc<SyncEpoch> {
        // Without a store, each process has cache ids of its own.
        let Some(files) = &self.store else { return epoch };
        let (path, owner) = (files.path(key).with_extension("clean"), self.owner.clone());
        let mut stop = CleanStop { path, number: 0, owner };
        stop.number = stop.take().unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!("cannot use {}: {error}", stop.path.display());
            }
            random_number() | 1
        });
        epoch.tied(stop.number, Box::new(stop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(epoch: &SyncEpoch) -> u64 {
        epoch.cache_id(5, epoch.rises())
    }

    #[test]
    fn a_cache_id_outlives_a_process_that_has_flushed() {
        let name = format!("rtrs-clean-{}", std::process::id());
        let scratch = std::env::temp_dir().join(name);
        let state = || StateDir::open(Some(&scratch), None);
        let open = || {
            let state = state();
            let epoch = state.epoch("vol", false).unwrap();
            state.tie_to_process("vol", epoch)
        };
        let first = open();
        let known = id(&first);
        first.note_clean_stop();
        drop(first);
        let second = open();
        assert_eq!(id(&second), known, "flushed before");
        drop(second);
        let third = open();
        assert_ne!(id(&third), known, "killed");
        drop(third);
        let path = state().store.unwrap().path("vol").with_extension("clean");
        fs::write(&path, "0\n").unwrap();
        assert_ne!(id(&open()), known, "a damaged file");
        assert!(!path.exists());
        fs::remove_dir_all(&scratch).unwrap();
    }
}
