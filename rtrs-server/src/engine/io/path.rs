//! This shard's part of a path: its connections, its requests and its mode.

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

/// Mode of the path on this shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Accepts requests.
    Serving,
    /// Failed and reported to the control shard; accepts no requests.
    Broken,
    /// Answers only running requests and closes of devices.
    Finishing,
    /// Answers nothing.
    Closing,
}

/// New requests that a path accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accepts {
    All,
    /// Closes of devices. A client sends one to test a connection whose requests take a long time.
    Closes,
    Nothing,
}

#[derive(Debug)]
pub(super) struct LocalPath {
    pub(super) shared: Arc<PathShared>,
    pub(super) requests: Rows,
    limits: Limits,
    shard: CoreIndex,
    mode: Mode,
    conns: Vec<ConnRow>,
    /// Connection 0, if it is on this shard.
    service: Option<ConnRow>,
    /// Number of requests that hold their permits, or held them when the path was closed and are
    /// still running.
    inflight: u32,
    /// Exports whose devices on this shard have registered the path's chunks.
    attached: Vec<bool>,
    /// Number of outstanding first binds of chunks.
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

    /// Whether requests on the path are still answered.
    pub(super) fn answers(&self) -> bool {
        self.mode != Mode::Closing
    }

    /// Queue depth and chunk size of the session.
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

    /// Counters of the path on this shard.
    pub(super) fn counters(&self) -> &ShardCounters {
        self.shared.counters.core(self.shard)
    }

    /// Identity under which the path's requests on this shard hold permits.
    pub(super) fn holder(&self) -> Holder {
        Holder { path: self.shared.key.0, core: self.shard }
    }

    /// Chunks of the path, which exist before its first request is accepted.
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

    /// Records that the peer sent data.
    pub(super) fn heard(&mut self, now: Instant) {
        if now.since(self.heard_at) >= HEARD_EVERY {
            self.heard_at = now;
            self.shared.note_heard(now);
        }
    }

    /// Sets the number of posted first binds, or counts a completed bind. Returns whether none are
    /// left.
    pub(super) fn first_binds(&mut self, posted: Option<u16>) -> bool {
        self.first_binds = posted.unwrap_or_else(|| self.first_binds.saturating_sub(1));
        self.first_binds == 0
    }

    /// Whether the device of an export has registered the chunks.
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

    /// Returns which new requests are currently accepted.
    pub(super) fn accepts(&mut self, out: &mut Outbox) -> Accepts {
        match (self.mode, self.shared.state()) {
            (Mode::Serving, PathState::Connected) => Accepts::All,
            (Mode::Serving, PathState::Connecting) => {
                self.violation(PeerFault::Early, out);
                Accepts::Nothing
            }
            (Mode::Serving | Mode::Finishing, PathState::Finishing) => Accepts::Closes,
            _ => Accepts::Nothing,
        }
    }

    /// Whether a waiting request may begin. No request begins on a failed path, which is about to
    /// be closed.
    pub(super) fn may_begin(&self) -> bool {
        matches!(self.mode, Mode::Serving | Mode::Finishing)
    }

    /// Counts a request that has obtained its permit.
    pub(super) fn begin_request(&mut self) {
        self.inflight += 1;
        self.counters().inflight.add(1);
    }

    /// Counts the end of a request.
    pub(super) fn end_request(&mut self) {
        self.inflight -= 1;
        self.counters().inflight.sub(1);
    }

    /// Releases the permit of a request.
    pub(super) fn release_permit(&self, permit: PermitId) {
        self.shared.release_permit(permit, self.holder());
    }

    /// Reports the failure of the path to the control shard, once.
    pub(super) fn fail(&mut self, end: PathEnd, out: &mut Outbox) {
        if self.may_begin() {
            self.mode = Mode::Broken;
            out.control(ControlMessage::Broken { path: self.shared.key, end });
        }
    }

    pub(super) fn fail_by_fabric(&mut self, error: &FabricError, out: &mut Outbox) {
        self.fail(PathEnd::Fabric(error.to_string()), out);
    }

    /// Ends the path because the peer violated the protocol.
    pub(super) fn violation(&mut self, fault: PeerFault, out: &mut Outbox) {
        self.fail(PathEnd::Peer(fault), out);
    }

    /// Counts an impossible state and ends the path.
    pub(super) fn internal_error(&mut self, what: &'static str, out: &mut Outbox) {
        tracing::error!(path = %self.shared.key, what, "internal error; the path ends");
        self.counters().internal_errors.add(1);
        self.fail(PathEnd::Internal(what), out);
    }

    /// Reports the progress of the path's shutdown on this shard to the control shard.
    pub(super) fn report(&self, report: EndReport, out: &mut Outbox) {
        out.control(ControlMessage::Ending { path: self.shared.key, core: self.shard, report });
    }

    /// Stops accepting requests.
    pub(super) fn finish(&mut self) {
        if self.mode == Mode::Serving {
            self.mode = Mode::Finishing;
        }
    }

    /// Stops answering.
    pub(super) fn close(&mut self) {
        self.mode = Mode::Closing;
    }

    /// Whether a request is waiting for the device of an export, or is running there.
    pub(super) fn has_io_at(&self, export: ExportIndex) -> bool {
        self.requests.iter().filter_map(|(_, request)| request.io()).any(|io| io.export == export)
    }

    /// Whether nothing of the path remains here, so that its row can be removed. If so, reports to
    /// the control shard that the path has finished.
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
