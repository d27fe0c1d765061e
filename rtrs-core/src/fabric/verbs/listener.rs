//! Listening addresses, and retries after their device is removed.
//!
//! A listener on one address belongs to the device that has the address. When the device is removed
//! (driver reloaded, `rdma link delete`), or the address moves to another device (bond failover),
//! the listener ends, and the kernel does not create a new one. So a thread outside the shard
//! retries the address every second: the device may be new, and its windows must then be tested
//! too. Listeners on the wildcard address are not affected by changes to devices.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use super::device::{Tried, VerbsShared};
use super::sys::{CmId, EventChannel};
use super::{hint, info};
use crate::fabric::FabricError;
use crate::time::{Duration, Instant};

/// Interval between attempts to listen on a lost address.
const RETRY: Duration = Duration::from_secs(1);

/// Address to listen on.
#[derive(Debug)]
struct Listener {
    address: SocketAddr,
    state: State,
}

#[derive(Debug)]
enum State {
    Listening(CmId),
    /// Lost; the next attempt is due at this time.
    Lost(Instant),
    /// An attempt is in progress. `stale` is set if a device has been lost since it began, perhaps
    /// the new listener's.
    Trying {
        stale: bool,
    },
}

/// All listeners of a shard.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    all: Vec<Listener>,
}

impl Listeners {
    /// Listens on an address. Returns the address, with the chosen port.
    ///
    /// # Errors
    /// No device has the address, or the port is in use.
    pub(super) fn add(
        &mut self,
        channel: &Arc<EventChannel>,
        shared: &VerbsShared,
        mut address: SocketAddr,
        backlog: i32,
    ) -> Result<SocketAddr, FabricError> {
        let id = listen(channel, shared, address, backlog)?;
        address.set_port(id.local_port());
        self.all.push(Listener { address, state: State::Listening(id) });
        Ok(address)
    }

    /// Closes all listeners. Waits for the kernel, so that the ports are free when this returns.
    pub(super) fn stop(&mut self) {
        for one in self.all.drain(..) {
            if let State::Listening(id) = one.state {
                id.destroy();
            }
        }
    }

    /// Returns true if there is no address to listen on.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Marks listeners as lost: their device was removed, or their address moved.
    pub(super) fn lost(&mut self, now: Instant, is_it: impl Fn(&CmId) -> bool) {
        for one in &mut self.all {
            match &mut one.state {
                State::Listening(id) if is_it(id) => {}
                State::Trying { stale } => {
                    *stale = true;
                    continue;
                }
                _ => continue,
            }
            tracing::warn!(
                "no longer listening on rdma://{}: its device was removed or changed; trying \
                 again",
                one.address
            );
            one.state = State::Lost(now + RETRY);
        }
    }

    /// Returns the addresses that are due for another attempt.
    pub(super) fn poll(&mut self, now: Instant) -> Vec<SocketAddr> {
        let mut due = Vec::new();
        for one in &mut self.all {
            if matches!(one.state, State::Lost(at) if now >= at) {
                one.state = State::Trying { stale: false };
                due.push(one.address);
            }
        }
        due
    }

    /// Handles the result of an attempt.
    pub(super) fn tried(&mut self, now: Instant, tried: Tried) {
        let Tried { address, outcome } = tried;
        let is_it = |one: &&mut Listener| {
            one.address == address && matches!(one.state, State::Trying { .. })
        };
        // If the address is gone, listening was stopped: drop the new listener.
        let Some(one) = self.all.iter_mut().find(is_it) else { return };
        let stale = matches!(one.state, State::Trying { stale: true });
        one.state = match outcome {
            Ok(id) if !stale => {
                tracing::info!("listening on rdma://{address} again");
                State::Listening(id)
            }
            Ok(_) => State::Lost(now + RETRY),
            Err(error) => {
                tracing::debug!(%error, "still not listening on rdma://{address}");
                State::Lost(now + RETRY)
            }
        };
    }

    /// Returns the addresses that currently have no listener.
    pub(super) fn lost_addresses(&self) -> Vec<SocketAddr> {
        let lost = self.all.iter().filter(|one| !matches!(one.state, State::Listening(_)));
        lost.map(|one| one.address).collect()
    }

    /// Returns the time of the next poll.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let times = self.all.iter().filter_map(|one| match one.state {
            State::Listening(_) | State::Trying { .. } => None,
            State::Lost(at) => Some(at),
        });
        times.min()
    }
}

/// Tries again to listen on an address. Blocks for as long as the driver takes.
pub(super) fn try_again(
    channel: &Arc<EventChannel>,
    shared: &VerbsShared,
    address: SocketAddr,
    backlog: i32,
) -> Tried {
    Tried { address, outcome: listen(channel, shared, address, backlog) }
}

fn listen(
    channel: &Arc<EventChannel>,
    shared: &VerbsShared,
    address: SocketAddr,
    backlog: i32,
) -> Result<CmId, FabricError> {
    let failed = |e: io::Error| match e.raw_os_error() {
        Some(libc::ENODEV) => hint::no_device(address.ip(), &info::names(), e),
        _ => FabricError::system(format!("cannot listen on {address}"), e),
    };
    let id = CmId::new(channel).map_err(failed)?;
    id.bind(address).map_err(failed)?;
    shared.keep(&id, address)?;
    id.listen(backlog).map_err(failed)?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(at: Instant) -> (Listeners, SocketAddr) {
        let address = SocketAddr::from(([10, 0, 0, 1], 1234));
        (Listeners { all: vec![Listener { address, state: State::Lost(at) }] }, address)
    }

    fn refused(address: SocketAddr) -> Tried {
        let error = io::Error::from_raw_os_error(libc::ENODEV);
        Tried { address, outcome: Err(FabricError::system("no device", error)) }
    }

    #[test]
    fn an_address_is_tried_once_at_a_time_and_retried_on_failure() {
        let now = Instant::ZERO + RETRY;
        let (mut listeners, address) = lost(now);
        assert!(listeners.poll(Instant::ZERO).is_empty());
        assert_eq!(listeners.poll(now), [address]);
        // The driver may take arbitrarily long.
        let later = now + RETRY * 100;
        assert!(listeners.poll(later).is_empty());
        assert_eq!((listeners.deadline(), listeners.lost_addresses()), (None, vec![address]));
        listeners.tried(later, refused(address));
        assert_eq!(listeners.deadline(), Some(later + RETRY));
        assert_eq!(listeners.poll(later + RETRY), [address]);
    }

    #[test]
    fn an_attempt_completing_after_the_stop_is_dropped() {
        let (mut listeners, address) = lost(Instant::ZERO);
        assert_eq!(listeners.poll(Instant::ZERO), [address]);
        listeners.stop();
        listeners.tried(Instant::ZERO, refused(address));
        assert!(listeners.is_empty() && listeners.deadline().is_none());
    }
}
