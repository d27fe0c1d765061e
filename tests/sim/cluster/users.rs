//! Control over the workloads of a run.

use rtrs_core::block::IoOp;

use super::super::workload::{Mode, Workload};
use super::second::Second;
use super::{Cluster, guest};

impl Cluster {
    /// Sets the mode of the workloads.
    pub(in super::super) fn set_mode(&mut self, mode: Mode) {
        self.is_loaded = mode == Mode::Load;
        for host in &mut self.client {
            host.work.mode = mode;
            host.pace.due = true;
        }
        for work in &mut self.works {
            work.mode = mode;
        }
        if let Some(work) = self.guest_work() {
            work.mode = mode;
        }
        if let Some(second) = &mut self.second {
            second.set_mode(mode);
        }
    }

    /// Returns the workload of the second session, if it has one, and marks its core as due.
    pub(super) fn guest_work(&mut self) -> Option<&mut Workload> {
        let guest = self.guest.as_mut()?;
        guest.pace.due = true;
        guest.work_mut()
    }

    /// Makes one core read the whole disk.
    pub(in super::super) fn read_back(&mut self, core: usize) {
        let at = core % self.client.len();
        self.client[at].work.mode = Mode::ReadBack(0);
        self.client[at].pace.due = true;
        if let Some(work) = self.guest_work() {
            work.mode = Mode::ReadBack(0);
        }
        if let Some(second) = &mut self.second {
            second.read_back(at);
        }
    }

    /// Forbids IO errors for lack of a path from now on.
    pub(in super::super) fn expect_no_errors(&mut self) {
        self.client.iter_mut().for_each(|host| host.work.is_calm = true);
        if let Some(work) = self.guest_work() {
            work.is_calm = true;
        }
        if let Some(second) = &mut self.second {
            second.expect_no_errors();
        }
    }

    /// Performs one IO on a core.
    pub(in super::super) fn order(
        &mut self,
        core: usize,
        op: IoOp,
        sector: u32,
        count: u32,
        fua: bool,
    ) {
        let at = core % self.client.len();
        self.client[at].work.order(op, sector, count, fua);
        self.client[at].pace.due = true;
    }

    /// Returns all workloads, including those without a client.
    pub(in super::super) fn workloads(&self) -> impl Iterator<Item = &Workload> {
        let guest = self.guest.iter().filter_map(guest::Guest::work);
        let second = self.second.iter().flat_map(Second::works);
        self.client.iter().map(|host| &host.work).chain(&self.works).chain(guest).chain(second)
    }
}
