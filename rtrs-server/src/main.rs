//! The `rtrs-server` binary: makes an exit code from what [`execute`] returns.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use rtrs_server::cli::Output;
use rtrs_server::{Error, ErrorKind, LowArgs, Plan, run, serve};

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
        return print_config(&plan, args.output);
    }
    if args.check {
        return Ok(());
    }
    serve(&plan)
}

fn print_config(plan: &Plan, output: Output) -> Result<(), Error> {
    let text = match output {
        Output::Yaml => serde_yaml::to_string(&plan.settings()).map_err(unprintable)?,
        Output::Json => serde_json::to_string_pretty(&plan.settings()).map_err(unprintable)? + "\n",
    };
    match io::stdout().write_all(text.as_bytes()) {
        // Who reads may stop early, as head does.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(unprintable(error)),
        _ => Ok(()),
    }
}

fn unprintable(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::with_source(ErrorKind::System, "cannot print the settings", error)
}
