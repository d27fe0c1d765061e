//! Serves a device in memory, or one that does nothing, over NBD, to measure the front end alone.
//!
//! `null_server SOCKET [--shards N] [--size BYTES] [--memory] [--poll-us N] [--pin]` prints one
//! line when clients can connect, and counters when it reads a line, or the end of file, from its
//! standard input.

use std::collections::VecDeque;
use std::io::{self, BufRead};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread;

use nbd_bridge::{Bound, Bridge, BridgeConfig, Endpoint, Listener};
use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp};
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::mem::Region;
use rtrs_core::rt::{
    Inbox, Mailbox, PollPolicy, ReactorStats, Ring, Sender, Shard, allowed_cpus, mailbox, pin_to,
    run,
};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

/// Device that completes every IO immediately. It copies data with `--memory`, and moves none
/// otherwise.
#[derive(Debug)]
struct MemoryDevice {
    geometry: Geometry,
    memory: Option<Arc<Region>>,
    done: VecDeque<Completion>,
}

impl BlockDevice for MemoryDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        let status = self.geometry.check(&io);
        if let (IoStatus::Ok, Some(memory)) = (status, &self.memory)
            && let Ok(at) = usize::try_from(io.offset)
        {
            match (io.op, &io.buf) {
                (IoOp::Read, Some(buf)) => {
                    buf.region().copy_from(buf.offset(), memory, at, buf.len());
                }
                (IoOp::Write, Some(buf)) => {
                    memory.copy_from(at, buf.region(), buf.offset(), buf.len());
                }
                (IoOp::WriteZeroes, _) => memory.fill(at, io.len as usize, 0),
                _ => {}
            }
        }
        self.done.push_back(Completion::new(io.tag, status));
        Ok(())
    }

    fn poll(&mut self, _now: Instant) -> bool {
        false
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn inflight(&self) -> usize {
        self.done.len()
    }
}

enum Message {
    Adopt(OwnedFd),
    Query(mpsc::Sender<(FrontEndStats, u64)>),
    Exit,
}

struct Core {
    inbox: Inbox<Message>,
    ring: Rc<Ring>,
    bridge: Bridge,
    listener: Option<Listener>,
    others: Vec<Sender<Message>>,
    next: usize,
    done: bool,
}

impl Shard for Core {
    type Message = Message;

    fn turn(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(message) = self.inbox.take() {
            any = true;
            match message {
                Message::Adopt(socket) => self.bridge.adopt(now, socket),
                Message::Query(reply) => {
                    let _ = reply.send((self.bridge.stats(), self.ring.enters()));
                }
                Message::Exit => {
                    self.bridge.abort();
                    self.done = true;
                }
            }
        }
        while let Some(socket) = self.listener.as_mut().and_then(|l| l.take(now)) {
            any = true;
            match self.others.get(self.next) {
                Some(other) => other.send(Message::Adopt(socket)),
                None => self.bridge.adopt(now, socket),
            }
            self.next = (self.next + 1) % (self.others.len() + 1);
        }
        any | self.bridge.turn(now)
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

struct Options {
    socket: String,
    shards: usize,
    size: u64,
    memory: bool,
    poll: Duration,
    pin: bool,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        socket: String::new(),
        shards: 1,
        size: 1 << 30,
        memory: false,
        poll: Duration::from_micros(80),
        pin: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || {
            let text = words.next().ok_or_else(|| format!("{word} needs a number"))?;
            text.parse::<u64>().map_err(|e| format!("{word} {text}: {e}"))
        };
        match word.as_str() {
            "--shards" => options.shards = usize::try_from(number()?).unwrap_or(1).max(1),
            "--size" => options.size = number()?,
            "--poll-us" => options.poll = Duration::from_micros(number()?),
            "--memory" => options.memory = true,
            "--pin" => options.pin = true,
            _ if options.socket.is_empty() && !word.starts_with('-') => options.socket = word,
            _ => return Err(format!("unknown argument {word}")),
        }
    }
    if options.socket.is_empty() {
        return Err("the path of a socket is missing".into());
    }
    Ok(options)
}

struct Start {
    index: usize,
    inbox: Mailbox<Message>,
    bound: Option<Bound>,
    others: Vec<Sender<Message>>,
    geometry: Geometry,
    memory: Option<Arc<Region>>,
    poll: Duration,
    pin: bool,
}

fn core(start: Start) -> io::Result<ReactorStats> {
    if start.pin {
        let cpus = allowed_cpus();
        pin_to(cpus[start.index % cpus.len()])?;
    }
    let ring = Ring::new(256)?;
    let Start { geometry, memory, .. } = start;
    let device = MemoryDevice { geometry, memory, done: VecDeque::with_capacity(1024) };
    let bridge = Bridge::new(&ring, Box::new(device), "null", BridgeConfig::default())?;
    let mut shard = Core {
        inbox: start.inbox.arm(&ring)?,
        ring: Rc::clone(&ring),
        bridge,
        listener: start.bound.map(|bound| bound.serve(&ring)),
        others: start.others,
        next: 0,
        done: false,
    };
    run(&ring, PollPolicy { budget_max: start.poll }, &mut shard)
}

fn serve(options: &Options) -> io::Result<()> {
    let geometry = Geometry {
        discard: true,
        discard_granularity: 4096,
        write_zeroes: true,
        fast_zero: true,
        ..Geometry::plain(options.size)
    };
    let size = usize::try_from(options.size).map_err(io::Error::other)?;
    let memory = if options.memory { Some(Region::new(size)?) } else { None };
    let mut bound = Some(Bound::new(&Endpoint::Unix(options.socket.clone().into()))?);
    let mut boxes = (0..options.shards).map(|_| mailbox()).collect::<io::Result<Vec<_>>>()?;
    let senders: Vec<_> = boxes.iter().map(|(sender, _)| sender.clone()).collect();
    let mut threads = Vec::new();
    for (index, (_, inbox)) in boxes.drain(..).enumerate() {
        let first = index == 0;
        let start = Start {
            index,
            inbox,
            bound: if first { bound.take() } else { None },
            others: if first { senders[1..].to_vec() } else { Vec::new() },
            geometry: geometry.clone(),
            memory: memory.clone(),
            poll: options.poll,
            pin: options.pin,
        };
        threads.push(thread::spawn(move || core(start)));
    }
    println!("serving {}", options.socket);
    for line in io::stdin().lock().lines() {
        line?;
        report(&senders);
    }
    report(&senders);
    for sender in &senders {
        sender.send(Message::Exit);
    }
    for thread in threads {
        let stats = thread.join().map_err(|_| io::Error::other("a core panicked"))??;
        println!("{stats:?}");
    }
    Ok(())
}

fn report(senders: &[Sender<Message>]) {
    let (reply, answers) = mpsc::channel();
    for sender in senders {
        sender.send(Message::Query(reply.clone()));
    }
    drop(reply);
    let (mut sum, mut enters) = (FrontEndStats::default(), 0);
    for (stats, calls) in answers {
        sum.add(&stats);
        enters += calls;
    }
    println!("{sum:?} system calls: {enters}");
}

fn main() -> std::process::ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("null_server: {error}");
            return 2.into();
        }
    };
    match serve(&options) {
        Ok(()) => 0.into(),
        Err(error) => {
            eprintln!("null_server: {error}");
            1.into()
        }
    }
}
