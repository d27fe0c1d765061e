//! The `rtrs-client` binary: makes an exit code from what [`execute`] returns.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use rtrs_client::cli::{Command, Output};
use rtrs_client::{Error, ErrorKind, LowArgs, Plan, run};

fn main() -> ExitCode {
    match execute(&LowArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may be there to read it; the exit code says it too.
            let _ = writeln!(io::stderr(), "rtrs-client: {}", error.chain());
            ExitCode::from(error.exit_code())
        }
    }
}

/// Plans, then stops at what `--check` or `--print-config` asked for, or runs.
fn execute(args: &LowArgs) -> Result<(), Error> {
    let plan = Plan::new(args)?;
    let (check, print_config) = match &args.command {
        Command::Attach(attach) => (attach.source.check, attach.source.print_config),
        Command::Bench(bench) => (bench.source.check, bench.source.print_config),
        _ => (false, false),
    };
    if check || !print_config {
        plan.check()?;
    }
    if print_config {
        return print_settings(&plan, args.output);
    }
    if check {
        return Ok(());
    }
    run(&plan)
}

fn print_settings(plan: &Plan, output: Output) -> Result<(), Error> {
    let settings = plan.settings();
    let text = match output {
        Output::Text => serde_yaml::to_string(&settings).map_err(unprintable)?,
        Output::Json => serde_json::to_string_pretty(&settings).map_err(unprintable)? + "\n",
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
