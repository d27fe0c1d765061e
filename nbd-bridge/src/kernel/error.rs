//! What is in the way of a kernel device, in sentences for people.

use std::io;

/// What is in the way of a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel does not have the nbd driver.
    #[error(
        "the kernel's nbd driver is not loaded; load it with \"modprobe nbd\" (in a container: on \
         the host, and share the host's network namespace)"
    )]
    NoModule,
    /// The caller may not connect devices.
    #[error("no permission to connect a kernel device; run as root or with CAP_SYS_ADMIN")]
    NoPermission,
    /// Somebody uses the device.
    #[error("/dev/nbd{index} is in use: {by}; use another device, or auto")]
    Busy {
        /// The device.
        index: u32,
        /// By whom.
        by: String,
    },
    /// The export cannot be a kernel's block device.
    #[error("the export cannot be a kernel device: {0}")]
    Export(String),
    /// The kernel refused.
    #[error("the kernel cannot connect {device}{why}")]
    Refused {
        /// `/dev/nbdX`, or `a free device`.
        device: String,
        /// A guess at the reason with a hint, or nothing.
        why: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// It was connected, but is not what it has to be.
    #[error("/dev/nbd{index} was connected, but {what}")]
    Odd {
        /// The device.
        index: u32,
        /// What is wrong, with a hint.
        what: String,
    },
    /// The kernel did not disconnect the device in time.
    #[error("/dev/nbd{index} could not be disconnected: {what}")]
    Stuck {
        /// The device.
        index: u32,
        /// What is in the way, with a hint.
        what: String,
    },
    /// The system refused something else: a socket, a thread.
    #[error("cannot speak with the kernel's nbd driver")]
    System(#[from] io::Error),
}
