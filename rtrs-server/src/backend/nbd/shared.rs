//! State of one export on an NBD server, shared by all shards.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak, mpsc};

use nbd_bridge::ServerAddress;
use nbd_bridge::client::Offered;
use parking_lot::Mutex;
use rtrs_core::block::{Geometry, SharedSize, WakeHandle};
use rtrs_core::time::Duration;

use super::changes::{Account, Changes};

/// Maximum time for which IOs wait for an unavailable server.
pub(super) const GONE_MAX: Duration = Duration::from_secs(300);

/// Options for exporting an NBD server's export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdOptions {
    /// Address of the server.
    pub address: ServerAddress,
    /// Name of the export on the server.
    pub name: String,
    /// Whether to refuse writes.
    pub read_only: bool,
    /// Requested logical block size in bytes, a power of two.
    pub block: Option<u32>,
    /// Maximum time for the server to answer while a connection is being established.
    pub open_max: Duration,
}

/// A queue's request for a connection.
#[derive(Debug)]
pub(super) struct Wanted {
    /// Destination for the connection.
    pub(super) made: mpsc::Sender<(OwnedFd, Offered)>,
    /// Expires with the queue.
    pub(super) asker: Weak<()>,
    /// Wakes the queue's shard.
    pub(super) wake: WakeHandle,
}

/// State of one export, shared by all shards.
#[derive(Debug)]
pub(super) struct Shared {
    /// Name for display.
    pub(super) text: String,
    pub(super) how: NbdOptions,
    pub(super) geometry: Geometry,
    pub(super) size: Arc<SharedSize>,
    /// Sends requests to the thread that establishes connections.
    pub(super) dialer: mpsc::Sender<Wanted>,
    /// Connection over which the export was opened, for use by the first shard.
    pub(super) first: Mutex<Option<(OwnedFd, Offered)>>,
    /// Whether the server allows several connections, so that each shard has its own.
    pub(super) multi: bool,
    /// Why the last attempt to reconnect failed, as long as a queue needs a connection.
    pub(super) outage: Mutex<Option<String>>,
    /// Changes that may be lost if the server is.
    pub(super) changes: Changes,
}

impl Shared {
    /// Counts a loss if a connection has unsettled changes, and logs the reason.
    pub(super) fn log_loss(&self, account: &Account, why: &str) {
        if self.changes.lose(account) {
            tracing::error!(
                "{}: {why}; unflushed writes may be lost, and the next flush will fail",
                self.text
            );
        }
    }
}
