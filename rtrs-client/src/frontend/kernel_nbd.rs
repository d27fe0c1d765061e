//! Front end for the kernel's `/dev/nbdX`: one socket per shard, whose other end the kernel holds.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};

use nbd_bridge::kernel::BUSY_BYTES;
use nbd_bridge::{Bridge, BridgeConfig, Group};
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::time::Instant;

use super::bridge::{bridge, config_of, group};
use super::front_end::{
    FrontEnd, FrontRequest, FrontSocket, MakeFrontEnds, Place, PreparedFrontEnds,
};
use crate::engine::SessionDevice;
use crate::plan::AttachPlan;

/// Returns front ends that serve the plan's volume to the kernel.
pub(super) fn prepare(plan: &AttachPlan) -> PreparedFrontEnds {
    let config = BridgeConfig {
        // The kernel has one connection on each shard, and later perhaps a second connection that
        // replaces the first.
        connections_max: 2,
        touched_bytes: BUSY_BYTES,
        ..config_of(plan)
    };
    PreparedFrontEnds { make: device(config), uri: None }
}

/// Returns front ends that serve the kernel.
fn device(config: BridgeConfig) -> MakeFrontEnds {
    Box::new(move |shards| {
        let group = group(shards);
        shards.each(|_| {
            let group = Arc::clone(&group);
            Box::new(move || {
                Box::new(Kernel { config, group, bridge: None, end: KernelEnd::None, gone: false })
            })
        })
    })
}

struct Kernel {
    config: BridgeConfig,
    group: Arc<Group>,
    bridge: Option<Bridge>,
    end: KernelEnd,
    /// Whether the kernel has closed its socket but the driver has not been notified yet.
    gone: bool,
}

/// State of the kernel's socket.
enum KernelEnd {
    /// There is no socket, or it was closed.
    None,
    /// The socket is waiting until the device is open on this shard.
    Waiting(OwnedFd, mpsc::Sender<()>),
    /// The bridge serves the socket.
    Served,
}

impl Kernel {
    /// Serves the kernel's socket once it has arrived and the device is open.
    fn adopt(&mut self, now: Instant) {
        let Some(bridge) = &mut self.bridge else { return };
        if let KernelEnd::Waiting(socket, served) =
            std::mem::replace(&mut self.end, KernelEnd::None)
            && bridge.adopt_kernel(now, socket)
            && served.send(()).is_ok()
        {
            self.end = KernelEnd::Served;
        }
    }
}

impl FrontEnd for Kernel {
    fn open(&mut self, now: Instant, place: &Place<'_>, device: SessionDevice) -> io::Result<()> {
        match bridge(place, device, self.config, &self.group) {
            Ok(bridge) => self.bridge = Some(bridge),
            Err(error) => {
                self.end = KernelEnd::None;
                return Err(error);
            }
        }
        self.adopt(now);
        Ok(())
    }

    fn take_socket(&mut self, now: Instant, socket: FrontSocket) {
        if let FrontSocket::Kernel(socket, served) = socket {
            self.end = KernelEnd::Waiting(socket, served);
            self.adopt(now);
        }
    }

    fn turn(&mut self, now: Instant) -> bool {
        let Some(bridge) = &mut self.bridge else { return false };
        let any = bridge.turn(now);
        if matches!(self.end, KernelEnd::Served) && bridge.connections() == 0 {
            self.end = KernelEnd::None;
            self.gone = true;
        }
        any
    }

    fn next_request(&mut self) -> Option<FrontRequest> {
        std::mem::take(&mut self.gone).then_some(FrontRequest::KernelGone)
    }

    fn deadline(&self) -> Option<Instant> {
        self.bridge.as_ref().and_then(Bridge::deadline)
    }

    fn stop(&mut self) {
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

    fn stats(&self) -> FrontEndStats {
        self.bridge.as_ref().map(Bridge::stats).unwrap_or_default()
    }
}
