//! Measures the effect of connection floods on a session: its remaining IOPS and how long its
//! reconnects take while many other addresses open connections to its server.
//!
//! ```text
//! cargo build --release --bins
//! RTRS_BIN_DIR=target/release target/release/rtrs-flood --seconds 60
//! ```
//!
//! The session reads at queue depth 32 over TCP on loopback (`rtrs-client bench`), and every few
//! seconds the server ends its path (`session disconnect`). At the same time, `--rate` connections
//! per second come from 127.0.1.x. They alternate between these kinds: opened and closed; silent;
//! half of an MPA request; a CON_REQ and nothing more; a complete handshake without an OPEN.
//! Connections that the server keeps open are closed after `--hold` seconds. In the `baseline`, the
//! same crowd connects to a port that only accepts and closes connections; baseline and crowd
//! alternate `--rounds` times. All counts and times are bounded, and all traffic stays on loopback.
//! With `--tls RATE` the session uses tls://, and a known client performs RATE full handshakes per
//! second in addition to the crowd.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use rtrs_core::ids::{ConnIndex, PathUuid, SessionId};
use rtrs_core::local::{RunDir, request};
use rtrs_core::rt::raise_open_files;
use rtrs_core::tests::handshake::tls_handshake;
use rtrs_core::tls::{PrivateKey, PublicKey, TlsClientConfig};
use rtrs_core::wire::{ConnReq, InfoReq, Name};
use rtrs_tests::raw_mpa::{
    CRC, ENHANCED, REQUEST_KEY, WRITE, frame, send, start_data, start_frame, tagged,
};
use rtrs_tests::{STOP_TIME_MAX, Scratch, Server, bin, cpu_time, peak_memory, resident_memory};
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};

/// Name of the server and of its control socket.
const NAME: &str = "flood";
/// Number of addresses in the crowd: 127.0.1.1 and up.
const SOURCES: u64 = 250;
/// Time between the messages of a handshake.
const STEP: Duration = Duration::from_millis(50);
/// Error of a nonblocking socket whose connection is not yet established.
const EINPROGRESS: i32 = 115;
/// Maximum duration of a reconnect.
const RECONNECT_MAX: Duration = Duration::from_secs(15);

#[derive(Debug, Parser)]
struct Args {
    /// Length of each run, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Connections per second.
    #[arg(long, default_value_t = 2000)]
    rate: u64,
    /// Time for which a connection is held, in seconds.
    #[arg(long, default_value_t = 3)]
    hold: u64,
    /// Number of runs of each kind, baseline and crowd alternating.
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Seconds between forced reconnects of the session.
    #[arg(long, default_value_t = 5)]
    reconnect: u64,
    /// Kinds of connections: 0 opened and closed, 1 silent, 2 half of an MPA request, 3 CON_REQ,
    /// 4 a handshake without an OPEN.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1, 2, 3, 4])]
    kinds: Vec<u64>,
    /// Full TLS handshakes per second in addition; the session uses tls:// too.
    #[arg(long, default_value_t = 0)]
    tls: u64,
    /// Additional flags of the server.
    #[arg(last = true)]
    server: Vec<String>,
}

/// Counters of the crowd.
#[derive(Debug, Default)]
struct Counts {
    opened: AtomicU64,
    failed: AtomicU64,
    most_held: AtomicU64,
    /// Successful and failed TLS handshakes.
    handshakes: AtomicU64,
    failed_handshakes: AtomicU64,
}

/// A crowd connection: the remaining messages, and the time of its next action.
struct CrowdConn {
    stream: TcpStream,
    due: Instant,
    left: VecDeque<Vec<u8>>,
    end: Instant,
}

/// Returns the messages of connection number `n` of this kind; None for a connection that is closed
/// immediately.
fn messages(kind: u64, n: u64) -> Option<VecDeque<Vec<u8>>> {
    let mut uuid = [0xf1; 16];
    uuid[..8].copy_from_slice(&n.to_le_bytes());
    let whole = |cid_num| {
        let request = ConnReq {
            cid: ConnIndex(0),
            cid_num,
            recon_cnt: 1,
            path_uuid: PathUuid(uuid),
            session_id: SessionId(uuid),
            first_conn: true,
            ext: [0; 11],
        };
        start_frame(REQUEST_KEY, ENHANCED | CRC, 2, &start_data(&request.encode()))
    };
    let messages = match kind {
        0 => return None,
        1 => Vec::new(),
        2 => vec![whole(1)[..20].to_vec()],
        3 => vec![whole(2)],
        _ => {
            let session_name = Name::new(format!("crowd-{n}").as_bytes()).expect("a name");
            let ready = frame(&tagged(WRITE, 1, 0, &[]));
            let info = frame(&send(1, &InfoReq { session_name }.encode()));
            vec![whole(1), ready, info]
        }
    };
    Some(messages.into())
}

fn open(target: SocketAddr, n: u64) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    let host = u8::try_from(1 + n % SOURCES).expect("below 251");
    socket.bind(&SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(127, 0, 1, host), 0)).into())?;
    // The connection ends with a reset, so that the crowd does not use up the ports.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&target.into()) {
        Err(error) if error.raw_os_error() != Some(EINPROGRESS) => return Err(error),
        _ => {}
    }
    Ok(socket.into())
}

impl CrowdConn {
    /// Performs the steps that are due. Returns false if the connection has ended.
    fn step(&mut self, now: Instant) -> bool {
        let mut buffer = [0; 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // The socket is not connected yet.
                Err(e) if e.kind() == ErrorKind::NotConnected => break,
                Err(_) => return false,
            }
        }
        if let Some(message) = self.left.front() {
            match self.stream.write(message) {
                Ok(_) => drop(self.left.pop_front()),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => {}
                Err(_) => return false,
            }
        }
        self.due = now + if self.left.is_empty() { STEP * 10 } else { STEP };
        now < self.end
    }
}

/// Opens `rate` connections per second until `stop` is set.
fn crowd(args: &Args, target: SocketAddr, first: u64, stop: &AtomicBool, counts: &Counts) {
    let start = Instant::now();
    // Held connections by number. Each has the time of its next action, so waiting costs nothing.
    let mut held: HashMap<u64, CrowdConn> = HashMap::new();
    let mut due: BinaryHeap<Reverse<(Instant, u64)>> = BinaryHeap::new();
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        let wanted = start.elapsed().as_millis() as u64 * args.rate / 1000;
        while count < wanted {
            count += 1;
            let Ok(stream) = open(target, first + count) else {
                counts.failed.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            counts.opened.fetch_add(1, Ordering::Relaxed);
            let kind = args.kinds[count as usize % args.kinds.len()];
            let Some(left) = messages(kind, first + count) else { continue };
            let end = now + Duration::from_secs(args.hold);
            let mut conn = CrowdConn { stream, due: now, left, end };
            if conn.step(now) {
                due.push(Reverse((conn.due, count)));
                held.insert(count, conn);
            }
        }
        counts.most_held.fetch_max(held.len() as u64, Ordering::Relaxed);
        while due.peek().is_some_and(|Reverse((at, _))| *at <= now) {
            let Some(Reverse((_, number))) = due.pop() else { break };
            let Some(conn) = held.get_mut(&number) else { continue };
            if conn.step(now) {
                due.push(Reverse((conn.due, number)));
            } else {
                held.remove(&number);
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Number of threads for TLS handshakes.
const HANDSHAKE_THREADS: u64 = 8;

/// Performs one thread's share of the `--tls` handshakes until `stop` is set.
fn make_handshakes(
    rate: u64,
    config: &TlsClientConfig,
    target: SocketAddr,
    first: u64,
    stop: &AtomicBool,
    counts: &Counts,
) {
    let start = Instant::now();
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let wanted = start.elapsed().as_millis() as u64 * rate / (1000 * HANDSHAKE_THREADS);
        if count >= wanted {
            thread::sleep(Duration::from_millis(2));
            continue;
        }
        count += 1;
        let handshake = open(target, first + count).and_then(|mut stream| {
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.set_write_timeout(Some(Duration::from_secs(5)))?;
            tls_handshake(config, &mut stream)
        });
        let counter =
            if handshake.is_ok() { &counts.handshakes } else { &counts.failed_handshakes };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Opens a port that only accepts and closes connections.
fn accept_and_close() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    thread::spawn(move || listener.incoming().for_each(drop));
    address
}

/// The server's control socket.
struct Control(PathBuf);

impl Control {
    fn ask(&self, what: &Value) -> Value {
        let answer = request::<Value>(&self.0, what, Duration::from_secs(15));
        answer.map(|(value, _)| value).unwrap_or_else(|error| json!({ "error": error.to_string() }))
    }

    /// Returns the name of the benchmark's session, which begins with [`NAME`], and its connected
    /// path.
    fn path(&self) -> Option<(String, u64)> {
        let list = self.ask(&json!({ "command": "session-list" }));
        let sessions = list["sessions"].as_array()?;
        let name = |session: &Value| session["name"].as_str().map(str::to_owned);
        let is_ours = |name: &String| name.starts_with(NAME);
        let ours = sessions.iter().find(|session| name(session).is_some_and(|n| is_ours(&n)))?;
        let paths = ours["paths"].as_array()?;
        let up = paths.iter().find(|path| path["state"] == "connected")?;
        let path = up["path"].as_u64()?;
        (!ours["opens"].as_array()?.is_empty()).then(|| name(ours).map(|name| (name, path)))?
    }

    /// Ends the session's path and waits until the session has a new path and its export is open.
    fn reconnect(&self) -> Option<Duration> {
        let (name, before) = self.path()?;
        self.ask(&json!({ "command": "session-disconnect", "session": name }));
        let start = Instant::now();
        while start.elapsed() < RECONNECT_MAX {
            if self.path().is_some_and(|(_, path)| path != before) {
                return Some(start.elapsed());
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

/// Keys of the server and of the one client that the server knows.
struct Keys {
    scratch: Scratch,
    server: PublicKey,
    config: TlsClientConfig,
}

impl Keys {
    fn new() -> Self {
        let scratch = Scratch::new();
        let make = |name: &str| {
            let key = PrivateKey::generate().expect("random numbers");
            key.write_new(&scratch.path(name)).expect("a key file");
            key
        };
        let (server, client) = (make("server.key"), make("client.key"));
        let list = format!("flood {}\n", client.public());
        std::fs::write(scratch.path("clients"), list).expect("the list");
        let config = TlsClientConfig::with_keys(&client, &[server.public()]).expect("a key");
        Self { server: server.public(), config, scratch }
    }

    fn server_flags(&self) -> Vec<String> {
        let file = |name: &str| self.scratch.text(name);
        ["--key-file".into(), file("server.key"), "--clients-file".into(), file("clients")].into()
    }

    fn client_flags(&self) -> Vec<String> {
        let (file, key) = (self.scratch.text("client.key"), self.server.to_string());
        ["--key-file".into(), file, "--server-key".into(), key].into()
    }
}

/// Results of a run.
struct Run {
    iops: f64,
    errors: u64,
    p99: f64,
    reconnects: Vec<Option<Duration>>,
}

/// Runs the session with a crowd at `target`.
fn run(
    args: &Args,
    portal: &str,
    keys: Option<&Keys>,
    control: &Control,
    target: SocketAddr,
    first: u64,
) -> Run {
    let (stop, counts) = (Arc::new(AtomicBool::new(false)), Counts::default());
    let seconds = format!("{}s", args.seconds);
    let mut bench = Command::new(bin("rtrs-client"));
    bench.args(["bench", "vol", "--path", portal, "--runtime", &seconds, "--iodepth", "32"]);
    bench.args(["--session-name", NAME, "-o", "json", "--log", "warn"]);
    bench.args(keys.map(Keys::client_flags).unwrap_or_default());
    let bench = bench.stdout(Stdio::piped()).spawn().expect("rtrs-client");
    let mut reconnects = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| crowd(args, target, first, &stop, &counts));
        for thread in 0..keys.map_or(0, |_| HANDSHAKE_THREADS) {
            let (stop, counts) = (&*stop, &counts);
            let config = keys.map(|keys| &keys.config);
            scope.spawn(move || {
                if let Some(config) = config {
                    make_handshakes(args.tls, config, target, first + thread, stop, counts);
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(args.seconds);
        while Instant::now() + Duration::from_secs(args.reconnect) < end {
            thread::sleep(Duration::from_secs(args.reconnect));
            reconnects.push(control.reconnect());
        }
        thread::sleep(end.saturating_duration_since(Instant::now()));
        stop.store(true, Ordering::Relaxed);
    });
    let out = bench.wait_with_output().expect("the end of the bench");
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
    let Counts { opened, failed, most_held, handshakes, failed_handshakes } = counts;
    let [opened, failed, held] = [opened, failed, most_held].map(AtomicU64::into_inner);
    println!("  crowd: {opened} connections opened, {failed} failed, at most {held} held");
    let [handshakes, failed_handshakes] =
        [handshakes, failed_handshakes].map(AtomicU64::into_inner);
    println!("  TLS handshakes: {handshakes} made, {failed_handshakes} failed");
    Run {
        iops: summary["iops"].as_f64().unwrap_or(0.0),
        errors: summary["errors"].as_u64().unwrap_or(u64::MAX),
        p99: summary["lat_us"]["p99"].as_f64().unwrap_or(0.0),
        reconnects,
    }
}

impl Run {
    fn print(&self, what: &str) {
        let took: Vec<String> = self
            .reconnects
            .iter()
            .map(|took| took.map_or("never".to_owned(), |took| format!("{}", took.as_millis())))
            .collect();
        let Self { iops, errors, p99, .. } = self;
        let took = took.join(" ");
        println!("{what}: {iops:.0} IOPS, p99 {p99:.0} us, {errors} errors; reconnects ms: {took}");
    }
}

fn main() {
    let args = Args::parse();
    let files = raise_open_files().unwrap_or(0);
    let flags: Vec<&str> = args.server.iter().map(String::as_str).collect();
    let keys = (args.tls > 0).then(Keys::new);
    let key_flags = keys.as_ref().map(Keys::server_flags).unwrap_or_default();
    let key_flags: Vec<&str> = key_flags.iter().map(String::as_str).collect();
    let mut server = Server::builder()
        .export("vol=null:1G")
        .listen(if keys.is_some() { "tls://127.0.0.1:0" } else { "tcp://127.0.0.1:0" })
        .args(&["--name", NAME, "--log", "error"])
        .args(&key_flags)
        .args(&flags)
        .start();
    let portal = server.portal().to_owned();
    let address: SocketAddr = server.address().parse().expect("an address");
    let run_dir = RunDir::new(Some(server.run_dir())).expect("a run directory");
    let control = Control(run_dir.server_socket(NAME));
    assert!(control.ask(&json!({ "command": "status" }))["pid"].is_u64(), "no control socket");
    let before = resident_memory(server.pid());
    println!("{} connections/s for {} s, {files} open files", args.rate, args.seconds);
    let (mut first, mut sums, mut sums_p99) = (0, [0.0; 2], [0.0; 2]);
    let used = || [server.pid(), std::process::id()].map(cpu_time);
    for round in 1..=args.rounds {
        for (kind, what) in ["baseline", "crowd"].into_iter().enumerate() {
            let before = used();
            let target = if kind == 0 { accept_and_close() } else { address };
            let done = run(&args, &portal, keys.as_ref(), &control, target, first);
            first += args.rate * (args.seconds + 10);
            sums[kind] += done.iops;
            sums_p99[kind] += done.p99;
            done.print(&format!("{round} {what}"));
            let [server, crowd] = used().map(|time| time.as_secs_f64());
            let [server_before, crowd_before] = before.map(|time| time.as_secs_f64());
            let (server, crowd) = (server - server_before, crowd - crowd_before);
            println!("  CPU: server {server:.1} s, crowd {crowd:.1} s");
            thread::sleep(Duration::from_secs(1));
        }
    }
    server.check_alive();
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let peak = peak_memory(server.pid());
    println!("p99: {:.2} times that of the baseline", sums_p99[1] / sums_p99[0].max(1.0));
    println!("IOPS: {:.1} % of the baseline", 100.0 * sums[1] / sums[0].max(1.0));
    println!("server memory: {:.1} MiB, at most {:.1} MiB", mebibytes(before), mebibytes(peak));
    println!("refused: {}", control.ask(&json!({ "command": "session-list" }))["refused"]);
    let _ = server.stop(STOP_TIME_MAX);
}
