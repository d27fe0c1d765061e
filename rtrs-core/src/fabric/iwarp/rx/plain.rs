//! Input that does not come directly from a socket: decrypted records, which are already in
//! staging.

use super::super::qp::QpMachine;
use super::super::state::CoreState;

impl QpMachine {
    /// Accepts `len` bytes of the stream that are in staging at `at`, after the bytes already
    /// staged; moves these up to close the gap left by the record framing. Before `open`, bytes are
    /// only stored.
    pub(in super::super) fn rx_plain(
        &mut self,
        core: &mut CoreState,
        mut at: usize,
        mut len: usize,
    ) {
        if self.failure.is_some() {
            return;
        }
        if let Some(direct) = &mut self.rx.direct {
            let placed = direct.rest.len().min(len);
            if let (Some(target), Some(rest)) = (
                direct.rest.slice(0, placed),
                direct.rest.slice(placed, direct.rest.len() - placed),
            ) {
                target.region().copy_from(target.offset(), &self.stage, at, placed);
                direct.rest = rest;
            }
            core.counters.bytes_copied += placed as u64;
            (at, len) = (at + placed, len - placed);
        }
        let staged = self.rx.write - self.rx.read;
        if staged > 0 {
            self.stage.copy_from(at - staged, &self.stage, self.rx.read, staged);
        }
        (self.rx.read, self.rx.write) = (at - staged, at + len);
        if self.terms.is_some()
            && let Err(fault) = self.parse(core)
        {
            self.fail(&fault);
        }
    }

    /// Returns the offset and length of the staged data.
    pub(in super::super) fn staged(&self) -> (usize, usize) {
        (self.rx.read, self.rx.write - self.rx.read)
    }

    /// Skips staged bytes that are not frames.
    pub(in super::super) fn skip_staged(&mut self, len: usize) {
        self.rx.read = (self.rx.read + len).min(self.rx.write);
    }

    /// Moves the staged data to the start of staging.
    pub(in super::super) fn move_staged(&mut self) {
        let (at, len) = self.staged();
        self.stage.copy_from(0, &self.stage, at, len);
        (self.rx.read, self.rx.write) = (0, len);
    }
}
