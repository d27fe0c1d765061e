//! Tests of a volume that waits for exclusive access on the new host of a virtual machine.

use rtrs_core::block::BlockDevice;
use rtrs_core::wire::{AccessMode, OpenFlags, errno};

use super::fixture::{Fixture, SEC};
use crate::engine::DeviceIndex;

#[test]
fn a_claimed_volume_waits_until_the_server_grants_exclusive_access() {
    let mut fixture = Fixture::open(|s| {
        (s.how.fence, s.how.server_id, s.how.rw_errno) = (true, Some([1; 16]), errno::EPERM);
        let volume = &mut s.config.volumes[0];
        (volume.access, volume.promotes) = (AccessMode::Migration, true);
    });
    let waits = Some((AccessMode::Migration, OpenFlags { returns: false, waits: true }));
    fixture.run(SEC);
    assert_eq!(fixture.server.last_open, waits, "the device is not claimed");
    let mut devices = [0, 1].map(|shard| fixture.client.device(shard, DeviceIndex::FIRST));
    assert!(!devices[1].claim());
    let held_by = |s: &Fixture| s.client.control.view().volumes(s.now())[0].held_by;
    fixture.until("a refusal", SEC, |s| held_by(s) == Some(errno::EPERM));
    let alone = Some((AccessMode::ReadWrite, OpenFlags { returns: true, waits: false }));
    assert_eq!(fixture.server.last_open, alone);
    fixture.server.how.rw_errno = errno::EACCES;
    fixture.until("another reason", SEC, |s| held_by(s) == Some(errno::EACCES));
    assert!(!devices[0].claim());
    fixture.server.end_path(fixture.now(), 0);
    fixture.run(SEC / 20);
    assert_eq!(held_by(&fixture), None, "no path");
    let again = Some((AccessMode::Migration, OpenFlags { returns: true, waits: true }));
    fixture.until("the volume", 5 * SEC, |s| s.server.last_open == again);
    fixture.server.how.rw_errno = 0;
    fixture.until("exclusive access", SEC, |s| {
        [0, 1].iter().all(|shard| !s.client.info(*shard, DeviceIndex::FIRST).is_shared)
    });
    assert!(devices.iter_mut().all(BlockDevice::claim) && held_by(&fixture).is_none());
    // Every later open asks for the same.
    fixture.server.last_open = None;
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("the path", 5 * SEC, |s| s.server.last_open.is_some());
    assert_eq!(fixture.server.last_open, alone);
}
