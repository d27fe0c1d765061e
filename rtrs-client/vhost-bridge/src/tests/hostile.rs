//! Tests of drivers and monitors that break the rules: they lose only their own ring or connection.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rtrs_core::mem::survive_truncations;
use rtrs_core::prng::Prng;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::rig::{Rig, geometry};
use crate::driver::{
    GUEST_AT, Guest, GuestRing, MEMORY_LEN, Piece, RawDescriptor, Request, SLOTS_AT, kind,
};
use crate::memory::MAPPED_MAX;

const LONG: Duration = Duration::from_secs(60);

/// Guest with two rings on a device.
fn guest(rig: &Rig) -> (Guest, [GuestRing; 2]) {
    let (mut guest, mut rings) = (Guest::default(), [0, 1].map(|at| GuestRing::new(at, 256, 0)));
    rings.iter().for_each(|ring| ring.reset(&guest));
    guest.connect(&rig.socket, &mut rings);
    (guest, rings)
}

fn read(sector: u64) -> Request {
    Request { kind: kind::READ, sector, len: 512 }
}

#[test]
fn a_fault_stops_its_ring_until_it_starts_again() {
    type Break = fn(&Guest, &mut GuestRing);
    let cases: [Break; 6] = [
        |guest, ring| ring.publish(guest, ring.next.wrapping_add(300)),
        |guest, ring| ring.offer(guest, 256),
        // A chain that loops.
        |guest, ring| {
            let piece = Piece { at: 0, len: 16, is_writable: false };
            ring.describe(guest, 0, RawDescriptor::new(piece, Some(0)));
            ring.offer(guest, 0);
        },
        // A header of 15 bytes.
        |guest, ring| {
            let piece = Piece { at: 0, len: 15, is_writable: false };
            ring.describe(guest, 0, RawDescriptor::new(piece, None));
            ring.offer(guest, 0);
        },
        // No memory for the status.
        |guest, ring| {
            let piece = Piece { at: 0, len: 16, is_writable: false };
            ring.describe(guest, 0, RawDescriptor::new(piece, None));
            ring.offer(guest, 0);
        },
        // The status is in memory that the guest does not have.
        |guest, ring| {
            let header = Piece { at: 0, len: 16, is_writable: false };
            let status = Piece { at: MEMORY_LEN, len: 1, is_writable: true };
            ring.describe(guest, 0, RawDescriptor::new(header, Some(1)));
            ring.describe(guest, 1, RawDescriptor::new(status, None));
            ring.offer(guest, 0);
        },
    ];
    let rig = Rig::new("fault", &geometry(), 1);
    for break_ring in cases {
        let (mut guest, [mut broken, mut other]) = guest(&rig);
        assert_eq!(broken.put(&guest, 0, &[1; 512]), 0);
        rig.hold(true);
        let submitted = rig.disk.submitted.load(Ordering::SeqCst);
        broken.start(&guest, 1, read(0));
        broken.kick_always();
        rig.wait_for(submitted + 1);
        break_ring(&guest, &mut broken);
        broken.kick_always();
        assert!(broken.is_faulty(LONG));
        rig.hold(false);
        assert_eq!(broken.finish(&guest), (1, 0, 513), "it was in flight");
        assert_eq!(other.get(&guest, 0, 512), [1; 512], "the other ring is served");
        broken.start(&guest, 2, read(0));
        broken.kick_always();
        assert_eq!(other.get(&guest, 0, 512), [1; 512]);
        assert_eq!(broken.answer(&guest), None);

        guest.monitor().get_vring_base(0).unwrap();
        let mut ring = GuestRing::new(0, 256, 0);
        ring.reset(&guest);
        ring.start_on(guest.monitor());
        assert_eq!(ring.put(&guest, 0, &[1; 512]), 0, "it was started again");
        guest.disconnect();
    }
    rig.stop();
}

#[test]
fn a_ring_of_random_bytes_breaks_nothing_else() {
    let rig = Rig::new("random", &geometry(), 2);
    let prng = &mut Prng::new(11);
    let (mut guest, [mut random, mut other]) = guest(&rig);
    for round in 0..300_u32 {
        let mut bytes = vec![0; 4096];
        prng.fill(&mut bytes);
        // Most addresses are in memory and most lengths are short, so that chains are followed.
        for descriptor in bytes.chunks_exact_mut(16) {
            let at = GUEST_AT + (1 << 20) + (prng.index(64 << 10) as u64);
            if prng.index(10) > 0 {
                descriptor[..8].copy_from_slice(&at.to_le_bytes());
                descriptor[9..12].fill(0);
            }
            descriptor[12] &= 7;
            descriptor[15] = 0;
        }
        guest.write(0, &bytes);
        for _ in 0..8 {
            random.offer(&guest, prng.index(256) as u16);
        }
        random.kick_always();
        assert_eq!(other.put(&guest, 0, &[round as u8; 512]), 0, "{round}");
        guest.monitor().get_vring_base(0).unwrap();
        random = GuestRing::new(0, 256, 0);
        random.reset(&guest);
        random.start_on(guest.monitor());
    }
    assert_eq!(random.put(&guest, 0, &[1; 512]), 0);
    rig.stop();
}

/// Sends these bytes as messages, and returns whether the device has cut the connection.
fn is_cut(rig: &Rig, bytes: &[u8]) -> bool {
    let mut stream = UnixStream::connect(&rig.socket).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let sent = stream.write_all(bytes);
    let is_over = |error: &io::Error| {
        [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error.kind())
    };
    // The end of the stream makes the device notice an incomplete message.
    let sent = sent.and_then(|()| stream.shutdown(std::net::Shutdown::Write));
    let ended = sent.and_then(|()| stream.read_to_end(&mut Vec::new()).map(drop));
    ended.as_ref().err().is_none_or(is_over)
}

fn message(code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let words = [code, flags, body.len() as u32].map(u32::to_le_bytes);
    [words.as_flattened(), body].concat()
}

#[test]
fn bad_messages_end_the_connection() {
    let rig = Rig::new("messages", &geometry(), 1);
    let prng = &mut Prng::new(13);
    let mut cases = vec![
        vec![],
        vec![1],
        vec![0xff; 64],
        message(1, 2, &[]),
        message(999, 1, &[]),
        message(0, 1, &[]),
        message(5, 1, &[0; 8]),
        message(5, 1, &[0xff; 4096]),
        message(24, 1, &[0xff; 12]),
        message(12, 1, &[0; 8]),
        [message(2, 1, &[0; 8]), message(11, 1, &[0xff; 8])].concat(),
    ];
    for code in 1..45 {
        for len in [0, 4, 8, 12, 40, 48] {
            let mut body = vec![0; len];
            prng.fill(&mut body);
            cases.push(message(code, 1, &body));
        }
    }
    for case in cases {
        assert!(is_cut(&rig, &case), "{case:02x?}");
    }
    let (guest, [mut ring, _]) = guest(&rig);
    assert_eq!(ring.put(&guest, 0, &[1; 512]), 0);
    rig.stop();
}

#[test]
fn a_message_without_its_end_does_not_keep_the_service() {
    let rig = Rig::new("part", &geometry(), 1);
    let mut stream = UnixStream::connect(&rig.socket).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(&message(1, 1, &[])).unwrap();
    stream.read_exact(&mut [0; 20]).unwrap();
    stream.write_all(&[1, 0]).unwrap();
    rig.stop();
    let ended = stream.read_to_end(&mut Vec::new());
    assert!(ended.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::ConnectionReset));
}

#[test]
fn a_monitor_that_reads_no_answers_loses_its_connection() {
    let rig = Rig::new("deaf", &geometry(), 1);
    let mut stream = UnixStream::connect(&rig.socket).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    let ended = (0..1_000_000).find_map(|_| stream.write_all(&message(1, 1, &[])).err());
    let kind = ended.unwrap().kind();
    assert!([ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&kind), "{kind:?}");
    let (guest, [mut ring, _]) = guest(&rig);
    assert_eq!(ring.put(&guest, 0, &[1; 512]), 0);
    rig.stop();
}

#[test]
fn messages_that_contradict_each_other_end_the_connection() {
    type Bad = fn(&Guest, &mut vhost::vhost_user::Frontend) -> bool;
    let cases: [(&str, Bad); 11] = [
        ("a feature", |_, monitor| monitor.set_features(1 << 63).is_err()),
        ("packed rings", |_, monitor| monitor.set_features(1 << 34).is_err()),
        ("a running ring", |_, monitor| monitor.set_vring_num(0, 64).is_err()),
        ("an address", |_, monitor| {
            let address = |at| 0x7000_0000_0000 + at;
            let addresses = VringConfigData {
                queue_max_size: 256,
                queue_size: 256,
                flags: 0,
                desc_table_addr: address(MEMORY_LEN),
                used_ring_addr: address(0),
                avail_ring_addr: address(0),
                log_addr: None,
            };
            monitor.set_vring_addr(5, &addresses).is_err()
        }),
        ("a start without addresses", |_, monitor| {
            monitor.set_vring_kick(7, &EventFd::new(0).unwrap()).is_err()
        }),
        ("overlapping memory", |guest, monitor| monitor.add_mem_region(&guest.region()).is_err()),
        ("short memory", |guest, monitor| {
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: 0,
                mmap_offset: 4096,
                ..guest.region()
            };
            monitor.add_mem_region(&region).is_err()
        }),
        ("memory that is no file", |guest, monitor| {
            let file = File::open("/dev/zero").unwrap();
            let handle = file.as_raw_fd();
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: 0,
                mmap_handle: handle,
                ..guest.region()
            };
            monitor.add_mem_region(&region).is_err()
        }),
        ("too much memory", |guest, monitor| {
            let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, MAPPED_MAX).unwrap();
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: 1 << 46,
                memory_size: MAPPED_MAX - MEMORY_LEN,
                mmap_handle: file.as_raw_fd(),
                ..guest.region()
            };
            monitor.add_mem_region(&region).unwrap();
            let more =
                VhostUserMemoryRegionInfo { guest_phys_addr: 1 << 47, memory_size: 4096, ..region };
            monitor.add_mem_region(&more).is_err()
        }),
        ("unknown memory", |guest, monitor| {
            let region = VhostUserMemoryRegionInfo { guest_phys_addr: 0, ..guest.region() };
            monitor.remove_mem_region(&region).is_err()
        }),
        ("the configuration", |_, monitor| {
            let flags = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
            monitor.set_config(0, flags, &[1; 8]).is_err()
        }),
    ];
    let rig = Rig::new("contradictions", &geometry(), 1);
    for (what, bad) in cases {
        let (mut guest, _rings) = guest(&rig);
        // A different file of the same length.
        let memory = Guest::default();
        assert!(bad(&memory, guest.monitor()), "{what}");
        guest.wait_for_cut(what);
    }
    rig.stop();
}

/// The memory of a ring is taken away while the ring runs.
#[test]
fn a_ring_without_its_memory_is_stopped() {
    let rig = Rig::new("memory", &geometry(), 1);
    let (mut guest, [mut ring, _]) = guest(&rig);
    rig.hold(true);
    ring.start(&guest, 0, read(0));
    ring.kick_always();
    rig.wait_for(1);
    let region = guest.region();
    guest.monitor().remove_mem_region(&region).unwrap();
    assert!(ring.is_faulty(LONG));
    rig.hold(false);
    guest.monitor().get_vring_base(0).unwrap();
    assert_eq!(ring.answer(&guest), None, "the ring was gone");
    guest.disconnect();
    ring = GuestRing::new(0, 256, 0);
    ring.reset(&guest);
    guest.connect(&rig.socket, std::slice::from_mut(&mut ring));
    assert_eq!(ring.get(&guest, 0, 512), [0; 512]);
    rig.stop();
}

/// The monitor makes the file of the guest's memory shorter.
#[test]
fn memory_that_is_taken_away_ends_the_connection_only() {
    survive_truncations().unwrap();
    let rig = Rig::new("truncated", &geometry(), 1);
    let (mut guest, [mut ring, mut other]) = guest(&rig);
    assert_eq!(other.put(&guest, 0, &[1; 512]), 0);
    rig.hold(true);
    let submitted = rig.disk.submitted.load(Ordering::SeqCst);
    ring.start(&guest, 0, read(0));
    ring.kick_always();
    rig.wait_for(submitted + 1);
    assert!(guest.enable(0, false));
    ring.start(&guest, 1, Request { kind: kind::WRITE, ..read(0) });
    guest.truncate(SLOTS_AT);
    assert!(guest.enable(0, true));
    rig.hold(false);
    guest.wait_for_cut("memory was taken away");
    let (guest, [mut ring, _]) = self::guest(&rig);
    assert_eq!(ring.get(&guest, 0, 512), [1; 512], "nothing was written");
    rig.stop();
}

/// The header of a write is in memory that remains, but its data is in memory that was taken away.
#[test]
fn data_that_was_taken_away_is_not_written() {
    survive_truncations().unwrap();
    let rig = Rig::new("torn", &geometry(), 1);
    let (mut guest, [mut ring, mut other]) = guest(&rig);
    assert_eq!(other.put(&guest, 0, &[1; 512]), 0);
    assert!(guest.enable(0, false));
    let request = Request { kind: kind::WRITE, ..read(0) };
    let last = Piece { at: MEMORY_LEN - 512, len: 512, is_writable: false };
    ring.start_indirect(&guest, 0, request, &[last]);
    guest.truncate(MEMORY_LEN - 4096);
    assert!(guest.enable(0, true));
    guest.wait_for_cut("memory was taken away");
    assert_eq!(ring.answer(&guest).map(|_| GuestRing::status(&guest, 0)), Some(1), "failed");
    let (guest, [mut ring, _]) = self::guest(&rig);
    assert_eq!(ring.get(&guest, 0, 512), [1; 512], "nothing was written");
    rig.stop();
}
