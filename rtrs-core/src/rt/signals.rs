//! Signals of a daemon: which ask for something, and which must not end it.
//!
//! The default of most signals is to end the process. Under a database that is an outage, so a
//! daemon takes every signal that a person or a service manager may send by mistake: what has no
//! meaning is logged and nothing else. Left alone are SIGQUIT and SIGABRT, which ask for a core
//! dump, and those of program errors.

use std::io;

use signal_hook::consts::{
    SIGALRM, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXFSZ,
};
use signal_hook::iterator;

/// What a signal asks a daemon for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM or SIGINT: end in an orderly way.
    Stop,
    /// SIGHUP: read again what may have changed, open the log again.
    Reload,
    /// SIGUSR1: log the state.
    Dump,
}

/// Signals without a meaning here. SIGXFSZ (a file beyond the limit) is an EFBIG of the write then.
const IGNORED: [i32; 8] =
    [SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGXFSZ, libc::SIGPWR, libc::SIGSTKFLT];

/// The signals of this process, taken from now on.
#[derive(Debug)]
pub struct Signals(iterator::Signals);

/// Forwards signals until it is dropped.
#[derive(Debug)]
pub struct Forwarding(iterator::Handle);

impl Signals {
    /// Takes them; what arrives waits for [`forward`](Self::forward).
    ///
    /// # Errors
    /// The system's error.
    pub fn take() -> io::Result<Self> {
        let known = [SIGTERM, SIGINT, SIGHUP, SIGUSR1];
        let real_time = libc::SIGRTMIN()..=libc::SIGRTMAX();
        iterator::Signals::new(known.into_iter().chain(IGNORED).chain(real_time)).map(Self)
    }

    /// Starts a thread that calls `take` for each signal that asks for something.
    ///
    /// # Errors
    /// The system's error when there can be no thread.
    pub fn forward(
        mut self,
        mut take: impl FnMut(Signal) + Send + 'static,
    ) -> io::Result<Forwarding> {
        let handle = self.0.handle();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for number in self.0.forever() {
                match meaning(number) {
                    Some(signal) => take(signal),
                    None => tracing::warn!("signal {number} has no meaning here and is ignored"),
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
