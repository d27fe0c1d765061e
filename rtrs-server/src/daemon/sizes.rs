//! Sizes of exports: `export resize`, and detection of exports that have grown.
//!
//! A file or disk that grows enlarges its export automatically (`backend/file/watch.rs`). A thread
//! compares the sizes of all exports once a second, at the cost of one load and a copy each, and
//! reports changes to the control shard, which informs the clients (`engine/control/announce.rs`).
//! Truncating a target needs `--force`. Accepting a target that something else truncated needs
//! `--force` only while the export is open. Both raise the export's epoch, so that each session's
//! next flush reports the session's unflushed writes as lost.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use rtrs_core::block::TargetSize;

use super::control_shard::ControlShard;
use super::exports::commands::ExportCommands;
use super::exports::wait_saved;
use crate::audit::AuditKind;
use crate::backend::SIZE_MAX;
use crate::control_protocol::Resized;
use crate::engine::message::{ControlMessage, Message};
use crate::export::{Export, ExportIndex, ExportTable};

/// Interval between comparisons of the sizes.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Starts the thread that compares sizes. The thread ends soon after the table is dropped.
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
            // Another program may have ignored the lock and written to the file.
            export.forget_extents();
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

impl ExportCommands {
    /// Changes the size of an export to the given size, or to the size of its target.
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
        let _turn = self.exports.turns.begin(name)?;
        let (at, export) = self.exports.find(name)?;
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
        // A target with a fixed size refuses any other size, forced or not.
        let is_refused = target.is_fixed && to != bytes;
        if !force && !is_refused {
            let losses = Losses { had, to, target };
            losses.allow(|| self.exports.is_open(&export.name)).map_err(cannot)?;
        }
        if to != had || was_cut.is_some() || bytes != to {
            let check_growth = || {
                let now = export.source.target_size()?.bytes;
                if force || now <= bytes {
                    return Ok(());
                }
                let why = format!("its target has grown to {now} bytes in the meantime; try again");
                Err(std::io::Error::other(why))
            };
            let lost = || {
                // A refused resize loses nothing, so it must not raise the epoch.
                check_growth()?;
                let rises = export.epoch.raise();
                let why = "cannot record the loss in state-dir in time; nothing was changed; check \
                           the disk of state-dir and its free space, and try again";
                let noted = wait_saved(&export.epoch, rises).then_some(());
                noted.ok_or_else(|| std::io::Error::new(std::io::ErrorKind::TimedOut, why))?;
                // Checked again right before the target is truncated, because saving can take a
                // while.
                check_growth()
            };
            let resized = export.source.resize(to, &lost);
            resized.map_err(|error| cannot(error.to_string()))?;
            self.exports.entries.note_size(&export.name, to);
            export.forget_extents();
            export.note_size();
            announce(&export, at, self.exports.control());
        }
        let export = export.name.clone();
        Ok(Resized { export, size: to, size_before: had, was_cut, saved: None })
    }
}

/// Effect of a forced resize of an open export.
const LOSES: &str = "which loses the data beyond the end";

/// Sizes that determine whether a resize may lose data.
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
        // Enlarging an export never truncates its target, unless something else truncated it
        // before.
        let truncates = to < bytes && !is_fixed && (to < had || was_cut.is_some());
        if truncates {
            let open = if is_open()? { "it is open; " } else { "" };
            return Err(format!(
                "its target has {bytes} bytes, and data beyond {to} bytes would be lost; {open}use \
                 --force if you want that"
            ));
        }
        let (why, forced) = match was_cut {
            Some(end) if bytes > end => (
                format!(
                    "its target was truncated to {end} bytes and has {bytes} bytes again, but its \
                     data beyond {end} bytes is lost"
                ),
                "which exports its current content",
            ),
            Some(end) => (format!("its target was truncated to {end} bytes"), LOSES),
            None if to < had => (format!("{to} bytes are less than its {had}"), LOSES),
            None => return Ok(()),
        };
        if !is_open()? {
            return Ok(());
        }
        Err(format!("{why}, and it is open; detach it at the client, or use --force, {forced}"))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rtrs_core::block::{BlockDevice, BlockSource, Core, Geometry, Lost};
    use rtrs_core::rt::{Ring, mailbox};

    use super::*;
    use crate::audit::AuditSink;
    use crate::backend::MemorySource;
    use crate::daemon::exports::{Exports, Opener};
    use crate::daemon::identity::Sources;
    use crate::engine::epoch::{EpochState, EpochStore, SyncEpoch};
    use crate::engine::message::AdminReply;
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

            let commands = ExportCommands::new(&Arc::new(exports));
            let resized = commands.resize("vol", Some(4096), true);
            assert_eq!(export.epoch.rises(), 1);
            let size = export.source.geometry().size;
            if hangs {
                let why = resized.unwrap_err();
                assert!(why.contains("cannot record the loss in state-dir"), "{why}");
                assert_eq!((size, export.note_size()), (1 << 20, false));
            } else {
                assert_eq!(resized.unwrap().size, 4096);
                assert_eq!(size, 4096);
            }
        }
    }

    /// A file that was truncated to 4096 bytes and grows while it is being resized.
    #[derive(Debug)]
    struct Growing {
        size: AtomicU64,
        looks: AtomicU64,
        /// Whether the file's size cannot change.
        is_fixed: bool,
    }

    impl BlockSource for Growing {
        fn geometry(&self) -> Geometry {
            Geometry::plain(self.size.load(Ordering::SeqCst))
        }

        fn target_size(&self) -> io::Result<TargetSize> {
            let grown = self.looks.fetch_add(1, Ordering::SeqCst) > 0 && !self.is_fixed;
            let bytes = if grown { 8192 } else { 4096 };
            Ok(TargetSize { bytes, was_cut: None, is_fixed: self.is_fixed })
        }

        fn resize(&self, size: u64, lost: &Lost<'_>) -> io::Result<()> {
            if self.is_fixed {
                return Err(io::Error::new(io::ErrorKind::Unsupported, "its size is fixed"));
            }
            lost()?;
            self.size.store(size, Ordering::SeqCst);
            Ok(())
        }

        fn open(&self, _core: &Core) -> io::Result<Box<dyn BlockDevice>> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    /// Returns the result of shrinking an unused export of 1 MiB, its size afterwards, and how
    /// often its epoch rose.
    fn shrink(is_fixed: bool, to: u64, force: bool) -> (Result<u64, String>, u64, u32) {
        let (size, looks) = (AtomicU64::new(1 << 20), AtomicU64::new(0));
        let mut export = Export::new("vol", Arc::new(Growing { size, looks, is_fixed }));
        export.epoch = SyncEpoch::kept(0, Arc::new(Store { hangs: false }), "vol".into());
        let table = ExportTable::new(vec![export]);
        let export = table.get(ExportIndex(0)).unwrap();
        let state = Arc::new(StateDir::open(Some(&std::env::temp_dir()), None));
        let opener = Arc::new(Opener::new(Sources::system(), state));
        let (sender, inbox) = mailbox().unwrap();
        let shard = thread::spawn(move || {
            let ring = Ring::new(8).unwrap();
            let mut inbox = inbox.arm(&ring).unwrap();
            loop {
                ring.turn().unwrap();
                match inbox.take_or_watch() {
                    None => drop(ring.turn_or_sleep(None).unwrap()),
                    Some(Message::Control(ControlMessage::Admin { reply, .. })) => {
                        reply.send(AdminReply::Exports(Vec::new()));
                    }
                    Some(Message::Control(_)) => {}
                    Some(_) => return,
                }
            }
        });
        let (control, settings) = (ControlShard(sender.clone()), Settings::default());
        let exports = Exports::new(table, opener, control, None, &settings, AuditSink::default());
        let commands = ExportCommands::new(&Arc::new(exports));
        let resized = commands.resize("vol", Some(to), force).map(|done| done.size);
        sender.send(Message::Wake);
        shard.join().unwrap();
        (resized, export.source.geometry().size, export.epoch.rises())
    }

    #[test]
    fn a_refusal_states_the_current_size_of_the_target() {
        let refusal = |bytes| {
            let target = TargetSize { bytes, was_cut: Some(4096), is_fixed: false };
            Losses { had: 8192, to: 8192, target }.allow(|| Ok(true)).unwrap_err()
        };
        assert!(refusal(4096).contains("was truncated to 4096 bytes, and it is open"));
        let why = refusal(8192);
        assert!(why.contains("was truncated to 4096 bytes and has 8192 bytes again"), "{why}");
        assert!(why.ends_with("--force, which exports its current content"), "{why}");
    }

    #[test]
    fn a_target_that_grows_during_a_resize_is_truncated_only_by_force() {
        let (resized, size, rises) = shrink(false, 4096, false);
        assert!(resized.unwrap_err().contains("grown to 8192 bytes in the meantime"));
        assert_eq!((size, rises), (1 << 20, 0), "nothing was lost");
        assert_eq!(shrink(false, 4096, true), (Ok(4096), 4096, 1));
    }

    #[test]
    fn a_size_that_cannot_change_is_not_refused_for_lack_of_force() {
        for force in [false, true] {
            let (resized, size, _) = shrink(true, 512, force);
            assert_eq!(resized, Err("cannot resize \"vol\": its size is fixed".to_owned()));
            assert_eq!(size, 1 << 20);
        }
    }
}
