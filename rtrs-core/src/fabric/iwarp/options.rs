//! Options of the provider.

use crate::time::Duration;

/// Options of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IwarpOptions {
    /// Request checksums. They are used if either side requests them.
    pub crc: bool,
    /// Speak plain iWARP only (rping, siw): offer neither immediates nor peer-to-peer mode.
    pub plain: bool,
    /// Timeout of each start-up step: the peer's request, its reply, its first frame.
    pub startup_timeout: Duration,
    /// Timeout of a graceful disconnect, and for sending a Terminate.
    pub close_timeout: Duration,
    /// Maximum number of accepted connections whose request has not arrived; one more closes the
    /// oldest of the source that has the most.
    pub half_open_max: u32,
    /// TCP_USER_TIMEOUT: maximum time that sent data may stay unacknowledged. None selects the
    /// system's default.
    pub user_timeout: Option<Duration>,
    /// Maximum number of connections that the system queues before they are accepted.
    pub backlog: i32,
}

impl Default for IwarpOptions {
    fn default() -> Self {
        Self {
            crc: true,
            plain: false,
            startup_timeout: Duration::from_secs(5),
            close_timeout: Duration::from_secs(2),
            half_open_max: 1024,
            user_timeout: None,
            backlog: 4096,
        }
    }
}
