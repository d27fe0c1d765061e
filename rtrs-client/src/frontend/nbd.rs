//! Front end for NBD clients on a unix or TCP socket.
//!
//! Shard 0 accepts clients once the volume is attached, and hands them to all shards in turn.
//! Clients that connect earlier wait: the attach may still fail, and their IO with it.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use nbd_bridge::{Bound, Bridge, BridgeConfig, Endpoint, Group, Listener, Relays};
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::ids::CoreIndex;
use rtrs_core::local::PassedSocket;
use rtrs_core::rt::Ring;
use rtrs_core::time::{Duration, Instant, earliest};

use super::bridge::{bridge, client_of, config_of, group};
use super::client::FrontEndClient;
use super::front_end::{
    FrontEnd, FrontRequest, FrontSocket, MakeFrontEnds, Place, PreparedFrontEnds,
};
use crate::engine::SessionDevice;
use crate::error::{Error, ErrorKind};
use crate::plan::AttachPlan;
use crate::settings::give_socket;

/// Interval between checks of whether the connections of TLS clients have ended.
const RECHECK: Duration = Duration::from_millis(10);

/// Listens on a unix socket for the clients of the plan's volume.
///
/// # Errors
/// Fails if the path is in use, or the owner and mode of the socket cannot be set.
pub(super) fn at_socket(
    plan: &AttachPlan,
    path: &Path,
    passed: Option<&PassedSocket>,
) -> Result<PreparedFrontEnds, Error> {
    listen(plan, &Endpoint::Unix(path.to_owned()), passed)
}

/// Listens on a TCP address for the clients of the plan's volume.
///
/// # Errors
/// Fails if the address is in use, or the TLS files are unusable.
pub(super) fn at_address(
    plan: &AttachPlan,
    address: SocketAddr,
    passed: Option<&PassedSocket>,
) -> Result<PreparedFrontEnds, Error> {
    listen(plan, &Endpoint::Tcp(address), passed)
}

fn listen(
    plan: &AttachPlan,
    endpoint: &Endpoint,
    passed: Option<&PassedSocket>,
) -> Result<PreparedFrontEnds, Error> {
    let config = config_of(plan);
    let bound = match passed {
        Some(passed) => Bound::passed(endpoint, passed),
        None => Bound::new(endpoint),
    };
    let bound = bound.map_err(|e| {
        let what = format!("cannot serve NBD on {endpoint}");
        Error::with_source(ErrorKind::InUse, what, e)
    })?;
    if let (Endpoint::Unix(path), None) = (endpoint, passed) {
        let set = &plan.settings;
        give_socket(path, set.socket_owner.as_ref(), set.socket_mode).map_err(|e| {
            let what = format!("cannot set owner and mode of the socket {}", path.display());
            Error::with_source(ErrorKind::System, what, e)
        })?;
    }
    let clients = config.connections_max * usize::from(plan.session.shards());
    let bound = match plan.nbd_tls(clients)? {
        Some(relays) => bound.offering(relays),
        None => bound,
    };
    let uri = Some(bound.uri(&plan.session.name));
    Ok(PreparedFrontEnds { make: at(bound, config), uri })
}

/// Returns front ends that serve the clients of this socket.
fn at(bound: Bound, config: BridgeConfig) -> MakeFrontEnds {
    Box::new(move |shards| {
        let (group, count) = (group(shards), shards.count);
        let relays = bound.relays();
        let mut bound = Some(bound);
        shards.each(|_| {
            let (group, bound) = (Arc::clone(&group), bound.take());
            // Only on the shard with the listener.
            let relays = relays.clone().filter(|_| bound.is_some());
            Box::new(move || {
                let (bridge, listener, clients) = (None, None, VecDeque::new());
                Box::new(Sockets {
                    config,
                    group,
                    count,
                    bound,
                    bridge,
                    listener,
                    next: 0,
                    clients,
                    relays,
                    ending: None,
                })
            })
        })
    })
}

struct Sockets {
    config: BridgeConfig,
    group: Arc<Group>,
    /// Number of shards that share the clients.
    count: u16,
    /// Bound socket, until the volume is attached; only on shard 0.
    bound: Option<Bound>,
    bridge: Option<Bridge>,
    listener: Option<Listener>,
    /// Shard that receives the next client.
    next: u16,
    /// Clients for other shards.
    clients: VecDeque<(CoreIndex, OwnedFd)>,
    /// Connections of TLS clients; only on shard 0.
    relays: Option<Arc<Relays>>,
    /// Time of the next check of whether those connections have ended, during a stop.
    ending: Option<Instant>,
}

impl Sockets {
    fn are_relays_gone(&self) -> bool {
        self.relays.as_ref().is_none_or(|relays| relays.count() == 0)
    }

    /// Distributes new clients. Returns whether there were any.
    fn accept(&mut self, now: Instant) -> bool {
        let (Some(listener), Some(bridge)) = (&mut self.listener, &mut self.bridge) else {
            return false;
        };
        let mut any = false;
        while let Some(socket) = listener.take(now) {
            any = true;
            match self.next {
                0 => bridge.adopt(now, socket),
                shard => self.clients.push_back((CoreIndex(shard), socket)),
            }
            self.next = (self.next + 1) % self.count;
        }
        any
    }
}

impl FrontEnd for Sockets {
    fn open(&mut self, _now: Instant, place: &Place<'_>, device: SessionDevice) -> io::Result<()> {
        self.bridge = Some(bridge(place, device, self.config, &self.group)?);
        Ok(())
    }

    fn serve(&mut self, ring: &Rc<Ring>) {
        if let Some(bound) = self.bound.take() {
            self.listener = Some(bound.serve(ring));
        }
    }

    fn take_socket(&mut self, now: Instant, socket: FrontSocket) {
        if let (FrontSocket::Client(socket), Some(bridge)) = (socket, &mut self.bridge) {
            bridge.adopt(now, socket);
        }
    }

    fn turn(&mut self, now: Instant) -> bool {
        if self.ending.is_some() {
            self.ending = (!self.are_relays_gone()).then(|| now + RECHECK);
        }
        let any = self.accept(now);
        self.bridge.as_mut().is_some_and(|bridge| bridge.turn(now)) | any
    }

    fn next_request(&mut self) -> Option<FrontRequest> {
        self.clients.pop_front().map(|(shard, socket)| FrontRequest::Client(shard, socket))
    }

    fn deadline(&self) -> Option<Instant> {
        let bridge = self.bridge.as_ref().and_then(Bridge::deadline);
        let listener = self.listener.as_ref().and_then(Listener::deadline);
        earliest(earliest(bridge, listener), self.ending)
    }

    fn stop(&mut self) {
        (self.bound, self.listener) = (None, None);
        if let Some(bridge) = &mut self.bridge {
            bridge.stop();
        }
        if let Some(relays) = &self.relays {
            relays.stop();
            self.ending = Some(Instant::ZERO);
        }
    }

    fn abort(&mut self) {
        if let Some(bridge) = &mut self.bridge {
            bridge.abort();
        }
        if let Some(relays) = &self.relays {
            relays.abort();
        }
    }

    fn is_idle(&self) -> bool {
        let idle = self.bridge.as_ref().is_none_or(|bridge| bridge.connections() == 0);
        // The relays may still be sending the bridge's answers.
        idle && (self.ending.is_none() || self.are_relays_gone())
    }

    fn stats(&self) -> FrontEndStats {
        self.bridge.as_ref().map(Bridge::stats).unwrap_or_default()
    }

    fn may_clients_return(&self) -> bool {
        self.bridge.as_ref().is_some_and(Bridge::may_clients_return)
    }

    fn clients(&self) -> Vec<FrontEndClient> {
        self.bridge.iter().flat_map(Bridge::clients).map(client_of).collect()
    }
}
