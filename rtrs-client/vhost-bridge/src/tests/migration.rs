//! Tests of a guest that moves to another host: the dirty log, and the wait on the new host.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use rtrs_core::mem::survive_truncations;
use rtrs_core::prng::Prng;
use rtrs_core::time::Duration as Time;
use rustix::fs::ftruncate;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vmm_sys_util::eventfd::EventFd;

use super::rig::{Disk, Rig, geometry};
use crate::driver::migration::GuestLog;
use crate::driver::{GUEST_AT, Guest, GuestRing, MEMORY_LEN, PAGE, Request, kind};
use crate::shared::Shared;

/// Time to wait before checking that something has not happened.
const A_WHILE: Duration = Duration::from_millis(50);
/// Number of requests that a guest keeps in flight.
const DEPTH: u16 = 8;

/// Guest with this many rings on a device.
fn connect(rig: &Rig, count: u16) -> (Guest, Vec<GuestRing>) {
    let mut guest = Guest::recording();
    let mut rings: Vec<_> = (0..count).map(|at| GuestRing::new(at, 256, 65_500)).collect();
    rings.iter().for_each(|ring| ring.reset(&guest));
    guest.connect(&rig.socket, &mut rings);
    (guest, rings)
}

/// Starts a random request in a slot.
fn start(guest: &Guest, ring: &mut GuestRing, slot: u16, prng: &mut Prng) {
    let kind = [kind::READ, kind::READ, kind::WRITE, kind::ID][prng.index(4)];
    let sectors = 1 + prng.index(64);
    let len = if kind == kind::ID { 20 } else { 512 * sectors as u32 };
    let sector = prng.index(1024) as u64;
    if kind == kind::WRITE {
        let mut data = vec![0; len as usize];
        prng.fill(&mut data);
        guest.write(GuestRing::data_at(slot), &data);
    }
    ring.start(guest, slot, Request { kind, sector, len });
    ring.kick(guest, 1);
}

/// A copy of the guest by pages, while it works, is the guest: the log has every page that only the
/// device knows about.
#[test]
fn a_guest_is_copied_while_it_works() {
    let rig = Rig::new("copy", &geometry(), 2);
    let (mut guest, mut rings) = connect(&rig, 2);
    let prng = &mut Prng::new(41);
    let log = GuestLog::default();
    let new = Guest::default();
    for (slot, at) in (0..DEPTH).zip([0, 1].into_iter().cycle()) {
        start(&guest, &mut rings[at], slot, prng);
    }
    guest.start_log(&log, &rings);
    guest.copy_pages(&new, &(0..MEMORY_LEN / PAGE).collect());
    guest.take_written();
    let mut logged = 0;
    for _ in 0..20 {
        for _ in 0..50 {
            for ring in &mut rings {
                let (slot, status, _) = ring.finish(&guest);
                assert_eq!(status, 0);
                start(&guest, ring, slot, prng);
            }
        }
        let pages = log.take();
        logged += pages.len();
        guest.copy_pages(&new, &pages);
        guest.copy_pages(&new, &guest.take_written());
    }
    assert!(logged > 100, "only {logged} pages were logged");
    rings.iter_mut().for_each(|ring| guest.stop(ring));
    guest.copy_pages(&new, &log.take());
    guest.copy_pages(&new, &guest.take_written());
    assert!(guest.different_pages(&new).is_empty(), "the copy is complete");
    guest.disconnect();
    // From here on, the copy is the guest.
    let mut moved: Vec<_> = rings.iter().map(GuestRing::moved).collect();
    let mut new = new;
    new.connect(&rig.socket, &mut moved);
    for ring in &mut moved {
        for _ in 0..DEPTH / 2 {
            assert_eq!(ring.finish(&new).1, 0, "answered on either host");
        }
        assert_eq!(ring.put(&new, 8, &[3; 4096]), 0);
        assert_eq!(ring.get(&new, 8, 4096), [3; 4096]);
    }
    rig.stop();
}

#[test]
fn a_cancelled_migration_ends_the_log() {
    let rig = Rig::new("cancel", &geometry(), 1);
    let (mut guest, mut rings) = connect(&rig, 1);
    let log = GuestLog::default();
    guest.start_log(&log, &rings);
    assert_eq!(rings[0].get(&guest, 0, 512), [0; 512]);
    assert!(log.has(GuestRing::data_at(0)));
    guest.stop_log(&rings);
    log.take();
    assert_eq!(rings[0].get(&guest, 0, 512), [0; 512]);
    assert_eq!(log.take(), BTreeSet::new());
    // Another attempt has another log.
    let again = GuestLog::default();
    guest.start_log(&again, &rings);
    assert_eq!(rings[0].get(&guest, 0, 512), [0; 512]);
    assert!(again.has(GuestRing::data_at(0)));
    assert_eq!(log.take(), BTreeSet::new());
    rig.stop();
}

/// The crate `vhost` cannot read this message.
#[test]
fn a_call_descriptor_for_the_log_is_accepted() {
    let rig = Rig::new("log-call", &geometry(), 1);
    let (mut guest, mut rings) = connect(&rig, 1);
    let event = EventFd::new(0).unwrap();
    for _ in 0..2 {
        guest.monitor().set_log_fd(event.as_raw_fd()).unwrap();
    }
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0, "the connection is served");
    rig.stop();
}

/// A monitor that reconnects during a migration starts the rings before it passes the log.
#[test]
fn a_late_log_has_all_memory() {
    let rig = Rig::new("late", &geometry(), 1);
    let (mut guest, mut rings) = connect(&rig, 1);
    let log = GuestLog::default();
    guest.set_logging(true);
    assert_eq!(rings[0].get(&guest, 0, 512), [0; 512]);
    let len = log.file().metadata().unwrap().len();
    guest.monitor().set_log_base(0, Some(log.region(len))).unwrap();
    assert_eq!(log.take().len() as u64, MEMORY_LEN / PAGE);
    assert_eq!(rings[0].get(&guest, 0, 512), [0; 512]);
    assert!(log.has(GuestRing::data_at(0)));
    rig.stop();
}

#[test]
fn a_log_that_does_not_fit_ends_the_connection() {
    let needed = (GUEST_AT + MEMORY_LEN) / PAGE / 8;
    let rig = Rig::new("short", &geometry(), 1);
    // The file is shorter than the log, or the log does not cover the memory.
    for (file, len) in [(8, 9), (8, u64::MAX), (8, 0), (needed - 1, needed - 1)] {
        let (mut guest, _rings) = connect(&rig, 1);
        let log = GuestLog::of(file);
        let _ = guest.monitor().set_log_base(0, Some(log.region(len)));
        let features = guest.monitor().get_features();
        if features.is_ok() {
            guest.try_logging().expect_err("a short log");
        }
        guest.wait_for_cut("a log that does not fit");
    }
    // The used ring is beyond the log, or beyond all addresses.
    for address in [GUEST_AT + MEMORY_LEN - 8, u64::MAX - 8, u64::MAX] {
        let (mut guest, rings) = connect(&rig, 1);
        guest.start_log(&GuestLog::default(), &rings);
        guest.try_used_log(&rings[0], address).expect_err("an address outside the log");
        guest.wait_for_cut("an address outside the log");
    }
    let (guest, mut rings) = connect(&rig, 1);
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0, "the next connection is served");
    rig.stop();
}

#[test]
fn a_truncated_log_ends_the_connection() {
    survive_truncations().unwrap();
    let rig = Rig::new("cut-log", &geometry(), 1);
    let (mut guest, mut rings) = connect(&rig, 1);
    let log = GuestLog::default();
    guest.start_log(&log, &rings);
    assert_eq!(rings[0].get(&guest, 0, 512), [0; 512]);
    ftruncate(log.file(), 0).unwrap();
    rings[0].start(&guest, 0, Request { kind: kind::READ, sector: 0, len: 512 });
    rings[0].kick_always();
    guest.wait_for_cut("the log was truncated");
    let (guest, mut rings) = connect(&rig, 1);
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0, "the next connection is served");
    rig.stop();
}

/// The process of the new host has died with requests in flight, and the server is away.
#[test]
fn a_stop_while_the_device_is_not_exclusive_fails_requests_of_a_dead_process() {
    let rig = Rig::new("held-left", &geometry(), 1);
    let (mut guest, mut rings) = connect(&rig, 1);
    let ring = &mut rings[0];
    rig.hold(true);
    for slot in 0..DEPTH {
        ring.start(&guest, slot, Request { kind: kind::WRITE, sector: 0, len: 512 });
        ring.kick(&guest, 1);
    }
    rig.wait_for(DEPTH.into());
    let disk = rig.kill();
    guest.disconnect();
    disk.is_shared.store(true, Ordering::SeqCst);
    let shared = Shared::new("volume", 1).unwrap().with_drain(Time::from_millis(100));
    let rig = Rig::of("held-left", &geometry(), disk, shared);
    guest.connect(&rig.socket, &mut rings);
    rig.wait_for_claim();
    let ring = &mut rings[0];
    guest.stop(ring);
    assert_eq!(ring.base, Some(ring.next), "each request is answered");
    for _ in 0..DEPTH {
        assert_eq!(ring.finish(&guest).1, 1, "with an error");
    }
    assert_eq!(ring.answer(&guest), None);
    rig.stop();
}

/// Monitors do not transfer the cache mode of a guest.
#[test]
fn a_guest_that_arrives_writes_through_until_it_sets_its_mode() {
    let arrival = |disk| {
        let shared = Shared::new("volume", 1).unwrap().with_arrival(true);
        Rig::of("arrival", &geometry(), disk, shared)
    };
    let rig = arrival(Disk::new(&geometry()));
    let (mut guest, mut rings) = connect(&rig, 1);
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0);
    assert!(rig.disk.take_ran()[0].fua, "the guest may not flush");
    guest.set_writeback(true);
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0);
    assert!(!rig.disk.take_ran()[0].fua);
    // The process dies. The guest has not moved since it set the mode.
    let disk = rig.kill();
    guest.disconnect();
    let rig = arrival(disk);
    guest.connect(&rig.socket, &mut rings);
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0);
    assert!(!rig.disk.take_ran()[0].fua);
    guest.monitor().reset_device().unwrap();
    assert_eq!(guest.config()[32], 1, "a guest that restarts has the usual mode");
    rig.stop();
}

/// A guest waits on the new host, is killed, and continues on the old host, where it changes its
/// cache mode. Then it moves again.
#[test]
fn a_guest_that_could_not_use_the_device_has_not_arrived() {
    let disk = Disk::new(&geometry());
    disk.is_shared.store(true, Ordering::SeqCst);
    let shared = Shared::new("volume", 1).unwrap().with_arrival(true);
    let rig = Rig::of("gone", &geometry(), disk, shared);
    let (mut guest, mut rings) = connect(&rig, 1);
    rings[0].start(&guest, 0, Request { kind: kind::WRITE, sector: 0, len: 512 });
    rings[0].kick_always();
    rig.wait_for_claim();
    assert_eq!(rig.disk.releases.load(Ordering::SeqCst), 0);
    guest.stop(&mut rings[0]);
    rig.look();
    rig.wait_for_release();
    guest.disconnect();
    let (guest, mut rings) = connect(&rig, 1);
    rig.promote();
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0);
    assert!(rig.disk.take_ran()[0].fua, "the mode that it has now is unknown");
    assert_eq!(rig.disk.releases.load(Ordering::SeqCst), 1);
    rig.stop();
}

/// The guest runs on the new host before the session of the old host has ended.
#[test]
fn requests_wait_until_the_device_is_exclusive() {
    for shards in [1, 2] {
        let disk = Disk::new(&geometry());
        disk.is_shared.store(true, Ordering::SeqCst);
        let rig = Rig::on(&format!("held-{shards}"), &geometry(), shards, disk);
        assert_eq!(rig.disk.claims.load(Ordering::SeqCst), 0, "no guest has started");
        let (mut guest, mut rings) = connect(&rig, 2);
        for ring in &mut rings {
            ring.start(&guest, ring.index, Request { kind: kind::WRITE, sector: 0, len: 512 });
            ring.kick_always();
        }
        rig.wait_for_claim();
        rig.look();
        thread::sleep(A_WHILE);
        assert_eq!(rig.disk.submitted.load(Ordering::SeqCst), 0);
        assert!(!rig.has_only_kicks(), "the memory is shared");
        // A stop does not wait for requests that were not taken.
        let stopped = &rings[1];
        let base = guest.monitor().get_vring_base(stopped.index.into()).unwrap();
        assert_eq!(base, u32::from(stopped.next.wrapping_sub(1)));
        rig.promote();
        assert_eq!(rings[0].finish(&guest), (0, 0, 1));
        assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0);
        assert_eq!(rig.disk.count(), 2);
        rig.stop();
    }
}
