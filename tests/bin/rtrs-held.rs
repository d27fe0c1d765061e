//! `rtrs-server` with a disk that can hold a write on command, for `tests/system/faults.rs` only.
//! The flags are those of the server. Files in the directory `RTRS_HELD_DIR` are commands and
//! reports:
//!
//! | file | made by | means |
//! |---|---|---|
//! | `hold` | the test | hold the next write to the first MiB |
//! | `armed` | this program, in place of `hold` | the next write will be held |
//! | `holding` | this program, in place of `armed` | a write is held; all other IO proceeds |
//! | `release` | the test | release the write; removed with `holding` once the write is submitted |
#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::Parser;
use rtrs_core::block::{BlockSource, IoOp};
use rtrs_server::backend::layer::{PauseHandle, pause};
use rtrs_server::{Error, ErrorKind, LowArgs, Plan, serve_over};

/// Only writes that begin below this offset are held.
const HELD_BYTES: u64 = 1 << 20;
const POLL_INTERVAL: Duration = Duration::from_millis(2);

fn main() -> ExitCode {
    match execute(&LowArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "rtrs-held: {}", error.chain());
            ExitCode::from(error.exit_code())
        }
    }
}

fn execute(args: &LowArgs) -> Result<(), Error> {
    let Some(dir) = std::env::var_os("RTRS_HELD_DIR").map(PathBuf::from) else {
        return Err(Error::new(ErrorKind::Usage, "no RTRS_HELD_DIR: name a directory"));
    };
    let plan = Plan::new(args.layered_settings()?)?;
    serve_over(&plan, |source| hold(source, dir.clone()))
}

/// Puts the holding layer on top of a disk, and starts the thread that controls the layer. The
/// thread ends with the process, or when a command file cannot be renamed or removed.
fn hold(source: Arc<dyn BlockSource>, dir: PathBuf) -> Arc<dyn BlockSource> {
    let (source, handle) = pause(source);
    let command = move || {
        loop {
            if let Err(error) = look(&dir, &handle) {
                eprintln!("rtrs-held: {}: {error}", dir.display());
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    };
    drop(thread::spawn(command));
    Arc::new(source)
}

fn look(dir: &Path, handle: &PauseHandle) -> io::Result<()> {
    let [hold, armed, holding, release] =
        ["hold", "armed", "holding", "release"].map(|name| dir.join(name));
    if hold.exists() {
        handle.hold_range(&[IoOp::Write], 0..HELD_BYTES);
        fs::rename(&hold, &armed)?;
    }
    if armed.exists() && handle.held() > 0 {
        // No later write is held, not even a resend of this one.
        handle.hold_range(&[IoOp::Write], 0..0);
        fs::rename(&armed, &holding)?;
    }
    if release.exists() {
        handle.release_all();
        fs::remove_file(&holding)?;
        fs::remove_file(&release)?;
    }
    Ok(())
}
