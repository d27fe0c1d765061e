//! Opens a device in a separate process.
//!
//! The first open after a connect reads the partition table, and an open may block for as long as
//! the device's IO does. The process that serves that IO must not be the one that waits, so a child
//! opens the device. A child that takes too long is abandoned: it exits when its IO ends, at the
//! latest when the device is disconnected.

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
    /// The child did not exit in time and was abandoned.
    TimedOut,
}

/// Runs a child that opens the device, for at most `timeout`. The child exits with code 0 on
/// success, otherwise with a different code and the reason on standard error.
///
/// # Errors
/// The system's error if the child cannot be started.
pub fn probe(child: &mut Command, timeout: Duration) -> io::Result<Probe> {
    let mut child =
        child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let deadline = Instant::now() + timeout;
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
            abandon(child);
            return Ok(Probe::TimedOut);
        }
        std::thread::sleep(STEP);
    }
}

/// Kills a child and reaps it in a separate thread.
fn abandon(mut child: Child) {
    let reap = move || {
        if let Err(error) = child.kill().and_then(|()| child.wait()) {
            tracing::debug!("cannot end the process that opens the device: {error}");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("nbd-reap".into()).spawn(reap) {
        tracing::debug!("cannot reap the process that opens the device: {error}");
    }
}

/// Waits for at most `timeout` until udev has processed the kernel's events. Returns true if it
/// has. Without udev there is nothing to wait for.
pub fn settle(timeout: Duration) -> bool {
    if !Path::new("/run/udev/control").exists() {
        return true;
    }
    let mut settle = Command::new("udevadm");
    settle.arg("settle").arg(format!("--timeout={}", timeout.as_secs().max(1)));
    match probe(&mut settle, timeout) {
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
    fn a_probe_reports_the_result_of_its_child_within_a_bound() {
        let probe = |script, ms| probe(&mut sh(script), Duration::from_millis(ms)).unwrap();
        assert_eq!(probe("exit 0", 60_000), Probe::Opened);
        assert_eq!(probe("echo busy >&2; exit 1", 60_000), Probe::Refused("busy".into()));
        assert_eq!(probe("exit 3", 60_000), Probe::Refused("exit status: 3".into()));
        let begin = Instant::now();
        assert_eq!(probe("exec sleep 600", 50), Probe::TimedOut);
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
}
