//! Flags and progress display of commands that move data.

use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use rtrs_core::settings::{ByteSize, Int, LogFilter, Output};

use super::text::{progress, size_text};
use crate::copy::{Position, Progress, Sizes};
use crate::error::{Error, usage};

/// Time between updates of a line on a terminal.
const TERMINAL_INTERVAL: Duration = Duration::from_millis(500);
/// Time between lines on other outputs.
const LINES_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum memory for all requests together.
const BYTES_MAX: u64 = 1 << 30;
/// Limits of `--request-size`.
const SIZE: std::ops::RangeInclusive<u64> = 4096..=32 << 20;

/// Flags of `copy` and `compare`.
#[derive(Debug, Args)]
pub struct TransferArgs {
    /// Number of requests in flight (1 to 1000) [default: 16]
    ///
    /// A larger number helps on networks with a long round trip.
    #[arg(long, value_name = "COUNT", default_value = "16", hide_default_value = true)]
    pub requests: Int<u16, 1, 1000>,

    /// Longest request (4k to 32M, in steps of 4k) [default: 256k]
    ///
    /// All requests together use at most 1G of memory; compare and --verify use twice as much.
    #[arg(long, value_name = "SIZE", default_value = "256k", hide_default_value = true)]
    pub request_size: ByteSize,

    /// Show the progress even if stderr is not a terminal
    ///
    /// Prints a line every 5 s. On a terminal, progress is always shown, except with -o json.
    #[arg(long)]
    pub progress: bool,

    /// Log messages to print on stderr [default: warn]
    ///
    /// Like a session's log setting.
    #[arg(long, value_name = "FILTER", default_value = "warn", hide_default_value = true)]
    pub log: LogFilter,
}

impl TransferArgs {
    /// Returns the number and size of requests.
    pub(super) fn sizes(&self) -> Result<Sizes, Error> {
        let (requests, bytes) = (self.requests.get(), self.request_size.bytes());
        let io_max = u32::try_from(bytes).ok().filter(|_| SIZE.contains(&bytes));
        let Some(io_max) = io_max.filter(|bytes| bytes.is_multiple_of(4096)) else {
            let text = format!("request-size {bytes} is not usable; use 4k to 32M in steps of 4k");
            return Err(usage(text));
        };
        if u64::from(requests) * bytes > BYTES_MAX {
            let text = format!(
                "{requests} requests of {} need more than {}; use fewer, or smaller ones",
                size_text(bytes),
                size_text(BYTES_MAX)
            );
            return Err(usage(text));
        }
        Ok(Sizes { requests, io_max })
    }

    /// Creates the display of the progress.
    pub(super) fn display(&self, output: Output) -> Progress {
        let is_terminal = io::stderr().is_terminal();
        if !self.progress && (!is_terminal || output == Output::Json) {
            return Progress::silent();
        }
        if !is_terminal {
            return Progress::new(LINES_INTERVAL, |position| {
                if let Some(position) = position {
                    progress(&format!("{}\n", line(position)));
                }
            });
        }
        let mut shown = 0;
        Progress::new(TERMINAL_INTERVAL, move |position| match position.map(line) {
            Some(line) => {
                progress(&format!("\r{line:<shown$}"));
                shown = line.len();
            }
            None => progress("\n"),
        })
    }
}

fn line(position: Position) -> String {
    let Position { verb, done, total, elapsed } = position;
    let rate = done as f64 / elapsed.as_secs_f64().max(0.001);
    let rate_text = format!("{:.1} MiB/s", rate / f64::from(1 << 20));
    let Some(total) = total else {
        return format!("{verb} {}, {rate_text}", size_text(done));
    };
    let percent = if total == 0 { 100.0 } else { done as f64 * 100.0 / total as f64 };
    let left = match done {
        0 => String::new(),
        _ => format!(", {} left", time_text(total.saturating_sub(done) as f64 / rate)),
    };
    let (done, total) = (size_text(done), size_text(total));
    format!("{verb} {done} of {total}, {percent:.0}%, {rate_text}{left}")
}

/// Formats seconds as minutes and seconds, or as hours and minutes.
fn time_text(seconds: f64) -> String {
    // The cast saturates.
    let seconds = seconds.ceil() as u64;
    match seconds / 3600 {
        0 => format!("{}:{:02} min", seconds / 60, seconds % 60),
        hours => format!("{hours}:{:02} h", seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_percent_rate_and_remaining_time() {
        let elapsed = Duration::from_secs(4);
        let text = |done, total| line(Position { verb: "copied", done, total, elapsed });
        assert_eq!(
            text(1 << 30, Some(4 << 30)),
            "copied 1.0 GiB of 4.0 GiB, 25%, 256.0 MiB/s, 0:12 min left"
        );
        assert_eq!(text(0, Some(1 << 20)), "copied 0 B of 1.0 MiB, 0%, 0.0 MiB/s");
        assert_eq!(text(0, Some(0)), "copied 0 B of 0 B, 100%, 0.0 MiB/s");
        assert_eq!(text(512 << 10, None), "copied 512.0 KiB, 0.1 MiB/s");
        assert_eq!(time_text(7_384.0), "2:03 h");
    }
}
