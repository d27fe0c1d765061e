//! The `rtrs-client` binary: makes an exit code from what [`execute`] returns.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use rtrs_client::cli::Command;
use rtrs_client::{Error, LowArgs, Plan, print_config, run};

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
    let (check, printed) = match &args.command {
        Command::Attach(attach) => (attach.source.check, attach.source.print_config),
        Command::Bench(bench) => (bench.source.check, bench.source.print_config),
        _ => (false, false),
    };
    if check || !printed {
        plan.check()?;
    }
    if printed {
        return print_config(&plan, args.output);
    }
    if check {
        return Ok(());
    }
    run(&plan)
}
