//! Body of the fuzz target `iwarp_stream`.
//!
//! The input is a small program: raw bytes, or frames with chosen fields and optionally the real
//! key of the machine's memory, which the input could not guess. The stream is delivered in pieces
//! of chosen lengths. The target fails on a panic, on a receive without room, or if work is not
//! reported exactly once. The fuzz crate calls this body with new inputs, the tests with the
//! corpus.

use std::collections::HashSet;
use std::sync::Arc;

use super::batch::BATCH_SLICES;
use super::ddp::{self, Untagged};
use super::mpa::{self, Features, Terms};
use super::qp::{QpMachine, RX_STAGE};
use super::rdmap::ReadRequest;
use super::rx::RX_SLICES;
use super::stag::StagTable;
use super::state::CoreState;
use crate::fabric::{Access, FabricEvent, QpLimits, RemoteMem, Sge, SgeList, WorkRequest, WrOp};
use crate::ids::{QpNum, Rkey};
use crate::mem::{IoVecs, Region, crc32c_append};

pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl Input<'_> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    pub(super) fn short(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes([self.byte()?, self.byte()?]))
    }

    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head.to_vec()
    }
}

/// Appends one step of the program to the stream. Returns None at the end of the input.
pub(super) fn step(
    input: &mut Input<'_>,
    stream: &mut Vec<u8>,
    crc: bool,
    stag: u32,
    base: u64,
) -> Option<()> {
    let kind = input.byte()?;
    if kind % 4 == 0 {
        let len = usize::from(input.byte()?);
        stream.extend(input.bytes(len));
        return Some(());
    }
    let (opcode, flags) = (input.byte()?, input.byte()?);
    let len = usize::from(input.short()?);
    let mut frame = if kind % 4 == 1 {
        let addr = base.wrapping_add(u64::from(input.short()?)).wrapping_sub(16);
        let stag = if flags & 2 == 0 { stag } else { u32::from(input.short()?) };
        ddp::tagged(opcode & 15, flags & 1 == 0, stag, addr, len.min(60_000)).to_vec()
    } else {
        let fields = Untagged {
            invalidate: stag,
            qn: u32::from(input.byte()? % 4),
            msn: u32::from(input.byte()?),
            mo: u32::from(input.byte()?),
        };
        ddp::untagged(opcode & 15, flags & 1 == 0, fields, len.min(60_000)).to_vec()
    };
    let payload = len.min(60_000);
    if kind % 4 == 3 {
        let request = ReadRequest {
            sink_stag: 1,
            sink_addr: 2,
            size: u32::from(input.short()?),
            source_stag: stag,
            source_addr: base.wrapping_add(u64::from(input.byte()?)),
        };
        frame.extend_from_slice(&request.encode());
        frame.resize(frame.len() - ReadRequest::LEN.min(payload) + payload, 0);
    } else if flags & 4 == 0 {
        frame.resize(frame.len() + payload, flags);
    } else {
        let own = input.bytes(payload);
        frame.extend_from_slice(&own);
        frame.resize(frame.len() + payload - own.len(), 0);
    }
    frame.resize(frame.len() + mpa::pad_len(frame.len() - 2), 0);
    let sum = if crc { crc32c_append(0, &frame) } else { 0 };
    frame.extend_from_slice(&sum.to_le_bytes());
    stream.extend(frame);
    Some(())
}

/// Posts receives and work requests. Returns their IDs.
fn post_work(
    machine: &mut QpMachine,
    core: &CoreState,
    region: &Arc<Region>,
    stag: u32,
) -> HashSet<u64> {
    let mut open = HashSet::new();
    let sge = |at: usize| Sge { slice: region.whole().slice(at, 64).expect("inside"), lkey: stag };
    for id in 0..6 {
        let buf = (id % 2 == 0).then(|| sge(64 * id as usize));
        machine.post_recv(core, id, buf).expect("room");
        open.insert(id);
        let op = match id % 3 {
            0 => WrOp::RdmaRead { remote: RemoteMem { addr: 1, rkey: Rkey(1) } },
            1 => WrOp::Send { imm: None, invalidate: None },
            _ => WrOp::RdmaWrite { remote: RemoteMem { addr: 1, rkey: Rkey(1) }, imm: None },
        };
        let sges = SgeList::one(sge(1024 + 64 * id as usize));
        let wr = WorkRequest { wr_id: 100 + id, op, sges, signaled: true };
        machine.post_send(core, wr).expect("room");
        open.insert(100 + id);
    }
    open
}

/// Drives a stream machine with a peer that runs this program.
///
/// # Panics
/// Panics if the machine misbehaves.
#[doc(hidden)]
pub fn fuzz_stream(data: &[u8]) {
    let mut input = Input(data);
    let Some(setup) = input.byte() else { return };
    let (Some(cut), Ok(region)) = (input.short(), Region::new(128 << 10)) else { return };
    let crc = setup & 1 != 0;
    let features = if setup & 2 == 0 { Features::ALL } else { Features::default() };
    let table = StagTable::new();
    let access =
        Access { local_write: true, remote_write: setup & 4 == 0, remote_read: setup & 8 == 0 };
    let Ok((stag, base)) = table.register(1, &region, access) else { return };
    let limits = QpLimits { send_max: 8, recv_max: 8 };
    let Ok(mut machine) = QpMachine::new(QpNum(1), 1, limits, RX_STAGE) else { return };
    machine.open(Terms {
        crc,
        ird: 4,
        ord: 4,
        features,
        initiator: setup & 16 == 0,
        rtr_expected: false,
        rtr_is_send: setup & 32 != 0,
        rtr_write: setup & 64 != 0,
    });
    let mut core = CoreState::new(table);
    let mut open = post_work(&mut machine, &core, &region, stag);
    let mut stream = Vec::new();
    while stream.len() < 1 << 20 && step(&mut input, &mut stream, crc, stag, base).is_some() {}
    let (mut tx, mut rx) = (IoVecs::new(BATCH_SLICES), IoVecs::new(RX_SLICES));
    for piece in stream.chunks(usize::from(cut).max(1)) {
        if machine.has_output() {
            machine.tx_prepare(&mut tx);
            machine.tx_done(&mut core);
        }
        let mut rest = piece;
        while !rest.is_empty() {
            machine.rx_prepare(&mut rx);
            let taken = rx.fill_from(rest);
            assert!(taken > 0, "a receive without room");
            machine.rx_done(&mut core, taken);
            rest = &rest[taken..];
        }
    }
    machine.rx_done(&mut core, 0);
    machine.flush_all(&mut core);
    while let Some(event) = core.events.pop_front() {
        if let FabricEvent::Completion(wc) = event {
            assert!(open.remove(&wc.wr_id), "completed twice: {wc:?}");
        }
    }
    assert!(open.is_empty(), "never completed: {open:?}");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::fuzz_stream;

    #[test]
    fn the_corpus_replays() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/iwarp_stream");
        let mut seen = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            fuzz_stream(&std::fs::read(entry.unwrap().path()).unwrap());
            seen += 1;
        }
        assert!(seen >= 8, "the corpus is missing");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

        #[test]
        fn random_programs_hold_invariants(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            fuzz_stream(&data);
        }
    }
}
