//! Body of the fuzz target `rds_ring`: nothing a program writes to its rings may break the node.

use std::collections::VecDeque;
use std::io::IoSlice;

use rtrs_base::mem::{Written, is_older_token};
use rustix::io::pwrite;

use crate::channel::{
    Flow, LONG_LEN, NodeFlow, PACKET_LEN, Packet, PacketKind, RING_LEN, RING_MESSAGE_MAX,
};

/// Length of the part of memory that may be overwritten: counters, words and the first messages.
const SPOILED_LEN: u64 = 2048;
/// Offset of the ring for messages to the program.
const SECOND_AT: u64 = 640 + RING_LEN as u64;

/// The program and the node, at the two ends of their rings.
struct Ends {
    node: NodeFlow,
    program: Flow,
    /// Lengths of the messages that the program has sent and the node has not read.
    sent: VecDeque<usize>,
    /// Lengths of the messages that the node has delivered.
    delivered: VecDeque<usize>,
    /// Tokens in the connection.
    tokens: VecDeque<u32>,
    is_spoiled: bool,
}

impl Ends {
    fn new() -> Self {
        let node = NodeFlow::create().expect("memory");
        let program = Flow::open(node.fd()).expect("memory");
        let (sent, delivered, tokens) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Self { node, program, sent, delivered, tokens, is_spoiled: false }
    }

    fn send(&mut self, len: usize) {
        let packet = Packet { len: len as u32, ..Packet::new(PacketKind::Send) };
        let payload = vec![len as u8; len];
        let put = self.program.put(&packet, &[IoSlice::new(&payload)]);
        match put {
            Written::Asleep(token) => self.program.woken(token),
            Written::Refused => return,
            Written::Done => {}
        }
        self.sent.push_back(len);
    }

    fn deliver(&mut self, len: usize) {
        let packet = Packet { len: len as u32, ..Packet::new(PacketKind::Data) };
        let is_written = self.node.outgoing.write(&packet.encode(), &vec![len as u8; len]);
        if is_written {
            self.delivered.push_back(len);
        }
        // The node does the same.
        self.ensure_token();
        self.node.outgoing.publish();
        self.ensure_token();
        if !is_written {
            let waits = self.node.outgoing.want_room(len);
            assert!(waits || self.is_spoiled, "the ring has no room, and nothing to take");
        }
    }

    fn ensure_token(&mut self) {
        let ring = &mut self.node.outgoing;
        if ring.needs_token()
            && let Some(number) = ring.next_token()
        {
            self.tokens.push_back(number);
            ring.token_sent();
        }
    }

    fn take(&mut self) {
        let ring = &self.program.incoming;
        let taken = ring.take(false, |delivery| {
            let mut bytes = vec![0; delivery.len()];
            assert_eq!(delivery.read(0, &mut bytes), bytes.len());
            bytes
        });
        let Ok(taken) = taken else {
            assert!(self.is_spoiled, "the ring is not malformed");
            return;
        };
        if let Some((bytes, _)) = &taken {
            assert!(bytes.len() <= RING_LEN + LONG_LEN);
        }
        // Programs do the same.
        let number = ring.newest_token();
        let is_last = taken.as_ref().is_some_and(|(_, taken)| taken.is_last);
        if is_last && ring.claim_tokens(number) {
            while self.tokens.pop_front_if(|token| !is_older_token(number, *token)).is_some() {}
        }
        if !self.is_spoiled {
            let len = taken.map(|(bytes, _)| {
                let payload = &bytes[PACKET_LEN..];
                assert!(payload.iter().all(|byte| *byte == payload.len() as u8));
                payload.len()
            });
            assert_eq!(len, self.delivered.pop_front());
            assert_eq!(ring.is_empty(), self.delivered.is_empty());
            assert_eq!(self.tokens.is_empty(), self.delivered.is_empty());
        }
    }

    fn spoil(&mut self, at: u64, bytes: &[u8]) {
        pwrite(self.node.fd(), bytes, at).expect("the memory can be written");
        self.is_spoiled = self.is_spoiled || !bytes.is_empty();
    }

    /// Reads everything. Returns false if the program loses its socket.
    fn read(&mut self) -> bool {
        let ring = &mut self.node.ring;
        loop {
            let (next, front) = (ring.next(), ring.front());
            assert_eq!(next.is_ok(), front.is_ok());
            let front = match front {
                Ok(Some(front)) => front,
                Ok(None) => break,
                Err(error) => {
                    assert!(self.is_spoiled, "{error}");
                    return false;
                }
            };
            let Some((packet, payload)) = ring.take(front) else {
                assert!(self.is_spoiled, "a message of the program is refused");
                return false;
            };
            assert_eq!(packet.len as usize, payload.len());
            assert!(payload.len() <= RING_MESSAGE_MAX);
            if !self.is_spoiled {
                assert_eq!(self.sent.pop_front(), Some(payload.len()));
                assert!(payload.iter().all(|byte| *byte == payload.len() as u8));
            }
        }
        assert!(self.is_spoiled || self.sent.is_empty(), "messages are lost");
        if ring.prepare_sleep() {
            ring.awake();
        }
        true
    }
}

/// Runs steps of at least five bytes: one byte selects the action, two are a number, and two are a
/// length: if the action overwrites memory, that of the bytes that follow.
#[doc(hidden)]
pub fn fuzz_ring(mut data: &[u8]) {
    let mut ends = Ends::new();
    while let Some((&[step, a, b, c, d], rest)) = data.split_first_chunk() {
        let (number, len) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        data = rest;
        match step % 8 {
            0 => ends.send(usize::from(number)),
            1 => {
                let (bytes, rest) = data.split_at(data.len().min(len.into()));
                ends.spoil(u64::from(number) % SPOILED_LEN, bytes);
                data = rest;
            }
            // A head index near the messages, which random bytes rarely produce.
            2 => ends.spoil(256, &(u32::from(len) * 8).to_ne_bytes()),
            // Multiplied by four, so that some are long.
            3 => ends.deliver(4 * usize::from(number)),
            4 => ends.take(),
            5 => {
                let (bytes, rest) = data.split_at(data.len().min(len.into()));
                ends.spoil(SECOND_AT + u64::from(number) % SPOILED_LEN, bytes);
                data = rest;
            }
            // A tail near the messages.
            6 => ends.spoil(SECOND_AT + 128, &(u64::from(len) * 8).to_ne_bytes()),
            _ => {
                if !ends.read() {
                    return;
                }
            }
        }
    }
    ends.read();
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::fuzz_ring;

    #[test]
    fn the_corpus_replays() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/rds_ring");
        let mut files = 0;
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.unwrap().path();
            // Shown only when the body panics.
            println!("{}", path.display());
            let bytes = fs::read(&path).unwrap();
            fuzz_ring(&bytes);
            files += 1;
        }
        assert!(files >= 6, "{}: only {files} inputs", dir.display());
    }

    fn any_step() -> impl Strategy<Value = Vec<u8>> {
        let offset = prop_oneof![
            0..24_u16,
            120..148_u16,
            250..270_u16,
            380..400_u16,
            636..800_u16,
            any::<u16>()
        ];
        let bytes = proptest::collection::vec(any::<u8>(), 0..12);
        (0..8_u8, offset, bytes).prop_map(|(step, number, bytes)| {
            let len = (bytes.len() as u16).to_le_bytes();
            let bytes = if step == 1 || step == 5 { bytes } else { Vec::new() };
            [&[step], &number.to_le_bytes()[..], &len, &bytes].concat()
        })
    }

    proptest! {
        #[test]
        fn any_bytes_are_handled(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            fuzz_ring(&data);
        }

        #[test]
        fn any_steps_are_handled(steps in proptest::collection::vec(any_step(), 0..40)) {
            fuzz_ring(&steps.concat());
        }
    }
}
