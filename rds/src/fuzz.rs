//! Body of the fuzz target `rds_stream`: no input from a peer may break a node.

use std::io::IoSlice;
use std::net::IpAddr;
use std::net::Ipv4Addr;

use rtrs_base::time::{Duration, Instant};

use crate::proto::{Config, LinkId, Node, Order, Received};
use crate::wire::{Decoder, Step};

/// Memory limits small enough for an input of 4096 bytes to reach them.
const PORT_MEMORY: usize = 1500;
const PEER_MEMORY: usize = 2500;
const MEMORY: usize = 4000;

/// A message's sender, port and payload, without the times, which depend on the split.
type Content = (IpAddr, u16, Vec<u8>);

/// A node with two sockets, one of which is read immediately, and an established connection.
struct Target {
    node: Node,
    link: LinkId,
    now: Instant,
    received: Vec<Content>,
    sent: Vec<u8>,
}

impl Target {
    fn new() -> Self {
        let mut config = Config::new(Ipv4Addr::new(10, 9, 0, 5).into(), 7, 1);
        (config.port_memory, config.peer_memory) = (PORT_MEMORY, PEER_MEMORY);
        (config.memory, config.rcvbuf) = (MEMORY, 500);
        let mut node = Node::new(config);
        node.bind(4000).expect("a free port");
        node.bind(4001).expect("a free port");
        let peer: IpAddr = Ipv4Addr::new(10, 9, 0, 1).into();
        let link = node.accepted(Instant::ZERO, peer).expect("a smaller peer may connect");
        Self { node, link, now: Instant::ZERO, received: Vec::new(), sent: Vec::new() }
    }

    /// Passes bytes to the node and writes all pending output. Returns false if the connection was
    /// closed.
    fn feed(&mut self, bytes: &[u8]) -> bool {
        self.now = self.now + Duration::from_millis(1);
        self.node.received(self.now, self.link, bytes);
        while let Some(event) = self.node.ports_mut().take_event() {
            if let crate::proto::Event::Readable(id) = event
                && id.port == 4000
            {
                let received = std::iter::from_fn(|| self.node.receive(id));
                let content = |Received { from, port, payload, .. }| (from, port, payload);
                self.received.extend(received.map(content));
            }
        }
        let (received, sent) = self.node.memory();
        assert!(received <= MEMORY && sent == 0, "{received} bytes received, {sent} sent");
        for info in self.node.peers().connections() {
            assert!(info.held <= PEER_MEMORY, "{info:?}");
        }
        for info in self.node.ports().sockets() {
            assert!(info.waiting <= PORT_MEMORY, "{info:?}");
        }
        if let Some(order) = self.node.take_order() {
            assert_eq!(order, Order::Close(self.link));
            return false;
        }
        while let Some(link) = self.node.next_ready() {
            loop {
                let mut room = [IoSlice::new(&[]); 8];
                let count = self.node.output(link, &mut room);
                let bytes: Vec<u8> =
                    room[..count].iter().flat_map(|slice| slice.to_vec()).collect();
                if bytes.is_empty() {
                    break;
                }
                self.node.wrote(link, bytes.len());
                self.sent.extend(bytes);
            }
            self.node.acked(link, self.sent.len() as u64);
        }
        true
    }

    /// Feeds all input in pieces. Returns the messages that users received, and whether the
    /// connection survived.
    fn run(mut self, input: &[u8], piece: usize) -> (Vec<Content>, bool) {
        let lasts = input.chunks(piece.max(1)).all(|bytes| self.feed(bytes));
        let mut decoder = Decoder::default();
        let mut sent = self.sent.as_slice();
        while let Some(step) = decoder.step(&mut sent).expect("our output is valid") {
            assert!(matches!(step, Step::Header(..) | Step::Message(..)));
        }
        assert!(decoder.is_between(), "we send whole messages");
        (self.received, lasts)
    }
}

/// Feeds a peer's stream to a node. The first byte selects how the rest is split, which must make
/// no difference to users that read immediately.
#[doc(hidden)]
pub fn fuzz_stream(data: &[u8]) {
    let Some((&piece, input)) = data.split_first() else { return };
    let (whole, lasts) = Target::new().run(input, usize::MAX);
    let (split, still_lasts) = Target::new().run(input, usize::from(piece));
    assert_eq!(lasts, still_lasts, "the split changes whether the connection survives");
    // Memory fills up at different times when messages arrive in pieces.
    let limit = input.len() < PORT_MEMORY / 4;
    assert!(!limit || whole == split, "the split changes what users get");
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::fuzz_stream;
    use crate::wire::Header;

    #[test]
    fn the_corpus_replays() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/rds_stream");
        let mut files = 0;
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.unwrap().path();
            // Shown only if the body panics.
            println!("{}", path.display());
            let bytes = fs::read(&path).unwrap();
            fuzz_stream(&bytes);
            for cut in 0..bytes.len().min(512) {
                fuzz_stream(&bytes[..cut]);
            }
            files += 1;
        }
        assert!(files >= 10, "{}: only {files} inputs", dir.display());
    }

    fn any_header() -> impl Strategy<Value = Vec<u8>> {
        let port = prop_oneof![Just(0_u16), Just(1), Just(4000), Just(4001), any::<u16>()];
        let flags = prop_oneof![Just(0_u8), Just(1), Just(4), any::<u8>()];
        let len = prop_oneof![0_u32..300, Just(8192), Just(u32::MAX)];
        let ext = prop_oneof![Just(0), Just(5_u8), Just(6), any::<u8>()];
        (0..5_u64, len, port.clone(), port, flags, ext).prop_map(
            |(sequence, len, sport, dport, flags, ext)| {
                let mut extensions = [0; 16];
                (extensions[0], extensions[3]) = (ext, ext);
                let header = Header { sequence, len, sport, dport, flags, extensions };
                let body = vec![7; len.min(8192) as usize];
                [header.encode().to_vec(), body].concat()
            },
        )
    }

    proptest! {
        #[test]
        fn any_bytes_are_handled(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            fuzz_stream(&data);
        }

        #[test]
        fn any_messages_are_handled(
            piece in 1_u8..,
            messages in proptest::collection::vec(any_header(), 0..12),
        ) {
            fuzz_stream(&[vec![piece], messages.concat()].concat());
        }
    }
}
