//! What /sys/dev/block tells about a block device or a partition of one.

use std::path::PathBuf;

use rtrs_core::rt::blkdev::device_numbers;

fn directory(dev: u64) -> PathBuf {
    let (major, minor) = device_numbers(dev);
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

fn read(path: PathBuf) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// A text attribute of the device's queue. A partition has its disk's queue.
pub(super) fn queue_text(dev: u64, name: &str) -> Option<String> {
    let directory = directory(dev);
    read(directory.join("queue").join(name)).or_else(|| read(directory.join("../queue").join(name)))
}

/// A number of the device's queue.
pub(super) fn queue(dev: u64, name: &str) -> Option<u64> {
    queue_text(dev, name)?.parse().ok()
}

/// A number of the device or partition itself.
pub(super) fn device(dev: u64, name: &str) -> Option<u64> {
    read(directory(dev).join(name))?.parse().ok()
}
