//! The log of a process with a session.

use std::io;

use rtrs_core::rt::{Log, SettleAtEnd};

use crate::error::{Error, system};

/// Starts the log; keep what comes back until the end.
pub(crate) fn log_to_stderr(filter: &str) -> Result<SettleAtEnd, Error> {
    let filter = tracing_subscriber::EnvFilter::new(filter);
    let log = Log::start(io::stderr()).map_err(system("cannot start the log's thread"))?;
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || writer.clone())
        .log_internal_errors(false);
    if subscriber.try_init().is_err() {
        tracing::debug!("a log was set up already");
    }
    Ok(SettleAtEnd(log))
}
