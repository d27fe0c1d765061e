//! Results of calls to libibverbs and librdmacm.

use std::io;

/// Converts the result of a call that returns 0, an errno, or -1 with errno set.
pub(super) fn outcome(code: libc::c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        errno if errno > 0 => Err(io::Error::from_raw_os_error(errno)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Converts the result of a call that takes an event. Returns false if no event is pending.
pub(super) fn taken(code: libc::c_int) -> io::Result<bool> {
    if code == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR) => Ok(false),
        _ => Err(error),
    }
}
