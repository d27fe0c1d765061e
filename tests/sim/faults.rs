//! Plan of faults, drawn from the seed before the run.
//!
//! Every network fault heals and every server restarts before the end of the plan, so that
//! afterwards the cluster is whole and all IO must complete.

mod twins;

use std::net::IpAddr;

use rtrs_client::Policy;
use rtrs_core::fabric::sim::{Fault, LinkOptions};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};

use super::options::{FaultMix, Ids, MS, Removal, ReportedIds, Truncation};
pub(super) use twins::twins;

/// Time between the end of other servers, if they must end, and a restart of the server.
const OTHERS_END_AHEAD: Duration = Duration::from_millis(300);

/// Action of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Changes the simulated world.
    World(Fault),
    /// Moves one end's queue pair into the error state, after this number of further work requests
    /// or, with `receive`, of further receives.
    QpError { at_client: bool, after: u32, receive: bool },
    /// Ends the server's process; with `power`, through a power failure of its machine.
    StopServer { power: bool },
    /// Asks the server to stop, as by a signal or, with `drain`, path by path. Whatever is left of
    /// it ends before the next server starts.
    AskServer { drain: bool },
    /// Ends the client's process; with `power`, through a power failure of its machine.
    StopClient { power: bool },
    /// Detaches the client while its IO is in flight.
    LeaveClient,
    /// Attaches a client as another session.
    StartClient,
    /// Stops a core for this long; the client's cores are numbered first.
    Stall { core: usize, time: Duration },
    /// Makes this many memory registrations at one end fail.
    NoMemory { at_client: bool, times: u32 },
    /// Starts a server.
    StartServer,
    /// Takes a path from the session within this time: permanently if `good` is set, otherwise
    /// until `Have`.
    Leave { path: usize, good: bool, within: Duration },
    /// Gives the session a path: a missing one is added, any other is reconnected.
    Have { path: usize, within: Duration },
    /// Sets the session's path selection policy.
    Choose(Policy),
    /// Makes the users of one core's NBD connection, or of all, close it and reconnect to the
    /// bridge of the core that is this many cores further on.
    Reconnect { only: Option<usize>, by: usize },
    /// Moves one of the server's addresses to another server, or back; its connections stay.
    Move { path: usize },
    /// Gives one of the server's addresses to a second process with its disk, or ends that process.
    Twin { path: Option<usize> },
    /// Truncates the backing file, or restores its length.
    Resize { sectors: u32 },
    /// Resizes the device to a multiple of the size in use.
    Grow { times: u32 },
    /// Sets the identity that the server reports after its next start.
    ReportIds(ReportedIds),
    /// Removes the session's export by force, as the server's operator can.
    RemoveExport,
    /// Acts on the session's second volume.
    Second(SecondAct),
}

/// Action on a second volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SecondAct {
    /// Closes the volume with its user's IO in flight.
    Close,
    /// Adds the volume to the session again.
    Add,
    /// Makes servers start without the volume's export.
    Hide,
    /// Exports the volume.
    Show,
}

/// Draws the actions on the second volume, in chronological order: the volume is closed and
/// re-added, or the server is restarted and lacks the volume for a while.
pub(super) fn second(from: Instant, time: Duration, prng: &mut Prng) -> Vec<(Instant, Act)> {
    let mut plan = Vec::new();
    for _ in 0..2 + prng.below(5) {
        let at = from + prng.duration(Duration::ZERO..=time * 3 / 4);
        let back = at + prng.duration(Duration::ZERO..=200 * MS);
        if prng.chance(Ratio::new(2, 3)) {
            plan.push((at, Act::Second(SecondAct::Close)));
            plan.push((back, Act::Second(SecondAct::Add)));
        } else {
            let away = prng.duration(Duration::from_micros(100)..=20 * MS);
            plan.push((at, Act::Second(SecondAct::Hide)));
            plan.push((at, Act::StopServer { power: false }));
            plan.push((at + away, Act::StartServer));
            plan.push((back.max(at + away), Act::Second(SecondAct::Show)));
        }
    }
    plan.sort_by_key(|(at, _)| *at);
    plan
}

/// Draws a truncation of the backing file after `from`, and what follows, in chronological order.
pub(super) fn truncate(
    truncation: Truncation,
    sectors: u32,
    from: Instant,
    time: Duration,
    prng: &mut Prng,
) -> Vec<(Instant, Act)> {
    let mut now = from + prng.duration(Duration::ZERO..=time / 3);
    let left = 1 + prng.below(u64::from(sectors - 1)) as u32;
    let mut plan = vec![(now, Act::Resize { sectors: left })];
    let mut restart = |plan: &mut Vec<_>, at: Instant| {
        let away = prng.duration(Duration::from_micros(100)..=20 * MS);
        plan.push((at, Act::StopServer { power: false }));
        plan.push((at + away, Act::StartServer));
    };
    if truncation.short_export {
        restart(&mut plan, now + time / 8);
    }
    if truncation.regained {
        now = now + time / 3;
        plan.push((now, Act::Resize { sectors }));
        restart(&mut plan, now + time / 16);
    }
    plan
}

/// Draws resizes of the device, in chronological order, some in quick succession.
pub(super) fn grow(from: Instant, time: Duration, prng: &mut Prng) -> Vec<(Instant, Act)> {
    let mut plan = Vec::new();
    for _ in 0..1 + prng.below(4) {
        let mut at = from + prng.duration(Duration::ZERO..=time);
        for _ in 0..1 + prng.below(3) {
            plan.push((at, Act::Grow { times: 1 + prng.below(4) as u32 }));
            at = at + prng.duration(Duration::ZERO..=5 * MS);
        }
    }
    plan.retain(|(at, _)| *at < from + time);
    plan.sort_by_key(|(at, _)| *at);
    plan
}

/// Draws the removal of the session's export, in chronological order, with all links down if the
/// session must not notice the removal.
pub(super) fn remove(
    removal: Removal,
    links: &[(IpAddr, IpAddr)],
    from: Instant,
    time: Duration,
    prng: &mut Prng,
) -> Vec<(Instant, Act)> {
    let at = from + prng.duration(Duration::ZERO..=time * 2 / 3);
    let back = at + prng.duration(MS..=time / 4);
    let mut plan = vec![(at, Act::RemoveExport)];
    for &(a, b) in links.iter().filter(|_| removal.unseen) {
        plan.insert(0, (at, Act::World(Fault::LinkDown(a, b))));
        plan.push((back, Act::World(Fault::LinkUp(a, b))));
    }
    plan
}

/// Draws restarts of the server with another identity, in chronological order. If only a connected
/// path distinguishes the session's server from others, the others end long before a restart: their
/// messages must arrive while that path is still connected.
pub(super) fn report_ids(
    ids: Ids,
    from: Instant,
    time: Duration,
    prng: &mut Prng,
) -> Vec<(Instant, Act)> {
    let mut plan = Vec::new();
    for third in 1..3 {
        let (before, reported) = (ids.home[third as usize - 1], ids.home[third as usize]);
        let at = from + time * third / 3 + prng.duration(Duration::ZERO..=time / 16);
        let away = prng.duration(Duration::from_micros(100)..=200 * MS);
        if before != reported {
            plan.push((at, Act::ReportIds(reported)));
        }
        // Other servers may take over once the session knows the IDs reported by its own server.
        if before != reported || (ids.is_beside() && ids.home[0] != reported) {
            let stop = at + OTHERS_END_AHEAD;
            plan.push((stop, Act::StopServer { power: false }));
            plan.push((stop + away, Act::StartServer));
        }
    }
    plan
}

/// Draws moves of addresses between `from` and `until`, in chronological order.
pub(super) fn moves(
    paths: usize,
    from: Instant,
    until: Instant,
    prng: &mut Prng,
) -> Vec<(Instant, Act)> {
    let mut plan = Vec::new();
    let mut now = from;
    loop {
        now = now + prng.duration(MS..=400 * MS);
        if now >= until {
            return plan;
        }
        plan.push((now, Act::Move { path: prng.index(paths) }));
    }
}

/// Draws closes of NBD connections between `from` and `until`, in chronological order.
pub(super) fn reconnects(
    cores: usize,
    from: Instant,
    until: Instant,
    prng: &mut Prng,
) -> Vec<(Instant, Act)> {
    let mut plan = Vec::new();
    let mut now = from;
    loop {
        now = now + prng.duration(MS..=150 * MS);
        if now >= until {
            return plan;
        }
        let one = prng.chance(Ratio::new(1, 3)).then(|| prng.index(cores));
        plan.push((now, Act::Reconnect { only: one, by: prng.index(cores) }));
    }
}

/// Draws an operator's changes to the session's paths between `from` and `until`, in chronological
/// order.
pub(super) fn operate(
    paths: std::ops::Range<usize>,
    from: Instant,
    until: Instant,
    prng: &mut Prng,
) -> Vec<(Instant, Act)> {
    let mut plan = Vec::new();
    let mut now = from;
    loop {
        now = now + prng.duration(MS..=200 * MS);
        if now >= until {
            return plan;
        }
        let path = paths.start + prng.index(paths.len());
        let within = prng.duration(Duration::ZERO..=300 * MS);
        let act = match prng.below(8) {
            0..=2 => Act::Leave { path, good: true, within },
            3 => Act::Leave { path, good: false, within },
            4 => {
                let all = [Policy::RoundRobin, Policy::MinInflight, Policy::MinLatency];
                Act::Choose(all[prng.index(all.len())])
            }
            _ => Act::Have { path, within },
        };
        plan.push((now, act));
    }
}

/// Draws a plan from `from` to `until`, in chronological order.
pub(super) fn plan(
    mix: &FaultMix,
    links: &[(IpAddr, IpAddr)],
    usual: &LinkOptions,
    from: Instant,
    until: Instant,
    prng: &mut Prng,
) -> Vec<(Instant, Act)> {
    let mut plan = Vec::new();
    if mix.is_empty() {
        return plan;
    }
    let mut whole_at = vec![from; links.len()];
    let (mut server_at, mut client_at) = (from, from);
    let mut now = from;
    loop {
        now = now + prng.duration(Duration::from_micros(10)..=mix.gap_max);
        if now >= until {
            break;
        }
        let mut end = (now + prng.duration(Duration::from_micros(100)..=mix.lasts_max)).min(until);
        let kind = weighted(prng, &mix.weights());
        let at_client = prng.chance(Ratio::new(1, 2));
        match kind {
            0..=3 => {}
            4 => {
                let after = prng.below(30) as u32;
                let receive = after.is_multiple_of(5);
                plan.push((now, Act::QpError { at_client, after, receive }));
                continue;
            }
            5..=7 => {
                if now > server_at {
                    let away = prng.duration(Duration::from_micros(100)..=300 * MS);
                    end = (now + away).min(until);
                    server_at = end + 50 * MS;
                    let stop = match kind {
                        7 => Act::AskServer { drain: at_client },
                        _ => Act::StopServer { power: kind == 6 },
                    };
                    plan.push((now, stop));
                    plan.push((end, Act::StartServer));
                }
                continue;
            }
            8 => {
                let (core, time) = (prng.index(4), prng.duration(MS..=500 * MS));
                plan.push((now, Act::Stall { core, time: time.min(until - now) }));
                continue;
            }
            10 | 12 => {
                if now > client_at {
                    let away = prng.duration(Duration::from_micros(100)..=300 * MS);
                    end = (now + away.min(mix.away_max)).min(until);
                    client_at = end + 50 * MS;
                    let power = prng.chance(Ratio::new(1, 3));
                    let stop =
                        if kind == 12 { Act::LeaveClient } else { Act::StopClient { power } };
                    plan.push((now, stop));
                    plan.push((end, Act::StartClient));
                }
                continue;
            }
            11 => {
                if whole_at.iter().all(|&at| at < now) {
                    let late = prng.index(links.len());
                    end = give_up(&mut plan, links, late, mix.lasts_max, now, prng);
                    whole_at.fill(end + 200 * MS);
                }
                continue;
            }
            13 => {
                if whole_at.iter().all(|&at| at < now) {
                    end = late(&mut plan, links, mix.lasts_max, now, prng);
                    whole_at.fill(end + 100 * MS);
                }
                continue;
            }
            14 => {
                if now > server_at && whole_at.iter().all(|&at| at < now) {
                    end = late_answers(&mut plan, links, now, prng);
                    server_at = end + 50 * MS;
                    whole_at.fill(server_at);
                }
                continue;
            }
            _ => {
                let times = 1 + prng.below(4) as u32;
                plan.push((now, Act::NoMemory { at_client, times }));
                continue;
            }
        }
        let first = usize::from(mix.spare);
        let whole: Vec<usize> = (first..links.len()).filter(|&at| whole_at[at] < now).collect();
        if whole.is_empty() {
            continue;
        }
        let at = whole[prng.index(whole.len())];
        whole_at[at] = end;
        let (a, b) = links[at];
        let (from, to) = if prng.chance(Ratio::new(1, 2)) { (a, b) } else { (b, a) };
        let mut both = |start: Fault, stop: Fault| {
            plan.push((now, Act::World(start)));
            plan.push((end, Act::World(stop)));
        };
        match kind {
            0 => both(Fault::LinkDown(a, b), Fault::LinkUp(a, b)),
            1 => both(Fault::Silence(from, to), Fault::Unsilence(from, to)),
            2 => {
                both(Fault::Silence(from, to), Fault::Unsilence(from, to));
                both(Fault::Silence(to, from), Fault::Unsilence(to, from));
            }
            _ => {
                let slow = LinkOptions {
                    delay: prng.duration(MS..=50 * MS),
                    jitter: prng.duration(Duration::ZERO..=20 * MS),
                    ..*usual
                };
                both(Fault::Change(from, to, slow), Fault::Restore(from, to));
            }
        }
    }
    plan.sort_by_key(|&(at, _)| at);
    plan
}

/// Silences all paths for the client; requests on one path still arrive, but late, when another
/// path is up again. Returns the time when that is over.
fn give_up(
    plan: &mut Vec<(Instant, Act)>,
    links: &[(IpAddr, IpAddr)],
    late: usize,
    delay_max: Duration,
    now: Instant,
    prng: &mut Prng,
) -> Instant {
    let delay = prng.duration(delay_max / 2..=delay_max);
    let end = now + delay;
    let slow = LinkOptions { delay, jitter: 20 * MS, ..LinkOptions::default() };
    for (at, &(a, b)) in links.iter().enumerate() {
        if at == late {
            plan.push((now, Act::World(Fault::Change(a, b, slow))));
            plan.push((end, Act::World(Fault::Restore(a, b))));
            continue;
        }
        let from = now + prng.duration(Duration::ZERO..=delay / 4);
        let to = now + prng.duration(delay / 2..=delay);
        for (x, y) in [(a, b), (b, a)] {
            plan.push((from, Act::World(Fault::Silence(x, y))));
            plan.push((to, Act::World(Fault::Unsilence(x, y))));
        }
    }
    end
}

/// Delays the client's requests on one path, so that they arrive long after the client has given up
/// the path. Returns the time when that is over.
fn late(
    plan: &mut Vec<(Instant, Act)>,
    links: &[(IpAddr, IpAddr)],
    delay_max: Duration,
    now: Instant,
    prng: &mut Prng,
) -> Instant {
    let (from, to) = links[prng.index(links.len())];
    let delay = prng.duration(delay_max / 2..=delay_max);
    let slow = LinkOptions { delay, jitter: 20 * MS, ..LinkOptions::default() };
    let end = now + delay;
    plan.push((now, Act::World(Fault::Change(from, to, slow))));
    plan.push((end, Act::World(Fault::Restore(from, to))));
    end
}

/// Delays the server's answers on one path while its machine loses power and restarts. Returns the
/// time when that is over.
fn late_answers(
    plan: &mut Vec<(Instant, Act)>,
    links: &[(IpAddr, IpAddr)],
    now: Instant,
    prng: &mut Prng,
) -> Instant {
    let (client, server) = links[prng.index(links.len())];
    let delay = prng.duration(50 * MS..=150 * MS);
    let slow = LinkOptions { delay, jitter: 5 * MS, ..LinkOptions::default() };
    let cut = now + prng.duration(MS..=40 * MS);
    let back = cut + prng.duration(MS..=20 * MS);
    plan.push((now, Act::World(Fault::Change(server, client, slow))));
    plan.push((cut, Act::StopServer { power: true }));
    plan.push((back, Act::StartServer));
    plan.push((back, Act::World(Fault::Restore(server, client))));
    now + delay + 100 * MS
}

/// Draws an index by weight. The weights must not all be zero.
fn weighted(prng: &mut Prng, weights: &[u32]) -> usize {
    let mut left = prng.below(weights.iter().map(|&w| u64::from(w)).sum());
    for (at, &weight) in weights.iter().enumerate() {
        match left.checked_sub(u64::from(weight)) {
            Some(rest) => left = rest,
            None => return at,
        }
    }
    0
}
