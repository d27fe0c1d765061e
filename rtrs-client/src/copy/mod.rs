//! Copy and comparison of volumes, files and streams: the commands `copy` and `compare`.
//!
//! Each end is a [`Side`](side::Side) that runs requests concurrently: an embedded volume
//! (`volume`), a file or block device (`file`), or a stream (`stream`). A `planner` divides the
//! work into pieces along the extents of both ends, and a `run` keeps a bounded number of pieces in
//! flight. `open` opens the ends, and `work` runs the steps of a command: checks, pieces, flush,
//! verification.

mod failure;
mod file;
mod open;
mod planner;
mod progress;
mod run;
mod side;
mod stream;
#[cfg(test)]
mod tests;
mod volume;
mod work;

pub(crate) use progress::{Position, Progress};
pub(crate) use side::Sizes;
pub(crate) use work::{CompareTask, CopyTask, compare, copy};
