//! Cache IDs of exports whose unflushed changes are known only to this process.
//!
//! Unflushed data on an NBD server is counted only in this process. A loss after the process exits
//! would go unnoticed, because this server and the NBD server may both have been restarted. The
//! cache ID of such an export therefore depends on a random per-process number. A stop that flushes
//! the export leaves the number in the file `KEY.clean`, and the next process adopts the number and
//! removes the file, so clients see no loss, since there was none.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rtrs_core::rt::{Account, random_number};

use super::{StateDir, files_as};
use crate::engine::epoch::{StopMark, SyncEpoch};

/// Saves the number of an export when the export is flushed and closed.
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
    /// Adopts the number that a clean stop left behind.
    fn take(&self) -> io::Result<u64> {
        let _as = files_as(self.owner.as_ref())?;
        let text = fs::read_to_string(&self.path)?;
        // The file is removed, because otherwise a killed process would also leave the number
        // behind.
        fs::remove_file(&self.path)?;
        let number = text.strip_suffix('\n').and_then(|number| number.parse().ok());
        number.filter(|number| *number != 0).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

impl StateDir {
    /// Ties the cache IDs of an export to this process, or to an earlier process if all stops since
    /// then were clean.
    pub(crate) fn tie_to_process(&self, key: &str, epoch: Arc<SyncEpoch>) -> Arc<SyncEpoch> {
        // Without a store, each process has its own cache IDs.
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
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::engine::epoch::{EpochState, EpochStore};

    use super::*;

    fn id(epoch: &SyncEpoch) -> u64 {
        epoch.cache_id(5, epoch.rises())
    }

    /// A store that never saves.
    #[derive(Debug)]
    struct Hanging;

    impl EpochStore for Hanging {
        fn save(&self, _: &str, _: &Arc<EpochState>) {}
    }

    #[test]
    fn a_stop_with_an_unsaved_failure_is_not_clean() {
        let noted = Arc::new(AtomicU32::new(0));
        #[derive(Debug)]
        struct Noted(Arc<AtomicU32>);
        impl StopMark for Noted {
            fn note(&self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let epoch = SyncEpoch::kept(0, Arc::new(Hanging), "vol".to_owned());
        let epoch = epoch.tied(7, Box::new(Noted(Arc::clone(&noted))));
        let running = epoch.begin_flush();
        epoch.note_clean_stop();
        assert_eq!(noted.load(Ordering::Relaxed), 0, "another flush may learn of a loss");
        drop(running);
        epoch.note_clean_stop();
        assert_eq!(noted.load(Ordering::Relaxed), 1, "nothing has failed");
        epoch.raise();
        epoch.note_clean_stop();
        assert_eq!(noted.load(Ordering::Relaxed), 1, "the next process would not know");
    }

    #[test]
    fn a_cache_id_survives_a_clean_restart() {
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
