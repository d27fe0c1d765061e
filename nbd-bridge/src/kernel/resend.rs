//! Interval at which the kernel checks unanswered requests: `/sys/block/nbdX/queue/io_timeout`.
//!
//! The driver accepts a request timeout in seconds (`NBD_ATTR_TIMEOUT`). If the timeout is 0 and
//! the device has one socket, an overdue request keeps waiting as long as that is the socket
//! through which it was sent, and is resent if the socket was replaced (`nbd_xmit_timeout`, by the
//! socket's cookie). The timeout is then merely the interval between the driver's checks, 30 s by
//! default; the block layer accepts it in milliseconds, and is up to about a second late
//! (`blk_add_timer`). Such a device is *quick*: requests that a dead process had taken are resent
//! soon after a takeover, but never while the first copy may still be alive.
//!
//! A write to that file may wait for the device's requests (Linux 6.14 and newer freeze the queue),
//! so it is done by a separate thread, which may be left behind.
//!
//! Called by `device` and `takeover`.

use std::fs;
use std::sync::mpsc;
use std::time::Duration;

use super::sysfs::Places;

/// Interval between the checks of a quick device. Under load, the first check of requests that a
/// dead process had taken happens after this time, and the next after the same time plus the block
/// layer's second. So a takeover that gives the kernel its socket before the first check causes a
/// 0.24 s pause, and a takeover within 1.5 s causes a 1.5 s pause. A shorter interval would log
/// more requests that are merely slow. The value is a whole number of 1, 4 and 10 ms ticks, so it
/// reads back unchanged.
pub(super) const QUICK_MS: u64 = 240;
/// Value that the driver sets for a device without a timeout (`nbd_set_cmd_timeout`).
const USUAL_MS: u64 = 30_000;
/// Maximum wait for the write.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether a device was made quick. The interval of any other device is a whole number of seconds.
pub(super) fn is_quick(places: &Places, index: u32) -> bool {
    places.io_timeout_ms(index).is_some_and(|ms| ms < 1000)
}

/// Makes a device quick. It must have been connected with one socket and without a timeout. On
/// failure the device still works, but a takeover takes longer.
pub(super) fn make_quick(places: &Places, index: u32) {
    if let Err(why) = write(places, index, QUICK_MS) {
        tracing::warn!(
            "/dev/nbd{index}: a takeover will pause IO for about 30 s instead of 2 s: {} {why}",
            places.io_timeout(index).display()
        );
    }
}

/// Restores the usual interval for the next process that connects the device.
pub(super) fn make_usual(places: &Places, index: u32) {
    if is_quick(places, index)
        && let Err(why) = write(places, index, USUAL_MS)
    {
        tracing::warn!(
            "{} {why}; set it to {USUAL_MS} before another program uses the device",
            places.io_timeout(index).display()
        );
    }
}

fn write(places: &Places, index: u32, ms: u64) -> Result<(), String> {
    let path = places.io_timeout(index);
    let (done, result) = mpsc::channel();
    let body = move || {
        // The caller may have stopped waiting.
        let _ = done.send(fs::write(path, ms.to_string()));
    };
    let thread = std::thread::Builder::new().name("nbd-io-timeout".into()).spawn(body);
    thread.map_err(|error| format!("cannot be written: {error}"))?;
    match result.recv_timeout(PATIENCE) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("cannot be written: {error}")),
        Err(_) => Err(format!("could not be written within {} s", PATIENCE.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sysfs::tests::Tree;
    use super::*;

    #[test]
    fn a_device_switches_to_quick_takeover_and_back() {
        let tree = Tree::new("nbd-quick");
        let places = &tree.places;
        tree.file("sys/block/nbd0/queue/io_timeout", "30000\n");
        assert!(!is_quick(places, 0));
        make_quick(places, 0);
        assert_eq!((places.io_timeout_ms(0), is_quick(places, 0)), (Some(QUICK_MS), true));
        make_usual(places, 0);
        assert_eq!((places.io_timeout_ms(0), is_quick(places, 0)), (Some(30_000), false));
        // A value set by another program is left unchanged.
        tree.file("sys/block/nbd0/queue/io_timeout", "90000\n");
        make_usual(places, 0);
        assert_eq!(places.io_timeout_ms(0), Some(90_000));
        // A missing file is logged but has no other effect.
        make_quick(places, 1);
        assert!(!is_quick(places, 1));
    }
}
