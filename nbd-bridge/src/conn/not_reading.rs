//! Memory held by a client that does not read its replies.
//!
//! While another client waits for memory, the data of finished reads whose replies are not being
//! sent is dropped. The data is reread, a limited amount at a time, once the client has read what
//! was sent before; until then, no further requests from the client are taken. The data of a read
//! may date from any time before its reply, so this is invisible to the client.

use rtrs_core::time::{Duration, Instant};

use super::Conn;
use super::parse::Piece;
use crate::notices::Notice;
use crate::shared::Shared;

/// Duration of a send after which its client is considered not to be reading.
const STALLED_AFTER: Duration = Duration::from_millis(200);
/// Maximum number of buffers into which dropped data is reread at a time.
const AGAIN_MAX: usize = 16;

impl Conn {
    /// Returns the time from which the client is considered not to be reading, if a send is
    /// running.
    pub(crate) fn stalls_at(&self) -> Option<Instant> {
        self.link.send_began().map(|began| began + STALLED_AFTER)
    }

    /// Drops the data of reads whose replies are not being sent. Returns true if there was any.
    pub(crate) fn drop_data(&mut self, now: Instant, shared: &mut Shared) -> bool {
        let Self { output, memory, .. } = self;
        let replies = output.drop_data(|row| shared.drop_data(row, memory));
        if replies == 0 {
            return false;
        }
        if let Some(left_out) = shared.notices.admit(now, Notice::NotReading) {
            tracing::warn!(
                export = shared.terms.name(),
                peer = %self.link.peer(),
                replies,
                left_out,
                "NBD client does not read its replies: their buffers are freed for other clients, \
                 and the data is read again later"
            );
        }
        true
    }

    /// Rereads dropped data if the client has read what was sent. Returns true if a read began.
    pub(super) fn read_again(&mut self, shared: &mut Shared) -> bool {
        let mut any = false;
        while let Some(row) = self.output.first_dropped() {
            let waits = self.link.is_sending() || self.memory.held() >= AGAIN_MAX;
            if waits || shared.queue.is_congested() {
                break;
            }
            let entry = shared.requests.row(row);
            let (block, one_chunk) = (entry.command.cut().block, entry.command.one_chunk());
            let rest = Piece { len: entry.unsent(), block, one_chunk };
            let Some(piece) = self.take_piece(row, rest, shared) else { break };
            self.output.pop_dropped();
            shared.requests.row(row).begin_read(piece);
            shared.submit(row);
            any = true;
        }
        any
    }
}
