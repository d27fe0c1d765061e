//! Simulated kernel file systems for tests.

use super::*;

/// Simulated /sys, /proc and /dev, removed on drop.
pub(in super::super) struct Tree {
    pub(in super::super) root: PathBuf,
    pub(in super::super) places: Places,
}

impl Tree {
    pub(in super::super) fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("rtrs-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        let places =
            Places { sys: root.join("sys"), proc: root.join("proc"), dev: root.join("dev") };
        Self { root, places }
    }

    pub(in super::super) fn file(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

#[test]
fn device_attributes_are_read() {
    let tree = Tree::new("nbd-sysfs");
    for (file, text) in [
        ("size", "2048\n"),
        ("pid", "77\n"),
        ("backend", "rtrs:host-v/v\n"),
        ("inflight", "       3        4\n"),
        ("dev", "43:0\n"),
    ] {
        tree.file(&format!("sys/block/nbd0/{file}"), text);
    }
    tree.file("sys/block/nbd10/size", "0\n");
    tree.file("sys/block/nbd2/size", "0\n");
    tree.file("sys/block/nbdx/size", "0\n");
    tree.file("dev/nbd0", "no block device");
    let places = &tree.places;
    assert_eq!(places.devices(), [0, 2, 10]);
    assert_eq!((places.size(0), places.owner(0)), (Some(1 << 20), Some(77)));
    assert_eq!(places.backend(0).as_deref(), Some("rtrs:host-v/v"));
    assert_eq!((places.inflight(0), places.inflight(2)), (Some(7), None));
    assert_eq!((places.owner(2), places.backend(2)), (None, None));
    assert!(!places.has_node(0));
}

#[test]
fn dead_owners_are_detected() {
    let tree = Tree::new("nbd-owner");
    tree.file("proc/self/comm", "rtrs-client\n");
    tree.file("proc/7/comm", "rtrs-client\n");
    tree.file("proc/8/comm", "bash\n");
    let gone = |pid| tree.places.is_left_behind(pid);
    assert_eq!((gone(7), gone(8), gone(9)), (false, true, true));
    assert!(gone(std::process::id()));
    let namespace = tree.places.proc.join("self/ns/pid");
    fs::create_dir_all(namespace.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(INITIAL_PID_NAMESPACE, &namespace).unwrap();
    assert!(tree.places.is_left_behind(9));
    fs::remove_file(&namespace).unwrap();
    std::os::unix::fs::symlink("pid:[4026532198]", &namespace).unwrap();
    assert!(!tree.places.is_left_behind(9), "seen from a container");
}
