//! The `rtrs-client` binary: makes an exit code from what [`LowArgs::run`] returns.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use rtrs_client::LowArgs;

fn main() -> ExitCode {
    match LowArgs::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may be there to read it; the exit code says it too.
            let _ = writeln!(io::stderr(), "rtrs-client: {}", error.chain());
            ExitCode::from(error.exit_code())
        }
    }
}
