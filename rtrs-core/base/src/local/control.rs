//! Control sockets: one request and one reply per connection, each a line of JSON.
//!
//! This module contains the listening end ([`ControlSocket`]), which replies on a thread of its
//! own, off the IO path, and the requesting end ([`request`]). A request is at most 4096 bytes
//! long, and the request and the reply each have a total time limit. Each connection has its own
//! thread, with a small stack, until its request has arrived, so a client that stops in the middle,
//! or sends nothing, delays no other client; if there are too many such connections, the oldest is
//! closed. The daemon defines the types of requests and replies. A request that the daemon refuses,
//! or does not know, is answered with `{"error": WHY}`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use super::timed::{Limit, timed_out};
use super::unix_socket::{SocketFile, bind_unix};
use crate::rt::is_hung_up;
use crate::time::Duration;

/// Time limit for receiving a request, and for sending a reply.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a request.
const REQUEST_MAX: usize = 4096;
/// Maximum length of a reply, far above that of any actual reply.
const REPLY_MAX: usize = 64 << 20;
/// Maximum number of connections whose requests have not arrived yet.
const SILENT_MAX: usize = 64;
/// Maximum number of requests that are waiting for a reply.
const WAITING_MAX: usize = 64;
/// Stack size of a thread that only reads a line.
const STACK_BYTES: usize = 128 << 10;
/// Pause after a failed accept, for example because the process has no free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Request that has arrived, and the stream for its reply.
type Received = (String, UnixStream);

/// Listening control socket. Dropping it stops the replies and removes its path.
#[derive(Debug)]
pub struct ControlSocket(Arc<Shared>);

/// Handle that recreates the path of a control socket.
#[derive(Clone, Debug)]
pub struct SocketRenewal(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None once the socket has been dropped, or if it could not be bound again.
    bound: Option<Bound>,
    /// Queue of the thread that replies.
    received: Option<mpsc::SyncSender<Received>>,
    ended: bool,
}

/// Listener at the path.
#[derive(Debug)]
struct Bound {
    listener: UnixListener,
    ending: Arc<AtomicBool>,
    file: SocketFile,
}

impl ControlSocket {
    /// Binds the socket, accessible to this user only. Replaces a stale socket.
    ///
    /// # Errors
    /// See [`bind_unix`].
    pub fn bind(path: &Path) -> io::Result<Self> {
        let state = State { bound: Some(Bound::new(path)?), received: None, ended: false };
        Ok(Self(Arc::new(Shared { path: path.to_owned(), state: Mutex::new(state) })))
    }

    /// Passes every request to `handle`, one at a time, on a thread of its own. The handler replies
    /// with [`reply`], immediately or later. A request that does not parse as `R` is refused. A
    /// request whose sender has closed the connection is dropped: a command that gave up, for
    /// example while this process was stopped, must not take effect later.
    ///
    /// # Errors
    /// Returns the system's error if no thread or descriptor is available.
    pub fn serve<R: DeserializeOwned>(
        &self,
        mut handle: impl FnMut(R, UnixStream) + Send + 'static,
    ) -> io::Result<()> {
        let (received, requests) = mpsc::sync_channel::<Received>(WAITING_MAX);
        // This thread ends when the socket, the accepting thread and all threads that read requests
        // have ended.
        std::thread::Builder::new().name("rtrs-control".into()).spawn(move || {
            for (line, stream) in requests {
                if is_hung_up(&stream) {
                    tracing::warn!(
                        "control socket: request dropped: the requester has disconnected"
                    );
                    continue;
                }
                match serde_json::from_str(&line) {
                    Ok(request) => handle(request, stream),
                    Err(error) => reply::<()>(&stream, Err(format!("malformed request: {error}"))),
                }
            }
        })?;
        let mut state = self.0.state.lock();
        state.bound.iter().try_for_each(|bound| bound.accept(received.clone()))?;
        state.received = Some(received);
        Ok(())
    }

    /// Returns a handle that may outlive the socket.
    #[must_use]
    pub fn renewal(&self) -> SocketRenewal {
        SocketRenewal(Arc::clone(&self.0))
    }
}

impl SocketRenewal {
    /// Recreates the path if it has been removed, and logs that. Has no effect once the socket has
    /// been dropped.
    pub fn renew(&self) {
        match self.0.renew() {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!("control socket {} recreated", self.0.path.display());
            }
            Err(error) => tracing::warn!(
                "cannot recreate the control socket {}: {error}",
                self.0.path.display()
            ),
        }
    }
}

impl Shared {
    /// Binds again if the path has been removed. Returns false if there was no need.
    fn renew(&self) -> io::Result<bool> {
        let mut state = self.state.lock();
        let is_missing = |bound: &Bound| bound.file.is_missing();
        if state.ended || !state.bound.as_ref().is_none_or(is_missing) {
            return Ok(false);
        }
        // Drop the old socket first: the new one may get the inode number that identifies its file.
        state.bound = None;
        let bound = Bound::new(&self.path)?;
        state.received.iter().try_for_each(|received| bound.accept(received.clone()))?;
        state.bound = Some(bound);
        Ok(true)
    }
}

impl Bound {
    fn new(path: &Path) -> io::Result<Self> {
        let (listener, file) = bind_unix(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, ending: Arc::default(), file })
    }

    /// Starts the thread that accepts connections and passes on their requests.
    fn accept(&self, received: mpsc::SyncSender<Received>) -> io::Result<()> {
        let listener = self.listener.try_clone()?;
        let ending = Arc::clone(&self.ending);
        std::thread::Builder::new().name("rtrs-accept".into()).spawn(move || {
            let silent = Arc::new(Silent::default());
            for (number, stream) in (0_u64..).zip(listener.incoming()) {
                if ending.load(Ordering::SeqCst) {
                    break;
                }
                let started = stream.and_then(|stream| receive(number, stream, &silent, &received));
                if let Err(error) = started {
                    tracing::debug!("control socket: {error}");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
            silent.end_all();
        })?;
        Ok(())
    }
}

/// Connections without a complete request, oldest first.
#[derive(Debug, Default)]
struct Silent(Mutex<VecDeque<(u64, UnixStream)>>);

impl Silent {
    /// Adds a connection; if there are too many, closes the oldest.
    fn add(&self, number: u64, stream: UnixStream) {
        let mut all = self.0.lock();
        if all.len() >= SILENT_MAX
            && let Some((_, oldest)) = all.pop_front()
        {
            end(&oldest);
        }
        all.push_back((number, stream));
    }

    fn remove(&self, number: u64) {
        self.0.lock().retain(|(other, _)| *other != number);
    }

    fn end_all(&self) {
        for (_, stream) in self.0.lock().drain(..) {
            end(&stream);
        }
    }
}

/// Wakes the thread that reads from the stream.
fn end(stream: &UnixStream) {
    if let Err(error) = stream.shutdown(std::net::Shutdown::Both) {
        tracing::debug!("control socket: {error}");
    }
}

/// Reads a request on a separate thread and passes it on.
fn receive(
    number: u64,
    stream: UnixStream,
    silent: &Arc<Silent>,
    received: &mpsc::SyncSender<Received>,
) -> io::Result<()> {
    silent.add(number, stream.try_clone()?);
    let (known, received) = (Arc::clone(silent), received.clone());
    let reader = std::thread::Builder::new().name("rtrs-request".into()).stack_size(STACK_BYTES);
    let started = reader.spawn(move || {
        let line = read_line(&stream, REQUEST_MAX, TIMEOUT);
        known.remove(number);
        let passed_on = line.and_then(|line| {
            received.try_send((line, stream)).map_err(|_| io::ErrorKind::ResourceBusy.into())
        });
        if let Err(error) = passed_on {
            tracing::debug!("control socket: {error}");
        }
    });
    started.map(drop).inspect_err(|_| silent.remove(number))
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        (state.bound, state.received, state.ended) = (None, None, true);
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        // Wake the thread that waits in accept.
        if let Err(error) = SockRef::from(&self.listener).shutdown(std::net::Shutdown::Both) {
            tracing::debug!("control socket: {error}");
        }
    }
}

/// Replies to a request within the time limit, with a value or with the reason for refusing it.
pub fn reply<T: Serialize>(stream: &UnixStream, reply: Result<T, String>) {
    let value = match reply {
        Ok(value) => serde_json::to_value(value),
        Err(why) => Ok(serde_json::json!({ "error": why })),
    };
    let written = value
        .map_err(io::Error::other)
        .and_then(|value| write_line(stream, &value.to_string(), TIMEOUT));
    if let Err(error) = written {
        tracing::debug!("control socket: {error}");
    }
}

/// Error from a request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No daemon is listening on the control socket.
    #[error("no daemon listens on the control socket")]
    NotRunning,
    /// The daemon refuses the request, for this reason.
    #[error("{0}")]
    Refused(String),
    /// System error: `TimedOut` if the daemon does not reply in time, `UnexpectedEof` if it ends
    /// without a reply, `InvalidData` for a reply from a different version.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Sends a request to the daemon listening on a control socket, and waits for the reply for at most
/// `timeout`. The timeout includes connecting, in case the daemon no longer accepts connections.
///
/// # Errors
/// See [`RequestError`].
pub fn request<T: DeserializeOwned>(
    path: &Path,
    request: &impl Serialize,
    timeout: Duration,
) -> Result<(T, UnixStream), RequestError> {
    let line = serde_json::to_string(request).map_err(io::Error::other)?;
    let (line, stream) = exchange(path, &line, timeout).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => RequestError::NotRunning,
        _ => error.into(),
    })?;
    let unclear = |error: serde_json::Error| {
        let text = format!("cannot read the reply: {error}; the daemon may be a different version");
        io::Error::new(io::ErrorKind::InvalidData, text)
    };
    let reply: serde_json::Value = serde_json::from_str(&line).map_err(unclear)?;
    match reply["error"].as_str() {
        Some(why) => Err(RequestError::Refused(why.to_owned())),
        None => Ok((serde_json::from_value(reply).map_err(unclear)?, stream)),
    }
}

/// Sends a line and reads the reply.
fn exchange(path: &Path, line: &str, timeout: Duration) -> io::Result<(String, UnixStream)> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Also limits connecting, which waits while the backlog is full (unix(7)).
    let sending = TIMEOUT.min(timeout);
    socket.set_write_timeout(Some(sending))?;
    socket.connect(&SockAddr::unix(path)?).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => timed_out("the connection", sending),
        _ => error,
    })?;
    let stream = UnixStream::from(OwnedFd::from(socket));
    write_line(&stream, line, sending)?;
    let line = read_line(&stream, REPLY_MAX, timeout).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => timed_out("the reply", timeout),
        io::ErrorKind::UnexpectedEof => {
            io::Error::new(error.kind(), "the connection ended without a reply")
        }
        _ => error,
    })?;
    Ok((line, stream))
}

/// Reads a line of at most `max` bytes without its newline, within `limit` in total.
fn read_line(stream: &UnixStream, max: usize, limit: Duration) -> io::Result<String> {
    let limit = Limit::new("the line", limit);
    let (mut line, mut room) = (Vec::new(), [0; 4096]);
    loop {
        let count = match limit.read(stream, &mut room)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => count,
        };
        let end = room[..count].iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&room[..end.unwrap_or(count)]);
        if line.len() > max {
            let text = format!("the line is longer than {max} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if end.is_some() {
            return String::from_utf8(line)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }
}

/// Writes a line, within `limit` in total.
fn write_line(stream: &UnixStream, line: &str, limit: Duration) -> io::Result<()> {
    Limit::new("writing", limit).write(stream, format!("{line}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::Instant;

    use super::super::unix_socket::tests::Scratch;
    use super::*;

    #[test]
    fn a_request_gets_a_reply_and_the_socket_is_removed_with_its_owner() {
        let scratch = Scratch::new("control");
        let path = scratch.0.join("s.ctl");
        let control = ControlSocket::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let (ended, over) = mpsc::channel::<()>();
        control
            .serve(move |text: String, stream| {
                let _held_by_the_thread = &ended;
                reply(&stream, if text == "no" { Err(text) } else { Ok(format!("got {text}")) });
            })
            .unwrap();
        let limit = Duration::from_secs(60);
        let send = |text: &str, limit| request::<String>(&path, &text, limit).map(|reply| reply.0);
        for text in ["one", "two", ""] {
            assert_eq!(send(text, limit).unwrap(), format!("got {text}"));
        }
        // The request is too long: there is no reply, and the next request is served.
        let long = "x".repeat(2 * REQUEST_MAX);
        send(&long, limit).unwrap_err();
        assert_eq!(send("again", limit).unwrap(), "got again");
        // A different version may send and expect different types.
        let error = send("no", limit).unwrap_err();
        assert!(matches!(&error, RequestError::Refused(why) if why == "no"), "{error}");
        let error = request::<String>(&path, &[1], limit).unwrap_err();
        assert!(error.to_string().starts_with("malformed request: invalid type: "), "{error}");
        let error = request::<u32>(&path, &"x", limit).unwrap_err().to_string();
        assert!(error.starts_with("cannot read the reply: invalid type: string"), "{error}");
        drop(control);
        assert!(!path.exists());
        let thread = over.recv_timeout(limit);
        assert_eq!(thread, Err(mpsc::RecvTimeoutError::Disconnected), "its thread has ended");
        assert!(matches!(send("x", limit), Err(RequestError::NotRunning)));
    }

    #[test]
    fn a_removed_socket_is_recreated() {
        let scratch = Scratch::new("control-again");
        let path = scratch.0.join("s.ctl");
        let control = ControlSocket::bind(&path).unwrap();
        control.serve(|text: String, stream| reply(&stream, Ok(text))).unwrap();
        let renewal = control.renewal();
        let asked = || request::<String>(&path, &"x", Duration::from_secs(60));
        let inode = || std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
        let first = inode();
        renewal.renew();
        assert_eq!((inode(), asked().unwrap().0), (first, "x".into()), "it was there");
        for _ in 0..2 {
            std::fs::remove_file(&path).unwrap();
            assert!(matches!(asked(), Err(RequestError::NotRunning)));
            renewal.renew();
            assert_eq!(asked().unwrap().0, "x");
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
        // A file that has replaced the socket is kept.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        renewal.renew();
        assert!(path.is_file());
        std::fs::remove_file(&path).unwrap();
        renewal.renew();
        assert_eq!(asked().unwrap().0, "x");
        drop(control);
        assert!(!path.exists());
        renewal.renew();
        assert!(!path.exists());
    }

    #[test]
    fn a_request_whose_sender_has_gone_is_dropped() {
        let scratch = Scratch::new("control-gone");
        let path = scratch.0.join("s.ctl");
        let control = ControlSocket::bind(&path).unwrap();
        // Sent before the daemon serves requests, as if to a stopped process.
        let mut gone = UnixStream::connect(&path).unwrap();
        gone.write_all(b"\"gone\"\n").unwrap();
        drop(gone);
        // This client has shut down its sending direction, and waits.
        let mut half = UnixStream::connect(&path).unwrap();
        half.write_all(b"\"half\"\n").unwrap();
        half.shutdown(std::net::Shutdown::Write).unwrap();
        let (seen, requests) = mpsc::channel::<String>();
        control
            .serve(move |text: String, stream| {
                reply(&stream, Ok(&text));
                seen.send(text).unwrap();
            })
            .unwrap();
        let mut answer = String::new();
        half.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "\"half\"\n");
        let late = request::<String>(&path, &"late", Duration::from_secs(60));
        assert_eq!(late.unwrap().0, "late");
        drop(control);
        assert_eq!(requests.iter().collect::<Vec<_>>(), ["half", "late"]);
    }

    #[test]
    fn a_line_has_a_total_time_limit() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let limit = Duration::from_millis(300);
        let (begins, begun) = mpsc::channel();
        let drip = std::thread::spawn(move || {
            // Bytes arrive occasionally, but never the end of the line.
            let mut sent = 0;
            while (&theirs).write_all(b".").is_ok() {
                sent += 1;
                let _ = begins.send(());
                std::thread::sleep(Duration::from_millis(20));
            }
            sent
        });
        begun.recv().unwrap();
        assert_eq!(read_line(&ours, 4096, limit).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(ours);
        assert!(drip.join().unwrap() > 0);
        // The time limit also applies to a client that does not read.
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let long = "x".repeat(8 << 20);
        assert_eq!(write_line(&ours, &long, limit).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_silent_client_delays_no_other_client() {
        let scratch = Scratch::new("control-silent");
        let path = scratch.0.join("s.ctl");
        let control = ControlSocket::bind(&path).unwrap();
        let (ended, over) = mpsc::channel::<()>();
        control
            .serve(move |text: String, stream| {
                let _held_by_the_thread = &ended;
                reply(&stream, Ok(text));
            })
            .unwrap();
        // More connections than are kept; served one after another, they would take minutes.
        let silent: Vec<_> = (0..2 * SILENT_MAX)
            .map(|_| {
                let mut stream = UnixStream::connect(&path).unwrap();
                stream.write_all(b"half a li").unwrap();
                stream
            })
            .collect();
        let begin = Instant::now();
        let reply = request::<String>(&path, &"one", Duration::from_secs(60));
        assert_eq!(reply.unwrap().0, "one");
        let all = TIMEOUT * u32::try_from(silent.len()).unwrap();
        assert!(begin.elapsed() < all / 8, "after {:?}", begin.elapsed());
        // The oldest were closed to make room for the newest.
        let mut rest = Vec::new();
        assert_eq!((&silent[0]).read_to_end(&mut rest).unwrap(), 0);
        drop(control);
        let thread = over.recv_timeout(Duration::from_secs(60));
        assert_eq!(thread, Err(mpsc::RecvTimeoutError::Disconnected), "its thread has ended");
    }

    #[test]
    fn a_daemon_that_has_stopped_accepting_delays_a_request_no_longer_than_its_limit() {
        let scratch = Scratch::new("control-full");
        let path = scratch.0.join("s.ctl");
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        listener.listen(0).unwrap();
        let _queued = UnixStream::connect(&path).unwrap();
        let took = || {
            let begin = Instant::now();
            let error = request::<String>(&path, &"x", Duration::from_millis(100)).unwrap_err();
            assert_eq!(error.to_string(), "the connection took longer than 100ms");
            begin.elapsed()
        };
        // A busy machine may delay some attempts, but not all.
        assert!((0..5).any(|_| took() < TIMEOUT), "each took as long as a reply may");
    }

    #[test]
    fn a_close_without_a_reply_is_an_error() {
        let scratch = Scratch::new("control-end");
        let path = scratch.0.join("s.ctl");
        let control = ControlSocket::bind(&path).unwrap();
        control.serve(|_: String, stream| drop(stream)).unwrap();
        let error = request::<String>(&path, &"x", Duration::from_secs(60)).unwrap_err();
        let RequestError::Io(error) = error else { panic!("{error}") };
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(error.to_string(), "the connection ended without a reply");
    }
}
