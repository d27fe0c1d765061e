//! How a kernel device is asked for.

use super::DeviceChoice;

/// How a device is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Which one.
    pub choice: DeviceChoice,
    /// Seconds after which the kernel takes a socket for dead whose request has no answer, and
    /// sends the request again through another. It must be longer than any request can take here:
    /// a request that is sent again could overtake a later one. None stands for no bound and a
    /// quick takeover ([`super::reach`]): the device then has one socket.
    pub timeout_s: Option<u64>,
    /// Seconds that the kernel keeps requests when all sockets are dead, for somebody to connect
    /// others; then they fail.
    pub dead_timeout_s: u64,
    /// Tells what the device is connected to: text without a newline, the same for the same
    /// session and export. Shown in `/sys/block/nbdX/backend`.
    pub backend: String,
    /// Take over a device that a process which is gone had connected with the same identifier.
    pub takeover: bool,
}

impl DeviceOptions {
    /// Takes one of these devices where any would do.
    pub(super) fn prefer(&mut self, devices: &[u32]) {
        if let (DeviceChoice::Auto, Some(index)) = (self.choice, devices.first()) {
            self.choice = DeviceChoice::Index(*index);
        }
    }
}
