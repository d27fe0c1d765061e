//! `top` for both daemons: live rates of sessions, paths and exports.
//!
//! A daemon's command supplies a function that requests counters ([`Group`]); everything else is
//! here. On a terminal the view fills the screen and responds to keys (`screen.rs`). Otherwise each
//! interval is printed as a few lines of text, or one line of JSON. Rates are the differences
//! between two samples (`rates.rs`), so nothing extra is measured on an IO path. A session that
//! ends, appears or restarts has no rates for that interval, and does not end the command.

mod rates;
mod screen;
mod table;

use std::io::{self, IsTerminal, Write};
use std::time::{Instant, SystemTime};

use clap::Args;

use crate::settings::{
    CommandError, ErrorClass, HOUR, MILLISECOND, Output, Time, printable, write_text,
};
use crate::time::Duration;

pub use rates::{Counters, Entry, Group, PartTimes, ReadsWrites, Row, Sample, View};
pub use table::Layout;

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct IntervalArgs {
    /// Time between two samples, 100ms to 1h
    ///
    /// Rates are averages over this time.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub interval: Time<{ 100 * MILLISECOND }, HOUR>,

    /// Stop after this many intervals
    ///
    /// Otherwise, q or Ctrl-C stops the command.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,

    /// Print one interval as plain lines, then exit
    ///
    /// Takes two samples, one interval apart, and prints lines even on a terminal.
    #[arg(long, conflicts_with = "count")]
    pub once: bool,
}

/// Function that requests the counters from the daemons.
trait Source<K: ErrorClass>: FnMut() -> Result<Vec<Group>, CommandError<K>> {}

impl<K: ErrorClass, F: FnMut() -> Result<Vec<Group>, CommandError<K>>> Source<K> for F {}

fn sample<K: ErrorClass>(source: &mut impl Source<K>) -> Result<Sample, CommandError<K>> {
    let at = Instant::now();
    Ok(Sample { at, groups: source()? })
}

/// Returns the time in seconds since 1970.
fn unix_time() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |time| time.as_secs_f64())
}

/// Waits for the end of an interval that began at `begin`, and returns that end.
fn wait_until_end(begin: Instant, interval: Duration) -> Instant {
    // A sample that took longer than an interval is not compensated for.
    let end = (begin + interval).max(Instant::now());
    std::thread::sleep(end.saturating_duration_since(Instant::now()));
    end
}

/// Shows the rates of the groups that `source` returns until the user or `args` stops it. `title`
/// is the command.
///
/// # Errors
/// Returns the error of the first sample, and of the last one if there is no later one to show;
/// [`ErrorClass::SYSTEM`] if the output cannot be written.
pub fn run<K: ErrorClass>(
    title: &str,
    args: &IntervalArgs,
    output: Output,
    mut source: impl FnMut() -> Result<Vec<Group>, CommandError<K>> + Send + 'static,
) -> Result<(), CommandError<K>> {
    let first = sample(&mut source)?;
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let shown = if is_terminal && output == Output::Text && !args.once {
        screen::run(title, args, first, source)
    } else {
        lines(args, output, first, source)
    };
    shown.or_else(|end| match end {
        End::Failed(error) => Err(error),
        // A reader such as `head` may close its end at any time, which is no error.
        End::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        End::Output(error) => Err(CommandError::with_source(K::SYSTEM, "cannot print", error)),
    })
}

/// Reason why there is nothing more to show.
enum End<K: ErrorClass> {
    /// The last sample failed.
    Failed(CommandError<K>),
    /// The output cannot be written.
    Output(io::Error),
}

impl<K: ErrorClass> From<io::Error> for End<K> {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Prints each interval when it ends.
fn lines<K: ErrorClass>(
    args: &IntervalArgs,
    output: Output,
    mut before: Sample,
    mut source: impl Source<K>,
) -> Result<(), End<K>> {
    let count = if args.once { Some(1) } else { args.count };
    let layout = Layout::default();
    let mut end = before.at;
    for number in 1_u64.. {
        end = wait_until_end(end, args.interval.get());
        let is_last = Some(number) == count;
        match sample(&mut source) {
            Ok(now) => {
                let view = View::between(&before, &now, unix_time());
                before = now;
                write_text(&match output {
                    Output::Json => format!("{}\n", serde_json::json!(view)),
                    Output::Text => layout.lines(&view).join("\n") + "\n",
                })?;
                if output == Output::Text && !is_last {
                    write_text("\n")?;
                }
            }
            Err(error) if is_last => return Err(End::Failed(error)),
            // stderr may have no reader, so an error is ignored.
            Err(error) => drop(writeln!(io::stderr(), "{}", printable(&error.chain().to_string()))),
        }
        if is_last {
            break;
        }
    }
    Ok(())
}
