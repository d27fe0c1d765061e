//! Flags common to all commands.

use std::path::PathBuf;

use clap::Args;
use rtrs_core::local::RunDir;
use rtrs_core::settings::Output;

use crate::error::Error;

/// Flags of all commands.
#[derive(Debug, Clone, Args)]
pub struct GlobalArgs {
    /// Output format: text or json
    ///
    /// With --print-config, text is YAML.
    #[arg(
        short,
        long,
        global = true,
        value_name = "FORMAT",
        default_value = "text",
        hide_possible_values = true,
        help_heading = "Global options"
    )]
    pub output: Output,

    /// Directory for control sockets
    ///
    /// Default: /run/rtrs for root, else $XDG_RUNTIME_DIR/rtrs or /tmp/rtrs-UID. The commands find
    /// only sessions that were attached with the same directory.
    #[arg(long, global = true, value_name = "DIR", help_heading = "Global options")]
    pub run_dir: Option<PathBuf>,
}

impl GlobalArgs {
    /// Returns the run directory.
    pub(super) fn run_dir(&self) -> Result<RunDir, Error> {
        Ok(RunDir::new(self.run_dir.clone())?)
    }
}
