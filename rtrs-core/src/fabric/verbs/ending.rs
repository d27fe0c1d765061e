//! Takes down connections and dispatches completions.
//!
//! The shard takes the available completions and hands over the queue pair (`teardown.rs`): other
//! threads put it in the error state, send a DREQ to the peer and destroy it, because drivers may
//! block in each call. Completions arrive until the queue pair is destroyed. After that, the
//! remaining work is reported as flushed, its memory is released, and `Closed` is reported. Ending
//! a connection thus never blocks a shard, and nothing writes to the memory after `Closed`.

use std::sync::Arc;

use super::VerbsFabric;
use super::conn::{End, Last, VerbsConn, completion};
use super::device::{Destroyed, Report};
use super::dreq::PortName;
use super::teardown::{self, Link, Progress};
use crate::fabric::FabricEvent;
use crate::ids::QpNum;

impl VerbsFabric {
    /// Dispatches completions to their connections.
    pub(super) fn dispatch(&mut self) {
        let mut completions = self.devices.take_completions();
        for wc in completions.drain(..) {
            // Skip completions for queue pairs that no longer exist.
            let Some(conn) = self.conns.get_mut(wc.tag.qp) else { continue };
            self.counters.bytes_received += u64::from(wc.byte_len);
            self.counters.bytes_direct += u64::from(wc.byte_len);
            let events = &mut self.events;
            let end = conn.on_completion(&wc, |event| events.push_back(event));
            // Work that waited for this bind can be posted.
            if wc.tag.bind && conn.qp.has_ready() && !std::mem::replace(&mut conn.dirty, true) {
                self.dirty.push(wc.tag.qp);
            }
            if let Some(end) = end
                && !std::mem::replace(&mut conn.dying, true)
            {
                self.dying.push((wc.tag.qp, end));
            }
        }
        self.devices.reuse_list(completions);
    }

    /// Takes and dispatches all available completions.
    pub(super) fn drain(&mut self) {
        self.devices.drain();
        self.dispatch();
    }

    /// Starts to take a connection down; further calls do nothing.
    pub(super) fn begin_end(&mut self, name: QpNum, end: End) {
        self.tear_down(name, Last::Report(end));
    }

    fn tear_down(&mut self, name: QpNum, last: Last) {
        let Some(conn) = self.conns.get_mut(name).filter(|conn| conn.end.is_none()) else { return };
        conn.dying = true;
        conn.end = Some(last);
        conn.deadline = None;
        let progress = Progress { up: conn.was_up(), peer_connected: conn.peer_connected() };
        let (id, port) = (Arc::clone(&conn.id), conn.id.port_number());
        if let Some(ending) = conn.qp.detach() {
            let sender = self.reports.sender();
            let (calls, reaper) = (&self.shared.calls, &self.shared.reaper);
            teardown::start(calls, reaper, Link { ending, id, port }, progress, move |torn| {
                sender.send(Report::Destroyed(Destroyed { name, torn }));
            });
        }
        self.settle(name);
        self.drain();
    }

    /// Reports the end of a connection whose queue pair has been destroyed.
    pub(super) fn complete_end(&mut self, gone: Destroyed) {
        let Destroyed { name, torn } = gone;
        self.drain();
        let Some(mut conn) = self.conns.remove(name) else { return };
        conn.qp.destroyed(torn.failed);
        self.release(&conn);
        // A connection that was never started has no posted work that its user knows about.
        let Some(Last::Report(end)) = conn.end.take() else { return };
        let events = &mut self.events;
        conn.qp.flush_rest(|posted| events.push_back(completion(name, posted)));
        let end = conn.explain(end, torn.was_in_error);
        let event = FabricEvent::ended(name, conn.was_up(), end);
        tracing::debug!(?event, "an RDMA connection ended");
        self.push(event);
        let connected = conn.peer_connected();
        let repeat_for = self.options.close_timeout;
        let VerbsConn { qp, id, peer_knows, .. } = *conn;
        if torn.port_down {
            let device = qp.pd().context().name().to_owned();
            let port = PortName { device, number: id.port_number() };
            let needs_dreq = connected && !peer_knows && !torn.dreq_sent;
            self.shared.dreqs.hold(id, port, needs_dreq, repeat_for);
        } else if torn.dreq_sent && !peer_knows {
            self.shared.dreqs.sent(id, repeat_for);
        }
    }

    /// Takes down the queued connections.
    pub(super) fn take_down(&mut self) {
        while let Some((name, end)) = self.dying.pop() {
            self.begin_end(name, end);
        }
    }

    /// Removes a connection that was never started; its user received an error.
    pub(super) fn discard(&mut self, name: QpNum) {
        self.tear_down(name, Last::Nothing);
    }

    /// Releases everything that a connection holds besides its queue pair.
    fn release(&mut self, conn: &VerbsConn) {
        self.by_id.remove(&conn.id.key());
        let context = conn.qp.pd().context().key();
        if let Some(device) = self.devices.of(context) {
            device.release(conn.qp.cq(), conn.cq_entries);
        }
    }
}
