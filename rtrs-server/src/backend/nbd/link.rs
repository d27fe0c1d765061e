//! A queue's link to its NBD server, across reconnects.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};

use nbd_bridge::client::Offered;
use rtrs_core::block::WakeHandle;
use rtrs_core::rt::Fd;
use rtrs_core::time::Instant;

use super::shared::{GONE_MAX, Shared, Wanted};

enum State {
    /// In use for requests and replies.
    Up(Fd),
    /// Failed, but ring operations still use it.
    Ending,
    /// Waiting for a new connection, since the given time; None until the first poll.
    Down(mpsc::Receiver<(OwnedFd, Offered)>, Option<Instant>),
}

/// A change to a link.
pub(super) enum LinkEvent {
    Connected(Offered),
    /// The server has been unavailable for too long.
    Gone,
}

/// A queue's connection.
pub(super) struct Link {
    state: State,
    /// Whether replies may be structured.
    structured: bool,
    /// Whether the server has been unavailable for too long: IOs fail until it is back.
    gone: bool,
    wake: WakeHandle,
    alive: Arc<()>,
}

impl Link {
    /// Uses the first connection, or requests one from the dialer.
    pub(super) fn new(first: Option<(Fd, bool)>, shared: &Shared, wake: WakeHandle) -> Self {
        let alive = Arc::default();
        let structured = first.as_ref().is_some_and(|(_, structured)| *structured);
        let state = match first {
            Some((fd, _)) => State::Up(fd),
            None => ask(shared, &alive, &wake),
        };
        Self { state, structured, gone: false, wake, alive }
    }

    /// Connection for requests and replies.
    pub(super) fn up(&self) -> Option<&Fd> {
        match &self.state {
            State::Up(fd) => Some(fd),
            State::Ending | State::Down(..) => None,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.up().is_some()
    }

    /// Whether the connection has failed and no new connection has been requested.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.state, State::Ending)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone
    }

    pub(super) fn is_structured(&self) -> bool {
        self.structured
    }

    /// Stops using a connection that has failed.
    pub(super) fn lose(&mut self) {
        self.state = State::Ending;
    }

    /// Requests a new connection.
    pub(super) fn reconnect(&mut self, shared: &Shared) {
        self.state = ask(shared, &self.alive, &self.wake);
    }

    /// Adopts a new connection if one is ready, or reports once that the server is gone.
    pub(super) fn poll(&mut self, now: Instant) -> Option<LinkEvent> {
        let State::Down(made, since) = &mut self.state else { return None };
        let since = *since.get_or_insert(now);
        if let Ok((fd, offered)) = made.try_recv() {
            self.structured = offered.structured;
            self.state = State::Up(Fd::new(fd));
            self.gone = false;
            return Some(LinkEvent::Connected(offered));
        }
        if self.gone || now < since + GONE_MAX {
            return None;
        }
        self.gone = true;
        Some(LinkEvent::Gone)
    }

    /// Time from which the server is considered gone.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Down(_, Some(since)) if !self.gone => Some(since + GONE_MAX),
            _ => None,
        }
    }
}

/// Requests a connection from the dialer.
fn ask(shared: &Shared, alive: &Arc<()>, wake: &WakeHandle) -> State {
    let (made, wait) = mpsc::channel();
    let (asker, wake) = (Arc::downgrade(alive), wake.clone());
    // The thread runs as long as the export exists.
    let _ = shared.dialer.send(Wanted { made, asker, wake });
    State::Down(wait, None)
}
