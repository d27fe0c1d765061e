//! The `rds` binary: makes an exit code from what [`LowArgs::run`] returns.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use rds::LowArgs;
use rtrs_core::settings::run_program;

fn main() -> ExitCode {
    run_program(std::env::args_os().collect(), LowArgs::output, LowArgs::run)
}
