//! Passes log messages to one of the program's functions.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int};
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::entry::Failure;

/// `rtrs_log_function`. The first argument is a pointer of the program, which is only passed on.
pub(crate) type LogFunction = extern "C" fn(usize, c_int, *const c_char);

/// Receiver of messages.
#[derive(Clone, Copy)]
struct Receiver {
    function: LogFunction,
    user_data: usize,
}

static RECEIVER: RwLock<Option<Receiver>> = RwLock::new(None);
/// Highest level passed to the receiver; 0 if there is none.
static LEVEL: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// Whether this thread is running the receiver.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

fn is_inside() -> bool {
    IS_INSIDE.try_with(Cell::get).unwrap_or(true)
}

fn number(level: Level) -> c_int {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

/// Sets the receiver of messages. Waits until the previous one is no longer running.
pub(crate) fn set(
    function: Option<LogFunction>,
    user_data: usize,
    level: c_int,
) -> Result<(), Failure> {
    if !(1..=5).contains(&level) && function.is_some() {
        let text = format!("log level {level} is out of range; use 1 (error) to 5 (trace)");
        return Err(Failure::invalid(text));
    }
    if is_inside() {
        return Err(Failure::new(libc::EBUSY, "a log function cannot change the log function"));
    }
    // Whether this library's subscriber is the process's subscriber.
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    if function.is_some()
        && !INSTALLED.get_or_init(|| tracing::subscriber::set_global_default(Bridge).is_ok())
    {
        return Err(Failure::new(
            libc::EBUSY,
            "the process already has a receiver for log messages",
        ));
    }
    let mut receiver = RECEIVER.write().unwrap_or_else(PoisonError::into_inner);
    *receiver = function.map(|function| Receiver { function, user_data });
    LEVEL.store(if function.is_some() { level } else { 0 }, Ordering::Relaxed);
    Ok(())
}

/// Subscriber that calls the receiver.
struct Bridge;

/// Text of an event: its message, then its fields.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

impl Subscriber for Bridge {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        number(*metadata.level()) <= LEVEL.load(Ordering::Relaxed) && !is_inside()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let text = (line.message + &line.fields).replace('\0', " ");
        let Ok(text) = CString::new(text) else { return };
        let receiver = RECEIVER.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(Receiver { function, user_data }) = *receiver {
            IS_INSIDE.set(true);
            function(user_data, number(*event.metadata().level()), text.as_ptr());
            IS_INSIDE.set(false);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    static LEVELS: Mutex<Vec<(usize, c_int)>> = Mutex::new(Vec::new());

    extern "C" fn keep(user_data: usize, level: c_int, message: *const c_char) {
        tracing::error!("not received, because the receiver runs");
        assert!(!message.is_null());
        LEVELS.lock().unwrap().push((user_data, level));
        assert_eq!(set(None, 0, 0).unwrap_err().errno, libc::EBUSY);
    }

    #[test]
    fn messages_reach_the_receiver_up_to_its_level() {
        assert_eq!(set(Some(keep), 7, 6).unwrap_err().errno, libc::EINVAL);
        set(Some(keep), 7, 3).unwrap();
        tracing::info!(path = "tcp://a", "path \0 connected");
        tracing::debug!("below the level");
        set(Some(keep), 8, 5).unwrap();
        tracing::trace!("above no level");
        set(None, 0, 0).unwrap();
        tracing::error!("without a receiver");
        assert_eq!(*LEVELS.lock().unwrap(), [(7, 3), (8, 5)]);
    }
}
