//! Takeover of a device whose process died: fresh sockets replace the dead ones.
//!
//! The device stays connected: file systems stay mounted, and requests wait in the kernel for up to
//! `dead_timeout_s`. The kernel resends a request that the dead process had taken from its sockets
//! and not answered once `timeout_s` has passed, with the value set when the request was first sent
//! (`nbd_xmit_timeout`): a new socket does not make the kernel check earlier. For a quick device
//! (`resend`), it does so sooner. All other requests are sent immediately.
//!
//! The fresh sockets must not be served before it is certain that no request passed on by the dead
//! process can still take effect. Until then, what the kernel writes to them stays unread; so a
//! quick device gets its socket first, and its resends arrive while the session opens ([`reach`]).
//!
//! Source: `nbd_genl_reconfigure` and `nbd_reconnect_socket` in `drivers/block/nbd.c`. Called by
//! `device`.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::claim::{Claim, claim_left_behind};
use super::error::DeviceError;
use super::netlink::{Attr, Netlink, open_netlink, sockets_attr};
use super::options::{DeviceChoice, DeviceOptions};
use super::resend::is_quick;
use super::resize::resize;
use super::sockets::{CONNECTS_MAX, READ_PATIENCE, Sockets};
use super::sysfs::{Places, await_that};
use crate::proto::ExportInfo;

/// A device left behind by an exited process, with fresh sockets that are not served yet. Dropping
/// it leaves the device behind again.
#[derive(Debug)]
pub struct Reached {
    pub(super) index: u32,
    pub(super) places: Places,
    pub(super) sockets: Sockets,
    pub(super) claim: Claim,
}

/// Gives fresh sockets, even before they can be served, to the device to be taken over if it
/// supports a quick takeover: the kernel resends what the dead process had taken while the session
/// is still opening. See [`KernelDevice::connect`](super::KernelDevice::connect).
///
/// # Errors
/// The reason for the failure, with a hint.
pub fn reach(options: &DeviceOptions) -> Result<Option<Reached>, DeviceError> {
    reach_in(&Places::default(), options)
}

fn reach_in(places: &Places, options: &DeviceOptions) -> Result<Option<Reached>, DeviceError> {
    if !options.takeover || options.timeout_s.is_some() {
        return Ok(None);
    }
    Reached::new(places, options, 1, None)
}

/// Returns the device to take over, if any.
fn left_behind(places: &Places, options: &DeviceOptions) -> Option<(u32, Claim)> {
    let is_wanted = |index: &u32| match options.choice {
        DeviceChoice::Auto => true,
        DeviceChoice::Index(wanted) => wanted == *index,
    };
    let claim = |index| {
        let claim = claim_left_behind(places, index, |found| found == options.backend)?;
        Some((index, claim))
    };
    places.devices().into_iter().filter(is_wanted).find_map(claim)
}

fn odd<T>(index: u32, what: String) -> Result<T, DeviceError> {
    Err(DeviceError::Odd { index, what })
}

/// Interval between attempts to replace a device's only socket.
const AGAIN: Duration = Duration::from_millis(50);
const HINT: &str = "free it with detach, or attach without takeover";

/// Checks whether `count` sockets can replace the device's.
fn check_sockets(
    places: &Places,
    index: u32,
    options: &DeviceOptions,
    count: usize,
) -> Result<(), DeviceError> {
    // Requests in flight would get a different timeout from the one they were sent with.
    match (is_quick(places, index), options.timeout_s) {
        (true, Some(_)) => {
            return odd(index, "it was set up for quick takeover; use --quick-takeover".into());
        }
        (false, None) => {
            return odd(
                index,
                format!("it was not set up for quick takeover; omit --quick-takeover, or {HINT}"),
            );
        }
        _ => {}
    }
    let queues = places.queues(index);
    if queues != count {
        let text = format!("it has {queues} sockets; use --shards {queues}, or {HINT}");
        return odd(index, text);
    }
    Ok(())
}

/// Checks whether `export` can replace that of the device. The kernel learned the export's
/// properties on connect and relies on them: a device without a write cache is never flushed.
fn check_shape(places: &Places, index: u32, export: &ExportInfo) -> Result<(), DeviceError> {
    // The export may have grown in the meantime; all other properties must still hold.
    if places.size(index).is_none_or(|had| export.size < had) {
        let had = places.size(index).map_or_else(|| "no size".into(), |n| format!("{n} bytes"));
        return odd(
            index,
            format!("its size is {had}, but the export has {} bytes; {HINT}", export.size),
        );
    }
    let block = export.min_block.max(512);
    if let Some(had) = places.block_size(index).filter(|had| *had < block) {
        let text = format!("its block size is {had}, but that of the export is {block}; {HINT}");
        return odd(index, text);
    }
    if export.read_only && places.is_read_only(index) == Some(false) {
        return odd(index, format!("it accepts writes, but the export is read-only; {HINT}"));
    }
    if export.write_cache && places.has_write_cache(index) == Some(false) {
        let text = "the device has no write cache and is never flushed, but the export has a write \
                    cache";
        return odd(index, format!("{text}; {HINT}"));
    }
    if !export.fua && places.has_fua(index) == Some(true) {
        return odd(index, format!("it supports FUA, but the export does not; {HINT}"));
    }
    Ok(())
}

/// Gives the kernel a socket. Returns false if the kernel does not read from it in time.
fn give(netlink: &mut Netlink, attrs: &[Attr], fresh: &Sockets, count: usize) -> io::Result<bool> {
    let deadline = Instant::now() + READ_PATIENCE;
    // The socket of a process that has just died may not be marked dead yet; the kernel then
    // silently drops the new one. If there is only one socket, the kernel cannot take two.
    let patience = if count == 1 { AGAIN } else { READ_PATIENCE };
    loop {
        netlink.reconfigure(attrs.to_vec())?;
        if await_that(patience, || fresh.unread() == 0) {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
}

impl Reached {
    /// Gives the device fresh sockets, one after the other. Returns None if there is no device to
    /// take over.
    pub(super) fn new(
        places: &Places,
        options: &DeviceOptions,
        count: usize,
        export: Option<&ExportInfo>,
    ) -> Result<Option<Self>, DeviceError> {
        let Some((index, claim)) = left_behind(places, options) else { return Ok(None) };
        check_sockets(places, index, options, count)?;
        export.map_or(Ok(()), |export| check_shape(places, index, export))?;
        let mut netlink = open_netlink()?;
        let mut sockets = Sockets::default();
        for number in 0..count {
            let mut attempt = 1;
            // One at a time: the readers of several could block each other.
            let fresh = loop {
                let mut fresh = Sockets::new(1)?;
                let mut attrs = vec![
                    Attr::Index(index),
                    Attr::DeadConnTimeout(options.dead_timeout_s),
                    Attr::BackendIdentifier(options.backend.clone()),
                    sockets_attr(fresh.kernel_ends()),
                ];
                // A quick device already has no timeout; setting that again would make it slow.
                attrs.extend(options.timeout_s.map(Attr::Timeout));
                let refused = |source| DeviceError::Refused {
                    device: format!("/dev/nbd{index} to this process"),
                    why: " (its requests may have failed already: see device-dead-timeout)",
                    source,
                };
                if give(&mut netlink, &attrs, &fresh, count).map_err(refused)? {
                    break fresh;
                }
                // If the kernel did take the socket, this shuts it down, and a dead socket can be
                // replaced.
                fresh.shut_down();
                let what = format!("the kernel does not read socket {number} of {count}");
                if attempt == CONNECTS_MAX {
                    return odd(index, format!("{what} after {attempt} attempts"));
                }
                tracing::info!("/dev/nbd{index}: {what}; trying another socket");
                attempt += 1;
            };
            sockets.append(fresh);
        }
        Ok(Some(Self { index, places: places.clone(), sockets, claim }))
    }

    /// Passes the sockets to the shards that will serve them.
    pub(super) fn serve(
        mut self,
        export: &ExportInfo,
        adopt: impl FnOnce(Vec<OwnedFd>) -> io::Result<()>,
    ) -> Result<Self, DeviceError> {
        let index = self.index;
        check_shape(&self.places, index, export)?;
        let ours = self.sockets.take_ours();
        // On failure, the sockets are closed here, and the device waits for the next takeover.
        adopt(ours)?;
        if self.places.size(index) != Some(export.size)
            && let Err(error) = resize(&self.places, index, export.size)
        {
            tracing::error!("/dev/nbd{index} keeps its size: {error}");
        }
        tracing::info!("/dev/nbd{index} taken over from a dead process");
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sysfs::tests::Tree;
    use super::*;

    fn options(choice: DeviceChoice) -> DeviceOptions {
        DeviceOptions {
            choice,
            timeout_s: Some(90),
            dead_timeout_s: 60,
            backend: "rtrs:s/v".into(),
            takeover: true,
        }
    }

    fn tree(name: &str) -> Tree {
        let tree = Tree::new(name);
        tree.file("proc/self/comm", "rtrs-client\n");
        tree.file("proc/5/comm", "rtrs-client\n");
        for (index, pid, backend) in
            [(0, "5", "rtrs:s/v"), (1, "9", "rtrs:s/w"), (2, "9", "rtrs:s/v"), (3, "9", "rtrs:s/v")]
        {
            tree.file(&format!("sys/block/nbd{index}/pid"), &format!("{pid}\n"));
            tree.file(&format!("sys/block/nbd{index}/backend"), &format!("{backend}\n"));
        }
        tree.file("sys/block/nbd2/size", "2048\n");
        tree.file("sys/block/nbd2/mq/0/cpu_list", "0\n");
        tree.file("sys/block/nbd2/mq/1/cpu_list", "1\n");
        tree
    }

    #[test]
    fn the_device_of_a_session_is_found() {
        let tree = tree("nbd-takeover-find");
        let found = |choice| left_behind(&tree.places, &options(choice)).map(|(index, _)| index);
        assert_eq!(found(DeviceChoice::Auto), Some(2));
        assert_eq!(found(DeviceChoice::Index(3)), Some(3));
        assert_eq!(found(DeviceChoice::Index(0)), None, "its process lives");
        assert_eq!(found(DeviceChoice::Index(1)), None, "another export's");
        assert_eq!(found(DeviceChoice::Index(7)), None);
        let claim = Claim::new(&tree.places, 2);
        assert_eq!(found(DeviceChoice::Index(2)), None, "another took it over and lives");
        assert_eq!(found(DeviceChoice::Auto), Some(3));
        drop(claim);
        // A child that another test has forked and that has not yet called exec shares the lock.
        let end = Instant::now() + Duration::from_secs(60);
        while found(DeviceChoice::Auto) != Some(2) {
            assert!(Instant::now() < end, "the claim was not released");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_mismatch_is_refused_with_a_remedy() {
        let tree = tree("nbd-takeover-check");
        let check = |count, timeout_s| {
            let options = DeviceOptions { timeout_s, ..options(DeviceChoice::Index(2)) };
            check_sockets(&tree.places, 2, &options, count).map_err(|e| e.to_string())
        };
        assert_eq!(check(2, Some(90)), Ok(()));
        let error = check(4, Some(90)).unwrap_err();
        assert!(error.contains("it has 2 sockets; use --shards 2"), "{error}");
        let error = check(2, None).unwrap_err();
        assert!(error.contains("it was not set up for quick takeover; omit"), "{error}");
        tree.file(
            "sys/block/nbd2/queue/io_timeout",
            "500
",
        );
        let error = check(2, Some(90)).unwrap_err();
        assert!(
            error.contains("it was set up for quick takeover; use --quick-takeover"),
            "{error}"
        );
        assert_eq!(check(2, None), Ok(()));

        let size = |size| {
            check_shape(&tree.places, 2, &ExportInfo::plain("v", size)).map_err(|e| e.to_string())
        };
        assert_eq!(size(1 << 20), Ok(()));
        assert_eq!(size(2 << 20), Ok(()), "it has grown");
        let error = size(1 << 19).unwrap_err();
        assert!(
            error.contains("its size is 1048576 bytes, but the export has 524288 bytes; free it"),
            "{error}"
        );
    }

    #[test]
    fn a_device_whose_shape_changed_is_refused() {
        let tree = tree("nbd-takeover-shape");
        let check = |change: fn(&mut ExportInfo)| {
            let mut export = ExportInfo { min_block: 512, ..ExportInfo::plain("v", 1 << 20) };
            change(&mut export);
            check_shape(&tree.places, 2, &export).map_err(|e| e.to_string())
        };
        let refused = |change, text: &str| {
            let error = check(change).unwrap_err();
            assert!(error.contains(text) && error.contains(HINT), "{error}");
        };
        let show = |block: u32, ro: u8, cache: &str, fua: u8| {
            for (file, text) in [
                ("ro", ro.to_string()),
                ("queue/logical_block_size", block.to_string()),
                ("queue/write_cache", cache.to_owned()),
                ("queue/fua", fua.to_string()),
            ] {
                tree.file(&format!("sys/block/nbd2/{file}"), &format!("{text}\n"));
            }
        };
        let all: fn(&mut ExportInfo) = |export| {
            (export.min_block, export.read_only, export.write_cache, export.fua) =
                (4096, true, true, false);
        };
        assert_eq!(check(all), Ok(()), "a kernel that does not show it");
        show(512, 0, "write through", 1);
        refused(|e| e.min_block = 4096, "its block size is 512, but that of the export is 4096");
        refused(|e| e.read_only = true, "it accepts writes, but the export is read-only");
        refused(|e| e.write_cache = true, "the device has no write cache and is never flushed");
        refused(|e| (e.write_cache, e.fua) = (false, false), "it supports FUA, but the export");
        assert_eq!(check(|e| e.write_cache = false), Ok(()));
        show(4096, 1, "write back", 0);
        assert_eq!(check(all), Ok(()));
        assert_eq!(check(|e| e.min_block = 1), Ok(()), "it can do more than it has to");
    }

    #[test]
    fn the_shape_is_rechecked_before_serving() {
        for (name, sectors, cache, serves) in [
            ("same", "2048", "write back", true),
            ("longer", "4096", "write back", false),
            ("uncached", "2048", "write through", false),
        ] {
            let tree = tree(&format!("nbd-takeover-serve-{name}"));
            // The kernel's current values; the device was reached earlier.
            tree.file("sys/block/nbd2/size", &format!("{sectors}\n"));
            tree.file("sys/block/nbd2/queue/write_cache", &format!("{cache}\n"));
            let (places, claim) = (tree.places.clone(), Claim::new(&tree.places, 2).unwrap());
            let reached = Reached { index: 2, places, sockets: Sockets::default(), claim };
            let mut export = ExportInfo { min_block: 512, ..ExportInfo::plain("v", 1 << 20) };
            export.write_cache = true;
            let mut adopted = false;
            let served = reached.serve(&export, |_| {
                adopted = true;
                Ok(())
            });
            assert_eq!((served.is_ok(), adopted), (serves, serves), "{name}");
        }
    }

    #[test]
    fn only_a_quick_takeover_connects_early() {
        let tree = tree("nbd-takeover-reach");
        let mut options = options(DeviceChoice::Index(2));
        assert!(reach_in(&tree.places, &options).unwrap().is_none());
        (options.timeout_s, options.takeover) = (None, false);
        assert!(reach_in(&tree.places, &options).unwrap().is_none());
        options.takeover = true;
        let error = reach_in(&tree.places, &options).unwrap_err().to_string();
        assert!(
            error.contains("/dev/nbd2 was connected, but it was not set up for quick takeover"),
            "{error}"
        );
        options.choice = DeviceChoice::Index(0);
        assert!(reach_in(&tree.places, &options).unwrap().is_none(), "its process lives");
    }
}
