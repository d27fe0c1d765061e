//! How often the kernel looks at requests that have no answer: `/sys/block/nbdX/queue/io_timeout`.
//!
//! The driver takes a bound for requests in seconds (`NBD_ATTR_TIMEOUT`). If that is 0 and the
//! device has one socket, a request that is over its time stays where it is as long as the socket
//! is the one it was sent through, and is sent again when the socket was replaced
//! (`nbd_xmit_timeout`, by the socket's cookie). Then the time only says how often the driver
//! looks, 30 s by default; the block layer lets it be set in milliseconds, and is up to
//! about a second late (`blk_add_timer`). Such a device is *quick*: what a dead process had taken
//! is sent again soon after another took over, and yet nothing is sent twice while the first copy
//! may live.
//!
//! A write to that file may wait for the device's requests (Linux 6.14 and newer freeze the queue),
//! so it is done in a thread that may be left behind.
//!
//! Called by `device` and `takeover`.

use std::fs;
use std::sync::mpsc;
use std::time::Duration;

use super::sysfs::Places;

/// Between two looks at a request of a quick device. Under load the first look at what a dead
/// process had taken comes after this time, the next after as much and the block layer's second.
/// So a takeover that has its socket in the kernel before the first look is a pause of 0.24 s, any
/// that has it within 1.5 s one of 1.5 s. With less, more requests would be logged that are only
/// slow. It is whole ticks of 1, 4 and 10 ms: what is read back is what was set.
pub(super) const QUICK_MS: u64 = 240;
/// What the driver sets for a device without a bound (`nbd_set_cmd_timeout`).
const USUAL_MS: u64 = 30_000;
/// For the write.
const PATIENCE: Duration = Duration::from_secs(5);

/// True for a device that was made quick: without that the time is one of whole seconds.
pub(super) fn is_quick(places: &Places, index: u32) -> bool {
    places.io_timeout_ms(index).is_some_and(|ms| ms < 1000)
}

/// Makes a device quick that was connected with one socket and without a bound. If that fails it
/// works all the same, and a takeover takes longer.
pub(super) fn make_quick(places: &Places, index: u32) {
    if let Err(why) = write(places, index, QUICK_MS) {
        tracing::warn!(
            "/dev/nbd{index} has no quick takeover, a pause of about 30 s instead: {} {why}",
            places.io_timeout(index).display()
        );
    }
}

/// Sets the usual time for whoever connects the device next.
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
        // Nobody may wait for it any more.
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
    fn a_device_is_made_quick_and_usual_again() {
        let tree = Tree::new("nbd-quick");
        let places = &tree.places;
        tree.file("sys/block/nbd0/queue/io_timeout", "30000\n");
        assert!(!is_quick(places, 0));
        make_quick(places, 0);
        assert_eq!((places.io_timeout_ms(0), is_quick(places, 0)), (Some(QUICK_MS), true));
        make_usual(places, 0);
        assert_eq!((places.io_timeout_ms(0), is_quick(places, 0)), (Some(30_000), false));
        // A time that somebody else set stays.
        tree.file("sys/block/nbd0/queue/io_timeout", "90000\n");
        make_usual(places, 0);
        assert_eq!(places.io_timeout_ms(0), Some(90_000));
        // Not there: logged, and nothing else.
        make_quick(places, 1);
        assert!(!is_quick(places, 1));
    }
}
