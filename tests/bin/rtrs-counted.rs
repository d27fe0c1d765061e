//! `rtrs-server`, or `rtrs-client` if the first argument is `attach`, with an allocation counter;
//! only for `tests/system/allocations.rs`. It accepts the flags of the selected program. Each
//! connection to the unix socket `RTRS_COUNTED` receives the number of allocations so far, in
//! decimal.
#![forbid(unsafe_code)]

use std::alloc::System;
use std::io::{self, Write};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::thread;

use rtrs_core::settings::run_program;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static COUNTED: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() -> ExitCode {
    if let Err(error) = serve_count() {
        eprintln!("rtrs-counted: RTRS_COUNTED: {error}");
        return ExitCode::FAILURE;
    }
    let args: Vec<_> = std::env::args_os().collect();
    if args.get(1).is_some_and(|word| word == "attach") {
        return run_program(args, rtrs_client::LowArgs::output, rtrs_client::LowArgs::run);
    }
    let args = rtrs_server::LowArgs::arguments(args);
    run_program(args, rtrs_server::LowArgs::output, rtrs_server::LowArgs::run)
}

/// Starts the thread that reports the count; it ends with the process.
fn serve_count() -> io::Result<()> {
    let path = std::env::var_os("RTRS_COUNTED").ok_or_else(|| io::Error::other("is not set"))?;
    let listener = UnixListener::bind(path)?;
    thread::Builder::new().name("count".into()).spawn(move || {
        for stream in listener.incoming() {
            let stats = COUNTED.stats();
            let count = stats.allocations + stats.reallocations;
            // A client that disconnects early receives no answer.
            let _ = stream.and_then(|mut stream| write!(stream, "{count}"));
        }
    })?;
    Ok(())
}
