//! Events for the main thread of a session's process: session events, signals, and requests from
//! commands.

use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use rtrs_core::time::Duration;

use super::launch::{Running, ShardHandle};
use super::notices::Event;
use super::resolver::Resolver;
use super::saved::Saved;
use super::waiting::{Add, Detach};
use crate::engine::{DeviceIndex, Reported};
use crate::error::{Error, ErrorKind};

/// Time limit for opening a device, including the first connections.
pub(crate) const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// Event for the main thread.
#[derive(Debug)]
pub(crate) enum Wake {
    Session(Event),
    Signal,
    /// Recreate control sockets that were removed.
    Reload,
    Detach(Detach),
    /// Attach an additional volume.
    Add(Add),
    /// The kernel has released a device, with a warning if any.
    Disconnected(DeviceIndex, Option<String>),
}

/// Files in which volumes save state for a takeover.
#[derive(Clone, Debug, Default)]
pub(crate) struct SavedFiles(Arc<Mutex<Vec<(DeviceIndex, Saved)>>>);

impl SavedFiles {
    /// Adds the files of a volume.
    pub(crate) fn add(&self, device: DeviceIndex, saved: Saved) {
        self.0.lock().push((device, saved));
    }

    /// Removes the files of a volume.
    pub(crate) fn remove(&self, device: DeviceIndex) {
        self.0.lock().retain(|(of, _)| *of != device);
    }

    /// Marks all files as used.
    fn touch(&self) {
        self.0.lock().iter().for_each(|(_, saved)| saved.touch());
    }

    fn of(&self, device: DeviceIndex) -> Option<Saved> {
        let all = self.0.lock();
        all.iter().find(|(of, _)| *of == device).map(|(_, saved)| saved.clone())
    }
}

/// Interval at which the saved files are marked as used. systemd-tmpfiles removes files in /tmp
/// after 10 days.
const TOUCH_INTERVAL: Duration = Duration::from_secs(12 * 3600);

/// Forwards the session's events, saves state for a takeover in `files`, and resolves the hosts of
/// paths that have not been reached.
pub(crate) fn forward_events(
    mut running: Running,
    wakes: mpsc::Sender<Wake>,
    files: SavedFiles,
) -> Running {
    let (_, nothing) = mpsc::channel();
    let events = std::mem::replace(&mut running.events, nothing);
    let resolver = Resolver::new(running.shards());
    std::thread::spawn(move || {
        let mut touched = std::time::Instant::now();
        loop {
            let event = match events.recv_timeout(TOUCH_INTERVAL) {
                Ok(event) => Some(event),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            };
            if touched.elapsed() >= TOUCH_INTERVAL {
                files.touch();
                touched = std::time::Instant::now();
            }
            let Some(event) = event else { continue };
            match event {
                Event::Unreached(path) => resolver.resolve(&path),
                Event::SavedEpoch(device, epoch) => {
                    files.of(device).iter().for_each(|saved| saved.save_epoch(epoch));
                }
                Event::Pinned(device, export) => {
                    files.of(device).iter().for_each(|saved| saved.save_export(export));
                }
                event => {
                    if wakes.send(Wake::Session(event)).is_err() {
                        return;
                    }
                }
            }
        }
    });
    running
}

/// Waits up to `limit` for the only device to open. `what` is the purpose of the session.
pub(crate) fn wait_ready(
    inbox: &mpsc::Receiver<Wake>,
    shards: &ShardHandle,
    what: &str,
    limit: Duration,
) -> Result<(), Error> {
    let failed = match inbox.recv_timeout(limit) {
        Ok(Wake::Session(Event::Ready(..))) => return Ok(()),
        Ok(Wake::Session(Event::Failed(_, failure))) => failure.to_string(),
        Ok(Wake::Session(Event::FrontFailed(_, error))) => error.to_string(),
        Ok(Wake::Session(Event::ShardFailed(shard, error))) => format!("shard {shard}: {error}"),
        Ok(Wake::Signal) => BY_SIGNAL.to_owned(),
        Ok(_) => "the session ended before the device was open".to_owned(),
        Err(_) => not_open(limit, shards),
    };
    shards.shut_down(Duration::ZERO);
    Err(Error::new(ErrorKind::Path, format!("cannot {what}: {failed}")))
}

/// Reason given for an open that was interrupted by a signal.
pub(crate) const BY_SIGNAL: &str = "ended by a signal";

/// Returns the error for a device that no path opened in time.
pub(crate) fn not_open(limit: Duration, shards: &ShardHandle) -> String {
    let reports = shards.reports(Reported::None);
    let paths = reports.first().and_then(|report| report.engine.paths.as_deref());
    let failed = paths
        .unwrap_or_default()
        .iter()
        .filter_map(|path| path.last_end.as_ref().map(|end| format!("{}: {end}", path.path)));
    no_path(limit, &failed.collect::<Vec<_>>())
}

fn no_path(limit: Duration, reasons: &[String]) -> String {
    let why = match reasons {
        [] => "no path reported a reason".to_owned(),
        reasons => reasons.join("; "),
    };
    format!(
        "no path to the server within {} s ({why}); check each path with `rtrs-client doctor`",
        limit.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_without_a_reason_is_reported_as_such() {
        let text = |reasons: &[&str]| {
            let reasons: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            no_path(Duration::from_secs(30), &reasons)
        };
        let within = |why: &str| {
            format!(
                "no path to the server within 30 s ({why}); check each path with `rtrs-client \
                 doctor`"
            )
        };
        assert_eq!(text(&[]), within("no path reported a reason"));
        let failed = text(&["tcp://a: refused", "tcp://b: timed out"]);
        assert_eq!(failed, within("tcp://a: refused; tcp://b: timed out"));
    }
}
