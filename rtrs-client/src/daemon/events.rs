//! What a process with a session waits for: events of the session, signals, detaches.

use std::sync::mpsc;

use rtrs_core::block::Geometry;
use rtrs_core::time::Duration;

use super::control_socket::Detach;
use super::driver::Event;
use super::launch::{Running, ShardHandle};
use super::saved::Saved;
use crate::error::{Error, ErrorKind};

/// Limit for opening the device, the first connections included.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// What the process waits for.
pub(crate) enum Wake {
    Session(Event),
    Signal,
    Detach(Detach),
}

pub(crate) fn forward_detaches(wakes: mpsc::Sender<Wake>) -> mpsc::Sender<Detach> {
    let (detaches, requested) = mpsc::channel();
    std::thread::spawn(move || {
        while let Ok(detach) = requested.recv() {
            if wakes.send(Wake::Detach(detach)).is_err() {
                return;
            }
        }
    });
    detaches
}

/// Forwards the session's events. What is to be saved goes to `saved`, if that is given.
pub(crate) fn forward_events(
    mut running: Running,
    wakes: mpsc::Sender<Wake>,
    saved: Option<Saved>,
) -> Running {
    let (_, nothing) = mpsc::channel();
    let events = std::mem::replace(&mut running.events, nothing);
    std::thread::spawn(move || {
        while let Ok(event) = events.recv() {
            if let Event::SavedEpoch(epoch) = event {
                saved.iter().for_each(|saved| saved.save_epoch(epoch));
            } else if let Event::Pinned(identity) = event {
                saved.iter().for_each(|saved| saved.save_identity(identity));
            } else if wakes.send(Wake::Session(event)).is_err() {
                return;
            }
        }
    });
    running
}

/// Waits until the device is open. `what` is what the session is for, `requested` gets a detach
/// that arrived meanwhile and needs a reply.
pub(crate) fn wait_ready(
    inbox: &mpsc::Receiver<Wake>,
    shards: &ShardHandle,
    what: &str,
    patience: Duration,
    requested: &mut Option<Detach>,
) -> Result<Box<Geometry>, Error> {
    let limit = READY_TIMEOUT + patience;
    let failed = match inbox.recv_timeout(limit) {
        Ok(Wake::Session(Event::Ready(geometry))) => return Ok(geometry),
        Ok(Wake::Session(Event::Failed(failure))) => failure.to_string(),
        Ok(Wake::Session(Event::FrontFailed(error))) => error.to_string(),
        Ok(Wake::Session(Event::ShardFailed(shard, error))) => format!("shard {shard}: {error}"),
        Ok(Wake::Session(
            Event::Done { .. }
            | Event::KernelGone(_)
            | Event::Resized(_)
            | Event::SavedEpoch(_)
            | Event::Pinned(_),
        )) => "the session ended before it began".to_owned(),
        Ok(Wake::Signal) => "ended by a signal".to_owned(),
        Ok(Wake::Detach(detach)) => {
            *requested = Some(detach);
            "detached before it was open".to_owned()
        }
        Err(_) => {
            let reports = shards.reports();
            let paths = reports.first().and_then(|report| report.engine.paths.as_deref());
            let failed = paths.unwrap_or_default().iter().filter_map(|path| {
                path.last_error.as_ref().map(|error| format!("{}: {error}", path.path))
            });
            no_path(limit, &failed.collect::<Vec<_>>())
        }
    };
    shards.shut_down(Duration::ZERO);
    Err(Error::new(ErrorKind::Path, format!("cannot {what}: {failed}")))
}

/// The text for a device that no path has opened in time, for these reasons.
fn no_path(limit: Duration, reasons: &[String]) -> String {
    let why = match reasons {
        [] => "no path reported a reason".to_owned(),
        reasons => reasons.join("; "),
    };
    format!("no path to the server within {} s ({why})", limit.as_secs())
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
        let silent = "no path to the server within 30 s (no path reported a reason)";
        assert_eq!(text(&[]), silent);
        let failed = "no path to the server within 30 s (tcp://a: refused; tcp://b: timed out)";
        assert_eq!(text(&["tcp://a: refused", "tcp://b: timed out"]), failed);
    }
}
