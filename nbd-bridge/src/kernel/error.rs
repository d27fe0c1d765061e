//! Errors of kernel devices, worded for users.

use std::io;

/// Reason why an operation on a kernel device failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel's nbd driver is not loaded.
    #[error(
        "the kernel's nbd driver is not loaded; load it with \"modprobe nbd\" (in a container: on \
         the host, and share the host's network namespace)"
    )]
    NoModule,
    /// The caller may not connect devices.
    #[error("no permission to connect a kernel device; run as root or with CAP_SYS_ADMIN")]
    NoPermission,
    /// The device is in use.
    #[error("/dev/nbd{index} is in use: {by}; use another device, or auto")]
    Busy {
        /// Number of the device.
        index: u32,
        /// Current user of the device.
        by: String,
    },
    /// The export is not suitable for a kernel block device.
    #[error("the export cannot be a kernel device: {0}")]
    Export(String),
    /// The kernel refused the request.
    #[error("the kernel cannot connect {device}{why}")]
    Refused {
        /// `/dev/nbdX`, or `a free device`.
        device: String,
        /// Likely reason with a hint, or an empty string.
        why: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The device was connected but differs from what was requested.
    #[error("/dev/nbd{index} was connected, but {what}")]
    Odd {
        /// Number of the device.
        index: u32,
        /// Description of the problem, with a hint.
        what: String,
    },
    /// The kernel did not disconnect the device in time.
    #[error("/dev/nbd{index} could not be disconnected: {what}")]
    Stuck {
        /// Number of the device.
        index: u32,
        /// Reason for the delay, with a hint.
        what: String,
    },
    /// The system refused another operation, such as creating a socket or a thread.
    #[error("cannot communicate with the kernel's nbd driver")]
    System(#[from] io::Error),
}
