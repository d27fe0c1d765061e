//! What a process does about itself.

use std::io;

/// Leaves the terminal and the process group of whoever started us (`setsid`).
///
/// # Errors
/// The system's error; EPERM, which a process that leads its group already gets, is none.
pub fn become_daemon() -> io::Result<()> {
    // SAFETY: setsid takes nothing and touches no memory.
    if unsafe { libc::setsid() } < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EPERM) {
            return Err(error);
        }
    }
    Ok(())
}
