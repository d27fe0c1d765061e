//! Copies a volume to another volume, and compares the two.
//!
//! `cargo run -p rtrs --example copy -- tcp://10.0.0.2/vol0 tcp://10.0.0.3/vol0`. Holes are not
//! read, but zeroed at the destination. Several requests are in flight at both ends.

use std::error::Error;
use std::time::Duration;

use rtrs::{Buffer, Builder, Completion, Queue, Request};

/// Bytes per request.
const PIECE: u64 = 256 << 10;
/// Requests in flight.
const DEPTH: usize = 16;
/// Length of the range whose extents are requested at a time.
const RANGE: u64 = 1 << 30;
/// Longest wait for a completion.
const PATIENCE: Duration = Duration::from_secs(300);

/// Part of a volume.
#[derive(Clone, Copy)]
struct Part {
    offset: u64,
    len: u64,
    hole: bool,
}

/// Byte counts of a copy.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Bytes that were read and written.
    pub(crate) data: u64,
    /// Bytes that are holes at the source.
    pub(crate) holes: u64,
}

/// Copies the volume at one URI to the volume at another, and compares the two.
///
/// # Errors
/// The first error, or the first offset at which the volumes differ.
pub(crate) fn copy(from: &str, to: &str) -> Result<Copied, Box<dyn Error>> {
    let (source, mut reads) = Builder::from_uri(from)?.read_only().open()?;
    let (target, mut writes) = Builder::from_uri(to)?.open()?;
    let (read, write) = (&mut reads[0], &mut writes[0]);
    let size = source.geometry().size;
    if target.geometry().size < size {
        return Err(format!("{to} is shorter than {from}").into());
    }
    let parts = parts(read, size, source.geometry().extents)?;
    let mut copied = Copied::default();
    for part in parts.iter().filter(|part| part.hole) {
        // If the server does not support write zeroes, the library sends the zeroes as data.
        finish(write, Request::write_zeroes(part.offset, part.len))?;
        copied.holes += part.len;
    }
    let data: Vec<Part> = parts.iter().filter(|part| !part.hole).copied().collect();
    each_read(read, &data, |offset, buffer| {
        copied.data += buffer.len() as u64;
        submit(write, Request::write(offset, buffer))
    })?;
    drain(write)?;
    write.flush()?;
    let mut differs = None;
    each_read(read, &data, |offset, buffer| {
        let mut same = vec![0; buffer.len()];
        write.pread(offset, &mut same)?;
        if buffer[..] != same[..] {
            differs = Some(differs.map_or(offset, |other: u64| other.min(offset)));
        }
        Ok(())
    })?;
    if let Some(offset) = differs {
        return Err(format!("the volumes differ at {offset}").into());
    }
    target.close(PATIENCE)?;
    source.close(PATIENCE)?;
    Ok(copied)
}

/// Splits a volume into parts, none longer than a request.
fn parts(queue: &mut Queue, size: u64, extents: bool) -> Result<Vec<Part>, Box<dyn Error>> {
    let (mut parts, mut at) = (Vec::new(), 0);
    while at < size {
        let range = (size - at).min(RANGE);
        let found = if extents {
            queue.extents(at, range)?
        } else {
            vec![rtrs::Extent { len: range, hole: false }]
        };
        for extent in found {
            let end = at + extent.len;
            while at < end {
                let len = (end - at).min(PIECE);
                parts.push(Part { offset: at, len, hole: extent.hole });
                at += len;
            }
        }
    }
    Ok(parts)
}

/// Reads the parts, several at once, and passes each to `take`.
fn each_read(
    queue: &mut Queue,
    parts: &[Part],
    mut take: impl FnMut(u64, Buffer) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let (mut left, mut done) = (parts.iter(), Vec::new());
    loop {
        while queue.inflight() < DEPTH
            && let Some(part) = left.next()
        {
            let buffer = Buffer::zeroed(usize::try_from(part.len)?);
            queue.submit(part.offset, Request::read(part.offset, buffer))?;
        }
        if queue.inflight() == 0 {
            return Ok(());
        }
        if queue.poll(&mut done, 1, DEPTH, PATIENCE)? == 0 {
            return Err("a read takes too long".into());
        }
        for completion in done.drain(..) {
            let offset = completion.token;
            completion.result?;
            take(offset, completion.into_buffer().ok_or("a read without a buffer")?)?;
        }
    }
}

/// Submits a request once fewer than `DEPTH` are in flight.
fn submit(queue: &mut Queue, request: Request) -> Result<(), Box<dyn Error>> {
    while queue.inflight() >= DEPTH {
        reap(queue)?;
    }
    queue.submit(0, request)?;
    Ok(())
}

/// Runs a request to completion.
fn finish(queue: &mut Queue, request: Request) -> Result<(), Box<dyn Error>> {
    submit(queue, request)?;
    drain(queue)
}

/// Waits until nothing is in flight.
fn drain(queue: &mut Queue) -> Result<(), Box<dyn Error>> {
    while queue.inflight() > 0 {
        reap(queue)?;
    }
    Ok(())
}

/// Waits for completions and checks them.
fn reap(queue: &mut Queue) -> Result<(), Box<dyn Error>> {
    let mut done: Vec<Completion> = Vec::new();
    if queue.poll(&mut done, 1, DEPTH, PATIENCE)? == 0 {
        return Err("a write takes too long".into());
    }
    for completion in done {
        completion.result?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [from, to] = &arguments[..] else { return Err("usage: copy SOURCE-URI TARGET-URI".into()) };
    let Copied { data, holes } = copy(from, to)?;
    println!("copied and compared {data} bytes; {holes} bytes are holes");
    Ok(())
}
