//! Addresses that are listened on, and tried again when their device is gone.
//!
//! A listener on one address belongs to the device that has the address. When the device is removed
//! (a driver that is loaded anew, `rdma link delete`), or the address moves to another (a bond that
//! fails over), the listener ends with it; the kernel makes no new one. So the address stays wanted
//! and is tried again, every second. Listeners on all addresses stay whatever devices come and go.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use super::device::VerbsShared;
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

    /// The device of these listeners was removed, or their address moved.
    pub(super) fn lost(&mut self, now: Instant, is_it: impl Fn(&CmId) -> bool) {
        for one in &mut self.all {
            if !matches!(&one.state, State::Listening(id) if is_it(id)) {
                continue;
            }
            tracing::warn!(
                "not listening on rdma://{} any more: its device was removed or changed; trying \
                 again",
                one.address
            );
            one.state = State::Lost(now + RETRY);
        }
    }

    /// Tries addresses whose time has come.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        channel: &Arc<EventChannel>,
        shared: &VerbsShared,
        backlog: i32,
    ) {
        for one in &mut self.all {
            if !matches!(one.state, State::Lost(at) if now >= at) {
                continue;
            }
            one.state = match listen(channel, shared, one.address, backlog) {
                Ok(id) => {
                    tracing::info!("listening on rdma://{} again", one.address);
                    State::Listening(id)
                }
                Err(error) => {
                    tracing::debug!(%error, "still not listening on rdma://{}", one.address);
                    State::Lost(now + RETRY)
                }
            };
        }
    }

    /// Those that are listened on no longer.
    pub(super) fn lost_addresses(&self) -> Vec<SocketAddr> {
        let lost = self.all.iter().filter(|one| matches!(one.state, State::Lost(_)));
        lost.map(|one| one.address).collect()
    }

    /// When to be polled.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let times = self.all.iter().filter_map(|one| match one.state {
            State::Listening(_) => None,
            State::Lost(at) => Some(at),
        });
        times.min()
    }
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
