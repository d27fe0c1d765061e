//! Precedence of a connection whose read waits for memory.

/// Precedence of one connection over larger reads of others.
#[derive(Debug, Default)]
pub(crate) struct FirstReader {
    /// Connection whose read waits for memory.
    slot: Option<usize>,
    /// Whether other clients are not reading their replies in the meantime.
    pub(crate) beside_unread: bool,
}

impl FirstReader {
    /// Whether another connection takes precedence over this one.
    pub(super) fn is_other(&self, slot: usize) -> bool {
        self.slot.is_some_and(|first| first != slot)
    }

    /// Connection that has precedence.
    pub(crate) fn slot(&self) -> Option<usize> {
        self.slot
    }

    /// Gives precedence to a connection, unless another has it.
    pub(super) fn wait(&mut self, slot: usize) {
        self.slot.get_or_insert(slot);
    }

    /// Ends the wait of a connection.
    pub(crate) fn stop(&mut self, slot: usize) {
        if self.slot == Some(slot) {
            self.slot = None;
        }
    }
}
