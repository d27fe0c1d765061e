//! Tests of the provider: a single machine, a pair of machines, and real sockets.

mod golden;
mod machine;
mod scattered;
mod sockets;
mod violations;

use std::collections::VecDeque;
use std::sync::Arc;

use super::IwarpShared;
use super::mpa::{Features, Terms};
use super::qp::QpMachine;
use super::state::CoreState;
use crate::fabric::{Access, FabricEvent, QpLimits, Sge, WorkCompletion};
use crate::ids::QpNum;
use crate::mem::{IoVecs, Region};

/// Parses hex text; anything but digits is ignored.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().filter_map(|c| c.to_digit(16)).map(|d| u8::try_from(d).unwrap()).collect();
    assert!(digits.len().is_multiple_of(2));
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn terms(initiator: bool) -> Terms {
    Terms {
        crc: true,
        ird: 16,
        ord: 16,
        features: Features::ALL,
        initiator,
        rtr_expected: false,
        rtr_is_send: false,
        rtr_write: false,
    }
}

const PD: u64 = 1;

/// Machine with memory, driven by the test.
struct End {
    core: CoreState,
    machine: QpMachine,
    region: Arc<Region>,
    stag: u32,
    base: u64,
    tx: Box<IoVecs>,
    rx: Box<IoVecs>,
}

impl End {
    fn new(terms: Terms, access: Access) -> Self {
        let shared = IwarpShared::new();
        let region = Region::new(4 << 20).unwrap();
        let (stag, base) = shared.stags.register(PD, &region, access).unwrap();
        let limits = QpLimits { send_max: 64, recv_max: 64 };
        let mut machine = QpMachine::new(QpNum(7), PD, limits, super::qp::RX_STAGE).unwrap();
        machine.open(terms);
        Self {
            core: CoreState::new(Arc::clone(&shared.stags)),
            machine,
            region,
            stag,
            base,
            tx: IoVecs::new(super::batch::BATCH_SLICES),
            rx: IoVecs::new(super::rx::RX_SLICES),
        }
    }

    fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { slice: self.region.slice(offset, len).unwrap(), lkey: self.stag }
    }

    /// Returns everything that the machine can send now.
    fn output(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while self.machine.has_output() {
            let before = bytes.len();
            let len = self.machine.tx_prepare(&mut self.tx);
            self.tx.gather(&mut bytes);
            assert_eq!(bytes.len() - before, len);
            self.machine.tx_done(&mut self.core);
        }
        bytes
    }

    /// Delivers received bytes, as many per call as the machine asks for.
    fn input(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            self.machine.rx_prepare(&mut self.rx);
            let taken = self.rx.fill_from(bytes);
            assert!(taken > 0, "a receive without room");
            self.machine.rx_done(&mut self.core, taken);
            bytes = &bytes[taken..];
        }
    }

    fn completions(&mut self) -> VecDeque<WorkCompletion> {
        self.core
            .events
            .drain(..)
            .map(|event| match event {
                FabricEvent::Completion(wc) => wc,
                event => panic!("{event:?}"),
            })
            .collect()
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.region.slice(offset, len).unwrap().to_vec()
    }
}

/// Two machines and the wire between them.
struct Pair {
    left: End,
    right: End,
}

impl Pair {
    fn new() -> Self {
        let all = Access { local_write: true, remote_write: true, remote_read: true };
        let mut pair =
            Self { left: End::new(terms(true), all), right: End::new(terms(false), all) };
        pair.right.machine.sender.permit();
        pair
    }

    /// Moves bytes both ways, cut into pieces of at most `cut`, until nothing moves.
    fn settle(&mut self, cut: usize) {
        loop {
            let (ab, ba) = (self.left.output(), self.right.output());
            if ab.is_empty() && ba.is_empty() {
                return;
            }
            for piece in ab.chunks(cut) {
                self.right.input(piece);
            }
            for piece in ba.chunks(cut) {
                self.left.input(piece);
            }
        }
    }
}
