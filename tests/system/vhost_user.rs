//! Tests of volumes that a virtual machine uses over vhost-user-blk, with a hand-written monitor
//! and driver, and with QEMU.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use rtrs_core::prng::Prng;
use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Front, Innocent, Proc, Scratch, Server, requires,
    sparse_file, wait_for,
};
use vhost_bridge::driver::{Guest, GuestRing, Request, SLOTS, SLOTS_AT, kind};

/// Size of the export.
const SIZE: u64 = 64 << 20;

/// Server with one export, and a client whose socket a virtual machine connects to.
struct Stand {
    server: Server,
    client: Client,
    image: PathBuf,
    socket: PathBuf,
    _scratch: Scratch,
}

impl Stand {
    fn new(args: &[&str]) -> Self {
        let scratch = Scratch::new();
        let image = scratch.path("v.img");
        sparse_file(&image, SIZE);
        let server = Server::builder().export(format!("v={}", image.display()));
        let server = server.export("w=mem:1M").start();
        let client = Client::attach("v").unattached();
        let socket = client.run_dir().join("v.vhost");
        let stand = Self { server, client, image, socket, _scratch: scratch };
        let _ = stand.attach(args).ok();
        stand
    }

    fn attach(&self, args: &[&str]) -> Finished {
        let socket = self.socket.display().to_string();
        let words = ["attach", "v", "--path", self.server.portal(), "--vhost-user", &socket];
        self.client.command(&[&words[..], args].concat())
    }

    /// Connects a guest with this many rings.
    fn guest(&self, count: u16) -> (Guest, Vec<GuestRing>) {
        let mut guest = Guest::recording();
        let mut rings: Vec<_> = (0..count).map(|at| GuestRing::new(at, 256, 0)).collect();
        rings.iter().for_each(|ring| ring.reset(&guest));
        guest.connect(&self.socket, &mut rings);
        (guest, rings)
    }
}

#[test]
fn a_virtual_machine_reads_writes_and_discards() {
    let cases = [(&["--shards", "2"][..], 2), (&["--shards=1", "--crc=off", "--queues=5"], 5)];
    for (args, queues) in cases {
        let stand = Stand::new(args);
        let (mut guest, mut rings) = stand.guest(2);
        assert_eq!(guest.config()[34..36], [queues, 0]);
        assert_eq!(guest.config()[..8], (SIZE / 512).to_le_bytes());
        let prng = &mut Prng::new(17);
        for (at, ring) in (0_u64..).zip(&mut rings) {
            let mut data = vec![0; 900 << 10];
            prng.fill(&mut data);
            let sector = 8 + at * 4096;
            assert_eq!(ring.put(&guest, sector, &data), 0);
            assert_eq!(ring.run(&guest, Request { kind: kind::FLUSH, sector: 0, len: 0 }), (0, 1));
            let image = fs::read(&stand.image).expect("the image");
            assert!(image[sector as usize * 512..][..data.len()] == data, "it is on the disk");
            guest.write(GuestRing::data_at(0), &vec![0xEE; data.len()]);
            assert!(ring.get(&guest, sector, data.len()) == data);
            assert_eq!(ring.range(&guest, kind::ZEROES, sector, 64), 0);
            assert_eq!(ring.get(&guest, sector, 64 * 512), vec![0; 64 * 512]);
            assert_eq!(ring.range(&guest, kind::DISCARD, sector, 1600), 0);
            assert_eq!(ring.get(&guest, sector, 1600 * 512), vec![0; 1600 * 512]);
        }
        let status = stand.client.status();
        let pid = std::process::id();
        assert_eq!(status["uri"], format!("vhost-user-blk:{}", stand.socket.display()));
        let refused = stand.client.command(&["detach", "v"]).says(&format!("pid {pid}"));
        let _ = refused.says("\"v\" is used by a virtual machine: ");
        stand.client.detach();
        assert!(!stand.socket.exists());
        guest.wait_for_cut("detach");
    }
}

#[test]
fn a_read_only_volume_is_read_only_for_the_guest() {
    let stand = Stand::new(&["--access", "ro"]);
    let (guest, mut rings) = stand.guest(1);
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 1);
    assert_eq!(rings[0].get(&guest, 0, 512), [0; 512]);
}

/// If a guest's memory is not shared, the device sees the guest's kicks but no requests.
#[test]
fn doctor_explains_memory_that_is_not_shared() {
    let stand = Stand::new(&[]);
    let doctor = || stand.client.command(&["doctor", "v"]);
    let _ = doctor().ok().says("skip  guest");
    let (guest, mut rings) = stand.guest(1);
    rings[0].kick_always();
    let failed = wait_for("the kick", COMMAND_TIME_MAX, || {
        Some(doctor()).filter(|done| done.code == Some(1))
    });
    let failed = failed.says("FAIL  guest").says("its memory is not shared");
    let _ = failed.says("hint: use share=on of memory-backend-memfd");
    let status = stand.client.status();
    assert!(status["complaint"].as_str().is_some_and(|text| text.contains("not shared")));
    assert_eq!(rings[0].put(&guest, 0, &[1; 512]), 0);
    let _ = doctor().ok().says("ok    guest");
    assert!(stand.client.status()["complaint"].is_null());
}

#[test]
fn a_virtual_machine_learns_a_new_size() {
    let stand = Stand::new(&[]);
    let (mut guest, mut rings) = stand.guest(1);
    let (mut channel, passed) = UnixStream::pair().expect("a channel");
    channel.set_read_timeout(Some(COMMAND_TIME_MAX)).expect("a time limit");
    guest.pass_channel(&passed);
    let words = ["export", "resize", "v", "--size", "96M"];
    let _ = stand.server.command(&words).ok();
    let mut message = [0; 12];
    channel.read_exact(&mut message).expect("a message");
    assert_eq!(message[0], 2, "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG");
    let size = 96_u64 << 20;
    assert_eq!(guest.config()[..8], (size / 512).to_le_bytes());
    assert_eq!(rings[0].put(&guest, size / 512 - 8, &[7; 4096]), 0);
    assert!(fs::read(&stand.image).expect("the image").ends_with(&[7; 4096]));
}

#[test]
fn a_socket_in_use_is_refused_and_its_access_is_set() {
    let stand = Stand::new(&["--socket-mode", "600"]);
    let mode = fs::metadata(&stand.socket).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let other = Client::attach("v").unattached();
    let socket = stand.socket.display().to_string();
    let words = ["attach", "v", "--path", stand.server.portal(), "--vhost-user", &socket];
    let _ = other.command(&words).code(1).says("is in use by another process");
}

/// Returns the data of a write, which encodes the write's sector and turn.
fn pattern(sector: u64, turn: u64) -> Vec<u8> {
    let words = [sector, turn].map(u64::to_le_bytes);
    words.as_flattened().repeat(4096 / 16)
}

/// Kills the client's process under load; the guest sees only a pause.
#[test]
fn a_killed_process_loses_no_request() {
    let stand = Stand::new(&["--shards", "2"]);
    let (mut guest, mut rings) = stand.guest(2);
    let prng = &mut Prng::new(23);
    // Each slot writes to one place, which must hold the slot's last answered write.
    let mut turns = vec![0_u64; usize::from(SLOTS)];
    let start = |guest: &Guest, ring: &mut GuestRing, slot: u16, turn: u64| {
        let sector = u64::from(slot) * 8;
        guest.write(GuestRing::data_at(slot), &pattern(sector, turn));
        ring.start(guest, slot, Request { kind: kind::WRITE, sector, len: 4096 });
        ring.kick(guest, 1);
    };
    for slot in 0..SLOTS {
        start(&guest, &mut rings[usize::from(slot % 2)], slot, 0);
    }
    for kill in 0..4 {
        for _ in 0..500 + prng.index(500) {
            for ring in &mut rings {
                let (slot, status, _) = ring.finish(&guest);
                assert_eq!(status, 0);
                let turn = &mut turns[usize::from(slot)];
                *turn += 1;
                start(&guest, ring, slot, *turn);
            }
        }
        if kill < 3 {
            stand.client.signal("KILL");
            stand.client.wait_gone(COMMAND_TIME_MAX);
            guest.disconnect();
            let _ = stand.attach(&["--shards", "2", "--retry-for", "30s"]).ok();
            guest.connect(&stand.socket, &mut rings);
        }
    }
    for ring in &mut rings {
        for _ in 0..SLOTS / 2 {
            assert_eq!(ring.finish(&guest).1, 0);
        }
        assert_eq!(ring.answer(&guest), None, "each request is answered once");
    }
    for slot in 0..SLOTS {
        let sector = u64::from(slot) * 8;
        let expected = pattern(sector, turns[usize::from(slot)]);
        assert!(rings[0].get(&guest, sector, 4096) == expected, "slot {slot}");
    }
}

/// The monitor truncates its guest's memory under load. Only the monitor's connection ends.
#[test]
fn memory_that_is_taken_away_costs_one_connection() {
    let stand = Stand::new(&["--shards", "1"]);
    let socket = stand.client.run_dir().join("w.nbd");
    let place = socket.display().to_string();
    let _ = stand.client.command(&["attach", "w", "--session", "v", "--socket", &place]).ok();
    let other = Innocent::start(&Front::Unix(socket), "w");
    let pid = stand.client.pid();
    for round in 0..3 {
        let (mut guest, mut rings) = stand.guest(2);
        assert_eq!(rings[0].put(&guest, 64, &[7; 512]), 0);
        assert!(guest.enable(1, false));
        let kinds = [kind::READ, kind::WRITE];
        for slot in 0..SLOTS {
            let request = Request { kind: kinds[usize::from(slot / 2 % 2)], sector: 0, len: 4096 };
            let ring = &mut rings[usize::from(slot % 2)];
            ring.start(&guest, slot, request);
            ring.kick_always();
        }
        guest.truncate(SLOTS_AT);
        // The first ring may already have ended the connection.
        let _ = guest.enable(1, true);
        guest.wait_for_cut("memory was taken away");
        other.progress();
        let (guest, mut rings) = stand.guest(1);
        assert_eq!(rings[0].get(&guest, 64, 512), [7; 512], "round {round}");
    }
    other.check();
    assert_eq!(stand.client.pid(), pid, "the process lives");
    let log = fs::read_to_string(stand.client.run_dir().join("v.log")).expect("the log");
    assert!(log.contains("guest memory was truncated"), "{log}");
}

/// Boot sector that repeatedly copies the second sector to the third through the firmware, until
/// the second begins with 0xAA. Then the code makes QEMU exit.
fn boot_sector() -> Vec<u8> {
    let code: &[u8] = &[
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        0xbe, 0x00, 0x7d, // again: mov si, 0x7d00 (the packet)
        0xb4, 0x42, // mov ah, 0x42 (read)
        0xb2, 0x80, // mov dl, 0x80 (the first disk)
        0xcd, 0x13, // int 0x13
        0x72, 0x16, // jc failed
        0xbe, 0x10, 0x7d, // mov si, 0x7d10
        0xb8, 0x00, 0x43, // mov ax, 0x4300 (write)
        0xb2, 0x80, // mov dl, 0x80
        0xcd, 0x13, // int 0x13
        0x72, 0x0a, // jc failed
        0x80, 0x3e, 0x00, 0x80, 0xaa, // cmp byte [0x8000], 0xaa
        0x75, 0xe2, // jne again
        0xb0, 0x20, // mov al, 0x20
        0xa9, // test ax, imm16: skips the next instruction
        0xb0, 0x11, // failed: mov al, 0x11
        0xba, 0xf4, 0x00, // mov dx, 0xf4
        0xee, // out dx, al
        0xf4, // hlt
    ];
    // Length, blocks, address 0:0x8000, first block.
    let packet = |block: u8| [16, 0, 1, 0, 0, 0x80, 0, 0, block, 0, 0, 0, 0, 0, 0, 0];
    let mut sector = vec![0; 512];
    sector[..code.len()].copy_from_slice(code);
    sector[0x100..0x110].copy_from_slice(&packet(1));
    sector[0x110..0x120].copy_from_slice(&packet(2));
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

fn qemu(socket: &Path) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg", "-display", "none", "-nodefaults", "-no-reboot"]);
    command.args(["-object", "memory-backend-memfd,id=m,size=128M,share=on"]);
    command.args(["-machine", "q35,memory-backend=m"]);
    command.arg("-chardev").arg(format!("socket,id=c,path={},reconnect=1", socket.display()));
    command.args(["-device", "vhost-user-blk-pci,chardev=c,num-queues=2,bootindex=0"]);
    command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=1"]);
    command
}

/// Writes the second sector, and waits until the guest has copied it.
fn await_copy(stand: &Stand, second: &[u8]) {
    let file = OpenOptions::new().write(true).open(&stand.image).expect("the image");
    file.write_all_at(second, 512).expect("the second sector");
    wait_for("the guest to copy the sector", COMMAND_TIME_MAX, || {
        let image = fs::read(&stand.image).expect("the image");
        (image[1024..1536] == *second).then_some(())
    });
}

#[test]
fn qemu_continues_after_its_disk_was_killed() {
    if !requires(&["qemu-system-x86_64"]) {
        return;
    }
    let args = ["--shards", "2", "--retry-for", "30s"];
    let stand = Stand::new(&args);
    let (guest, mut rings) = stand.guest(1);
    assert_eq!(rings[0].put(&guest, 0, &boot_sector()), 0);
    drop(guest);
    let mut qemu = Proc::start(qemu(&stand.socket));
    for kill in 1..4 {
        await_copy(&stand, &[kill; 512]);
        assert!(qemu.is_running(), "the guest keeps copying");
        stand.client.signal("KILL");
        stand.client.wait_gone(COMMAND_TIME_MAX);
        let _ = stand.attach(&args).ok();
    }
    await_copy(&stand, &[9; 512]);
    await_copy(&stand, &[0xaa; 512]);
    // The guest exits with value 0x20, which QEMU reports as (0x20 << 1) | 1.
    let _ = qemu.wait(COMMAND_TIME_MAX).code(0x41);
    assert_eq!(stand.client.status()["state"], "open");
}
