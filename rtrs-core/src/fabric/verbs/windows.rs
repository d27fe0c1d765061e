//! Tests a device's memory windows by binding one.
//!
//! The attributes of a device come from its kernel driver. The user-space library of its provider
//! may nevertheless lack the calls for windows: the one for bnxt_re has neither `alloc_mw` nor
//! `bind_mw`, although the driver reports windows. So the calls are made once, on a queue pair that
//! is its own peer. No packet is sent.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use super::sys::{CompChannel, Context, Cq, Mr, Mw, Pd, Qp};
use crate::fabric::rdma::device::MemoryWindows;
use crate::fabric::{Access, FabricError, QpLimits, WcStatus};
use crate::ids::QpNum;
use crate::mem::Region;
use crate::time::Duration;

/// Maximum number of checks for the bind's completion; `LOOK_EVERY` is the time between them.
const LOOKS: u32 = 250;
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Number of bytes to which the window is bound.
const BYTES: usize = 4096;

/// Tests the windows of the device with this name. Blocks for at most 0.25 s plus the duration of
/// the calls.
///
/// # Errors
/// Returns an error if the device cannot be opened.
pub(super) fn of_device(name: &str) -> io::Result<MemoryWindows> {
    Ok(of_context(&Arc::new(Context::of_name(name)?)))
}

/// Tests the windows of an open device, and records in the context if the device has none. Blocks
/// like [`of_device`].
pub(super) fn of_context(context: &Arc<Context>) -> MemoryWindows {
    let found = if context.limits().windows {
        try_windows(&mut Trial::new(context))
    } else {
        MemoryWindows::Missing("the device has no windows of type 1".into())
    };
    if found.is_missing() {
        context.set_without_windows();
    }
    found
}

/// Handles a bind that was refused immediately: the queue pair is unusable. If the call is not
/// implemented, the device is recorded as having no windows.
pub(super) fn bind_refused(context: &Context, error: FabricError) -> FabricError {
    let FabricError::System { source, .. } = &error else { return error };
    if is_no_call(source) && context.set_without_windows() {
        tracing::warn!(device = context.name(), %error, "an RDMA device has no memory windows");
    }
    FabricError::QpState
}

/// Returns true for errors from calls that a provider does not implement.
fn is_no_call(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

/// Returns true for errors that may be temporary: lack of resources or permission.
fn may_pass(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EINTR | libc::EPERM))
}

/// Provider calls, in the order in which they are made.
trait Provider {
    /// Registers memory.
    fn register(&mut self) -> io::Result<()>;
    /// Allocates a window over the memory.
    fn alloc(&mut self) -> io::Result<()>;
    /// Creates a queue pair ready to post.
    fn connect(&mut self) -> io::Result<()>;
    /// Requests a bind of the window.
    fn bind(&mut self) -> Result<(), FabricError>;
    /// Returns the status of the completed bind; None while it is pending.
    fn ended(&mut self) -> io::Result<Option<WcStatus>>;
    /// Waits for a short time.
    fn pause(&mut self);
}

fn try_windows(provider: &mut impl Provider) -> MemoryWindows {
    try_calls(provider).unwrap_or_else(|found| found)
}

/// Runs the test; an `Err` stops it early.
fn try_calls(provider: &mut impl Provider) -> Result<MemoryWindows, MemoryWindows> {
    use MemoryWindows::{Missing, Untried, Usable};
    let untried = |error: io::Error| Untried(error.to_string());
    provider.register().map_err(untried)?;
    provider.alloc().map_err(|error| match may_pass(&error) {
        true => Untried(format!("no window is available: {error}")),
        false => Missing(format!("the provider cannot create a window: {error}")),
    })?;
    provider.connect().map_err(untried)?;
    provider.bind().map_err(|error| match &error {
        FabricError::System { source, .. } if !may_pass(source) => {
            Missing(format!("the provider cannot bind a window: {source}"))
        }
        _ => Untried(error.to_string()),
    })?;
    for _ in 0..LOOKS {
        match provider.ended().map_err(untried)? {
            None => provider.pause(),
            Some(WcStatus::Success) => return Ok(Usable),
            Some(status) => return Err(Missing(format!("a bind failed: {status}"))),
        }
    }
    Err(Untried("a bind did not end in time".into()))
}

/// Provider for a device, with the objects created by the test, which are dropped in this order.
struct Trial<'c> {
    qp: Option<(Qp, Rc<Cq>)>,
    window: Option<Arc<Mw>>,
    mr: Option<Arc<Mr>>,
    context: &'c Arc<Context>,
}

impl<'c> Trial<'c> {
    const fn new(context: &'c Arc<Context>) -> Self {
        Self { qp: None, window: None, mr: None, context }
    }
}

/// Error for a step called out of order.
fn no_order() -> io::Error {
    io::Error::other("a step of the trial is missing")
}

impl Provider for Trial<'_> {
    fn register(&mut self) -> io::Result<()> {
        let pd = Arc::new(Pd::new(self.context)?);
        self.mr = Some(Arc::new(Mr::new(&pd, &Region::new(BYTES)?, Access::LOCAL)?));
        Ok(())
    }

    fn alloc(&mut self) -> io::Result<()> {
        let mr = self.mr.as_ref().ok_or_else(no_order)?;
        self.window = Some(Arc::new(Mw::new(mr)?));
        Ok(())
    }

    fn connect(&mut self) -> io::Result<()> {
        let pd = self.window.as_ref().ok_or_else(no_order)?.pd();
        let limits = QpLimits { send_max: 1, recv_max: 1 };
        let channel = CompChannel::new(self.context)?;
        let cq = Cq::new(&channel, Qp::cq_entries(pd, limits), 0, 0)?;
        let (qp, _) = self.qp.insert((Qp::new(pd, &cq, QpNum(0), limits)?, cq));
        qp.connect_to_itself()
    }

    fn bind(&mut self) -> Result<(), FabricError> {
        let order = || FabricError::QpState;
        let window = self.window.as_ref().ok_or_else(order)?;
        let (qp, _) = self.qp.as_mut().ok_or_else(order)?;
        let slice = window.mr().region().slice(0, BYTES).ok_or_else(order)?;
        qp.push_bind(window, Some(&slice), Access::REMOTE_WRITE, 0)?;
        // On soft RoCE, the bind is only staged.
        qp.post().map_err(|e| FabricError::system("cannot post a bind", e)).map(drop)
    }

    fn ended(&mut self) -> io::Result<Option<WcStatus>> {
        let (_, cq) = self.qp.as_ref().ok_or_else(no_order)?;
        let mut completions = Vec::new();
        cq.poll(&mut completions)?;
        Ok(completions.first().map(|completion| completion.status))
    }

    fn pause(&mut self) {
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test provider in which one step fails.
    #[derive(Default)]
    struct StandIn {
        register: Option<i32>,
        alloc: Option<i32>,
        connect: Option<i32>,
        bind: Option<i32>,
        /// Status of the bind and the number of checks until it completes; None if it never does.
        end: Option<(u32, WcStatus)>,
        looks: u32,
        pauses: u32,
        calls: Vec<&'static str>,
    }

    impl StandIn {
        fn call(&mut self, name: &'static str, errno: Option<i32>) -> io::Result<()> {
            self.calls.push(name);
            errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
        }
    }

    impl Provider for StandIn {
        fn register(&mut self) -> io::Result<()> {
            self.call("register", self.register)
        }

        fn alloc(&mut self) -> io::Result<()> {
            self.call("alloc", self.alloc)
        }

        fn connect(&mut self) -> io::Result<()> {
            self.call("connect", self.connect)
        }

        fn bind(&mut self) -> Result<(), FabricError> {
            self.call("bind", self.bind).map_err(|e| FabricError::system("bind", e))
        }

        fn ended(&mut self) -> io::Result<Option<WcStatus>> {
            self.looks += 1;
            Ok(self.end.and_then(|(after, status)| (self.looks > after).then_some(status)))
        }

        fn pause(&mut self) {
            self.pauses += 1;
        }
    }

    #[test]
    fn windows_are_usable_once_a_bind_succeeds() {
        let end = Some((3, WcStatus::Success));
        let mut good = StandIn { end, ..StandIn::default() };
        assert_eq!(try_windows(&mut good), MemoryWindows::Usable);
        assert_eq!(good.calls, ["register", "alloc", "connect", "bind"]);
        assert_eq!(good.looks, 4);
    }

    #[test]
    fn a_provider_without_the_calls_has_no_windows() {
        // Neither call exists; the queue pair is not even created.
        let mut none = StandIn { alloc: Some(libc::EOPNOTSUPP), ..StandIn::default() };
        let found = try_windows(&mut none);
        assert!(
            matches!(&found, MemoryWindows::Missing(why) if why.contains("cannot create a window"))
        );
        assert_eq!(none.calls, ["register", "alloc"]);
        // One of the two calls exists.
        for errno in [libc::EOPNOTSUPP, libc::ENOSYS, libc::EINVAL] {
            let found = try_windows(&mut StandIn { bind: Some(errno), ..StandIn::default() });
            assert!(
                matches!(&found, MemoryWindows::Missing(why) if why.contains("bind a window")),
                "{found:?}"
            );
        }
        // Both calls exist, but do not work.
        let end = Some((0, WcStatus::LocalError));
        let found = try_windows(&mut StandIn { end, ..StandIn::default() });
        assert_eq!(found, MemoryWindows::Missing("a bind failed: local error".into()));
    }

    #[test]
    fn a_bind_that_fails_late_means_no_windows() {
        for status in [WcStatus::LocalError, WcStatus::Flushed] {
            let mut late = StandIn { end: Some((LOOKS - 1, status)), ..StandIn::default() };
            let found = try_windows(&mut late);
            assert_eq!(found, MemoryWindows::Missing(format!("a bind failed: {status}")));
            assert_eq!(late.looks, LOOKS, "at the last check");
        }
    }

    #[test]
    fn a_hanging_bind_times_out_after_a_quarter_of_a_second() {
        // The bind never completes, or completes too late.
        for end in [None, Some((LOOKS, WcStatus::Success)), Some((LOOKS, WcStatus::LocalError))] {
            let mut silent = StandIn { end, ..StandIn::default() };
            let found = try_windows(&mut silent);
            assert_eq!(found, MemoryWindows::Untried("a bind did not end in time".into()));
            assert_eq!((silent.looks, silent.pauses), (LOOKS, LOOKS));
            assert_eq!(LOOK_EVERY * silent.pauses, Duration::from_millis(250));
        }
    }

    #[test]
    fn unrelated_failures_leave_windows_untried() {
        let tried = [
            // Memory cannot be locked.
            StandIn { register: Some(libc::ENOMEM), ..StandIn::default() },
            // Another process uses all windows.
            StandIn { alloc: Some(libc::ENOMEM), ..StandIn::default() },
            // No port has an address yet.
            StandIn { connect: Some(libc::EADDRNOTAVAIL), ..StandIn::default() },
            StandIn { bind: Some(libc::ENOMEM), ..StandIn::default() },
            // The device does not answer; the number of checks is limited.
            StandIn::default(),
        ];
        for mut provider in tried {
            let found = try_windows(&mut provider);
            assert!(matches!(found, MemoryWindows::Untried(_)), "{found:?}");
            assert!(!found.is_missing() && provider.looks <= LOOKS);
        }
    }

    #[test]
    fn only_a_missing_call_disables_windows_on_an_open_device() {
        let missing = |errno| is_no_call(&io::Error::from_raw_os_error(errno));
        assert!(missing(libc::EOPNOTSUPP) && missing(libc::ENOSYS));
        assert!(!missing(libc::ENOMEM) && !missing(libc::EINVAL));
    }
}
