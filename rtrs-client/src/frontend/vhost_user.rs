//! Front end for a virtual machine, over vhost-user-blk on a unix socket.

use std::io;
use std::path::Path;
use std::rc::Rc;

use rtrs_core::front_end::FrontEndStats;
use rtrs_core::rt::Ring;
use rtrs_core::settings::Int;
use rtrs_core::time::Instant;
use vhost_bridge::{Bound, GuestOptions, Queues, Seat};

use super::client::FrontEndClient;
use super::front_end::{
    Complaint, FrontEnd, FrontRequest, FrontSocket, MakeFrontEnds, Place, PreparedFrontEnds,
};
use crate::control_protocol::VHOST_USER;
use crate::engine::SessionDevice;
use crate::error::{Error, ErrorKind};
use crate::plan::AttachPlan;
use crate::settings::give_socket;

/// Complaint about a guest whose memory is a private copy of the file that its monitor passed.
const NOT_SHARED: &str = "the guest kicks its queues, but no request appears in them: its memory \
                          is not shared; use share=on of memory-backend-memfd with QEMU, <access \
                          mode='shared'/> with libvirt, --memory shared=on with cloud-hypervisor";

/// Listens on a unix socket for the virtual machine of the plan's volume.
///
/// # Errors
/// Fails if the path is in use, or the owner and mode of the socket cannot be set.
pub(super) fn prepare(plan: &AttachPlan, path: &Path) -> Result<PreparedFrontEnds, Error> {
    let bound = Bound::new(path).map_err(|e| {
        let what = format!("cannot serve vhost-user on the socket {}", path.display());
        Error::with_source(ErrorKind::InUse, what, e)
    })?;
    let set = &plan.settings;
    give_socket(path, set.socket_owner.as_ref(), set.socket_mode).map_err(|e| {
        let what = format!("cannot set owner and mode of the socket {}", path.display());
        Error::with_source(ErrorKind::System, what, e)
    })?;
    let guest = GuestOptions { queues: set.queues.map(Int::get), is_arriving: plan.promotes() };
    let seats = bound.seats(&plan.session.name, plan.session.shards(), guest).map_err(|e| {
        let what = format!("cannot serve vhost-user on the socket {}", path.display());
        Error::with_source(ErrorKind::System, what, e)
    })?;
    let memory = usize::try_from(set.buffer_size.bytes()).unwrap_or(usize::MAX);
    let uri = Some(format!("{VHOST_USER}{}", path.display()));
    Ok(PreparedFrontEnds { make: make(seats, memory), uri })
}

/// Returns front ends that serve the rings of their shard, with this much memory for buffers.
fn make(seats: Vec<Seat>, memory: usize) -> MakeFrontEnds {
    Box::new(move |shards| {
        let mut seats = seats.into_iter();
        shards.each(|_| {
            let seat = seats.next();
            Box::new(move || Box::new(VhostUser { memory, seat, queues: None }))
        })
    })
}

struct VhostUser {
    memory: usize,
    /// Place of the shard, until the device is open.
    seat: Option<Seat>,
    queues: Option<Queues>,
}

impl FrontEnd for VhostUser {
    fn open(&mut self, _now: Instant, place: &Place<'_>, device: SessionDevice) -> io::Result<()> {
        let Some(seat) = self.seat.take() else { return Ok(()) };
        self.queues = Some(Queues::new(place.ring, Box::new(device), seat, self.memory)?);
        Ok(())
    }

    fn serve(&mut self, _ring: &Rc<Ring>) {
        if let Some(queues) = &mut self.queues
            && let Err(error) = queues.serve()
        {
            tracing::error!("cannot start a thread for a virtual machine: {error}");
        }
    }

    /// The virtual machine connects to the bridge's own thread.
    fn take_socket(&mut self, _now: Instant, _socket: FrontSocket) {}

    fn turn(&mut self, now: Instant) -> bool {
        self.queues.as_mut().is_some_and(|queues| queues.turn(now))
    }

    fn has_input(&self) -> bool {
        self.queues.as_ref().is_some_and(Queues::has_input)
    }

    fn prepare_sleep(&mut self) -> bool {
        self.queues.as_mut().is_none_or(Queues::prepare_sleep)
    }

    fn next_request(&mut self) -> Option<FrontRequest> {
        None
    }

    fn deadline(&self) -> Option<Instant> {
        self.queues.as_ref().and_then(Queues::deadline)
    }

    fn stop(&mut self) {
        // A front end without a device removes its socket.
        self.seat = None;
        if let Some(queues) = &mut self.queues {
            queues.stop();
        }
    }

    fn abort(&mut self) {
        if let Some(queues) = &mut self.queues {
            queues.abort();
        }
    }

    fn is_idle(&self) -> bool {
        self.queues.as_ref().is_none_or(Queues::is_idle)
    }

    fn stats(&self) -> FrontEndStats {
        self.queues.as_ref().map(Queues::stats).unwrap_or_default()
    }

    /// A virtual machine reconnects by itself, and its requests in flight wait for that.
    fn may_clients_return(&self) -> bool {
        self.queues.as_ref().is_some_and(Queues::is_in_use)
    }

    fn complaint(&self) -> Option<Complaint> {
        let queues = self.queues.as_ref()?;
        let held = queues.is_held().then_some(Complaint::Held);
        held.or_else(|| queues.has_only_kicks().then_some(Complaint::Client(NOT_SHARED)))
    }

    fn clients(&self) -> Vec<FrontEndClient> {
        let monitor = self.queues.as_ref().and_then(Queues::monitor);
        let client = |pid| FrontEndClient::Machine(Some(pid).filter(|pid| *pid != 0));
        monitor.map(client).into_iter().collect()
    }
}
