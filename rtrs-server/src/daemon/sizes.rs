//! Sizes of exports: `export resize`, and detection of exports that have grown.
//!
//! A file or disk that grows enlarges its export automatically (`backend/file/watch.rs`). A thread
//! compares the sizes of all exports once a second, at the cost of one load and a copy each, and
//! reports changes to the control shard, which informs the clients (`engine/control/announce.rs`).
//! Truncating a target needs `--force`. Accepting a target that was truncated from outside needs it
//! only while the export is open. Both raise the export's epoch, so that a flush of each session
//! reports its unflushed writes as lost.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use rtrs_core::block::TargetSize;

use super::control_shard::ControlShard;
use super::exports::{Exports, wait_saved};
use crate::audit::AuditKind;
use crate::backend::SIZE_MAX;
use crate::control_protocol::Resized;
use crate::engine::message::{ControlMessage, Message};
use crate::export::{Export, ExportIndex, ExportTable};

/// Interval between comparisons.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Starts the thread, which ends soon after the table is dropped.
pub(super) fn watch(table: &Arc<ExportTable>, control: ControlShard) -> std::io::Result<()> {
    let table = Arc::downgrade(table);
    thread::Builder::new().name("export-sizes".into()).spawn(move || look(&table, &control))?;
    Ok(())
}

fn look(table: &Weak<ExportTable>, control: &ControlShard) {
    loop {
        thread::sleep(LOOK_EVERY);
        let Some(table) = table.upgrade() else { return };
        for (at, export) in table.all() {
            if export.note_size() {
                announce(&export, at, control);
            }
        }
    }
}

fn announce(export: &Export, at: ExportIndex, control: &ControlShard) {
    let (name, size) = (&export.name, export.source.geometry().size);
    tracing::info!(export = &**name, size, "export resized");
    control.0.send(Message::Control(ControlMessage::Resized(at)));
}

impl Exports {
    /// Changes the size of an export to the given one, or to that of its target.
    pub(crate) fn resize(
        &self,
        name: &str,
        size: Option<u64>,
        force: bool,
    ) -> Result<Resized, String> {
        let why = |done: &Resized| {
            let forced = if force { ", with --force" } else { "" };
            Some(format!("from {} to {} bytes{forced}", done.size_before, done.size))
        };
        let resized = self.resize_now(name, size, force);
        self.recorded(AuditKind::ExportResize, name, resized, why)
    }

    fn resize_now(&self, name: &str, size: Option<u64>, force: bool) -> Result<Resized, String> {
        let _turn = self.begin()?;
        let (at, export) = self.find(name)?;
        let cannot = |why: String| format!("cannot resize {name:?}: {why}");
        let geometry = export.source.geometry();
        let target = export.source.target_size().map_err(|error| cannot(error.to_string()))?;
        let TargetSize { bytes, was_cut, .. } = target;
        let (had, to, block) =
            (geometry.size, size.unwrap_or(bytes), u64::from(geometry.logical_block));
        let wrong = match to {
            0 => Some("its size cannot be 0; use `export remove` to remove it".to_owned()),
            _ if to > SIZE_MAX => Some(format!("{to} bytes are more than the largest size, 8E")),
            _ if !to.is_multiple_of(block) => {
                Some(format!("{to} bytes are not a multiple of its block size of {block}"))
            }
            _ => None,
        };
        if let Some(why) = wrong {
            return Err(cannot(why));
        }
        if !force {
            let losses = Losses { had, to, target };
            losses.allow(|| self.is_open(&export.name)).map_err(cannot)?;
        }
        if to != had || was_cut.is_some() || bytes != to {
            let lost = || {
                let rises = export.epoch.raise();
                let why = "state-dir could not note in time that data is lost; nothing was \
                           changed; check the disk of state-dir and its free space, and try again";
                let noted = wait_saved(&export.epoch, rises).then_some(());
                noted.ok_or_else(|| std::io::Error::new(std::io::ErrorKind::TimedOut, why))
            };
            let resized = export.source.resize(to, &lost);
            resized.map_err(|error| cannot(error.to_string()))?;
            self.note_size(&export.name, to);
            export.note_size();
            announce(&export, at, self.control());
        }
        let export = export.name.clone();
        Ok(Resized { export, size: to, size_before: had, saved: None })
    }
}

/// Sizes by which a resize may lose data.
struct Losses {
    /// Current size of the export.
    had: u64,
    /// Requested size.
    to: u64,
    target: TargetSize,
}

impl Losses {
    /// Refuses a resize that loses data.
    fn allow(&self, is_open: impl FnOnce() -> Result<bool, String>) -> Result<(), String> {
        let Self { had, to, target: TargetSize { bytes, was_cut, is_fixed } } = *self;
        // A larger export whose target was not cut never truncates its target.
        let truncates = to < bytes && !is_fixed && (to < had || was_cut.is_some());
        if truncates {
            let open = if is_open()? { "it is open; " } else { "" };
            return Err(format!(
                "its target has {bytes} bytes, and data beyond {to} bytes would be lost; {open}use \
                 --force if you want that"
            ));
        }
        let why = match was_cut {
            Some(end) => format!("its target was cut to {end} bytes"),
            None if to < had => format!("{to} bytes are less than its {had}"),
            None => return Ok(()),
        };
        if !is_open()? {
            return Ok(());
        }
        Err(format!(
            "{why}, and it is open; detach it there, or use --force, which loses what lies beyond \
             the end"
        ))
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::rt::mailbox;

    use super::*;
    use crate::audit::AuditSink;
    use crate::backend::MemorySource;
    use crate::daemon::exports::Opener;
    use crate::daemon::identity::Sources;
    use crate::engine::epoch::{EpochState, EpochStore, SyncEpoch};
    use crate::settings::Settings;
    use crate::state::StateDir;

    /// A state directory whose disk accepts epochs, or hangs.
    #[derive(Debug)]
    struct Store {
        hangs: bool,
    }

    impl EpochStore for Store {
        fn save(&self, _key: &str, state: &Arc<EpochState>) {
            if !self.hangs {
                let (_, rises) = state.begin_save();
                state.end_save(rises);
            }
        }
    }

    #[test]
    fn an_export_does_not_shrink_before_the_loss_is_recorded() {
        for hangs in [false, true] {
            let mut export = Export::new("vol", Arc::new(MemorySource::new(1 << 20, 512)));
            export.epoch = SyncEpoch::kept(0, Arc::new(Store { hangs }), "vol".into());
            let table = ExportTable::new(vec![export]);
            let export = table.get(ExportIndex(0)).unwrap();
            let state = Arc::new(StateDir::open(Some(&std::env::temp_dir()), None));
            let opener = Arc::new(Opener::new(Sources::system(), state));
            let (sender, _inbox) = mailbox().unwrap();
            let (control, settings) = (ControlShard(sender), Settings::default());
            let exports =
                Exports::new(table, opener, control, None, &settings, AuditSink::default());

            let resized = exports.resize("vol", Some(4096), true);
            assert_eq!(export.epoch.rises(), 1);
            let size = export.source.geometry().size;
            if hangs {
                let why = resized.unwrap_err();
                assert!(why.contains("state-dir could not note"), "{why}");
                assert_eq!((size, export.note_size()), (1 << 20, false));
            } else {
                assert_eq!(resized.unwrap().size, 4096);
                assert_eq!(size, 4096);
            }
        }
    }
}
