//! Dates and times in UTC, as text.

use rustls::pki_types::UnixTime;

/// Seconds in a day.
pub(super) const DAY: u64 = 24 * 3600;

/// Formats a time in UTC.
pub(super) fn time(at: UnixTime) -> String {
    let second = at.as_secs() % DAY;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{} {hour:02}:{minute:02}:{second:02} UTC", date(at))
}

/// Formats a day in UTC as YYYY-MM-DD. The computation starts each year in March, so that a leap
/// day is the year's last day.
fn date(at: UnixTime) -> String {
    let days = at.as_secs() / DAY + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, next) = (day - (153 * month + 2) / 5 + 1, u64::from(month >= 10));
    let month = if month < 10 { month + 3 } else { month - 9 };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + next)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn days_have_dates() {
        for (seconds, text) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (1_767_225_599, "2025-12-31"),
            (1_767_225_600, "2026-01-01"),
        ] {
            let at = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
            assert_eq!(date(at), text);
        }
        let at = UnixTime::since_unix_epoch(Duration::from_secs(1_767_225_599));
        assert_eq!(time(at), "2025-12-31 23:59:59 UTC");
    }
}
