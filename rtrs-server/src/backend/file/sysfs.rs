//! Attributes of a block device or partition, from /sys/dev/block.

use std::path::PathBuf;

use rtrs_core::local::read_text;
use rtrs_core::rt::blkdev::device_numbers;

fn directory(dev: u64) -> PathBuf {
    let (major, minor) = device_numbers(dev);
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// Reads a text attribute of the device's queue. A partition uses its disk's queue.
pub(super) fn queue_text(dev: u64, name: &str) -> Option<String> {
    let directory = directory(dev);
    let read = |queue| read_text(&directory.join(queue).join(name));
    read("queue").or_else(|| read("../queue"))
}

/// Reads a numeric attribute of the device's queue.
pub(super) fn queue(dev: u64, name: &str) -> Option<u64> {
    queue_text(dev, name)?.parse().ok()
}

/// Reads a numeric attribute of the device or partition itself.
pub(super) fn device(dev: u64, name: &str) -> Option<u64> {
    read_text(&directory(dev).join(name))?.parse().ok()
}
