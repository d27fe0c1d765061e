//! Numbers of messages and their bytes.

use std::ops::{AddAssign, SubAssign};

use super::config::MESSAGE_COST;

/// Messages, and the bytes of their payloads. Buffers of sockets are compared with the payload, as
/// in the kernel, and memory limits with the cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) messages: usize,
    pub(super) payload: usize,
}

impl Amount {
    /// Returns the amount of one message with a payload of `len` bytes.
    pub(super) fn one(len: usize) -> Self {
        Self { messages: 1, payload: len }
    }

    /// Returns the bytes that count in memory limits.
    pub(super) fn cost(self) -> usize {
        self.payload + self.messages * MESSAGE_COST
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Self) {
        self.messages += other.messages;
        self.payload += other.payload;
    }
}

impl SubAssign for Amount {
    fn sub_assign(&mut self, other: Self) {
        self.messages -= other.messages;
        self.payload -= other.payload;
    }
}
