//! Steps of the commands: open both ends, run the pieces, flush, verify.

use std::sync::mpsc;

use rtrs_core::rt::{Forwarding, Signal};

use super::open::{Target, destination, source};
use super::progress::Progress;
use super::run::{Ends, Mode, Outcome, Totals, run};
use super::side::{Results, Setup, Sizes, Wake, Which};
use crate::daemon::signals::forward_signals;
use crate::error::{Error, ErrorKind, usage};

/// Requested copy.
#[derive(Clone, Debug)]
pub(crate) struct CopyTask {
    pub(crate) source: String,
    pub(crate) destination: String,
    pub(crate) sizes: Sizes,
    /// The whole destination reads as zeroes.
    pub(crate) destination_is_zero: bool,
    /// Make the result durable.
    pub(crate) flush: bool,
    /// Read the destination afterwards and compare it with the source.
    pub(crate) verify: bool,
}

/// Result of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Bytes of the source.
    pub(crate) size: u64,
    /// Bytes of data that were written.
    pub(crate) data: u64,
    /// Bytes that were zeroed.
    pub(crate) zeroes: u64,
    /// Bytes of zeroes that the destination already contained.
    pub(crate) skipped: u64,
    /// Bytes of the destination beyond the last block of the copy, which did not change.
    pub(crate) unchanged: u64,
}

/// Requested comparison.
#[derive(Clone, Debug)]
pub(crate) struct CompareTask {
    pub(crate) source: String,
    pub(crate) destination: String,
    pub(crate) sizes: Sizes,
    /// Number of bytes to compare; None for all.
    pub(crate) bytes: Option<u64>,
}

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compared {
    /// Lowest offset at which the ends differ, or where the shorter one ends.
    pub(crate) difference: Option<u64>,
    /// Size of the shorter end, or the number of bytes that were to be compared.
    pub(crate) size: u64,
}

/// Creates the parameters of both ends, whose results arrive at the receiver.
fn setups(sizes: Sizes) -> ([Setup; 2], mpsc::Sender<Wake>, mpsc::Receiver<Wake>) {
    let (wakes, inbox) = mpsc::channel();
    let setup = |side| Setup { sizes, results: Results { side, wakes: wakes.clone() } };
    (Which::ALL.map(setup), wakes, inbox)
}

/// Ends the run on a signal, or when the terminal is closed.
fn end_on_signals(wakes: mpsc::Sender<Wake>) -> Result<Forwarding, Error> {
    forward_signals(move |signal| {
        if signal != Signal::Dump {
            // Once the run has ended, there is no receiver.
            drop(wakes.send(Wake::Signal));
        }
    })
}

/// Copies one end to the other.
///
/// # Errors
/// [`ErrorKind::Usage`] if the ends do not match, before anything is written; otherwise the first
/// error, with the end and the offset.
pub(crate) fn copy(task: &CopyTask, progress: &mut Progress) -> Result<Copied, Error> {
    copy_until(task, progress, end_on_signals)
}

/// Copies like [`copy`]. The result of `interrupt` is kept until the copy ends.
pub(super) fn copy_until<T>(
    task: &CopyTask,
    progress: &mut Progress,
    interrupt: impl FnOnce(mpsc::Sender<Wake>) -> Result<T, Error>,
) -> Result<Copied, Error> {
    let CopyTask { source: from, destination: to, sizes, .. } = task;
    let streams = [from, to].map(|text| Target::new(text) == Target::Stream);
    if task.verify && streams.contains(&true) {
        return Err(usage("--verify reads both ends again, which is not possible with -"));
    }
    let ([of_source, of_destination], wakes, inbox) = setups(*sizes);
    let opened = source(from, of_source)?;
    let written = destination(to, &opened, of_destination)?;
    let _kept = interrupt(wakes)?;
    let (size, capacity) = (opened.size, written.size);
    let mut ends = Ends::new(opened.end, written.end, inbox, *sizes);
    let mode = Mode::Copy { destination_is_zero: task.destination_is_zero && !streams[1] };
    let Outcome { totals, size, .. } = run(&mut ends, mode, size.unwrap_or(u64::MAX), progress)?;
    ends.finish(size, task.flush)?;
    if task.verify {
        verify(&mut ends, size, progress)?;
    }
    let Totals { data, zeroes, skipped, .. } = totals;
    let written = size.next_multiple_of(ends.limits(Which::Destination).block.into());
    let unchanged = capacity.map_or(0, |capacity| capacity.saturating_sub(written));
    Ok(Copied { size, data, zeroes, skipped, unchanged })
}

fn verify(ends: &mut Ends, size: u64, progress: &mut Progress) -> Result<(), Error> {
    match run(ends, Mode::Verify, size, progress)?.difference {
        None => Ok(()),
        Some(offset) => {
            let (from, to) = (ends.name(Which::Source), ends.name(Which::Destination));
            let text = format!("the copy is wrong: {to} differs from {from} at offset {offset}");
            Err(Error::new(ErrorKind::System, text))
        }
    }
}

/// Compares two ends.
///
/// # Errors
/// The first error, with the end and the offset.
pub(crate) fn compare(task: &CompareTask, progress: &mut Progress) -> Result<Compared, Error> {
    compare_until(task, progress, end_on_signals)
}

/// Compares like [`compare`]. The result of `interrupt` is kept until the comparison ends.
pub(super) fn compare_until<T>(
    task: &CompareTask,
    progress: &mut Progress,
    interrupt: impl FnOnce(mpsc::Sender<Wake>) -> Result<T, Error>,
) -> Result<Compared, Error> {
    let CompareTask { source: one, destination: other, sizes, bytes } = task;
    if Target::new(other) == Target::Stream {
        return Err(usage("only the first end of a comparison can be -"));
    }
    let ([of_one, of_other], wakes, inbox) = setups(*sizes);
    let first = source(one, of_one)?;
    let second = source(other, of_other)?;
    let _kept = interrupt(wakes)?;
    let (from, to) = (first.size, second.size.unwrap_or(u64::MAX));
    let limit = |size: u64| bytes.map_or(size, |bytes| bytes.min(size));
    let mut ends = Ends::new(first.end, second.end, inbox, *sizes);
    let all = from.map_or_else(|| limit(u64::MAX), |from| limit(from.min(to)));
    let Outcome { size, difference, .. } = run(&mut ends, Mode::Compare, all, progress)?;
    // Without a size, the run has found the end of the source.
    let (from, to) = (limit(from.unwrap_or(size)), limit(to));
    let shorter = (from != to).then_some(from.min(to));
    Ok(Compared { difference: difference.or(shorter), size: from.min(to) })
}
