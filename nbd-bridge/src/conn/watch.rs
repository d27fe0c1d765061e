//! A receive that overlooks what has come.
//!
//! In the lab, with several devices attached at once, a device has stopped on one core: the kernel
//! waits for an answer, the core sleeps in a receive. The kernel asks nobody else, so once a second
//! the socket is looked at; bytes that lie there through two looks while the same receive waits
//! make it be cancelled and begun anew, and are told. The two stops seen since were not of this
//! kind: nothing lay in the socket. So this rules one cause out, and mends it should it come.

use std::mem::MaybeUninit;

use rtrs_core::rt::Port;
use rtrs_core::time::{Duration, Instant};
use socket2::SockRef;

use super::Conn;
use crate::shared::Shared;

/// How often the socket is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// MSG_PEEK and MSG_DONTWAIT of Linux.
const PEEK: i32 = 0x2 | 0x40;

/// What the looks found since the last receive ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Watch {
    looked: Instant,
    unread: bool,
    cancelled: bool,
}

impl Watch {
    /// A receive ended. True when that was our doing.
    pub(super) fn received(&mut self) -> bool {
        self.unread = false;
        std::mem::take(&mut self.cancelled)
    }
}

impl Conn {
    /// Looks after the receive from the kernel. True when it was cancelled.
    pub(crate) fn look_after_receive(
        &mut self,
        now: Instant,
        port: &Port,
        shared: &mut Shared,
    ) -> bool {
        let Some(id) = self.receiving.filter(|_| self.kernel && !self.watch.cancelled) else {
            return false;
        };
        if now.since(self.watch.looked.max(self.heard)) < LOOK_EVERY {
            return false;
        }
        self.watch.looked = now;
        let mut byte = [MaybeUninit::uninit()];
        let unread =
            SockRef::from(&self.fd).recv_with_flags(&mut byte, PEEK).is_ok_and(|count| count > 0);
        if !std::mem::replace(&mut self.watch.unread, unread) || !unread {
            return false;
        }
        tracing::error!("a receive from the kernel overlooked bytes for over a second: begun anew");
        shared.stats.receives_anew += 1;
        self.watch.cancelled = true;
        port.cancel(id);
        true
    }
}
