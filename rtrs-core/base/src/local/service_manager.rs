//! Notifications to the service manager using sd_notify(3): the maximum startup time, readiness,
//! shutdown, and periodic watchdog messages.
//!
//! A message is a datagram to the socket in NOTIFY_SOCKET. Without that variable, nothing is sent.
//! Runs off the IO path.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Time limit for sending a message, in case the manager is slow to read.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of watchdog messages per watchdog timeout: a check may fail twice before the manager
/// kills the process.
const CHECKS: u32 = 4;

/// Service manager of the process, if it has one. Clones share the same socket.
#[derive(Clone, Debug, Default)]
pub struct ServiceManager {
    socket: Option<Arc<UnixDatagram>>,
    /// Watchdog timeout of the manager.
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Returns the manager named by the environment. Failure to reach it is logged but not an
    /// error, since the process works without it.
    #[must_use]
    pub fn from_env() -> Self {
        let variable = |name| std::env::var(name).ok();
        let Some(address) = variable("NOTIFY_SOCKET") else { return Self::default() };
        let of_this_process =
            variable("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
        let watchdog = variable("WATCHDOG_USEC").filter(|_| of_this_process);
        let watchdog = watchdog.and_then(|time| time.parse().ok()).map(Duration::from_micros);
        Self::at(&address, watchdog).unwrap_or_else(|error| {
            tracing::warn!("cannot reach the service manager at {address:?}: {error}");
            Self::default()
        })
    }

    fn at(address: &str, watchdog: Option<Duration>) -> io::Result<Self> {
        let to = match address.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(address)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(SEND_TIMEOUT))?;
        socket.connect_addr(&to)?;
        Ok(Self { socket: Some(Arc::new(socket)), watchdog })
    }

    /// Asks the manager to allow up to `within` for startup, if that exceeds the manager's limit.
    pub fn starting(&self, within: Duration) {
        self.send(&format!("EXTEND_TIMEOUT_USEC={}", within.as_micros()));
    }

    /// Reports that the process has started. `status` is shown to users.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", status.replace('\n', " ")));
    }

    /// Reports that the process is about to exit.
    pub fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=stopping");
    }

    fn send(&self, message: &str) {
        let sent = self.socket.as_ref().map(|socket| socket.send(message.as_bytes()));
        if let Some(Err(error)) = sent {
            tracing::warn!("cannot notify the service manager of {message:?}: {error}");
        }
    }

    /// Starts a thread that sends watchdog messages as long as `alive` returns true, if the manager
    /// wants them. The thread ends with the process.
    ///
    /// # Errors
    /// Returns the system's error if the thread cannot be started.
    pub fn watch(&self, alive: impl Fn() -> bool + Send + 'static) -> io::Result<()> {
        let Some(time) = self.watchdog.filter(|_| self.socket.is_some()) else { return Ok(()) };
        let manager = self.clone();
        let watch = move || {
            loop {
                thread::sleep(time / CHECKS);
                if alive() {
                    manager.send("WATCHDOG=1");
                } else {
                    tracing::error!(
                        "not all shards answer; the service manager ends the process if this lasts \
                         {} s",
                        time.as_secs()
                    );
                }
            }
        };
        thread::Builder::new().name("watchdog".into()).spawn(watch).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }

    /// Returns a manager at an address in the abstract namespace, and the socket that receives its
    /// messages.
    fn manager(test: &str, watchdog: Option<Duration>) -> (ServiceManager, UnixDatagram) {
        let name = format!("rtrs-{test}-{}", std::process::id());
        let listener = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&listener).unwrap();
        listener.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        (ServiceManager::at(&format!("@{name}"), watchdog).unwrap(), listener)
    }

    #[test]
    fn the_service_manager_is_notified_of_start_and_end() {
        let (manager, listener) = manager("ready", None);
        manager.starting(Duration::from_secs(90));
        assert_eq!(received(&listener), "EXTEND_TIMEOUT_USEC=90000000");
        manager.ready("on tcp://[::]:1234\nREADY=0");
        assert_eq!(received(&listener), "READY=1\nSTATUS=on tcp://[::]:1234 READY=0");
        manager.stopping();
        assert_eq!(received(&listener), "STOPPING=1\nSTATUS=stopping");
        drop(listener);
        manager.stopping();
        ServiceManager::default().ready("no service manager");
    }

    #[test]
    fn the_watchdog_is_notified_while_the_process_runs() {
        let (manager, listener) = manager("alive", Some(Duration::from_millis(8)));
        let (alive, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let of_thread = (Arc::clone(&alive), Arc::clone(&asked));
        let check = move || {
            of_thread.1.store(true, Ordering::SeqCst);
            of_thread.0.load(Ordering::SeqCst)
        };
        manager.watch(check).unwrap();
        while !asked.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        listener.set_nonblocking(true).unwrap();
        let silent = listener.recv(&mut [0; 16]).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::WouldBlock, "it does not answer");
        listener.set_nonblocking(false).unwrap();
        alive.store(true, Ordering::SeqCst);
        assert_eq!((&*received(&listener), &*received(&listener)), ("WATCHDOG=1", "WATCHDOG=1"));
    }

    #[test]
    fn a_missing_service_manager_is_an_error() {
        ServiceManager::at("/nonexistent/notify", None).unwrap_err();
        ServiceManager::at("", None).unwrap_err();
    }
}
