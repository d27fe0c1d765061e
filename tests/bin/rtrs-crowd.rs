//! Many sessions in one process, for `scripts/bench.sh scale`, to measure their cost on the server.
//!
//! ```text
//! target/release/rtrs-crowd --path 127.0.0.1:1234 --export v
//! ```
//!
//! Each session is the engine of `rtrs-client` with one shard, in a thread with its own io_uring,
//! over one TCP path with the default settings for `attach`. The other parts of `attach` are
//! missing: the process, the front end, the control socket. Session N, counted from 0, opens the
//! export vN. Commands are read from stdin, one per line; each is answered with a line of JSON on
//! stdout, in order of arrival:
//!
//! | command | action |
//! |---|---|
//! | `attach N` | attaches N more sessions in turn; answers with each time |
//! | `attach-all N` | attaches N more sessions in parallel; answers with the total time |
//! | `wait-down SECONDS` | waits until no session is up, for at most SECONDS |
//! | `wait-up SECONDS` | waits up to SECONDS until all are up; answers with number and time |
//! | `first N` | reads 4 KiB over each of the first N in turn; answers with each time |
//! | `load N DEPTH SECONDS` | random 4 KiB reads over each of the first N; answers with results |
//!
//! The process ends when stdin is closed.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, Read, Write, stdin, stdout};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender as Notify, channel};
use std::thread;
use std::time::Instant as Watch;

use clap::Parser;
use rtrs_client::engine::ClientEngine;
use rtrs_client::{
    DeviceIndex, Failover, HeartbeatSettings, NoPath, PATH_RUN, PathTarget, Policy, SessionConfig,
    SessionDevice, SlowIo, VolumeConfig,
};
use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use rtrs_core::ids::{CoreIndex, ProviderIndex, SessionId};
use rtrs_core::mem::Pool;
use rtrs_core::rt::{
    Clock, Inbox, Mailbox, PollPolicy, Ring, Sender, Shard, mailbox, raise_open_files, run,
};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::AccessMode;
use serde_json::{Value, json};

/// Size of a read in bytes.
const BLOCK: u32 = 4096;
/// Maximum number of reads in flight per session.
const DEPTH_MAX: u32 = 64;
/// Maximum time for attaching a session.
const ATTACH_MAX: Duration = Duration::from_secs(60);
/// Additional time for the last answers of a load.
const LOAD_MORE: Duration = Duration::from_secs(30);
/// Stack size of a session's thread.
const STACK: usize = 512 << 10;

#[derive(Debug, Parser)]
struct Args {
    /// Address of the server's TCP portal.
    #[arg(long)]
    path: SocketAddr,
    /// Prefix of the names of the exports.
    #[arg(long, default_value = "v")]
    export: String,
    /// Number of the first session.
    #[arg(long, default_value_t = 0)]
    first: usize,
    /// Maximum time between heartbeats of an idle session, in milliseconds; 0: constant interval.
    #[arg(long, default_value_t = 30_000)]
    idle_max: u64,
    /// Maximum time that a busy session polls before it sleeps, in microseconds.
    #[arg(long, default_value_t = 200)]
    poll: u64,
}

/// Order to a session.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Keep `depth` reads in flight for `time`; a zero time means one read.
    Read {
        depth: u32,
        time: Duration,
    },
    End,
}

/// Event of a session.
#[derive(Debug)]
enum Event {
    /// The session's export is open, or no longer open.
    Up(bool),
    /// The session's reads have ended: their number, errors, and longest time.
    Done { reads: u64, errors: u64, longest: Duration, took: Duration },
    /// The session has failed permanently.
    Failed(String),
}

/// Reads of a session.
#[derive(Debug)]
struct Load {
    depth: u32,
    begin: Instant,
    end: Option<Instant>,
    reads: u64,
    errors: u64,
    longest: Duration,
}

/// One session.
struct Member {
    number: usize,
    engine: ClientEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: Inbox<Order>,
    events: Notify<(usize, Event)>,
    device: Option<SessionDevice>,
    pool: Pool,
    started: Vec<Instant>,
    random: u64,
    load: Option<Load>,
    up: bool,
    failed: bool,
    end: bool,
}

impl Member {
    fn send(&self, event: Event) {
        // The receiver is closed when the process ends.
        drop(self.events.send((self.number, event)));
    }

    fn look(&mut self) {
        let up = self.engine.is_open(DeviceIndex::FIRST);
        if up != self.up {
            self.up = up;
            self.send(Event::Up(up));
        }
        let failure = self.engine.failure().map(ToString::to_string);
        if let Some(why) = failure.filter(|_| !self.failed) {
            self.failed = true;
            self.send(Event::Failed(why));
        }
        if self.device.is_none()
            && let Some(mut device) = self.engine.device(DeviceIndex::FIRST)
        {
            device.attach_region(self.pool.region()).expect("memory for reads");
            self.device = Some(device);
        }
    }

    /// Advances the reads. Returns whether anything happened.
    fn read(&mut self, now: Instant) -> bool {
        let Self { device, load, pool, started, random, .. } = self;
        let Some(device) = device else { return false };
        let mut any = device.poll(now);
        let Some(load) = load else { return any };
        while let Some(done) = device.reap() {
            any = true;
            let slot = u32::try_from(done.tag).expect("one of ours");
            load.longest = load.longest.max(now.since(started[slot as usize]));
            load.reads += u64::from(done.status.is_ok());
            load.errors += u64::from(!done.status.is_ok());
            pool.give(slot);
        }
        let blocks = device.geometry().size / u64::from(BLOCK);
        let goes_on = |load: &Load| match load.end {
            Some(end) => now < end,
            None => load.reads + load.errors == 0,
        };
        while goes_on(load) && device.inflight() < load.depth as usize {
            let Some(slot) = pool.take() else { break };
            *random =
                random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            let io = Io {
                tag: u64::from(slot),
                op: IoOp::Read,
                flags: IoFlags::default(),
                offset: (*random >> 32) % blocks * u64::from(BLOCK),
                len: BLOCK,
                buf: Some(pool.slice(slot)),
            };
            started[slot as usize] = now;
            if device.submit(io).is_err() {
                pool.give(slot);
                break;
            }
            any = true;
        }
        if !goes_on(load) && device.inflight() == 0 {
            let Load { begin, reads, errors, longest, .. } = *load;
            self.load = None;
            self.send(Event::Done { reads, errors, longest, took: now.since(begin) });
        }
        any
    }
}

impl Shard for Member {
    type Message = Order;

    fn turn(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(order) = self.inbox.take() {
            any = true;
            match order {
                Order::Read { depth, time } => {
                    let end = (!time.is_zero()).then(|| now + time);
                    let (begin, longest) = (now, Duration::ZERO);
                    self.load = Some(Load { depth, begin, end, reads: 0, errors: 0, longest });
                }
                Order::End => self.end = true,
            }
        }
        any |= self.fabrics[0].poll(now);
        while let Some(event) = self.fabrics[0].next_event() {
            any = true;
            self.engine.handle_event(now, ProviderIndex(0), event, &mut self.fabrics);
        }
        any |= self.engine.poll(now, &mut self.fabrics);
        self.look();
        any |= self.read(now);
        any |= self.engine.pump(now, &mut self.fabrics);
        self.fabrics[0].flush(now);
        any
    }

    fn deadline(&self) -> Option<Instant> {
        let load = self.load.as_ref().and_then(|load| load.end);
        let load = load.filter(|_| self.device.as_ref().is_some_and(|d| d.inflight() == 0));
        earliest(earliest(self.engine.deadline(), self.fabrics[0].deadline()), load)
    }

    fn inflight(&self) -> usize {
        self.engine.inflight()
    }

    fn is_done(&self) -> bool {
        self.end
    }

    fn inbox(&mut self) -> Option<&mut Inbox<Order>> {
        Some(&mut self.inbox)
    }
}

fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.expect("random numbers");
    bytes
}

/// Returns the default settings of `attach`.
fn config(args: &Args, number: usize) -> SessionConfig {
    let beat = |ms, missed_max| HeartbeatSettings {
        interval: Duration::from_millis(ms),
        missed_max,
        confirmed_missed_max: missed_max,
        idle_max: Duration::from_millis(args.idle_max),
    };
    let id = random_bytes();
    SessionConfig {
        name: format!("crowd-{number}"),
        volumes: vec![VolumeConfig {
            export: format!("{}{number}", args.export),
            access: AccessMode::ReadWrite,
            read_only_fallback: false,
            promotes: false,
            inherited_epoch: None,
            inherited_export: None,
            identity: None,
        }],
        open_patience: Duration::ZERO,
        resent_for: Duration::ZERO,
        id: SessionId(id),
        paths: vec![PathTarget {
            name: format!("tcp://{}", args.path),
            local: None,
            remotes: vec![args.path],
            unresolved: None,
            peer_name: None,
            transport: "tcp",
            provider: ProviderIndex(0),
            invalidate_reads: true,
            heartbeat: beat(100, 3),
            proves: false,
        }],
        shards: 1,
        policy: Policy::MinInflight,
        path_run: PATH_RUN,
        heartbeat: beat(500, 5),
        connect_timeout: Duration::from_secs(5),
        reconnect_min: Duration::from_millis(100),
        reconnect_max: Duration::from_secs(3),
        io_timeout: Duration::from_secs(30),
        slow_io: SlowIo::Wait,
        no_path: NoPath::QueueFor(Duration::from_secs(60)),
        failover: Failover::Fast,
        queue_depth_limit: u16::MAX,
        prover: None,
        seed: u64::from_le_bytes(id[8..].try_into().expect("eight bytes")),
    }
}

/// Runs a session in its thread.
fn session(
    number: usize,
    config: SessionConfig,
    policy: PollPolicy,
    shared: Arc<IwarpShared>,
    orders: Mailbox<Order>,
    events: Notify<(usize, Event)>,
) {
    let ring: Rc<Ring> = Ring::new(64).expect("an io_uring");
    let options =
        IwarpOptions { user_timeout: Some(Duration::from_secs(4)), ..IwarpOptions::default() };
    let fabric = IwarpFabric::new(&ring, shared, options);
    let config = Arc::new(config);
    let engine = ClientEngine::new(Clock.now(), CoreIndex(0), &config, &[random_bytes()]);
    let mut member = Member {
        number,
        engine,
        fabrics: vec![Box::new(fabric)],
        inbox: orders.arm(&ring).expect("a mailbox"),
        events,
        device: None,
        pool: Pool::new(DEPTH_MAX, BLOCK as usize).expect("memory for reads"),
        started: vec![Instant::ZERO; DEPTH_MAX as usize],
        random: config.seed,
        load: None,
        up: false,
        failed: false,
        end: false,
    };
    run(&ring, policy, &mut member).expect("the shard runs");
}

/// All sessions.
struct Crowd {
    args: Args,
    shared: Arc<IwarpShared>,
    members: Vec<Sender<Order>>,
    /// Whether each member is up.
    up: Vec<bool>,
    events: Receiver<(usize, Event)>,
    notify: Notify<(usize, Event)>,
}

impl Crowd {
    fn new(args: Args) -> Self {
        let (notify, events) = channel();
        let (members, up) = (Vec::new(), Vec::new());
        Self { args, shared: IwarpShared::new(), members, up, events, notify }
    }

    fn ups(&self) -> usize {
        self.up.iter().filter(|up| **up).count()
    }

    fn start(&mut self) {
        let number = self.members.len();
        let (orders, inbox) = mailbox().expect("a mailbox");
        let config = config(&self.args, self.args.first + number);
        let (shared, notify) = (Arc::clone(&self.shared), self.notify.clone());
        let thread = thread::Builder::new().stack_size(STACK).name(format!("crowd-{number}"));
        let poll = PollPolicy { budget_max: Duration::from_micros(self.args.poll) };
        let body = move || session(number, config, poll, shared, inbox, notify);
        // The thread ends with the process.
        drop(thread.spawn(body).expect("a thread"));
        self.members.push(orders);
        self.up.push(false);
    }

    /// Waits for the next event within the remaining time. Returns None when that time has passed.
    fn next(&mut self, until: Watch) -> Result<Option<(usize, Event)>, String> {
        let left = until.saturating_duration_since(Watch::now());
        match self.events.recv_timeout(left) {
            Ok((number, Event::Up(up))) => {
                self.up[number] = up;
                Ok(Some((number, Event::Up(up))))
            }
            Ok((number, Event::Failed(why))) => Err(format!("session {number}: {why}")),
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
        }
    }

    fn wait_up(&mut self, longest: Duration) -> Result<(), String> {
        let until = Watch::now() + longest;
        while self.ups() < self.members.len() {
            if self.next(until)?.is_none() {
                break;
            }
        }
        Ok(())
    }

    fn attach(&mut self, count: usize, at_once: bool) -> Result<Value, String> {
        let mut each = Vec::new();
        let begin = Watch::now();
        for number in 0..count {
            let start = Watch::now();
            self.start();
            if at_once && number + 1 < count {
                continue;
            }
            self.wait_up(ATTACH_MAX)?;
            each.push(start.elapsed().as_micros());
        }
        let (sessions, up) = (self.members.len(), self.ups());
        Ok(json!({ "sessions": sessions, "up": up, "us": each,
                   "all_us": begin.elapsed().as_micros() }))
    }

    /// Gives the first `count` sessions the same order and collects their results.
    fn read(&mut self, count: usize, order: Order, longest: Duration) -> Result<Value, String> {
        if count > self.ups() {
            return Err(format!("only {} sessions are up", self.ups()));
        }
        self.members[..count].iter().for_each(|member| member.send(order));
        let (until, mut all) = (Watch::now() + longest, Vec::new());
        while all.len() < count {
            match self.next(until)? {
                Some((_, Event::Done { reads, errors, longest, took })) => all.push(json!({
                    "reads": reads, "errors": errors, "longest_us": longest.as_micros(),
                    "us": took.as_micros(),
                })),
                Some(_) => {}
                None => return Err(format!("{} of {count} answered", all.len())),
            }
        }
        Ok(Value::Array(all))
    }

    fn execute(&mut self, words: &[&str]) -> Result<Value, String> {
        let number = |at: usize| -> Result<u64, String> {
            let word = words.get(at).ok_or_else(|| format!("{words:?}: a number is missing"))?;
            word.parse().map_err(|_| format!("{word:?} is not a number"))
        };
        let count = |at| number(at).map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        match words[0] {
            "attach" => self.attach(count(1)?, false),
            "attach-all" => self.attach(count(1)?, true),
            "wait-up" => {
                let begin = Watch::now();
                self.wait_up(Duration::from_secs(number(1)?))?;
                Ok(json!({ "sessions": self.members.len(), "up": self.ups(),
                           "us": begin.elapsed().as_micros() }))
            }
            "wait-down" => {
                let until = Watch::now() + Duration::from_secs(number(1)?);
                while self.ups() > 0 && self.next(until)?.is_some() {}
                Ok(json!({ "sessions": self.members.len(), "up": self.ups() }))
            }
            "first" => {
                let members = self.members.clone();
                let mut all = Vec::new();
                for (at, member) in members.iter().enumerate().take(count(1)?) {
                    member.send(Order::Read { depth: 1, time: Duration::ZERO });
                    let until = Watch::now() + LOAD_MORE;
                    loop {
                        match self.next(until)? {
                            Some((_, Event::Done { longest, .. })) => {
                                all.push(json!(longest.as_micros()));
                                break;
                            }
                            Some(_) => {}
                            None => return Err(format!("session {at} does not answer")),
                        }
                    }
                }
                Ok(json!({ "us": all }))
            }
            "load" => {
                let depth = u32::try_from(number(2)?).unwrap_or(u32::MAX).clamp(1, DEPTH_MAX);
                let time = Duration::from_secs(number(3)?.max(1));
                let order = Order::Read { depth, time };
                self.read(count(1)?, order, time + LOAD_MORE)
            }
            other => Err(format!("{other:?} is not an order")),
        }
    }
}

fn main() {
    let args = Args::parse();
    if let Err(error) = raise_open_files() {
        eprintln!("rtrs-crowd: cannot raise the limit of open files: {error}");
    }
    let mut crowd = Crowd::new(args);
    for line in stdin().lock().lines() {
        let Ok(line) = line else { break };
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        let answer = crowd.execute(&words).unwrap_or_else(|why| json!({ "error": why }));
        let mut out = stdout().lock();
        if writeln!(out, "{answer}").and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    crowd.members.iter().for_each(|member| member.send(Order::End));
}
