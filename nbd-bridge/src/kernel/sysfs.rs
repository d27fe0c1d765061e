//! What the kernel shows of NBD devices in /sys, /proc and /dev.
//!
//! Reads small files and opens no block device, so nothing here waits for IO. The roots are fields
//! for tests only. Called by `device` and `usage`.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtrs_core::rt::blkdev::device_numbers;

/// The name of the PID namespace of the first process (PROC_PID_INIT_INO of linux/proc_ns.h).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Where the kernel's file systems are mounted.
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

/// The content of a small file without the newline at its end.
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
    /// `/sys/block/nbdX`.
    pub(super) fn block(&self, index: u32) -> PathBuf {
        self.sys.join(format!("block/nbd{index}"))
    }

    /// `/dev/nbdX`.
    pub(super) fn node(&self, index: u32) -> PathBuf {
        self.dev.join(format!("nbd{index}"))
    }

    /// The process that connected a device; None when it is not connected.
    pub(super) fn owner(&self, index: u32) -> Option<u32> {
        number(&self.block(index).join("pid"))
    }

    /// The identifier a device was connected with.
    pub(super) fn backend(&self, index: u32) -> Option<String> {
        read(&self.block(index).join("backend"))
    }

    /// Has the kernel send an event of a device, for which udev looks at it again.
    fn announce(&self, index: u32) -> io::Result<()> {
        fs::write(self.block(index).join("uevent"), "change")
    }

    /// A device's size in bytes; sysfs counts sectors of 512 whatever the block size.
    pub(super) fn size(&self, index: u32) -> Option<u64> {
        number::<u64>(&self.block(index).join("size"))?.checked_mul(512)
    }

    /// The file with the interval at which the block layer checks requests without an answer.
    pub(super) fn io_timeout(&self, index: u32) -> PathBuf {
        self.block(index).join("queue/io_timeout")
    }

    /// Its value in milliseconds.
    pub(super) fn io_timeout_ms(&self, index: u32) -> Option<u64> {
        number(&self.io_timeout(index))
    }

    /// A device's logical block in bytes.
    pub(super) fn block_size(&self, index: u32) -> Option<u32> {
        number(&self.block(index).join("queue/logical_block_size"))
    }

    /// False when a device takes writes.
    pub(super) fn is_read_only(&self, index: u32) -> Option<bool> {
        number::<u8>(&self.block(index).join("ro")).map(|ro| ro != 0)
    }

    /// False when the kernel flushes nothing on a device, since all that is answered is durable.
    pub(super) fn has_write_cache(&self, index: u32) -> Option<bool> {
        read(&self.block(index).join("queue/write_cache")).map(|mode| mode != "write through")
    }

    /// True when the kernel sends writes with FUA to a device.
    pub(super) fn has_fua(&self, index: u32) -> Option<bool> {
        number::<u8>(&self.block(index).join("queue/fua")).map(|fua| fua != 0)
    }

    /// Queues of a device, each with a socket of its own.
    pub(super) fn queues(&self, index: u32) -> usize {
        fs::read_dir(self.block(index).join("mq")).into_iter().flatten().flatten().count()
    }

    /// Requests that were handed to the device and are not answered.
    pub(super) fn inflight(&self, index: u32) -> Option<u64> {
        let text = read(&self.block(index).join("inflight"))?;
        text.split_whitespace().map(|count| count.parse::<u64>().ok()).sum()
    }

    /// Numbers of all NBD devices there are, ascending.
    pub(super) fn devices(&self) -> Vec<u32> {
        let entries = fs::read_dir(self.sys.join("block")).into_iter().flatten().flatten();
        let mut all: Vec<u32> = entries
            .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("nbd")?.parse().ok())
            .collect();
        all.sort_unstable();
        all
    }

    /// Major and minor number, as in `43:0`, of a device or one of its partitions.
    pub(super) fn numbers(block: &Path) -> Option<String> {
        read(&block.join("dev"))
    }

    /// True when the node in /dev is there and is this device.
    pub(super) fn has_node(&self, index: u32) -> bool {
        let Ok(meta) = fs::metadata(self.node(index)) else { return false };
        let (major, minor) = device_numbers(meta.rdev());
        meta.file_type().is_block_device()
            && Self::numbers(&self.block(index)) == Some(format!("{major}:{minor}"))
    }

    /// A process's name; None when there is no such process.
    pub(super) fn process(&self, pid: u32) -> Option<String> {
        read(&self.proc.join(pid.to_string()).join("comm"))
    }

    /// True when the process that connected a device is gone. A number that was given to another
    /// program since, or to this process, which has not connected anything yet, is as good as gone.
    /// In a PID namespace this is unknown: the kernel shows numbers of the initial one.
    pub(super) fn is_left_behind(&self, owner: u32) -> bool {
        let namespace = fs::read_link(self.proc.join("self/ns/pid"));
        if namespace.is_ok_and(|name| name.as_os_str() != INITIAL_PID_NAMESPACE) {
            return false;
        }
        let own = read(&self.proc.join("self/comm"));
        owner == std::process::id() || self.process(owner).is_none_or(|name| Some(name) != own)
    }
}

/// What `/dev/nbdX` was connected with; None while it is not connected.
#[must_use]
pub fn backend_of(index: u32) -> Option<String> {
    let places = Places::default();
    places.backend(index).filter(|_| places.owner(index).is_some())
}

/// Has udev look at `/dev/nbdX` again. The event of a connect comes before the kernel shows the
/// backend, that of a disconnect while it still does.
pub fn announce(index: u32) {
    if let Err(error) = Places::default().announce(index) {
        tracing::warn!("udev is not notified of /dev/nbd{index}, its links may be wrong: {error}");
    }
}

/// Pause between two looks.
pub(super) const STEP: Duration = Duration::from_millis(5);

/// Looks again and again. False when it does not hold within that time.
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
