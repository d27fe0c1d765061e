//! A bridge on a real ring, running in its own thread, with the queries needed by tests.

use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant as StdInstant};

use nbd_bridge::{Bound, Bridge, BridgeConfig, BufferPools, Group, Listener, Seat};
use rtrs_core::block::Geometry;
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::rt::{Inbox, PollPolicy, Ring, Sender, Shard, mailbox, run};
use rtrs_core::time::{Instant, earliest};

use crate::client::Client;
use crate::device::{Switches, TestDevice};

/// Maximum time for which a test waits for anything.
const WAIT_MAX: Duration = Duration::from_secs(60);

pub(crate) enum Message {
    Adopt(OwnedFd),
    Listen(Bound),
    Stop,
    Abort,
    Query(mpsc::Sender<Report>),
    Wake,
    Exit,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) connections: usize,
    pub(crate) inflight: usize,
    pub(crate) stats: FrontEndStats,
}

struct TestShard {
    inbox: Inbox<Message>,
    ring: std::rc::Rc<Ring>,
    bridge: Bridge,
    listener: Option<Listener>,
    done: bool,
}

impl Shard for TestShard {
    type Message = Message;

    fn turn(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(message) = self.inbox.take() {
            any = true;
            match message {
                Message::Adopt(socket) => self.bridge.adopt(now, socket),
                Message::Listen(bound) => self.listener = Some(bound.serve(&self.ring)),
                Message::Stop => self.bridge.stop(),
                Message::Abort => self.bridge.abort(),
                Message::Query(reply) => {
                    let (connections, inflight) =
                        (self.bridge.connections(), self.bridge.inflight());
                    let stats = self.bridge.stats();
                    reply.send(Report { connections, inflight, stats }).unwrap();
                }
                Message::Wake => {}
                Message::Exit => self.done = true,
            }
        }
        while let Some(socket) = self.listener.as_mut().and_then(|l| l.take(now)) {
            any = true;
            self.bridge.adopt(now, socket);
        }
        any |= self.bridge.turn(now);
        self.bridge.check();
        any
    }

    fn deadline(&self) -> Option<Instant> {
        let listener = self.listener.as_ref().and_then(Listener::deadline);
        earliest(self.bridge.deadline(), listener)
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn inbox(&mut self) -> Option<&mut Inbox<Message>> {
        Some(&mut self.inbox)
    }
}

/// Returns a 64 MiB geometry with every feature; each discard or zeroing IO covers at most 1 MiB.
pub(crate) fn geometry() -> Geometry {
    Geometry {
        discard: true,
        discard_granularity: 4096,
        write_zeroes: true,
        fast_zero: true,
        extents: true,
        io_max: 32 << 20,
        discard_max: 1 << 20,
        zeroes_max: 1 << 20,
        ..Geometry::plain(64 << 20)
    }
}

/// Returns limits low enough for tests to reach: pieces of 32 MiB and eight connections.
pub(crate) fn config() -> BridgeConfig {
    BridgeConfig {
        buffer_bytes: 145 * (260 << 10),
        connections_max: 8,
        requests_max: 64,
        ..BridgeConfig::default()
    }
}

pub(crate) struct Fixture {
    pub(crate) switches: Arc<Switches>,
    pub(crate) mail: Sender<Message>,
    thread: Option<JoinHandle<()>>,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::with(geometry(), config())
    }

    pub(crate) fn with(geometry: Geometry, config: BridgeConfig) -> Self {
        Self::seated(geometry, config, Seat::alone(), Arc::default(), 0)
    }

    /// Creates a shard on which the bridges of `others` other devices use the same memory.
    pub(crate) fn beside(others: usize, geometry: Geometry, config: BridgeConfig) -> Self {
        Self::seated(geometry, config, Seat::alone(), Arc::default(), others)
    }

    /// Creates two shards of one device.
    pub(crate) fn two(geometry: &Geometry, config: BridgeConfig) -> [Self; 2] {
        let senders: Arc<OnceLock<[Sender<Message>; 2]>> = Arc::default();
        let wakes = Arc::clone(&senders);
        let group = Group::new(2, move |shard| wakes.get().unwrap()[shard].send(Message::Wake));
        let disk = Arc::default();
        let two = [0, 1].map(|shard| {
            let seat = Seat { group: Arc::clone(&group), shard };
            let switches = Switches { disk: Arc::clone(&disk), ..Switches::default() };
            Self::seated(geometry.clone(), config, seat, Arc::new(switches), 0)
        });
        let all = two.each_ref().map(|fixture| fixture.mail.clone());
        assert!(senders.set(all).is_ok());
        two
    }

    fn seated(
        geometry: Geometry,
        config: BridgeConfig,
        seat: Seat,
        switches: Arc<Switches>,
        others: usize,
    ) -> Self {
        let shared = Arc::clone(&switches);
        let (mail, inbox) = mailbox().unwrap();
        let thread = std::thread::spawn(move || {
            let ring = Ring::new(64).unwrap();
            let pools = BufferPools::default();
            let bridge = |geometry, switches, seat| {
                let device = Box::new(TestDevice::new(geometry, switches));
                Bridge::seated(&ring, &pools, device, "vol0", config, seat).unwrap()
            };
            let other = || bridge(geometry.clone(), Arc::default(), Seat::alone());
            let others: Vec<Bridge> = (0..others).map(|_| other()).collect();
            let bridge = bridge(geometry.clone(), shared, seat);
            let inbox = inbox.arm(&ring).unwrap();
            let shard_ring = ring.clone();
            let mut shard =
                TestShard { inbox, ring: shard_ring, bridge, listener: None, done: false };
            let policy = PollPolicy { budget_max: Duration::from_micros(20) };
            run(&ring, policy, &mut shard).unwrap();
            drop(others);
        });
        Self { switches, mail, thread: Some(thread) }
    }

    /// Returns a connected socket, before the handshake.
    pub(crate) fn socket(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(WAIT_MAX)).unwrap();
        ours.set_write_timeout(Some(WAIT_MAX)).unwrap();
        self.mail.send(Message::Adopt(theirs.into()));
        ours
    }

    /// Returns a client past the handshake, whose connection was accepted by a listener.
    pub(crate) fn accepted_client(&self) -> Client {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("bridge-{}-{}", std::process::id(), COUNT.fetch_add(1, SeqCst));
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let ours = UnixStream::connect_addr(&address).unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        self.mail.send(Message::Adopt(theirs.into()));
        Client::go(ours, true)
    }

    /// Returns a client past the handshake.
    pub(crate) fn client(&self, structured: bool) -> Client {
        Client::go(self.socket(), structured)
    }

    pub(crate) fn report(&self) -> Report {
        let (reply, answer) = mpsc::channel();
        self.mail.send(Message::Query(reply));
        answer.recv_timeout(WAIT_MAX).expect("the bridge's core answers")
    }

    /// Waits until the report satisfies `wanted`.
    pub(crate) fn wait(&self, what: &str, wanted: impl Fn(&Report) -> bool) -> Report {
        let end = StdInstant::now() + WAIT_MAX;
        loop {
            let report = self.report();
            if wanted(&report) {
                return report;
            }
            assert!(StdInstant::now() < end, "no {what} within {WAIT_MAX:?}: {report:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until all connections are closed and everything they held has been returned.
    pub(crate) fn finish(mut self) -> FrontEndStats {
        let report = self.wait("rest", |report| report.connections == 0 && report.inflight == 0);
        self.mail.send(Message::Exit);
        self.thread.take().unwrap().join().expect("the core ends without a panic");
        report.stats
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.mail.send(Message::Exit);
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the core panicked");
        }
    }
}
