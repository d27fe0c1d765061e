//! Ring through which users pass messages to their node, beside the unix socket.
//!
//! Each message through a unix socket costs a system call and a copy on either side. The ring is
//! memory that the users of a socket share with the node, so a message costs one copy on either
//! side, and a system call only if the node sleeps ([`PacketKind::Wake`]). The node empties the
//! rings that it knows to be in use in each turn, and announces that it sleeps before it does
//! (`rtrs_base::mem`).
//!
//! **Two ways.** Messages longer than [`RING_MESSAGE_MAX`] take the socket, and so does any message
//! when the ring is full or another thread or process writes to it at that moment: the lock of the
//! ring is tried, never awaited, so a process that was killed or stopped while it held it makes
//! others slower and blocks none of them. A forked process uses the mapping that it inherits; one
//! that was given the descriptor, or was started with it, maps the memory that the node passes to
//! it. A message that was sent before another one, by whichever process, must stay before it:
//! - A packet on the socket has the position of the ring at which it was sent. The node reads it
//!   after the messages before this position.
//! - A message in the ring has the number of messages that users had begun to send over the socket.
//!   If the node has read fewer, one of them may precede this message, and the node looks at the
//!   socket first. If it is empty, none precedes it: what was counted was not sent yet.
//!
//! **Full buffers.** A program polls the descriptor, so a full send buffer must make it unwritable:
//! by a packet that the node leaves in the socket until there is room (`rds/src/socket/room.rs`).
//! Since the messages before that packet may be in the ring, the node peeks at the socket, and
//! reads a packet only once the ring is empty up to its position and the buffer has room.
//!
//! **Trust.** Users of a socket trust each other. The node trusts none of them: it checks every
//! index and length, which it reads once, and copies a message into the memory in which it keeps it
//! until it is acknowledged. A user that breaks the ring loses its socket. Wrong positions, numbers
//! and sleep states change the order or delay the messages of this socket only.
//!
//! **A node that is killed** cannot say so. Users of its sockets notice when they wake it, when the
//! ring or the send buffer is full, and when they receive.

use std::io::IoSlice;

use rtrs_base::mem::{Front, Malformed, RingReader, RingWriter, Written};

use super::packet::{PACKET_LEN, Packet, PacketKind};

/// Length of a ring. It exceeds the default send buffer, so messages of usual lengths fit in
/// whenever they may be sent.
pub(super) const RING_LEN: usize = 256 << 10;
/// Maximum length of a payload in the ring.
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

/// What comes next from a socket with a ring.
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

    /// Whether the users of the socket use the ring.
    pub(crate) fn is_used(&mut self) -> bool {
        self.is_used = self.is_used || self.reader.has_input();
        self.is_used
    }

    /// Whether a message waits.
    pub(crate) fn has_input(&self) -> bool {
        self.reader.has_input()
    }

    /// Returns what comes next.
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

    /// Whether messages before this position were not read.
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

    /// Prepares a sleep of the node. Returns false if a message waits.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.reader.prepare_sleep()
    }

    /// Ends a sleep of the node, which looks at the ring from now on.
    pub(crate) fn awake(&mut self) {
        self.reader.awake();
    }

    /// Lets users notice that the node has closed the socket: their next message wakes a node that
    /// is not there.
    pub(crate) fn close(&mut self) {
        self.reader.arm();
    }
}

/// Whether a number that wraps is above another one.
fn is_ahead(number: u32, of: u32) -> bool {
    number.wrapping_sub(of).cast_signed() > 0
}
