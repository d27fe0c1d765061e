//! The workloads of a run, and what they are told.

use rtrs_core::block::IoOp;

use super::super::workload::{Mode, Workload};
use super::second::Second;
use super::{Cluster, guest};

impl Cluster {
    /// What the workloads do from now on.
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

    /// The workload of the second session, where it has one. Its core is to turn.
    pub(super) fn guest_work(&mut self) -> Option<&mut Workload> {
        let guest = self.guest.as_mut()?;
        guest.pace.due = true;
        guest.work_mut()
    }

    /// Lets one core read the whole disk.
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

    /// No IO may fail for want of a path from now on.
    pub(in super::super) fn expect_no_errors(&mut self) {
        self.client.iter_mut().for_each(|host| host.work.is_calm = true);
        if let Some(work) = self.guest_work() {
            work.is_calm = true;
        }
        if let Some(second) = &mut self.second {
            second.expect_no_errors();
        }
    }

    /// Has an IO done on a core.
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

    /// All of them, those included whose client is gone.
    pub(in super::super) fn workloads(&self) -> impl Iterator<Item = &Workload> {
        let guest = self.guest.iter().filter_map(guest::Guest::work);
        let second = self.second.iter().flat_map(Second::works);
        self.client.iter().map(|host| &host.work).chain(&self.works).chain(guest).chain(second)
    }
}
