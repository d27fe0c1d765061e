//! Taking over a device whose process died: fresh sockets in the place of the dead ones.
//!
//! The device stays connected: file systems stay mounted, and requests wait in the kernel, as long
//! as `dead_timeout_s` says. What the dead process had taken from its sockets and not answered, the
//! kernel sends again when its `timeout_s` is over, as it was when the request was first sent
//! (`nbd_xmit_timeout`): a new socket does not make it look earlier. All other requests go at once.
//!
//! The caller must have made sure that nothing the dead process had sent on can happen any more.
//!
//! Source: `nbd_genl_reconfigure` and `nbd_reconnect_socket` in `drivers/block/nbd.c`. Called by
//! `device`.

use std::io;
use std::os::fd::OwnedFd;

use super::DeviceChoice;
use super::claim::{Claim, claim_left_behind};
use super::device::{
    CONNECTS_MAX, DeviceError, DeviceOptions, KernelDevice, READ_PATIENCE, await_that, open_netlink,
};
use super::netlink::{Attr, sockets_attr};
use super::sockets::Sockets;
use super::sysfs::Places;
use crate::proto::ExportInfo;

/// The device to take over, if there is one.
pub(super) fn left_behind(places: &Places, options: &DeviceOptions) -> Option<(u32, Claim)> {
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

/// Judges whether `export` over `count` sockets can stand in for what the device was.
fn check(
    places: &Places,
    index: u32,
    export: &ExportInfo,
    count: usize,
) -> Result<(), DeviceError> {
    let odd = |what: String| Err(DeviceError::Odd { index, what });
    let remedy = "free it with detach, or attach without takeover";
    if places.size(index) != Some(export.size) {
        let had = places.size(index).map_or_else(|| "no size".into(), |n| format!("{n} bytes"));
        return odd(format!("it has {had} and the export {}; {remedy}", export.size));
    }
    let queues = places.queues(index);
    if queues != count {
        return odd(format!("it has {queues} sockets; use --shards {queues}, or {remedy}"));
    }
    Ok(())
}

/// Gives a device that was left behind fresh sockets, one after the other; see
/// [`KernelDevice::connect`].
pub(super) fn take_over(
    places: Places,
    (index, claim): (u32, Claim),
    export: &ExportInfo,
    options: &DeviceOptions,
    count: usize,
    adopt: impl FnOnce(Vec<OwnedFd>) -> io::Result<()>,
) -> Result<KernelDevice, DeviceError> {
    check(&places, index, export, count)?;
    let mut netlink = open_netlink()?;
    let mut sockets = Sockets::default();
    for number in 0..count {
        let mut attempt = 1;
        // One at a time: the readers of several could get into each other's way.
        let fresh = loop {
            let mut fresh = Sockets::new(1)?;
            let attrs = vec![
                Attr::Index(index),
                Attr::Timeout(options.timeout_s),
                Attr::DeadConnTimeout(options.dead_timeout_s),
                Attr::BackendIdentifier(options.backend.clone()),
                sockets_attr(fresh.kernel_ends()),
            ];
            let refused = |source| DeviceError::Refused {
                device: format!("/dev/nbd{index} to this process"),
                why: " (its requests may have failed already: see device-dead-timeout-s)",
                source,
            };
            netlink.reconfigure(attrs).map_err(refused)?;
            if await_that(READ_PATIENCE, || fresh.unread() == 0) {
                break fresh;
            }
            // Whoever has it sees its end, and a dead socket has room for another.
            fresh.shut_down();
            let what = format!("the kernel does not read socket {number} of {count}");
            if attempt == CONNECTS_MAX {
                return Err(DeviceError::Odd { index, what: format!("{what}, {attempt} times") });
            }
            tracing::info!("/dev/nbd{index}: {what}; it is given another");
            attempt += 1;
        };
        sockets.append(fresh);
    }
    let ours = sockets.take_ours();
    // If that fails, the sockets end here, and the device waits for the next.
    adopt(ours)?;
    tracing::info!("/dev/nbd{index} is taken over from a process that is gone");
    Ok(KernelDevice::taken_over(index, places, sockets, claim))
}

#[cfg(test)]
mod tests {
    use super::super::sysfs::tests::Tree;
    use super::*;

    fn options(choice: DeviceChoice) -> DeviceOptions {
        DeviceOptions {
            choice,
            timeout_s: 90,
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
    fn the_device_of_this_session_is_found() {
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
        assert_eq!(found(DeviceChoice::Auto), Some(2));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_remedy() {
        let tree = tree("nbd-takeover-check");
        let judge = |size, count| {
            check(&tree.places, 2, &ExportInfo::plain("v", size), count).map_err(|e| e.to_string())
        };
        assert_eq!(judge(1 << 20, 2), Ok(()));
        let error = judge(2 << 20, 2).unwrap_err();
        assert!(error.contains("it has 1048576 bytes and the export 2097152; free it"), "{error}");
        let error = judge(1 << 20, 4).unwrap_err();
        assert!(error.contains("it has 2 sockets; use --shards 2"), "{error}");
    }
}
