//! Network block devices within a program: a volume served by `rtrs-server` or by Linux's
//! `rnbd-server` module, over one or more paths, without NBD and without a kernel device.
//!
//! A [`Builder`] opens a [`Volume`] and its [`Queue`]s. Each queue belongs to an IO thread of the
//! library; these threads handle connections, heartbeats, retries over other paths and fences, so a
//! program may spend as long as it likes on its own work. The engine and its settings are those of
//! `rtrs-client attach`.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! fn main() -> Result<(), rtrs::Error> {
//!     let (volume, mut queues) =
//!         rtrs::Builder::new("vol0").path("tcp://10.0.0.2").path("tcp://10.1.0.2").open()?;
//!     let queue = &mut queues[0];
//!     queue.pwrite(0, &[7; 4096])?;
//!     queue.flush()?;
//!     let mut block = [0; 4096];
//!     queue.pread(0, &mut block)?;
//!     assert_eq!(block, [7; 4096]);
//!     volume.close(Duration::from_secs(10))?;
//!     Ok(())
//! }
//! ```
//!
//! The blocking calls run one request at a time. To run several, [`Queue::submit`] takes a
//! [`Request`], and [`Queue::poll`] returns a [`Completion`] with the request's memory.
//!
//! # Memory
//! A request owns its memory, a [`Buffer`], until the request completes. Buffers are made from
//! vectors without copying. Over TCP and TLS, data is sent from them and received into them; over
//! RDMA, it is copied through registered memory, `queue-depth` times `io-max` bytes for each queue.
//! [`Memory`] that is registered with the volume is used in place over RDMA too.
//!
//! # Threads and processes
//! A [`Queue`] can be moved to another thread, but not shared; a [`Volume`] can be shared. After a
//! fork, the child can use neither: calls fail with [`ErrorKind::Forked`], and dropping them
//! changes nothing in the parent. The library installs no signal handler and logs through `tracing`
//! only if the program has a subscriber.
//!
//! # Request errors
//! The completion of a failed request has an [`IoError`]. What happens while no path is connected,
//! and when a server does not answer, depends on the settings `no-path` and `io-timeout`.

#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod blocking;
mod buffer;
mod builder;
mod error;
mod memory;
mod process;
mod queue;
mod request;
mod volume;

pub use buffer::Buffer;
pub use builder::Builder;
pub use error::{Error, ErrorKind, IoError};
pub use memory::{Memory, Part};
pub use queue::{Queue, Rejected};
pub use request::{Completion, Extent, PIECES_MAX, Request};
pub use volume::{Event, Geometry, OpStats, PathStats, Stats, Volume};
