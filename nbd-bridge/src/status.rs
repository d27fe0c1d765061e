//! Conversion from `IoStatus` to NBD errors: total, following the meaning that the NBD
//! specification assigns to each value.

use rtrs_core::status::IoStatus;

use crate::proto::wire::NbdError;

/// Returns the NBD error of a status; None for success.
pub(crate) fn nbd_error(status: IoStatus) -> Option<NbdError> {
    Some(match status {
        IoStatus::Ok => return None,
        IoStatus::Invalid => NbdError::Inval,
        IoStatus::ReadOnly => NbdError::Perm,
        IoStatus::NoSpace => NbdError::NoSpc,
        IoStatus::NoMemory => NbdError::NoMem,
        IoStatus::Unsupported => NbdError::NotSup,
        _ => NbdError::Io,
    })
}

/// Returns a description of a status.
pub(crate) fn reason(status: IoStatus) -> &'static str {
    match status {
        IoStatus::Ok => "ok",
        IoStatus::Invalid => "the device refused the request as invalid",
        IoStatus::ReadOnly => "the device is read-only",
        IoStatus::NoSpace => "no space left on the device",
        IoStatus::NoMemory => "the device is out of memory",
        IoStatus::Unsupported => "the device does not support the request",
        IoStatus::NoDevice => "the device is gone",
        IoStatus::Beyond => "the device has shrunk",
        IoStatus::Aborted => "the path to the device was lost",
        IoStatus::TimedOut => "the device did not answer in time",
        IoStatus::Busy => "the device is busy",
        _ => "the device failed",
    }
}

/// Whether a status points to a fault of the device rather than of the request.
pub(crate) fn is_device_fault(status: IoStatus) -> bool {
    !matches!(status, IoStatus::Ok | IoStatus::Invalid | IoStatus::ReadOnly | IoStatus::Unsupported)
}
