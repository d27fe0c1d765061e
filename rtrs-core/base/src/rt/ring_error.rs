//! Errors with which the system refuses an io_uring: their causes, and what an operator can change.

use std::fs;
use std::io;

use super::process::{locked_memory_limit, privileges};

/// Facts about the host that explain a refusal.
#[derive(Clone, Copy, Debug)]
struct Host {
    /// Value of the sysctl kernel.io_uring_disabled; None if the kernel has no such sysctl.
    disabled: Option<u32>,
    /// Maximum locked memory of this process in bytes; None without a limit.
    locked_memory: Option<u64>,
}

impl Host {
    fn detect() -> Self {
        let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
        let is_exempt = privileges().is_ok_and(|privileges| privileges.ipc_lock);
        Self {
            disabled: disabled.and_then(|text| text.trim().parse().ok()),
            locked_memory: locked_memory_limit().filter(|_| !is_exempt),
        }
    }
}

/// Adds the cause and the remedy to an error from io_uring_setup. Other errors stay as they are.
pub(super) fn explained(error: io::Error) -> io::Error {
    match explanation(&error, Host::detect()) {
        Some(text) => io::Error::new(error.kind(), text),
        None => error,
    }
}

fn explanation(error: &io::Error, host: Host) -> Option<String> {
    match error.raw_os_error()? {
        libc::EPERM => {
            let mut text = "io_uring is refused: allow io_uring_setup, io_uring_enter and \
                            io_uring_register in the seccomp profile"
                .to_owned();
            if let Some(value) = host.disabled.filter(|value| *value > 0) {
                text += &format!(", or set sysctl kernel.io_uring_disabled=0 (it is {value})");
            }
            Some(text)
        }
        libc::ENOMEM => host.locked_memory.map(|bytes| {
            format!(
                "io_uring needs locked memory, but the limit of this user is {} KiB: raise the \
                 limit (LimitMEMLOCK= in a unit, ulimit -l), or use fewer shards (--shards)",
                bytes >> 10
            )
        }),
        libc::ENOSYS => Some(
            "there is no io_uring: use Linux 6.1 or newer, built with CONFIG_IO_URING, and allow \
             io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile"
                .to_owned(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(errno: i32, disabled: Option<u32>, locked_memory: Option<u64>) -> Option<String> {
        let host = Host { disabled, locked_memory };
        explanation(&io::Error::from_raw_os_error(errno), host)
    }

    #[test]
    fn a_refused_ring_names_the_remedy() {
        let seccomp = "io_uring is refused: allow io_uring_setup, io_uring_enter and \
                       io_uring_register in the seccomp profile";
        for value in [None, Some(0)] {
            assert_eq!(text(libc::EPERM, value, None).as_deref(), Some(seccomp), "{value:?}");
        }
        let sysctl = format!("{seccomp}, or set sysctl kernel.io_uring_disabled=0 (it is 2)");
        assert_eq!(text(libc::EPERM, Some(2), None), Some(sysctl));
        let locked = "io_uring needs locked memory, but the limit of this user is 64 KiB: raise \
                      the limit (LimitMEMLOCK= in a unit, ulimit -l), or use fewer shards \
                      (--shards)";
        assert_eq!(text(libc::ENOMEM, None, Some(65_536)).as_deref(), Some(locked));
        assert!(text(libc::ENOSYS, None, None).unwrap().starts_with("there is no io_uring: use"));
    }

    #[test]
    fn other_errors_keep_their_text() {
        assert_eq!(text(libc::ENOMEM, None, None), None, "no limit explains it");
        assert_eq!(text(libc::EMFILE, Some(2), Some(0)), None);
        let error = explained(io::Error::from_raw_os_error(libc::EMFILE));
        assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
        let error = explained(io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
}
