//! Functions that the program calls instead of the C library's.
//!
//! Each function checks whether its descriptor is an RDS socket, and otherwise forwards the call.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use libc::{
    c_int, c_uint, c_ulong, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};

use crate::calls::{self, AF_RDS, Got, Receiving, Sending};
use crate::completions::{self, COMPLETION_LEN};
use crate::controls::{
    CONG_UPDATE, ControlWriter, RXPATH_LATENCY, SOL_RDS, SendControls, ZCOPY_COMPLETION, has_room,
};
use crate::memory::{
    ADDRESS_MAX, Address, PARTS_MAX, answer_address, errno, passed_fds, read_address, set_errno,
    source, sources, target, targets, write_address,
};
use crate::options::{self, Answer, Reply};
use crate::real::real;
use crate::table::{self, Entry};

/// Runs when the library is loaded.
#[used]
// SAFETY: the loader calls the function in this section; the function ignores its arguments.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    table::own();
    // SAFETY: the functions exist for the lifetime of the process. If there is no memory to
    // register them, a child leaves its table unchanged.
    unsafe {
        libc::pthread_atfork(
            Some(table::fork_begins),
            Some(table::fork_ends),
            Some(table::fork_ends_in_child),
        );
    }
    table::adopt_inherited();
}

/// Converts the result of a call that returns a length.
fn length(result: io::Result<usize>) -> ssize_t {
    match result {
        Ok(len) => ssize_t::try_from(len).unwrap_or(ssize_t::MAX),
        Err(error) => fail(&error) as ssize_t,
    }
}

/// Converts the result of a call that returns 0.
fn zero(result: io::Result<()>) -> c_int {
    result.map_or_else(|error| fail(&error), |()| 0)
}

pub(crate) fn fail(error: &io::Error) -> c_int {
    set_errno(error.raw_os_error().unwrap_or(libc::EIO));
    -1
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    if family != AF_RDS || !calls::serves(family) {
        return real!(socket(family: c_int, kind: c_int, protocol: c_int) -> c_int);
    }
    let flags = match calls::check_type(kind, protocol) {
        Ok(flags) => flags,
        Err(error) => return fail(&error),
    };
    let (family, kind, protocol) = (libc::AF_UNIX, libc::SOCK_SEQPACKET | flags, 0);
    let fd = real!(socket(family: c_int, kind: c_int, protocol: c_int) -> c_int);
    if fd >= 0
        && let Err(error) = calls::created(fd)
    {
        real!(close(fd: c_int) -> c_int);
        return fail(&error);
    }
    fd
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    let Some(entry) = table::find(fd) else {
        return real!(bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int);
    };
    // SAFETY: the program upholds the contract of `bind`.
    let address = unsafe { read_address(address, len) };
    zero(address.and_then(|address| calls::bind(fd, &entry, address)))
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    let Some(entry) = table::find(fd) else {
        return real!(connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int);
    };
    // SAFETY: the program upholds the contract of `connect`.
    let address = unsafe { read_address(address, len) };
    zero(address.and_then(|address| calls::connect(fd, &entry, address)))
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(entry) = table::find(fd) else {
        return real!(getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int);
    };
    // SAFETY: the program upholds the contract of `getsockname`.
    zero(unsafe { answer_address(calls::own_address(fd, &entry), address, len) })
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(entry) = table::find(fd) else {
        return real!(getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int);
    };
    let to = calls::destination(fd, &entry);
    // SAFETY: the program upholds the contract of `getpeername`.
    zero(to.and_then(|to| unsafe { answer_address(Some(to), address, len) }))
}

/// RDS sockets can neither listen nor be shut down.
macro_rules! unsupported {
    ($($name:ident($($arg:ident: $type:ty),*);)+) => {$(
        // SAFETY: the function has the name and signature of the C library function it replaces.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int, $($arg: $type),*) -> c_int {
            match table::find(fd) {
                Some(_) => fail(&errno(libc::EOPNOTSUPP)),
                None => real!($name(fd: c_int $(, $arg: $type)*) -> c_int),
            }
        }
    )+};
}

unsupported! {
    listen(backlog: c_int);
    shutdown(how: c_int);
    accept(address: *mut sockaddr, len: *mut socklen_t);
    accept4(address: *mut sockaddr, len: *mut socklen_t, flags: c_int);
}

// Sending.

/// Sends a buffer.
///
/// # Safety
/// See [`source`].
unsafe fn send_one(
    fd: c_int,
    entry: &Entry,
    to: io::Result<Option<Address>>,
    buffer: *const c_void,
    size: size_t,
    flags: c_int,
) -> ssize_t {
    let controls = SendControls::default();
    // SAFETY: guaranteed by the caller.
    let payload = unsafe { source(buffer, size) };
    length(payload.and_then(|payload| {
        let payload = &[IoSlice::new(payload)];
        calls::send_message(fd, entry, &Sending { to: to?, payload, flags, controls })
    }))
}

/// Reads the destination of a send, if there is one.
///
/// # Safety
/// See [`read_address`], for an address that is not null.
unsafe fn destination(address: *const sockaddr, len: socklen_t) -> io::Result<Option<Address>> {
    if address.is_null() || len == 0 {
        return Ok(None);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { read_address(address, len) }.map(Some)
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    size: size_t,
    flags: c_int,
    address: *const sockaddr,
    len: socklen_t,
) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(sendto(fd: c_int, buffer: *const c_void, size: size_t, flags: c_int,
            address: *const sockaddr, len: socklen_t) -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `sendto`.
    unsafe { send_one(fd, &entry, destination(address, len), buffer, size, flags) }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn send(fd: c_int, buffer: *const c_void, size: size_t, flags: c_int) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(send(fd: c_int, buffer: *const c_void, size: size_t, flags: c_int)
            -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `send`.
    unsafe { send_one(fd, &entry, Ok(None), buffer, size, flags) }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, size: size_t) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(write(fd: c_int, buffer: *const c_void, size: size_t) -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `write`.
    unsafe { send_one(fd, &entry, Ok(None), buffer, size, 0) }
}

/// Checks the number of buffers passed to `writev` and `readv`.
fn part_count(count: c_int) -> io::Result<usize> {
    let count = usize::try_from(count).ok().filter(|count| *count <= PARTS_MAX);
    count.ok_or_else(|| errno(libc::EINVAL))
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `writev`.
    let parts = part_count(count).and_then(|count| unsafe { sources(vectors, count) });
    let (to, flags, controls) = (None, 0, SendControls::default());
    length(parts.and_then(|payload| {
        calls::send_message(fd, &entry, &Sending { to, payload: &payload, flags, controls })
    }))
}

/// Sends the message described by a message header.
///
/// # Safety
/// As for `sendmsg`.
unsafe fn send_header(fd: c_int, entry: &Entry, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: guaranteed by the program.
    let Some(message) = (unsafe { message.as_ref() }) else {
        return fail(&errno(libc::EFAULT)) as _;
    };
    // SAFETY: guaranteed by the program.
    let (to, parts, controls) = unsafe {
        let to = destination(message.msg_name.cast(), message.msg_namelen.min(ADDRESS_MAX));
        (to, sources(message.msg_iov, message.msg_iovlen), SendControls::read(message))
    };
    length(to.and_then(|to| {
        let payload = &parts?;
        calls::send_message(fd, entry, &Sending { to, payload, flags, controls })
    }))
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `sendmsg`.
    unsafe { send_header(fd, &entry, message, flags) }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let Some(entry) = table::find(fd) else {
        return real!(sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int)
            -> c_int);
    };
    for at in 0..count {
        // SAFETY: the program guarantees to `sendmmsg` that there are `count` messages.
        let (message, sent) = unsafe {
            let message = messages.add(at as usize);
            (message, send_header(fd, &entry, &raw const (*message).msg_hdr, flags))
        };
        let Ok(sent) = c_uint::try_from(sent) else { return if at > 0 { at as c_int } else { -1 } };
        // SAFETY: as above.
        unsafe { (*message).msg_len = sent };
    }
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

// Receiving.

/// Receives into a buffer.
///
/// # Safety
/// See [`target`].
unsafe fn receive_one(
    fd: c_int,
    entry: &Entry,
    buffer: *mut c_void,
    size: size_t,
    flags: c_int,
) -> io::Result<Got> {
    // SAFETY: guaranteed by the caller.
    let room = unsafe { target(buffer, size) }?;
    let receiving = Receiving { flags, takes_completions: false };
    calls::receive_message(fd, entry, &mut [IoSliceMut::new(room)], receiving)
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    size: size_t,
    flags: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(recvfrom(fd: c_int, buffer: *mut c_void, size: size_t, flags: c_int,
            address: *mut sockaddr, len: *mut socklen_t) -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `recvfrom`.
    let got = unsafe { receive_one(fd, &entry, buffer, size, flags) };
    length(got.and_then(|got| {
        // SAFETY: the program upholds the contract of `recvfrom`.
        unsafe { put_source(got.from, address, len) }?;
        Ok(got.result)
    }))
}

/// Writes the source of a message; does nothing for congestion updates.
///
/// # Safety
/// See [`write_address`].
unsafe fn put_source(
    from: Option<SocketAddr>,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> io::Result<()> {
    match from {
        // SAFETY: guaranteed by the caller.
        Some(_) => unsafe { write_address(from, address, len) },
        None => Ok(()),
    }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn recv(fd: c_int, buffer: *mut c_void, size: size_t, flags: c_int) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(recv(fd: c_int, buffer: *mut c_void, size: size_t, flags: c_int) -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `recv`.
    let got = unsafe { receive_one(fd, &entry, buffer, size, flags) };
    length(got.map(|got| got.result))
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, size: size_t) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(read(fd: c_int, buffer: *mut c_void, size: size_t) -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `read`.
    let got = unsafe { receive_one(fd, &entry, buffer, size, 0) };
    length(got.map(|got| got.result))
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        return real!(readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t);
    };
    // SAFETY: the program upholds the contract of `readv`.
    let parts = part_count(count).and_then(|count| unsafe { targets(vectors, count) });
    let receiving = Receiving { flags: 0, takes_completions: false };
    let got = parts.and_then(|mut parts| calls::receive_message(fd, &entry, &mut parts, receiving));
    length(got.map(|got| got.result))
}

/// Receives into the buffers described by a message header.
///
/// # Safety
/// As for `recvmsg`.
unsafe fn receive_header(fd: c_int, entry: &Entry, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: guaranteed by the program.
    let Some(message) = (unsafe { message.as_mut() }) else {
        return fail(&errno(libc::EFAULT)) as _;
    };
    // SAFETY: guaranteed by the program.
    let parts = unsafe { targets(message.msg_iov, message.msg_iovlen) };
    let takes_completions = entry.is_zerocopy() && has_room(message, COMPLETION_LEN);
    let receiving = Receiving { flags, takes_completions };
    let got = parts.and_then(|mut parts| calls::receive_message(fd, entry, &mut parts, receiving));
    let got = match got {
        Ok(got) => got,
        Err(error) => return fail(&error) as _,
    };
    message.msg_flags = if got.is_truncated { libc::MSG_TRUNC } else { 0 };
    let name = message.msg_name.cast();
    // SAFETY: guaranteed by the program.
    let named = unsafe { put_source(got.from, name, &raw mut message.msg_namelen) };
    if got.from.is_none() {
        message.msg_namelen = 0;
    }
    // SAFETY: guaranteed by the program.
    put_controls(unsafe { ControlWriter::new(message) }, entry, &got);
    length(named.map(|()| got.result))
}

/// Writes the control messages for a receive.
fn put_controls(mut writer: ControlWriter<'_>, entry: &Entry, got: &Got) {
    if let Some(groups) = got.update {
        writer.put(SOL_RDS, CONG_UPDATE, &groups.to_ne_bytes());
        return;
    }
    if let Some(stamp) = got.timestamp {
        writer.put(libc::SOL_SOCKET, stamp.kind, &stamp.bytes());
    }
    if let Some(latencies) = got.latencies {
        writer.put(SOL_RDS, RXPATH_LATENCY, &latencies);
    }
    if entry.is_zerocopy()
        && writer.has_room(COMPLETION_LEN)
        && let Some(cookies) = completions::take(entry.inode())
    {
        writer.put(SOL_RDS, ZCOPY_COMPLETION, &cookies);
    }
}

/// Recognizes RDS sockets among the descriptors that another process has passed.
///
/// # Safety
/// See [`passed_fds`].
unsafe fn adopt_passed(message: &msghdr) {
    // SAFETY: guaranteed by the caller.
    for fd in unsafe { passed_fds(message) } {
        table::adopt_passed(fd);
    }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let Some(entry) = table::find(fd) else {
        let got = real!(recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t);
        if got >= 0 {
            // SAFETY: the call has filled in the program's header.
            unsafe { adopt_passed(&*message) };
        }
        return got;
    };
    // SAFETY: the program upholds the contract of `recvmsg`.
    unsafe { receive_header(fd, &entry, message, flags) }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    limit: *mut timespec,
) -> c_int {
    let Some(entry) = table::find(fd) else {
        let got = real!(recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int,
            limit: *mut timespec) -> c_int);
        for at in 0..usize::try_from(got).unwrap_or(0) {
            // SAFETY: the call has filled in this many of the program's headers.
            unsafe { adopt_passed(&(*messages.add(at)).msg_hdr) };
        }
        return got;
    };
    // SAFETY: the program upholds the contract of `recvmmsg`.
    let limit = unsafe { limit.as_ref() }.map(wait_of);
    let begun = Instant::now();
    for at in 0..count {
        if at > 0 && limit.is_some_and(|limit| begun.elapsed() >= limit) {
            return at as c_int;
        }
        let waits = at == 0 || flags & libc::MSG_WAITFORONE == 0;
        let flags = flags & !libc::MSG_WAITFORONE;
        let flags = if waits { flags } else { flags | libc::MSG_DONTWAIT };
        // SAFETY: the program guarantees to `recvmmsg` that there are `count` messages.
        let (message, got) = unsafe {
            let message = messages.add(at as usize);
            (message, receive_header(fd, &entry, &raw mut (*message).msg_hdr, flags))
        };
        let Ok(got) = c_uint::try_from(got) else { return if at > 0 { at as c_int } else { -1 } };
        // SAFETY: as above.
        unsafe { (*message).msg_len = got };
    }
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

/// Converts the time limit of `recvmmsg`, which is checked after each message, as in the kernel.
fn wait_of(limit: &timespec) -> Duration {
    let seconds = u64::try_from(limit.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(limit.tv_nsec).unwrap_or(0))
}

// Functions called by programs compiled with buffer checks (_FORTIFY_SOURCE). Buffers that are too
// small are left to the C library's checks.

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    size: size_t,
    room: size_t,
) -> ssize_t {
    if table::find(fd).is_none() || size > room {
        return real!(__read_chk(fd: c_int, buffer: *mut c_void, size: size_t, room: size_t)
            -> ssize_t);
    }
    // SAFETY: the program upholds the contract of `read`.
    unsafe { read(fd, buffer, size) }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    size: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    if table::find(fd).is_none() || size > room {
        return real!(__recv_chk(fd: c_int, buffer: *mut c_void, size: size_t, room: size_t,
            flags: c_int) -> ssize_t);
    }
    // SAFETY: the program upholds the contract of `recv`.
    unsafe { recv(fd, buffer, size, flags) }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    size: size_t,
    room: size_t,
    flags: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> ssize_t {
    if table::find(fd).is_none() || size > room {
        return real!(__recvfrom_chk(fd: c_int, buffer: *mut c_void, size: size_t, room: size_t,
            flags: c_int, address: *mut sockaddr, len: *mut socklen_t) -> ssize_t);
    }
    // SAFETY: the program upholds the contract of `recvfrom`.
    unsafe { recvfrom(fd, buffer, size, flags, address, len) }
}

// Options.

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let hand_on = || {
        real!(setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void,
            len: socklen_t) -> c_int)
    };
    let Some(entry) = table::find(fd) else { return hand_on() };
    if c_int::try_from(len).is_err() {
        return fail(&errno(libc::EINVAL));
    }
    // SAFETY: the program upholds the contract of `setsockopt`.
    let bytes = unsafe { source(value, len as usize) };
    match bytes.and_then(|bytes| options::set(fd, &entry, level, name, bytes)) {
        Ok(Answer::System) => hand_on(),
        Ok(_) => 0,
        Err(error) => fail(&error),
    }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let hand_on = || {
        real!(getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void,
            len: *mut socklen_t) -> c_int)
    };
    let Some(entry) = table::find(fd) else { return hand_on() };
    let found = match options::get(fd, &entry, level, name) {
        Ok(Answer::System) => return hand_on(),
        Ok(found) => found,
        Err(error) => return fail(&error),
    };
    // SAFETY: the program upholds the contract of `getsockopt`.
    let Some(len) = (unsafe { len.as_mut() }) else { return fail(&errno(libc::EFAULT)) };
    let asked = *len as usize;
    // For RDS options, the kernel requires room for a whole int.
    let is_short = level == SOL_RDS && matches!(&found, Answer::Value(all) if asked < all.len());
    if is_short || c_int::try_from(*len).is_err() {
        return fail(&errno(libc::EINVAL));
    }
    // SAFETY: the program upholds the contract of `getsockopt`.
    let room = match unsafe { target(value, asked) } {
        Ok(room) => room,
        Err(error) => return fail(&error),
    };
    let mut put = |bytes: &[u8]| {
        let count = bytes.len().min(room.len());
        room[..count].copy_from_slice(&bytes[..count]);
        count
    };
    match found {
        Answer::System => 0,
        Answer::Value(bytes) => {
            *len = put(&bytes) as socklen_t;
            0
        }
        Answer::Info(bytes, size) if bytes.len() <= asked => {
            *len = put(&bytes) as socklen_t;
            c_int::try_from(size).unwrap_or(0)
        }
        Answer::Info(bytes, _) => {
            *len = bytes.len() as socklen_t;
            fail(&errno(libc::ENOSPC))
        }
    }
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let hand_on = || real!(ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int);
    let Some(entry) = table::find(fd) else { return hand_on() };
    match options::request(fd, &entry, request) {
        Ok(Reply::System) => hand_on(),
        Ok(_) if argument.is_null() => fail(&errno(libc::EFAULT)),
        Ok(Reply::Done) => 0,
        Ok(Reply::Int(value)) => {
            // SAFETY: the program upholds the contract of `ioctl`; this request returns an int.
            unsafe { argument.cast::<c_int>().write_unaligned(value) };
            0
        }
        Ok(Reply::Byte(value)) => {
            // SAFETY: the program upholds the contract of `ioctl`; this request returns a byte.
            unsafe { argument.cast::<u8>().write(value) };
            0
        }
        Err(error) => fail(&error),
    }
}
