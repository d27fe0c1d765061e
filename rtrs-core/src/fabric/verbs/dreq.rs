//! Identifiers of ended connections whose disconnect request (DREQ) is not confirmed.
//!
//! The kernel repeats a DREQ as long as its identifier lives. While the port is down none may be
//! sent: a management datagram that rdma_rxe of Linux 6.1 cannot send puts its
//! management queue pair in error for good (rxe_req.c, `rxe_requester`; rxe_qp.c, `rxe_qp_error`),
//! and the device takes no connection of any program any more. Dropping an identifier sends
//! a DREQ too. So those of a port that is down are kept until it has been up for a while, and then
//! released in order.

use super::info::port_is_down;
use super::sys::{CmId, IdKey};
use crate::time::{Duration, Instant};

/// How often ports that are down are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// How long a port has to be up before a DREQ is sent over it: addresses and routes come after
/// the link, and without them the datagram cannot be sent either.
const SETTLE: Duration = Duration::from_secs(15);
/// How long one that is down is waited for. Peers have forgotten the connection by then.
const HELD_TIME_MAX: Duration = Duration::from_secs(3600);
/// Identifiers kept for ports that are down; the oldest goes for one more.
const HELD_MAX: usize = 4096;

/// An identifier that waits to be released.
#[derive(Debug)]
struct PendingDreq {
    id: CmId,
    until: Instant,
    /// Waits for this device to have its port up; no DREQ was sent.
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    device: String,
    /// The peer knows the connection, so it needs a DREQ.
    peer_connected: bool,
    give_up: Instant,
    /// The port was up at the last look.
    up: bool,
}

/// All of a shard.
#[derive(Debug, Default)]
pub(super) struct PendingDreqs {
    all: Vec<PendingDreq>,
}

impl PendingDreqs {
    /// Keeps an identifier whose DREQ was sent until the peer confirms it.
    pub(super) fn sent(&mut self, id: CmId, until: Instant) {
        self.all.push(PendingDreq { id, until, held: None });
    }

    /// Keeps an identifier whose port is down.
    pub(super) fn hold(&mut self, now: Instant, id: CmId, device: String, peer_connected: bool) {
        if self.all.iter().filter(|one| one.held.is_some()).count() >= HELD_MAX
            && let Some(oldest) = self.all.iter().position(|one| one.held.is_some())
        {
            self.all.remove(oldest);
        }
        let held = Held { device, peer_connected, give_up: now + HELD_TIME_MAX, up: false };
        self.all.push(PendingDreq { id, until: now + LOOK, held: Some(held) });
    }

    /// The peer confirmed, or the kernel gave up.
    pub(super) fn done(&mut self, id: IdKey) {
        self.all.retain(|one| one.id.key() != id || one.held.is_some());
    }

    /// Releases what is due. `repeat_for` is how long a DREQ that is sent now is repeated.
    pub(super) fn poll(&mut self, now: Instant, repeat_for: Duration) {
        if self.deadline().is_none_or(|at| now < at) {
            return;
        }
        // Most of those that wait, wait for the same port.
        let mut known: Option<(String, u8, bool)> = None;
        self.all.retain_mut(|one| {
            if one.until > now {
                return true;
            }
            let Some(held) = &mut one.held else { return false };
            let port = one.id.port_number();
            let down = match &known {
                Some((device, number, down)) if *device == held.device && *number == port => *down,
                _ => port_is_down(&held.device, port),
            };
            known = Some((held.device.clone(), port, down));
            if down && now < held.give_up {
                (held.up, one.until) = (false, now + LOOK);
                return true;
            }
            if !down && !std::mem::replace(&mut held.up, true) {
                one.until = now + SETTLE;
                return true;
            }
            let sent = !down && held.peer_connected && one.id.disconnect().is_ok();
            one.held = None;
            one.until = now + repeat_for;
            sent
        });
    }

    /// When to be polled.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.all.iter().map(|one| one.until).min()
    }
}
