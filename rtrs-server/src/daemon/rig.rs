//! The daemon's side of export changes, for tests of the engine: commands and reloads of a server
//! whose control shard the test runs.

use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::rt;

use super::control_shard::ControlShard;
use super::exports::{Exports, Opener};
use super::identity::Sources;
use super::reload::Reload;
use crate::audit::AuditSink;
use crate::control_protocol::Reloaded;
use crate::engine::message::Message;
use crate::export::ExportTable;
use crate::plan::Plan;
use crate::settings::Settings;
use crate::state::StateDir;

/// A server that has read a configuration.
pub(crate) struct Rig {
    pub(crate) exports: Exports,
    reload: Reload,
    configuration: Arc<Mutex<Settings>>,
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
        let reread = Box::new(move || Plan::new(read.lock().clone()));
        let rig = Self {
            exports,
            reload: Reload::new(&none, reread, AuditSink::default(), None),
            configuration,
        };
        rig.reload(set).expect("the first configuration");
        rig
    }

    /// Reloads this configuration.
    pub(crate) fn reload(&self, set: &Settings) -> Result<Reloaded, String> {
        *self.configuration.lock() = set.clone();
        self.reload.run(&self.exports, true)
    }
}
