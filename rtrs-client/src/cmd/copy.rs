//! `copy`: copies a volume, file or block device to another.

use std::io::{self, Write};
use std::time::Instant;

use clap::Args;
use rtrs_core::logging::log_to_stderr;
use rtrs_core::settings::{LogFormat, Output};
use serde::Serialize;

use super::global::GlobalArgs;
use super::progress::TransferArgs;
use super::text::{remark, size_text};
use crate::copy::{CopyTask, copy};
use crate::error::{Error, system};

/// The arguments.
#[derive(Debug, Args)]
pub struct CopyArgs {
    /// Volume URI, file or block device to read; - reads stdin
    ///
    /// A volume is SCHEME://HOST[:PORT]/EXPORT[?NAME=VALUE&...] with the scheme tcp, tls or rdma.
    /// The names are settings of a session, such as path, tls-dir, key-file, no-path and retry-for.
    #[arg(value_name = "SRC")]
    pub source: String,

    /// Volume URI, file or block device to write; - writes stdout
    ///
    /// A regular file is created or overwritten and gets the size of the source. A volume or block
    /// device must be at least as large; the rest of it is not changed.
    #[arg(value_name = "DST")]
    pub destination: String,

    /// Do not write holes and zeroes; all of DST must already read as zeroes
    ///
    /// For a new volume whose server does not report extents. If DST contains other data, the copy
    /// is wrong.
    #[arg(long)]
    pub destination_is_zero: bool,

    /// Read DST after the flush and compare it with SRC
    ///
    /// SRC must not change in the meantime. Not possible with -, which cannot be reread.
    #[arg(long)]
    pub verify: bool,

    /// Finish without a flush
    ///
    /// The copy is then not durable when the command exits with 0.
    #[arg(long)]
    pub no_flush: bool,

    /// Requests and progress.
    #[command(flatten)]
    pub transfer: TransferArgs,
}

/// Result of the copy.
#[derive(Serialize)]
struct Summary<'a> {
    source: &'a str,
    destination: &'a str,
    size: u64,
    data_bytes: u64,
    zero_bytes: u64,
    skipped_bytes: u64,
    unchanged_bytes: u64,
    elapsed_ms: u64,
    flushed: bool,
    verified: bool,
}

pub(super) fn run(args: &CopyArgs, global: &GlobalArgs) -> Result<(), Error> {
    let CopyArgs { source, destination, destination_is_zero, verify, no_flush, transfer } = args;
    let sizes = transfer.sizes()?;
    let _log = log_to_stderr(&transfer.log, LogFormat::default())
        .map_err(system("cannot start the logging thread"))?;
    let task = CopyTask {
        source: source.clone(),
        destination: destination.clone(),
        sizes,
        destination_is_zero: *destination_is_zero,
        flush: !no_flush,
        verify: *verify,
    };
    let begin = Instant::now();
    let copied = copy(&task, &mut transfer.display(global.output))?;
    let summary = Summary {
        source,
        destination,
        size: copied.size,
        data_bytes: copied.data,
        zero_bytes: copied.zeroes,
        skipped_bytes: copied.skipped,
        unchanged_bytes: copied.unchanged,
        elapsed_ms: u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX),
        flushed: task.flush,
        verified: task.verify,
    };
    if summary.unchanged_bytes > 0 {
        remark(format!(
            "{destination} is larger than {source}: its last {} bytes are unchanged",
            summary.unchanged_bytes
        ));
    }
    if destination == "-" {
        return summary.print_aside(global.output);
    }
    global.output.print(&summary, Summary::text)
}

impl Summary<'_> {
    fn text(&self) -> String {
        let seconds = self.elapsed_ms as f64 / 1000.0;
        let rate = self.data_bytes as f64 / seconds.max(0.001) / f64::from(1 << 20);
        let mut text = format!(
            "copied {}: {} of data in {seconds:.1} s ({rate:.1} MiB/s), {} written as zeroes, {} \
             zero already",
            size_text(self.size),
            size_text(self.data_bytes),
            size_text(self.zero_bytes),
            size_text(self.skipped_bytes),
        );
        if self.verified {
            text += "; verified";
        }
        text + "\n"
    }

    /// Prints the result on stderr as JSON, because stdout carries the data.
    fn print_aside(&self, output: Output) -> Result<(), Error> {
        if output == Output::Json {
            let failed = || system("cannot print the result");
            let json = serde_json::to_string(self).map_err(io::Error::other).map_err(failed())?;
            writeln!(io::stderr(), "{json}").map_err(failed())?;
        }
        Ok(())
    }
}
