//! Functions that create, duplicate and close descriptors, which the program calls instead of the C
//! library's.

use libc::{c_int, c_void};

use crate::calls::{check_type, serves};
use crate::hooks::fail;
use crate::memory::errno;
use crate::real::real;
use crate::table;

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn socketpair(
    family: c_int,
    kind: c_int,
    protocol: c_int,
    pair: *mut c_int,
) -> c_int {
    if serves(family) {
        let refused = check_type(kind, protocol).err();
        return fail(&refused.unwrap_or_else(|| errno(libc::EOPNOTSUPP)));
    }
    real!(socketpair(family: c_int, kind: c_int, protocol: c_int, pair: *mut c_int) -> c_int)
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    table::forget(fd);
    real!(close(fd: c_int) -> c_int)
}

/// Registers a duplicated descriptor.
fn duplicated(from: c_int, to: c_int) -> c_int {
    if to >= 0 && to != from {
        match table::find(from) {
            Some(entry) => table::duplicated(to, entry),
            None => table::forget(to),
        }
    }
    to
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn dup(fd: c_int) -> c_int {
    duplicated(fd, real!(dup(fd: c_int) -> c_int))
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    duplicated(fd, real!(dup2(fd: c_int, to: c_int) -> c_int))
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    duplicated(fd, real!(dup3(fd: c_int, to: c_int, flags: c_int) -> c_int))
}

/// The last argument is a number or a pointer, depending on the command, and is forwarded
/// unchanged.
// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    let result = real!(fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int);
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        return duplicated(fd, result);
    }
    result
}

// SAFETY: the function has the name and signature of the C library function it replaces.
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    let result = real!(fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int);
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        return duplicated(fd, result);
    }
    result
}
