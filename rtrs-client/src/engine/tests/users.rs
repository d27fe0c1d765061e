//! Users of a session's other devices, and sessions with several volumes.

use std::collections::BTreeMap;

use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::status::IoStatus;

use super::fixture::{Fixture, MS, SEC, Setup, volume};
use crate::engine::{DeviceIndex, SessionDevice};
use crate::path::state::PathState;

/// Second device of a session.
pub(super) const SECOND: DeviceIndex = DeviceIndex(1);

/// Users of a device, one on each shard.
pub(super) struct Users {
    devices: Vec<SessionDevice>,
    ended: BTreeMap<u64, IoStatus>,
    next_tag: u64,
}

impl Users {
    /// Creates the users of a device that is known to all shards.
    pub(super) fn of(fixture: &Fixture, device: DeviceIndex) -> Self {
        let shards = 0..fixture.client.shards();
        let open = |shard| {
            let mut queue = fixture.client.device(shard, device);
            queue.attach_region(fixture.client.region(shard)).expect("memory is registered");
            queue
        };
        let devices = shards.map(open).collect();
        Self { devices, ended: BTreeMap::new(), next_tag: 1 }
    }

    /// Submits an IO whose buffer follows those of the first device.
    pub(super) fn submit(
        &mut self,
        fixture: &mut Fixture,
        shard: usize,
        op: IoOp,
        offset: u64,
        len: u32,
    ) -> u64 {
        let tag = self.try_submit(fixture, shard, op, offset, len);
        tag.expect("room")
    }

    /// Like [`Self::submit`], but returns None if the shard has no room.
    pub(super) fn try_submit(
        &mut self,
        fixture: &mut Fixture,
        shard: usize,
        op: IoOp,
        offset: u64,
        len: u32,
    ) -> Option<u64> {
        let tag = self.next_tag;
        let at = (1 << 20) + offset as usize % (1 << 20);
        let buf = matches!(op, IoOp::Read | IoOp::Write)
            .then(|| fixture.client.buffer(shard, at, len as usize));
        let device = &mut self.devices[shard];
        device.poll(fixture.now());
        device.submit(Io { tag, op, flags: IoFlags::default(), offset, len, buf }).ok()?;
        self.next_tag += 1;
        Some(tag)
    }

    /// Takes completions.
    pub(super) fn reap(&mut self) {
        for done in self.devices.iter_mut().flat_map(|device| std::iter::from_fn(|| device.reap()))
        {
            assert_eq!(self.ended.insert(done.tag, done.status), None, "IO {} twice", done.tag);
        }
    }

    /// Final status of an IO, once it has completed.
    pub(super) fn status(&mut self, tag: u64) -> Option<IoStatus> {
        self.reap();
        self.ended.get(&tag).copied()
    }

    /// Number of IOs that have completed.
    pub(super) fn ended(&mut self) -> usize {
        self.reap();
        self.ended.len()
    }

    /// Performs an IO and waits for its completion.
    pub(super) fn run(&mut self, fixture: &mut Fixture, op: IoOp) -> IoStatus {
        let tag = self.submit(fixture, 0, op, 4096, 4096);
        for _ in 0..1000 {
            if let Some(status) = self.status(tag) {
                return status;
            }
            fixture.run(10 * MS);
        }
        panic!("{op:?} does not end");
    }

    /// Writes a pattern and reads it back.
    pub(super) fn check(&mut self, fixture: &mut Fixture, pattern: u8) {
        let buffer = fixture.client.buffer(0, (1 << 20) + 4096, 4096);
        buffer.fill(pattern);
        assert_eq!(self.run(fixture, IoOp::Write), IoStatus::Ok);
        buffer.fill(!pattern);
        assert_eq!(self.run(fixture, IoOp::Read), IoStatus::Ok);
        assert_eq!(buffer.to_vec(), [pattern; 4096]);
    }
}

impl Fixture {
    /// Ends a path from the server's side, and waits until it reconnects.
    pub(super) fn restart_path(&mut self, path: usize) {
        let uuid = 0xa0 + u8::try_from(path).expect("few paths");
        let at = self.server.paths.iter().position(|p| p.uuid.0[0] == uuid).expect("a path");
        self.server.end_path(self.now(), at);
        self.until("the end of the path", SEC, |s| s.client.states()[path] != PathState::Connected);
        self.until("the path", 5 * SEC, |s| {
            s.client.states()[path] == PathState::Connected && !s.client.has_messages()
        });
    }

    /// Exports of the volumes that have a user.
    pub(super) fn volumes(&self) -> Vec<String> {
        let volumes = self.client.control.view().volumes(self.now()).into_iter();
        volumes.filter(|volume| volume.used).map(|volume| volume.export).collect()
    }

    /// Exports of all volumes, including those being closed.
    pub(super) fn all_volumes(&self) -> Vec<String> {
        let volumes = self.client.control.view().volumes(self.now()).into_iter();
        volumes.map(|volume| volume.export).collect()
    }

    /// Paths that serve a device for IO on shard 0.
    pub(super) fn serving(&self, device: DeviceIndex) -> Vec<usize> {
        self.client.serving(0, device)
    }

    /// Whether all paths are connected and serve this number of devices.
    pub(super) fn serves_all(&self, devices: u16) -> bool {
        let paths = self.client.states().len();
        let all = |device| {
            (0..self.client.shards())
                .all(|shard| self.client.serving(shard, DeviceIndex(device)).len() == paths)
        };
        self.is_whole() && (0..devices).all(all)
    }
}

/// Opens a session whose second volume is served by all paths.
pub(super) fn with_second(change: impl FnOnce(&mut Setup)) -> Fixture {
    let mut fixture = new_with_second(change);
    fixture.until("both volumes", 2 * SEC, |s| s.serves_all(2));
    fixture
}

/// Creates a session with a second volume, before anything has happened.
pub(super) fn new_with_second(change: impl FnOnce(&mut Setup)) -> Fixture {
    let mut fixture = Fixture::new(|s| {
        s.config.volumes.push(volume("vol1"));
        change(s);
    });
    fixture.server.more.add("vol1", 1 << 20);
    fixture
}
