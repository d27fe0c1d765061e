//! Identifiers of connections that have ended and whose goodbye is not through.
//!
//! The kernel repeats a goodbye (DREQ) as long as its identifier lives. While the port is down it
//! must not be said at all: a management datagram that rdma_rxe of Linux 6.1 cannot send puts its
//! management queue pair in error for good (rxe_req.c, `rxe_requester`; rxe_qp.c, `rxe_qp_error`),
//! and the device takes no connection of any program any more. Dropping an identifier says goodbye
//! too. So those of a port that is down are kept until it has been up for a while, and then let go
//! in order.

use super::info::port_is_down;
use super::sys::{CmId, IdKey};
use crate::time::{Duration, Instant};

/// How often ports that are down are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// How long a port has to be up before anything is said over it: addresses and routes come after
/// the link, and without them the datagram cannot be sent either.
const SETTLE: Duration = Duration::from_secs(15);
/// How long one that is down is waited for. Peers have forgotten the connection by then.
const HELD_TIME_MAX: Duration = Duration::from_secs(3600);
/// Identifiers kept for ports that are down; the oldest goes for one more.
const HELD_MAX: usize = 4096;

/// An identifier on its way out.
#[derive(Debug)]
struct Goodbye {
    id: CmId,
    until: Instant,
    /// Waits for this device to have its port up; the goodbye is not said.
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    device: String,
    /// The peer knows the connection and has to hear that it is over.
    greeted: bool,
    give_up: Instant,
    /// The port was up at the last look.
    up: bool,
}

/// All of a core.
#[derive(Debug, Default)]
pub(super) struct Goodbyes {
    all: Vec<Goodbye>,
}

impl Goodbyes {
    /// Keeps an identifier whose goodbye was said until the peer has confirmed it.
    pub(super) fn said(&mut self, id: CmId, until: Instant) {
        self.all.push(Goodbye { id, until, held: None });
    }

    /// Keeps an identifier whose port is down.
    pub(super) fn hold(&mut self, now: Instant, id: CmId, device: String, greeted: bool) {
        if self.all.iter().filter(|one| one.held.is_some()).count() >= HELD_MAX
            && let Some(oldest) = self.all.iter().position(|one| one.held.is_some())
        {
            self.all.remove(oldest);
        }
        let held = Held { device, greeted, give_up: now + HELD_TIME_MAX, up: false };
        self.all.push(Goodbye { id, until: now + LOOK, held: Some(held) });
    }

    /// The peer confirmed, or the kernel gave up.
    pub(super) fn done(&mut self, id: IdKey) {
        self.all.retain(|one| one.id.key() != id || one.held.is_some());
    }

    /// Lets go of what is due. `patience` is how long a goodbye said now is repeated.
    pub(super) fn poll(&mut self, now: Instant, patience: Duration) {
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
            let said = !down && held.greeted && one.id.disconnect().is_ok();
            one.held = None;
            one.until = now + patience;
            said
        });
    }

    /// When to be polled.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.all.iter().map(|one| one.until).min()
    }
}
