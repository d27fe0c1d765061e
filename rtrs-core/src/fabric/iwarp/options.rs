//! Options of the provider.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::local::PassedSocket;
use crate::time::Duration;

/// Options of the provider.
#[derive(Clone, Debug)]
pub struct IwarpOptions {
    /// Request checksums. They are used if either side requests them.
    pub crc: bool,
    /// Speak only plain iWARP (rping, siw): offer neither immediates nor peer-to-peer mode.
    pub plain: bool,
    /// Timeout for each startup step: the peer's request, its reply, its first frame.
    pub startup_timeout: Duration,
    /// Timeout for a graceful disconnect, and for sending a Terminate.
    pub close_timeout: Duration,
    /// Maximum number of accepted connections whose request has not arrived; one more connection
    /// closes the oldest one from the source that has the most.
    pub half_open_max: u32,
    /// TCP_USER_TIMEOUT: maximum time that sent data may remain unacknowledged. None selects the
    /// system's default.
    pub user_timeout: Option<Duration>,
    /// Maximum number of connections that the system queues before they are accepted.
    pub backlog: i32,
    /// Sockets passed by the service manager; `listen` uses the one with its address.
    pub passed: Arc<[PassedSocket]>,
}

impl IwarpOptions {
    /// Returns the service manager's socket with this address.
    pub(super) fn passed_at(&self, address: SocketAddr) -> Option<&PassedSocket> {
        self.passed.iter().find(|passed| passed.address() == Some(address))
    }
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
            passed: Arc::default(),
        }
    }
}
