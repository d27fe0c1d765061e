//! How connections end, and how completions reach them.
//!
//! The queue pair goes to error, a DREQ is sent to the peer, and the available completions are
//! taken. Then the reaper destroys the queue pair on another thread, because a driver may block.
//! Only after that the rest is reported as flushed, its memory is released, and `Closed` is
//! reported. So no end blocks a shard, and nothing lands after `Closed`.

use super::VerbsFabric;
use super::conn::{Conn, End, completion};
use super::device::{Destroyed, Report};
use crate::fabric::FabricEvent;
use crate::ids::QpNum;

impl VerbsFabric {
    /// Takes completions to their connections.
    pub(super) fn dispatch(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        for wc in completions.drain(..) {
            // Not of a queue pair that is gone.
            let Some(conn) = self.conns.get_mut(wc.tag.qp) else { continue };
            self.counters.bytes_received += u64::from(wc.byte_len);
            self.counters.bytes_direct += u64::from(wc.byte_len);
            let events = &mut self.events;
            let end = conn.on_completion(&wc, |event| events.push_back(event.into()));
            // What waited for that bind can go out.
            if wc.tag.bind && conn.qp.has_ready() && !std::mem::replace(&mut conn.dirty, true) {
                self.dirty.push(wc.tag.qp);
            }
            if let Some(end) = end
                && !std::mem::replace(&mut conn.dying, true)
            {
                self.dying.push((wc.tag.qp, end));
            }
        }
        self.completions = completions;
    }

    /// All completions that are there.
    pub(super) fn drain(&mut self) {
        for device in self.devices.iter_mut().flatten() {
            if let Err(error) = device.take_all(&mut self.completions) {
                tracing::error!(%error, device = device.context().name(), "cannot drain");
            }
        }
        self.dispatch();
    }

    /// Begins to take a connection down, once.
    pub(super) fn begin_end(&mut self, name: QpNum, end: End) {
        let Some(conn) = self.conns.get_mut(name).filter(|conn| conn.end.is_none()) else { return };
        conn.dying = true;
        let was_in_error = conn.was_up() && conn.qp.is_in_error();
        conn.end = Some((end, was_in_error));
        conn.deadline = None;
        // An error means that the device is gone, and the queue pair with it.
        let _ = conn.qp.enter_error();
        conn.port_down = conn.port_is_down();
        conn.dreq_sent = conn.peer_connected() && !conn.port_down && conn.id.disconnect().is_ok();
        self.settle(name);
        self.drain();
        if let Some(ending) = self.conns.get_mut(name).and_then(|conn| conn.qp.detach()) {
            let sender = self.sender.clone();
            self.shared.reaper.take(move || {
                let failed = ending.destroy().is_err();
                sender.send(Report::Destroyed(Destroyed { name, failed }));
            });
        }
    }

    /// The queue pair of a connection is gone: reports the connection's end.
    pub(super) fn complete_end(&mut self, gone: Destroyed) {
        let Destroyed { name, failed } = gone;
        self.drain();
        let Some(mut conn) = self.conns.remove(name) else { return };
        conn.qp.destroyed(failed);
        let events = &mut self.events;
        conn.qp.flush_rest(|posted| events.push_back(completion(name, posted).into()));
        let Some((end, was_in_error)) = conn.end.take() else { return };
        let end = conn.explain(end, was_in_error);
        self.release(&conn);
        let event = FabricEvent::ended(name, conn.was_up(), end);
        tracing::debug!(?event, "an RDMA connection ended");
        self.push(event);
        // A port that came up meanwhile may not be able to send yet.
        let (connected, port_down) = (conn.peer_connected(), conn.port_down || conn.port_is_down());
        let Conn { qp, id, peer_knows, dreq_sent, .. } = *conn;
        if port_down {
            let device = qp.pd().context().name().to_owned();
            self.dreqs.hold(self.now, id, device, connected && !peer_knows && !dreq_sent);
        } else if dreq_sent && !peer_knows {
            self.dreqs.sent(id, self.now + self.options.close_timeout);
        }
    }

    /// Takes down what is to be taken down.
    pub(super) fn take_down(&mut self) {
        while let Some((name, end)) = self.dying.pop() {
            self.begin_end(name, end);
        }
    }

    /// Takes a connection out that has not begun; its user got an error.
    pub(super) fn discard(&mut self, name: QpNum) {
        if let Some(mut conn) = self.conns.remove(name) {
            // A failure is logged there, and what was posted then keeps its memory.
            let _ = conn.qp.destroy();
            self.release(&conn);
        }
    }

    /// Gives back what a connection has besides its queue pair.
    fn release(&mut self, conn: &Conn) {
        self.by_id.remove(&conn.id.key());
        let context = conn.qp.pd().context().key();
        if let Some(device) = self.device_of(context) {
            device.release(conn.qp.cq(), conn.cq_entries);
        }
    }
}
