//! Signals that stop a command and make it print a summary.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rtrs_base::rt::{Forwarding, Signal, Signals};

use crate::error::{Error, ErrorKind, failed};

/// Counts termination signals until dropped.
#[derive(Debug)]
pub(super) struct Stop {
    count: Arc<AtomicU32>,
    _forwarding: Forwarding,
}

impl Stop {
    /// Takes over the signals of this process.
    pub(super) fn take() -> Result<Self, Error> {
        let count: Arc<AtomicU32> = Arc::default();
        let counted = Arc::clone(&count);
        let forwarding = Signals::take().and_then(|signals| {
            signals.forward(move |signal| {
                // A terminal hangup stops the command too.
                if matches!(signal, Signal::Stop | Signal::Reload) {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        let forwarding = forwarding.map_err(failed(ErrorKind::System, "cannot handle signals"))?;
        Ok(Self { count, _forwarding: forwarding })
    }

    /// Returns the number of signals so far.
    pub(super) fn count(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.count)
    }

    /// Whether a signal has arrived.
    pub(super) fn is_asked(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }
}
