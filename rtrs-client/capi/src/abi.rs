//! The exported functions, which `include/rtrs.h` declares and documents.

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use rtrs::{Buffer, Builder, Request};

use crate::entry::{Failure, enter, enter_with, message, quiet_panics};
use crate::layout::{CCompletion, CEvent, CExtent, CGeometry, CStats, flag};
use crate::log::{self, LogFunction};
use crate::memory::Span;
use crate::options::COptions;
use crate::pointer::{Array, Fill, Handle, IoVecs, Memory, Out, Text};
use crate::queue::{CQueue, User, Wanted};
use crate::volume::CVolume;

/// Maximum number of completions or extents returned by one call.
const COUNT_MAX: u32 = 1 << 20;

type Outcome = Result<c_int, Failure>;

/// Exports a function whose body returns an [`Outcome`].
macro_rules! export {
    (fn $name:ident($($argument:ident: $type:ty),*) $body:block) => {
        // SAFETY: no other library has functions whose names begin with rtrs_.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> c_int {
            enter(move || -> Outcome { $body })
        }
    };
}

const VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => panic!("a version without zeroes"),
    };

// SAFETY: no other library has functions whose names begin with rtrs_.
#[unsafe(no_mangle)]
extern "C" fn rtrs_version() -> *const c_char {
    VERSION.as_ptr()
}

// SAFETY: as above.
#[unsafe(no_mangle)]
extern "C" fn rtrs_error_message() -> *const c_char {
    message()
}

fn count(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

fn millis(number: u32) -> Duration {
    Duration::from_millis(number.into())
}

fn on_volume(
    volume: &Handle<CVolume>,
    call: impl FnOnce(&CVolume) -> Result<c_int, Failure>,
) -> Outcome {
    let volume = volume.get("volume")?;
    enter_with(volume.health(), || call(volume))
}

fn on_queue(
    queue: &Handle<CQueue>,
    call: impl FnOnce(&CQueue, &mut User) -> Result<c_int, Failure>,
) -> Outcome {
    let queue = queue.get("queue")?;
    enter_with(queue.health(), || call(queue, &mut *queue.lock()?))
}

/// Fails if flags other than the `known` ones are set.
fn check_flags(flags: u32, known: u32) -> Result<(), Failure> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Failure::invalid(format!("flags {unknown:#x} do not fit the request"))),
    }
}

// Log and settings.

export! {
    fn rtrs_set_log(function: Option<LogFunction>, user_data: usize, level: c_int) {
        quiet_panics();
        log::set(function, user_data, level).map(|()| 0)
    }
}

export! {
    fn rtrs_options_new(export_name: Text, options: Out<COptions>) {
        options.clear("options")?;
        options.give(COptions::new(Builder::new(export_name.get("export_name")?)));
        Ok(0)
    }
}

export! {
    fn rtrs_options_from_uri(uri: Text, options: Out<COptions>) {
        options.clear("options")?;
        options.give(COptions::new(Builder::from_uri(uri.get("uri")?)?));
        Ok(0)
    }
}

export! {
    fn rtrs_options_set(options: Handle<COptions>, name: Text, value: Text) {
        options.get("options")?.set(name.get("name")?, value.get("value")?);
        Ok(0)
    }
}

// SAFETY: as above.
#[unsafe(no_mangle)]
extern "C" fn rtrs_options_free(options: Handle<COptions>) {
    enter(|| {
        options.free();
        Ok(0)
    });
}

// Volumes.

fn open(builder: &Builder, volume: &Out<CVolume>) -> Outcome {
    quiet_panics();
    volume.give(CVolume::open(builder)?);
    Ok(0)
}

export! {
    fn rtrs_open(options: Handle<COptions>, volume: Out<CVolume>) {
        volume.clear("volume")?;
        open(&options.get("options")?.builder(), &volume)
    }
}

export! {
    fn rtrs_open_uri(uri: Text, volume: Out<CVolume>) {
        volume.clear("volume")?;
        open(&Builder::from_uri(uri.get("uri")?)?, &volume)
    }
}

export! {
    fn rtrs_close(volume: Handle<CVolume>, grace_ms: u32) {
        on_volume(&volume, |volume| Ok(count(volume.close(millis(grace_ms))?)))
    }
}

export! {
    fn rtrs_free(volume: Handle<CVolume>) {
        if !volume.is_null() {
            // Runs even after a panic, and in a child process.
            volume.get("volume")?.finish()?;
            volume.free();
        }
        Ok(0)
    }
}

export! {
    fn rtrs_get_geometry(volume: Handle<CVolume>, geometry: Fill<CGeometry>, bytes: usize) {
        geometry.check("geometry", bytes)?;
        on_volume(&volume, |volume| {
            geometry.write(&volume.geometry()?, bytes);
            Ok(0)
        })
    }
}

export! {
    fn rtrs_get_identity(volume: Handle<CVolume>, text: Array<u8>, bytes: usize) {
        text.check("text")?;
        on_volume(&volume, |volume| {
            let identity = volume.identity()?.unwrap_or_default();
            let string = [identity.as_bytes(), b"\0"].concat();
            if string.len() > bytes {
                let needed = string.len();
                let text = format!("the identity needs {needed} bytes, but the buffer has {bytes}");
                return Err(Failure::new(libc::ERANGE, text));
            }
            text.write(&string);
            Ok(count(identity.len()))
        })
    }
}

export! {
    fn rtrs_get_stats(volume: Handle<CVolume>, stats: Fill<CStats>, bytes: usize) {
        stats.check("stats", bytes)?;
        on_volume(&volume, |volume| {
            stats.write(&volume.stats()?, bytes);
            Ok(0)
        })
    }
}

export! {
    fn rtrs_next_event(
        volume: Handle<CVolume>,
        timeout_ms: u32,
        event: Fill<CEvent>,
        bytes: usize
    ) {
        event.check("event", bytes)?;
        on_volume(&volume, |volume| {
            let next = volume.next_event(millis(timeout_ms))?;
            Ok(next.map_or(0, |next| {
                event.write(&next, bytes);
                1
            }))
        })
    }
}

export! {
    fn rtrs_mem_register(volume: Handle<CVolume>, address: Memory, bytes: usize) {
        let span = address.span(bytes)?;
        on_volume(&volume, |volume| volume.register(span).map(|()| 0))
    }
}

export! {
    fn rtrs_mem_unregister(volume: Handle<CVolume>, address: Memory, bytes: usize) {
        let span = address.span(bytes)?;
        on_volume(&volume, |volume| volume.unregister(&span).map(|()| 0))
    }
}

export! {
    fn rtrs_queue_count(volume: Handle<CVolume>) {
        on_volume(&volume, |volume| Ok(count(volume.queues().len())))
    }
}

export! {
    fn rtrs_get_queue(volume: Handle<CVolume>, index: u32, queue: Out<CQueue>) {
        queue.clear("queue")?;
        on_volume(&volume, |volume| {
            let queues = volume.queues();
            let Some(found) = queues.get(index as usize) else {
                let text = format!("there is no queue {index}; the volume has {}", queues.len());
                return Err(Failure::invalid(text));
            };
            queue.lend(found);
            Ok(0)
        })
    }
}

// Queues.

export! {
    fn rtrs_queue_fd(queue: Handle<CQueue>) {
        Ok(queue.get("queue")?.fd())
    }
}

export! {
    fn rtrs_queue_depth(queue: Handle<CQueue>) {
        Ok(count(queue.get("queue")?.depth()))
    }
}

export! {
    fn rtrs_queue_io_max(queue: Handle<CQueue>) {
        Ok(count(queue.get("queue")?.io_max() as usize))
    }
}

export! {
    fn rtrs_queue_inflight(queue: Handle<CQueue>) {
        on_queue(&queue, |_, user| Ok(count(user.inflight())))
    }
}

export! {
    fn rtrs_queue_set_wait_max(queue: Handle<CQueue>, wait_max_ms: u32) {
        on_queue(&queue, |_, user| {
            user.queue()?.set_wait_max(millis(wait_max_ms));
            Ok(0)
        })
    }
}

/// Parameters of a read or write and its memory.
struct Transfer {
    spans: Vec<Span>,
    offset: u64,
    flags: u32,
    user_data: usize,
}

impl Transfer {
    fn check(&self, queue: &CQueue) -> Result<(), Failure> {
        // Each span is at most isize::MAX bytes long, and there are at most 128.
        let len = self.spans.iter().map(|span| span.len() as u64).try_fold(0, u64::checked_add);
        let io_max = u64::from(queue.io_max());
        let Some(len) = len.filter(|len| *len <= io_max) else {
            return Err(Failure::invalid(format!("a request has at most {io_max} bytes")));
        };
        queue.check_range(self.offset, len)
    }

    fn read(self, queue: &Handle<CQueue>) -> Outcome {
        on_queue(queue, |queue, user| {
            check_flags(self.flags, 0)?;
            self.check(queue)?;
            user.submit(self.user_data, |hold| {
                if let Some(part) = queue.memory().find(&self.spans, hold) {
                    return Request::read_to(self.offset, &part);
                }
                let buffers = self.spans.into_iter().map(|span| span.buffer(hold)).collect();
                Request::read_vectored(self.offset, buffers)
            })?;
            Ok(0)
        })
    }

    fn write(self, queue: &Handle<CQueue>) -> Outcome {
        on_queue(queue, |queue, user| {
            check_flags(self.flags, flag::FUA | flag::COPY)?;
            self.check(queue)?;
            let (is_fua, copies) = (self.flags & flag::FUA != 0, self.flags & flag::COPY != 0);
            user.submit(self.user_data, |hold| {
                let part = queue.memory().find(&self.spans, hold).filter(|_| !copies);
                let spans = self.spans.into_iter();
                let request = if let Some(part) = part {
                    Request::write_from(self.offset, &part)
                } else if copies {
                    let all: Vec<u8> = spans.flat_map(|span| span.bytes().to_vec()).collect();
                    Request::write(self.offset, Buffer::from(all))
                } else {
                    let buffers = spans.map(|span| span.buffer(hold)).collect();
                    Request::write_vectored(self.offset, buffers)
                };
                if is_fua { request.fua() } else { request }
            })?;
            Ok(0)
        })
    }
}

export! {
    fn rtrs_submit_read(
        queue: Handle<CQueue>,
        buffer: Memory,
        bytes: usize,
        offset: u64,
        flags: u32,
        user_data: usize
    ) {
        let spans = vec![buffer.span(bytes)?];
        Transfer { spans, offset, flags, user_data }.read(&queue)
    }
}

export! {
    fn rtrs_submit_write(
        queue: Handle<CQueue>,
        buffer: Memory,
        bytes: usize,
        offset: u64,
        flags: u32,
        user_data: usize
    ) {
        let spans = vec![buffer.span(bytes)?];
        Transfer { spans, offset, flags, user_data }.write(&queue)
    }
}

export! {
    fn rtrs_submit_readv(
        queue: Handle<CQueue>,
        iov: IoVecs,
        count: c_int,
        offset: u64,
        flags: u32,
        user_data: usize
    ) {
        let spans = iov.spans(count)?;
        Transfer { spans, offset, flags, user_data }.read(&queue)
    }
}

export! {
    fn rtrs_submit_writev(
        queue: Handle<CQueue>,
        iov: IoVecs,
        count: c_int,
        offset: u64,
        flags: u32,
        user_data: usize
    ) {
        let spans = iov.spans(count)?;
        Transfer { spans, offset, flags, user_data }.write(&queue)
    }
}

export! {
    fn rtrs_submit_flush(queue: Handle<CQueue>, flags: u32, user_data: usize) {
        on_queue(&queue, |_, user| {
            check_flags(flags, 0)?;
            user.submit(user_data, |_| Request::flush())?;
            Ok(0)
        })
    }
}

export! {
    fn rtrs_submit_discard(
        queue: Handle<CQueue>,
        offset: u64,
        bytes: u64,
        flags: u32,
        user_data: usize
    ) {
        on_queue(&queue, |queue, user| {
            check_flags(flags, flag::FUA)?;
            queue.check_range(offset, bytes)?;
            user.submit(user_data, |_| {
                let request = Request::discard(offset, bytes);
                if flags & flag::FUA != 0 { request.fua() } else { request }
            })?;
            Ok(0)
        })
    }
}

export! {
    fn rtrs_submit_write_zeroes(
        queue: Handle<CQueue>,
        offset: u64,
        bytes: u64,
        flags: u32,
        user_data: usize
    ) {
        on_queue(&queue, |queue, user| {
            check_flags(flags, flag::FUA | flag::NO_UNMAP)?;
            queue.check_range(offset, bytes)?;
            user.submit(user_data, |_| {
                let mut request = Request::write_zeroes(offset, bytes);
                if flags & flag::FUA != 0 {
                    request = request.fua();
                }
                if flags & flag::NO_UNMAP != 0 { request.no_unmap() } else { request }
            })?;
            Ok(0)
        })
    }
}

/// Fails if the number of results for which the program has room is out of range.
fn check_count(number: u32) -> Result<usize, Failure> {
    if (1..=COUNT_MAX).contains(&number) {
        return Ok(number as usize);
    }
    Err(Failure::invalid(format!("the number of results is {number}; use 1 to {COUNT_MAX}")))
}

export! {
    fn rtrs_poll(
        queue: Handle<CQueue>,
        min: u32,
        max: u32,
        timeout_ms: u32,
        completions: Array<CCompletion>
    ) {
        completions.check("completions")?;
        let wanted =
            Wanted { min: min as usize, max: check_count(max)?, timeout: millis(timeout_ms) };
        on_queue(&queue, |_, user| {
            let done = user.poll(wanted)?;
            completions.write(done);
            Ok(count(done.len()))
        })
    }
}

// Blocking calls.

export! {
    fn rtrs_pread(queue: Handle<CQueue>, buffer: Memory, bytes: usize, offset: u64) {
        let mut span = buffer.span(bytes)?;
        on_queue(&queue, |queue, user| {
            queue.check_range(offset, bytes as u64)?;
            user.queue()?.pread(offset, span.bytes_mut())?;
            Ok(0)
        })
    }
}

export! {
    fn rtrs_pwrite(queue: Handle<CQueue>, buffer: Memory, bytes: usize, offset: u64) {
        let span = buffer.span(bytes)?;
        on_queue(&queue, |queue, user| {
            queue.check_range(offset, bytes as u64)?;
            user.queue()?.pwrite(offset, span.bytes())?;
            Ok(0)
        })
    }
}

export! {
    fn rtrs_flush(queue: Handle<CQueue>) {
        on_queue(&queue, |_, user| {
            user.queue()?.flush()?;
            Ok(0)
        })
    }
}

export! {
    fn rtrs_extents(
        queue: Handle<CQueue>,
        offset: u64,
        bytes: u64,
        extents: Array<CExtent>,
        room: u32
    ) {
        extents.check("extents")?;
        let room = check_count(room)?;
        on_queue(&queue, |queue, user| {
            queue.check_range(offset, bytes)?;
            let found = user.queue()?.extents(offset, bytes)?;
            let found: Vec<_> = found.iter().take(room).map(CExtent::from).collect();
            extents.write(&found);
            Ok(count(found.len()))
        })
    }
}
