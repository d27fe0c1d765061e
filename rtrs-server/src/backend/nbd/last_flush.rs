//! The last flush over a connection whose device is closed, on a thread.
//!
//! A device is closed when the last session closes its export. The writes since the last flush are
//! then made durable: the server may be restarted before the next session opens the export, and
//! without a connection no loss would be detected.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;

use nbd_bridge::flush;
use rtrs_core::time::Duration;

use super::changes::Account;
use super::shared::Shared;

/// Maximum time for the flush.
const FLUSH_MAX: Duration = Duration::from_secs(30);

/// Flushes over an idle connection, closes the connection, and removes its account. Unflushed
/// changes count as a loss.
pub(super) fn begin(shared: &Arc<Shared>, account: &Arc<Account>, fd: OwnedFd, structured: bool) {
    let of = Arc::clone(shared);
    let own = Arc::clone(account);
    let thread = thread::Builder::new().name("nbd-flush".into()).spawn(move || {
        let mark = of.changes.mark();
        match flush(fd, structured, FLUSH_MAX) {
            Ok(()) => own.settle(mark),
            Err(error) => of.log_loss(&own, &format!("cannot flush a closed device: {error}")),
        }
        of.changes.leave(&own);
    });
    if let Err(error) = thread {
        shared.log_loss(account, &format!("cannot flush a closed device: {error}"));
        shared.changes.leave(account);
    }
}
