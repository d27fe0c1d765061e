//! Identifiers of ended connections whose disconnect request (DREQ) has not been confirmed.
//!
//! The kernel repeats a DREQ as long as its identifier exists. While the port is down, no DREQ may
//! be sent: a management datagram that rdma_rxe in Linux 6.1 cannot send puts its management queue
//! pair into the error state permanently (rxe_req.c, `rxe_requester`; rxe_qp.c, `rxe_qp_error`),
//! and the device then accepts no connection from any program. Dropping an identifier also sends a
//! DREQ. So the identifiers of a port that is down are kept until it has been up for a while, and
//! then released with a proper disconnect.
//!
//! A thread of the process checks the ports and sends the DREQs, because both call the driver.
//! Shards send it messages without waiting.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;

use super::info::port_is_down;
use super::sys::{CmId, IdKey};
use crate::rt::Clock;
use crate::time::{Duration, Instant};

/// Interval between checks of ports that are down.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Time that a port must be up before a DREQ is sent over it: addresses and routes follow the link,
/// and without them the datagram cannot be sent either.
const SETTLE: Duration = Duration::from_secs(15);
/// Maximum time to wait for a port that is down. By then, peers have forgotten the connection.
const HELD_TIME_MAX: Duration = Duration::from_secs(3600);
/// Maximum number of identifiers kept for ports that are down; beyond that, the oldest is released.
const HELD_MAX: usize = 4096;
/// Maximum number of queued messages, in case a driver blocks the thread. Identifiers beyond that
/// are released immediately.
const WAITING_MAX: usize = 4096;
/// Stack size of the thread, which makes few calls.
const STACK: usize = 64 << 10;

/// Identifier that the keeper holds.
pub(super) trait Kept {
    /// Key that names the identifier in events.
    type Key: PartialEq;
    /// Returns the key.
    fn key(&self) -> Self::Key;
    /// Sends a DREQ. Returns false if none was sent.
    fn disconnect(&self) -> bool;
}

impl Kept for Arc<CmId> {
    type Key = IdKey;

    fn key(&self) -> IdKey {
        CmId::key(self)
    }

    fn disconnect(&self) -> bool {
        CmId::disconnect(self).is_ok()
    }
}

/// Port of a device, identified by its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortName {
    pub(super) device: String,
    pub(super) number: u8,
}

/// Message to the thread.
#[derive(Debug)]
enum Message<I: Kept> {
    /// The DREQ of this identifier was sent.
    Sent { id: I, repeat_for: Duration },
    /// The port of this identifier is down.
    Hold { id: I, port: PortName, peer_connected: bool, repeat_for: Duration },
    /// The peer confirmed, or the kernel gave up.
    Done(I::Key),
}

/// Handle to the thread that holds the identifiers. When it is dropped, the thread releases them.
#[derive(Debug)]
pub(super) struct DreqKeeper<I: Kept = Arc<CmId>> {
    messages: SyncSender<Message<I>>,
}

impl DreqKeeper {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns the system's error if the thread cannot be started.
    pub(super) fn start() -> io::Result<Self> {
        Self::with(|port| port_is_down(&port.device, port.number))
    }
}

impl<I> DreqKeeper<I>
where
    I: Kept + Send + 'static,
    I::Key: Send,
{
    fn with(is_down: impl Fn(&PortName) -> bool + Send + 'static) -> io::Result<Self> {
        let (messages, inbox) = sync_channel(WAITING_MAX);
        let thread = thread::Builder::new().name("rdma-dreq".into()).stack_size(STACK);
        let _ = thread.spawn(move || keep(&inbox, is_down))?;
        Ok(Self { messages })
    }

    /// Keeps an identifier whose DREQ was sent until the peer confirms it, for at most
    /// `repeat_for`.
    pub(super) fn sent(&self, id: I, repeat_for: Duration) {
        self.leave(Message::Sent { id, repeat_for });
    }

    /// Keeps an identifier whose port is down. If the peer needs a DREQ, it is sent once the port
    /// is up and repeated for `repeat_for`.
    pub(super) fn hold(&self, id: I, port: PortName, peer_connected: bool, repeat_for: Duration) {
        self.leave(Message::Hold { id, port, peer_connected, repeat_for });
    }

    /// Releases an identifier whose DREQ the peer has confirmed or the kernel no longer repeats.
    pub(super) fn done(&self, id: I::Key) {
        // If the queue is full, the identifier is released when its time expires.
        let _ = self.messages.try_send(Message::Done(id));
    }

    /// Sends a message without waiting; if the queue is full, the message is dropped.
    fn leave(&self, message: Message<I>) {
        if self.messages.try_send(message).is_err() {
            tracing::warn!("too many ended RDMA connections; releasing one early");
        }
    }
}

fn keep<I: Kept>(inbox: &Receiver<Message<I>>, is_down: impl Fn(&PortName) -> bool) {
    let mut kept = PendingDreqs::default();
    loop {
        let message = match kept.deadline() {
            Some(at) => inbox.recv_timeout(at.since(Clock.now())),
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match message {
            Ok(message) => kept.take(Clock.now(), message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        kept.poll(Clock.now(), &is_down);
    }
}

/// Identifier that waits to be released.
#[derive(Debug)]
struct PendingDreq<I> {
    id: I,
    until: Instant,
    repeat_for: Duration,
    /// State of an identifier that waits for its port to come up; no DREQ has been sent.
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    port: PortName,
    /// The peer regards the connection as established, so it needs a DREQ.
    peer_connected: bool,
    give_up: Instant,
    /// The port was up at the last check.
    up: bool,
}

/// All kept identifiers of a process.
#[derive(Debug)]
struct PendingDreqs<I> {
    all: Vec<PendingDreq<I>>,
}

impl<I> Default for PendingDreqs<I> {
    fn default() -> Self {
        Self { all: Vec::new() }
    }
}

impl<I: Kept> PendingDreqs<I> {
    fn take(&mut self, now: Instant, message: Message<I>) {
        match message {
            Message::Sent { id, repeat_for } => {
                self.all.push(PendingDreq { id, until: now + repeat_for, repeat_for, held: None });
            }
            Message::Hold { id, port, peer_connected, repeat_for } => {
                self.make_room();
                let give_up = now + HELD_TIME_MAX;
                let held = Some(Held { port, peer_connected, give_up, up: false });
                self.all.push(PendingDreq { id, until: now + CHECK_INTERVAL, repeat_for, held });
            }
            Message::Done(id) => self.all.retain(|one| one.id.key() != id || one.held.is_some()),
        }
    }

    fn make_room(&mut self) {
        if self.all.iter().filter(|one| one.held.is_some()).count() >= HELD_MAX
            && let Some(oldest) = self.all.iter().position(|one| one.held.is_some())
        {
            self.all.remove(oldest);
        }
    }

    /// Releases the identifiers that are due.
    fn poll(&mut self, now: Instant, is_down: impl Fn(&PortName) -> bool) {
        if self.deadline().is_none_or(|at| now < at) {
            return;
        }
        // Most waiting identifiers wait for the same port.
        let mut known: Option<(PortName, bool)> = None;
        self.all.retain_mut(|one| {
            if one.until > now {
                return true;
            }
            let Some(held) = &mut one.held else { return false };
            let down = match &known {
                Some((port, down)) if *port == held.port => *down,
                _ => is_down(&held.port),
            };
            known = Some((held.port.clone(), down));
            if down && now < held.give_up {
                (held.up, one.until) = (false, now + CHECK_INTERVAL);
                return true;
            }
            if !down && !std::mem::replace(&mut held.up, true) {
                one.until = now + SETTLE;
                return true;
            }
            let sent = !down && held.peer_connected && one.id.disconnect();
            one.held = None;
            one.until = now + one.repeat_for;
            sent
        });
    }

    /// Returns the time of the next poll.
    fn deadline(&self) -> Option<Instant> {
        self.all.iter().map(|one| one.until).min()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    use super::*;

    const REPEAT_FOR: Duration = Duration::from_secs(2);

    /// Test identifier that counts its DREQs.
    struct StandIn(u32, Arc<AtomicU32>);

    impl Kept for StandIn {
        type Key = u32;

        fn key(&self) -> u32 {
            self.0
        }

        fn disconnect(&self) -> bool {
            self.1.fetch_add(1, Ordering::Relaxed);
            true
        }
    }

    fn port() -> PortName {
        PortName { device: "rxe0".into(), number: 1 }
    }

    fn hold(id: u32, sent: &Arc<AtomicU32>) -> Message<StandIn> {
        let id = StandIn(id, Arc::clone(sent));
        Message::Hold { id, port: port(), peer_connected: true, repeat_for: REPEAT_FOR }
    }

    #[test]
    fn a_sent_dreq_ends_with_its_reply_or_timeout() {
        let (mut kept, sent) = (PendingDreqs::default(), Arc::default());
        for id in [1, 2] {
            let id = StandIn(id, Arc::clone(&sent));
            kept.take(Instant::ZERO, Message::Sent { id, repeat_for: REPEAT_FOR });
        }
        kept.take(Instant::ZERO, Message::Done(1));
        assert_eq!(kept.all.len(), 1);
        let no_look = |_: &PortName| unreachable!("its port is not checked");
        kept.poll(Instant::ZERO + Duration::from_millis(1999), no_look);
        assert_eq!(kept.all.len(), 1);
        assert_eq!(kept.deadline(), Some(Instant::ZERO + REPEAT_FOR));
        kept.poll(Instant::ZERO + REPEAT_FOR, no_look);
        assert!(kept.all.is_empty());
        assert_eq!(sent.load(Ordering::Relaxed), 0, "each was sent before");
    }

    #[test]
    fn a_dreq_is_sent_once_its_port_has_recovered() {
        let (mut kept, sent) = (PendingDreqs::default(), Arc::default());
        let (down, looks) = (Cell::new(true), Cell::new(0));
        let look = |_: &PortName| {
            looks.set(looks.get() + 1);
            down.get()
        };
        kept.take(Instant::ZERO, hold(1, &sent));
        kept.take(Instant::ZERO, hold(2, &sent));
        // An event for an identifier whose DREQ was not sent is not a confirmation.
        kept.take(Instant::ZERO, Message::Done(1));
        let mut now = Instant::ZERO + CHECK_INTERVAL;
        kept.poll(now, look);
        assert_eq!((kept.all.len(), looks.get()), (2, 1), "one check for both");
        // The port is up for too short a time, then down again.
        for is_down in [false, true, false] {
            down.set(is_down);
            now = kept.deadline().unwrap();
            kept.poll(now, look);
            assert_eq!((kept.all.len(), sent.load(Ordering::Relaxed)), (2, 0));
        }
        assert_eq!(kept.deadline(), Some(now + SETTLE));
        kept.poll(now + SETTLE, look);
        assert_eq!((kept.all.len(), sent.load(Ordering::Relaxed)), (2, 2));
        kept.poll(now + SETTLE + REPEAT_FOR, look);
        assert!(kept.all.is_empty());
    }

    #[test]
    fn a_dreq_is_dropped_if_its_port_stays_down() {
        let (mut kept, sent) = (PendingDreqs::default(), Arc::default());
        kept.take(Instant::ZERO, hold(1, &sent));
        kept.poll(Instant::ZERO + (HELD_TIME_MAX - CHECK_INTERVAL), |_| true);
        assert_eq!(kept.all.len(), 1);
        kept.poll(Instant::ZERO + HELD_TIME_MAX, |_| true);
        assert!(kept.all.is_empty());
        assert_eq!(sent.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_hanging_driver_blocks_nothing_else() {
        let sent = Arc::default();
        let (open, gate) = mpsc::channel::<()>();
        let (sender, looked) = mpsc::channel();
        let keeper = DreqKeeper::with(move |_| {
            let _ = sender.send(());
            let _ = gate.recv();
            true
        })
        .unwrap();
        keeper.leave(hold(0, &sent));
        looked.recv_timeout(Duration::from_secs(60)).expect("a check of the port");
        // The thread is blocked in the driver; more messages arrive than the queue holds.
        for id in 1..=2 * u32::try_from(WAITING_MAX).unwrap() {
            keeper.leave(hold(id, &sent));
        }
        // One is in the list, the others are queued; each holds a reference to `sent`.
        assert_eq!(Arc::strong_count(&sent), 2 + WAITING_MAX);
        drop((open, keeper));
        for _ in 0..6000 {
            if Arc::strong_count(&sent) == 1 {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("identifiers are left");
    }
}
