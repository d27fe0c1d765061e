//! Test with a Linux guest in QEMU whose disk is a volume over vhost-user-blk: a file system under
//! verified load while one of two links goes down, the daemon and the server are killed, and the
//! export grows, then a reboot.
//!
//! The guest runs a kernel from this machine and an initramfs with programs from this machine and
//! one script, which reports on the serial console in lines that begin with `@@`. QEMU emulates the
//! processor, so nothing is measured.

mod migration;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Cable, Client, Finished, Proc, Scratch, Server, requires, run, skip,
    sparse_file, wait_for,
};

/// Time limit for a boot, for a round of load, and for the check after the reboot.
const GUEST_TIME_MAX: Duration = Duration::from_secs(300);

/// Programs in the guest.
const PROGRAMS: [&str; 12] = [
    "sh",
    "cat",
    "cmp",
    "e2fsck",
    "fio",
    "grep",
    "insmod",
    "mkfs.ext4",
    "mount",
    "sleep",
    "sync",
    "umount",
];
/// Kernel modules in the guest, without their dependencies.
const MODULES: [&str; 4] = ["crc32c_generic", "virtio_pci", "virtio_blk", "ext4"];

/// Init script of the guest. It runs rounds of load until the host grows the disk.
const INIT: &str = r#"#!/usr/bin/sh
export PATH=/usr/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec </dev/null >/dev/console 2>&1
say() { echo "@@ $*"; }
end() { say "$@"; sync; echo o >/proc/sysrq-trigger; sleep 600; }
load() {
    fio --name=load --directory=/mnt --size=4m --rw=randrw --bs=4k --iodepth=16 --direct=1 \
        --ioengine=libaio --verify=crc32c --eta=never --output=/fio.out && return
    cat /fio.out
    end FAILED: the load
}
for module in $(cat /modules/order); do insmod "/modules/$module" || say "FAILED: $module"; done
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/vda ] || sleep 1; done
first=$(cat /sys/block/vda/size)
say "disk $first"
if mount -t ext4 /dev/vda /mnt; then
    cmp /usr/bin/fio /mnt/copy || end FAILED: the file is different after the reboot
    load
    umount /mnt || end FAILED: umount
    e2fsck -fn /dev/vda
    end "checked $?"
fi
cmp -s -n 4096 /dev/vda /dev/zero || end FAILED: the file system is lost
mkfs.ext4 -q -F /dev/vda && mount -t ext4 /dev/vda /mnt || end FAILED: no file system
round=0
while size=$(cat /sys/block/vda/size) && [ "$size" = "$first" ]; do
    load
    round=$((round + 1))
    say "round $round"
done
say "size $size"
cat /usr/bin/fio >/mnt/copy && sync || end FAILED: the copy
say reboot
echo b >/proc/sysrq-trigger
sleep 600
"#;

/// Kernel from this machine.
struct Kernel {
    image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// Finds an installed kernel with modules, or one that the lab has unpacked.
    fn find() -> Option<Self> {
        let cache = std::env::var_os("RTRS_LAB_CACHE").map(PathBuf::from).or_else(|| {
            let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
            let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home)?;
            Some(cache.join("rtrs-lab"))
        });
        let unpacked = cache.and_then(|cache| fs::read_dir(cache).ok()).into_iter().flatten();
        let roots = unpacked.filter_map(|entry| Some(entry.ok()?.path()));
        std::iter::once(PathBuf::from("/")).chain(roots).find_map(|root| Self::below(&root))
    }

    fn below(root: &Path) -> Option<Self> {
        let releases = fs::read_dir(root.join("lib/modules")).ok()?;
        let found = releases.filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok()?;
            let image = root.join(format!("boot/vmlinuz-{name}"));
            let modules = entry.path();
            // Compressed modules, or an image that only root can read, are of no use here.
            let dep = fs::read_to_string(modules.join("modules.dep")).ok()?;
            let is_usable = fs::File::open(&image).is_ok() && dep.contains("/virtio_blk.ko:");
            is_usable.then_some(Self { image, modules })
        });
        found.max_by(|one, other| one.image.cmp(&other.image))
    }

    /// Returns the files of the modules, each after its dependencies. Modules that are built into
    /// the kernel are left out.
    fn load_order(&self) -> Vec<String> {
        let text = fs::read_to_string(self.modules.join("modules.dep")).expect("modules.dep");
        let lines: Vec<(&str, &str)> =
            text.lines().filter_map(|line| line.split_once(':')).collect();
        let mut order = Vec::new();
        for module in MODULES {
            let end = format!("/{module}.ko");
            if let Some((file, _)) = lines.iter().find(|(file, _)| file.ends_with(&end)) {
                add_module(file, &lines, &mut order);
            }
        }
        order
    }
}

fn add_module(file: &str, lines: &[(&str, &str)], order: &mut Vec<String>) {
    if order.iter().any(|added| added == file) {
        return;
    }
    let needs = lines.iter().find(|(name, _)| *name == file).map_or("", |(_, needs)| needs);
    needs.split_whitespace().for_each(|needed| add_module(needed, lines, order));
    order.push(file.to_owned());
}

/// Archive of an initramfs (`newc`, see `driver-api/early-userspace/buffer-format.rst` of Linux).
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, data: &[u8]) {
        let number = self.names.len() + 1;
        let fields = [number, mode as usize, 0, 0, 1, 0, data.len(), 0, 0, 0, 0, name.len() + 1, 0];
        let fields: String = fields.iter().map(|field| format!("{field:08X}")).collect();
        self.bytes.extend(format!("070701{fields}{name}\0").as_bytes());
        self.pad();
        self.bytes.extend(data);
        self.pad();
        self.names.insert(name.to_owned());
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn directory(&mut self, path: &Path) {
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            self.directory(parent);
        }
        let name = path.display().to_string();
        if !self.names.contains(&name) {
            self.entry(&name, 0o040_755, &[]);
        }
    }

    /// Adds a file at a path, unless the path was added before.
    fn file(&mut self, path: &Path, data: &[u8]) {
        let name = path.display().to_string();
        if !self.names.contains(&name) {
            path.parent().into_iter().for_each(|parent| self.directory(parent));
            self.entry(&name, 0o100_755, data);
        }
    }

    /// Adds a program from this machine, and the libraries with which it is linked.
    fn program(&mut self, name: &str) {
        let found = run("sh", &["-c", "command -v \"$0\"", name], COMMAND_TIME_MAX).ok().stdout;
        let program = found.trim();
        let data = fs::read(program).unwrap_or_else(|error| panic!("{program}: {error}"));
        self.file(&Path::new("usr/bin").join(name), &data);
        let linked = run("ldd", &[program], COMMAND_TIME_MAX).ok().stdout;
        for library in linked.split_whitespace().filter(|word| word.starts_with('/')) {
            let data = fs::read(library).unwrap_or_else(|error| panic!("{library}: {error}"));
            self.file(Path::new(library.trim_start_matches('/')), &data);
        }
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

fn initramfs(kernel: &Kernel) -> Vec<u8> {
    let mut archive = Archive::default();
    for name in ["dev", "proc", "sys", "mnt", "tmp"] {
        archive.directory(Path::new(name));
    }
    PROGRAMS.iter().for_each(|name| archive.program(name));
    let mut order = String::new();
    for module in kernel.load_order() {
        let data = fs::read(kernel.modules.join(&module)).expect("a module");
        let name = module.rsplit('/').next().expect("a name").to_owned();
        archive.file(&Path::new("modules").join(&name), &data);
        order += &format!("{name}\n");
    }
    archive.file(Path::new("modules/order"), order.as_bytes());
    archive.file(Path::new("init"), INIT.as_bytes());
    archive.finish()
}

fn qemu_command(kernel: &Kernel, initramfs: &Path, socket: &Path) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg", "-smp", "2", "-display", "none", "-nodefaults"]);
    command.args(["-object", "memory-backend-memfd,id=m,size=768M,share=on"]);
    command.args(["-machine", "q35,memory-backend=m", "-m", "768M", "-serial", "stdio"]);
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(initramfs);
    command.args(["-append", "console=ttyS0 loglevel=4 panic=-1 tsc=reliable rdinit=/init"]);
    command.arg("-chardev").arg(format!("socket,id=c,path={},reconnect=1", socket.display()));
    command.args(["-device", "vhost-user-blk-pci,chardev=c,num-queues=2"]);
    command
}

/// Server with one export that grows, and the client that serves the export to the guest.
struct Host {
    server: Option<Server>,
    client: Client,
    scratch: Scratch,
    portals: Vec<String>,
    /// Links between client and server; without them, both are on this machine.
    cable: Option<Cable>,
}

impl Host {
    fn new(cable: Option<Cable>) -> Self {
        let scratch = Scratch::new();
        sparse_file(&scratch.path("v.img"), 64 << 20);
        let mut client = Client::attach("v");
        let mut portals = vec!["tcp://127.0.0.1:0".to_owned()];
        if let Some(cable) = &cable {
            client = client.on(cable.hosts()[0]);
            portals = [0, 1].map(|link| format!("tcp://{}:0", Cable::server_address(link))).into();
        }
        let client = client.unattached();
        let mut host = Self { server: None, client, scratch, portals, cable };
        host.start_server();
        let _ = host.attach().ok();
        host
    }

    /// Starts the server, at the addresses of the previous server if there was one.
    fn start_server(&mut self) {
        let (export, state) = (self.scratch.text("v.img"), self.scratch.text("state"));
        let mut server = Server::builder().export(format!("v={export}"));
        if let Some(cable) = &self.cable {
            server = server.on(cable.hosts()[1]);
        }
        server = self.portals.iter().fold(server, |server, portal| server.listen(portal.clone()));
        let server = server.args(&["--state-dir", &state]).start();
        self.portals = server.portals().to_vec();
        self.server = Some(server);
    }

    fn socket(&self) -> PathBuf {
        self.client.run_dir().join("v.vhost")
    }

    fn attach(&self) -> Finished {
        let socket = self.socket().display().to_string();
        let mut words = vec!["attach", "v", "--vhost-user", &socket, "--shards=2"];
        words.push("--retry-for=60s");
        self.portals.iter().for_each(|portal| words.extend(["--path", portal]));
        self.client.command(&words)
    }

    /// Waits until IO of the guest is in flight.
    fn await_load(&self) {
        wait_for("IO in flight", GUEST_TIME_MAX, || {
            (self.client.status()["inflight"].as_u64()? > 0).then_some(())
        });
    }

    fn kill_client(&self) {
        self.await_load();
        self.client.signal("KILL");
        self.client.wait_gone(COMMAND_TIME_MAX);
        let _ = self.attach().ok();
    }

    fn kill_server(&mut self) {
        self.await_load();
        self.server.take().expect("a server").crash();
        self.start_server();
    }

    /// Takes one link down, or brings it up.
    fn link(&self, is_up: bool) {
        self.await_load();
        let cable = self.cable.as_ref().expect("links");
        if is_up {
            cable.plug_one(0);
            self.client.wait_paths(2);
        } else {
            cable.pull_one(0);
            self.client.wait_paths(1);
        }
    }

    fn grow(&self) {
        let words = ["export", "resize", "v", "--size", "96M"];
        let _ = self.server.as_ref().expect("a server").command(&words).ok();
    }
}

#[test]
fn linux_survives_a_link_down_kills_of_both_daemons_a_resize_and_a_reboot() {
    let Some(kernel) = Kernel::find() else {
        return skip("no kernel in /boot with its modules; scripts/lab.sh setup installs one");
    };
    if !requires(&[&PROGRAMS[..], &["qemu-system-x86_64", "ldd"]].concat()) {
        return;
    }
    let Some(cable) = Cable::lay_all(2) else { return };
    let mut host = Host::new(Some(cable));
    let archive = host.scratch.path("initramfs");
    fs::write(&archive, initramfs(&kernel)).expect("the initramfs");
    let mut qemu = Proc::start(qemu_command(&kernel, &archive, &host.socket()));
    let sectors = |bytes: u64| (bytes / 512).to_string();
    assert_eq!(qemu.wait_lines("@@ disk ", 1, GUEST_TIME_MAX), [sectors(64 << 20)]);
    let mut rounds = 0;
    for event in 0..6 {
        match event {
            0 => host.link(false),
            1 => host.link(true),
            4 => host.kill_server(),
            _ => host.kill_client(),
        }
        rounds = qemu.wait_lines("@@ round ", rounds + 1, GUEST_TIME_MAX).len();
    }
    host.grow();
    assert_eq!(qemu.wait_lines("@@ size ", 1, GUEST_TIME_MAX), [sectors(96 << 20)]);
    let disks = qemu.wait_lines("@@ disk ", 2, GUEST_TIME_MAX);
    assert_eq!(disks[1], sectors(96 << 20), "after the reboot");
    assert_eq!(qemu.wait_lines("@@ checked ", 1, GUEST_TIME_MAX), ["0"], "{}", qemu.output());
    let console = qemu.wait(GUEST_TIME_MAX).ok().stdout;
    for error in ["I/O error", "EXT4-fs error", "FAILED"] {
        assert!(!console.contains(error), "{console}");
    }
    assert_eq!(host.client.status()["state"], "open");
}
