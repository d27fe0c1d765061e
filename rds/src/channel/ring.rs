//! Rings through which users and their node pass messages, in addition to the unix socket.
//!
//! Each message through a unix socket costs a system call and a copy on each side. The ring is
//! memory that the users of a socket share with the node, so a message costs one copy on each side,
//! and a system call only if the node is asleep ([`PacketKind::Wake`]). In each turn, the node
//! empties the rings that it knows to be in use; it announces a sleep before it sleeps
//! (`rtrs_base::mem`).
//!
//! **Two routes.** Messages longer than [`RING_MESSAGE_MAX`] go through the socket, as does any
//! message sent while the ring is full or another thread or process is writing to it: the ring's
//! lock is tried, never awaited, so a process that was killed or stopped while holding the lock
//! slows others down but blocks none of them. A forked process uses the mapping that it inherits; a
//! process that was passed the descriptor, or was started with it, maps the memory that the node
//! passes to it. Messages must stay in the order in which they were sent, whichever processes sent
//! them:
//! - A packet on the socket carries the position of the ring at which it was sent. The node reads
//!   the packet after the messages before this position.
//! - A message in the ring carries the number of messages that users had begun to send over the
//!   socket by then. If the node has read fewer, a message on the socket may precede this one, and
//!   the node checks the socket first. If the socket is empty, none does: the messages counted have
//!   not been sent yet.
//!
//! **Full buffers.** A program polls the descriptor, so a full send buffer must make the descriptor
//! unwritable. A packet that the node leaves in the socket until there is room does that
//! (`rds/src/socket/room.rs`). Since the messages before that packet may be in the ring, the node
//! peeks at the socket, and reads a packet only once the ring is empty up to the packet's position
//! and the buffer has room.
//!
//! **Trust.** Users of a socket trust each other. The node trusts none of them: it reads every
//! index and length only once, checks it, and copies each message into its own memory, where the
//! message stays until it is acknowledged. A user that corrupts the ring loses its socket. Wrong
//! positions, numbers and sleep states only reorder or delay the messages of this socket.
//!
//! **To users.** The node puts all messages and notifications into a second ring
//! (`rtrs_base::mem::DeliveryWriter`), from which each user takes the next one without a lock.
//! Payloads above [`RING_MESSAGE_MAX`] are in an area beside it. Programs poll the socket, so the
//! node keeps a packet in it while the ring has messages ([`PacketKind::Token`]). The user that
//! takes the last message takes this token too (`rds/src/socket/incoming.rs`), so the socket is
//! readable exactly while messages wait. A user that is killed between the two leaves a token
//! without messages, which the next call takes. A user that is killed after it has taken a token
//! that was not meant for it can leave messages without a token: the node checks for that once a
//! second. A user that is killed while waiting keeps the right to wait in a receive: from then on,
//! all waits on this socket poll, which costs each a query of the time limit and lets signals
//! interrupt it.
//!
//! **A killed node** cannot announce that it is gone. Users of its sockets notice when they try to
//! wake it, when the ring or the send buffer is full, and when they receive.

use std::io::IoSlice;

use rtrs_base::mem::{Front, Malformed, RingReader, RingWriter, Written};

use super::packet::{PACKET_LEN, Packet, PacketKind};

/// Length of a ring. It exceeds the default send buffer, so messages of usual lengths fit whenever
/// the send buffer has room for them.
pub(crate) const RING_LEN: usize = 256 << 10;
/// Length of the area for longer payloads to users: two of the longest.
pub(crate) const LONG_LEN: usize = 2 << 20;
/// Maximum length of a payload in a ring.
pub(crate) const RING_MESSAGE_MAX: usize = 64 << 10;

/// Adds a message to a ring. `stamp` returns the number of messages that users have begun to send
/// over the socket.
pub(super) fn put(
    ring: &RingWriter,
    packet: &Packet,
    payload: &[IoSlice<'_>],
    stamp: impl FnOnce() -> u32,
) -> Written {
    let head = packet.encode();
    let parts = payload.iter().map(|part| &**part);
    ring.write(std::iter::once(&head[..]).chain(parts), stamp)
}

/// Next input of a socket with a ring.
#[derive(Debug)]
pub(crate) enum Next {
    /// A message in the ring.
    Message(Front),
    /// A packet on the socket, if there is one.
    Socket,
}

/// The node's end of a ring.
#[derive(Debug)]
pub(crate) struct NodeRing {
    reader: RingReader,
    is_used: bool,
    /// Number of messages read from the socket; wraps.
    by_socket: u32,
}

impl NodeRing {
    /// Uses a ring whose first message wakes the node.
    pub(super) fn new(mut reader: RingReader) -> Self {
        reader.arm();
        Self { reader, is_used: false, by_socket: 0 }
    }

    /// Whether users of the socket have used the ring.
    pub(crate) fn is_used(&mut self) -> bool {
        self.is_used = self.is_used || self.reader.has_input();
        self.is_used
    }

    /// Whether a message is waiting.
    pub(crate) fn has_input(&self) -> bool {
        self.reader.has_input()
    }

    /// Returns the next input.
    ///
    /// # Errors
    /// See [`Malformed`].
    pub(crate) fn next(&self) -> Result<Next, Malformed> {
        let front = self.reader.front()?;
        let is_next = |front: &Front| !is_ahead(front.stamp(), self.by_socket);
        Ok(front.filter(is_next).map_or(Next::Socket, Next::Message))
    }

    /// Returns the next message, whether or not one on the socket may precede it.
    ///
    /// # Errors
    /// See [`Malformed`].
    pub(crate) fn front(&self) -> Result<Option<Front>, Malformed> {
        self.reader.front()
    }

    /// Whether messages before this position are still unread.
    pub(crate) fn is_before(&self, position: u32) -> bool {
        is_ahead(position, self.reader.position())
    }

    /// Takes a message. Returns `None` if it is not one that a user may send through the ring.
    pub(crate) fn take(&mut self, front: Front) -> Option<(Packet, Vec<u8>)> {
        let len = front.len().checked_sub(PACKET_LEN).filter(|len| *len <= RING_MESSAGE_MAX)?;
        let mut head = [0; PACKET_LEN];
        self.reader.read(&front, 0, &mut head);
        let packet = Packet::decode(&head);
        let is_valid =
            |packet: &Packet| packet.kind == PacketKind::Send && packet.len as usize == len;
        let packet = packet.filter(is_valid)?;
        let payload = self.reader.read_from(&front, PACKET_LEN);
        self.reader.release(front);
        Some((packet, payload))
    }

    /// Counts a message that was read from the socket.
    pub(crate) fn read_from_socket(&mut self) {
        self.by_socket = self.by_socket.wrapping_add(1);
    }

    /// Prepares for the node to sleep. Returns false if a message is waiting.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.reader.prepare_sleep()
    }

    /// Ends the node's sleep; the node checks the ring from now on.
    pub(crate) fn awake(&mut self) {
        self.reader.awake();
    }

    /// Lets users notice that the node has closed the socket: with their next message they try to
    /// wake the node, which fails.
    pub(crate) fn close(&mut self) {
        self.reader.arm();
    }
}

/// Whether `number` is ahead of `of`; both wrap.
fn is_ahead(number: u32, of: u32) -> bool {
    number.wrapping_sub(of).cast_signed() > 0
}

#[cfg(test)]
mod tests {
    use super::super::flow::{Flow, NodeFlow};
    use super::*;

    fn send(user: &Flow, port: u16, len: usize) -> Written {
        let payload = vec![port as u8; len];
        let (a, b) = payload.split_at(len / 2);
        let packet = Packet { port, len: len as u32, ..Packet::new(PacketKind::Send) };
        let put = user.put(&packet, &[IoSlice::new(a), IoSlice::new(b)]);
        if let Written::Asleep(token) = put {
            user.woken(token);
        }
        put
    }

    fn take(node: &mut NodeFlow) -> Option<(u16, usize)> {
        let front = node.ring.front().unwrap()?;
        let (packet, payload) = node.ring.take(front).unwrap();
        assert!(payload.iter().all(|byte| *byte == packet.port as u8));
        Some((packet.port, payload.len()))
    }

    fn pair() -> (NodeFlow, Flow) {
        let node = NodeFlow::create().unwrap();
        let user = Flow::open(node.fd()).unwrap();
        (node, user)
    }

    #[test]
    fn messages_of_all_lengths_pass_and_the_first_wakes_the_node() {
        let (mut node, user) = pair();
        assert!(!node.ring.is_used());
        for (port, len) in [(1, 0), (2, 1), (3, 8192), (4, RING_MESSAGE_MAX)] {
            assert_eq!(matches!(send(&user, port, len), Written::Asleep(_)), port == 1, "{port}");
        }
        assert!(node.ring.is_used());
        let got: Vec<_> = std::iter::from_fn(|| take(&mut node)).collect();
        assert_eq!(got, [(1, 0), (2, 1), (3, 8192), (4, RING_MESSAGE_MAX)]);
        assert!(node.ring.is_used() && !node.ring.has_input());
        // The default send buffer, in messages of usual lengths.
        for (number, len) in [(1700, 64), (104, 1024), (13, 8192)] {
            for _ in 0..number {
                assert_ne!(send(&user, 1, len), Written::Refused, "{len}");
            }
            while take(&mut node).is_some() {}
        }
    }

    #[test]
    fn messages_on_the_socket_keep_their_place_among_those_in_the_ring() {
        let (mut node, user) = pair();
        let by_socket = |is_sent: bool| {
            let at = user.position();
            let sent = user.by_socket(|| if is_sent { Ok(()) } else { Err(()) });
            assert_eq!(sent.is_ok(), is_sent);
            at
        };
        let is_next = |node: &NodeFlow| matches!(node.ring.next(), Ok(Next::Message(_)));
        send(&user, 1, 10);
        let second = by_socket(true);
        send(&user, 3, 10);
        assert!(is_next(&node) && node.ring.is_before(second));
        take(&mut node);
        assert!(!node.ring.is_before(second) && !is_next(&node), "the second one is on the socket");
        node.ring.read_from_socket();
        assert!(is_next(&node));
        take(&mut node);
        // A message that could not be sent is not awaited.
        by_socket(false);
        send(&user, 4, 10);
        assert!(is_next(&node));
    }

    #[test]
    fn only_whole_messages_of_users_are_taken() {
        let whole = Packet { len: 3, ..Packet::new(PacketKind::Send) };
        let longer = RING_MESSAGE_MAX + 1;
        for (packet, len) in [
            (Packet { len: 4, ..whole }, 3),
            (Packet { kind: PacketKind::Data, ..whole }, 3),
            (Packet { len: longer as u32, ..whole }, longer),
        ] {
            let (mut node, user) = pair();
            assert_ne!(user.put(&packet, &[IoSlice::new(&vec![0; len])]), Written::Refused);
            let front = node.ring.front().unwrap().unwrap();
            assert!(node.ring.take(front).is_none(), "{packet:?}");
        }
    }
}
