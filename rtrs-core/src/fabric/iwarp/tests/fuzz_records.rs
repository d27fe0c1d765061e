//! Tests of records around MPA, from a peer that has the keys of a TLS session but otherwise
//! violates the protocol at will. Part of the fuzz target `tls` (`tls/fuzz.rs`).
//!
//! The input is a small program: records with frames as in `fuzz.rs`, with raw bytes, of any
//! content type, with new keys, damaged in transit, or bytes that are not a record. The target
//! fails on a panic, on a receive without room, if a damaged record is accepted, and if the bytes
//! of the stream differ from those that were sealed.

use rustls::ContentType;

use super::batch::BATCH_SLICES;
use super::fuzz::{Input, step};
use super::mpa::{Features, Terms};
use super::qp::QpMachine;
use super::stag::StagTable;
use super::state::CoreState;
use super::tls::{Record, Sealer, TLS_STAGE, TlsStream};
use crate::fabric::{Access, QpLimits};
use crate::ids::QpNum;
use crate::mem::{IoVecs, Region};
use crate::tls::{Secrets, Session, sessions};

/// Output of the peer: its records, the stream data in them, and whether all of it is valid.
struct Sealed {
    bytes: Vec<u8>,
    plain: Vec<u8>,
    is_right: bool,
    /// The bytes may be the beginning of a record that later bytes complete.
    is_raw: bool,
}

/// Seals the next step of the program. Returns None at the end.
fn seal(input: &mut Input<'_>, peer: &mut (Sealer, Secrets), memory: (u32, u64)) -> Option<Sealed> {
    let (kind, mut plain) = (input.byte()?, Vec::new());
    let mut content_type = ContentType::ApplicationData;
    match kind % 8 {
        0..=2 => step(input, &mut plain, false, memory.0, memory.1)?,
        3 => {
            let len = usize::from(input.short()?) % (17 << 10);
            plain = input.bytes(len);
            plain.resize(len, kind);
        }
        4 => {
            // Type 0 would be padding, and the last byte of the content would become the type (RFC
            // 8446 section 5.4).
            content_type = ContentType::from(input.byte()?.max(1));
            let len = usize::from(input.byte()?);
            plain = input.bytes(len);
        }
        5 => {
            content_type = ContentType::Handshake;
            plain = vec![24, 0, 0, 1, input.byte()?];
        }
        6 => {
            let len = usize::from(input.byte()?);
            let bytes = input.bytes(len);
            return Some(Sealed { bytes, plain, is_right: false, is_raw: true });
        }
        _ => plain = input.bytes(64),
    }
    let mut bytes = Vec::new();
    // Empty content also produces one record.
    let mut rest = &plain[..];
    loop {
        let (content, more) = rest.split_at(rest.len().min(16 << 10));
        let mut record = vec![0; content.len() + 64];
        record[5..5 + content.len()].copy_from_slice(content);
        let len = peer.0.seal(&mut record, content.len(), content_type).expect("it seals");
        bytes.extend_from_slice(&record[..len]);
        rest = more;
        if rest.is_empty() {
            break;
        }
    }
    if kind % 8 == 5 {
        peer.0 = Sealer::new(peer.1.next_tx().expect("new keys")).expect("ring takes them");
    }
    let mut is_right = content_type == ContentType::ApplicationData;
    if kind % 8 == 7 {
        // Damage a byte after the header, so that the data remains a record, but an invalid one.
        let at = 5 + usize::from(input.byte()?) % (bytes.len() - 5);
        bytes[at] ^= 1 << (input.byte()? % 8);
        is_right = false;
    }
    if !is_right {
        plain.clear();
    }
    Some(Sealed { bytes, plain, is_right, is_raw: false })
}

/// Creates a stream machine that has completed its handshake.
fn opened_machine() -> Option<QpMachine> {
    let limits = QpLimits { send_max: 8, recv_max: 8 };
    let mut machine = QpMachine::new(QpNum(1), 1, limits, TLS_STAGE).ok()?;
    machine.open(Terms {
        crc: false,
        ird: 4,
        ord: 4,
        features: Features::ALL,
        initiator: false,
        rtr_expected: false,
        rtr_is_send: false,
        rtr_write: false,
    });
    Some(machine)
}

/// Drives the records of a session, and a stream machine behind them, with a peer that violates the
/// protocol.
///
/// # Panics
/// Panics if either misbehaves.
pub(crate) fn fuzz_records(data: &[u8]) {
    let mut input = Input(data);
    let (Some(cut), Ok(region)) = (input.short(), Region::new(64 << 10)) else { return };
    let table = StagTable::new();
    let access = Access { local_write: true, remote_write: true, remote_read: true };
    let Ok(memory) = table.register(1, &region, access) else { return };
    let Some(mut machine) = opened_machine() else { return };
    let mut core = CoreState::new(table);
    let (client, server) = sessions();
    let Session { tx, secrets, .. } = client;
    let mut peer = (Sealer::new(tx).expect("ring takes the keys"), secrets);
    let stream = TlsStream::new(server, &[], &machine, BATCH_SLICES);
    let mut stream = stream.expect("memory");
    let (mut sent, mut taken) = (Vec::new(), Vec::new());
    let (mut total, mut in_step) = (0, true);
    while total < 1 << 20
        && let Some(sealed) = seal(&mut input, &mut peer, memory)
    {
        total += sealed.bytes.len();
        in_step &= !sealed.is_raw;
        sent.extend_from_slice(&sealed.plain);
        let mut iov = IoVecs::new(4);
        for piece in sealed.bytes.chunks(usize::from(cut).max(1)) {
            let mut rest = piece;
            while !rest.is_empty() {
                stream.rx_prepare(&mut machine, &mut iov);
                let count = iov.fill_from(rest);
                assert!(count > 0, "a receive without room");
                iov.clear();
                stream.arrived(count);
                rest = &rest[count..];
                loop {
                    let stage = std::sync::Arc::get_mut(&mut machine.stage)
                        .expect("the stage is not shared");
                    match stream.next(stage.bytes_mut()) {
                        Ok(Some(Record::Data { at, len })) => {
                            let mut bytes = vec![0; len];
                            machine.stage.copy_out(at, &mut bytes);
                            taken.extend(bytes);
                            machine.rx_plain(&mut core, at, len);
                        }
                        Ok(Some(Record::Other)) => {}
                        Ok(Some(Record::Closed)) | Err(_) => return check(&sent, &taken),
                        Ok(None) => break,
                    }
                    if machine.failure.is_some() {
                        return check(&sent, &taken);
                    }
                }
            }
        }
        if sealed.is_right && in_step {
            assert_eq!(sent, taken, "what was sealed is not what arrived");
        }
    }
    check(&sent, &taken);
}

/// Checks that the received data is a prefix of the data that was validly sealed.
fn check(sent: &[u8], taken: &[u8]) {
    assert!(sent.starts_with(taken), "received bytes that were not sealed");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::fuzz_records;

    #[test]
    fn the_corpus_replays() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/tls");
        let mut seen = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            crate::tls::fuzz_tls(&std::fs::read(entry.unwrap().path()).unwrap());
            seen += 1;
        }
        assert!(seen >= 8, "the corpus is missing");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        #[test]
        fn random_programs_hold_invariants(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            fuzz_records(&data);
        }
    }
}
