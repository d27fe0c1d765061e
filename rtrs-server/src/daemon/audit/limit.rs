//! Rate limits for audit events that clients cause.
//!
//! Opens and closes cost a client nothing, and the queue of the audit log has room for a few
//! thousand events. Each client therefore has a budget, by name or, for clients without one, by
//! address; all clients without a name also share a budget. Events beyond it are counted. The next
//! event of that client or, after some time, the first suppressed one contains their number. The
//! operator's events are not limited.

use rtrs_core::proto::quota::Source;
use rtrs_core::time::{Duration, Instant};

use crate::audit::{AuditEvent, AuditKind};

/// Burst of events of one client, and the interval after which one more is recorded.
const CLIENT: Rate = Rate { burst: 512, pause: Duration::from_millis(500) };
/// Burst and interval for all clients without a name together.
const NAMELESS: Rate = Rate { burst: 1024, pause: Duration::from_millis(250) };
/// Maximum number of tracked clients. The one that has been idle longest is dropped first.
const CLIENTS_MAX: usize = 512;
/// Time after which suppressed events are reported if no further event is recorded.
const OVERDUE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy)]
struct Rate {
    burst: u64,
    pause: Duration,
}

/// Remaining budget.
struct Budget {
    events: u64,
    /// Start of the interval after which the budget grows by one event.
    since: Instant,
}

impl Budget {
    const fn new(now: Instant, rate: Rate) -> Self {
        Self { events: rate.burst, since: now }
    }

    fn refill(&mut self, now: Instant, rate: Rate) {
        let pauses = now.since(self.since).as_nanos() / rate.pause.as_nanos();
        let pauses = u64::try_from(pauses).unwrap_or(u64::MAX);
        if pauses >= rate.burst - self.events {
            (self.events, self.since) = (rate.burst, now);
        } else {
            self.events += pauses;
            self.since = self.since + rate.pause * u32::try_from(pauses).unwrap_or(u32::MAX);
        }
    }
}

#[derive(Clone, PartialEq)]
enum Key {
    Name(String),
    Address(Source),
}

struct Client {
    key: Key,
    budget: Budget,
    last: Instant,
    left_out: Option<LeftOut>,
}

/// Suppressed events, represented by the first one.
struct LeftOut {
    first: AuditEvent,
    count: u64,
    since: Instant,
}

impl LeftOut {
    fn event(self) -> AuditEvent {
        // Excludes the first event, which is itself recorded.
        AuditEvent { left_out: self.first.left_out + self.count - 1, ..self.first }
    }
}

/// Budgets of all clients.
pub(super) struct Limits {
    clients: Vec<Client>,
    nameless: Budget,
    /// Events of clients that have been dropped from the table.
    due: Vec<AuditEvent>,
}

impl Limits {
    pub(super) const fn new(now: Instant) -> Self {
        Self { clients: Vec::new(), nameless: Budget::new(now, NAMELESS), due: Vec::new() }
    }

    /// Returns the event to record now, or None if it is suppressed.
    pub(super) fn admit(&mut self, now: Instant, event: AuditEvent) -> Option<AuditEvent> {
        let Some(key) = key_of(&event) else { return Some(event) };
        let is_nameless = matches!(key, Key::Address(_));
        self.nameless.refill(now, NAMELESS);
        let at = self.client(now, key);
        let client = &mut self.clients[at];
        client.last = now;
        client.budget.refill(now, CLIENT);
        if client.budget.events == 0 || (is_nameless && self.nameless.events == 0) {
            match &mut client.left_out {
                Some(left_out) => left_out.count += 1 + event.left_out,
                none => *none = Some(LeftOut { first: event, count: 1, since: now }),
            }
            return None;
        }
        client.budget.events -= 1;
        if is_nameless {
            self.nameless.events -= 1;
        }
        let before = client.left_out.take();
        let left_out = before.map_or(0, |before| before.count + before.first.left_out);
        Some(AuditEvent { left_out: event.left_out + left_out, ..event })
    }

    /// Returns an event that represents events suppressed some time ago.
    pub(super) fn overdue(&mut self, now: Instant) -> Option<AuditEvent> {
        self.due.pop().or_else(|| {
            let is_due = |left_out: &mut LeftOut| now.since(left_out.since) >= OVERDUE;
            let mut clients = self.clients.iter_mut();
            clients.find_map(|client| client.left_out.take_if(is_due)).map(LeftOut::event)
        })
    }

    /// Returns all remaining events that represent suppressed ones, when the log is closed.
    pub(super) fn rest(&mut self) -> Vec<AuditEvent> {
        let mut rest = std::mem::take(&mut self.due);
        rest.extend(
            self.clients.iter_mut().filter_map(|client| client.left_out.take()).map(LeftOut::event),
        );
        rest
    }

    /// Returns the index of a client in the table, adding it if necessary.
    fn client(&mut self, now: Instant, key: Key) -> usize {
        if let Some(at) = self.clients.iter().position(|client| client.key == key) {
            return at;
        }
        let client = Client { key, budget: Budget::new(now, CLIENT), last: now, left_out: None };
        if self.clients.len() < CLIENTS_MAX {
            self.clients.push(client);
            return self.clients.len() - 1;
        }
        let quietest = self.clients.iter().enumerate().min_by_key(|(_, client)| client.last);
        let at = quietest.map_or(0, |(at, _)| at);
        let gone = std::mem::replace(&mut self.clients[at], client);
        self.due.extend(gone.left_out.map(LeftOut::event));
        at
    }
}

/// Key of the client that caused an event; None for the operator's events.
fn key_of(event: &AuditEvent) -> Option<Key> {
    match event.event {
        AuditKind::Authenticate
        | AuditKind::Connect
        | AuditKind::Open
        | AuditKind::Close
        | AuditKind::Disconnect => match &event.identity {
            Some(name) => Some(Key::Name(name.clone())),
            None => event.address.map(|address| Key::Address(Source::of(address.ip()))),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::AuditResult;

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    fn event(kind: AuditKind, identity: Option<&str>, address: [u8; 4]) -> AuditEvent {
        AuditEvent {
            identity: identity.map(str::to_owned),
            address: Some((address, 1).into()),
            ..AuditEvent::new(kind, AuditResult::Ok)
        }
    }

    #[test]
    fn a_client_that_keeps_opening_leaves_budget_for_others() {
        let mut limits = Limits::new(at(0));
        let hostile = || event(AuditKind::Open, Some("intruder"), [10, 0, 0, 1]);
        let passed = (0..10_000).filter(|_| limits.admit(at(0), hostile()).is_some()).count();
        assert_eq!(passed as u64, CLIENT.burst);
        let other = event(AuditKind::Connect, Some("db1"), [10, 0, 0, 1]);
        assert_eq!(limits.admit(at(0), other.clone()), Some(other));
        // The next recorded event contains the number of suppressed ones.
        let next = limits.admit(at(1), hostile()).unwrap();
        assert_eq!(next.left_out, 10_000 - CLIENT.burst);
        assert_eq!(limits.admit(at(1), hostile()).unwrap().left_out, 0);
        assert_eq!(limits.admit(at(1), hostile()), None);
        assert_eq!(limits.admit(at(1), hostile()), None);
        assert_eq!(limits.overdue(at(10)), None);
        assert_eq!(limits.overdue(at(11)).unwrap().left_out, 1);
        assert_eq!(limits.overdue(at(1000)), None);
    }

    #[test]
    fn operator_actions_are_always_recorded() {
        let mut limits = Limits::new(at(0));
        use AuditKind::{Evict, ExportSet, Reload, SessionDisconnect};
        for kind in [Evict, SessionDisconnect, Reload, ExportSet] {
            let evicted = event(kind, Some("intruder"), [10, 0, 0, 1]);
            assert!((0..10_000).all(|_| limits.admit(at(0), evicted.clone()).is_some()));
        }
    }

    #[test]
    fn many_addresses_share_one_budget_and_all_events_are_counted() {
        let mut limits = Limits::new(at(0));
        let (mut passed, mut counted) = (0, 0);
        for number in 0..10_000_u32 {
            let [_, a, b, c] = number.to_be_bytes();
            let admitted = limits.admit(at(0), event(AuditKind::Open, None, [10, a, b, c]));
            passed += u64::from(admitted.is_some());
            counted += admitted.map_or(0, |event| 1 + event.left_out);
        }
        assert_eq!(passed, NAMELESS.burst);
        let named = event(AuditKind::Open, Some("db1"), [10, 0, 0, 1]);
        assert!(limits.admit(at(0), named).is_some(), "a client with a name is not kept out");
        counted += limits.rest().iter().map(|event| 1 + event.left_out).sum::<u64>();
        assert_eq!(counted, 10_000);
    }
}
