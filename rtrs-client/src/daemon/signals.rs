//! Signal handling of a process with a session.

use std::path::Path;
use std::sync::{Arc, mpsc};

use rtrs_core::local::open_log;
use rtrs_core::mem::survive_truncations;
use rtrs_core::rt::{Forwarding, Signal, Signals, replace_stderr};

use super::events::Wake;
use super::launch::ShardHandle;
use super::report;
use super::roster::Roster;
use crate::engine::Reported;
use crate::error::{Error, system};
use crate::session_log::DAEMON_LOG;

/// Calls `take` for each signal until the returned value is dropped.
pub(crate) fn forward_signals(
    take: impl FnMut(Signal) + Send + 'static,
) -> Result<Forwarding, Error> {
    Signals::take().and_then(|signals| signals.forward(take)).map_err(system("cannot take signals"))
}

/// Handles the signals of an attached session: SIGBUS from memory that a virtual machine took away
/// breaks its volume, SIGTERM and SIGINT end the session, SIGHUP reopens the log and recreates
/// removed control sockets, SIGUSR1 logs the state.
pub(crate) fn serve_signals(
    wakes: mpsc::Sender<Wake>,
    shards: ShardHandle,
    roster: Arc<Roster>,
) -> Result<Forwarding, Error> {
    survive_truncations().map_err(system("cannot take SIGBUS"))?;
    forward_signals(move |signal| match signal {
        // After the last wait there is no receiver.
        Signal::Stop => drop(wakes.send(Wake::Signal)),
        Signal::Reload => {
            reopen_log();
            drop(wakes.send(Wake::Reload));
        }
        Signal::Dump => {
            let json = |text: serde_json::Result<String>| text.unwrap_or_else(|e| e.to_string());
            let (names, reports) = (roster.names(), shards.reports(Reported::All));
            for identity in roster.identities() {
                let status = report::status(&identity, &names, &reports);
                tracing::info!("state: {}", json(serde_json::to_string(&status)));
                let stats = report::stats(&identity, &reports, false);
                tracing::info!("counters: {}", json(serde_json::to_string(&stats)));
            }
        }
    })
}

/// Reopens the log of a background session after a log rotation has renamed it. In the foreground
/// the log goes to standard error, which does not belong to this process.
fn reopen_log() {
    let Some(path) = std::env::var_os(DAEMON_LOG) else {
        return tracing::info!("SIGHUP: log not reopened, because it is standard error");
    };
    let path = Path::new(&path);
    // The lock shows that the session's process is alive (`own_log` of the attach command).
    let reopened = open_log(path).and_then(|log| {
        log.try_lock().map_err(std::io::Error::from)?;
        replace_stderr(&log)
    });
    match reopened {
        Ok(()) => tracing::info!("SIGHUP: log reopened"),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            tracing::info!("SIGHUP: {} is still the log", path.display());
        }
        Err(error) => tracing::warn!("SIGHUP: cannot open {}: {error}", path.display()),
    }
}
