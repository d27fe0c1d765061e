//! Driver calls that end a connection, made outside the shards.
//!
//! The queue pair enters the error state and a DREQ is sent to the peer; then the queue pair is
//! destroyed, which may be slow ([`super::reaper`]). The calls before the destruction run on
//! separate threads, so that no DREQ waits behind queue pairs that are slow to destroy.

use std::io;
use std::sync::Arc;

use super::info::port_is_down;
use super::reaper::Reaper;
use super::sys::{CmId, Ending};

/// Calls that end a connection.
pub(super) trait Teardown: Send + 'static {
    /// Returns true if the device has put the queue pair into the error state.
    fn is_in_error(&self) -> bool;
    /// Puts the queue pair into the error state.
    fn enter_error(&self);
    /// Returns true if the connection's port is down.
    fn port_is_down(&self) -> bool;
    /// Sends a DREQ. Returns false if none was sent.
    fn disconnect(&self) -> bool;
    /// Destroys the queue pair, however long that takes.
    fn destroy(&mut self) -> io::Result<()>;
}

/// State of the connection when its teardown starts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// The connection was established at this end.
    pub(super) up: bool,
    /// The peer may regard the connection as established, so it needs a DREQ.
    pub(super) peer_connected: bool,
}

/// Outcome of a teardown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Torn {
    /// The queue pair could not be destroyed: it may still use its memory.
    pub(super) failed: bool,
    /// The connection was up, and the device had put its queue pair into the error state.
    pub(super) was_in_error: bool,
    /// The port was down before or after the calls.
    pub(super) port_down: bool,
    /// A DREQ was sent to the peer.
    pub(super) dreq_sent: bool,
}

/// Tears a connection down: makes the short calls on a thread of `calls`, then destroys the queue
/// pair on a thread of `reaper`, which reports the outcome. Returns immediately.
pub(super) fn start(
    calls: &Reaper,
    reaper: &Arc<Reaper>,
    mut it: impl Teardown,
    progress: Progress,
    report: impl FnOnce(Torn) + Send + 'static,
) {
    let reaper = Arc::clone(reaper);
    calls.take(move || {
        let was_in_error = progress.up && it.is_in_error();
        it.enter_error();
        let port_down = it.port_is_down();
        let dreq_sent = progress.peer_connected && !port_down && it.disconnect();
        reaper.take(move || {
            let failed = it.destroy().is_err();
            // A port that has just come up may not be able to send yet.
            let port_down = port_down || it.port_is_down();
            // When the report arrives, the domain no longer contains any object of the connection.
            drop(it);
            report(Torn { failed, was_in_error, port_down, dreq_sent });
        });
    });
}

/// Queue pair and identifier of a connection.
pub(super) struct Link {
    pub(super) ending: Ending,
    pub(super) id: Arc<CmId>,
    /// Port number.
    pub(super) port: u8,
}

impl Teardown for Link {
    fn is_in_error(&self) -> bool {
        self.ending.is_in_error()
    }

    fn enter_error(&self) {
        // An error means that the device was removed, and the queue pair with it.
        let _ = self.ending.enter_error();
    }

    fn port_is_down(&self) -> bool {
        port_is_down(self.ending.device(), self.port)
    }

    fn disconnect(&self) -> bool {
        self.id.disconnect().is_ok()
    }

    fn destroy(&mut self) -> io::Result<()> {
        self.ending.destroy()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver, Sender};
    use std::thread::{self, ThreadId};

    use super::*;
    use crate::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(60);
    const UP: Progress = Progress { up: true, peer_connected: true };

    /// Test connection that reports its calls and the threads that make them.
    struct StandIn {
        calls: Sender<(&'static str, ThreadId)>,
        down: bool,
        /// The destruction waits for this channel.
        gate: Option<Receiver<()>>,
    }

    impl StandIn {
        fn new() -> (Self, Receiver<(&'static str, ThreadId)>) {
            let (calls, made) = mpsc::channel();
            (Self { calls, down: false, gate: None }, made)
        }

        fn call(&self, name: &'static str) {
            let _ = self.calls.send((name, thread::current().id()));
        }
    }

    impl Teardown for StandIn {
        fn is_in_error(&self) -> bool {
            self.call("query");
            true
        }

        fn enter_error(&self) {
            self.call("error");
        }

        fn port_is_down(&self) -> bool {
            self.call("port");
            self.down
        }

        fn disconnect(&self) -> bool {
            self.call("dreq");
            true
        }

        fn destroy(&mut self) -> io::Result<()> {
            self.call("destroy");
            if let Some(gate) = &self.gate {
                let _ = gate.recv();
            }
            Err(io::ErrorKind::Other.into())
        }
    }

    fn pools() -> (Reaper, Arc<Reaper>) {
        (Reaper::start("calls").unwrap(), Arc::new(Reaper::start("reaper").unwrap()))
    }

    /// Returns the calls of one teardown in order, and the reported outcome.
    fn run(down: bool, progress: Progress) -> (Vec<&'static str>, Torn) {
        let (calls, reaper) = pools();
        let (mut it, made) = StandIn::new();
        it.down = down;
        let (sender, torn) = mpsc::channel();
        start(&calls, &reaper, it, progress, move |torn| sender.send(torn).unwrap());
        let torn = torn.recv_timeout(PATIENCE).unwrap();
        let here = thread::current().id();
        let names = made.iter().map(|(name, thread)| {
            assert_ne!(thread, here, "{name} ran on the calling thread");
            name
        });
        (names.collect(), torn)
    }

    #[test]
    fn calls_run_in_order_on_another_thread() {
        let (names, torn) = run(false, UP);
        assert_eq!(names, ["query", "error", "port", "dreq", "destroy", "port"]);
        let expected = Torn { failed: true, was_in_error: true, port_down: false, dreq_sent: true };
        assert_eq!(torn, expected);
    }

    #[test]
    fn no_dreq_is_sent_over_a_down_port_or_to_an_unaware_peer() {
        let (names, torn) = run(true, UP);
        assert_eq!(names, ["query", "error", "port", "destroy"]);
        assert!(torn.port_down && !torn.dreq_sent);
        let (names, torn) = run(false, Progress { up: false, peer_connected: false });
        assert_eq!(names, ["error", "port", "destroy", "port"]);
        assert!(!torn.was_in_error && !torn.dreq_sent);
    }

    #[test]
    fn slow_queue_pair_destruction_does_not_delay_dreqs() {
        let (calls, reaper) = pools();
        let mut gates = Vec::new();
        for _ in 0..100 {
            let (mut it, made) = StandIn::new();
            let (open, gate) = mpsc::channel();
            it.gate = Some(gate);
            start(&calls, &reaper, it, UP, |_| {});
            for name in ["query", "error", "port", "dreq"] {
                assert_eq!(made.recv_timeout(PATIENCE).map(|(name, _)| name), Ok(name));
            }
            gates.push((open, made));
        }
    }
}
