//! Tests of rings that are stopped, paused and restarted, and of memory that changes.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use rtrs_core::block::Geometry;
use rtrs_core::mem::TruncationAlarm;
use rtrs_core::rt::mailbox;
use rtrs_core::time::Duration as Time;
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{VhostUserBackendReqHandlerMut, VhostUserFrontend};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};

use super::rig::{Disk, Rig, geometry};
use crate::driver::{Guest, GuestRing, Request, kind};
use crate::monitor::Monitor;
use crate::shared::Shared;

const READ: Request = Request { kind: kind::READ, sector: 0, len: 512 };
const WRITE: Request = Request { kind: kind::WRITE, sector: 0, len: 512 };
/// Time to wait before checking that something has not happened.
const A_WHILE: Duration = Duration::from_millis(50);

/// Guest with one ring on a device.
fn connect(rig: &Rig, mut guest: Guest) -> (Guest, GuestRing) {
    let mut rings = [GuestRing::new(0, 256, 0)];
    rings[0].reset(&guest);
    guest.connect(&rig.socket, &mut rings);
    let [ring] = rings;
    (guest, ring)
}

#[test]
fn requests_that_do_not_end_in_time_fail() {
    let disk = Disk::new(&geometry());
    disk.holds.store(true, Ordering::SeqCst);
    let shared = Shared::new("volume", 1).unwrap().with_drain(Time::from_millis(100));
    let rig = Rig::of("drain", &geometry(), disk, shared);
    let (mut guest, mut ring) = connect(&rig, Guest::recording());
    disk_has(&rig, &[7; 512]);
    guest.write(GuestRing::data_at(0), &[9; 512]);
    for (slot, request) in [(0, READ), (1, READ), (2, WRITE)] {
        ring.start(&guest, slot, request);
    }
    ring.kick_always();
    rig.wait_for(3);
    rig.disk.keeps.store(true, Ordering::SeqCst);
    assert_eq!(guest.monitor().get_vring_base(0).unwrap(), 3);
    let mut answers = [0; 3].map(|_| ring.finish(&guest));
    answers.sort_unstable();
    assert_eq!(answers, [(0, 1, 1), (1, 1, 1), (2, 1, 1)], "failed");
    // The write may still land, so no IO is submitted until it has ended.
    ring.start_on(guest.monitor());
    ring.start(&guest, 3, READ);
    ring.kick_always();
    rig.look();
    thread::sleep(A_WHILE);
    assert_eq!((ring.answer(&guest), rig.disk.count()), (None, 0));
    rig.hold(false);
    assert_eq!(ring.finish(&guest), (3, 0, 513));
    assert_eq!(rig.disk.count(), 4);
    // Data of late answers does not reach the guest's memory.
    assert_eq!(guest.read(GuestRing::data_at(0), 512), [9; 512]);
    assert_eq!(ring.get(&guest, 1, 512), [0; 512], "the ring goes on");
    rig.stop();
}

fn disk_has(rig: &Rig, bytes: &[u8]) {
    rig.disk.bytes.lock().unwrap()[..bytes.len()].copy_from_slice(bytes);
}

#[test]
fn a_process_without_time_answers_what_is_not_recorded() {
    for is_recording in [false, true] {
        let rig = Rig::new(&format!("abort-{is_recording}"), &geometry(), 1);
        let guest = if is_recording { Guest::recording() } else { Guest::default() };
        let (mut guest, mut ring) = connect(&rig, guest);
        rig.hold(true);
        ring.start(&guest, 0, READ);
        ring.kick_always();
        rig.wait_for(1);
        let disk = rig.abort();
        if !is_recording {
            assert_eq!(ring.finish(&guest), (0, 1, 1));
            continue;
        }
        assert_eq!(ring.answer(&guest), None);
        disk.holds.store(false, Ordering::SeqCst);
        guest.disconnect();
        let rig = Rig::on("abort", &geometry(), 1, disk);
        guest.connect(&rig.socket, std::slice::from_mut(&mut ring));
        assert_eq!(ring.finish(&guest), (0, 0, 513));
        rig.stop();
    }
}

/// The abort interrupts a request that exceeds all buffers, and a write that a flush is to follow.
#[test]
fn nothing_is_submitted_after_an_abort() {
    for is_long in [true, false] {
        let geometry = Geometry { fua: is_long, write_cache: true, ..geometry() };
        let rig = Rig::new(&format!("cut-{is_long}"), &geometry, 1);
        let (mut guest, mut ring) = connect(&rig, Guest::default());
        guest.set_writeback(false);
        rig.hold(true);
        let len = if is_long { 3 << 20 } else { 512 };
        ring.start(&guest, 0, Request { len, ..WRITE });
        ring.kick_always();
        let submitted = if is_long { 8 } else { 1 };
        rig.wait_for(submitted);
        let disk = rig.abort_held();
        assert_eq!(disk.submitted.load(Ordering::SeqCst), submitted);
        assert_eq!(ring.finish(&guest), (0, 1, 1), "failed");
    }
}

#[test]
fn a_disabled_ring_pauses() {
    let rig = Rig::new("pause", &geometry(), 1);
    let (mut guest, mut ring) = connect(&rig, Guest::default());
    assert!(guest.enable(0, false));
    ring.start(&guest, 0, READ);
    ring.kick_always();
    rig.look();
    thread::sleep(A_WHILE);
    assert_eq!((ring.answer(&guest), rig.disk.count()), (None, 0));
    assert!(guest.enable(0, true));
    assert_eq!(ring.finish(&guest), (0, 0, 513));
    rig.stop();
}

/// QEMU before 7.2 restarts rings without enabling them again, and replaces the kick descriptor of
/// a running ring.
#[test]
fn a_ring_stays_enabled_when_it_restarts_or_its_kicks_change() {
    let rig = Rig::new("enabled", &geometry(), 1);
    let (mut guest, mut ring) = connect(&rig, Guest::default());
    assert_eq!(ring.put(&guest, 0, &[1; 512]), 0);
    ring.renew_kick(guest.monitor());
    assert_eq!(ring.get(&guest, 0, 512), [1; 512]);
    let base = guest.monitor().get_vring_base(0).unwrap();
    assert_eq!(base, u32::from(ring.next));
    guest.monitor().set_vring_base(0, ring.next).unwrap();
    ring.renew_kick(guest.monitor());
    assert_eq!(ring.get(&guest, 0, 512), [1; 512]);
    rig.stop();
}

#[test]
fn the_mode_of_a_guest_that_arrives_is_unknown_until_its_driver_is() {
    let shared = Arc::new(Shared::new("volume", 1).unwrap().with_arrival(true));
    let (sender, mailbox) = mailbox().unwrap();
    drop(mailbox);
    let mut monitor = Monitor::new(&shared, &[sender], &TruncationAlarm::new().unwrap());
    // QEMU resets the device before it loads the guest.
    monitor.reset_device().unwrap();
    let [flush, wce] = [VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_CONFIG_WCE].map(|bit| 1_u64 << bit);
    for (features, is_writeback) in [(flush | wce, false), (flush, true), (flush | wce, false)] {
        monitor.set_features(features).unwrap();
        assert_eq!(shared.is_writeback(), is_writeback, "{features:#x}");
    }
    monitor.set_config(32, &[1], VhostUserConfigFlags::WRITABLE).unwrap();
    monitor.set_features(flush | wce).unwrap();
    assert!(shared.is_writeback());
}

/// The shards have ended, as they do when the session has failed.
#[test]
fn queries_are_answered_without_a_device() {
    let shared = Arc::new(Shared::new("volume", 1).unwrap());
    *shared.geometry.lock() = geometry();
    let (sender, mailbox) = mailbox().unwrap();
    drop(mailbox);
    let mut monitor = Monitor::new(&shared, &[sender], &TruncationAlarm::new().unwrap());
    let config = monitor.get_config(0, 60, VhostUserConfigFlags::empty()).unwrap();
    assert_eq!(config[..8], (geometry().size / 512).to_le_bytes());
    assert!(monitor.get_features().is_ok() && monitor.get_queue_num().is_ok());
    assert!(monitor.get_vring_base(0).is_ok() && !monitor.end());
    // Before the first open, there is a device without blocks.
    *shared.geometry.lock() = Geometry::default();
    let config = monitor.get_config(0, 60, VhostUserConfigFlags::empty()).unwrap();
    assert_eq!((config.len(), &config[..8]), (60, &[0; 8][..]));
}

#[test]
fn a_reset_device_begins_anew() {
    let rig = Rig::new("reset", &geometry(), 1);
    let (mut guest, mut ring) = connect(&rig, Guest::default());
    assert_eq!(ring.put(&guest, 0, &[1; 512]), 0);
    guest.set_writeback(false);
    guest.monitor().reset_device().unwrap();
    assert_eq!(guest.config()[32], 1, "the cache mode is the usual one");
    ring.start(&guest, 0, READ);
    ring.kick_always();
    rig.look();
    thread::sleep(A_WHILE);
    assert_eq!(ring.answer(&guest), None);
    let features = guest.monitor().get_features().unwrap();
    guest.monitor().set_features(features).unwrap();
    ring = GuestRing::new(0, 256, 0);
    ring.use_events();
    ring.reset(&guest);
    ring.start_on(guest.monitor());
    assert_eq!(ring.get(&guest, 0, 512), [1; 512]);
    rig.stop();
}

/// If a ring stays empty after a kick, its memory is not shared.
#[test]
fn kicks_without_requests_are_noticed() {
    let rig = Rig::new("kicks", &geometry(), 1);
    let (mut guest, mut ring) = connect(&rig, Guest::recording());
    assert!(!rig.has_only_kicks());
    ring.kick_always();
    let begin = std::time::Instant::now();
    while !rig.has_only_kicks() {
        assert!(begin.elapsed().as_secs() < 60, "the kick is not noticed");
        thread::sleep(Duration::from_millis(5));
    }
    guest.disconnect();
    guest.connect(&rig.socket, std::slice::from_mut(&mut ring));
    assert_eq!(ring.put(&guest, 0, &[1; 512]), 0);
    assert!(!rig.has_only_kicks());
    let disk = rig.kill();
    guest.disconnect();
    let rig = Rig::on("kicks", &geometry(), 1, disk);
    guest.connect(&rig.socket, std::slice::from_mut(&mut ring));
    ring.kick_always();
    assert_eq!(ring.get(&guest, 0, 512), [1; 512]);
    assert!(!rig.has_only_kicks(), "an idle guest after a restart");
    rig.stop();
}

#[test]
fn the_number_of_rings_can_be_limited() {
    let shared = Shared::new("volume", 2).unwrap().with_queues(Some(3));
    let rig = Rig::of("queues", &geometry(), Disk::new(&geometry()), shared);
    let mut guest = Guest::default();
    let mut rings = [0, 1, 2].map(|index| GuestRing::new(index, 256, 0));
    rings.iter().for_each(|ring| ring.reset(&guest));
    guest.connect(&rig.socket, &mut rings);
    assert_eq!(guest.config()[34..36], [3, 0]);
    for ring in &mut rings {
        assert_eq!(ring.put(&guest, 0, &[1; 512]), 0);
    }
    assert_eq!(guest.monitor().get_queue_num().unwrap(), 3);
    rig.stop();
    let shared = Arc::new(Shared::new("volume", 2).unwrap().with_queues(Some(3)));
    let (sender, _shard) = mailbox().unwrap();
    let mut monitor = Monitor::new(&shared, &[sender], &TruncationAlarm::new().unwrap());
    assert!(monitor.set_vring_num(2, 64).is_ok() && monitor.set_vring_num(3, 64).is_err());
}

#[test]
fn a_monitor_learns_a_new_size() {
    let rig = Rig::new("size", &geometry(), 1);
    let (mut guest, mut ring) = connect(&rig, Guest::default());
    let (mut mine, passed) = UnixStream::pair().unwrap();
    mine.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    guest.pass_channel(&passed);
    drop(passed);
    for size in [32 << 20, 48_u64 << 20] {
        rig.disk.bytes.lock().unwrap().resize(size as usize, 0);
        rig.disk.size.store(size, Ordering::SeqCst);
        rig.look();
        let mut message = [0; 12];
        mine.read_exact(&mut message).unwrap();
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(guest.config()[..8], (size / 512).to_le_bytes());
        assert_eq!(ring.put(&guest, size / 512 - 1, &[5; 512]), 0);
    }
    guest.disconnect();
    mine.set_read_timeout(None).unwrap();
    assert_eq!(mine.read(&mut [0; 12]).unwrap(), 0, "the channel ends with the connection");
    rig.stop();
}

/// The guest's driver keeps its features when the geometry changes and the monitor reconnects.
#[test]
fn a_change_of_the_geometry_takes_no_feature_from_a_running_driver() {
    let rig = Rig::new("features", &geometry(), 1);
    let (mut guest, ring) = connect(&rig, Guest::default());
    let offered = guest.monitor().get_features().unwrap();
    rig.disk.is_plain.store(true, Ordering::SeqCst);
    rig.look();
    let begin = std::time::Instant::now();
    while guest.monitor().get_features().unwrap() == offered {
        assert!(begin.elapsed().as_secs() < 60, "the features do not change");
        thread::sleep(Duration::from_millis(5));
    }
    guest.monitor().set_features(offered).unwrap();
    guest.disconnect();
    let mut rings = [ring];
    guest.kept_features = Some(offered);
    guest.connect(&rig.socket, &mut rings);
    let [mut ring] = rings;
    assert_eq!(ring.put(&guest, 8, &[1; 512]), 0);
    assert_eq!(ring.range(&guest, kind::DISCARD, 8, 8), 2, "unsupported");
    assert_eq!(ring.get(&guest, 8, 512), [1; 512]);
    rig.stop();
}

#[test]
fn memory_may_change_while_requests_are_in_flight() {
    let rig = Rig::new("table", &geometry(), 1);
    let (mut guest, mut ring) = connect(&rig, Guest::default());
    disk_has(&rig, &[3; 512]);
    rig.hold(true);
    ring.start(&guest, 0, READ);
    ring.kick_always();
    rig.wait_for(1);
    // The same memory, mapped again.
    let region = guest.region();
    guest.monitor().set_mem_table(&[region]).unwrap();
    rig.hold(false);
    assert_eq!(ring.finish(&guest), (0, 0, 513));
    assert_eq!(guest.read(GuestRing::data_at(0), 512), [3; 512]);
    assert_eq!(ring.get(&guest, 0, 512), [3; 512]);
    rig.stop();
}
