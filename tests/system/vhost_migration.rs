//! Tests of a virtual machine that moves to another host, with a hand-written monitor and driver on
//! both hosts: the new host serves the volume once the session of the old host has ended, and no
//! write of the old host lands after that.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use rtrs_core::prng::Prng;
use rtrs_tests::{COMMAND_TIME_MAX, Client, Finished, Scratch, Server, sparse_file, wait_for};
use vhost_bridge::driver::migration::GuestLog;
use vhost_bridge::driver::{Guest, GuestRing, MEMORY_LEN, PAGE, Request, SLOTS, kind};

/// Size of the export.
const SIZE: u64 = 64 << 20;
/// Number of rings.
const RINGS: u16 = 2;

/// Host of a virtual machine: a client process and its socket.
struct Host {
    client: Client,
    socket: PathBuf,
    portal: String,
    access: &'static str,
}

impl Host {
    fn new(server: &Server, access: &'static str) -> Self {
        let client = Client::attach("v").unattached();
        let socket = client.run_dir().join("v.vhost");
        let host = Self { client, socket, portal: server.portal().to_owned(), access };
        let _ = host.attach(&[]).ok();
        host
    }

    fn attach(&self, args: &[&str]) -> Finished {
        let socket = self.socket.display().to_string();
        let words = ["attach", "v", "--path", &self.portal, "--vhost-user", &socket];
        let own = ["--access", self.access, "--session-name", self.access, "--shards", "2"];
        self.client.command(&[&words[..], &own, args].concat())
    }

    /// Waits until a guest waits for the end of the other session.
    fn wait_until_held(&self) {
        wait_for("the guest to wait", COMMAND_TIME_MAX, || {
            let status = self.client.status();
            let complaint = status["complaint"].as_str().unwrap_or_default();
            complaint.contains("another session still has the export open").then_some(())
        });
    }

    fn kill(&self) {
        self.client.signal("KILL");
        self.client.wait_gone(COMMAND_TIME_MAX);
    }
}

/// Guest on its new host.
struct Moved {
    guest: Guest,
    rings: Vec<GuestRing>,
}

/// Server, both hosts, and a guest that runs on the old one.
struct Stand {
    server: Server,
    old: Host,
    new: Host,
    image: PathBuf,
    guest: Guest,
    rings: Vec<GuestRing>,
    /// Number of the last write of each slot.
    turns: Vec<u64>,
    /// Slots whose write is not answered.
    busy: BTreeSet<u16>,
    _scratch: Scratch,
}

impl Stand {
    fn new(options: &str) -> Self {
        let scratch = Scratch::new();
        let image = scratch.path("v.img");
        sparse_file(&image, SIZE);
        let server = Server::builder().export(format!("v={}{options}", image.display())).start();
        let (old, new) = (Host::new(&server, "rw"), Host::new(&server, "migration"));
        let mut guest = Guest::recording();
        let mut rings: Vec<_> = (0..RINGS).map(|at| GuestRing::new(at, 256, 0)).collect();
        rings.iter().for_each(|ring| ring.reset(&guest));
        guest.connect(&old.socket, &mut rings);
        let turns = vec![0; usize::from(SLOTS)];
        let busy = BTreeSet::new();
        Self { server, old, new, image, guest, rings, turns, busy, _scratch: scratch }
    }

    /// Starts the next write of each idle slot. Each slot writes to a place of its own.
    fn start_all(&mut self) {
        (0..SLOTS).for_each(|slot| self.start(slot));
    }

    fn start(&mut self, slot: u16) {
        if !self.busy.insert(slot) {
            return;
        }
        let turn = &mut self.turns[usize::from(slot)];
        *turn += 1;
        self.guest.write(GuestRing::data_at(slot), &pattern(slot, *turn));
        let ring = &mut self.rings[usize::from(slot % RINGS)];
        let request = Request { kind: kind::WRITE, sector: sector(slot), len: 4096 };
        ring.start(&self.guest, slot, request);
        ring.kick(&self.guest, 1);
    }

    /// Waits for answers, and starts the next write of each slot that was answered.
    fn work(&mut self, count: usize) {
        for at in 0..count {
            let slot = self.finish(at % usize::from(RINGS));
            self.start(slot);
        }
    }

    /// Waits for the next answer of a ring. Returns its slot.
    fn finish(&mut self, ring: usize) -> u16 {
        let (slot, status, _) = self.rings[ring].finish(&self.guest);
        assert_eq!(status, 0);
        assert!(self.busy.remove(&slot), "each request is answered once");
        slot
    }

    /// Takes the answers that are there.
    fn collect(&mut self) {
        for ring in &mut self.rings {
            while let Some((slot, status)) = ring.try_finish(&self.guest) {
                assert_eq!(status, 0);
                assert!(self.busy.remove(&slot), "each request is answered once");
            }
        }
    }

    /// Waits for all answers.
    fn finish_all(&mut self) {
        while let Some(slot) = self.busy.first() {
            self.finish(usize::from(slot % RINGS));
        }
        self.collect();
    }

    /// Copies the guest's memory while the guest works, and stops the guest on the old host.
    /// Returns the guest of the new host.
    fn copy(&mut self) -> Moved {
        let (log, new) = (GuestLog::default(), Guest::recording());
        self.guest.start_log(&log, &self.rings);
        self.guest.take_written();
        self.guest.copy_pages(&new, &(0..MEMORY_LEN / PAGE).collect::<BTreeSet<_>>());
        for _ in 0..5 {
            self.work(200);
            self.guest.copy_pages(&new, &log.take());
            self.guest.copy_pages(&new, &self.guest.take_written());
        }
        self.rings.iter_mut().for_each(|ring| self.guest.stop(ring));
        self.guest.copy_pages(&new, &log.take());
        self.guest.copy_pages(&new, &self.guest.take_written());
        assert!(self.guest.different_pages(&new).is_empty(), "the copy is complete");
        Moved { guest: new, rings: self.rings.iter().map(GuestRing::moved).collect() }
    }

    /// Moves the guest: the copy continues on the new host.
    fn switch(&mut self, moved: Moved) {
        (self.guest, self.rings) = (moved.guest, moved.rings);
        self.guest.connect(&self.new.socket, &mut self.rings);
    }

    /// Checks that the disk has the last write of each slot.
    fn check(&mut self) {
        for slot in 0..SLOTS {
            let expected = pattern(slot, self.turns[usize::from(slot)]);
            let found = self.rings[0].get(&self.guest, sector(slot), 4096);
            assert!(found == expected, "slot {slot}");
        }
    }

    /// Data of all slots on the disk.
    fn on_disk(&self) -> Vec<u8> {
        let image = fs::read(&self.image).expect("the image");
        image[..usize::from(SLOTS) * 4096].to_vec()
    }
}

/// Place to which a slot writes.
fn sector(slot: u16) -> u64 {
    u64::from(slot) * 8
}

/// Data of a slot's write.
fn pattern(slot: u16, turn: u64) -> Vec<u8> {
    [u64::from(slot), turn].map(u64::to_le_bytes).as_flattened().repeat(4096 / 16)
}

#[test]
fn a_guest_moves_and_loses_nothing() {
    let mut stand = Stand::new("");
    stand.start_all();
    stand.work(300);
    let moved = stand.copy();
    stand.switch(moved);
    // The answers of the old host; it may not have taken the last requests.
    stand.collect();
    let before = stand.on_disk();
    stand.start_all();
    stand.new.wait_until_held();
    stand.collect();
    assert_eq!(stand.busy.len(), usize::from(SLOTS));
    assert!(stand.on_disk() == before, "the old host may still write");
    let doctor = stand.new.client.command(&["doctor", "v"]).code(1);
    let _ = doctor.says("FAIL  guest").says("hint: detach the volume on the old host");
    stand.old.client.detach();
    stand.finish_all();
    stand.check();
    assert!(stand.new.client.status()["complaint"].is_null());
    stand.start_all();
    stand.work(300);
    stand.finish_all();
    stand.check();
    // The volume has one writer again.
    let _ = stand.old.attach(&[]).code(1).says("EPERM");
}

#[test]
fn a_guest_continues_on_the_old_host_after_a_cancelled_migration() {
    let mut stand = Stand::new("");
    stand.start_all();
    stand.work(300);
    drop(stand.copy());
    // The old host starts the rings again.
    stand.guest.stop_log(&stand.rings);
    stand.rings.iter().for_each(|ring| ring.start_on(stand.guest.monitor()));
    stand.finish_all();
    stand.new.client.detach();
    stand.start_all();
    stand.work(300);
    stand.finish_all();
    stand.check();
    // A later attempt succeeds.
    let _ = stand.new.attach(&[]).ok();
    stand.start_all();
    let moved = stand.copy();
    stand.old.client.detach();
    stand.switch(moved);
    stand.finish_all();
    stand.check();
}

/// The process of the new host is killed before and after the promotion.
#[test]
fn a_killed_process_of_the_new_host_loses_nothing() {
    let mut stand = Stand::new("");
    stand.start_all();
    let moved = stand.copy();
    stand.new.kill();
    let _ = stand.new.attach(&["--retry-for", "30s"]).ok();
    stand.switch(moved);
    stand.start_all();
    stand.new.wait_until_held();
    let again = |stand: &mut Stand| {
        stand.new.kill();
        stand.guest.disconnect();
        let _ = stand.new.attach(&["--retry-for", "30s"]).ok();
        let mut rings = std::mem::take(&mut stand.rings);
        stand.guest.connect(&stand.new.socket, &mut rings);
        stand.rings = rings;
    };
    again(&mut stand);
    stand.new.wait_until_held();
    stand.old.client.detach();
    let prng = &mut Prng::new(7);
    for _ in 0..2 {
        stand.work(200 + prng.index(200));
        again(&mut stand);
    }
    stand.finish_all();
    stand.check();
}

/// The process of the old host is killed while its writes are slow: they may be executed, but not
/// after the first write of the new host.
#[test]
fn late_writes_of_a_killed_old_host_change_nothing() {
    // Longer than a busy machine takes to see the writes in flight.
    let mut stand = Stand::new(",delay=3s");
    let guest = Guest::recording();
    stand.guest.copy_pages(&guest, &(0..MEMORY_LEN / PAGE).collect::<BTreeSet<_>>());
    let moved = Moved { guest, rings: stand.rings.iter().map(GuestRing::moved).collect() };
    stand.start_all();
    wait_for("writes in flight", COMMAND_TIME_MAX, || {
        (stand.old.client.status()["inflight"].as_u64()? > 0).then_some(())
    });
    stand.old.kill();
    stand.busy.clear();
    stand.switch(moved);
    stand.start_all();
    stand.finish_all();
    let _ = stand.old.attach(&[]).code(1).says("EPERM");
    let expected: Vec<u8> = (0..SLOTS).flat_map(|slot| pattern(slot, 2)).collect();
    assert!(stand.on_disk() == expected);
    // The new host was the last to write.
    stand.new.client.detach();
    assert!(stand.on_disk() == expected);
    drop(stand.server);
}
