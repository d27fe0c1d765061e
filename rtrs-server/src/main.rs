//! The `rtrs-server` binary: turns the result of [`LowArgs::run`] into an exit code.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use rtrs_core::rt::reset_signals;
use rtrs_core::settings::run_program;
use rtrs_server::LowArgs;

fn main() -> ExitCode {
    reset_signals();
    let args = LowArgs::arguments(std::env::args_os().collect());
    run_program(args, LowArgs::output, LowArgs::run)
}
