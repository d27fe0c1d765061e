//! Decides when to show the progress of a copy.

use std::time::{Duration, Instant};

/// Maximum wait of a copy that shows no progress.
const QUIET_WAIT: Duration = Duration::from_secs(60);

/// State of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    /// Past participle: copied, compared or verified.
    pub(crate) verb: &'static str,
    /// Bytes processed so far.
    pub(crate) done: u64,
    /// Total number of bytes, if known.
    pub(crate) total: Option<u64>,
    /// Time since the start.
    pub(crate) elapsed: Duration,
}

/// Shows positions; None ends the display.
type Show = dyn FnMut(Option<Position>);

/// Receives the progress of a copy.
pub(crate) struct Progress {
    show: Option<Box<Show>>,
    interval: Duration,
    begin: Instant,
    next: Instant,
    has_shown: bool,
}

impl Progress {
    /// Creates a receiver that shows nothing.
    pub(crate) fn silent() -> Self {
        let now = Instant::now();
        Self { show: None, interval: QUIET_WAIT, begin: now, next: now, has_shown: false }
    }

    /// Creates a receiver that passes the position to `show` once per `interval`, and None at the
    /// end if it has passed any.
    pub(crate) fn new(interval: Duration, show: impl FnMut(Option<Position>) + 'static) -> Self {
        Self { show: Some(Box::new(show)), interval, ..Self::silent() }
    }

    /// Starts measuring time.
    pub(super) fn begin(&mut self) {
        self.begin = Instant::now();
        self.next = self.begin + self.interval;
    }

    /// Time until the next update.
    pub(super) fn wait_max(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Shows the position if an update is due.
    pub(super) fn update(&mut self, position: impl FnOnce(Duration) -> Position) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + self.interval;
        if let Some(show) = &mut self.show {
            self.has_shown = true;
            show(Some(position(now - self.begin)));
        }
    }

    /// Ends the display.
    pub(super) fn end(&mut self) {
        if let Some(show) = self.show.as_mut().filter(|_| self.has_shown) {
            show(None);
        }
        self.has_shown = false;
    }
}
