//! Signals of a daemon: requests, and signals that must not end it.
//!
//! The default action of most signals is to end the process. Beneath a database, that is an outage,
//! so a daemon handles every signal that a person or a service manager may send by mistake: signals
//! without a meaning are only logged. SIGQUIT and SIGABRT, which request a core dump, and signals
//! for program errors keep their defaults.

use std::io;

use signal_hook::consts::{
    SIGALRM, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXFSZ,
};
use signal_hook::iterator;

/// Request made by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM or SIGINT: end gracefully.
    Stop,
    /// SIGHUP: reload files that may have changed, and reopen the log.
    Reload,
    /// SIGUSR1: log the state.
    Dump,
}

/// Signals without a meaning. With SIGXFSZ (file size limit) ignored, writes fail with EFBIG.
const IGNORED: [i32; 8] =
    [SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGXFSZ, libc::SIGPWR, libc::SIGSTKFLT];

/// Handled signals of this process.
#[derive(Debug)]
pub struct Signals(iterator::Signals);

/// Forwards signals until it is dropped.
#[derive(Debug)]
pub struct Forwarding(iterator::Handle);

impl Signals {
    /// Installs the handlers; signals are queued until [`forward`](Self::forward).
    ///
    /// # Errors
    /// The system's error.
    pub fn take() -> io::Result<Self> {
        let known = [SIGTERM, SIGINT, SIGHUP, SIGUSR1];
        let real_time = libc::SIGRTMIN()..=libc::SIGRTMAX();
        iterator::Signals::new(known.into_iter().chain(IGNORED).chain(real_time)).map(Self)
    }

    /// Starts a thread that calls `take` for each signal that represents a request.
    ///
    /// # Errors
    /// Returns the system's error if the thread cannot be started.
    pub fn forward(
        mut self,
        mut take: impl FnMut(Signal) + Send + 'static,
    ) -> io::Result<Forwarding> {
        let handle = self.0.handle();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for number in self.0.forever() {
                match meaning(number) {
                    Some(signal) => take(signal),
                    None => tracing::warn!("ignoring signal {number}"),
                }
            }
        })?;
        Ok(Forwarding(handle))
    }
}

fn meaning(number: i32) -> Option<Signal> {
    match number {
        SIGTERM | SIGINT => Some(Signal::Stop),
        SIGHUP => Some(Signal::Reload),
        SIGUSR1 => Some(Signal::Dump),
        _ => None,
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        self.0.close();
    }
}
