//! Workload of a virtual machine: the guest lives on when its client dies, with its requests in
//! the rings.

use rtrs_client::SessionDevice;
use rtrs_core::block::{Geometry, IoOp};

use super::super::Failure;
use super::super::machine::{Front, Machine, buffer_bytes};
use super::{Used, Workload};

impl Workload {
    /// Makes the workload the driver of a machine's ring.
    pub(in super::super) fn with_machine(mut self, machine: Option<&Machine>) -> Self {
        self.machine = machine.map(|machine| Box::new(Front::new(machine, self.core)));
        self
    }

    /// Opens the device with the front end of the machine. Returns the device if there is none.
    pub(super) fn open_machine(&mut self, device: SessionDevice) -> Option<SessionDevice> {
        let Some(mut front) = self.machine.take() else { return Some(device) };
        front.start(device);
        self.device = Some(Used::Machine(front));
        None
    }

    /// Ends the client of the machine. Returns false if the user is no machine.
    pub(super) fn leave_machine(&mut self) -> bool {
        if let Some(Used::Machine(mut front)) = self.device.take() {
            front.stop();
            self.machine = Some(front);
        }
        self.machine.is_some()
    }

    /// Returns the violation that the machine's driver has found.
    pub(super) fn judge_machine(&mut self) -> Result<(), Failure> {
        let Some(Used::Machine(front)) = &mut self.device else { return Ok(()) };
        front.take_failure().map_or(Ok(()), Err)
    }

    /// Whether a front end is between the workload and its session.
    pub(super) fn is_fronted(&self) -> bool {
        self.nbd || self.way.machine.is_some()
    }

    /// Whether an IO is durable when it ends. Over NBD, users of a device without FUA flush after a
    /// write instead. A guest without a write cache expects that all its changes are durable.
    pub(super) fn is_durable(&self, op: IoOp, fua: bool, geometry: &Geometry) -> bool {
        match self.way.machine {
            Some(machine) => machine.through && op.changes(),
            None => fua && (!self.nbd || geometry.fua),
        }
    }

    /// Returns the bytes of the machine's front end, if the user is a machine.
    pub(super) fn machine_bytes(&self) -> Option<usize> {
        self.way.machine.map(buffer_bytes)
    }
}
