//! Queue of messages to one peer, with their sequence numbers.
//!
//! A message is assigned its sequence number when it is first queued on a connection. Messages of a
//! lost connection return to the front, in order, with their numbers, and are marked as
//! retransmitted; messages that the connection had not begun to send give up their numbers.

use std::collections::VecDeque;

use rtrs_base::mutated;

use super::amount::Amount;
use super::event::SocketId;
use super::shares::UserId;
use crate::wire::{Header, RETRANSMITTED};

/// Owner of a message, which determines what happens when the message's connection is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// Sent by a socket, and counted in its send buffer. Resent until acknowledged.
    Socket(SocketId),
    /// A canceled message, or a message of a closed socket: sent at most once.
    Nobody,
    /// The answer to a ping or probe. Resent until acknowledged.
    Pong,
    /// A probe from this node. Each connection gets a new probe.
    Probe,
}

/// A message to be sent.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) owner: Owner,
    /// User whose share of the memory the message uses, even after its socket is closed.
    pub(super) user: UserId,
    pub(super) sport: u16,
    pub(super) dport: u16,
    pub(super) payload: Vec<u8>,
    pub(super) extensions: [u8; 16],
    /// Sequence number, while a connection has the message queued or has begun to send it.
    pub(super) sequence: Option<u64>,
    /// A connection has begun to send the message, so the peer may have it.
    pub(super) is_begun: bool,
    /// Notification that the sender requested.
    pub(super) completion: Option<Completion>,
}

/// Notification to a socket that one of its messages no longer needs resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Completion {
    pub(super) socket: SocketId,
    pub(super) cookie: u32,
}

impl Message {
    pub(super) fn amount(&self) -> Amount {
        Amount::one(self.payload.len())
    }

    /// Returns the amount that the message counts toward memory limits.
    pub(super) fn cost(&self) -> usize {
        self.amount().cost()
    }
}

/// The queue for one peer.
#[derive(Debug)]
pub(super) struct Outbox {
    queue: VecDeque<Message>,
    next_tx: u64,
}

impl Default for Outbox {
    fn default() -> Self {
        Self { queue: VecDeque::new(), next_tx: 1 }
    }
}

impl Outbox {
    pub(super) fn push(&mut self, message: Message) {
        self.queue.push_back(message);
    }

    pub(super) fn next_tx(&self) -> u64 {
        self.next_tx
    }

    /// Whether the next message has been sent before.
    pub(super) fn begins_with_a_repeat(&self) -> bool {
        self.queue.front().is_some_and(|message| message.is_begun)
    }

    /// Returns all messages, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Message> {
        self.queue.iter()
    }

    /// Removes the next message for sending.
    pub(super) fn pop(&mut self) -> Option<(Header, Message)> {
        let message = self.queue.pop_front()?;
        Some(self.number(message))
    }

    /// Creates a message's header, assigning a sequence number if it has none.
    pub(super) fn number(&mut self, mut message: Message) -> (Header, Message) {
        let is_repeat = message.is_begun && !mutated!(RdsRepeatUnmarked);
        let flags = if is_repeat { RETRANSMITTED } else { 0 };
        let sequence = *message.sequence.get_or_insert_with(|| {
            self.next_tx += 1;
            self.next_tx - 1
        });
        let header = Header {
            sequence,
            len: u32::try_from(message.payload.len()).unwrap_or(u32::MAX),
            sport: message.sport,
            dport: message.dport,
            flags,
            extensions: message.extensions,
        };
        (header, message)
    }

    /// Takes back the messages of a lost connection, in order. Messages that must not be resent are
    /// returned, along with all messages without an owner: these may follow a dropped message, and
    /// nothing arrives after a gap.
    pub(super) fn take_back(&mut self, lost: Vec<Message>) -> Vec<Message> {
        let mut dropped = Vec::new();
        for mut message in lost.into_iter().rev() {
            if !message.is_begun
                && let Some(sequence) = message.sequence.take()
            {
                // Messages not yet begun have the newest numbers, and are visited newest first.
                self.next_tx = self.next_tx.min(sequence);
            }
            match message.owner {
                Owner::Nobody | Owner::Probe => dropped.push(message),
                Owner::Socket(_) | Owner::Pong if mutated!(RdsLostQueuedLast) => {
                    self.queue.push_back(message);
                }
                Owner::Socket(_) | Owner::Pong => self.queue.push_front(message),
            }
        }
        dropped.extend(self.remove(|message| message.owner == Owner::Nobody));
        dropped
    }

    /// Removes the messages for which `leaves` returns true.
    pub(super) fn remove(&mut self, leaves: impl Fn(&Message) -> bool) -> Vec<Message> {
        if !self.queue.iter().any(&leaves) {
            return Vec::new();
        }
        let (gone, kept) = std::mem::take(&mut self.queue).into_iter().partition(|m| leaves(m));
        self.queue = kept;
        let gone: VecDeque<Message> = gone;
        gone.into()
    }

    /// Removes the owner of the messages for which `leaves` returns true. Returns their amount.
    pub(super) fn orphan(&mut self, leaves: impl FnMut(&Message) -> bool) -> Amount {
        orphan(self.queue.iter_mut(), leaves)
    }
}

/// Removes the owner of the messages for which `leaves` returns true. Returns their amount.
pub(super) fn orphan<'a>(
    messages: impl Iterator<Item = &'a mut Message>,
    mut leaves: impl FnMut(&Message) -> bool,
) -> Amount {
    let mut amount = Amount::default();
    for message in messages {
        if leaves(message) {
            message.owner = Owner::Nobody;
            amount += message.amount();
        }
    }
    amount
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(sport: u16, owner: Owner) -> Message {
        let payload = vec![0; 10];
        Message {
            owner,
            user: UserId::NODE,
            sport,
            dport: 2,
            payload,
            extensions: [0; 16],
            sequence: None,
            is_begun: false,
            completion: None,
        }
    }

    #[test]
    fn lost_messages_are_sent_first_with_their_number() {
        let owner = Owner::Pong;
        let mut outbox = Outbox::default();
        (2..7).for_each(|sport| outbox.push(message(sport, owner)));
        let sent: Vec<_> = (0..3).map(|_| outbox.pop().unwrap()).collect();
        assert!(sent.iter().all(|(header, _)| header.flags == 0));
        // The last of the three was not begun: its number is free again.
        let lost = sent.into_iter().map(|(h, m)| Message { is_begun: h.sequence < 3, ..m });
        assert!(outbox.take_back(lost.collect()).is_empty());
        // Queued on a new connection, which is lost before it begins to send any message.
        let lost = std::iter::from_fn(|| outbox.pop()).map(|(_, m)| m).collect();
        assert!(outbox.take_back(lost).is_empty());
        let again: Vec<(u16, u64, u8)> = std::iter::from_fn(|| outbox.pop())
            .map(|(header, m)| (m.sport, header.sequence, header.flags))
            .collect();
        let repeated = RETRANSMITTED;
        assert_eq!(again, [(2, 1, repeated), (3, 2, repeated), (4, 3, 0), (5, 4, 0), (6, 5, 0)]);
    }

    #[test]
    fn probes_and_ownerless_messages_are_not_resent() {
        let mut outbox = Outbox::default();
        for owner in [Owner::Probe, Owner::Nobody, Owner::Pong] {
            outbox.push(message(2, owner));
        }
        let sent = std::iter::from_fn(|| outbox.pop());
        let sent = sent.map(|(_, m)| Message { is_begun: true, ..m }).collect();
        assert_eq!(outbox.take_back(sent).len(), 2);
        assert_eq!(outbox.pop().unwrap().0.sequence, 3);
    }
}
