//! Bytes that did not come straight from a socket: opened records, which lie in staging already.

use super::super::qp::QpMachine;
use super::super::state::CoreState;

impl QpMachine {
    /// `len` bytes of the stream lie in staging at `at`, behind what is staged already; as records
    /// leave gaps, that moves up to them. Before `open` they are only kept.
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

    /// What is staged: where, and how much.
    pub(in super::super) fn staged(&self) -> (usize, usize) {
        (self.rx.read, self.rx.write - self.rx.read)
    }

    /// Passes over staged bytes that are no frames.
    pub(in super::super) fn skip_staged(&mut self, len: usize) {
        self.rx.read = (self.rx.read + len).min(self.rx.write);
    }

    /// Moves what is staged to the start of staging.
    pub(in super::super) fn move_staged(&mut self) {
        let (at, len) = self.staged();
        self.stage.copy_from(0, &self.stage, at, len);
        (self.rx.read, self.rx.write) = (0, len);
    }
}
