//! What all shards know about one export of an NBD server, and what may be lost there.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};

use nbd_bridge::ServerAddress;
use nbd_bridge::client::Offered;
use parking_lot::Mutex;
use rtrs_core::block::{Geometry, SharedSize, WakeHandle};
use rtrs_core::time::Duration;

/// How long IOs wait for a server that is gone.
pub(super) const GONE_MAX: Duration = Duration::from_secs(300);

/// Which export, and how it is exported on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdOptions {
    /// The server.
    pub address: ServerAddress,
    /// The name of the export there.
    pub name: String,
    /// Refuse writes.
    pub read_only: bool,
    /// The wanted logical block in bytes, a power of two.
    pub block: Option<u32>,
    /// How long the server may take to answer when a connection is made.
    pub open_max: Duration,
}

/// A queue that wants a connection.
#[derive(Debug)]
pub(super) struct Wanted {
    /// Where the connection goes.
    pub(super) made: mpsc::Sender<(OwnedFd, Offered)>,
    /// The queue is there as long as this has a holder.
    pub(super) asker: Weak<()>,
    /// Wakes its shard.
    pub(super) wake: WakeHandle,
}

/// What all shards know about one export.
#[derive(Debug)]
pub(super) struct Shared {
    /// For people.
    pub(super) text: String,
    pub(super) how: NbdOptions,
    pub(super) geometry: Geometry,
    pub(super) size: Arc<SharedSize>,
    /// Makes connections.
    pub(super) dialer: mpsc::Sender<Wanted>,
    /// The connection that it was opened with, for the first shard.
    pub(super) first: Mutex<Option<(OwnedFd, Offered)>>,
    /// Changes that were answered without being durable.
    pub(super) changes: AtomicU64,
    /// A good flush has covered, or a loss has counted, so many of them.
    pub(super) settled: AtomicU64,
    /// Times that changes may have been lost.
    pub(super) losses: AtomicU64,
    /// Losses that a flush has failed for.
    pub(super) reported: AtomicU64,
}

impl Shared {
    /// A change was answered that is not durable.
    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// All changes that were answered by now.
    pub(super) fn mark(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// A connection has ended, perhaps with its server.
    pub(super) fn lost_connection(&self) {
        let mark = self.mark();
        if self.settled.fetch_max(mark, Ordering::SeqCst) < mark {
            self.losses.fetch_add(1, Ordering::SeqCst);
            tracing::error!(
                "{}: the connection has ended with writes that were not flushed; they may be lost, \
                 and the next flush fails",
                self.text
            );
        }
    }

    /// A flush that began after `mark` changes is good as far as the server knows. False when it
    /// has to report a loss.
    pub(super) fn flushed(&self, mark: u64) -> bool {
        self.settled.fetch_max(mark, Ordering::SeqCst);
        let losses = self.losses.load(Ordering::SeqCst);
        self.reported.fetch_max(losses, Ordering::SeqCst) >= losses
    }
}
