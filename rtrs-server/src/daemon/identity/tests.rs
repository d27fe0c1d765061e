//! Tests of identities derived from a fake /sys and udev database, and from real files.

use std::os::unix::fs::symlink;

use rtrs_core::identity::Comparison;

use super::*;

/// A directory that is removed at the end of the test.
struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Tree {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("rtrs-ids-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for dir in ["sys/dev/block", "udev"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        Self(root)
    }

    fn sources(&self) -> Sources {
        Sources {
            sysfs: self.0.join("sys"),
            udev: self.0.join("udev"),
            machine_id: self.0.join("machine-id"),
            boot: Some(7),
            process: 9,
            in_memory: Arc::default(),
        }
    }

    /// Adds a disk with these files to /sys.
    fn disk(&self, numbers: &str, place: &str, files: &[(&str, &str)]) {
        let dir = self.0.join("sys/devices").join(place);
        for (name, content) in files {
            let file = dir.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{content}\n")).unwrap();
        }
        fs::write(dir.join("dev"), format!("{numbers}\n")).unwrap();
        symlink(&dir, self.0.join("sys/dev/block").join(numbers)).unwrap();
    }

    fn udev(&self, numbers: &str, lines: &str) {
        fs::write(self.0.join("udev").join(format!("b{numbers}")), lines).unwrap();
    }

    fn key(&self, major: u32, minor: u32) -> Key {
        self.sources().device(device_number(major, minor), 0).unwrap()
    }
}

fn parts(key: &Key) -> Vec<&str> {
    key.parts.iter().map(String::as_str).collect()
}

#[test]
fn a_disk_is_identified_by_its_best_identifier() {
    let tree = Tree::new("disk");
    tree.disk("253:0", "dm-0", &[("dm/uuid", "LVM-abc")]);
    tree.disk("9:0", "md0", &[("size", "8")]);
    tree.udev("9:0", "S:disk/x\nE:MD_UUID=1:2:3:4\n");
    tree.disk("8:0", "sda", &[("device/wwid", "naa.5000"), ("serial", "s")]);
    tree.disk("8:16", "sdb", &[("size", "8")]);
    tree.udev("8:16", "E:ID_SERIAL=Model_77\nE:ID_SERIAL_SHORT=77\n");
    tree.disk("254:0", "vda", &[("serial", "disk-7")]);
    for (major, minor, kind, id) in [
        (253, 0, "dm", "LVM-abc"),
        (9, 0, "md", "1:2:3:4"),
        (8, 0, "wwid", "naa.5000"),
        (8, 16, "serial", "Model_77"),
        (254, 0, "serial", "disk-7"),
    ] {
        assert_eq!(tree.key(major, minor), Key::stable(kind, vec![id.to_owned()]));
    }
}

#[test]
fn a_disk_without_identifiers_is_identified_until_reboot() {
    let tree = Tree::new("weak");
    tree.disk("1:0", "ram0", &[("diskseq", "4"), ("serial", "")]);
    // A model is not a serial number.
    tree.udev("1:0", "E:ID_SERIAL=QEMU_HARDDISK\n");
    assert_eq!(tree.key(1, 0), Key::weak("device", vec!["ram0".into(), "1:0".into(), "4".into()]));
    // Without /sys, only the device numbers remain.
    assert_eq!(tree.key(1, 1), Key::weak("device", vec!["1:1".into()]));
}

#[test]
fn a_partition_is_identified_by_its_disk() {
    let tree = Tree::new("partition");
    tree.disk("8:0", "sda", &[("wwid", "naa.1")]);
    tree.disk("8:1", "sda/sda1", &[("partition", "1"), ("start", "2048")]);
    tree.disk("8:2", "sda/sda2", &[("partition", "2"), ("start", "4096")]);
    tree.disk("8:3", "sda/sda3", &[("partition", "3"), ("uevent", "DEVNAME=sda3\nPARTUUID=u3")]);
    tree.udev("8:1", "E:ID_PART_ENTRY_UUID=u1\n");
    for (minor, last, stable) in [
        (1, vec!["wwid", "naa.1", "u1"], true),
        (2, vec!["wwid", "naa.1", "2", "4096"], false),
        (3, vec!["wwid", "naa.1", "u3"], true),
    ] {
        let key = tree.key(8, minor);
        assert_eq!((parts(&key), key.stable), (last, stable), "partition {minor}");
    }
}

#[test]
fn a_loop_device_is_identified_by_its_file() {
    let tree = Tree::new("loop");
    let (a, b) = (tree.0.join("a"), tree.0.join("b"));
    fs::write(&a, "a").unwrap();
    fs::write(&b, "b").unwrap();
    let backing = |path: &Path| path.display().to_string();
    tree.disk("7:0", "loop0", &[("loop/backing_file", &backing(&a)), ("loop/offset", "0")]);
    tree.disk("7:1", "loop1", &[("loop/backing_file", &backing(&a)), ("loop/offset", "512")]);
    tree.disk("7:2", "loop2", &[("loop/backing_file", &backing(&b)), ("loop/offset", "0")]);
    tree.disk("7:3", "loop3", &[("loop/backing_file", "/x (deleted)"), ("diskseq", "1")]);
    let keys: Vec<Key> = (0..3).map(|minor| tree.key(7, minor)).collect();
    assert!(keys[0] != keys[1] && keys[0] != keys[2]);
    assert_eq!(keys[0], tree.key(7, 0));
    let file = tree.sources().path(&a, 0).unwrap();
    assert_eq!(keys[0], file.within("loop", ["0".to_owned()]));
    assert!(!tree.key(7, 3).stable);
}

#[test]
fn a_recreated_file_has_another_identity() {
    let tree = Tree::new("file");
    let sources = tree.sources();
    let (a, b) = (tree.0.join("a"), tree.0.join("b"));
    fs::write(&a, "a").unwrap();
    fs::write(&b, "a").unwrap();
    let id = |path: &Path| sources.export("vol", None, &Target::Path(path.into())).unwrap();
    let first = id(&a);
    assert_eq!(first.compare(id(&b)), Comparison::Different);
    fs::write(&a, "other content").unwrap();
    assert_eq!(first.compare(id(&a)), Comparison::Same);
    // A file restored from elsewhere replaces the original.
    fs::rename(&b, &a).unwrap();
    assert_eq!(first.compare(id(&a)), Comparison::Different);
    // The operator's setting takes precedence.
    let set = sources.export("vol", Some("x"), &Target::Path(a)).unwrap();
    assert_eq!(set, ExportId::of_name("x"));
    assert_eq!(sources.export("vol", None, &Target::Path(tree.0.join("none"))), None);
}

#[test]
fn memory_exports_are_identified_by_their_process() {
    let tree = Tree::new("memory");
    let memory = |process, name: &str| {
        let sources = Sources { process, ..tree.sources() };
        sources.export(name, None, &"mem:1M".parse().unwrap()).unwrap()
    };
    assert_eq!(memory(1, "a").compare(memory(1, "a")), Comparison::Same);
    assert_eq!(memory(1, "a").compare(memory(2, "a")), Comparison::Different);
    assert_eq!(memory(1, "a").compare(memory(1, "b")), Comparison::Different);
}

#[test]
fn a_server_is_identified_by_its_machine_unless_named() {
    let tree = Tree::new("machine");
    let server = |set| tree.sources().server(set);
    assert_eq!(server(None), None, "there is no machine id");
    for bad in ["", "uninitialized", "00000000000000000000000000000000", "0123"] {
        fs::write(tree.0.join("machine-id"), bad).unwrap();
        assert_eq!(server(None), None, "{bad}");
    }
    let id = "0123456789abcdef0123456789abcdef";
    fs::write(tree.0.join("machine-id"), format!("{id}\n")).unwrap();
    assert_eq!(server(None), Some(ServerId::of_machine(id.as_bytes())));
    assert_eq!(server(Some("a")), Some(ServerId::of_name("a")));
}
