//! The flags that all commands have.

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
        hide_possible_values = true
    )]
    pub output: Output,

    /// Directory for control sockets [default: /run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root]
    ///
    /// The default without root and without XDG_RUNTIME_DIR is /tmp/rtrs-UID. The commands find
    /// only sessions that were attached with the same directory.
    #[arg(long, global = true, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
}

impl GlobalArgs {
    /// The run directory.
    pub(super) fn run_dir(&self) -> Result<RunDir, Error> {
        Ok(RunDir::new(self.run_dir.clone())?)
    }
}
