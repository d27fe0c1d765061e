//! `IoStatus`: the status code of every completed IO.
//!
//! A status maps in both directions to Linux errno values, which RTRS carries in the 9 error bits
//! of its immediate and which backends receive from the kernel. NBD's mapping is in
//! `nbd-bridge/src/status.rs`.

use std::fmt;

/// Outcome of an IO: one byte, `Copy`. The context of a failure is in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoStatus {
    /// Completed, with the requested durability.
    Ok,
    /// The device failed the operation (EIO).
    Io,
    /// The IO extends beyond the end of a target that was truncated while in use (EIO).
    /// Nothing was begun.
    Beyond,
    /// The request is invalid for the device: alignment, range, flags (EINVAL).
    Invalid,
    /// A write to a read-only device, or an access that the session does not have (EPERM).
    ReadOnly,
    /// No space left on the backing store (ENOSPC).
    NoSpace,
    /// Not enough memory or slots to serve the IO (ENOMEM).
    NoMemory,
    /// The device does not offer this operation (EOPNOTSUPP).
    Unsupported,
    /// The device or export does not exist, or was removed (ENODEV).
    NoDevice,
    /// The path or session that carried the IO failed; the effect of the IO is unknown
    /// (ECONNABORTED).
    Aborted,
    /// The IO did not complete within its time limit; its effect is unknown (ETIMEDOUT).
    TimedOut,
    /// The device is busy; a retry may succeed (EBUSY).
    Busy,
    /// A different server now serves the device; the effect of the IO is unknown (ECONNABORTED).
    /// Only for sources with a [`Gateway`](crate::gateway::Gateway). A server does not answer such
    /// a request: it closes the request's path.
    Moved,
}

impl IoStatus {
    /// Returns true for [`IoStatus::Ok`].
    pub const fn is_ok(self) -> bool {
        matches!(self, Self::Ok)
    }

    /// Every status, for tables.
    pub const ALL: [Self; 13] = [
        Self::Ok,
        Self::Io,
        Self::Beyond,
        Self::Invalid,
        Self::ReadOnly,
        Self::NoSpace,
        Self::NoMemory,
        Self::Unsupported,
        Self::NoDevice,
        Self::Aborted,
        Self::TimedOut,
        Self::Busy,
        Self::Moved,
    ];

    /// Returns true if a write with this status was refused before it reached the device, so that
    /// its outcome reveals nothing about previously acknowledged data. Does not apply to a flush: a
    /// file system that was shut down fails a flush with EROFS.
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::Beyond | Self::Invalid | Self::ReadOnly | Self::Unsupported)
    }

    /// Returns the positive Linux errno of this status, 0 for `Ok`. Always below 512, because the
    /// RTRS immediate has nine bits for it.
    pub const fn to_errno(self) -> u16 {
        match self {
            Self::Ok => 0,
            Self::ReadOnly => 1,
            Self::Io | Self::Beyond => 5,
            Self::NoMemory => 12,
            Self::Busy => 16,
            Self::NoDevice => 19,
            Self::Invalid => 22,
            Self::NoSpace => 28,
            Self::Unsupported => 95,
            Self::Aborted | Self::Moved => 103,
            Self::TimedOut => 110,
        }
    }

    /// Returns the status for a positive errno; values without a status of their own become `Io`.
    pub const fn from_errno(errno: u16) -> Self {
        match errno {
            0 => Self::Ok,
            1 | 13 | 30 => Self::ReadOnly,
            12 => Self::NoMemory,
            11 | 16 => Self::Busy,
            2 | 6 | 19 => Self::NoDevice,
            22 => Self::Invalid,
            28 | 122 => Self::NoSpace,
            25 | 38 | 95 => Self::Unsupported,
            103 | 104 | 107 => Self::Aborted,
            110 => Self::TimedOut,
            _ => Self::Io,
        }
    }

    /// Returns the status for an error from a system call.
    pub fn from_io_error(error: &std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(0) | None => Self::Io,
            Some(code) => Self::from_errno(u16::try_from(code.unsigned_abs()).unwrap_or(5)),
        }
    }
}

/// Status of an IO, with its errno for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Status for the submitter.
    pub status: IoStatus,
    /// Errno from the system, which the status may not preserve, or else the status's own errno.
    pub errno: u16,
}

impl From<IoStatus> for Outcome {
    fn from(status: IoStatus) -> Self {
        Self { status, errno: status.to_errno() }
    }
}

impl From<&std::io::Error> for Outcome {
    fn from(error: &std::io::Error) -> Self {
        let status = IoStatus::from_io_error(error);
        let code = error.raw_os_error().and_then(|code| u16::try_from(code).ok());
        Self { status, errno: code.unwrap_or_else(|| status.to_errno()) }
    }
}

impl fmt::Display for IoStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Io => "I/O error",
            Self::Beyond => "beyond the end of a truncated target",
            Self::Invalid => "invalid request",
            Self::ReadOnly => "not permitted",
            Self::NoSpace => "no space left",
            Self::NoMemory => "out of memory",
            Self::Unsupported => "operation not supported",
            Self::NoDevice => "no such device",
            Self::Aborted => "connection aborted",
            Self::TimedOut => "timed out",
            Self::Busy => "busy",
            Self::Moved => "served by another gateway",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::IoStatus;

    #[test]
    fn every_status_round_trips_through_its_errno() {
        for errno in 0..512u16 {
            let status = IoStatus::from_errno(errno);
            assert_eq!(IoStatus::from_errno(status.to_errno()), status, "errno {errno}");
            assert_eq!(status.is_ok(), errno == 0);
        }
    }
}
