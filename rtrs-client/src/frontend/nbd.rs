//! NBD clients at a unix or TCP socket.
//!
//! Shard 0 listens, from the moment the device is open, and hands clients to all shards in turn.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nbd_bridge::{Bound, Bridge, BridgeConfig, BridgeStats, Group, Listener};
use rtrs_core::ids::CoreIndex;
use rtrs_core::time::{Instant, earliest};

use super::{FrontEnd, FrontRequest, FrontSocket, MakeFrontEnds, Place, bridge};
use crate::engine::SessionDevice;

/// Front ends that serve the clients of this socket.
pub(crate) fn at(bound: Bound, config: BridgeConfig) -> MakeFrontEnds {
    Box::new(move |shards| {
        let (group, count) = (shards.group(), shards.count);
        let mut bound = Some(bound);
        shards.each(|_| {
            let (group, bound) = (Arc::clone(&group), bound.take());
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
                })
            })
        })
    })
}

struct Sockets {
    config: BridgeConfig,
    group: Arc<Group>,
    /// Shards that share the clients.
    count: u16,
    /// On shard 0, until the device is open.
    bound: Option<Bound>,
    bridge: Option<Bridge>,
    listener: Option<Listener>,
    /// The shard that gets the next client.
    next: u16,
    /// Clients for other shards.
    clients: VecDeque<(CoreIndex, OwnedFd)>,
}

impl Sockets {
    /// Deals out new clients. True when there was one.
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
        self.listener = self.bound.take().map(|bound| bound.serve(place.ring));
        Ok(())
    }

    fn take_socket(&mut self, now: Instant, socket: FrontSocket) {
        if let (FrontSocket::Client(socket), Some(bridge)) = (socket, &mut self.bridge) {
            bridge.adopt(now, socket);
        }
    }

    fn turn(&mut self, now: Instant) -> bool {
        let any = self.accept(now);
        self.bridge.as_mut().is_some_and(|bridge| bridge.turn(now)) | any
    }

    fn next_request(&mut self) -> Option<FrontRequest> {
        self.clients.pop_front().map(|(shard, socket)| FrontRequest::Client(shard, socket))
    }

    fn deadline(&self) -> Option<Instant> {
        let bridge = self.bridge.as_ref().and_then(Bridge::deadline);
        earliest(bridge, self.listener.as_ref().and_then(Listener::deadline))
    }

    fn stop(&mut self) {
        (self.bound, self.listener) = (None, None);
        if let Some(bridge) = &mut self.bridge {
            bridge.stop();
        }
    }

    fn abort(&mut self) {
        if let Some(bridge) = &mut self.bridge {
            bridge.abort();
        }
    }

    fn is_idle(&self) -> bool {
        self.bridge.as_ref().is_none_or(|bridge| bridge.connections() == 0)
    }

    fn stats(&self) -> BridgeStats {
        self.bridge.as_ref().map(Bridge::stats).unwrap_or_default()
    }
}
