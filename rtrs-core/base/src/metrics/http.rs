//! HTTP server that answers `GET /metrics` and nothing else.
//!
//! [`MetricsServer`] uses one thread to accept connections, and a small thread per connection. Any
//! client that can reach the port may connect, so everything is limited: the size of a request, the
//! time to receive it and to send the response, the number of connections, and how often the text
//! is generated. A connection that sends no request is closed when others need room. Each
//! connection gets one response.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use socket2::Socket;

use crate::local::timed::Limit;
use crate::local::{PassedSocket, SocketFile, bind_unix};
use crate::settings::MetricsAddress;
use crate::time::Duration;

/// Time limit for receiving a request, and for sending a response.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the client to close the connection after the response.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum length of a request, including all its headers.
const REQUEST_MAX: usize = 8192;
/// Maximum number of simultaneous connections.
const CONNECTIONS_MAX: usize = 16;
/// Minimum interval between generations of the text. Requests that arrive sooner wait.
const INTERVAL_MIN: Duration = Duration::from_millis(250);
/// Stack size of a connection's thread.
const STACK_BYTES: usize = 512 << 10;
/// Pause after a failed accept, for example because the process has no free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Listening metrics server, which stops when dropped.
#[derive(Debug)]
pub struct MetricsServer {
    listener: Arc<Socket>,
    at: String,
    ending: Arc<AtomicBool>,
    /// Whether the service manager also holds the socket.
    is_passed: bool,
    _file: Option<SocketFile>,
}

impl MetricsServer {
    /// Binds the address.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn bind(address: &MetricsAddress) -> io::Result<Self> {
        let (listener, at, file) = match address {
            MetricsAddress::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                let at = Self::name(&MetricsAddress::Tcp(listener.local_addr()?));
                (Socket::from(listener), at, None)
            }
            MetricsAddress::Unix(path) => {
                let (listener, file) = bind_unix(path)?;
                (Socket::from(listener), Self::name(address), Some(file))
            }
        };
        Ok(Self::new(listener, at, file))
    }

    /// Serves a listening socket passed by the service manager
    /// ([`passed_sockets`](crate::local::passed_sockets)). The manager keeps it open, so the thread
    /// that accepts ends with the process.
    #[must_use]
    pub fn on_passed(passed: PassedSocket) -> Self {
        let at = match (passed.address(), passed.path()) {
            (Some(address), _) => format!("http://{address}/metrics"),
            (None, Some(path)) => MetricsAddress::Unix(path).to_string(),
            (None, None) => "a socket without a path".to_owned(),
        };
        let mut server = Self::new(passed.socket, at, None);
        server.is_passed = true;
        server
    }

    fn new(listener: Socket, at: String, file: Option<SocketFile>) -> Self {
        let listener = Arc::new(listener);
        Self { listener, at, ending: Arc::default(), is_passed: false, _file: file }
    }

    /// Returns the address of a server that is bound to this address, like [`at`](Self::at).
    #[must_use]
    pub fn name(address: &MetricsAddress) -> String {
        match address {
            MetricsAddress::Tcp(address) => format!("http://{address}/metrics"),
            MetricsAddress::Unix(_) => address.to_string(),
        }
    }

    /// Returns the address of the server: `http://ADDR:PORT/metrics` or `unix:PATH`.
    #[must_use]
    pub fn at(&self) -> &str {
        &self.at
    }

    /// Answers requests with the text that `make` returns; an error is answered with 503. `make` is
    /// called on a thread of this server after the request has arrived, at most four times a
    /// second, and never concurrently. Requests that wait for it share the text.
    ///
    /// # Errors
    /// Returns the system's error if the thread cannot be started.
    pub fn serve(
        &self,
        make: impl Fn() -> Result<String, String> + Send + Sync + 'static,
    ) -> io::Result<()> {
        let (listener, ending) = (Arc::clone(&self.listener), Arc::clone(&self.ending));
        let shared = Arc::new(Shared {
            make: Box::new(make),
            made: Mutex::default(),
            open: Open::default(),
        });
        let accept = move || {
            for number in 0_u64.. {
                let accepted = listener.accept();
                if ending.load(Ordering::SeqCst) {
                    break;
                }
                let started = accepted.and_then(|(stream, _)| start(number, stream, &shared));
                if let Err(error) = started {
                    tracing::debug!("metrics: {error}");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
            shared.open.end_all();
        };
        std::thread::Builder::new().name("rtrs-metrics".into()).spawn(accept).map(drop)
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        // Wake the thread that waits in accept. A shutdown would affect the manager's socket too.
        if !self.is_passed {
            end(&self.listener);
        }
    }
}

fn end(socket: &Socket) {
    if let Err(error) = socket.shutdown(Shutdown::Both) {
        tracing::debug!("metrics: {error}");
    }
}

/// Last result of `make`.
struct Made {
    begun: Instant,
    ended: Instant,
    text: Result<Arc<str>, String>,
}

/// State shared by all connections.
struct Shared {
    make: Box<dyn Fn() -> Result<String, String> + Send + Sync>,
    made: Mutex<Option<Made>>,
    open: Open,
}

impl Shared {
    /// Returns text whose generation began after this call, so that it shows no earlier state.
    fn text(&self) -> Result<Arc<str>, String> {
        let asked = Instant::now();
        let mut made = self.made.lock();
        if let Some(last) = &*made {
            if last.begun >= asked {
                return last.text.clone();
            }
            // The requests waiting for the lock get the same text.
            std::thread::sleep(INTERVAL_MIN.saturating_sub(last.ended.elapsed()));
        }
        let begun = Instant::now();
        let text = (self.make)().map(Arc::from);
        *made = Some(Made { begun, ended: Instant::now(), text: text.clone() });
        text
    }
}

/// Open connection.
#[derive(Debug)]
struct Connection {
    number: u64,
    stream: Socket,
    /// The request has arrived.
    asked: bool,
}

/// Open connections, oldest first.
#[derive(Debug, Default)]
struct Open(Mutex<VecDeque<Connection>>);

impl Open {
    /// Adds a connection. If there are too many, closes the oldest that has not sent a request;
    /// returns false if all have sent one.
    fn add(&self, number: u64, stream: Socket) -> bool {
        let mut all = self.0.lock();
        if all.len() >= CONNECTIONS_MAX {
            let silent = all.iter().position(|other| !other.asked);
            let Some(oldest) = silent.and_then(|at| all.remove(at)) else { return false };
            end(&oldest.stream);
        }
        all.push_back(Connection { number, stream, asked: false });
        true
    }

    fn asked(&self, number: u64) {
        let mut all = self.0.lock();
        all.iter_mut().filter(|one| one.number == number).for_each(|one| one.asked = true);
    }

    fn remove(&self, number: u64) {
        self.0.lock().retain(|other| other.number != number);
    }

    fn end_all(&self) {
        self.0.lock().drain(..).for_each(|one| end(&one.stream));
    }
}

/// Starts the thread of a connection.
fn start(number: u64, stream: Socket, shared: &Arc<Shared>) -> io::Result<()> {
    if !shared.open.add(number, stream.try_clone()?) {
        return Ok(());
    }
    let serving = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("rtrs-scrape".into()).stack_size(STACK_BYTES);
    let started = thread.spawn(move || {
        if let Err(error) = serve_one(number, &stream, &serving) {
            tracing::debug!("metrics: {error}");
        }
        serving.open.remove(number);
    });
    started.map(drop).inspect_err(|_| shared.open.remove(number))
}

/// Reads a request and answers it.
fn serve_one(number: u64, stream: &Socket, shared: &Shared) -> io::Result<()> {
    let answer = read_request(stream)?;
    shared.open.asked(number);
    let (status, allow, body) = match answer {
        Answer::Metrics | Answer::Head => match shared.text() {
            Ok(text) => ("200 OK", "", text),
            Err(why) => ("503 Service Unavailable", "", format!("{why}\n").into()),
        },
        Answer::NotFound => ("404 Not Found", "", "the metrics are at /metrics\n".into()),
        Answer::NotAllowed => {
            ("405 Method Not Allowed", "Allow: GET, HEAD\r\n", "use GET\n".into())
        }
        Answer::Bad => ("400 Bad Request", "", "not understood\n".into()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\n{allow}Connection: close\r\n\r\n",
        body.len()
    );
    let limit = Limit::new("the response", TIMEOUT);
    limit.write(stream, head.as_bytes())?;
    if answer != Answer::Head {
        limit.write(stream, body.as_bytes())?;
    }
    // Unread data from the client would reset the connection, and the response would be lost.
    stream.shutdown(Shutdown::Write)?;
    let limit = Limit::new("the close", CLOSE_TIMEOUT);
    let mut room = [0; 4096];
    while limit.read(stream, &mut room)? > 0 {}
    Ok(())
}

/// Response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Metrics,
    /// The headers of [`Answer::Metrics`].
    Head,
    NotFound,
    NotAllowed,
    Bad,
}

/// Reads a request up to the end of its headers.
fn read_request(stream: &Socket) -> io::Result<Answer> {
    let limit = Limit::new("the request", TIMEOUT);
    let (mut text, mut room) = (Vec::new(), [0; 2048]);
    loop {
        let count = limit.read(stream, &mut room)?;
        text.extend_from_slice(&room[..count]);
        if let Some(end) = text.windows(4).position(|four| four == b"\r\n\r\n") {
            let fits = end <= REQUEST_MAX;
            return Ok(if fits { judge(&text[..end]) } else { Answer::Bad });
        }
        match count {
            0 if text.is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
            0 => return Ok(Answer::Bad),
            _ if text.len() > REQUEST_MAX => return Ok(Answer::Bad),
            _ => {}
        }
    }
}

/// Validates the request line and the headers.
fn judge(head: &[u8]) -> Answer {
    let Ok(head) = str::from_utf8(head) else { return Answer::Bad };
    let mut lines = head.split("\r\n");
    let words: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, "HTTP/1.0" | "HTTP/1.1"] = words[..] else { return Answer::Bad };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
    let is_header = |line: &str| {
        let name = line.split_once(':').map_or("", |(name, _)| name);
        let has_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
        has_name && !line.contains(['\r', '\n', '\0'])
    };
    if !is_method || !lines.all(is_header) {
        return Answer::Bad;
    }
    match (method, path_of(target)) {
        (_, None) => Answer::Bad,
        ("GET", Some("/metrics")) => Answer::Metrics,
        ("HEAD", Some("/metrics")) => Answer::Head,
        (_, Some("/metrics")) => Answer::NotAllowed,
        _ => Answer::NotFound,
    }
}

/// Path of a request target in origin form or absolute form (RFC 9112, sections 3.2.1 and 3.2.2).
/// None for other forms, and for URIs with other schemes or without a host.
fn path_of(target: &str) -> Option<&str> {
    let path = if target.starts_with('/') {
        target
    } else {
        let (scheme, rest) = target.split_once("://")?;
        let host_len = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        if !scheme.eq_ignore_ascii_case("http") || host_len == 0 {
            return None;
        }
        &rest[host_len..]
    };
    path.split('?').next()
}

#[cfg(test)]
mod tests;
