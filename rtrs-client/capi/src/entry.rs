//! Entry point of all calls: handles failure messages, panics, and which process owns a volume.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::{Once, OnceLock};

use rtrs::ErrorKind;

/// Reason why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Positive errno.
    pub(crate) errno: c_int,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(errno: c_int, text: impl Into<String>) -> Self {
        Self { errno, text: text.into() }
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, text)
    }
}

impl From<rtrs::Error> for Failure {
    fn from(error: rtrs::Error) -> Self {
        let errno = match error.kind() {
            ErrorKind::Settings | ErrorKind::Invalid => libc::EINVAL,
            ErrorKind::Path => libc::ENOTCONN,
            ErrorKind::Forked => libc::EPERM,
            ErrorKind::Closed => libc::ESHUTDOWN,
            ErrorKind::Full => libc::EAGAIN,
            ErrorKind::Io(error) => error.errno(),
            ErrorKind::TimedOut => libc::ETIMEDOUT,
            ErrorKind::Busy => libc::EBUSY,
            _ => libc::EIO,
        };
        Self::new(errno, error.to_string())
    }
}

/// State of a volume that is checked by each call on it.
#[derive(Debug)]
pub(crate) struct Health {
    /// Process that opened the volume.
    process: u32,
    /// Message of the panic that made the volume fail.
    failed: OnceLock<String>,
}

impl Health {
    pub(crate) fn new() -> Self {
        Self { process: std::process::id(), failed: OnceLock::new() }
    }

    /// Whether this process is a child of the one that opened the volume.
    pub(crate) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    fn check(&self) -> Result<(), Failure> {
        if self.is_forked() {
            let text =
                "cannot use the volume: another process has opened it; open it after the fork";
            return Err(Failure::new(libc::EPERM, text));
        }
        match self.failed.get() {
            None => Ok(()),
            Some(text) => Err(Failure::new(libc::EIO, text.as_str())),
        }
    }
}

/// Message until the first failure.
const NO_MESSAGE: &CStr = c"";

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Returns the message of this thread's last failure.
pub(crate) fn message() -> *const c_char {
    // While the thread is exiting, its messages are already gone.
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(NO_MESSAGE.as_ptr())
}

/// Stores a failure's message. Returns the result for the call.
fn fail(failure: &Failure) -> c_int {
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    // While the thread is exiting, nothing reads its messages.
    let _ = MESSAGE.try_with(|message| message.replace(text));
    -failure.errno
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("the library has failed: {}", text.unwrap_or("no message"))
}

/// Reports panics in the program's log instead of on its standard error.
pub(crate) fn quiet_panics() {
    static ONCE: Once = Once::new();
    if cfg!(not(test)) {
        ONCE.call_once(|| set_hook(Box::new(|info| tracing::error!("{info}"))));
    }
}

/// Runs a call that does not involve a volume.
pub(crate) fn enter(call: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    let result = catch_unwind(AssertUnwindSafe(call));
    let result = result.unwrap_or_else(|panic| Err(Failure::new(libc::EIO, panic_text(&*panic))));
    result.unwrap_or_else(|failure| fail(&failure))
}

/// Runs a call on a volume. A panic makes this call and all later ones fail.
pub(crate) fn enter_with(
    health: &Health,
    call: impl FnOnce() -> Result<c_int, Failure>,
) -> Result<c_int, Failure> {
    health.check()?;
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = health.failed.get_or_init(|| panic_text(&*panic));
        Err(Failure::new(libc::EIO, text.as_str()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        MESSAGE.with_borrow(|message| message.to_str().unwrap().to_owned())
    }

    #[test]
    fn failure_messages_are_kept_per_thread() {
        assert_eq!(enter(|| Err(Failure::invalid("bad\0value"))), -libc::EINVAL);
        assert_eq!(enter(|| Ok(7)), 7);
        assert_eq!(last(), "bad value");
        assert_eq!(std::thread::spawn(last).join().unwrap(), "");
    }

    #[test]
    fn a_panic_makes_the_volume_fail() {
        let health = Health::new();
        let call = |result: fn() -> Result<c_int, Failure>| enter(|| enter_with(&health, result));
        assert_eq!(call(|| Ok(1)), 1);
        assert_eq!(call(|| panic!("number {}", 3)), -libc::EIO);
        assert_eq!(last(), "the library has failed: number 3");
        assert_eq!(call(|| Ok(1)), -libc::EIO);
        assert_eq!(enter(|| panic!("without a volume")), -libc::EIO);
        assert_eq!(last(), "the library has failed: without a volume");
    }

    #[test]
    fn a_child_process_is_refused() {
        let health = Health { process: std::process::id() + 1, failed: OnceLock::new() };
        assert_eq!(enter_with(&health, || Ok(0)).unwrap_err().errno, libc::EPERM);
    }
}
