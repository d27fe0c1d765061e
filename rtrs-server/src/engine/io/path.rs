//! The part of a path on this shard: its connections here, its requests, and what it still does.

use std::sync::Arc;

use rtrs_core::fabric::FabricError;
use rtrs_core::ids::{ConnIndex, CoreIndex, PermitId};
use rtrs_core::limits::Limits;
use rtrs_core::time::Instant;

use super::permits::Holder;
use super::rows::Rows;
use super::table::ConnRow;
use crate::engine::message::{ControlMessage, EndReport, Outbox};
use crate::export::ExportIndex;
use crate::path::chunks::ChunkPool;
use crate::path::state::PathState;
use crate::path::{HEARD_EVERY, PathEnd, PathShared, PeerFault};
use crate::stats::ShardCounters;

/// What the path still does on this shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// It takes requests.
    Serving,
    /// It failed and the control shard knows: it takes no requests.
    Broken,
    /// It answers the requests that run.
    Finishing,
    /// It answers nothing.
    Closing,
}

#[derive(Debug)]
pub(super) struct LocalPath {
    pub(super) shared: Arc<PathShared>,
    pub(super) requests: Rows,
    limits: Limits,
    shard: CoreIndex,
    mode: Mode,
    conns: Vec<ConnRow>,
    /// Connection 0, if it lives here.
    service: Option<ConnRow>,
    /// Requests that have their permit, or had it when the path was closed and still run.
    inflight: u32,
    /// Which exports' devices on this shard know the path's chunks.
    attached: Vec<bool>,
    /// First binds of chunks that have not completed.
    first_binds: u16,
    heard_at: Instant,
    finished: bool,
}

impl LocalPath {
    pub(super) fn new(shared: Arc<PathShared>, shard: CoreIndex) -> Self {
        Self {
            limits: shared.session.limits,
            requests: Rows::new(shared.session.limits.queue_depth()),
            shared,
            shard,
            mode: Mode::Serving,
            conns: Vec::new(),
            service: None,
            inflight: 0,
            attached: Vec::new(),
            first_binds: 0,
            heard_at: Instant::ZERO,
            finished: false,
        }
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// Its session's queue depth and chunk size.
    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    pub(super) fn conns(&self) -> &[ConnRow] {
        &self.conns
    }

    pub(super) fn service(&self) -> Option<ConnRow> {
        self.service
    }

    pub(super) fn inflight(&self) -> u32 {
        self.inflight
    }

    /// What it did on this shard.
    pub(super) fn counters(&self) -> &ShardCounters {
        self.shared.counters.core(self.shard)
    }

    /// Its requests as holders of permits.
    pub(super) fn holder(&self) -> Holder {
        Holder { path: self.shared.key.0, core: self.shard }
    }

    /// The chunks. A path has them before its first request is taken.
    pub(super) fn chunks(&self) -> &ChunkPool {
        let chunks = self.shared.chunks.get();
        chunks.unwrap_or_else(|| panic!("path {} serves without chunks", self.shared.key))
    }

    pub(super) fn add_conn(&mut self, conn: ConnRow, cid: ConnIndex) {
        self.conns.push(conn);
        if cid.0 == 0 {
            self.service = Some(conn);
        }
    }

    pub(super) fn remove_conn(&mut self, conn: ConnRow) {
        self.conns.retain(|other| *other != conn);
        self.service.take_if(|service| *service == conn);
    }

    /// The peer sent something.
    pub(super) fn heard(&mut self, now: Instant) {
        if now.since(self.heard_at) >= HEARD_EVERY {
            self.heard_at = now;
            self.shared.note_heard(now);
        }
    }

    /// So many first binds have been posted, or one has completed. True when none is left.
    pub(super) fn first_binds(&mut self, posted: Option<u16>) -> bool {
        self.first_binds = posted.unwrap_or_else(|| self.first_binds.saturating_sub(1));
        self.first_binds == 0
    }

    /// True when the device of an export knows the chunks.
    pub(super) fn is_attached(&self, export: ExportIndex) -> bool {
        self.attached.get(export.index()).copied().unwrap_or_default()
    }

    pub(super) fn set_attached(&mut self, export: ExportIndex, attached: bool) {
        if let Some(known) = self.attached.get_mut(export.index()) {
            *known = attached;
        } else if attached {
            self.attached.resize(export.index() + 1, false);
            self.attached[export.index()] = true;
        }
    }

    /// True when a request may be taken now.
    pub(super) fn takes_requests(&mut self, out: &mut Outbox) -> bool {
        match (self.mode, self.shared.state()) {
            (Mode::Serving, PathState::Connected) => true,
            (Mode::Serving, PathState::Connecting) => {
                self.violation(PeerFault::Early, out);
                false
            }
            _ => false,
        }
    }

    /// True when a request that waited may begin. On a path that failed nothing begins: the path
    /// is about to be closed.
    pub(super) fn may_begin(&self) -> bool {
        matches!(self.mode, Mode::Serving | Mode::Finishing)
    }

    /// A request has its permit.
    pub(super) fn begin_request(&mut self) {
        self.inflight += 1;
        self.counters().inflight.add(1);
    }

    /// A request has ended.
    pub(super) fn end_request(&mut self) {
        self.inflight -= 1;
        self.counters().inflight.sub(1);
    }

    /// A request gives its permit back.
    pub(super) fn release_permit(&self, permit: PermitId) {
        self.shared.release_permit(permit, self.holder());
    }

    /// Reports to the control shard, once, that the path cannot go on.
    pub(super) fn fail(&mut self, end: PathEnd, out: &mut Outbox) {
        if self.may_begin() {
            self.mode = Mode::Broken;
            out.control(ControlMessage::Broken { path: self.shared.key, end });
        }
    }

    pub(super) fn fail_by_fabric(&mut self, error: &FabricError, out: &mut Outbox) {
        self.fail(PathEnd::Fabric(error.to_string()), out);
    }

    /// The peer broke the protocol.
    pub(super) fn violation(&mut self, fault: PeerFault, out: &mut Outbox) {
        self.fail(PathEnd::Peer(fault), out);
    }

    /// Something happened that cannot: counts it and ends the path.
    pub(super) fn internal_error(&mut self, what: &'static str, out: &mut Outbox) {
        tracing::error!(path = %self.shared.key, what, "internal error; the path ends");
        self.counters().internal_errors.add(1);
        self.fail(PathEnd::Internal(what), out);
    }

    /// Reports to the control shard how far its end is here.
    pub(super) fn report(&self, report: EndReport, out: &mut Outbox) {
        out.control(ControlMessage::Ending { path: self.shared.key, core: self.shard, report });
    }

    /// Takes no new requests.
    pub(super) fn finish(&mut self) {
        if self.mode == Mode::Serving {
            self.mode = Mode::Finishing;
        }
    }

    /// Answers nothing more.
    pub(super) fn close(&mut self) {
        self.mode = Mode::Closing;
    }

    /// True when a request waits for, or runs at, the device of an export.
    pub(super) fn has_io_at(&self, export: ExportIndex) -> bool {
        self.requests.iter().filter_map(|(_, request)| request.io()).any(|io| io.export == export)
    }

    /// True when nothing of it is left here, so that its row can go. Reports to the control
    /// shard when it has finished.
    pub(super) fn is_over(&mut self, out: &mut Outbox) -> bool {
        if self.inflight > 0 {
            return false;
        }
        if self.mode == Mode::Finishing && !self.finished {
            self.finished = true;
            self.report(EndReport::Finished, out);
        }
        self.mode == Mode::Closing && self.conns.is_empty()
    }
}
