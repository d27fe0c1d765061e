//! Addresses that are listened on, and tried again when their device is gone.
//!
//! A listener on one address belongs to the device that has the address. When the device is removed
//! (a driver that is loaded anew, `rdma link delete`), or the address moves to another (a bond that
//! fails over), the listener ends with it; the kernel makes no new one. So the address stays wanted
//! and is tried again, every second, on a thread outside the shard: the device may be new, and then
//! its windows are tried too. Listeners on all addresses stay whatever devices come and go.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use super::device::{Tried, VerbsShared};
use super::sys::{CmId, EventChannel};
use super::{hint, info};
use crate::fabric::FabricError;
use crate::time::{Duration, Instant};

/// How often an address without a listener is tried.
const RETRY: Duration = Duration::from_secs(1);

/// An address that is to be listened on.
#[derive(Debug)]
struct Listener {
    address: SocketAddr,
    state: State,
}

#[derive(Debug)]
enum State {
    Listening(CmId),
    /// Tried again then.
    Lost(Instant),
    /// Being tried. `stale`: a device was lost meanwhile, perhaps that of the new listener.
    Trying {
        stale: bool,
    },
}

/// All of a shard.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    all: Vec<Listener>,
}

impl Listeners {
    /// Listens. Returns the address with the port that was chosen.
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

    /// Ends all. Their ports are free when this returns, which waits for the kernel.
    pub(super) fn stop(&mut self) {
        for one in self.all.drain(..) {
            if let State::Listening(id) = one.state {
                id.destroy();
            }
        }
    }

    /// True when no address is to be listened on.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The device of these listeners was removed, or their address moved.
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
                "not listening on rdma://{} any more: its device was removed or changed; trying \
                 again",
                one.address
            );
            one.state = State::Lost(now + RETRY);
        }
    }

    /// Addresses whose time has come, to be tried.
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

    /// An address was tried.
    pub(super) fn tried(&mut self, now: Instant, tried: Tried) {
        let Tried { address, outcome } = tried;
        let is_it = |one: &&mut Listener| {
            one.address == address && matches!(one.state, State::Trying { .. })
        };
        // Without one, listening was stopped; the listener goes.
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

    /// Those that are listened on no longer.
    pub(super) fn lost_addresses(&self) -> Vec<SocketAddr> {
        let lost = self.all.iter().filter(|one| !matches!(one.state, State::Listening(_)));
        lost.map(|one| one.address).collect()
    }

    /// When to be polled.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let times = self.all.iter().filter_map(|one| match one.state {
            State::Listening(_) | State::Trying { .. } => None,
            State::Lost(at) => Some(at),
        });
        times.min()
    }
}

/// Tries an address that is due. Blocks, for as long as the driver takes.
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
    fn an_address_is_tried_once_at_a_time_and_again_when_that_failed() {
        let now = Instant::ZERO + RETRY;
        let (mut listeners, address) = lost(now);
        assert!(listeners.poll(Instant::ZERO).is_empty());
        assert_eq!(listeners.poll(now), [address]);
        // However long the driver takes.
        let later = now + RETRY * 100;
        assert!(listeners.poll(later).is_empty());
        assert_eq!((listeners.deadline(), listeners.lost_addresses()), (None, vec![address]));
        listeners.tried(later, refused(address));
        assert_eq!(listeners.deadline(), Some(later + RETRY));
        assert_eq!(listeners.poll(later + RETRY), [address]);
    }

    #[test]
    fn an_attempt_that_comes_after_the_stop_is_dropped() {
        let (mut listeners, address) = lost(Instant::ZERO);
        assert_eq!(listeners.poll(Instant::ZERO), [address]);
        listeners.stop();
        listeners.tried(Instant::ZERO, refused(address));
        assert!(listeners.is_empty() && listeners.deadline().is_none());
    }
}
