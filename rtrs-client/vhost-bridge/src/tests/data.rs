//! Tests of requests from a well-behaved driver.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use rtrs_core::block::{Geometry, IoOp};
use rtrs_core::prng::Prng;
use vhost::VhostBackend;
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::rig::{Ran, Rig, geometry};
use crate::driver::{Guest, GuestRing, Piece, Request, SLOTS, kind};

fn bytes(prng: &mut Prng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    prng.fill(&mut bytes);
    bytes
}

/// Guest with one ring on a device.
fn guest(rig: &Rig) -> (Guest, GuestRing) {
    let (mut guest, mut ring) = (Guest::default(), [GuestRing::new(0, 256, 0)]);
    ring[0].reset(&guest);
    guest.connect(&rig.socket, &mut ring);
    let [ring] = ring;
    (guest, ring)
}

#[test]
fn data_is_written_and_read() {
    for events in [true, false] {
        let rig = Rig::new(&format!("data-{events}"), &geometry(), 1);
        let mut guest = Guest::default();
        if !events {
            guest.wanted = !(1 << VIRTIO_RING_F_EVENT_IDX);
        }
        let mut rings = [GuestRing::new(0, 256, 0)];
        rings[0].reset(&guest);
        guest.connect(&rig.socket, &mut rings);
        let (prng, ring) = (&mut Prng::new(3), &mut rings[0]);
        // The longest is split: it is larger than a buffer.
        for (sector, len) in [(0, 512), (7, 4096), (100, 128 << 10), (1000, 700 << 10)] {
            let data = bytes(prng, len);
            assert_eq!(ring.put(&guest, sector, &data), 0);
            let offset = sector as usize * 512;
            assert!(rig.disk.bytes.lock().unwrap()[offset..offset + len] == data);
            guest.write(GuestRing::data_at(0), &vec![0xEE; len]);
            assert!(ring.get(&guest, sector, len) == data, "{sector}");
        }
        let flush = Request { kind: kind::FLUSH, sector: 0, len: 0 };
        assert_eq!(ring.run(&guest, flush), (0, 1));
        assert_eq!(rig.disk.take_ran().pop().unwrap().op, IoOp::Flush);
        assert_eq!(ring.range(&guest, kind::ZEROES, 8, 8), 0);
        assert_eq!(ring.get(&guest, 8, 4096), vec![0; 4096]);
        assert_eq!(ring.range(&guest, kind::DISCARD, 100, 256), 0);
        assert_eq!(ring.get(&guest, 100, 128 << 10), vec![0; 128 << 10]);
        let ops: Vec<_> = rig.disk.take_ran().iter().map(|ran| (ran.op, ran.no_unmap)).collect();
        assert!(ops.contains(&(IoOp::WriteZeroes, true)) && ops.contains(&(IoOp::Discard, false)));
        let id = Request { kind: kind::ID, sector: 0, len: 20 };
        assert_eq!(ring.run(&guest, id), (0, 21));
        assert_eq!(guest.read(GuestRing::data_at(0), 8), b"volume\0\0");
        let unknown = Request { kind: 77, sector: 0, len: 0 };
        assert_eq!(ring.run(&guest, unknown), (2, 1));
        rig.stop();
    }
}

#[test]
fn two_rings_on_two_shards_carry_many_requests() {
    let rig = Rig::new("rings", &geometry(), 2);
    rig.disk.depth.store(7, Ordering::SeqCst);
    let mut guest = Guest::default();
    // Three rings: two of them share a shard.
    let mut rings = [0, 1, 2].map(|index| GuestRing::new(index, 256, 65_500));
    rings.iter().for_each(|ring| ring.reset(&guest));
    guest.connect(&rig.socket, &mut rings);
    let prng = &mut Prng::new(9);
    // Each slot has its own part of the disk, and a ring.
    const SECTORS: u64 = 512;
    let mut model = vec![vec![0; SECTORS as usize * 512]; usize::from(SLOTS)];
    for _ in 0..40 {
        let mut running = Vec::new();
        for slot in 0..SLOTS {
            let (from, count) = (prng.index(SECTORS as usize), 1 + prng.index(300));
            let count = count.min(SECTORS as usize - from);
            let (kind, len) = if prng.index(2) == 0 {
                let data = bytes(prng, count * 512);
                guest.write(GuestRing::data_at(slot), &data);
                model[usize::from(slot)][from * 512..][..data.len()].copy_from_slice(&data);
                (kind::WRITE, data.len())
            } else {
                (kind::READ, count * 512)
            };
            let sector = (u64::from(slot) * SECTORS + from as u64) % (16 << 11);
            let request = Request { kind, sector, len: len as u32 };
            let ring = &mut rings[usize::from(slot) % 3];
            ring.start(&guest, slot, request);
            ring.kick(&guest, 1);
            running.push((slot, request, from * 512));
        }
        for (at, ring) in rings.iter_mut().enumerate() {
            let mine = running.iter().filter(|(slot, ..)| usize::from(*slot) % 3 == at);
            for _ in mine.clone() {
                let (slot, status, written) = ring.finish(&guest);
                let (_, request, from) = mine.clone().find(|(s, ..)| *s == slot).unwrap();
                assert_eq!(status, 0, "{request:?}");
                if request.kind == kind::READ {
                    assert_eq!(written, request.len + 1);
                    let seen = guest.read(GuestRing::data_at(slot), request.len as usize);
                    let expected = &model[usize::from(slot)][*from..][..seen.len()];
                    assert!(seen == expected, "{request:?}");
                }
            }
            assert_eq!(ring.answer(&guest), None);
        }
    }
    rig.stop();
}

#[test]
fn pieces_of_any_number_and_length_are_served() {
    let rig = Rig::new("pieces", &geometry(), 1);
    let (guest, mut ring) = guest(&rig);
    let prng = &mut Prng::new(5);
    for count in [1, 2, 126, 127, 128, 129, 200, 250] {
        // Pieces of odd length, with gaps between them. The last one fills the last sector.
        let mut pieces: Vec<_> = (0..count)
            .map(|at| Piece {
                at: GuestRing::data_at(0) + at * 3000,
                len: 1 + prng.index(1500) as u32,
                is_writable: false,
            })
            .collect();
        let sum: u32 = pieces.iter().map(|piece| piece.len).sum();
        let len = sum.next_multiple_of(512);
        pieces.last_mut().unwrap().len += len - sum;
        let data = bytes(prng, len as usize);
        let mut at = 0;
        for piece in &pieces {
            guest.write(piece.at, &data[at..at + piece.len as usize]);
            at += piece.len as usize;
        }
        let request = Request { kind: kind::WRITE, sector: 11, len };
        ring.start_indirect(&guest, 0, request, &pieces);
        ring.kick(&guest, 1);
        assert_eq!(ring.finish(&guest), (0, 0, 1), "{count}");
        assert!(rig.disk.bytes.lock().unwrap()[11 * 512..][..len as usize] == data, "{count}");
        for piece in &mut pieces {
            guest.write(piece.at, &vec![0; piece.len as usize]);
            piece.is_writable = true;
        }
        let request = Request { kind: kind::READ, ..request };
        ring.start_indirect(&guest, 0, request, &pieces);
        ring.kick(&guest, 1);
        assert_eq!(ring.finish(&guest), (0, 0, len + 1), "{count}");
        let seen = pieces.iter().flat_map(|piece| guest.read(piece.at, piece.len as usize));
        assert!(seen.collect::<Vec<_>>() == data, "{count}");
    }
    // 129 pieces that total less than a sector cannot be used without a copy.
    let pieces: Vec<_> = (0..256)
        .map(|at| Piece { at: GuestRing::data_at(0) + at * 64, len: 2, is_writable: true })
        .collect();
    ring.start_indirect(&guest, 0, Request { kind: kind::READ, sector: 11, len: 512 }, &pieces);
    ring.kick(&guest, 1);
    assert_eq!(ring.finish(&guest), (0, 0, 513));
    let seen = pieces.iter().flat_map(|piece| guest.read(piece.at, 2)).collect::<Vec<_>>();
    assert!(seen == rig.disk.bytes.lock().unwrap()[11 * 512..12 * 512]);
    rig.stop();
}

#[test]
fn writes_are_durable_unless_the_driver_flushes() {
    let write = |fua| Ran { op: IoOp::Write, offset: 0, len: 512, fua, no_unmap: false };
    let flush = Ran { op: IoOp::Flush, offset: 0, len: 0, fua: false, no_unmap: false };
    for (has_fua, cached) in [(true, true), (false, true), (false, false)] {
        let geometry = Geometry { fua: has_fua, write_cache: cached, ..geometry() };
        let through: &[Ran] = match (has_fua, cached) {
            (true, _) => &[write(true)],
            (false, true) => &[write(false), flush],
            (false, false) => &[write(false)],
        };
        let rig = Rig::new(&format!("durable-{has_fua}-{cached}"), &geometry, 1);
        let (mut guest, mut ring) = guest(&rig);
        let ran = |guest: &Guest, ring: &mut GuestRing| {
            assert_eq!(ring.put(guest, 0, &[1; 512]), 0);
            rig.disk.take_ran()
        };
        assert_eq!(guest.config()[32], 1);
        assert_eq!(ran(&guest, &mut ring), [write(false)]);
        guest.set_writeback(false);
        assert_eq!(guest.config()[32], 0);
        assert_eq!(ran(&guest, &mut ring), through);
        guest.set_writeback(true);
        assert_eq!(ran(&guest, &mut ring), [write(false)]);
        // A driver that cannot flush.
        guest.disconnect();
        guest.wanted = !(1 << VIRTIO_BLK_F_FLUSH);
        guest.connect(&rig.socket, std::slice::from_mut(&mut ring));
        assert_eq!(ran(&guest, &mut ring), through);
        // Firmware is such a driver, and the driver after it can flush.
        guest.disconnect();
        guest.wanted = u64::MAX;
        guest.connect(&rig.socket, std::slice::from_mut(&mut ring));
        assert_eq!(ran(&guest, &mut ring), [write(false)]);
        rig.stop();
    }
}

#[test]
fn a_read_only_device_refuses_changes() {
    let rig = Rig::new("read-only", &Geometry { read_only: true, ..geometry() }, 1);
    let (mut guest, mut ring) = guest(&rig);
    assert!(guest.monitor().get_features().unwrap() & 1 << 5 != 0, "VIRTIO_BLK_F_RO");
    assert_eq!(ring.put(&guest, 0, &[1; 512]), 1);
    assert_eq!(ring.range(&guest, kind::ZEROES, 0, 8), 1);
    assert_eq!(ring.get(&guest, 0, 512), [0; 512]);
    assert_eq!(rig.disk.count(), 1, "only the read");
    rig.stop();
}

#[test]
fn a_failed_part_fails_the_request() {
    let rig = Rig::new("failed", &geometry(), 1);
    let (guest, mut ring) = guest(&rig);
    rig.disk.fails.store(512, Ordering::SeqCst);
    let read = |len| Request { kind: kind::READ, sector: 0, len };
    assert_eq!(ring.run(&guest, read((256 << 10) + 512)), (1, 1));
    assert_eq!(ring.run(&guest, read(512)), (1, 1));
    assert_eq!(ring.run(&guest, read(1024)), (0, 1025));
    rig.stop();
}

#[test]
fn a_ring_stops_when_its_requests_have_ended_and_resumes() {
    let rig = Rig::new("stop", &geometry(), 1);
    let (mut guest, mut ring) = guest(&rig);
    assert_eq!(ring.put(&guest, 0, &[1; 512]), 0);
    rig.hold(true);
    ring.start(&guest, 0, Request { kind: kind::READ, sector: 0, len: 512 });
    ring.kick_always();
    rig.wait_for(2);
    let orders = thread::scope(|scope| {
        let stopped = scope.spawn(|| {
            let base = guest.monitor().get_vring_base(0).unwrap();
            (base, guest.read(GuestRing::data_at(0), 1), guest)
        });
        thread::sleep(Duration::from_millis(100));
        assert!(!stopped.is_finished(), "a request is in flight");
        rig.hold(false);
        stopped.join().unwrap()
    });
    let (base, data, mut guest) = orders;
    assert_eq!((base, data), (2, vec![1]), "the data was there before the answer");
    assert_eq!(ring.finish(&guest), (0, 0, 513));
    // Nothing is taken from a stopped ring.
    ring.start(&guest, 1, Request { kind: kind::READ, sector: 0, len: 512 });
    ring.kick_always();
    rig.look();
    thread::sleep(Duration::from_millis(50));
    assert_eq!(ring.answer(&guest), None);
    let (next, seen) = (ring.next, ring.seen);
    ring.next = 2;
    ring.start_on(guest.monitor());
    (ring.next, ring.seen) = (next, seen);
    assert_eq!(ring.finish(&guest), (1, 0, 513));
    rig.stop();
}

#[test]
fn a_second_monitor_is_refused_and_a_later_one_is_served() {
    let rig = Rig::new("second", &geometry(), 1);
    let (mut guest, mut ring) = guest(&rig);
    let second = vhost::vhost_user::Frontend::connect(&rig.socket, 1).unwrap();
    assert!(second.get_features().is_err());
    assert_eq!(ring.put(&guest, 3, &[5; 512]), 0, "the first one is still served");
    guest.disconnect();
    guest.connect(&rig.socket, std::slice::from_mut(&mut ring));
    assert_eq!(ring.get(&guest, 3, 512), [5; 512]);
    rig.stop();
}
