//! Checks that no request allocates memory on either end once both ends have warmed up.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rtrs_core::tls::PrivateKey;
use rtrs_tests::{Client, RawNbd, STOP_TIME_MAX, Scratch, Server, consts};

/// Number of requests in flight at a time.
const BURST: u64 = 16;
const SIZE: u64 = 16 << 20;
/// Maximum number of allocations per second that are not caused by requests.
const TIMERS_PER_SECOND: u64 = 50;

/// The client or server, which counts its allocations.
struct Counted(String);

impl Counted {
    fn new(scratch: &Scratch, name: &str) -> Self {
        Self(scratch.text(name))
    }

    fn allocations(&self) -> u64 {
        let mut text = String::new();
        let mut stream = UnixStream::connect(&self.0).expect("a process that counts");
        let _ = stream.read_to_string(&mut text).expect("a number");
        text.parse().expect("a number")
    }
}

/// A round of requests, and the number of allocations on each end during it.
#[derive(Debug)]
struct Round {
    requests: u64,
    took: Duration,
    server: u64,
    client: u64,
}

impl Round {
    /// Whether the requests allocated nothing. Heartbeats and timers may allocate, and on a busy
    /// machine many of them run in a round.
    fn is_free(&self) -> bool {
        let of_timers = self.took.as_millis() * u128::from(TIMERS_PER_SECOND) / 1000;
        u128::from(self.server.max(self.client)) < u128::from(self.requests / 100) + of_timers
    }
}

/// A request's flags, command and length.
type Kind = (u16, u16, u32);

const IO: [Kind; 6] = [
    (0, consts::CMD_READ, 4096),
    (0, consts::CMD_WRITE, 4096),
    (consts::CMD_FLAG_FUA, consts::CMD_WRITE, 4096),
    (0, consts::CMD_READ, 128 << 10),
    (0, consts::CMD_WRITE, 128 << 10),
    (0, consts::CMD_FLUSH, 0),
];

/// Sends requests in bursts and takes their answers. Returns their number.
fn work(nbd: &mut RawNbd, kinds: &[Kind], bursts: u64) -> u64 {
    let mut data = vec![0x5a; 128 << 10];
    for burst in 0..bursts {
        for &(flags, command, len) in kinds {
            let mut cookies = [0; BURST as usize];
            for (at, cookie) in (0..).zip(&mut cookies) {
                let place = (burst * BURST + at) * (128 << 10) % SIZE;
                let offset = if command == consts::CMD_FLUSH { 0 } else { place };
                *cookie = nbd.send_request(flags, command, offset, len);
                if command == consts::CMD_WRITE {
                    nbd.send(&data[..len as usize]);
                }
            }
            let read = if command == consts::CMD_READ { len as usize } else { 0 };
            nbd.take_replies(&cookies, &mut data[..read]);
        }
    }
    bursts * BURST * kinds.len() as u64
}

/// Arguments for both ends of a path with these keys.
#[derive(Default)]
struct Ends {
    server: Vec<String>,
    client: Vec<String>,
}

fn with_keys(scratch: &Scratch) -> Ends {
    let key = |name: &str| {
        let key = PrivateKey::generate().expect("random numbers");
        key.write_new(Path::new(&scratch.text(name))).expect("a file");
        key.public().to_string()
    };
    let (server, client) = (key("server.key"), key("client.key"));
    fs::write(scratch.path("clients"), format!("db1 {client}\n")).expect("a file");
    let words = |words: [&str; 4]| words.map(str::to_owned).to_vec();
    let list =
        ["--key-file", &scratch.text("server.key"), "--clients-file", &scratch.text("clients")];
    Ends {
        server: words(list),
        client: words(["--key-file", &scratch.text("client.key"), "--server-key", &server]),
    }
}

fn words(of: &[String]) -> Vec<&str> {
    of.iter().map(String::as_str).collect()
}

fn check(scheme: &str, target: &str, kinds: &[Kind], ends: &Ends, scratch: &Scratch) {
    let (there, here) = (Counted::new(scratch, "server"), Counted::new(scratch, "client"));
    let server = Server::builder().program("rtrs-counted").env("RTRS_COUNTED", &there.0);
    let server = server.listen(format!("{scheme}://127.0.0.1:0")).args(&words(&ends.server));
    let server = server.export(format!("vol0={target}")).start();
    let client = Client::attach("vol0").program("rtrs-counted").env("RTRS_COUNTED", &here.0);
    let client = client.args(&words(&ends.client)).path(server.portal());
    let mut client = client.start_foreground();
    let mut nbd = RawNbd::go(client.front(), "vol0");
    work(&mut nbd, kinds, 20);
    // Allocations by requests would show in every round.
    let rounds: Vec<_> = (0..5)
        .map(|_| {
            let (before, begin) = ((there.allocations(), here.allocations()), Instant::now());
            let requests = work(&mut nbd, kinds, 100);
            let server = there.allocations() - before.0;
            let client = here.allocations() - before.1;
            Round { requests, took: begin.elapsed(), server, client }
        })
        .collect();
    assert!(rounds.iter().any(Round::is_free), "{scheme}, {target}: {rounds:#?}");
    drop(nbd);
    let _ = client.take_foreground().terminate(STOP_TIME_MAX);
    let _ = server.stop(STOP_TIME_MAX);
}

/// Discards are left out because they free memory.
#[test]
fn requests_to_memory_exports_do_not_allocate() {
    check("tcp", "mem:16M", &IO, &Ends::default(), &Scratch::new());
}

#[test]
fn requests_to_file_exports_do_not_allocate() {
    let scratch = Scratch::new();
    let file = scratch.text("image");
    let image = fs::File::create(&file).expect("a file");
    image.set_len(SIZE).expect("a file of 16 MiB");
    let kinds = [&IO[..], &[(0, consts::CMD_TRIM, 64 << 10)]].concat();
    check("tcp", &file, &kinds, &Ends::default(), &scratch);
}

#[test]
fn requests_over_tls_do_not_allocate() {
    let scratch = Scratch::new();
    check("tls", "mem:16M", &IO, &with_keys(&scratch), &scratch);
}

/// The first and the last block are read and written back.
#[test]
fn partial_block_requests_do_not_allocate() {
    let kinds = [
        (0, consts::CMD_READ, 1000),
        (0, consts::CMD_WRITE, 1000),
        (consts::CMD_FLAG_FUA, consts::CMD_WRITE, 5000),
        (0, consts::CMD_WRITE, 100_001),
    ];
    check("tcp", "mem:16M", &kinds, &Ends::default(), &Scratch::new());
}
