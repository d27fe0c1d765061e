//! Notice on stderr about a long wait.

use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use rtrs_core::settings::Output;
use rtrs_core::time::Duration;

use super::text::remark;

/// Length of a wait before the notice.
const NOTICE_AFTER: Duration = Duration::from_secs(3);
/// Stack size of the thread that only prints a line.
const STACK_BYTES: usize = 512 << 10;

/// Event that a command waits for.
pub(super) struct Awaited<T> {
    /// Describes the event, for example "vol0 to be attached".
    pub(super) what: T,
    /// Maximum length of the wait.
    pub(super) at_most: Duration,
}

impl<T: Fn() -> String + Send> Awaited<T> {
    /// Calls `wait`. If the call takes long, prints the event and the time limit. Prints nothing
    /// with JSON output, because programs then read stderr too.
    pub(super) fn with_notice<R>(self, output: Output, wait: impl FnOnce() -> R) -> R {
        if output == Output::Json {
            return wait();
        }
        let begin = Instant::now();
        let (waiting, ended) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let print = move || {
                // Returns early when the sender is dropped.
                let _ = ended.recv_timeout(NOTICE_AFTER);
                if begin.elapsed() >= NOTICE_AFTER {
                    let (what, seconds) = ((self.what)(), self.at_most.as_secs());
                    remark(format_args!("waiting for {what}, for at most {seconds} s"));
                }
            };
            // If no thread can be started, no notice is printed.
            drop(thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, print));
            let result = wait();
            drop(waiting);
            result
        })
    }
}
