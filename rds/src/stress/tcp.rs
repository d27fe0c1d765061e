//! Load over plain TCP, with blocking calls, for comparison with RDS.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

use hdrhistogram::Histogram;
use rtrs_base::rt::Clock;
use rtrs_base::time::Duration;

use super::client::new_times;
use super::message::LEN_MAX;

/// Maximum time that the other end may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(20);
/// First word on a connection, which states its purpose. The message length follows.
const ROUND_TRIPS: u32 = 0x5244_0001;
const STREAM: u32 = 0x5244_0002;

/// Results of a measurement.
#[derive(Clone, Debug)]
pub(crate) struct TcpResult {
    pub(crate) messages: u64,
    pub(crate) took: Duration,
    /// Nanoseconds per round trip; empty if there were no round trips.
    pub(crate) times: Histogram<u64>,
}

/// Serves connections as they arrive, each on its own thread.
///
/// # Errors
/// Fails with the system's error.
pub(crate) fn serve_tcp(listener: TcpListener) -> io::Result<()> {
    thread::Builder::new().name("tcp".into()).spawn(move || {
        for stream in listener.incoming() {
            let served = stream.and_then(|stream| {
                let thread = thread::Builder::new().name("tcp-conn".into());
                thread.spawn(move || {
                    if let Err(error) = serve(stream) {
                        tracing::debug!(%error, "TCP client disconnected");
                    }
                })
            });
            if let Err(error) = served {
                tracing::warn!(%error, "cannot serve a TCP client");
            }
        }
    })?;
    Ok(())
}

fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    let mut head = [0; 8];
    stream.read_exact(&mut head)?;
    let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let len = (word(4) as usize).clamp(1, LEN_MAX);
    let mut buffer = vec![0; len.max(256 << 10)];
    if word(0) == STREAM {
        let mut count = 0_u64;
        loop {
            match stream.read(&mut buffer)? {
                0 => break,
                got => count += got as u64,
            }
        }
        return stream.write_all(&count.to_be_bytes());
    }
    loop {
        stream.read_exact(&mut buffer[..len])?;
        stream.write_all(&buffer[..len])?;
    }
}

fn open(to: SocketAddr, what: u32, len: usize) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&to, SILENCE_MAX)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.write_all(&what.to_be_bytes())?;
    stream.write_all(&u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes())?;
    Ok(stream)
}

/// Repeatedly sends a message and waits for it to come back.
///
/// # Errors
/// Fails with the system's error.
pub(crate) fn tcp_round_trips(to: SocketAddr, len: usize, time: Duration) -> io::Result<TcpResult> {
    let mut stream = open(to, ROUND_TRIPS, len)?;
    let mut message = vec![7; len];
    let mut times = new_times();
    let begun = Clock.now();
    let mut last = begun;
    while last.since(begun) < time {
        stream.write_all(&message)?;
        stream.read_exact(&mut message)?;
        let now = Clock.now();
        let taken = u64::try_from(now.since(last).as_nanos()).unwrap_or(u64::MAX);
        times.saturating_record(taken.max(1));
        last = now;
    }
    Ok(TcpResult { messages: times.len(), took: last.since(begun), times })
}

/// Sends messages one after another until the time is up, then waits until all have arrived.
///
/// # Errors
/// Fails with the system's error.
pub(crate) fn tcp_stream(to: SocketAddr, len: usize, time: Duration) -> io::Result<TcpResult> {
    let mut stream = open(to, STREAM, len)?;
    let message = vec![7; len];
    let begun = Clock.now();
    let mut messages = 0;
    while Clock.now().since(begun) < time {
        stream.write_all(&message)?;
        messages += 1;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut count = [0; 8];
    stream.read_exact(&mut count)?;
    let took = Clock.now().since(begun);
    if u64::from_be_bytes(count) != messages * len as u64 {
        return Err(io::Error::other("bytes were lost on the way"));
    }
    Ok(TcpResult { messages, took, times: new_times() })
}
