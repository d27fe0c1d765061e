//! Event log of a run: one line per event to read, and a fingerprint to compare two runs.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use rtrs_core::time::Instant;

/// Receiver of the lines.
pub type Sink = Box<dyn FnMut(&str)>;

struct Inner {
    fingerprint: u64,
    events: u64,
    sink: Option<Sink>,
}

/// Log of one run. Clones share the same log.
#[derive(Clone)]
pub(super) struct Log(Rc<RefCell<Inner>>);

impl Log {
    pub(super) fn new(sink: Option<Sink>) -> Self {
        Self(Rc::new(RefCell::new(Inner { fingerprint: 0xcbf2_9ce4_8422_2325, events: 0, sink })))
    }

    /// Records an event by its kind and two numbers; the text is made only for a sink.
    pub(super) fn event(
        &self,
        now: Instant,
        kind: &'static str,
        numbers: [u64; 2],
        text: impl FnOnce() -> String,
    ) {
        let mut inner = self.0.borrow_mut();
        inner.events += 1;
        let name = kind.bytes().fold(0, |sum: u64, b| sum.wrapping_mul(31) + u64::from(b));
        for number in [now.as_nanos(), name, numbers[0], numbers[1]] {
            inner.fingerprint = (inner.fingerprint ^ number).wrapping_mul(0x0100_0000_01b3);
            inner.fingerprint ^= inner.fingerprint >> 29;
        }
        if let Some(sink) = inner.sink.as_mut() {
            sink(&format!("{now} {kind:<10} {}", text()));
        }
    }

    /// Returns a number that two runs share only if they had the same events at the same times.
    pub(super) fn fingerprint(&self) -> u64 {
        self.0.borrow().fingerprint
    }

    /// Returns the number of events so far.
    pub(super) fn events(&self) -> u64 {
        self.0.borrow().events
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").field("events", &self.events()).finish_non_exhaustive()
    }
}
