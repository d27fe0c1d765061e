//! Log lines of a test's thread.

use std::fmt::{self, Write};
use std::sync::{Arc, Once};

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

/// Log lines of a thread, each with its fields.
#[derive(Clone, Debug, Default)]
pub(super) struct LogLines(Arc<Mutex<Vec<String>>>);

impl LogLines {
    /// Runs `test` and keeps what it logs.
    pub(super) fn during<T>(&self, test: impl FnOnce() -> T) -> T {
        static QUIET: Once = Once::new();
        QUIET.call_once(|| {
            tracing::subscriber::set_global_default(Quiet).expect("the only global subscriber");
        });
        tracing::subscriber::with_default(self.clone(), || {
            // Events that other threads reached before `Quiet` may be disabled.
            tracing::callsite::rebuild_interest_cache();
            test()
        })
    }

    /// Takes the lines that contain these words.
    pub(super) fn take(&self, words: &str) -> Vec<String> {
        self.0.lock().extract_if(.., |line| line.contains(words)).collect()
    }
}

/// Subscriber of the other threads, which keeps nothing. Without it, an event that such a thread is
/// the first to reach can stay disabled for all threads.
struct Quiet;

impl Subscriber for Quiet {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        false
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let written = match field.name() {
            "message" => write!(self.0, "{value:?} "),
            name => write!(self.0, "{name}={value:?} "),
        };
        written.expect("text");
    }
}

impl Subscriber for LogLines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
