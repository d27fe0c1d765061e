//! Log messages about device errors, so that the log names the disk before its users notice.

use rtrs_core::block::{Completion, IoOp};
use rtrs_core::log_limit::LogLimit;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;
use rtrs_core::wire::errno_name;

use super::progress::{IoProgress, IoStep};

/// Error log of one device on one shard.
#[derive(Debug, Default)]
pub(super) struct DeviceErrors {
    limit: LogLimit,
}

/// Whether an error lies with the disk or file, not the request: a client may try an operation to
/// find out whether it is supported.
pub(super) const fn is_device_error(status: IoStatus) -> bool {
    use IoStatus::{Invalid, Moved, Ok, ReadOnly, Unsupported};
    !matches!(status, Ok | Unsupported | Invalid | ReadOnly | Moved)
}

impl DeviceErrors {
    /// Logs a step of an IO that failed with a device error, at a limited rate.
    pub(super) fn log(
        &mut self,
        export: &str,
        io: &IoProgress,
        completion: Completion,
        now: Instant,
    ) {
        let Some(left_out) = self.limit.admit(now) else { return };
        let op = match (io.step, io.op) {
            (IoStep::PreFlush | IoStep::PostFlush, _) | (_, IoOp::Flush) => "flush",
            (_, IoOp::Read) => "read",
            (_, IoOp::Write) => "write",
            (_, IoOp::Discard) => "discard",
            (_, IoOp::WriteZeroes) => "write zeroes",
            (_, IoOp::Extents) => "extents",
        };
        let (offset, bytes) = (io.offset + u64::from(io.done), io.part);
        let Completion { status, errno, .. } = completion;
        let errno = errno_name(errno);
        tracing::error!(export, op, offset, bytes, errno, left_out, "device error: {status}");
    }
}
