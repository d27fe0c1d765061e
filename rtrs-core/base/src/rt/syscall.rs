//! Results of system calls.

use std::io;

/// Converts the result of a system call that returns 0, or -1 with errno set.
pub(super) fn check(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
