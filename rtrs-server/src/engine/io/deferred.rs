//! Requests that wait for others: `Parked` for the permit, which its last holder still has on a
//! path that is not closed (`permits.rs`), `Barred` for what a closed path has left running where
//! they are to write (`overlap.rs`).
//!
//! What they wait for may end on any core, and nobody tells. So a core that has such a request
//! looks again in each turn, and every millisecond when nothing else happens. One that is parked
//! has no permit, and is dropped when its path finishes; one that is barred has its permit, counts
//! as in flight, and is dropped when its path closes.

use std::mem;
use std::ptr;

use rtrs_core::ids::PermitId;
use rtrs_core::time::Duration;

use super::overlap::Stray;
use super::permits::Claim;
use super::request::{IoProgress, Request, RequestState};
use super::{Fabrics, PathRow, RowMode, Shard};
use crate::engine::io::devices::RequestRef;
use crate::engine::message::{ControlMail, Outbox};
use crate::path::{PathEnd, PathKey, PeerFault};

/// How often requests that wait for others are looked at when nothing else happens.
pub(super) const PARKED_EVERY: Duration = Duration::from_millis(1);

impl Shard {
    /// Takes the permit, or parks the request behind the one that has it.
    pub(super) fn claim(
        &mut self,
        row: u32,
        permit: PermitId,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let core = self.core;
        let Some(path) = self.path(row) else { return };
        let holder = self.holder(path);
        let claim = path.shared.session.permits.claim(permit, holder);
        let Some(path) = self.path_mut(row) else { return };
        let request = &mut path.requests[permit.index()];
        match claim {
            Claim::Granted => {
                path.inflight += 1;
                path.shared.counters.core(core).inflight.add(1);
                self.revoke(row, permit, fabrics, out);
            }
            Claim::Own => {
                request.go(RequestState::Free);
                let fault = PeerFault::PermitReused(permit.0);
                self.break_path(row, PathEnd::Peer(fault), out);
            }
            Claim::Other(original) => {
                if request.state() == RequestState::Arrived {
                    request.go(RequestState::Parked);
                    request.copy = true;
                    path.shared.counters.core(core).replays.add(1);
                    // The answer was never sent, so the client gave the other path up: nothing
                    // that is still on its way there may run after what comes here.
                    let end = PathEnd::Superseded(path.shared.key);
                    out.control(ControlMail::Broken { path: PathKey(original.path), end });
                }
                self.parked.push(RequestRef { path: row, permit });
            }
        }
    }

    /// An IO may begin now, or waits for what a closed path has left running in its place.
    pub(super) fn start_io(
        &mut self,
        row: u32,
        permit: PermitId,
        io: IoProgress,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let barred = self.is_barred(&io);
        let Some(path) = self.path_mut(row) else { return };
        path.requests[permit.index()].io = Some(io);
        if barred {
            self.bar(row, permit, &io);
        } else {
            self.begin_io(row, permit, io.export, fabrics, out);
        }
    }

    fn bar(&mut self, row: u32, permit: PermitId, io: &IoProgress) {
        self.parked.push(RequestRef { path: row, permit });
        let core = self.core;
        let Some(path) = self.paths.get_mut(row as usize).and_then(Option::as_deref_mut) else {
            return;
        };
        let request = &mut path.requests[permit.index()];
        request.go(RequestState::Barred);
        let counters = path.shared.counters.core(core);
        counters.barred.add(1);
        // Its client has sent it again; or has given up what had the permit before.
        let session = path.shared.session.id;
        let original = |stray: &Stray| {
            (stray.session, stray.permit) == (session, permit) && stray.touches(&io.bytes())
        };
        let strays = self.devices.strays(io.export);
        if !request.copy && strays.is_some_and(|strays| strays.any(original)) {
            request.copy = true;
            counters.replays.add(1);
        }
        tracing::debug!(
            path = %path.shared.key,
            %permit,
            bytes = ?io.bytes(),
            "waits for what a closed path has left running there"
        );
    }

    /// True when a stray may still change what this IO is to change. One load, as a rule.
    fn is_barred(&self, io: &IoProgress) -> bool {
        let strays = self.devices.strays(io.export).filter(|strays| !strays.is_empty());
        let waits = io.changes() && !rtrs_core::mutated!(DeferredBegins);
        strays.is_some_and(|strays| waits && strays.touch(&io.bytes()))
    }

    /// Tries again for every request that waits. True when one got on.
    pub(super) fn look_at_parked(&mut self, fabrics: &mut Fabrics, out: &mut Outbox) -> bool {
        let before = self.parked.len();
        for at in mem::take(&mut self.parked) {
            let Some(path) = self.path(at.path) else { continue };
            let Some(request) = path.requests.get(at.permit.index()) else { continue };
            match (request.state(), request.io) {
                (RequestState::Parked, _) => self.claim(at.path, at.permit, fabrics, out),
                (RequestState::Barred, Some(io)) => {
                    // Of a path that went wrong nothing is begun; it is about to be closed.
                    let begins = matches!(path.mode, RowMode::Serving | RowMode::Finishing);
                    if !begins || self.is_barred(&io) {
                        self.parked.push(at);
                    } else {
                        self.unbar(at, &io, fabrics, out);
                    }
                }
                _ => {}
            }
        }
        self.parked.len() < before
    }

    fn unbar(&mut self, at: RequestRef, io: &IoProgress, fabrics: &mut Fabrics, out: &mut Outbox) {
        let RequestRef { path: row, permit } = at;
        self.count_unbarred(row);
        // Nothing kept the device open meanwhile.
        match self.ready_device(row, io.export) {
            Ok(()) => self.begin_io(row, permit, io.export, fabrics, out),
            Err(errno) => self.finish(row, permit, errno, fabrics, out),
        }
    }

    /// A request of the path does not wait for a stray any more.
    pub(super) fn count_unbarred(&self, row: u32) {
        if let Some(path) = self.path(row) {
            path.shared.counters.core(self.core).barred.sub(1);
        }
    }

    /// Panics when what a request waits for, or leaves others to wait for, is not known as such.
    pub(super) fn check_wait(&self, row: &PathRow, permit: PermitId, request: &Request) {
        let (closing, key) = (row.mode == RowMode::Closing, row.shared.key);
        match request.state() {
            RequestState::Parked | RequestState::Barred => {
                let waits = self.parked.iter().any(|at| {
                    at.permit == permit && self.path(at.path).is_some_and(|p| ptr::eq(p, row))
                });
                assert!(waits && !closing, "nobody looks at {request:?} of {permit}");
            }
            RequestState::Submitted if closing => {
                let io = request.io.filter(|io| io.may_change().is_some());
                let known = io.is_none_or(|io| {
                    let strays = self.devices.strays(io.export);
                    let own = |stray: &Stray| (stray.path, stray.permit) == (key, permit);
                    strays.is_some_and(|strays| strays.any(own))
                });
                assert!(known, "{request:?} of {permit} is no stray");
            }
            _ => {}
        }
    }

    /// The path finishes or closes: its copies go, and when it closes, changes that wait leave the
    /// list; `abandon_requests` ends them.
    pub(super) fn drop_parked(&mut self, row: u32) {
        let mut parked = mem::take(&mut self.parked);
        if let Some(path) = self.path_mut(row) {
            let closing = path.mode == RowMode::Closing;
            parked.retain(|at| {
                if at.path != row {
                    return true;
                }
                let request = &mut path.requests[at.permit.index()];
                if request.state() == RequestState::Parked {
                    request.go(RequestState::Free);
                    return false;
                }
                !closing
            });
        }
        self.parked = parked;
    }
}
