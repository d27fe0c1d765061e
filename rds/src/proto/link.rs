//! One TCP connection: its queued data, how much of that data has been written and acknowledged,
//! and the received data.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::IpAddr;

use rtrs_base::mutated;

use super::info::TcpInfo;
use super::outbox::Message;
use crate::wire::{Decoder, HEADER_LEN, Header};

/// Maximum number of bytes queued on a connection but not yet written. A congestion map has to wait
/// behind them, and queued messages can no longer be canceled.
const AHEAD: usize = 256 << 10;

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// We connect to a larger peer.
    Connecting,
    /// We connect to a smaller peer and close immediately, so that the peer connects to us.
    Kicking,
    /// Accepted, but has not delivered valid data yet. The first valid data makes the connection
    /// replace the current connection of its path, if that is up.
    Candidate,
    /// Carries messages.
    Up,
}

#[derive(Debug)]
enum Body {
    Message(Message),
    /// A congestion map; emptied once it is written, since it is never resent.
    Map(Vec<u8>),
}

#[derive(Debug)]
struct Frame {
    head: [u8; HEADER_LEN],
    body: Body,
    /// Position in the stream after this frame.
    end: u64,
}

impl Frame {
    fn payload(&self) -> &[u8] {
        match &self.body {
            Body::Message(message) => &message.payload,
            Body::Map(bytes) => bytes,
        }
    }
}

/// TCP ports of a connection; 0 if not known.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TcpPorts {
    pub(super) own: u16,
    pub(super) peer: u16,
}

/// A TCP connection.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: IpAddr,
    pub(super) role: Role,
    /// Path number; 0 until the first header of an accepted connection shows it.
    pub(super) path: usize,
    pub(super) decoder: Decoder,
    /// Bytes held by the decoder, as counted toward memory limits.
    pub(super) held: usize,
    /// The peer's node has sent data, so it has accepted the connection. Before that, only the
    /// peer's system has accepted it, and may still reset it and lose all acknowledged data.
    pub(super) is_taken: bool,
    /// Generation in the last map from the peer.
    pub(super) generation: Option<u32>,
    /// Our map has changed since it was last queued.
    pub(super) map_is_due: bool,
    /// Our probe has been queued.
    pub(super) has_probed: bool,
    pub(super) tcp_ports: TcpPorts,
    frames: VecDeque<Frame>,
    /// The first frame that has not been completely written.
    cursor: usize,
    handed: u64,
    written: u64,
    acked: u64,
}

impl Link {
    pub(super) fn new(peer: IpAddr, role: Role) -> Self {
        Self {
            peer,
            role,
            path: 0,
            decoder: Decoder::default(),
            held: 0,
            is_taken: false,
            generation: None,
            map_is_due: true,
            has_probed: false,
            tcp_ports: TcpPorts::default(),
            frames: VecDeque::new(),
            cursor: 0,
            handed: 0,
            written: 0,
            acked: 0,
        }
    }

    /// Whether more data can be queued.
    pub(super) fn has_room(&self) -> bool {
        self.handed - self.written < AHEAD as u64
    }

    /// Queues a message.
    pub(super) fn hand(&mut self, header: Header, message: Message) {
        self.push(header.encode(), Body::Message(message));
    }

    /// Queues a congestion map.
    pub(super) fn hand_map(&mut self, header: Header, map: Vec<u8>) {
        self.push(header.encode(), Body::Map(map));
    }

    fn push(&mut self, head: [u8; HEADER_LEN], body: Body) {
        let mut frame = Frame { head, body, end: 0 };
        self.handed += (HEADER_LEN + frame.payload().len()) as u64;
        frame.end = self.handed;
        self.frames.push_back(frame);
    }

    /// Fills `room` with slices of the next bytes to write. Returns the number of slices.
    pub(super) fn slices<'a>(&'a self, room: &mut [IoSlice<'a>]) -> usize {
        let mut count = 0;
        for frame in self.frames.range(self.cursor..) {
            let payload = frame.payload();
            let start = frame.end - (HEADER_LEN + payload.len()) as u64;
            // Only the first frame can be partly written.
            let done = usize::try_from(self.written.saturating_sub(start)).unwrap_or(0);
            let head = &frame.head[done.min(HEADER_LEN)..];
            let payload = &payload[done.saturating_sub(HEADER_LEN)..];
            for part in [head, payload].into_iter().filter(|part| !part.is_empty()) {
                let Some(slot) = room.get_mut(count) else { return count };
                *slot = IoSlice::new(part);
                count += 1;
            }
        }
        count
    }

    /// Records that `count` more bytes have been written.
    pub(super) fn wrote(&mut self, count: usize) {
        self.written += count as u64;
        while let Some(frame) = self.frames.get_mut(self.cursor)
            && frame.end <= self.written
        {
            if let Body::Map(bytes) = &mut frame.body {
                *bytes = Vec::new();
            }
            self.cursor += 1;
        }
    }

    /// Returns the next message if the first `acked` bytes of the stream include its last byte.
    pub(super) fn pop_acked(&mut self, acked: u64) -> Option<Message> {
        let acked = if mutated!(RdsAckEarly) { self.written } else { acked.min(self.written) };
        self.acked = self.acked.max(acked);
        while self.cursor > 0 && self.frames.front().is_some_and(|frame| frame.end <= acked) {
            self.cursor -= 1;
            if let Some(Frame { body: Body::Message(message), .. }) = self.frames.pop_front() {
                return Some(message);
            }
        }
        None
    }

    /// Returns the bytes written to the connection, and how many of these bytes are acknowledged.
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.written, self.acked)
    }

    pub(super) fn tcp_info(&self) -> TcpInfo {
        let (header_left, payload_left) = self.decoder.left();
        let complete = self.cursor.checked_sub(1).and_then(|last| self.frames.get(last));
        TcpInfo {
            peer: self.peer,
            path: self.path,
            own_port: self.tcp_ports.own,
            peer_port: self.tcp_ports.peer,
            header_left,
            payload_left,
            written: self.written,
            complete: complete.map_or(self.acked, |frame| frame.end),
            acked: self.acked,
        }
    }

    /// Whether some written bytes have not been acknowledged yet.
    pub(super) fn is_unacked(&self) -> bool {
        self.cursor > 0
    }

    /// Returns the number of frames that have been written but not acknowledged.
    pub(super) fn unacked_frames(&self) -> usize {
        self.cursor
    }

    /// Whether there are bytes to write.
    pub(super) fn has_output(&self) -> bool {
        self.cursor < self.frames.len()
    }

    /// Returns the unacknowledged messages, in order.
    pub(super) fn messages(&self) -> impl Iterator<Item = &Message> {
        self.frames.iter().filter_map(|frame| match &frame.body {
            Body::Message(message) => Some(message),
            Body::Map(_) => None,
        })
    }

    /// Returns the unacknowledged messages, so that their owners can be changed.
    pub(super) fn messages_mut(&mut self) -> impl Iterator<Item = &mut Message> {
        self.frames.iter_mut().filter_map(|frame| match &mut frame.body {
            Body::Message(message) => Some(message),
            Body::Map(_) => None,
        })
    }

    /// Converts the link into its unacknowledged messages, in order.
    pub(super) fn into_unacked(self) -> Vec<Message> {
        let written = self.written;
        let mut start = None;
        let each = |frame: Frame| {
            let len = (HEADER_LEN + frame.payload().len()) as u64;
            // A written map has lost its payload, but precedes every frame of which nothing has
            // been written.
            let begins = start.replace(frame.end).unwrap_or(frame.end - len);
            let Body::Message(mut message) = frame.body else { return None };
            message.is_begun |= begins < written;
            Some(message)
        };
        self.frames.into_iter().filter_map(each).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::outbox::Owner;
    use super::super::shares::UserId;
    use super::*;

    fn message(len: usize) -> Message {
        let owner = Owner::Pong;
        let payload = vec![7; len];
        let sequence = Some(1);
        let extensions = [0; 16];
        Message {
            owner,
            user: UserId::NODE,
            sport: 2,
            dport: 3,
            payload,
            extensions,
            sequence,
            is_begun: false,
            completion: None,
        }
    }

    fn link(lens: &[usize]) -> Link {
        let mut link = Link::new([10, 0, 0, 1].into(), Role::Up);
        for len in lens {
            link.hand(Header::default(), message(*len));
        }
        link
    }

    fn output(link: &Link) -> usize {
        let mut room = [IoSlice::new(&[]); 64];
        let count = link.slices(&mut room);
        room[..count].iter().map(|slice| slice.len()).sum()
    }

    #[test]
    fn a_stream_can_be_written_and_acknowledged_in_any_pieces() {
        let mut link = link(&[0, 10, 100]);
        link.hand_map(Header::default(), vec![1; 20]);
        let whole = 48 + 58 + 148 + 68;
        let ends = [48, 106, 254];
        for written in 1..=whole {
            assert_eq!(output(&link), whole - (written - 1), "{written}");
            link.wrote(1);
        }
        assert!(!link.has_output() && link.is_unacked());
        for acked in 0..=whole {
            let popped = link.pop_acked(acked as u64).is_some();
            assert_eq!(popped, ends.contains(&acked), "{acked}");
        }
        assert!(!link.is_unacked());
    }

    #[test]
    fn unacknowledged_messages_are_returned_in_order() {
        let mut link = link(&[1, 2, 3, 4]);
        link.wrote(49 + 50 + 1);
        assert!(link.pop_acked(49).is_some());
        let lost: Vec<_> =
            link.into_unacked().iter().map(|m| (m.payload.len(), m.is_begun)).collect();
        assert_eq!(lost, [(2, true), (3, true), (4, false)]);
    }

    #[test]
    fn messages_are_not_acknowledged_before_they_are_written() {
        let mut link = link(&[10]);
        link.wrote(57);
        assert!(link.pop_acked(u64::MAX).is_none());
    }
}
