//! Tests of a ring, with a hand-written driver and without a device.

use std::collections::BTreeSet;
use std::sync::Arc;

use rtrs_core::block::Geometry;
use rtrs_core::prng::Prng;

use super::*;
use crate::dirty_log::DirtyLog;
use crate::driver::migration::GuestLog;
use crate::driver::{
    GUEST_AT, Guest, GuestRing, MEMORY_LEN, PAGE, Piece, RawDescriptor, Request, kind,
};
use crate::inflight::{Area, AreaSize};
use crate::ios::{Answer, Unanswered};
use crate::memory::{FilePart, GuestRegion, MappedRegions};
use crate::request::Status;

const SIZE: u16 = 8;

fn memory(guest: &Guest) -> Arc<GuestMemory> {
    let part = FilePart { file: guest.file(), offset: 0, len: MEMORY_LEN };
    let region = GuestRegion::map(GUEST_AT, part, &TruncationAlarm::new().unwrap()).unwrap();
    Arc::new(GuestMemory::from_regions(vec![region]).unwrap())
}

fn setup(guest: &Guest, driver: &GuestRing) -> RingSetup {
    let [descriptors, available, used] = driver.addresses().map(GuestAddress);
    RingSetup {
        size: driver.size.into(),
        descriptors,
        available,
        used,
        base: driver.next,
        event_idx: false,
        memory: memory(guest),
        alarm: TruncationAlarm::new().unwrap(),
        record: None,
        log: None,
    }
}

/// Guest with a ring whose first index is `first`.
fn ring(first: u16) -> (Guest, GuestRing, Vring) {
    let (guest, driver) = (Guest::default(), GuestRing::new(0, SIZE, first));
    driver.reset(&guest);
    let ring = Vring::start(setup(&guest, &driver)).unwrap();
    (guest, driver, ring)
}

fn piece(at: u64, len: u32, is_writable: bool) -> Piece {
    Piece { at, len, is_writable }
}

/// Offers a chain of one descriptor.
fn offer(guest: &Guest, driver: &mut GuestRing, head: u16) {
    let descriptor = RawDescriptor::new(piece(1 << 20, 16 + u32::from(head), false), None);
    driver.describe(guest, head, descriptor);
    driver.offer(guest, head);
}

fn take(ring: &mut Vring) -> Result<Option<u16>, Fault> {
    ring.take(&mut Chain::default())
}

#[test]
fn requests_are_taken_in_order_and_answered_in_any_order() {
    // The indices wrap around.
    let (guest, mut driver, mut ring) = ring(65_533);
    for round in 0..10_u32 {
        for head in [3, 1, 7] {
            offer(&guest, &mut driver, head);
        }
        assert!(ring.has_input());
        for head in [3, 1, 7] {
            assert_eq!(take(&mut ring), Ok(Some(head)));
        }
        assert_eq!((take(&mut ring), ring.has_input(), ring.inflight()), (Ok(None), false, 3));
        for head in [7, 3, 1] {
            ring.answer(head, round).unwrap();
        }
        assert_eq!(ring.inflight(), 0);
        let seen = [0; 3].map(|_| driver.answer(&guest).unwrap());
        assert_eq!(seen, [(7, round), (3, round), (1, round)]);
        assert_eq!(driver.answer(&guest), None);
    }
    assert_eq!(ring.next_available(), driver.next);
}

#[test]
fn a_chain_is_read_through_its_tables() {
    let (guest, mut driver, mut ring) = ring(0);
    let pieces = [piece(0x10_0000, 3, false), piece(0x20_0000, 5, false), piece(0, 4096, true)];
    let table = driver.describe_table(&guest, 2, &pieces);
    driver.describe(&guest, 4, table);
    driver.offer(&guest, 4);
    let mut chain = Chain::default();
    assert_eq!(ring.take(&mut chain), Ok(Some(4)));
    let lens = |pieces: &[MemSlice]| {
        pieces.iter().map(|piece| (piece.offset(), piece.len())).collect::<Vec<_>>()
    };
    assert_eq!(lens(&chain.readable), [(0x10_0000, 3), (0x20_0000, 5)]);
    assert_eq!(lens(&chain.writable), [(0, 4096)]);
    // An indirect table after direct descriptors.
    driver.describe(&guest, 0, RawDescriptor::new(piece(64, 1, false), Some(4)));
    driver.offer(&guest, 0);
    assert_eq!(ring.take(&mut chain), Ok(Some(0)));
    assert_eq!(lens(&chain.readable), [(64, 1), (0x10_0000, 3), (0x20_0000, 5)]);
}

#[test]
fn every_fault_of_a_driver_is_detected() {
    type Prepare = fn(&Guest, &mut GuestRing);
    let outside = u64::from(u32::MAX);
    let cases: [(Fault, Prepare); 12] = [
        (Fault::Index(8, 8), |guest, driver| driver.offer(guest, 8)),
        (Fault::AvailableIndex, |guest, driver| driver.publish(guest, 9)),
        (Fault::TooLong, |guest, driver| {
            driver.describe(guest, 0, RawDescriptor::new(piece(0, 1, false), Some(0)));
            driver.offer(guest, 0);
        }),
        (Fault::Index(9, 8), |guest, driver| {
            driver.describe(guest, 0, RawDescriptor::new(piece(0, 1, false), Some(9)));
            driver.offer(guest, 0);
        }),
        (Fault::Empty, |guest, driver| {
            driver.describe(guest, 0, RawDescriptor::new(piece(0, 0, false), None));
            driver.offer(guest, 0);
        }),
        (Fault::Address(GUEST_AT + outside), |guest, driver| {
            let piece = piece(u64::from(u32::MAX), 1, false);
            driver.describe(guest, 0, RawDescriptor::new(piece, None));
            driver.offer(guest, 0);
        }),
        (Fault::Address(GUEST_AT + MEMORY_LEN - 1), |guest, driver| {
            let piece = piece(MEMORY_LEN - 1, 2, true);
            driver.describe(guest, 0, RawDescriptor::new(piece, None));
            driver.offer(guest, 0);
        }),
        (Fault::Order, |guest, driver| {
            driver.describe(guest, 0, RawDescriptor::new(piece(0, 1, true), Some(1)));
            driver.describe(guest, 1, RawDescriptor::new(piece(0, 1, false), None));
            driver.offer(guest, 0);
        }),
        (Fault::Nested, |guest, driver| {
            let table = RawDescriptor::table(1 << 20, 16);
            driver.describe(guest, 0, table);
            guest.write(1 << 20, &table.bytes());
            driver.offer(guest, 0);
        }),
        (Fault::TableLength(17), |guest, driver| {
            driver.describe(guest, 0, RawDescriptor::table(1 << 20, 17));
            driver.offer(guest, 0);
        }),
        (Fault::TableLength(0), |guest, driver| {
            driver.describe(guest, 0, RawDescriptor::table(1 << 20, 0));
            driver.offer(guest, 0);
        }),
        (Fault::Address(GUEST_AT + outside), |guest, driver| {
            driver.describe(guest, 0, RawDescriptor::table(u64::from(u32::MAX), 32));
            driver.offer(guest, 0);
        }),
    ];
    for (fault, prepare) in cases {
        let (guest, mut driver, mut ring) = ring(0);
        prepare(&guest, &mut driver);
        assert_eq!((take(&mut ring), ring.inflight()), (Err(fault), 0));
    }
}

#[test]
fn a_request_in_flight_is_not_taken_again() {
    let (guest, mut driver, mut ring) = ring(0);
    offer(&guest, &mut driver, 2);
    assert_eq!(take(&mut ring), Ok(Some(2)));
    driver.offer(&guest, 2);
    assert_eq!(take(&mut ring), Err(Fault::TooMany));
}

#[test]
fn a_ring_must_be_in_memory_of_the_guest() {
    let (guest, driver) = (Guest::default(), GuestRing::new(0, SIZE, 0));
    driver.reset(&guest);
    let start = |change: fn(&mut RingSetup)| {
        let mut setup = setup(&guest, &driver);
        change(&mut setup);
        Vring::start(setup).map(drop)
    };
    assert_eq!(start(|_| {}), Ok(()));
    for (change, fault) in [
        ((|setup| setup.size = 7) as fn(&mut RingSetup), Fault::Size(7)),
        (|setup| setup.size = 0, Fault::Size(0)),
        (|setup| setup.size = 1 << 16, Fault::Size(1 << 16)),
        (|setup| setup.descriptors.0 += 8, Fault::Ring),
        (|setup| setup.available.0 += 1, Fault::Ring),
        (|setup| setup.used.0 += 2, Fault::Ring),
        (|setup| setup.used.0 = GUEST_AT + MEMORY_LEN - 16, Fault::Ring),
        (|setup| setup.descriptors.0 = 0, Fault::Ring),
        (|setup| setup.available.0 = u64::MAX - 1, Fault::Ring),
        (|setup| setup.memory = Arc::default(), Fault::Ring),
    ] {
        assert_eq!(start(change), Err(fault));
    }
}

#[test]
fn kicks_and_calls_are_suppressed_on_request() {
    for has_events in [false, true] {
        let (guest, mut driver) = (Guest::default(), GuestRing::new(0, SIZE, 65_530));
        driver.reset(&guest);
        if has_events {
            driver.use_events();
        }
        let setup = RingSetup { event_idx: has_events, ..setup(&guest, &driver) };
        let mut ring = Vring::start(setup).unwrap();
        for _ in 0..3 {
            assert_eq!(ring.ask_kicks(), Ok(false));
            offer(&guest, &mut driver, 0);
            assert!(driver.kick(&guest, 1), "the device sleeps");
            assert_eq!(ring.ask_kicks(), Ok(true), "a request arrived before it sleeps");
            assert_eq!(take(&mut ring), Ok(Some(0)));
            for head in [1, 2] {
                offer(&guest, &mut driver, head);
                assert!(!driver.kick(&guest, 1), "the device polls");
                assert_eq!(take(&mut ring), Ok(Some(head)));
            }
            assert_eq!(ring.needs_call(), Ok(false), "no answers");
            driver.ask_call(&guest);
            ring.answer(0, 1).unwrap();
            ring.answer(1, 1).unwrap();
            assert_eq!(ring.needs_call(), Ok(true), "one call for both");
            assert_eq!(ring.needs_call(), Ok(false));
            assert!(driver.answer(&guest).is_some());
            if !has_events {
                driver.ignore_calls(&guest, true);
            }
            ring.answer(2, 1).unwrap();
            assert_eq!(ring.needs_call(), Ok(false), "the driver polls");
            driver.ignore_calls(&guest, false);
            while driver.answer(&guest).is_some() {}
        }
    }
}

/// The process dies at every step of handling three requests.
#[test]
fn requests_of_a_dead_process_are_repeated_once() {
    for steps in 0..=6 {
        let (guest, driver) = (Guest::default(), GuestRing::new(0, SIZE, 65_534));
        driver.reset(&guest);
        let size = AreaSize { rings: 1, descriptors: SIZE };
        let alarm = TruncationAlarm::new().unwrap();
        let (area, file) = Area::create(size, &alarm).unwrap();
        let start = |area: &Area| {
            let setup = RingSetup { record: area.record(0), ..setup(&guest, &driver) };
            Vring::start(setup).unwrap()
        };
        let mut ring = start(&area);
        for head in [6, 2, 4] {
            let descriptor = RawDescriptor::new(piece(1 << 20, 16, false), None);
            driver.describe(&guest, head, descriptor);
        }
        let (mut waiting, mut answered) = (vec![4, 2, 6], Vec::new());
        let offered = driver.next;
        for (at, head) in (0..).zip([6, 2, 4]) {
            guest.write(crate::driver::available_entry(offered.wrapping_add(at), SIZE), &[head, 0]);
        }
        driver.publish(&guest, offered.wrapping_add(3));
        let mut taken = Vec::new();
        for step in 0..steps {
            if step < 3 {
                let head = take(&mut ring).unwrap().unwrap();
                assert_eq!(Some(head), waiting.pop());
                taken.push(head);
            } else {
                // The request taken last is answered first.
                let head = taken.pop().unwrap();
                ring.answer(head, 1).unwrap();
                answered.push(head);
            }
        }
        drop((ring, area));

        let mut ring = start(&Area::map(size, &file, 0, &alarm).unwrap());
        assert_eq!((ring.needs_call(), ring.needs_call()), (Ok(true), Ok(false)), "{steps}");
        let mut left = Vec::new();
        while let Some(head) = take(&mut ring).unwrap() {
            left.push(head);
        }
        waiting.reverse();
        assert_eq!(left, [taken, waiting].concat(), "{steps}: in order");
        left.iter().for_each(|head| ring.answer(*head, 1).unwrap());
        let mut seen = Vec::new();
        let mut driver = GuestRing::new(0, SIZE, offered);
        while let Some((head, _)) = driver.answer(&guest) {
            seen.push(head);
        }
        assert_eq!(seen, [answered, left].concat(), "{steps}: each was answered once");
    }
}

/// The guest's memory is all that the ring and its requests need.
#[test]
fn a_ring_of_any_bytes_is_read_or_refused() {
    let (guest, geometry) = (Guest::default(), Geometry::plain(1 << 20));
    let prng = &mut Prng::new(29);
    let (mut answered, mut faults) = (0, BTreeSet::new());
    for round in 0..4000_u32 {
        let driver = GuestRing::new(0, 256, 0);
        driver.reset(&guest);
        let mut bytes = vec![0; 4096];
        prng.fill(&mut bytes);
        for descriptor in bytes.chunks_exact_mut(16) {
            // Mostly addresses in the guest's memory, and limited lengths.
            if prng.index(40) > 0 {
                let at = GUEST_AT + prng.index(8192) as u64 * 16;
                descriptor[..8].copy_from_slice(&at.to_le_bytes());
                descriptor[10..12].fill(0);
            }
            let indirect = if prng.index(8) == 0 { 4 } else { 0 };
            descriptor[12] = descriptor[12] & 3 | indirect;
            descriptor[15] = u8::from(prng.index(200) == 0);
        }
        guest.write(0, &bytes);
        let heads: Vec<u8> = (0..256).flat_map(|_| [prng.index(256) as u8, 0]).collect();
        guest.write(crate::driver::available_entry(0, 256), &heads);
        driver.publish(&guest, 1 + prng.index(300) as u16);
        let setup = RingSetup { event_idx: round % 2 == 0, ..setup(&guest, &driver) };
        let Ok(mut ring) = Vring::start(setup) else { continue };
        let mut chain = Chain::default();
        let fault = loop {
            match ring.take(&mut chain) {
                Ok(None) => break None,
                Err(fault) => break Some(fault),
                Ok(Some(head)) => match crate::request::parse(&mut chain, &geometry) {
                    Err(fault) => break Some(fault),
                    // Some requests stay in flight.
                    Ok(_) if prng.index(3) == 0 => {}
                    Ok(_) => {
                        ring.answer(head, 1).unwrap();
                        answered += 1;
                    }
                },
            }
            ring.needs_call().unwrap();
            assert!(ring.inflight() <= 256);
        };
        faults.extend(fault.map(|fault| format!("{fault:?}")));
    }
    let kinds: BTreeSet<_> = faults.iter().map(|fault| fault.split('(').next().unwrap()).collect();
    assert!(answered > 100 && kinds.len() > 6, "{answered} {kinds:?}");
}

/// Ring whose driver's monitor logs writes.
fn logged_ring() -> (Guest, GuestRing, Vring, GuestLog) {
    let (guest, driver, mut ring) = ring(0);
    let log = GuestLog::default();
    let alarm = TruncationAlarm::new().unwrap();
    let part = FilePart { file: log.file(), offset: 0, len: log.file().metadata().unwrap().len() };
    let device = DirtyLog::map(part, &mut MappedRegions::default(), &alarm).unwrap();
    let used = Some(driver.addresses()[2]);
    ring.set_log(Some(RingLog { log: Arc::new(device), used }));
    (guest, driver, ring, log)
}

#[test]
fn the_log_has_all_that_an_answer_changes() {
    let (guest, mut driver, mut ring, log) = logged_ring();
    let used = driver.addresses()[2] - GUEST_AT;
    assert_eq!(log.take(), BTreeSet::from([used / PAGE]), "a new log has the whole used ring");
    let request = Request { kind: kind::READ, sector: 0, len: 3 * 4096 };
    driver.start(&guest, 1, request);
    let mut chain = Chain::default();
    let head = ring.take(&mut chain).unwrap().unwrap();
    assert_eq!(log.take(), BTreeSet::from([used / PAGE]), "the wish for no kicks");
    let status = chain.writable.pop().unwrap();
    let unanswered = Unanswered { head, status, memory: ring.memory(), reported: 0 };
    let answer = Answer { status: Status::Ok, written: 3 * 4096, data: &chain.writable };
    unanswered.answer(&mut ring, answer).unwrap();
    let data = GuestRing::data_at(1) / PAGE;
    // The status is in the page before the data.
    let marked = BTreeSet::from([used / PAGE, data - 1, data, data + 1, data + 2]);
    assert_eq!(log.take(), marked);
    ring.ask_kicks().unwrap();
    assert_eq!(log.take(), BTreeSet::from([used / PAGE]));
    ring.set_log(None);
    driver.start(&guest, 1, request);
    let head = ring.take(&mut chain).unwrap().unwrap();
    ring.answer(head, 0).unwrap();
    assert_eq!(log.take(), BTreeSet::new(), "the migration is over");
}

/// A guest that has seen an answer may be stopped and copied at once.
#[test]
fn the_log_has_data_and_status_before_the_ring_has_the_answer() {
    let (guest, mut driver, mut ring, log) = logged_ring();
    driver.start(&guest, 1, Request { kind: kind::READ, sector: 0, len: 4096 });
    let mut chain = Chain::default();
    let head = ring.take(&mut chain).unwrap().unwrap();
    let status = chain.writable.pop().unwrap();
    let unanswered = Unanswered { head, status, memory: ring.memory(), reported: 0 };
    log.take();
    // Without the used ring, the index cannot move.
    assert_eq!(ring.set_memory(Arc::default()), Err(Fault::Ring));
    let answer = Answer { status: Status::Ok, written: 4096, data: &chain.writable };
    assert_eq!(unanswered.answer(&mut ring, answer), Err(Fault::Ring));
    let data = GuestRing::data_at(1) / PAGE;
    assert_eq!(log.take(), BTreeSet::from([data - 1, data]));
    assert_eq!(driver.answer(&guest), None);
}
