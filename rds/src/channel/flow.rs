//! Counters, shared with the node, of the payload that a socket's users have sent and taken, and
//! the message rings in the same memory.
//!
//! As in the kernel, the buffers of a socket hold only payload; they include the connection between
//! user and node. So users compare the payload they have sent with the payload released, which the
//! board shows, and the node compares the payload it has passed on with the payload they have
//! taken. Each socket has its own counters, so a user of one socket cannot change those of another.
//!
//! Users update the counters after sending or receiving. If a user is killed in between, a sent
//! message does not count against the buffer, and a received message counts as waiting until the
//! node finds the connection empty.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rtrs_base::mem::{
    DeliveryReader, DeliveryWriter, OtherEnds, OwnEnds, RingSizes, RingWriter, SharedCounters,
    WakeToken, Written, create_ring, open_ring,
};

use super::packet::Packet;
use super::ring::{LONG_LEN, NodeRing, RING_LEN, put};

/// Payload that users have sent.
const SENT: usize = 0;
/// Number of messages that users have begun to send over the socket, excluding those that failed.
const BY_SOCKET: usize = 1;
/// Payload that users have received. In a separate cache line, since the node reads it in each
/// turn.
const TAKEN: usize = 16;
const SIZES: RingSizes = RingSizes { counters: 17, ring: RING_LEN, long: LONG_LEN };

/// Counters and rings of a socket, for its users.
#[derive(Debug)]
pub struct Flow {
    counters: SharedCounters,
    ring: RingWriter,
    /// Ring with messages for the users.
    pub(crate) incoming: DeliveryReader,
}

impl Flow {
    /// Opens the counters and the rings of a socket.
    ///
    /// # Errors
    /// The system's error; `InvalidData` if the memory is not a socket's.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let OtherEnds { counters, outgoing, incoming } = open_ring(fd, SIZES)?;
        Ok(Self { counters, ring: outgoing, incoming })
    }

    /// Adds a message to the ring.
    pub(crate) fn put(&self, packet: &Packet, payload: &[IoSlice<'_>]) -> Written {
        put(&self.ring, packet, payload, || self.counters.get(BY_SOCKET))
    }

    /// Records that the node has been woken.
    pub(crate) fn woken(&self, token: WakeToken) {
        self.ring.woken(token);
    }

    /// Returns the position in the ring after all messages added so far.
    pub(crate) fn position(&self) -> u32 {
        self.ring.position()
    }

    /// Counts a message that `send` sends over the socket.
    pub(crate) fn by_socket<E>(&self, send: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        // Counted before sending, so that no message in the ring overtakes this one. A process that
        // is killed in between makes the node look at the socket too often.
        self.counters.add(BY_SOCKET, 1);
        let sent = send();
        if sent.is_err() {
            self.counters.add(BY_SOCKET, u32::MAX);
        }
        sent
    }

    /// Records a message that was sent.
    pub fn sent(&self, len: u32) {
        self.counters.add(SENT, len);
    }

    /// Returns the payload that has been sent but not released.
    pub fn in_flight(&self, released: u32) -> usize {
        // A message may be released before its sender has counted it.
        distance(released, self.counters.get(SENT))
    }

    /// Records a received message. Returns true if the total reaches `mark`.
    pub fn taken(&self, len: u32, mark: impl FnOnce() -> Option<u32>) -> bool {
        let before = self.counters.add(TAKEN, len);
        let after = before.wrapping_add(len);
        // The mark is read after the total has changed, because the node reads the total after it
        // has changed the mark.
        mark().is_some_and(|mark| distance(before, mark) > 0 && distance(after, mark) == 0)
    }
}

/// Returns how far the total `from` is behind `to`; 0 if it is not behind.
fn distance(from: u32, to: u32) -> usize {
    usize::try_from(to.wrapping_sub(from).cast_signed()).unwrap_or(0)
}

/// Counters and rings of a socket, for the node, and what the node has read and passed on. Totals
/// wrap.
#[derive(Debug)]
pub(crate) struct NodeFlow {
    counters: SharedCounters,
    pub(crate) ring: NodeRing,
    /// Ring with messages for users.
    pub(crate) outgoing: DeliveryWriter,
    fd: OwnedFd,
    /// Payload read from users.
    received: u32,
    /// Payload passed on to users.
    passed: u32,
    /// Payload that users have taken, when last read.
    taken: u32,
    /// Payload taken by users that did not count it.
    uncounted: u32,
}

impl NodeFlow {
    /// Creates the counters and the rings of a socket.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn create() -> io::Result<Self> {
        let OwnEnds { counters, incoming, outgoing, fd } = create_ring("rds-flow", SIZES)?;
        let ring = NodeRing::new(incoming);
        let (received, passed, taken, uncounted) = (0, 0, 0, 0);
        Ok(Self { counters, ring, outgoing, fd, received, passed, taken, uncounted })
    }

    /// Returns the descriptor for users.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Records a message read from a user.
    pub(crate) fn received(&mut self, len: usize) {
        self.received = self.received.wrapping_add(word(len));
    }

    /// Returns the total released if this much of the payload read is still in flight.
    pub(crate) fn released(&self, in_flight: usize) -> u32 {
        self.received.wrapping_sub(word(in_flight))
    }

    /// Records a message passed on to users.
    pub(crate) fn passed(&mut self, len: usize) {
        self.passed = self.passed.wrapping_add(word(len));
    }

    /// Whether users may not have taken all the payload that was passed on.
    pub(crate) fn has_untaken(&self) -> bool {
        self.taken != self.passed
    }

    /// Returns the payload that users have taken since the last call.
    pub(crate) fn take(&mut self) -> usize {
        let counted = self.counters.get(TAKEN);
        let total = counted.wrapping_add(self.uncounted);
        let excess = distance(self.passed, total);
        // Users counted late, or wrongly: no more can be taken than was passed on.
        self.uncounted = self.uncounted.wrapping_sub(word(excess));
        self.advance(total.wrapping_sub(word(excess)))
    }

    /// Returns the payload that users have taken since the last call, if they have taken
    /// everything.
    pub(crate) fn take_all(&mut self) -> usize {
        self.uncounted = self.passed.wrapping_sub(self.counters.get(TAKEN));
        self.advance(self.passed)
    }

    fn advance(&mut self, total: u32) -> usize {
        let new = distance(self.taken, total);
        self.taken = self.taken.wrapping_add(word(new));
        new
    }

    /// Returns the total that users reach once they have taken `more` more bytes.
    pub(crate) fn mark(&self, more: usize) -> u32 {
        self.taken.wrapping_sub(self.uncounted).wrapping_add(word(more))
    }
}

fn word(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (NodeFlow, Flow) {
        let node = NodeFlow::create().unwrap();
        let user = Flow::open(node.fd()).unwrap();
        (node, user)
    }

    #[test]
    fn sent_messages_count_until_they_are_released() {
        let (mut node, user) = pair();
        for round in 0..10 {
            assert_eq!(user.in_flight(node.released(0)), 0, "{round}");
            user.sent(1000);
            assert_eq!(user.in_flight(node.released(0)), 1000);
            node.received(1000);
            assert_eq!(user.in_flight(node.released(400)), 400);
            // The payload is released before the sender has counted it.
            node.received(999_999_000);
            assert_eq!(user.in_flight(node.released(0)), 0);
            user.sent(999_999_000);
        }
    }

    #[test]
    fn passed_messages_count_until_they_are_taken() {
        let (mut node, user) = pair();
        for _ in 0..10 {
            assert!(!node.has_untaken());
            node.passed(1_000_000_000);
            let mark = node.mark(600_000_000);
            assert!(!user.taken(500_000_000, || Some(mark)));
            assert_eq!((node.take(), node.take()), (500_000_000, 0));
            assert!(user.taken(100_000_000, || Some(mark)), "the mark is reached");
            assert!(!user.taken(400_000_000, || Some(mark)), "once");
            assert!(node.has_untaken());
            assert_eq!(node.take(), 500_000_000);
        }
    }

    #[test]
    fn messages_that_are_not_counted_are_taken_when_all_are() {
        let (mut node, user) = pair();
        node.passed(1000);
        user.taken(700, || None);
        assert_eq!((node.take(), node.take_all(), node.take()), (700, 300, 0));
        node.passed(500);
        let mark = node.mark(200);
        assert!(user.taken(200, || Some(mark)));
        assert_eq!(node.take(), 200);
        // The process was not killed, only late.
        user.taken(300, || None);
        assert_eq!(node.take(), 300);
        user.taken(300, || None);
        assert_eq!(node.take(), 0, "not more than was passed on");
        node.passed(100);
        assert_eq!(node.take(), 0);
        user.taken(100, || None);
        assert_eq!(node.take(), 100);
    }
}
