//! Daily log reminders of a server certificate that expires soon.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use rtrs_core::rt::Clock;
use rtrs_core::time::Instant;
use rtrs_core::tls::TlsEndpoint;

/// Interval between checks of the certificate in use.
const LOOK_EVERY: Duration = Duration::from_secs(3600);
/// Interval between log lines.
const REMIND_EVERY: Duration = Duration::from_secs(24 * 3600);

/// Starts the reminder thread, which ends within an hour after the endpoint is dropped. Startup has
/// already logged the first warning.
pub(super) fn watch(endpoint: &Arc<TlsEndpoint>) -> std::io::Result<()> {
    let endpoint = Arc::downgrade(endpoint);
    thread::Builder::new().name("tls-expiry".into()).spawn(move || look(&endpoint))?;
    Ok(())
}

fn look(endpoint: &Weak<TlsEndpoint>) {
    let mut reminder = Reminder { last: Clock.now(), warned: true };
    loop {
        thread::sleep(LOOK_EVERY);
        let Some(endpoint) = endpoint.upgrade() else { return };
        if let Some(warning) = reminder.due(Clock.now(), endpoint.expiry_warning()) {
            tracing::warn!("{warning}");
        }
    }
}

/// Time of the last reminder.
struct Reminder {
    last: Instant,
    /// Whether a warning was logged, by a reminder or at startup.
    warned: bool,
}

impl Reminder {
    /// Returns the reminder that is due now.
    fn due(&mut self, now: Instant, warning: Option<String>) -> Option<String> {
        let Some(warning) = warning else {
            self.warned = false;
            return None;
        };
        if self.warned && now.since(self.last) < REMIND_EVERY {
            return None;
        }
        (self.last, self.warned) = (now, true);
        Some(warning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expiring_certificate_is_reported_once_a_day() {
        let start = Clock.now();
        let mut reminder = Reminder { last: start, warned: true };
        let hours = |hours: u32| start + LOOK_EVERY * hours;
        let soon = || Some("soon".to_owned());
        let mut warned = Vec::new();
        for hour in 1..=72 {
            warned.extend(reminder.due(hours(hour), soon()).map(|_| hour));
        }
        assert_eq!(warned, [24, 48, 72]);
        // A new certificate is valid at first, and later expires.
        assert_eq!(reminder.due(hours(73), None), None);
        assert_eq!(reminder.due(hours(74), soon()), soon());
        assert_eq!(reminder.due(hours(75), soon()), None);
    }
}
