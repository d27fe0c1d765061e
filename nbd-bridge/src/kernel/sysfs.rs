//! The kernel's view of NBD devices in /sys, /proc and /dev.
//!
//! Reads small files and opens no block device, so nothing here waits for IO. The roots are fields
//! only so that tests can change them. Called by `device` and `usage`.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtrs_core::rt::blkdev::device_numbers;

/// Name of the initial PID namespace (PROC_PID_INIT_INO of linux/proc_ns.h).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Mount points of the kernel's file systems.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) sys: PathBuf,
    pub(super) proc: PathBuf,
    pub(super) dev: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self { sys: "/sys".into(), proc: "/proc".into(), dev: "/dev".into() }
    }
}

/// Reads a small file without its trailing newline.
pub(super) fn read(path: &Path) -> Option<String> {
    let mut text = fs::read_to_string(path).ok()?;
    if text.ends_with('\n') {
        text.pop();
    }
    Some(text)
}

fn number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    read(path)?.trim().parse().ok()
}

impl Places {
    /// Returns `/sys/block/nbdX`.
    pub(super) fn block(&self, index: u32) -> PathBuf {
        self.sys.join(format!("block/nbd{index}"))
    }

    /// Returns `/dev/nbdX`.
    pub(super) fn node(&self, index: u32) -> PathBuf {
        self.dev.join(format!("nbd{index}"))
    }

    /// Returns the process that connected a device; None if it is not connected.
    pub(super) fn owner(&self, index: u32) -> Option<u32> {
        number(&self.block(index).join("pid"))
    }

    /// Returns the identifier with which a device was connected.
    pub(super) fn backend(&self, index: u32) -> Option<String> {
        read(&self.block(index).join("backend"))
    }

    /// Makes the kernel send an event for a device, so that udev examines it again.
    fn announce(&self, index: u32) -> io::Result<()> {
        fs::write(self.block(index).join("uevent"), "change")
    }

    /// Returns the size of a device in bytes; sysfs uses 512-byte sectors whatever the block size.
    pub(super) fn size(&self, index: u32) -> Option<u64> {
        number::<u64>(&self.block(index).join("size"))?.checked_mul(512)
    }

    /// Returns the file with the interval at which the block layer checks unanswered requests.
    pub(super) fn io_timeout(&self, index: u32) -> PathBuf {
        self.block(index).join("queue/io_timeout")
    }

    /// Returns the interval at which the block layer checks unanswered requests, in milliseconds.
    pub(super) fn io_timeout_ms(&self, index: u32) -> Option<u64> {
        number(&self.io_timeout(index))
    }

    /// Returns the logical block size of a device in bytes.
    pub(super) fn block_size(&self, index: u32) -> Option<u32> {
        number(&self.block(index).join("queue/logical_block_size"))
    }

    /// Whether a device rejects writes.
    pub(super) fn is_read_only(&self, index: u32) -> Option<bool> {
        number::<u8>(&self.block(index).join("ro")).map(|ro| ro != 0)
    }

    /// Whether the kernel sends flushes to a device. Without a write cache, every acknowledged
    /// write is durable.
    pub(super) fn has_write_cache(&self, index: u32) -> Option<bool> {
        read(&self.block(index).join("queue/write_cache")).map(|mode| mode != "write through")
    }

    /// Whether the kernel sends writes with FUA to a device.
    pub(super) fn has_fua(&self, index: u32) -> Option<bool> {
        number::<u8>(&self.block(index).join("queue/fua")).map(|fua| fua != 0)
    }

    /// Number of queues of a device, each with its own socket.
    pub(super) fn queues(&self, index: u32) -> usize {
        fs::read_dir(self.block(index).join("mq")).into_iter().flatten().flatten().count()
    }

    /// Number of requests submitted to the device and not yet answered.
    pub(super) fn inflight(&self, index: u32) -> Option<u64> {
        let text = read(&self.block(index).join("inflight"))?;
        text.split_whitespace().map(|count| count.parse::<u64>().ok()).sum()
    }

    /// Returns the numbers of all existing NBD devices, ascending.
    pub(super) fn devices(&self) -> Vec<u32> {
        let entries = fs::read_dir(self.sys.join("block")).into_iter().flatten().flatten();
        let mut all: Vec<u32> = entries
            .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("nbd")?.parse().ok())
            .collect();
        all.sort_unstable();
        all
    }

    /// Returns the major and minor number, as in `43:0`, of a device or a partition.
    pub(super) fn numbers(block: &Path) -> Option<String> {
        read(&block.join("dev"))
    }

    /// Whether the node in /dev exists and belongs to this device.
    pub(super) fn has_node(&self, index: u32) -> bool {
        let Ok(meta) = fs::metadata(self.node(index)) else { return false };
        let (major, minor) = device_numbers(meta.rdev());
        meta.file_type().is_block_device()
            && Self::numbers(&self.block(index)) == Some(format!("{major}:{minor}"))
    }

    /// Returns the name of a process; None if it does not exist.
    pub(super) fn process(&self, pid: u32) -> Option<String> {
        read(&self.proc.join(pid.to_string()).join("comm"))
    }

    /// Whether the process that connected a device has exited. This includes a process ID that has
    /// been reused by another program, or by this process, which has not connected a device yet. In
    /// a PID namespace this is unknown: the kernel shows process IDs from the initial namespace.
    pub(super) fn is_left_behind(&self, owner: u32) -> bool {
        let namespace = fs::read_link(self.proc.join("self/ns/pid"));
        if namespace.is_ok_and(|name| name.as_os_str() != INITIAL_PID_NAMESPACE) {
            return false;
        }
        let own = read(&self.proc.join("self/comm"));
        owner == std::process::id() || self.process(owner).is_none_or(|name| Some(name) != own)
    }
}

/// Returns the identifier with which `/dev/nbdX` was connected; None while it is not connected.
#[must_use]
pub fn backend_of(index: u32) -> Option<String> {
    let places = Places::default();
    places.backend(index).filter(|_| places.owner(index).is_some())
}

/// Makes udev examine `/dev/nbdX` again. The kernel's own event for a connect comes before the
/// kernel shows the backend, and the event for a disconnect comes while the kernel still shows it.
pub fn announce(index: u32) {
    if let Err(error) = Places::default().announce(index) {
        tracing::warn!("cannot notify udev of /dev/nbd{index}; its links may be wrong: {error}");
    }
}

/// Polling interval.
pub(super) const STEP: Duration = Duration::from_millis(5);

/// Polls a condition. Returns false if it does not become true within `patience`.
pub(super) fn await_that(patience: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        if holds() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(STEP);
    }
}

#[cfg(test)]
pub(super) mod tests;
