//! How connections end, and how completions reach them.
//!
//! The queue pair goes to error, the peer is told goodbye, the completions that are there are
//! taken. Then the reaper destroys the queue pair on another thread, since a driver may take its
//! time; only after that is the rest reported as flushed, its memory let go, and `Closed` said. So
//! no end makes a core wait, and nothing lands after `Closed`.

use super::VerbsFabric;
use super::conn::{Conn, End, completion};
use super::device::{Gone, Report};
use crate::fabric::{CloseReason, ConnectFailure, FabricEvent};
use crate::ids::QpNum;

impl VerbsFabric {
    /// Takes completions to their connections.
    pub(super) fn dispatch(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        for wc in completions.drain(..) {
            let slot = (wc.tag.qp.0 & 0xffff) as usize;
            // Of a queue pair that is gone.
            if self.generations.get(slot).is_none_or(|g| u32::from(*g) != wc.tag.qp.0 >> 16) {
                continue;
            }
            let Some(conn) = self.conns[slot].as_deref_mut() else { continue };
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
        for device in &mut self.devices {
            if let Err(error) = device.take_all(&mut self.completions) {
                tracing::error!(%error, device = device.context().name(), "cannot drain");
            }
        }
        self.dispatch();
    }

    /// Begins to take a connection down, once.
    pub(super) fn finish(&mut self, name: QpNum, end: End) {
        let Some(conn) = self.conn(name).filter(|conn| conn.leaving.is_none()) else { return };
        conn.dying = true;
        let was_in_error = conn.was_up() && conn.qp.is_in_error();
        conn.leaving = Some((end, was_in_error));
        conn.deadline = None;
        // An error means that the device is gone, and the queue pair with it.
        let _ = conn.qp.enter_error();
        conn.muted = conn.port_is_down();
        conn.parted = conn.was_greeted() && !conn.muted && conn.id.disconnect().is_ok();
        self.settle(name);
        self.drain();
        if let Some(ending) = self.conn(name).and_then(|conn| conn.qp.detach()) {
            let mail = self.mail.clone();
            self.shared.reaper.take(move || {
                let failed = ending.destroy().is_err();
                mail.send(Report::Gone(Gone { name, failed }));
            });
        }
    }

    /// The queue pair of a connection is gone: reports the connection's end.
    pub(super) fn bury(&mut self, gone: Gone) {
        let Gone { name, failed } = gone;
        self.drain();
        let slot = (name.0 & 0xffff) as usize;
        let Some(conn) = self.conn(name) else { return };
        conn.qp.destroyed(failed);
        let Some(mut conn) = self.conns[slot].take() else { return };
        let events = &mut self.events;
        conn.qp.flush_rest(|posted| events.push_back(completion(name, posted).into()));
        let Some((end, was_in_error)) = conn.leaving.take() else { return };
        let end = conn.explain(end, was_in_error);
        self.by_id.remove(&conn.id.key());
        self.forget_name(name);
        if let Some(device) =
            self.devices.iter_mut().find(|d| d.context().key() == conn.qp.pd().context().key())
        {
            device.release(conn.qp.cq(), conn.places);
        }
        let event = match (conn.was_up(), end) {
            (false, failure) => FabricEvent::ConnectFailed { qp: name, failure },
            (true, ConnectFailure::Failed(reason)) => FabricEvent::Closed { qp: name, reason },
            (true, ConnectFailure::Rejected(_)) => {
                FabricEvent::Closed { qp: name, reason: CloseReason::Peer }
            }
        };
        tracing::debug!(?event, "an RDMA connection ended");
        self.push(event);
        // A port that came up meanwhile may not be able to send yet.
        let (greeted, muted) = (conn.was_greeted(), conn.muted || conn.port_is_down());
        let Conn { qp, id, told, parted, .. } = *conn;
        if muted {
            let device = qp.pd().context().name().to_owned();
            self.goodbyes.hold(self.now, id, device, greeted && !told && !parted);
        } else if parted && !told {
            self.goodbyes.said(id, self.now + self.options.close_timeout);
        }
    }

    /// Takes down what is to be taken down.
    pub(super) fn take_down(&mut self) {
        while let Some((name, end)) = self.dying.pop() {
            self.finish(name, end);
        }
    }

    /// Takes a connection out that has not begun; its user was told by an error.
    pub(super) fn discard(&mut self, name: QpNum) {
        let slot = (name.0 & 0xffff) as usize;
        let Some(mut conn) = self.conns[slot].take() else { return };
        if let Some(at) = conn.armed {
            self.timers.remove(&(at, name.0));
        }
        self.by_id.remove(&conn.id.key());
        let _ = conn.qp.destroy();
        let context = conn.qp.pd().context().key();
        if let Some(device) = self.devices.iter_mut().find(|d| d.context().key() == context) {
            device.release(conn.qp.cq(), conn.places);
        }
        self.forget_name(name);
    }
}
