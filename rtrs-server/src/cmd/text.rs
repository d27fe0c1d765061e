//! Formatting of sizes and losses of access in the output of commands.

use std::collections::BTreeSet;
use std::net::IpAddr;

use rtrs_core::settings::printable;

use crate::control_protocol::Losses;
use crate::stats::Revoked;

/// Line of a dry run for a change that would need `--force`.
pub(super) const NEEDS_FORCE: &str = "without --force, this change would be refused\n";

/// Formats a size in the largest unit that gives a value of at least one.
pub(super) fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut size = bytes as f64;
    let mut unit = "B";
    for next in units {
        if size < 1024.0 {
            break;
        }
        size /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{size:.1} {unit}") }
}

/// Formats a time in its two largest units.
pub(super) fn age(millis: u64) -> String {
    let seconds = millis / 1000;
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{:02}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{minutes:02}m"),
        (days, hours, _) => format!("{days}d{hours:02}h"),
    }
}

/// Formats losses of clients, with `would` before each verb.
pub(super) fn losses_text(losses: &Losses, would: &str) -> String {
    let Losses { closed, revoked } = losses;
    let closed = closed
        .iter()
        .map(|name| format!("{would}closed: {}; no client may open it\n", printable(name)));
    let closed: String = closed.collect();
    closed + &all_revoked_text(revoked, would)
}

/// Formats the losses of sessions, with `would` before each verb.
pub(super) fn all_revoked_text(revoked: &[Revoked], would: &str) -> String {
    let mut out: String = revoked.iter().map(|one| revoked_text(one, would)).collect();
    let ended = revoked.iter().filter(|one| one.paths_left == 0).count();
    if ended > 0 {
        out += &format!("{} {would}ended\n", counted(ended, "session"));
    }
    out
}

/// Formats the loss of a session.
fn revoked_text(one: &Revoked, would: &str) -> String {
    let Revoked { session, identity, paths, paths_left, peers } = one;
    let (session, identity) = (printable(session), identity.as_deref().map(printable));
    let who = identity.map(|who| format!(" ({who})")).unwrap_or_default();
    let paths = match paths_left {
        0 => counted(*paths, "path"),
        left => format!("{paths} of {}", counted(paths + left, "path")),
    };
    format!("{would}ended: {paths} of session {session}{who}{}\n", from_text(peers))
}

/// Formats the addresses of a session's clients.
pub(super) fn from_text(peers: &BTreeSet<IpAddr>) -> String {
    let peers: Vec<String> = peers.iter().map(ToString::to_string).collect();
    if peers.is_empty() { String::new() } else { format!(" from {}", peers.join(", ")) }
}

pub(super) fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_use_their_largest_unit() {
        for (size, text) in
            [(0, "0 B"), (1023, "1023 B"), (1 << 30, "1.0 GiB"), (3 << 19, "1.5 MiB")]
        {
            assert_eq!(bytes(size), text);
        }
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
    }
}
