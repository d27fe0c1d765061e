//! Users of a device: mounts, swap, devices stacked on it, and processes that have it open.
//!
//! A scan reads only /proc and /sys and never opens the device, so it finishes quickly whatever the
//! device does. It sees only what the caller may see; root sees everything in its PID namespace. A
//! kernel user that leaves no trace there, such as a target exporting the device, is found by
//! opening the device exclusively, which must be done in a process that may hang. Scans run before
//! a detach and to explain why a device is busy.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::sysfs::{Places, read};

/// One use of a device or of one of its partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceUse {
    /// Mounted on this directory, perhaps in another mount namespace.
    Mounted(String),
    /// Swap space.
    Swap,
    /// Underlies this device, such as dm-0 or md0.
    Held(String),
    /// Open in a process with this ID and name.
    Open(u32, String),
}

impl fmt::Display for DeviceUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted(on) => write!(f, "mounted on {on}"),
            Self::Swap => write!(f, "used as swap space"),
            Self::Held(by) => write!(f, "part of /dev/{by}"),
            Self::Open(pid, name) => write!(f, "open in process {pid} ({name})"),
        }
    }
}

/// Returns the uses of a device, most significant first; empty if none are visible.
pub fn device_uses(index: u32) -> Vec<DeviceUse> {
    uses(&Places::default(), index)
}

/// Returns the known uses of a device, most significant first. Processes that only use a mount of
/// the device are omitted.
pub(super) fn uses(places: &Places, index: u32) -> Vec<DeviceUse> {
    let disk = places.block(index);
    let name = format!("nbd{index}");
    let mut blocks = vec![disk.clone()];
    let entries = fs::read_dir(&disk).into_iter().flatten().flatten();
    blocks.extend(
        entries.map(|e| e.path()).filter(|path| {
            path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&name))
        }),
    );
    let numbers: Vec<String> = blocks.iter().filter_map(|b| Places::numbers(b)).collect();
    let nodes: Vec<PathBuf> =
        blocks.iter().filter_map(|b| Some(places.dev.join(b.file_name()?))).collect();
    let mut found = Vec::new();
    mounts(places, &numbers, &nodes, &mut found);
    let swaps = read(&places.proc.join("swaps")).unwrap_or_default();
    let is_ours = |path: &str| nodes.iter().any(|node| node.as_path() == Path::new(path));
    if swaps.lines().filter_map(|l| l.split_whitespace().next()).any(is_ours) {
        found.push(DeviceUse::Swap);
    }
    for block in &blocks {
        let holders = fs::read_dir(block.join("holders")).into_iter().flatten().flatten();
        found.extend(holders.map(|h| DeviceUse::Held(h.file_name().to_string_lossy().into())));
    }
    openers(places, &nodes, &mut found);
    found
}

/// Returns all processes with their IDs.
fn processes(places: &Places) -> impl Iterator<Item = (u32, PathBuf)> {
    let entries = fs::read_dir(&places.proc).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
}

/// Finds mounts in every mount namespace that has a process. File systems with their own device
/// numbers, such as btrfs, are recognized by their source.
fn mounts(places: &Places, numbers: &[String], nodes: &[PathBuf], found: &mut Vec<DeviceUse>) {
    let mut namespaces = HashSet::new();
    let own = std::iter::once((0, places.proc.join("self")));
    for (_, process) in own.chain(processes(places)) {
        if let Ok(namespace) = fs::read_link(process.join("ns/mnt"))
            && !namespaces.insert(namespace)
        {
            continue;
        }
        for line in read(&process.join("mountinfo")).unwrap_or_default().lines() {
            let mut words = line.split(' ').skip(2);
            let (Some(device), Some(_root), Some(on)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let source = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').nth(1));
            let is_source = source.is_some_and(|s| nodes.iter().any(|n| n == Path::new(s)));
            let entry = DeviceUse::Mounted(unescape(on));
            if (is_source || numbers.iter().any(|n| n == device)) && !found.contains(&entry) {
                found.push(entry);
            }
        }
    }
}

/// Decodes the octal escapes of mountinfo (proc(5)).
fn unescape(text: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .into_iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

fn openers(places: &Places, nodes: &[PathBuf], found: &mut Vec<DeviceUse>) {
    for (pid, process) in processes(places) {
        let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let opens =
            |file: fs::DirEntry| fs::read_link(file.path()).is_ok_and(|to| nodes.contains(&to));
        if files.into_iter().any(opens) {
            let name = read(&process.join("comm")).unwrap_or_else(|| "?".into());
            found.push(DeviceUse::Open(pid, name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sysfs::tests::Tree;
    use super::*;

    fn tree(name: &str) -> Tree {
        let tree = Tree::new(name);
        tree.file("sys/block/nbd1/dev", "43:32\n");
        tree.file("sys/block/nbd1/nbd1p1/dev", "43:33\n");
        tree.file("sys/block/nbd1/queue/depth", "128\n");
        tree
    }

    #[test]
    fn an_idle_device_has_no_users() {
        let tree = tree("nbd-idle");
        tree.file("proc/self/mountinfo", "22 1 43:3 / /other rw - ext4 /dev/nbd0p3 rw\n");
        tree.file("proc/swaps", "Filename Type Size\n/dev/nbd10 partition 8\n");
        assert_eq!(uses(&tree.places, 1), []);
        assert_eq!(uses(&tree.places, 9), [], "a device that does not exist");
    }

    #[test]
    fn every_user_is_found() {
        let tree = tree("nbd-uses");
        let dev = tree.places.dev.clone();
        let line = "22 1 43:33 / /mnt/a\\040b rw,relatime shared:1 - ext4 /dev/nbd1p1 rw\n";
        tree.file("proc/self/mountinfo", line);
        tree.file("proc/9/mountinfo", &line.replace("a\\040b", "c").replace("43:33", "43:32"));
        let btrfs = format!("23 1 0:45 / /mnt/d rw - btrfs {} rw\n", dev.join("nbd1").display());
        tree.file("proc/10/mountinfo", &btrfs);
        let swaps = format!("Filename Type Size\n{} partition 8\n", dev.join("nbd1p1").display());
        tree.file("proc/swaps", &swaps);
        tree.file("sys/block/nbd1/nbd1p1/holders/dm-3/x", "");
        tree.file("proc/9/comm", "dd\n");
        tree.file("proc/9/fd/x", "");
        std::os::unix::fs::symlink(dev.join("nbd1"), tree.root.join("proc/9/fd/4")).unwrap();
        std::os::unix::fs::symlink(dev.join("nbd1"), tree.root.join("proc/9/fd/5")).unwrap();
        let mut shown: Vec<String> =
            uses(&tree.places, 1).iter().map(ToString::to_string).collect();
        // Processes are listed in directory order, which is arbitrary.
        shown[..3].sort();
        assert_eq!(
            shown,
            [
                "mounted on /mnt/a b",
                "mounted on /mnt/c",
                "mounted on /mnt/d",
                "used as swap space",
                "part of /dev/dm-3",
                "open in process 9 (dd)",
            ]
        );
    }
}
