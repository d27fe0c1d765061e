//! `compare`: compares two volumes, files or block devices.

use clap::Args;
use rtrs_core::logging::log_to_stderr;
use rtrs_core::settings::{ByteSize, LogFormat};
use serde::Serialize;

use super::global::GlobalArgs;
use super::progress::TransferArgs;
use super::text::size_text;
use crate::copy::{CompareTask, compare};
use crate::error::{Error, ErrorKind, system};

/// The arguments.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Volume URI, file or block device; - reads stdin
    ///
    /// See copy for the form of a URI.
    #[arg(value_name = "A")]
    pub first: String,

    /// Volume URI, file or block device
    #[arg(value_name = "B")]
    pub second: String,

    /// Compare only the first SIZE bytes
    ///
    /// Useful after a copy to a larger volume. Without this option, volumes of different sizes
    /// differ.
    #[arg(long, value_name = "SIZE")]
    pub bytes: Option<ByteSize>,

    /// Requests and progress.
    #[command(flatten)]
    pub transfer: TransferArgs,
}

/// Result of the comparison.
#[derive(Serialize)]
struct Summary<'a> {
    first: &'a str,
    second: &'a str,
    equal: bool,
    /// Lowest offset at which the contents differ, or at which the shorter one ends.
    first_difference: Option<u64>,
    /// Length of the shorter one in bytes.
    size: u64,
}

pub(super) fn run(args: &CompareArgs, global: &GlobalArgs) -> Result<(), Error> {
    let failed = |error: Error| Error::new(ErrorKind::NoComparison, error.chain().to_string());
    let CompareArgs { first, second, bytes, transfer } = args;
    let sizes = transfer.sizes().map_err(failed)?;
    let _log = log_to_stderr(&transfer.log, LogFormat::default())
        .map_err(system("cannot start the logging thread"))
        .map_err(failed)?;
    let task = CompareTask {
        source: first.clone(),
        destination: second.clone(),
        sizes,
        bytes: bytes.map(ByteSize::bytes),
    };
    let compared = compare(&task, &mut transfer.display(global.output)).map_err(failed)?;
    let first_difference = compared.difference;
    let equal = first_difference.is_none();
    let summary = Summary { first, second, equal, first_difference, size: compared.size };
    global.output.print(&summary, Summary::text).map_err(failed)?;
    match first_difference {
        None => Ok(()),
        Some(offset) => {
            let text = match offset == compared.size {
                false => format!("{first} and {second} differ at offset {offset}"),
                true => {
                    format!(
                        "{first} and {second} are equal up to offset {offset}, where the shorter \
                         ends"
                    )
                }
            };
            Err(Error::new(ErrorKind::Unequal, text))
        }
    }
}

impl Summary<'_> {
    fn text(&self) -> String {
        match self.equal {
            true => format!("{} bytes are equal ({})\n", self.size, size_text(self.size)),
            // The error names the offset.
            false => String::new(),
        }
    }
}
