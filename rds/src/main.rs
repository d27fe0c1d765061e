//! The `rds` binary: turns the result of [`LowArgs::run`] into an exit code.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use rds::LowArgs;
use rtrs_base::rt::reset_signals;
use rtrs_base::settings::run_program;

fn main() -> ExitCode {
    reset_signals();
    run_program(std::env::args_os().collect(), LowArgs::output, LowArgs::run)
}
