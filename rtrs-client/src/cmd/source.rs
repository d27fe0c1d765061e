//! Configuration file for `attach` and `bench`, and the options that only check or print settings.

use std::path::PathBuf;

use clap::Args;
use rtrs_core::settings::{Flags, print, settings_from_file};
use serde_json::json;

use super::global::GlobalArgs;
use crate::error::{Error, ErrorKind};
use crate::settings::{SessionSettings, Settings};

/// The configuration file, and what to do with it.
#[derive(Debug, Args)]
pub struct SourceArgs {
    /// Read settings from this YAML file
    ///
    /// configs/client.yaml in the source tree lists every key with its default.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check flags, configuration file, addresses and socket paths, print ok, then exit
    ///
    /// Fails wherever a real start would, for example on a name, socket, address or device that is
    /// in use, or if the system refuses io_uring. Resolves host names, but connects to nothing and
    /// changes nothing.
    #[arg(long)]
    pub check: bool,

    /// Print the settings in effect as YAML, then exit
    ///
    /// The output is a complete configuration file.
    #[arg(long)]
    pub print_config: bool,
}

pub(super) fn print_settings(settings: &Settings, global: &GlobalArgs) -> Result<(), Error> {
    let map = print(settings);
    let yaml = serde_yaml::to_string(&map).map_err(|error| {
        Error::with_source(ErrorKind::System, "cannot print the settings", error)
    })?;
    global.output.print(&map, |_| yaml)
}

impl SourceArgs {
    /// Reads the configuration file, if one was given, and applies the session's flags to it.
    pub(super) fn settings(
        &self,
        session: &Flags<SessionSettings>,
        global: &GlobalArgs,
    ) -> Result<Settings, Error> {
        let mut settings: Settings = match &self.config {
            Some(path) => settings_from_file(path)?,
            None => Settings::default(),
        };
        if session.any(&["access", "read-only"]) {
            (settings.session.access, settings.session.read_only) = (None, false);
        }
        session.apply(&mut settings.session)?;
        settings.place.run_dir = global.run_dir.clone().or(settings.place.run_dir);
        Ok(settings)
    }

    /// Checks the plan, unless its settings are only to be printed. Returns whether the command
    /// should run.
    pub(super) fn check_and_print(
        &self,
        global: &GlobalArgs,
        check: impl FnOnce() -> Result<(), Error>,
        settings: impl FnOnce() -> Settings,
    ) -> Result<bool, Error> {
        if self.check || !self.print_config {
            check()?;
        }
        match (self.print_config, self.check) {
            (true, _) => print_settings(&settings(), global)?,
            (false, true) => global.output.print(&json!({ "ok": true }), |_| "ok\n".to_owned())?,
            (false, false) => return Ok(true),
        }
        Ok(false)
    }
}
