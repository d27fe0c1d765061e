//! The `rtrs-server` binary: makes an exit code from what [`execute`] returns.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use rtrs_server::{Error, LowArgs, Plan, print_config, run, serve};

fn main() -> ExitCode {
    match execute(&LowArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may be there to read it; the exit code says it too.
            let _ = writeln!(io::stderr(), "rtrs-server: {}", error.chain());
            ExitCode::from(error.exit_code())
        }
    }
}

/// Speaks with a running server if that was asked for. Else plans one, then stops at what
/// `--check` or `--print-config` asked for, or serves.
fn execute(args: &LowArgs) -> Result<(), Error> {
    if let Some(command) = &args.command {
        return run(command);
    }
    let plan = Plan::new(args.layered_settings()?)?;
    if args.check || !args.print_config {
        plan.check()?;
    }
    if args.print_config {
        return print_config(&plan.settings, args.output);
    }
    if args.check {
        return Ok(());
    }
    serve(&plan)
}
