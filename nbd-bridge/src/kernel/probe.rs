//! Opening a device, in a separate process.
//!
//! The first open after a connect reads the partition table, and an open may wait for IO for as
//! long as the device does. The process that carries that IO must not be the one that waits, so a
//! child opens the device. A child that takes too long is left behind: it ends when its IO does, at
//! the latest when the device is disconnected.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Polling interval.
const STEP: Duration = Duration::from_millis(5);

/// Result of opening a device in a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// The device was opened and closed again.
    Opened,
    /// The open failed; this is the child's standard error output.
    Refused(String),
    /// The child did not end in time and was left behind.
    TooLong,
}

/// Runs a child that opens the device, for `patience` at most. The child exits with code 0 on
/// success, otherwise with another code and its reason on standard error.
///
/// # Errors
/// The system's error when the child cannot be started.
pub fn probe(child: &mut Command, patience: Duration) -> io::Result<Probe> {
    let mut child =
        child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let deadline = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait()? {
            if status.success() {
                return Ok(Probe::Opened);
            }
            let mut text = String::new();
            if let Some(out) = child.stderr.take() {
                out.take(4096).read_to_string(&mut text)?;
            }
            let text = text.trim();
            let text = if text.is_empty() { status.to_string() } else { text.to_owned() };
            return Ok(Probe::Refused(text));
        }
        if Instant::now() >= deadline {
            leave(child);
            return Ok(Probe::TooLong);
        }
        std::thread::sleep(STEP);
    }
}

/// Reaps a child as soon as possible, without waiting for it here.
fn leave(mut child: Child) {
    let reap = move || {
        if let Err(error) = child.kill().and_then(|()| child.wait()) {
            tracing::debug!("a process that opens the device was not ended: {error}");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("nbd-reap".into()).spawn(reap) {
        tracing::debug!("cannot wait for a process that opens the device: {error}");
    }
}

/// Waits until udev has processed the kernel's events, for `patience` at most. Returns true when it
/// has. Without udev there is nothing to wait for.
pub fn settle(patience: Duration) -> bool {
    if !Path::new("/run/udev/control").exists() {
        return true;
    }
    let mut settle = Command::new("udevadm");
    settle.arg("settle").arg(format!("--timeout={}", patience.as_secs().max(1)));
    match probe(&mut settle, patience) {
        Ok(Probe::Opened) => true,
        Ok(_) => false,
        Err(error) => {
            tracing::debug!("cannot wait for udev: {error}");
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_child_has_its_say_and_its_bound() {
        let probe = |script, ms| probe(&mut sh(script), Duration::from_millis(ms)).unwrap();
        assert_eq!(probe("exit 0", 10_000), Probe::Opened);
        assert_eq!(probe("echo busy >&2; exit 1", 10_000), Probe::Refused("busy".into()));
        assert_eq!(probe("exit 3", 10_000), Probe::Refused("exit status: 3".into()));
        let begin = Instant::now();
        assert_eq!(probe("exec sleep 20", 50), Probe::TooLong);
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
}
