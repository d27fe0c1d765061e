//! State of one export of an NBD server, shared by all shards.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak, mpsc};

use nbd_bridge::ServerAddress;
use nbd_bridge::client::Offered;
use parking_lot::Mutex;
use rtrs_core::block::{Geometry, SharedSize, WakeHandle};
use rtrs_core::time::Duration;

use super::changes::{Account, Changes};

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
    /// The server allows several connections, and each shard has its own.
    pub(super) multi: bool,
    /// What may be lost with the server.
    pub(super) changes: Changes,
}

impl Shared {
    /// Counts a loss if changes of a connection are unsettled, and logs why.
    pub(super) fn log_loss(&self, account: &Account, why: &str) {
        if self.changes.lose(account) {
            tracing::error!(
                "{}: {why}; writes that were not flushed may be lost, and the next flush fails",
                self.text
            );
        }
    }
}
