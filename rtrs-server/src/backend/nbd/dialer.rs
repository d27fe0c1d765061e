//! The thread that establishes an export's connections. Resolving names, connecting and the
//! handshake block, so shards cannot do them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak, mpsc};
use std::thread;

use nbd_bridge::client::Offered;
use nbd_bridge::{dial, wire::transmission_flags as tf};
use rtrs_core::time::Duration;

use super::shared::{Shared, Wanted};

/// First and maximum pause between attempts; each pause is twice the previous one.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Starts the thread, which exits soon after the export is dropped.
pub(super) fn start(shared: &Arc<Shared>, wanted: mpsc::Receiver<Wanted>) -> io::Result<()> {
    let shared = Arc::downgrade(shared);
    thread::Builder::new().name("nbd-dialer".into()).spawn(move || run(&shared, wanted))?;
    Ok(())
}

fn run(shared: &Weak<Shared>, wanted: mpsc::Receiver<Wanted>) {
    for request in wanted {
        let (mut pause, mut logged) = (PAUSES.0, false);
        while request.asker.strong_count() > 0 {
            let Some(shared) = shared.upgrade() else { return };
            match attempt(&shared) {
                Ok(made) => {
                    tracing::info!("{}: reconnected", shared.text);
                    *shared.outage.lock() = None;
                    if request.made.send(made).is_ok() {
                        request.wake.wake();
                    }
                    break;
                }
                Err(why) => {
                    match std::mem::replace(&mut logged, true) {
                        false => {
                            tracing::warn!("{}: cannot reconnect: {why}; IO waits", shared.text)
                        }
                        true => tracing::debug!("{}: cannot reconnect: {why}", shared.text),
                    }
                    *shared.outage.lock() = Some(why);
                }
            }
            drop(shared);
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
        }
        if request.asker.strong_count() == 0
            && let Some(shared) = shared.upgrade()
        {
            *shared.outage.lock() = None;
        }
    }
}

/// Connects, and refuses a server whose export no longer matches.
fn attempt(shared: &Shared) -> Result<(OwnedFd, Offered), String> {
    let how = &shared.how;
    let made = dial(&how.address, &how.name, how.open_max).map_err(|error| error.to_string())?;
    let (size, flags) = (made.1.size, made.1.flags);
    let had = shared.size.get();
    if size < had {
        return Err(format!("the export shrank from {had} to {size} bytes"));
    }
    let lacks = |had: bool, flag| had && flags & flag == 0;
    let geometry = &shared.geometry;
    // An export that started without a write cache is never flushed.
    let gains_cache = !geometry.read_only && !geometry.write_cache && flags & tf::SEND_FLUSH != 0;
    let needed = [
        (gains_cache, "the export now has a write cache"),
        (lacks(shared.multi, tf::CAN_MULTI_CONN), "the export now allows only one connection"),
        (lacks(geometry.discard, tf::SEND_TRIM), "the export no longer supports trim"),
        (
            lacks(geometry.write_zeroes, tf::SEND_WRITE_ZEROES),
            "the export no longer supports write zeroes",
        ),
        (made.1.max_payload < geometry.io_max, "the maximum request size is now smaller"),
        (!geometry.read_only && flags & tf::READ_ONLY != 0, "the export is now read-only"),
        (lacks(geometry.write_cache, tf::SEND_FLUSH), "the export no longer supports flush"),
        (lacks(geometry.fua, tf::SEND_FUA), "the export no longer supports FUA"),
        (made.1.min_block > geometry.logical_block, "the block size is now larger"),
    ];
    match needed.iter().find(|(missing, _)| *missing) {
        Some((_, why)) => Err((*why).to_owned()),
        None => Ok(made),
    }
}
