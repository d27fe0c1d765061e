//! Restarts of the process that serves the device.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rtrs_core::block::IoOp;

use super::rig::{Rig, geometry};
use crate::driver::{Guest, GuestRing, Piece, RawDescriptor, Request, kind};

/// Returns a connected guest that records its requests, and its two rings.
fn guest(rig: &Rig) -> (Guest, [GuestRing; 2]) {
    let mut guest = Guest::recording();
    let mut rings = [0, 1].map(|at| GuestRing::new(at, 256, 65_530));
    rings.iter().for_each(|ring| ring.reset(&guest));
    guest.connect(&rig.socket, &mut rings);
    (guest, rings)
}

fn write(guest: &Guest, slot: u16) -> Request {
    guest.write(GuestRing::data_at(slot), &[slot as u8 + 1; 512]);
    Request { kind: kind::WRITE, sector: slot.into(), len: 512 }
}

#[test]
fn requests_in_flight_survive_a_kill() {
    let rig = Rig::new("kill", &geometry(), 2);
    let (mut guest, mut rings) = guest(&rig);
    for ring in &mut rings {
        // A request that ended before the kill is not repeated.
        assert_eq!(ring.put(&guest, 100, &[9; 512]), 0);
    }
    rig.hold(true);
    // As many requests as there are buffers.
    for slot in 0..16 {
        let request = write(&guest, slot);
        let ring = &mut rings[usize::from(slot % 2)];
        ring.start(&guest, slot, request);
        ring.kick(&guest, 1);
    }
    rig.wait_for(18);
    let disk = rig.kill();
    // More requests are offered while there is no device.
    for slot in 16..30 {
        let request = write(&guest, slot);
        rings[usize::from(slot % 2)].start(&guest, slot, request);
    }
    disk.take_ran();
    disk.holds.store(false, Ordering::SeqCst);
    // Executing one IO at a time shows their order.
    disk.depth.store(1, Ordering::SeqCst);
    guest.disconnect();
    let rig = Rig::on("kill", &geometry(), 2, disk);
    guest.connect(&rig.socket, &mut rings);
    for (at, ring) in (0..).zip(&mut rings) {
        let mut slots: Vec<_> = (0..15).map(|_| ring.finish(&guest)).collect();
        assert!(slots.iter().all(|(_, status, len)| (*status, *len) == (0, 1)));
        slots.sort_unstable();
        let slots: Vec<_> = slots.into_iter().map(|(slot, ..)| slot).collect();
        assert_eq!(slots, (0..15).map(|slot| 2 * slot + at).collect::<Vec<_>>(), "each once");
        assert_eq!(ring.put(&guest, 101, &[8; 512]), 0);
        assert_eq!(ring.answer(&guest), None);
    }
    let ran = rig.disk.take_ran();
    for at in 0..2 {
        let of_ring = ran.iter().map(|ran| ran.offset / 512).filter(|sector| *sector < 100);
        let sectors: Vec<_> = of_ring.filter(|sector| sector % 2 == at).collect();
        assert_eq!(sectors, (0..15).map(|slot| 2 * slot + at).collect::<Vec<_>>(), "in order");
    }
    for slot in 0..30_usize {
        let bytes = rig.disk.bytes.lock().unwrap()[slot * 512];
        assert_eq!(usize::from(bytes), slot + 1);
    }
    rig.stop();
}

#[test]
fn the_cache_mode_survives_a_kill() {
    let rig = Rig::new("mode", &geometry(), 1);
    let (mut guest, mut rings) = guest(&rig);
    guest.set_writeback(false);
    let disk = rig.kill();
    guest.disconnect();
    let rig = Rig::on("mode", &geometry(), 1, disk);
    guest.connect(&rig.socket, &mut rings);
    assert_eq!(guest.config()[32], 0);
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0);
    assert!(rig.disk.take_ran()[0].fua);
    guest.set_writeback(true);
    guest.disconnect();
    guest.connect(&rig.socket, &mut rings);
    assert_eq!(guest.config()[32], 1);
    rig.stop();
}

/// A restarted guest has an empty record and new ring indices.
#[test]
fn a_guest_that_starts_anew_repeats_nothing() {
    let rig = Rig::new("anew", &geometry(), 1);
    let (mut guest, [mut ring, _]) = guest(&rig);
    rig.hold(true);
    let request = write(&guest, 0);
    ring.start(&guest, 0, request);
    ring.kick(&guest, 1);
    rig.wait_for(1);
    let disk = rig.kill();
    disk.holds.store(false, Ordering::SeqCst);
    guest.disconnect();
    guest.forget_record();
    let rig = Rig::on("anew", &geometry(), 1, disk);
    let mut rings = [GuestRing::new(0, 256, 0)];
    rings[0].reset(&guest);
    guest.connect(&rig.socket, &mut rings);
    assert_eq!(rings[0].get(&guest, 0, 512), [0; 512], "the write has not run");
    assert_eq!(rings[0].answer(&guest), None);
    rig.stop();
}

#[test]
fn a_lost_connection_ends_requests_before_the_next_one() {
    let rig = Rig::new("lost", &geometry(), 1);
    let (mut guest, mut rings) = guest(&rig);
    rig.hold(true);
    let request = write(&guest, 3);
    rings[0].start(&guest, 3, request);
    rings[0].kick(&guest, 1);
    rig.wait_for(1);
    guest.disconnect();
    let flush = Request { kind: kind::FLUSH, sector: 0, len: 0 };
    rings[0].start(&guest, 4, flush);
    let guest = std::thread::scope(|scope| {
        let rings = &mut rings;
        let connected = scope.spawn(|| {
            guest.connect(&rig.socket, rings);
            guest
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!connected.is_finished(), "the write is in flight");
        rig.hold(false);
        connected.join().unwrap()
    });
    // The ring may have taken the flush before it stopped.
    let mut answers = [0; 2].map(|_| rings[0].finish(&guest));
    answers.sort_unstable();
    assert_eq!((answers, rings[0].answer(&guest)), ([(3, 0, 1), (4, 0, 1)], None));
    let ran = rig.disk.take_ran();
    let count = |op| ran.iter().filter(|ran| ran.op == op).count();
    assert_eq!((count(IoOp::Write), count(IoOp::Flush)), (1, 1), "each once");
    rig.stop();
}

/// A request that cannot be read stops its ring once. The next process repeats only the others.
#[test]
fn a_request_that_cannot_be_read_is_not_repeated() {
    type Break = fn(&Guest, &mut GuestRing);
    let cases: [Break; 2] = [
        // A chain with a loop.
        |guest, ring| {
            let piece = Piece { at: 0, len: 16, is_writable: false };
            ring.describe(guest, 200, RawDescriptor::new(piece, Some(200)));
        },
        // A chain without memory for the status.
        |guest, ring| {
            let piece = Piece { at: 0, len: 16, is_writable: false };
            ring.describe(guest, 200, RawDescriptor::new(piece, None));
        },
    ];
    for break_chain in cases {
        let mut rig = Rig::new("poison", &geometry(), 1);
        let (mut guest, mut rings) = guest(&rig);
        rig.hold(true);
        let request = write(&guest, 5);
        rings[0].start(&guest, 5, request);
        rings[0].kick(&guest, 1);
        rig.wait_for(1);
        break_chain(&guest, &mut rings[0]);
        rings[0].offer(&guest, 200);
        rings[0].kick_always();
        assert!(rings[0].is_faulty(Duration::from_secs(60)));
        let late = write(&guest, 6);
        rings[0].start(&guest, 6, late);
        for round in 0..3 {
            let disk = rig.kill();
            disk.holds.store(false, Ordering::SeqCst);
            guest.disconnect();
            rig = Rig::on("poison", &geometry(), 1, disk);
            guest.connect(&rig.socket, &mut rings);
            if round == 0 {
                let mut answers = [0; 2].map(|_| rings[0].finish(&guest));
                answers.sort_unstable();
                assert_eq!(answers, [(5, 0, 1), (6, 0, 1)]);
            }
            assert_eq!(rings[0].put(&guest, 50, &[round; 512]), 0, "the ring is served");
            assert_eq!(rings[0].answer(&guest), None);
        }
        assert!(!rings[0].is_faulty(Duration::ZERO));
        rig.stop();
    }
}

#[test]
fn a_forged_record_stops_its_ring() {
    let rig = Rig::new("forged", &geometry(), 1);
    let (mut guest, [ring, mut other]) = guest(&rig);
    let mut rings = [ring, GuestRing::new(1, 256, 65_530)];
    guest.disconnect();
    // A version that does not exist.
    guest.forge_record(8, &[7]);
    guest.connect(&rig.socket, &mut rings);
    let request = write(&guest, 0);
    rings[0].start(&guest, 0, request);
    rings[0].kick_always();
    other = rings.into_iter().nth(1).unwrap_or(other);
    assert_eq!(other.put(&guest, 0, &[1; 512]), 0);
    assert!(rig.disk.count() == 1, "the ring with the record is not served");
    rig.stop();
}
