//! The daemon's side of export changes, for engine tests: commands and reloads on a server whose
//! control shard is run by the test.

use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::rt;

use super::control_shard::ControlShard;
use super::exports::{Exports, Opener};
use super::identity::Sources;
use super::reload::{Accepts, Changes, ReadConfig, Reload};
use crate::audit::AuditSink;
use crate::control_protocol::{Origin, Reloaded};
use crate::engine::message::Message;
use crate::export::ExportTable;
use crate::plan::Plan;
use crate::settings::{ExportSpec, Settings};
use crate::state::StateDir;

/// Called by a reload once it has read the configuration.
type AfterReading = Box<dyn FnOnce() + Send>;

/// A server that has read a configuration.
pub(crate) struct Rig {
    changes: Changes,
    configuration: Arc<Mutex<Settings>>,
    after_reading: Arc<Mutex<Option<AfterReading>>>,
}

impl Rig {
    /// Serves the exports of `set` in `table`, which must be empty.
    pub(crate) fn new(
        set: &Settings,
        table: Arc<ExportTable>,
        control: rt::Sender<Message>,
    ) -> Self {
        let state = Arc::new(StateDir::open(Some(&std::env::temp_dir()), None));
        let opener = Arc::new(Opener::new(Sources::system(), state));
        let control = ControlShard(control);
        let none = Settings { export: Vec::new(), ..set.clone() };
        let exports = Exports::new(table, opener, control, None, &none, AuditSink::default());
        let configuration = Arc::new(Mutex::new(none.clone()));
        let read = Arc::clone(&configuration);
        let after_reading = Arc::<Mutex<Option<AfterReading>>>::default();
        let after = Arc::clone(&after_reading);
        let reread = Box::new(move || {
            let set = read.lock().clone();
            let then = after.lock().take();
            then.into_iter().for_each(|then| then());
            Plan::new(set)
        });
        let reload = Reload::new(&none, reread, AuditSink::default(), None);
        let rig = Self { changes: Changes::new(exports, reload), configuration, after_reading };
        rig.reload(set).expect("the first configuration");
        rig
    }

    /// Reloads this configuration.
    pub(crate) fn reload(&self, set: &Settings) -> Result<Reloaded, String> {
        self.configure(set);
        self.changes.reload(Accepts::LostAccess)
    }

    /// Reports what a reload of this configuration would do.
    pub(crate) fn preview(&self, set: &Settings) -> Result<Reloaded, String> {
        self.configure(set);
        self.changes.preview()
    }

    /// Changes the configuration that the next reload will read.
    pub(crate) fn configure(&self, set: &Settings) {
        *self.configuration.lock() = set.clone();
    }

    /// Calls `then` in the next reload or request for an origin, once it has read the
    /// configuration.
    pub(crate) fn after_reading(&self, then: impl FnOnce() + Send + 'static) {
        *self.after_reading.lock() = Some(Box::new(then));
    }

    /// Origin of an export, as a command with `--save` requests it.
    pub(crate) fn origin(&self, name: &str) -> Result<Origin, String> {
        self.changes.origin(name)
    }

    /// Runs the first half of a reload: reads the configuration and applies the restrictions.
    pub(crate) fn read(&self) -> Result<ReadConfig<'_>, String> {
        let Changes { exports, reload, .. } = &self.changes;
        reload.read_and_restrict(exports, Accepts::LostAccess, &mut Reloaded::default())
    }

    /// Runs the second half of a reload.
    pub(crate) fn apply(&self, read: ReadConfig<'_>) -> Result<Reloaded, String> {
        let mut done = Reloaded::default();
        self.changes.reload.apply_exports(&self.changes.exports, read, &mut done).map(|()| done)
    }

    /// Settings of the named exports.
    pub(crate) fn saved(&self) -> Vec<ExportSpec> {
        self.changes.exports.save().exports
    }
}
