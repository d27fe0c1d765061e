//! Lifecycle of a kernel device: preconditions, connect and disconnect.
//!
//! Every step has a timeout. A disconnect completes even if IO is stuck: a thread that may be left
//! behind asks the kernel, and if there is no answer soon, the sockets that the kernel uses are
//! shut down, so that it fails the IO in flight. The kernel ends of the sockets are kept for this.
//!
//! Called by the process that holds a session: [`check_device`] early, [`KernelDevice::connect`]
//! from its main thread when every shard can adopt a socket, [`KernelDevice::disconnect`] before
//! the shards end. Source of the driver's behavior: `drivers/block/nbd.c`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rtrs_core::rt::{page_size, privileges};

use super::claim::{Claim, check_free, claim_left_behind};
use super::error::DeviceError;
use super::netlink::{Attr, SOCKETS_MAX, open_netlink, sockets_attr};
use super::options::{DeviceChoice, DeviceOptions, REQUEST_BYTES};
use super::resend;
use super::resize::resize;
use super::sockets::{CONNECTS_MAX, READ_PATIENCE, Sockets};
use super::sysfs::{Places, STEP, announce, await_that};
use super::takeover::Reached;
use super::usage::{DeviceUse, uses};
use crate::proto::ExportInfo;
use crate::proto::wire::transmission_flags as tf;

/// Time to wait for a device that a process has open only briefly, as udev does after a disconnect.
const BUSY_PATIENCE: Duration = Duration::from_secs(3);
/// Time to wait for the device to appear after a connect: devtmpfs creates the node in /dev.
const NODE_PATIENCE: Duration = Duration::from_secs(5);
/// Time for the kernel to disconnect a device whose sockets are read; they are then shut down.
const DISCONNECT_PATIENCE: Duration = Duration::from_secs(1);
/// Time for the kernel to disconnect once the sockets are shut down or their process has exited.
const SHUT_PATIENCE: Duration = Duration::from_secs(4);
/// Time for the last reference to a device to be dropped after a disconnect.
const GONE_PATIENCE: Duration = Duration::from_secs(1);
/// Replaces [`GONE_PATIENCE`] when the only visible user is a process that has the device open.
/// That is often udev, whose reads have just failed.
const OPEN_PATIENCE: Duration = Duration::from_secs(3);
/// Flags known to some version of the kernel's driver. The driver examines each flag separately and
/// ignores unknown ones, so every version may be passed all flags.
const KERNEL_FLAGS: u16 = tf::HAS_FLAGS
    | tf::READ_ONLY
    | tf::SEND_FLUSH
    | tf::SEND_FUA
    | tf::ROTATIONAL
    | tf::SEND_TRIM
    | tf::SEND_WRITE_ZEROES
    | tf::CAN_MULTI_CONN;

/// Checks whether a device could be connected now, without changing anything: the module, the
/// privilege and the device. `backend` is the identifier for the connect.
///
/// # Errors
/// The reason why the device cannot be connected, with a hint.
pub fn check_device(choice: DeviceChoice, backend: &str) -> Result<(), DeviceError> {
    open_netlink()?;
    if !privileges()?.sys_admin {
        return Err(DeviceError::NoPermission);
    }
    match choice {
        DeviceChoice::Auto => Ok(()),
        DeviceChoice::Index(index) => check_free(&Places::default(), index, backend),
    }
}

/// Disconnects devices that an exited process had connected with one of our identifiers, so that
/// their IO fails and they can be reconnected. Returns their numbers.
///
/// # Errors
/// All devices are tried; [`DeviceError::Stuck`] names the first that was not freed in time.
pub fn free_left_behind(is_ours: impl Fn(&str) -> bool) -> Result<Vec<u32>, DeviceError> {
    let places = Places::default();
    let mut freed = Vec::new();
    let mut failed = Ok(());
    for index in places.devices() {
        if let Some(_claim) = claim_left_behind(&places, index, &is_ours) {
            tracing::info!("freeing /dev/nbd{index}, which a dead process left behind");
            match free(&places, index) {
                Ok(()) => freed.push(index),
                Err(error) => failed = failed.and(Err(error)),
            }
        }
    }
    failed.map(|()| freed)
}

fn free(places: &Places, index: u32) -> Result<(), DeviceError> {
    if !start_disconnect(index)?.wait(index, SHUT_PATIENCE)? {
        let what = "the kernel does not finish its IO; see the kernel log".to_owned();
        return Err(DeviceError::Stuck { index, what });
    }
    resend::make_usual(places, index);
    await_gone(places, index)
}

/// A disconnect in progress.
struct Disconnecting(mpsc::Receiver<io::Result<()>>);

/// Starts a disconnect on a separate thread.
fn start_disconnect(index: u32) -> Result<Disconnecting, DeviceError> {
    let mut netlink = open_netlink()?;
    let (done, result) = mpsc::channel();
    let body = move || {
        if done.send(netlink.disconnect(index)).is_err() {
            tracing::debug!("/dev/nbd{index} is now disconnected");
        }
    };
    std::thread::Builder::new().name("nbd-disconnect".into()).spawn(body)?;
    Ok(Disconnecting(result))
}

impl Disconnecting {
    /// Waits for the disconnect. Returns false if the kernel has not finished in time; the thread
    /// then keeps waiting.
    fn wait(&self, index: u32, patience: Duration) -> Result<bool, DeviceError> {
        match self.0.recv_timeout(patience) {
            Ok(Ok(())) => Ok(true),
            Ok(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(DeviceError::NoPermission)
            }
            Ok(Err(error)) => Err(DeviceError::Stuck { index, what: error.to_string() }),
            Err(_) => Ok(false),
        }
    }
}

/// Waits until a disconnected device is free, that is, until the last process has closed it.
fn await_gone(places: &Places, index: u32) -> Result<(), DeviceError> {
    let is_gone = || places.owner(index).is_none();
    if await_that(GONE_PATIENCE, is_gone) {
        return Ok(());
    }
    let only_open = || uses(places, index).iter().all(|one| matches!(one, DeviceUse::Open(..)));
    if only_open() && await_that(OPEN_PATIENCE, is_gone) {
        return Ok(());
    }
    let users: Vec<String> = uses(places, index).iter().map(ToString::to_string).collect();
    let what = if users.is_empty() {
        "the device is disconnected, but still open".to_owned()
    } else {
        format!("the device is disconnected, but {}", users.join(", "))
    };
    Err(DeviceError::Stuck { index, what: what + "; it is freed once nothing uses it" })
}

/// Checks whether an export is suitable for a kernel block device.
fn check_export(export: &ExportInfo) -> Result<(), DeviceError> {
    let ExportInfo { size, min_block, .. } = *export;
    let refuse = |text: String| Err(DeviceError::Export(text));
    let block = min_block.max(512);
    let block_max = u32::try_from(page_size()).unwrap_or(4096);
    if !block.is_power_of_two() || block > block_max {
        return refuse(format!("its block size is {block}, but the kernel's limit is {block_max}"));
    }
    if size == 0 {
        return refuse("its size is 0 bytes".into());
    }
    if i64::try_from(size).is_err() {
        return refuse(format!("its size is {size} bytes, but the kernel's limit is 8 EiB"));
    }
    if !size.is_multiple_of(u64::from(block)) {
        return refuse(format!("its {size} bytes are not a multiple of its block size {block}"));
    }
    Ok(())
}

/// Returns the attributes for a connect, without the sockets.
fn connect_attrs(export: &ExportInfo, options: &DeviceOptions) -> Vec<Attr> {
    let mut flags = export.transmission_flags(false) & KERNEL_FLAGS;
    if !export.write_cache {
        flags &= !(tf::SEND_FLUSH | tf::SEND_FUA);
    }
    let mut attrs = vec![
        Attr::SizeBytes(export.size),
        Attr::BlockSizeBytes(export.min_block.max(512).into()),
        Attr::Timeout(options.timeout_s.unwrap_or(0)),
        Attr::DeadConnTimeout(options.dead_timeout_s),
        Attr::ServerFlags(flags.into()),
        Attr::BackendIdentifier(options.backend.clone()),
    ];
    if let DeviceChoice::Index(index) = options.choice {
        attrs.push(Attr::Index(index));
    }
    attrs
}

/// Adds a hint to the kernel's error.
fn refused(choice: DeviceChoice, source: io::Error) -> DeviceError {
    const EPERM: i32 = 1;
    const EINVAL: i32 = 22;
    let device = match choice {
        DeviceChoice::Auto => "a free device".to_owned(),
        DeviceChoice::Index(_) => choice.to_string(),
    };
    let why = match source.raw_os_error() {
        Some(EPERM) => return DeviceError::NoPermission,
        Some(EINVAL) => " (the device may not exist: see the parameter nbds_max of the module nbd)",
        _ => "",
    };
    DeviceError::Refused { device, why, source }
}

/// A connected device. Dropping it disconnects it without waiting for its IO.
#[derive(Debug)]
pub struct KernelDevice {
    index: u32,
    places: Places,
    sockets: Sockets,
    connected: bool,
    /// Owner that the kernel reported when the device was connected; in a PID namespace this
    /// differs from our own process ID.
    owner: Option<u32>,
    _claim: Option<Claim>,
}

impl KernelDevice {
    /// Connects a device for `export` over `count` sockets and waits, at most a few seconds, until
    /// it can be opened. `adopt` receives our ends once the kernel reads its own, and must serve
    /// them before any process opens the device. Must be called from the process's main thread,
    /// which the kernel records as the owner of the device.
    ///
    /// Devices that an exited process had connected with the same identifier are taken over, if the
    /// options say so, or else freed first. `reached` is the result of [`super::reach`].
    ///
    /// # Errors
    /// The reason for the failure, with a hint; in that case, no device is connected.
    pub fn connect(
        reached: Option<Reached>,
        export: &ExportInfo,
        options: &DeviceOptions,
        count: usize,
        adopt: impl FnOnce(Vec<OwnedFd>) -> io::Result<()>,
    ) -> Result<Self, DeviceError> {
        check_export(export)?;
        let most = if options.timeout_s.is_some() { SOCKETS_MAX } else { 1 };
        if count == 0 || count > most {
            let text = format!("{count} sockets requested; must be 1 to {most}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text).into());
        }
        let places = Places::default();
        let reached = match reached {
            None if options.takeover => Reached::new(&places, options, count, Some(export))?,
            reached => reached,
        };
        if let Some(reached) = reached {
            return reached.serve(export, adopt).map(Self::taken_over);
        }
        let mut wanted = options.clone();
        match free_left_behind(|found| found == options.backend) {
            Err(DeviceError::Stuck { index, what })
                if options.choice != DeviceChoice::Index(index) =>
            {
                tracing::warn!(
                    "cannot free /dev/nbd{index}, which a dead process left behind: {what}"
                );
            }
            // The device is free, but udev may have it open for a moment, and auto would pick a
            // different one.
            freed => wanted.prefer(&freed?),
        }
        let mut attempt = 1;
        let mut device = loop {
            let device = match Self::connect_once(&places, export, &wanted, count) {
                Err(DeviceError::Busy { .. }) if wanted.choice != options.choice => {
                    wanted.choice = options.choice;
                    continue;
                }
                connected => connected?,
            };
            let index = device.index;
            if await_that(READ_PATIENCE, || device.sockets.unread() == 0) {
                break device;
            }
            let unread = device.sockets.unread();
            let what = format!("the kernel does not read {unread} of {count} sockets");
            if attempt == CONNECTS_MAX {
                let what = format!(
                    "{what} after {attempt} attempts; see the kernel log, or use fewer shards"
                );
                return Err(DeviceError::Odd { index, what });
            }
            tracing::info!(
                "/dev/nbd{index}: {what}: no kernel thread is free; reconnecting the device"
            );
            // The kernel may hold the device a little longer, and auto would pick a different one.
            wanted.prefer(&[index]);
            attempt += 1;
        };
        adopt(device.sockets.take_ours())?;
        if options.timeout_s.is_none() {
            // Requests must be served by now, since this may wait for them.
            resend::make_quick(&places, device.index);
        }
        device.await_node(export.size)?;
        Ok(device)
    }

    /// Creates the object for a device of another process whose sockets were replaced. The kernel
    /// keeps showing that process as the owner.
    fn taken_over(Reached { index, places, sockets, claim }: Reached) -> Self {
        let owner = places.owner(index);
        Self { index, places, sockets, connected: true, owner, _claim: Some(claim) }
    }

    /// Connects fresh sockets.
    fn connect_once(
        places: &Places,
        export: &ExportInfo,
        options: &DeviceOptions,
        count: usize,
    ) -> Result<Self, DeviceError> {
        let sockets = Sockets::new(count)?;
        let mut attrs = connect_attrs(export, options);
        attrs.push(sockets_attr(sockets.kernel_ends()));
        let index = connect_patiently(places, options, &attrs)?;
        let owner = places.owner(index);
        let claim = Claim::of_own(places, index);
        let places = places.clone();
        Ok(Self { index, places, sockets, connected: true, owner, _claim: claim })
    }

    /// Waits until the kernel shows the device's node and size.
    fn await_node(&self, size: u64) -> Result<(), DeviceError> {
        let Self { index, ref places, .. } = *self;
        let odd = |what: String| Err(DeviceError::Odd { index, what });
        if !await_that(NODE_PATIENCE, || places.size(index) == Some(size)) {
            let found =
                places.size(index).map_or_else(|| "no size".into(), |n| format!("{n} bytes"));
            return odd(format!("sysfs shows {found} instead of {size}"));
        }
        if places.owner(index).is_none() {
            tracing::warn!("/dev/nbd{index} does not show an owner");
        }
        if !await_that(NODE_PATIENCE, || places.has_node(index)) {
            let node = places.node(index);
            return odd(format!(
                "{} is not its device node; mount devtmpfs there, or create the node with mknod",
                node.display()
            ));
        }
        Ok(())
    }

    /// Returns `/dev/nbdX`.
    pub fn path(&self) -> PathBuf {
        self.places.node(self.index)
    }

    /// Makes udev examine the device again, once its properties are complete or it has been
    /// disconnected.
    pub fn announce(&self) {
        announce(self.index);
    }

    /// Resizes the device. The kernel shows the new size immediately and sends an event, to which
    /// udev reacts.
    ///
    /// # Errors
    /// The kernel's error, with a hint.
    pub fn resize(&self, size: u64) -> Result<(), DeviceError> {
        resize(&self.places, self.index, size)
    }

    /// Waits until no IO is in flight, for `patience` at most, and disconnects the device. IO still
    /// in flight then fails. Takes at most a few seconds more, even if IO is stuck.
    ///
    /// # Errors
    /// [`DeviceError::Stuck`] if another process still has the device open, so that it is not free
    /// yet, or if the kernel did not disconnect it in time.
    pub fn disconnect(&mut self, patience: Duration) -> Result<(), DeviceError> {
        let index = self.index;
        if !std::mem::take(&mut self.connected) {
            return Ok(());
        }
        if self.places.owner(index) != self.owner {
            tracing::info!("/dev/nbd{index} was disconnected by another program");
            self.sockets.shut_down();
            if self.places.owner(index).is_none() {
                resend::make_usual(&self.places, index);
            }
            return Ok(());
        }
        let ended = await_that(patience, || self.places.inflight(index) == Some(0));
        if !ended && self.sockets.are_served() {
            let left = self.places.inflight(index).unwrap_or(0);
            tracing::warn!("/dev/nbd{index}: {left} requests did not finish in time and will fail");
        }
        if ended {
            // This must happen before another process can connect the device.
            resend::make_usual(&self.places, index);
        }
        let disconnecting = start_disconnect(index);
        let mut done = match &disconnecting {
            Ok(disconnecting) => disconnecting.wait(index, DISCONNECT_PATIENCE),
            Err(_) => Ok(false),
        };
        // The kernel has finished with the sockets, or they keep it from proceeding.
        self.sockets.shut_down();
        let disconnecting = disconnecting?;
        if matches!(done, Ok(false)) {
            done = disconnecting.wait(index, SHUT_PATIENCE);
        }
        if !done? {
            let what = "the kernel does not finish its IO; see the kernel log".to_owned();
            return Err(DeviceError::Stuck { index, what });
        }
        if !ended {
            resend::make_usual(&self.places, index);
        }
        await_gone(&self.places, index)
    }
}

impl Drop for KernelDevice {
    fn drop(&mut self) {
        if let Err(error) = self.disconnect(Duration::ZERO) {
            tracing::warn!("{error}");
        }
    }
}

/// Connects a device. A device that is busy without being connected is open in some process, often
/// only for a moment.
fn connect_patiently(
    places: &Places,
    options: &DeviceOptions,
    attrs: &[Attr],
) -> Result<u32, DeviceError> {
    let mut netlink = open_netlink()?;
    let deadline = Instant::now() + BUSY_PATIENCE;
    loop {
        if let DeviceChoice::Index(index) = options.choice {
            check_free(places, index, &options.backend)?;
        }
        match netlink.connect(attrs.to_vec()) {
            Ok(index) => return Ok(index),
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {
                let DeviceChoice::Index(index) = options.choice else {
                    return Err(refused(options.choice, e));
                };
                if Instant::now() >= deadline {
                    let users = uses(places, index);
                    let by = users.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                    let by = if by.is_empty() { "it is still open".into() } else { by };
                    return Err(DeviceError::Busy { index, by });
                }
                std::thread::sleep(STEP);
            }
            Err(e) => return Err(refused(options.choice, e)),
        }
    }
}

/// Kernel requests of the default size fit into the largest request that the bridge accepts.
const _: () = assert!(REQUEST_BYTES <= crate::proto::wire::PAYLOAD_MAX as usize);

#[cfg(test)]
mod tests {
    use super::*;

    fn export(size: u64, block: u32) -> ExportInfo {
        ExportInfo { min_block: block, ..ExportInfo::plain("v", size) }
    }

    #[test]
    fn exports_unsuitable_for_a_device_are_refused() {
        for (size, block, text) in [
            (0, 512, "its size is 0 bytes"),
            (4096 + 512, 4096, "its 4608 bytes are not a multiple of its block size 4096"),
            (513, 1, "its 513 bytes are not a multiple of its block size 512"),
            (
                1 << 63,
                512,
                "its size is 9223372036854775808 bytes, but the kernel's limit is 8 EiB",
            ),
            (u64::MAX, 512, "8 EiB"),
            (1 << 20, 65536 * 2, "its block size is 131072, but the kernel's limit is "),
        ] {
            let error = check_export(&export(size, block)).unwrap_err().to_string();
            assert!(error.contains(text), "{error}\nlacks {text}");
        }
        for (size, block) in [(512, 1), (512, 512), (4096, 4096), (i64::MAX as u64 & !4095, 4096)] {
            check_export(&export(size, block)).unwrap();
        }
    }

    fn options(choice: DeviceChoice) -> DeviceOptions {
        DeviceOptions {
            choice,
            timeout_s: Some(90),
            dead_timeout_s: 2,
            backend: "rtrs:s/v".into(),
            takeover: false,
        }
    }

    #[test]
    fn a_freed_device_is_reused() {
        for (choice, freed, taken) in [
            (DeviceChoice::Auto, &[3, 4][..], DeviceChoice::Index(3)),
            (DeviceChoice::Auto, &[], DeviceChoice::Auto),
            (DeviceChoice::Index(1), &[3], DeviceChoice::Index(1)),
        ] {
            let mut wanted = options(choice);
            wanted.prefer(freed);
            assert_eq!(wanted.choice, taken);
        }
    }

    #[test]
    fn an_export_is_encoded_as_attributes() {
        let mut info = export(1 << 30, 4096);
        (info.trim, info.write_zeroes, info.fast_zero) = (true, true, true);
        (info.cache, info.multi_conn, info.rotational) = (true, true, true);
        let attrs = connect_attrs(&info, &options(DeviceChoice::Auto));
        assert_eq!(
            attrs,
            [
                Attr::SizeBytes(1 << 30),
                Attr::BlockSizeBytes(4096),
                Attr::Timeout(90),
                Attr::DeadConnTimeout(2),
                // Without cache and fast zero, which the kernel does not know.
                Attr::ServerFlags(0x17d),
                Attr::BackendIdentifier("rtrs:s/v".into()),
            ]
        );
        info.read_only = true;
        let attrs = connect_attrs(&info, &options(DeviceChoice::Index(3)));
        assert_eq!(attrs.last(), Some(&Attr::Index(3)));
        assert!(attrs.contains(&Attr::ServerFlags(0x11f)), "{attrs:?}");
        info.write_cache = false;
        let attrs = connect_attrs(&info, &options(DeviceChoice::Auto));
        assert!(attrs.contains(&Attr::ServerFlags(0x113)), "no flush, no FUA: {attrs:?}");
        let small = export(512, 1);
        let attrs = connect_attrs(&small, &options(DeviceChoice::Auto));
        assert!(attrs.contains(&Attr::BlockSizeBytes(512)), "{attrs:?}");
    }

    #[test]
    fn errors_name_a_remedy() {
        let error = |choice, code| refused(choice, io::Error::from_raw_os_error(code)).to_string();
        assert!(error(DeviceChoice::Auto, 1).contains("CAP_SYS_ADMIN"));
        assert!(
            error(DeviceChoice::Index(99), 22).contains("/dev/nbd99 (the device may not exist")
        );
        assert_eq!(error(DeviceChoice::Auto, 12), "the kernel cannot connect a free device");
        assert!(DeviceError::NoModule.to_string().contains("modprobe nbd"));
    }
}
