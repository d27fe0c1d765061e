//! Kernel block device of a session: everything that `--device` requires of this program.
//!
//! This includes preparing the process, on which the kernel's IO depends; connecting the device
//! once the shards are serving, so that it can be opened when `attach` returns; deciding whether a
//! detach may take it from its users; and disconnecting it. The device itself is in
//! `nbd_bridge::kernel`. The functions are called from the process's main thread.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nbd_bridge::export_info;
use nbd_bridge::kernel::{
    DeviceChoice, DeviceOptions, DeviceUse, KernelDevice, Probe, Reached, device_uses,
    free_left_behind, probe, settle,
};
use parking_lot::Mutex;
use rtrs_core::block::Geometry;
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::blkdev::{OpenMode, open as open_device};
use rtrs_core::rt::{become_io_flusher, lock_memory, refuse_oom_kill};

use super::driver::ClientShardReport;
use super::launch::ShardHandle;
use crate::engine::{DeviceIndex, Reported};
use crate::error::{Error, ErrorKind};
use crate::plan::{cannot_attach, device_failed, volume_of};

/// Time limit for the first open, which reads the partition table.
const SCAN_PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for udev's work on a new device.
const UDEV_PATIENCE: Duration = Duration::from_secs(5);
/// Time allowed for processes that open a device only briefly, as udev does after a write.
const OPEN_PATIENCE: Duration = Duration::from_secs(2);
/// Time limit for all shards to learn a new size.
const RESIZE_PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for checking whether a device is claimed.
const CLAIM_PATIENCE: Duration = Duration::from_secs(10);
/// Reason for ending a session whose device the kernel no longer uses.
pub(crate) const KERNEL_GONE: &str = "the kernel has closed all connections of the device: another \
    program disconnected it, or its requests took longer than device-timeout";
/// Path to this program's executable, even if the file has since been replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Prepares the process so that a block device can depend on it. Must be called before any
/// threads start, because they inherit the state. Failures are logged with a remedy, and the
/// session continues.
pub(crate) fn become_dependable() {
    if let Err(error) = lock_memory() {
        tracing::warn!(
            "memory is not locked ({error}): when memory runs short, the device may hang; run as \
             root, with CAP_IPC_LOCK or with LimitMEMLOCK=infinity"
        );
    }
    if let Err(error) = become_io_flusher() {
        tracing::warn!(
            "cannot mark this process as an IO flusher ({error}): when memory runs short, the \
             device may hang; run as root or with CAP_SYS_RESOURCE, on Linux 5.6 or newer"
        );
    }
    if let Err(error) = refuse_oom_kill() {
        tracing::warn!(
            "the kernel may kill this process when memory runs short ({error}); run as root or \
             with CAP_SYS_RESOURCE"
        );
    }
    // A working directory on the device would keep it mounted.
    if let Err(error) = std::env::set_current_dir("/") {
        tracing::warn!("the working directory stays in use: {error}");
    }
}

/// A dead process's device, from its acquisition by a quick takeover until it is connected.
pub(crate) struct ReachedDevice(Reached);

/// Starts a quick takeover, if one is needed, before the session opens.
///
/// # Errors
/// Returns the obstacle and its remedy.
pub(crate) fn reach(
    options: &DeviceOptions,
    export_name: &str,
) -> Result<Option<ReachedDevice>, Error> {
    let what = format!("cannot attach {export_name} to the kernel");
    let reached = nbd_bridge::kernel::reach(options).map_err(device_failed(what))?;
    Ok(reached.map(ReachedDevice))
}

/// Connects the device to the session's shards, which must be serving, and waits until it can be
/// opened and its partitions exist. `reached` is the result of [`reach`].
///
/// # Errors
/// Returns the obstacle and its remedy; the device is then not connected.
pub(crate) fn connect(
    reached: Option<ReachedDevice>,
    options: &DeviceOptions,
    export_name: &str,
    index: DeviceIndex,
    geometry: &Geometry,
    shards: &ShardHandle,
) -> Result<KernelDevice, Error> {
    let what = || cannot_attach(export_name, options.choice);
    let system = |error: io::Error| Error::with_source(ErrorKind::System, what(), error);
    let export = export_info(export_name, geometry);
    let adopt = |sockets| shards.adopt_kernel(index, sockets);
    let reached = reached.map(|ReachedDevice(reached)| reached);
    let device = KernelDevice::connect(reached, &export, options, shards.count(), adopt);
    let device = device.map_err(device_failed(what()))?;
    let path = device.path();
    match open_in_child(&path, false, SCAN_PATIENCE).map_err(system)? {
        Probe::Opened => {}
        Probe::Refused(why) => tracing::warn!("partitions of {} not read: {why}", path.display()),
        Probe::TimedOut => tracing::warn!(
            "partitions of {} not read within {} s; the session is slow",
            path.display(),
            SCAN_PATIENCE.as_secs()
        ),
    }
    tracing::info!("{export_name} is {}", path.display());
    Ok(device)
}

/// Lets udev create the device's links, and waits for them.
pub(crate) fn announce(device: &KernelDevice) {
    device.announce();
    if !settle(UDEV_PATIENCE) {
        tracing::warn!("udev is still busy with {}", device.path().display());
    }
}

/// Sets the kernel's device to the new size of the session's device. All shards must know the size
/// first, since the kernel may use the new size immediately.
pub(crate) fn resize(device: &KernelDevice, index: DeviceIndex, size: u64, shards: &ShardHandle) {
    let until = Instant::now() + RESIZE_PATIENCE;
    let knows = |report: &ClientShardReport| {
        let geometry = report.engine.geometry(index);
        geometry.is_some_and(|geometry| geometry.size == size)
    };
    loop {
        let reports = shards.reports(Reported::None);
        if reports.len() == shards.count() && reports.iter().all(knows) {
            break;
        }
        // The control shard, which sent this size, may know a newer one, and will report that too.
        let control = reports.iter().find(|report| report.engine.shard == CoreIndex(0));
        let is_old = control.is_some_and(|control| !knows(control));
        if is_old || Instant::now() >= until {
            // Either the size has changed again, which the next event reports, or a shard is stuck.
            tracing::debug!(size, "not all shards have adopted this size of the device");
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let path = device.path();
    match device.resize(size) {
        Ok(()) => tracing::info!(size, "{} has a new size", path.display()),
        Err(error) => tracing::error!(size, "{} keeps its size: {error}", path.display()),
    }
}

/// Opens a device in a child process of this program; see [`open`].
fn open_in_child(path: &Path, exclusive: bool, patience: Duration) -> io::Result<Probe> {
    let mut child = Command::new(THIS_PROGRAM);
    child.arg("open-device").arg(path);
    if exclusive {
        child.arg("--exclusive");
    }
    probe(&mut child, patience)
}

/// Body of `open-device`: opens and closes a device.
pub(crate) fn open(path: &Path, exclusive: bool) -> Result<(), Error> {
    open_device(path, OpenMode { exclusive, ..OpenMode::default() }).map(drop).map_err(|error| {
        let text = format!("cannot open {}", path.display());
        Error::with_source(ErrorKind::InUse, text, error)
    })
}

/// Refuses to take a device from its users. Later users are not detected.
///
/// # Errors
/// Returns [`ErrorKind::InUse`], naming the users and the remedy.
pub(crate) fn refuse_if_used(name: &str, path: &Path) -> Result<(), Error> {
    let Some(Ok(DeviceChoice::Index(index))) = path.to_str().map(str::parse) else {
        return Ok(());
    };
    let deadline = Instant::now() + OPEN_PATIENCE;
    let uses = loop {
        let uses = device_uses(index);
        let only_open = uses.iter().all(|one| matches!(one, DeviceUse::Open(..)));
        if uses.is_empty() || !only_open || Instant::now() >= deadline {
            break uses;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut users: Vec<String> = uses.iter().map(ToString::to_string).collect();
    if users.is_empty() {
        match open_in_child(path, true, CLAIM_PATIENCE) {
            Ok(Probe::Opened) => return Ok(()),
            Ok(Probe::Refused(why)) => users.push(format!("claimed ({why})")),
            Ok(Probe::TimedOut) => {
                users.push("slow to open, perhaps because its IO is stuck".into())
            }
            Err(error) => {
                let text = format!("cannot determine whether {} is in use", path.display());
                return Err(Error::with_source(ErrorKind::System, text, error));
            }
        }
    }
    let users = users.join(", ");
    let text = format!(
        "{name:?} is {}, which is {users}; end that first, or use --force, which fails the IO of \
         its users and loses their unwritten data",
        path.display()
    );
    Err(Error::new(ErrorKind::InUse, text))
}

/// Device of a volume, until it is disconnected.
pub(crate) type Held = Arc<Mutex<Option<KernelDevice>>>;

/// Disconnects the device once requests in flight have ended or `within` has passed. Returns a
/// warning, for example that the device is still in use.
pub(crate) fn disconnect(held: &Held, within: Duration) -> Option<String> {
    // Another thread may be disconnecting it; this waits for that thread.
    let mut held = held.lock();
    let mut device = held.take()?;
    let disconnected = device.disconnect(within);
    device.announce();
    let error = disconnected.err()?;
    tracing::warn!("{error}");
    Some(error.to_string())
}

/// Disconnects several devices at the same time; see [`disconnect`].
pub(crate) fn disconnect_all(all: &[Held], within: Duration) -> Vec<Option<String>> {
    if let [one] = all {
        return vec![disconnect(one, within)];
    }
    std::thread::scope(|scope| {
        let started: Vec<_> =
            all.iter().map(|held| scope.spawn(move || disconnect(held, within))).collect();
        let failed = || Some("the thread that disconnects the device has failed".to_owned());
        started.into_iter().map(|thread| thread.join().unwrap_or_else(|_| failed())).collect()
    })
}

/// Frees the devices that dead sessions of this volume had connected.
///
/// # Errors
/// Returns the obstacle and its remedy.
pub(crate) fn free(
    export_name: &str,
    is_export: impl Fn(&str) -> bool,
) -> Result<Vec<PathBuf>, Error> {
    let freed = free_left_behind(|backend| volume_of(backend).is_some_and(&is_export));
    let what = format!("cannot free the devices that a session of {export_name:?} left behind");
    freed.iter().flatten().copied().for_each(nbd_bridge::kernel::announce);
    let paths = |index: &u32| PathBuf::from(DeviceChoice::Index(*index).to_string());
    freed.map(|freed| freed.iter().map(paths).collect()).map_err(device_failed(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_other_than_nbd_are_not_checked() {
        refuse_if_used("v", Path::new("/dev/sda")).unwrap();
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = open(Path::new("/nonexistent/nbd0"), true).unwrap_err();
        let text = error.chain().to_string();
        assert!(text.starts_with("cannot open /nonexistent/nbd0: No such file"), "{text}");
    }
}
