//! A control socket: one question, one answer, a line of text each.
//!
//! Owns the listening end ([`ControlSocket`]), which answers on a thread of its own, off the IO
//! path, and the asking end ([`ask`]). A question is at most 4096 bytes long, and question and
//! answer as a whole have a bound in time. Who connects has a small thread until the question is
//! there, so who stops in the middle, or says nothing, holds nobody up; of too many of these the
//! oldest goes. What the lines say is the daemon's business.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use parking_lot::Mutex;
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use super::unix_socket::{SocketFile, bind_unix};
use crate::time::Duration;

/// How long a question may take to arrive, and an answer to leave.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest question.
const QUESTION_MAX: usize = 4096;
/// Longest answer; none of ours comes near it.
const ANSWER_MAX: usize = 64 << 20;
/// Most connections whose question is not there yet.
const SILENT_MAX: usize = 64;
/// Most questions that wait for their answer.
const WAITING_MAX: usize = 64;
/// For a thread that only reads a line.
const STACK_BYTES: usize = 128 << 10;
/// Wait after an accept that failed, for one because the process is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening control socket. When dropped it answers nobody any more, and its path is gone.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    ending: Arc<AtomicBool>,
    _file: SocketFile,
}

impl ControlSocket {
    /// Binds the socket, for this user only. A path nobody listens on is replaced.
    ///
    /// # Errors
    /// Those of [`bind_unix`].
    pub fn bind(path: &Path) -> io::Result<Self> {
        let (listener, file) = bind_unix(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, ending: Arc::default(), _file: file })
    }

    /// Hands every question to `answer`, one after the other, on a thread of its own. It answers
    /// by [`reply`], at once or later.
    ///
    /// # Errors
    /// The system's, when there is no thread or descriptor to be had.
    pub fn serve(
        &self,
        mut answer: impl FnMut(&str, UnixStream) + Send + 'static,
    ) -> io::Result<()> {
        let listener = self.listener.try_clone()?;
        let ending = Arc::clone(&self.ending);
        let (asked, questions) = mpsc::sync_channel::<(String, UnixStream)>(WAITING_MAX);
        // Ends when the one below has ended, and all who read for it.
        std::thread::Builder::new().name("rtrs-control".into()).spawn(move || {
            for (question, stream) in questions {
                answer(&question, stream);
            }
        })?;
        std::thread::Builder::new().name("rtrs-accept".into()).spawn(move || {
            let silent = Arc::new(Silent::default());
            for (number, stream) in (0_u64..).zip(listener.incoming()) {
                if ending.load(Ordering::SeqCst) {
                    break;
                }
                let heard = stream.and_then(|stream| hear(number, stream, &silent, &asked));
                if let Err(error) = heard {
                    tracing::debug!("control socket: {error}");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
            silent.end_all();
        })?;
        Ok(())
    }
}

/// Who has connected and not asked yet, oldest first.
#[derive(Debug, Default)]
struct Silent(Mutex<VecDeque<(u64, UnixStream)>>);

impl Silent {
    /// One more; of too many the oldest goes.
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

/// Wakes the thread that reads from it.
fn end(stream: &UnixStream) {
    if let Err(error) = stream.shutdown(std::net::Shutdown::Both) {
        tracing::debug!("control socket: {error}");
    }
}

/// Reads a question on a thread of its own and hands it on.
fn hear(
    number: u64,
    stream: UnixStream,
    silent: &Arc<Silent>,
    asked: &mpsc::SyncSender<(String, UnixStream)>,
) -> io::Result<()> {
    silent.add(number, stream.try_clone()?);
    let (known, asked) = (Arc::clone(silent), asked.clone());
    let reader = std::thread::Builder::new().name("rtrs-question".into()).stack_size(STACK_BYTES);
    let started = reader.spawn(move || {
        let question = read_line(&stream, QUESTION_MAX, TIMEOUT);
        known.remove(number);
        let handed_on = question.and_then(|question| {
            asked.try_send((question, stream)).map_err(|_| io::ErrorKind::ResourceBusy.into())
        });
        if let Err(error) = handed_on {
            tracing::debug!("control socket: {error}");
        }
    });
    started.map(drop).inspect_err(|_| silent.remove(number))
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        // Wakes the thread in its accept.
        if let Err(error) = SockRef::from(&self.listener).shutdown(std::net::Shutdown::Both) {
            tracing::debug!("control socket: {error}");
        }
    }
}

/// Answers a question, within its time.
///
/// # Errors
/// The system's; `TimedOut` when who asked does not read.
pub fn reply(stream: &UnixStream, line: &str) -> io::Result<()> {
    write_line(stream, line, TIMEOUT)
}

/// Asks the daemon behind a control socket; its answer may take `timeout`.
///
/// # Errors
/// The system's; `NotFound` or `ConnectionRefused` when there is no daemon, `TimedOut` when it
/// does not answer in time, `UnexpectedEof` when it ended without an answer.
pub fn ask(path: &Path, question: &str, timeout: Duration) -> io::Result<(String, UnixStream)> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Bounds the connect too, which waits while the backlog is full (unix(7)).
    socket.set_write_timeout(Some(TIMEOUT))?;
    socket.connect(&SockAddr::unix(path)?)?;
    let stream = UnixStream::from(OwnedFd::from(socket));
    write_line(&stream, question, TIMEOUT)?;
    let answer = read_line(&stream, ANSWER_MAX, timeout).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => timed_out("the answer", timeout),
        io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "it went without an answer"),
        _ => error,
    })?;
    Ok((answer, stream))
}

fn timed_out(what: &str, limit: Duration) -> io::Error {
    let text = format!("{what} took longer than {} ms", limit.as_millis());
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// What is left of the time, for a time-out of the system: never zero, which would mean for ever.
fn left(deadline: Instant, what: &str, limit: Duration) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(timed_out(what, limit)) } else { Ok(left) }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// A line without its end, of at most `max` bytes, all of it within `limit`.
fn read_line(mut stream: &UnixStream, max: usize, limit: Duration) -> io::Result<String> {
    let deadline = Instant::now() + limit;
    let (mut line, mut room) = (Vec::new(), [0; 4096]);
    loop {
        stream.set_read_timeout(Some(left(deadline, "the line", limit)?))?;
        let count = match stream.read(&mut room) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if is_timeout(&error) => return Err(timed_out("the line", limit)),
            Err(error) => return Err(error),
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

/// Writes a line, all of it within `limit`.
fn write_line(mut stream: &UnixStream, line: &str, limit: Duration) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    let line = format!("{line}\n");
    let mut rest = line.as_bytes();
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline, "writing", limit)?))?;
        match stream.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_timeout(&error) => return Err(timed_out("writing", limit)),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::unix_socket::tests::Scratch;
    use super::*;

    #[test]
    fn a_question_is_answered_and_the_socket_goes_with_its_owner() {
        let scratch = Scratch::new("control");
        let path = scratch.0.join("s.ctl");
        let control = ControlSocket::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let (ended, over) = mpsc::channel::<()>();
        control
            .serve(move |question, stream| {
                let _held_by_the_thread = &ended;
                reply(&stream, &format!("you said {question}")).unwrap();
            })
            .unwrap();
        let limit = Duration::from_secs(20);
        for text in ["one", "two", ""] {
            assert_eq!(ask(&path, text, limit).unwrap().0, format!("you said {text}"));
        }
        // Longer than a question may be: nobody answers, and the next one is served.
        let long = "x".repeat(2 * QUESTION_MAX);
        ask(&path, &long, limit).unwrap_err();
        assert_eq!(ask(&path, "again", limit).unwrap().0, "you said again");
        drop(control);
        assert!(!path.exists());
        let thread = over.recv_timeout(limit);
        assert_eq!(thread, Err(mpsc::RecvTimeoutError::Disconnected), "its thread has ended");
        assert_eq!(ask(&path, "x", limit).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_line_has_a_bound_as_a_whole() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let limit = Duration::from_millis(300);
        let drip = std::thread::spawn(move || {
            // A byte now and then, and never the end of the line.
            let mut sent = 0;
            while (&theirs).write_all(b".").is_ok() {
                sent += 1;
                std::thread::sleep(Duration::from_millis(20));
            }
            sent
        });
        assert_eq!(read_line(&ours, 4096, limit).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(ours);
        assert!(drip.join().unwrap() > 0);
        // Nor is one waited for that does not read.
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let long = "x".repeat(8 << 20);
        assert_eq!(write_line(&ours, &long, limit).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn who_says_nothing_holds_nobody_up() {
        let scratch = Scratch::new("control-silent");
        let path = scratch.0.join("s.ctl");
        let control = ControlSocket::bind(&path).unwrap();
        let (ended, over) = mpsc::channel::<()>();
        control
            .serve(move |question, stream| {
                let _held_by_the_thread = &ended;
                reply(&stream, question).unwrap();
            })
            .unwrap();
        // More than are kept, and all of them together would take minutes, one after the other.
        let silent: Vec<_> = (0..2 * SILENT_MAX)
            .map(|_| {
                let mut stream = UnixStream::connect(&path).unwrap();
                stream.write_all(b"half a li").unwrap();
                stream
            })
            .collect();
        let begin = Instant::now();
        assert_eq!(ask(&path, "one", Duration::from_secs(60)).unwrap().0, "one");
        let all = TIMEOUT * u32::try_from(silent.len()).unwrap();
        assert!(begin.elapsed() < all / 8, "after {:?}", begin.elapsed());
        // The oldest went to make room for the newest.
        let mut rest = Vec::new();
        assert_eq!((&silent[0]).read_to_end(&mut rest).unwrap(), 0);
        drop(control);
        let thread = over.recv_timeout(Duration::from_secs(60));
        assert_eq!(thread, Err(mpsc::RecvTimeoutError::Disconnected), "its thread has ended");
    }

    #[test]
    fn an_end_without_an_answer_is_told() {
        let scratch = Scratch::new("control-end");
        let path = scratch.0.join("s.ctl");
        let control = ControlSocket::bind(&path).unwrap();
        control.serve(|_, stream| drop(stream)).unwrap();
        let error = ask(&path, "x", Duration::from_secs(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(error.to_string(), "it went without an answer");
    }
}
